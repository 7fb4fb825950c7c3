"""A tiny model that `ulysses train` teaches to recall, and what `ulysses evaluate` says of it: with the evidence in the
shard of another rank than the question's."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.commands import succeed
from support.recall import TASK, RecallTask
from transformers import AutoConfig, AutoModelForCausalLM

NUM_STEPS, NUM_DOCUMENTS, NUM_SAMPLES = 300, 15_000, 16
LENGTHS = (384, 512)  # a prompt and the 128 tokens of its answer
WORDS = (
    "--dtype", "float32", "--device", "cpu", "--format", "json", "--suite", TASK, "--samples", str(NUM_SAMPLES),
    "--sp-size", "2", "--max-length", ",".join(map(str, LENGTHS)),
)  # fmt: skip


def evaluate(model: Path, folder: Path, *words: str) -> dict[str, Any]:
    succeed("evaluate", str(model), *WORDS, "--output", str(folder), *words)
    findings: dict[str, Any] = json.loads((folder / "quality.json").read_text())
    return findings


@pytest.mark.full
def test_a_trained_model_finds_needles_across_the_boundary_of_shards(tmp_path: Path) -> None:
    """Half of a prompt is rank 0's, and the question stands at its end, on rank 1. An answer of 7 digits is not found
    by chance."""
    sections = RecallTask().write(tmp_path, NUM_DOCUMENTS)
    recipe = {
        **sections,
        "parallel": {"sp_size": 2},
        "train": {"learning_rate": 1e-2, "max_steps": NUM_STEPS, "warmup_steps": 30, "adam_beta2": 0.98},
        "memory": {"gradient_checkpointing": False, "tiled_mlp": False, "tiled_loss": False},
        "run": {
            "device": "cpu", "output_dir": str(tmp_path / "run"), "rehearsal": False, "save_steps": 75,
            "save_total_limit": 9,
        },
    }  # fmt: skip
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    succeed("train", str(tmp_path / "recipe.yaml"), cwd=tmp_path)

    page = tmp_path / "page.html"
    findings = evaluate(tmp_path / "run", tmp_path / "trained", "--html", str(page))
    assert [row["length"] for row in findings["scores"]] == list(LENGTHS)
    assert all(row["n"] == NUM_SAMPLES and row["score"] >= 0.8 for row in findings["scores"]), findings["scores"]
    far = [each["score"] for each in findings["results"] if each["depths"][0] < 0.45]
    assert len(far) > NUM_SAMPLES / 2
    assert sum(far) / len(far) >= 0.8
    cells = [cell for cell in findings["heat_map"] if cell["depth"] < 0.4]
    assert {cell["length"] for cell in cells} == set(LENGTHS)
    assert sum(cell["score"] * cell["n"] for cell in cells) / sum(cell["n"] for cell in cells) >= 0.8
    assert "Score by length and depth" in page.read_text()

    longer = (*LENGTHS, 768, 1024, 2048, 4096)  # it was trained on up to about 900 tokens
    compared = ("--against", str(tmp_path / "run/checkpoints/step-75"), "--max-length", ",".join(map(str, longer)))
    findings = evaluate(tmp_path / "run", tmp_path / "compared", *compared)
    assert findings["difference"]["low"] > 0, "with a quarter of the steps it finds less"
    assert findings["effective_length"]["own"] in (768, 1024, 2048)

    torch.manual_seed(0)
    untrained = tmp_path / "untrained-model"
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**sections["model"]["config"])).save_pretrained(untrained)
    findings = evaluate(untrained, tmp_path / "untrained", "--tokenizer", str(tmp_path / "tokenizer"))
    assert {row["score"] for row in findings["scores"]} == {0.0}
