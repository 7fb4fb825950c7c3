"""Tests `ulysses train` as a person runs it: real processes, a real signal, a model folder that plain transformers
loads."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.forked import Command
from support.paths import ROOT
from support.small_run import make_settings
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from ulysses_cli.data.rows import PackedRows, open_rows

TIME_LIMIT = 240
RECIPE = make_settings(
    parallel={"sp_size": 2},
    data={"eval_split": 0.005, "max_length": 256},
    train={"max_steps": 8},
    run={"eval_steps": 4, "save_steps": 3, "save_total_limit": None},
)
METRICS = {
    *("step", "epoch", "loss", "grad_norm", "learning_rate", "tokens", "supervised_tokens", "step_seconds"),
    *("tokens_per_second", "tokens_per_second_per_gpu", "tflops", "mfu", "peak_memory_bytes"),
    *("host_peak_memory_bytes", "communication_share"),
}


class CommandRuns:
    """A folder with a recipe, in which the command runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "r.yaml").write_text(yaml.safe_dump(RECIPE))
        self.environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}

    def start(self, *words: str) -> Command:
        return Command(["train", "r.yaml", *words], self.folder, self.environ)

    def train(self, *words: str) -> tuple[int, str, str]:
        process = self.start(*words)
        out, err = process.communicate(timeout=TIME_LIMIT)
        return process.returncode, out, err

    def wait_for(self, process: Command, is_there: Callable[[], bool]) -> None:
        end = time.monotonic() + TIME_LIMIT
        while not is_there():
            assert process.poll() is None, process.communicate(1)[1]
            assert time.monotonic() < end
            time.sleep(0.02)

    def read_lines(self, run: str, name: str = "metrics") -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / run / f"{name}.jsonl").read_text().splitlines()]

    def read_losses(self, run: str) -> list[float]:
        return [line["loss"] for line in self.read_lines(run)]

    def open_rows(self, run: str, split: Any) -> PackedRows:
        name = json.loads((self.folder / run / "run.json").read_text())["data"]["hash"]
        return open_rows(self.folder / "runs" / "store" / "rows" / name, split)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> CommandRuns:
    """Returns runs with one finished run in `run`, as the recipe sets it."""
    made = CommandRuns(tmp_path_factory.mktemp("runs"))
    code, out, err = made.train()
    assert code == 0, err
    assert out == "run/model\n"
    assert "done model_dir=run/model" in err
    return made


def test_a_run_writes_its_metrics_and_facts(runs: CommandRuns) -> None:
    lines = runs.read_lines("run")
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert all(line.keys() >= METRICS for line in lines)
    sampled = [line for line in lines if "step_parts" in line]
    assert [line["step"] for line in sampled] == [3]
    parts = sampled[0]["step_parts"]
    assert sum(parts.values()) == pytest.approx(sampled[0]["step_seconds"], rel=0.05)
    assert {name for name, seconds in parts.items() if seconds > 0} >= {
        *("projections", "attention", "mlp", "head_loss", "exchange", "gather_reduce", "optimizer", "data", "other")
    }
    assert [line["step"] for line in runs.read_lines("run", "eval")] == [4, 8]
    facts = json.loads((runs.folder / "run" / "run.json").read_text())
    assert facts["layout"]["world_size"] == 2
    assert facts["recipe"]["data"]["max_length"] == 256
    assert sorted(path.name for path in (runs.folder / "run" / "checkpoints").iterdir()) == [
        "step-3",
        "step-6",
        "step-8",
    ]


def test_plain_transformers_loads_the_model_with_the_same_loss(runs: CommandRuns) -> None:
    model = AutoModelForCausalLM.from_pretrained(runs.folder / "run" / "model")
    assert model.config.use_cache
    assert "r.yaml" not in (runs.folder / "run" / "model" / "README.md").read_text()
    tokenizer = AutoTokenizer.from_pretrained(runs.folder / "run" / "model")
    assert tokenizer.decode(tokenizer("déjà vu")["input_ids"], skip_special_tokens=True) == "déjà vu"
    rows, total, count = runs.open_rows("run", "eval"), 0.0, 0
    for row in range(len(rows)):
        at, tokens = 0, rows.read(row, 0, rows.count_tokens(row)).input_ids
        for length in rows.get_lengths(row):
            document = torch.from_numpy(tokens[at : at + length].copy())
            at += length
            with torch.no_grad():
                logits = model(document[None]).logits[0].double()
            total += functional.cross_entropy(logits[:-1], document[1:], reduction="sum").item()
            count += length - 1
    messages = runs.read_lines("run", "eval")[-1]
    assert messages["tokens"] == count
    assert messages["loss"] == pytest.approx(total / count, rel=1e-5)
    assert messages["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-4)
    assert messages["by_position"] == {"0-2K": {"loss": pytest.approx(total / count, rel=1e-5), "tokens": count}}


@pytest.mark.check
def test_a_run_on_one_rank_has_the_same_rows_and_losses(runs: CommandRuns) -> None:
    code, _, err = runs.train("parallel.sp_size=1", "run.output_dir=alone")
    assert code == 0, err
    assert runs.read_losses("alone") == pytest.approx(runs.read_losses("run"), rel=1e-5)
    for ours, reference in zip(runs.read_lines("alone", "eval"), runs.read_lines("run", "eval"), strict=True):
        assert ours["loss"] == pytest.approx(reference["loss"], rel=1e-5)
        assert ours["tokens"] == reference["tokens"]


@pytest.mark.check
def test_a_rehearsal_changes_no_bit(runs: CommandRuns) -> None:
    code, _, err = runs.train("run.rehearsal=false", "run.output_dir=unrehearsed")
    assert code == 0, err
    assert "phase rehearsal" not in err
    assert runs.read_losses("unrehearsed") == runs.read_losses("run")
    ours, reference = (runs.folder / run / "model" / "model.safetensors" for run in ("unrehearsed", "run"))
    assert ours.read_bytes() == reference.read_bytes()


@pytest.mark.check
def test_a_signal_stops_with_a_checkpoint_from_which_the_run_resumes_exactly(runs: CommandRuns) -> None:
    process = runs.start("run.output_dir=stopped", "run.save_steps=null", "run.stop_exit_code=75")
    metrics = runs.folder / "stopped" / "metrics.jsonl"
    runs.wait_for(process, lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 3)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=TIME_LIMIT)
    assert (process.returncode, out) == (75, ""), err
    stopped = re.search(r"stopped: by a signal after step (\d) of 8", err)
    assert stopped, err
    newest = f"stopped/checkpoints/step-{stopped[1]}"
    assert f"the newest checkpoint is {newest}: continue from it with the same command and --resume auto" in err
    assert [path.name for path in (runs.folder / "stopped" / "checkpoints").iterdir()] == [f"step-{stopped[1]}"]
    assert len(runs.read_losses("stopped")) == int(stopped[1]) < 8

    code, _, err = runs.train("run.output_dir=stopped", "run.save_steps=null")
    assert code == 2
    assert "hint: continue it with --resume auto, choose another run.output_dir, or replace it with --overwrite" in err
    code, _, err = runs.train("run.output_dir=stopped", "run.save_steps=null", "--resume", "auto")
    assert code == 0, err
    assert f"resumed from stopped/checkpoints/step-{stopped[1]} after step {stopped[1]}" in err
    assert runs.read_losses("stopped") == runs.read_losses("run")
    ours, reference = (runs.folder / run / "model" / "model.safetensors" for run in ("stopped", "run"))
    assert ours.read_bytes() == reference.read_bytes()


@pytest.mark.check
def test_a_killed_rank_is_named_once_and_the_others_end(runs: CommandRuns) -> None:
    process = runs.start("run.output_dir=killed", "train.max_steps=100000")
    metrics = runs.folder / "killed" / "metrics.jsonl"
    runs.wait_for(process, lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 2)
    second = runs.train("run.output_dir=killed", "train.max_steps=100000")
    assert second[0] == 2
    assert "killed is in use by a run that is still going on" in second[2]
    assert "; its recipe is the same" in second[2]
    process.signal_rank(1)
    _, err = process.communicate(timeout=TIME_LIMIT)
    assert process.returncode == 1, err
    end = err[err.rindex("rank ") :]
    assert re.search(r"rank \d (was killed by SIGKILL|failed)", err), end
    assert "the whole trace: killed/logs/" in err
    assert "Traceback" not in err


def test_missing_files_are_named_before_ranks_start(runs: CommandRuns) -> None:
    code, _, err = runs.train("run.output_dir=tracked", "run.report_to=[wandb]")
    assert code == 2
    assert "command line: run.report_to: wandb is not installed" in err
    assert "pip install ulysses-cli[wandb]" in err
    assert not (runs.folder / "tracked" / "logs").exists(), "no rank was started"
    assert "Traceback" not in err


@pytest.mark.check
def test_a_dry_run_may_be_larger_than_the_machine(runs: CommandRuns) -> None:
    code, out, err = runs.train("--dry-run", "parallel.dp_shard_size=32", "run.output_dir=dry")
    assert (code, out) == (0, ""), err
    assert "64 processes = dp_replicate 1 x dp_shard 32 x sp 2" in err
    assert "step 1: 32 rows, " in err
    assert re.search(r"each rank holds [\d,]+ of [\d,]+ parameters", err)
    assert not (runs.folder / "dry" / "checkpoints").exists()
