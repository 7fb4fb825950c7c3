"""Runs the programs of docs/python.md. Those with a trainer of their own are compared with the same trainer on one
process, with plain attention and whole rows."""

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.rank_pool import run_on_ranks
from support.served import write_python
from transformers import AutoModelForCausalLM, Qwen3Config, Trainer, TrainingArguments

from ulysses_cli.run.key import KEY
from ulysses_cli.train.sequence_parallel import SequenceParallel

PAGE = (Path(__file__).parents[2] / "docs/python.md").read_text()
PROGRAMS = dict(re.findall(r"```python (\S+)\n(.*?)```", PAGE, re.DOTALL))
TINY = (Path(__file__).parents[2] / "recipes/tiny-cpu.yaml").read_text()
ROWS = [[(7 * row + 3 * at * at) % 50 for at in range(length)] for row, length in enumerate((12, 9, 16, 7, 11))]
SETTINGS: dict[str, Any] = {
    "max_steps": 3, "gradient_accumulation_steps": 2, "learning_rate": 1e-2, "logging_steps": 1,
    "train_sampling_strategy": "sequential", "use_cpu": True, "report_to": "none", "save_strategy": "no",
    "disable_tqdm": True, "lr_scheduler_type": "constant", "per_device_eval_batch_size": 1, "bf16": False,
}  # fmt: skip
FINISH = """
import json, os
found = {"losses": [line["loss"] for line in trainer.state.log_history if "loss" in line]}
found["eval"] = trainer.evaluate(rows)["eval_loss"]
if os.environ["RANK"] == "0":
    model.save_pretrained("trained")
    json.dump(found, open("found.json", "w"))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = Qwen3Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=64, max_position_embeddings=64, tie_word_embeddings=False, bos_token_id=None,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "model")
    lines = [{"input_ids": row, "labels": [-100, -100, *row[2:]] if len(row) > 9 else row} for row in ROWS]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def run_ranks(folder: Path, text: str) -> None:
    (folder / "program.py").write_text(text.replace("Qwen/Qwen3-8B", "model"))
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        port = place.getsockname()[1]
    command = [
        str(write_python()), "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}",
        "program.py",
    ]  # fmt: skip
    plain = {name: value for name, value in os.environ.items() if name != KEY}  # a user's shell has no key of a run
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=170, env=plain)
    assert done.returncode == 0, done.stderr[-9000:]


def train_plainly(folder: Path) -> tuple[dict[str, Any], Any]:
    """One process, one row at a time, eager attention."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", attn_implementation="eager")
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]

    def collate(batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return {name: torch.tensor([row[name] for row in batch]) for name in ("input_ids", "labels")}

    args = TrainingArguments(str(folder / "plain"), per_device_train_batch_size=1, **SETTINGS)
    trainer = Trainer(model, args, train_dataset=rows, data_collator=collate)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return {"losses": losses, "eval": trainer.evaluate(rows)["eval_loss"]}, model


@pytest.mark.full
@pytest.mark.parametrize("program", ["trainer.py", "sft.py"])
def test_a_trainer_with_split_rows_trains_like_one_process(program: str, folder: Path) -> None:
    if program == "sft.py" and importlib.util.find_spec("trl") is None:
        pytest.skip("no trl: pip install trl")
    settings = ", ".join(f"{name}={value!r}" for name, value in SETTINGS.items())
    if program == "sft.py":
        settings += ", dataset_kwargs={'skip_prepare_dataset': True}"
    run_ranks(folder, PROGRAMS[program].replace("max_steps=20", settings) + FINISH)
    found, (expected, model) = json.loads((folder / "found.json").read_text()), train_plainly(folder)
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-4)
    assert found["eval"] == pytest.approx(expected["eval"], rel=1e-4)
    trained = AutoModelForCausalLM.from_pretrained(folder / "trained")
    for name, weight in trained.named_parameters():
        torch.testing.assert_close(weight, model.get_parameter(name), rtol=2e-3, atol=2e-4)


def split_by_hand(folder: Path, row: dict[str, Any]) -> tuple[float, list[torch.Tensor]]:
    """Two ranks share a row in a loop of plain torch. The loss is computed in float32."""
    ulysses = SequenceParallel(sp_size=2)
    model = AutoModelForCausalLM.from_pretrained(
        folder / "model", attn_implementation=ulysses.attn_implementation, dtype=torch.float64
    )
    ulysses.serve(model)
    loss = model(**ulysses.collate([row])).loss
    loss.backward()
    gradients = [weight.grad for weight in model.parameters()]
    for gradient in gradients:
        dist.all_reduce(gradient)
    return loss.item(), [gradient / 2 for gradient in gradients]


@pytest.mark.check
def test_a_loop_of_plain_torch_has_the_gradients_of_whole_documents(folder: Path) -> None:
    row = {"input_ids": ROWS[0] + ROWS[1][:4], "seq_lengths": [12, 4]}
    model = AutoModelForCausalLM.from_pretrained(folder / "model", attn_implementation="eager", dtype=torch.float64)
    losses, end = [], 0
    for length in row["seq_lengths"]:
        ids = torch.tensor([row["input_ids"][end : end + length]])
        logits = model(ids, use_cache=False).logits[0, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
        end += length
    expected = sum(losses) / (len(row["input_ids"]) - 2)
    expected.backward()
    for loss, gradients in run_on_ranks(2, split_by_hand, folder, row):
        assert loss == pytest.approx(expected.item(), rel=1e-6)
        for ours, weight in zip(gradients, model.parameters(), strict=True):
            torch.testing.assert_close(ours, weight.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.check
def test_the_plain_loop_of_the_page_runs(folder: Path) -> None:
    run_ranks(folder, PROGRAMS["loop.py"] + "\nassert loss.isfinite()\n")


@pytest.mark.full
def test_the_programs_for_recipes_run(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(
        TINY.replace("sp_size: 2", "sp_size: 1").replace("  warmup_steps: 5\n", "") + "  rehearsal: false\n"
    )
    shown = {}
    for name in ("plan.py", "run.py"):
        (tmp_path / name).write_text(PROGRAMS[name])
        done = subprocess.run(
            [sys.executable, name], cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "NO_COLOR": "1"}
        )
        assert done.returncode == 0, done.stderr[-3000:]
        shown[name] = done.stdout.splitlines()
    assert shown["plan.py"][0].startswith("Layout(dp_replicate_size=1, dp_shard_size=1, sp_size=2")
    assert [line.split()[0] for line in shown["run.py"][:4]] == ["1", "2", "3", "4"]
    assert shown["run.py"][4].startswith("all steps done ")
    assert (tmp_path / "runs/tiny-cpu/model/config.json").is_file()
    recipe = json.loads((tmp_path / "runs/tiny-cpu/run.json").read_text())["recipe"]
    assert recipe["train"]["token_loss"] == f"{tmp_path / 'run.py'}:focal"
