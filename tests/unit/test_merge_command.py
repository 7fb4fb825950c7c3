"""Models that cannot be merged are refused before torch is loaded, all mistakes at once."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import make_checkpoint
from syrupy.assertion import SnapshotAssertion
from typer.testing import CliRunner

from ulysses_cli.cli import app
from ulysses_cli.plan.rules.merged_models import MergedModel, find_differences, list_config_differences, parse_parts

TENSORS = {"a": ("BF16", [2, 3]), "b": ("BF16", [4])}


def make_model(folder: Path, tensors: dict[str, tuple[str, list[int]]] = TENSORS, **config: Any) -> Path:
    """A folder whose weights are zeros."""
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = {"BF16": 2, "F32": 4, "I8": 1}[dtype]
        for each in shape:
            size *= each
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    return folder


def refuse(*words: str) -> str:
    result = CliRunner().invoke(app, ["merge", *words])
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    return result.stderr


def test_weights_are_read_from_the_end_of_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "v:2").mkdir()
    assert parse_parts(["a:0.9", "owner/b:1e-1"]) == [MergedModel("a", 0.9), MergedModel("owner/b", 0.1)]
    assert parse_parts(["a", "v:2"]) == [MergedModel("a", 0.5), MergedModel("v:2", 0.5)]


def test_models_of_other_kinds_are_refused(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    first = make_model(tmp_path / "first")
    others = [
        make_model(tmp_path / "shape", {**TENSORS, "b": ("BF16", [5])}),
        make_model(tmp_path / "dtype", {name: ("F32", shape) for name, (_, shape) in TENSORS.items()}),
        make_model(tmp_path / "names", {**TENSORS, "c": ("BF16", [1])}),
        make_model(tmp_path / "type", model_type="qwen3"),
        make_model(tmp_path / "quantized", {"a": ("I8", [1])}),
        tmp_path / "nothing",
        make_checkpoint(tmp_path / "run", 4).parent.parent,
        make_model(tmp_path / "adapters"),
    ]
    (tmp_path / "adapters" / "adapter_config.json").write_text("{}")
    assert [refuse(str(first), str(other), "--to", str(tmp_path / "to")) for other in others] == snapshot
    every = refuse(*map(str, others), str(first), "--to", str(first))
    assert every.endswith("\n10 problems\n"), "all at once: one of them differs in two ways, and --to exists"


def test_weights_that_are_no_shares_are_refused(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    a, b = (str(make_model(tmp_path / name)) for name in "ab")
    merges = [(f"{a}:0.9", f"{b}:0.2"), (f"{a}:0.9", b), (f"{a}:0.5", f"{a}:0.5"), (f"{a}:1", f"{b}:0"), (a,)]
    merges += [(a, b, "--last", "3"), (a, "--last", "1"), (a, "--last", "2")]
    assert [refuse(*words, "--to", str(tmp_path / "to")) for words in merges] == snapshot


def test_a_head_that_is_the_embedding_may_be_in_one_models_files_alone(tmp_path: Path) -> None:
    tied = {"tie_word_embeddings": True}
    first = make_model(tmp_path / "first", {**TENSORS, "lm_head.weight": ("BF16", [3])}, **tied, rope_theta=1e5)
    other = make_model(tmp_path / "other", **tied, rope_theta=1e6, use_cache=False)
    assert list(find_differences(first, other)) == list(find_differences(other, first)) == []
    assert list_config_differences(first, [other]) == ["rope_theta"]
