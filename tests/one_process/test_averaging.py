"""Compares merged models with float32 arithmetic in numpy, to the last bit."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import make_state, save_as_ranks, write_manifest
from support.exports import run_export
from support.families import make_config
from support.training import make_recipe
from syrupy.assertion import SnapshotAssertion
from transformers import AutoModelForCausalLM

from ulysses_cli.data.tokenizing.tokenizer import make_bytes_tokenizer
from ulysses_cli.plan.problem import FAILED, USAGE
from ulysses_cli.train.export import weights

Array = np.ndarray[Any, Any]


def read_bits(folder: Path) -> dict[str, Array]:
    """The tensors of bfloat16 as whole numbers."""
    tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    return {name: tensor.view(torch.int16).numpy().view(np.uint16) for name, tensor in tensors.items()}


def widen(bits: Array) -> Array:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def round_once(values: Array) -> Array:
    """float32 to the nearest bfloat16, to the even one of two."""
    bits = values.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def expect(parts: Sequence[tuple[Array, float]]) -> Array:
    total = np.float32(parts[0][1]) * parts[0][0]
    for values, weight in parts[1:]:
        total = total + np.float32(weight) * values
    return total


def make_models(tmp_path: Path, count: int, **options: Any) -> list[Path]:
    folders = []
    for number in range(count):
        torch.manual_seed(number)
        model = AutoModelForCausalLM.from_config(make_config("qwen3")).to(torch.bfloat16)
        size = "20KB" if number == 0 else "1GB"
        model.save_pretrained(tmp_path / f"m{number}", max_shard_size=size, **options)
        make_bytes_tokenizer().save_pretrained(tmp_path / f"m{number}")
        folders.append(tmp_path / f"m{number}")
    return folders


def test_a_merge_is_float32_arithmetic_rounded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    """The models' files are split at other places; no more than a shard and a tensor is held at a time."""
    folders, to = make_models(tmp_path, 3), tmp_path / "to"
    assert len(list(folders[0].glob("*.safetensors"))) > 2
    held, add = [], weights.ShardWriter.add_unchanged

    def count(self: weights.ShardWriter, name: str, tensor: torch.Tensor) -> None:
        self.max_bytes = 20_000
        add(self, name, tensor)
        held.append(sum(each.nbytes for _, each in self.batch) - tensor.nbytes)

    monkeypatch.setattr(weights.ShardWriter, "add_unchanged", count)
    shares = (0.7, 0.30001, -1e-5)
    code, events = run_export([*folders, "--to", to, f"--weights={','.join(map(str, shares))}"], monkeypatch)
    assert code == 0, events
    assert "model-00001-of-" in [event["phase"] for event in events if "phase" in event][1]
    assert events[-1]["result"]["checked"] == snapshot
    bits, merged = [read_bits(folder) for folder in folders], read_bits(to)
    assert merged.keys() == bits[0].keys()
    for name, found in merged.items():
        sums = expect([(widen(each[name]), share) for each, share in zip(bits, shares, strict=True)])
        assert np.array_equal(found, round_once(sums)), name
    assert max(held) < 20_000
    loaded: Any = AutoModelForCausalLM.from_pretrained(to)
    assert loaded.dtype is torch.bfloat16
    assert "| a local folder | 0.7 |\n| a local folder | 0.30001 |" in (to / "README.md").read_text()
    assert str(tmp_path) not in (to / "README.md").read_text()


def test_other_tokenizers_and_numbers_that_are_not_finite_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    folders, to = make_models(tmp_path, 2), tmp_path / "to"
    words = [*folders, "--to", to, "--weights=0.5,0.5"]
    tokenizer = make_bytes_tokenizer()
    tokenizer.add_tokens(["<one more>"])
    tokenizer.save_pretrained(folders[1])
    code, events = run_export(words, monkeypatch)
    assert (code, events[-1]["problem"]) == (USAGE, snapshot)
    make_bytes_tokenizer().save_pretrained(folders[1])
    file = folders[1] / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][3] = float("inf")
    save_file(tensors, file, {"format": "pt"})
    code, events = run_export(words, monkeypatch)
    assert (code, events[-1]["problem"]) == (FAILED, snapshot)
    assert not to.exists()


def make_run(tmp_path: Path, *words: str) -> tuple[Path, list[dict[str, torch.Tensor]]]:
    model = AutoModelForCausalLM.from_config(make_config("qwen3"))
    model.save_pretrained(tmp_path / "base")
    recipe = make_recipe("model.config=null", f"model.name_or_path={tmp_path / 'base'}", *words)
    saved = []
    for step in (1, 2, 3, 4):
        torch.manual_seed(step)
        saved.append({name: torch.randn(value.shape) for name, value in model.named_parameters()})
        checkpoint = save_as_ranks(saved[-1], tmp_path / "run" / "checkpoints" / f"step-{step}")
        state = {**make_state(step, 3), "recipe": recipe.model_dump(mode="json")}
        (checkpoint / "state.json").write_text(json.dumps(state))
        write_manifest(checkpoint)
    return tmp_path / "run", saved


def test_the_last_checkpoints_of_a_run_are_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    """A damaged one is left out and said; fewer than were asked for are refused."""
    run, saved = make_run(tmp_path)
    (run / "checkpoints" / "step-3" / "rank-00001.safetensors").write_bytes(b"x")
    to = tmp_path / "to"
    code, events = run_export([run, "--to", to, "--last", 3, "--dtype", "float32"], monkeypatch)
    assert code == 0, events
    assert events[1]["phase"] == snapshot
    found = load_file(to / "model.safetensors")
    for name, tensor in found.items():
        values = [saved[step - 1][name].numpy() for step in (4, 2, 1)]
        assert np.array_equal(tensor.numpy(), expect([(value, 1 / 3) for value in values])), name
    assert "steps 1, 2, 4" in (to / "README.md").read_text()
    code, events = run_export([run, "--to", tmp_path / "more", "--last", 4], monkeypatch)
    assert (code, events[-1]["problem"]) == (FAILED, snapshot)


def test_checkpoints_of_adapters_have_no_mean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    run, _ = make_run(tmp_path, "lora.r=4")
    code, events = run_export([run, "--to", tmp_path / "to", "--last", 2], monkeypatch)
    assert (code, events[-1]["problem"]) == (USAGE, snapshot)
