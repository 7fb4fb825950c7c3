"""Models that cannot be merged are refused before torch is loaded, all mistakes at once."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import make_checkpoint
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


def test_models_of_other_kinds_are_refused(tmp_path: Path) -> None:
    first = make_model(tmp_path / "first")
    others = {
        "shape": (make_model(tmp_path / "shape", {**TENSORS, "b": ("BF16", [5])}),
                  f"1 tensor differs in shape: b is [5] in {tmp_path}/shape and [4] in {first}"),
        "dtype": (make_model(tmp_path / "dtype", {name: ("F32", shape) for name, (_, shape) in TENSORS.items()}),
                  f"2 tensors differ in dtype: a is F32 in {tmp_path}/dtype and BF16 in {first}"),
        "names": (make_model(tmp_path / "names", {**TENSORS, "c": ("BF16", [1])}), f"{tmp_path}/names alone holds c"),
        "type": (make_model(tmp_path / "type", model_type="qwen3"), f"{tmp_path}/type is of the type qwen3"),
        "quantized": (make_model(tmp_path / "quantized", {"a": ("I8", [1])}), "holds a as I8: quantized weights"),
        "nothing": (tmp_path / "nothing", f"{tmp_path}/nothing does not exist"),
        "run": (make_checkpoint(tmp_path / "run", 4).parent.parent, "is a run or a checkpoint, not a model"),
    }  # fmt: skip
    adapters = make_model(tmp_path / "adapters")
    (adapters / "adapter_config.json").write_text("{}")
    others["adapters"] = (adapters, f"{adapters} holds adapters, not a model")
    for other, words in others.values():
        assert words in refuse(str(first), str(other), "--to", str(tmp_path / "to"))
    every = refuse(*(str(other) for other, _ in others.values()), str(first), "--to", str(first))
    assert every.endswith("\n10 problems\n"), "all at once: one of them differs in two ways, and --to exists"


def test_weights_that_are_no_shares_are_refused(tmp_path: Path) -> None:
    a, b = (str(make_model(tmp_path / name)) for name in "ab")
    to = ("--to", str(tmp_path / "to"))
    assert refuse(f"{a}:0.9", f"{b}:0.2", *to) == (
        "MODEL: the weights add up to 1.1, not to 1\n\nhint: write weights such as 0.9 and 0.1: any other sum scales "
        "every weight of the model\n\n1 problem\n"
    )
    assert f"{b} has no weight, others have" in refuse(f"{a}:0.9", b, *to)
    assert f"{a} is named twice" in refuse(f"{a}:0.5", f"{a}:0.5", *to)
    assert f"{b} has the weight 0" in refuse(f"{a}:1", f"{b}:0", *to)
    assert f"{a} alone: there is nothing to merge it with" in refuse(a, *to)
    assert "--last: takes one run, not 2 models" in refuse(a, b, "--last", "3", *to)
    assert "--last: 1 is no number of checkpoints to merge" in refuse(a, "--last", "1", *to)
    assert f"CHECKPOINT: {a} is already a model" in refuse(a, "--last", "2", *to)


def test_a_head_that_is_the_embedding_may_be_in_one_models_files_alone(tmp_path: Path) -> None:
    tied = {"tie_word_embeddings": True}
    first = make_model(tmp_path / "first", {**TENSORS, "lm_head.weight": ("BF16", [3])}, **tied, rope_theta=1e5)
    other = make_model(tmp_path / "other", **tied, rope_theta=1e6, use_cache=False)
    assert list(find_differences(first, other)) == list(find_differences(other, first)) == []
    assert list_config_differences(first, [other]) == ["rope_theta"]
