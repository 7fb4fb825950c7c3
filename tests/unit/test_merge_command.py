"""What makes models differ, so that they cannot be merged. What is said of them is in commands.txt."""

import json
from pathlib import Path
from typing import Any

import pytest

from ulysses_cli.plan.rules.merged_models import MergedModel, find_differences, list_config_differences, parse_parts


def make_model(folder: Path, *names: str, **config: Any) -> Path:
    """A folder whose weights are zeros, four of each tensor."""
    places = {name: [8 * at, 8 * at + 8] for at, name in enumerate(names)}
    tensors = {name: {"dtype": "BF16", "shape": [4], "data_offsets": place} for name, place in places.items()}
    text = json.dumps(tensors).encode()
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8 * len(names)))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "tie_word_embeddings": True, **config}))
    return folder


def test_weights_are_read_from_the_end_of_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "v:2").mkdir()
    assert parse_parts(["a:0.9", "owner/b:1e-1"]) == [MergedModel("a", 0.9), MergedModel("owner/b", 0.1)]
    assert parse_parts(["a", "v:2"]) == [MergedModel("a", 0.5), MergedModel("v:2", 0.5)]


def test_a_head_that_is_the_embedding_may_be_in_one_models_files_alone(tmp_path: Path) -> None:
    first = make_model(tmp_path / "first", "a", "b", "lm_head.weight", rope_theta=1e5)
    other = make_model(tmp_path / "other", "a", "b", rope_theta=1e6, use_cache=False)
    assert list(find_differences(first, other)) == list(find_differences(other, first)) == []
    assert list_config_differences(first, [other]) == ["rope_theta"]
