"""What a run costs on short texts: losses of base, stretched base and trained model, against transformers' own."""

import json
import re
import shutil
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import yaml
from support.commands import run, succeed
from support.small_run import make_settings
from support.training import save_bytes_model
from syrupy.assertion import SnapshotAssertion
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from ulysses_cli.data.tokenizing.tokenizer import make_bytes_tokenizer
from ulysses_cli.evaluate.summary import compare_losses, describe_document
from ulysses_cli.report.run_summary import load_run

pytestmark = pytest.mark.check
OWN_BASE, BASE, MAX_TOKENS = 1e4, 1e7, 1024
RUN = {"eval_steps": 2, "save_steps": 2, "rehearsal": False, "short_check": "short.jsonl"}


def write_files(folder: Path) -> list[str]:
    save_bytes_model(folder / "base", initializer_range=0.3, max_position_embeddings=2048)
    random = Random(0)
    texts = ["".join(random.choices("abcdef ", k=size)) for size in (40, 301, 1400)]
    (folder / "short.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return texts


def train(folder: Path, *words: str, **model: Any) -> list[dict[str, Any]]:
    settings = make_settings(
        parallel={"sp_size": 2},
        train={"max_steps": 4, "learning_rate": 0.003},
        run=RUN,
        data={"eval_datasets": [{"path": "short.jsonl"}]},
    )
    settings["model"] = {"name_or_path": "base", "tokenizer": "bytes", "dtype": "float32", **model}
    (folder / "r.yaml").write_text(yaml.safe_dump(settings))
    succeed("train", "r.yaml", *words, cwd=folder)
    name = next((word.partition("=")[2] for word in words if word.startswith("run.output_dir")), "run")
    return [json.loads(line) for line in (folder / name / "short_check.jsonl").read_text().splitlines()]


@torch.no_grad()
def compute_plainly(model: Path, base: float, texts: list[str]) -> list[float]:
    config = AutoConfig.from_pretrained(model)
    config.rope_parameters = {**config.rope_parameters, "rope_theta": base}
    plain = AutoModelForCausalLM.from_pretrained(model, config=config, dtype=torch.float32, attn_implementation="eager")
    means, tokenizer = [], make_bytes_tokenizer()
    for text in texts:
        tokens = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])[:, :MAX_TOKENS]
        means.append(functional.cross_entropy(plain(tokens).logits[0, :-1], tokens[0, 1:]).item())
    return means


def compare(before: list[float], after: list[float]) -> dict[str, Any]:
    """By the code of evaluations, which other tests hold to scipy's numbers."""
    lines = [
        [describe_document(str(at), "", "", 256, at, [{"sum": loss, "tokens": 1}]) for at, loss in enumerate(losses)]
        for losses in (before, after)
    ]
    return compare_losses(*lines)[0]


def test_short_texts_are_measured_with_own_positions_with_other_ones_and_trained(tmp_path: Path) -> None:
    texts = write_files(tmp_path)
    lines = train(tmp_path, rope_theta=BASE)
    assert [(line["step"], line["texts"], line["tokens"]) for line in lines] == [
        (step, 3, 41 + 302 + MAX_TOKENS) for step in (2, 4)
    ]
    own, stretched = (compute_plainly(tmp_path / "base", base, texts) for base in (OWN_BASE, BASE))
    trained = compute_plainly(tmp_path / "run" / "model", BASE, texts)
    assert max(abs(one - other) for one, other in zip(own, stretched, strict=True)) > 0.01, "positions do not matter"
    names = ("base", "base with the recipe's positions", "trained")
    for row, name, expected in zip(lines[-1]["models"], names, (own, stretched, trained), strict=True):
        assert (row["model"], row["loss"]) == (name, pytest.approx(sum(expected) / 3, abs=2e-5))
        if name != "base":
            pairs = compare(own, expected)
            ends = [row[key] for key in ("difference", "difference_low", "difference_high")]
            assert ends == pytest.approx([pairs[key] for key in ("loss", "low", "high")], abs=1e-4)
    assert lines[-1]["difference"] == lines[-1]["models"][-1]["difference"]

    # a resumed run measures the same base, though it loads other weights
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-4")
    shutil.rmtree(tmp_path / "run" / "model")
    train(tmp_path, "--resume", "auto", rope_theta=BASE)
    assert load_run(tmp_path / "run").short_checks == lines

    # the base of a later stage is the published model, not the run that it starts from
    later = train(tmp_path, "run.output_dir=later", "run.start_from=run", "run.eval_steps=null", rope_theta=1e8)
    assert later[-1]["models"][0]["loss"] == lines[-1]["models"][0]["loss"]
    assert later[-1]["difference"] < lines[-1]["difference"]


def test_frequencies_that_follow_a_length_are_put_back(tmp_path: Path) -> None:
    """Of texts within the model's own length they are its own. The other ranks' documents go on to choose theirs."""
    write_files(tmp_path)
    _, stretched, trained = train(tmp_path, rope_scaling={"type": "dynamic", "factor": 2.0})[-1]["models"]
    assert abs(stretched["difference"]) < 1e-6 < abs(trained["difference"])


def test_without_other_positions_there_is_one_base(tmp_path: Path) -> None:
    texts = write_files(tmp_path)
    last = train(tmp_path)[-1]["models"]
    assert [row["model"] for row in last] == ["base", "trained"]
    assert last[0]["loss"] == pytest.approx(sum(compute_plainly(tmp_path / "base", OWN_BASE, texts)) / 3, abs=2e-5)


@pytest.mark.parametrize("content", ['{"text": ""}\n', "\n"], ids=["an empty text", "no row"])
def test_texts_that_cannot_be_read_end_the_run_before_ranks_meet(
    tmp_path: Path, content: str, snapshot: SnapshotAssertion
) -> None:
    (tmp_path / "none.jsonl").write_text(content)
    settings = make_settings(run={**RUN, "short_check": "none.jsonl", "eval_steps": None}, train={"max_steps": 1})
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(settings))
    result = run("train", "r.yaml", cwd=tmp_path)
    said = re.sub(r"rank-\d", "rank-N", result.stderr[result.stderr.index("run.short_check") :])
    assert (result.returncode, said) == (2, snapshot)
    assert "phase meeting" not in result.stderr
