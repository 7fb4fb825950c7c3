"""Tests weights in files: no pickle runs code, and NaN and infinity are named where they are read."""

import json
import math
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.checkpoints import save_as_ranks
from support.exports import export
from support.families import make_config
from support.paths import ROOT
from support.refusals import explain
from support.training import CONFIG
from syrupy.assertion import SnapshotAssertion
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from ulysses_cli.run.checkpoints import CheckpointError
from ulysses_cli.train.checkpoint.format import index_sources, read_range
from ulysses_cli.train.engine import Engine
from ulysses_cli.train.model.loading import BuildError, ModelOptions, load_pretrained
from ulysses_cli.train.tensor_file import find_file, find_nonfinite, is_finite

NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(("norm", "was_applied"), [(2.0, True), (math.nan, False), (math.inf, False), (None, False)])
def test_a_step_whose_norm_is_not_finite_was_not_applied(norm: float | None, was_applied: bool) -> None:
    """DeepSpeed's bfloat16 optimizers say that they stepped."""
    wrapped = SimpleNamespace(
        module=SimpleNamespace(objective=None), was_step_applied=lambda: True, get_global_grad_norm=lambda: norm
    )
    groups: Any = None
    engine = Engine(wrapped, groups, torch.device("cpu"), lambda _: 0.1, lambda: None, lambda _: None)
    assert engine.read_update(0.1).was_applied is was_applied


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_finite_and_other_values(dtype: torch.dtype) -> None:
    tensor = torch.full((3, 5), torch.finfo(dtype).max, dtype=dtype)  # whose sum is not finite
    assert is_finite(tensor)
    assert is_finite(torch.empty(0, dtype=dtype))
    assert is_finite(torch.arange(3))
    for value in (float("nan"), float("inf"), -float("inf")):
        spoilt = tensor.clone()
        spoilt[2, 1] = value
        assert not is_finite(spoilt)
        module = nn.Linear(5, 3, dtype=dtype)
        assert find_nonfinite(module) == ""
        module.weight.data.copy_(spoilt)
        assert find_nonfinite(module) == "weight"


def test_the_file_of_a_tensor_is_found(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(make_config("qwen3")).save_pretrained(tmp_path, max_shard_size="20KB")
    match = find_file(str(tmp_path), NAME)
    assert match is not None
    assert NAME in load_file(match)
    assert find_file(str(tmp_path), "another") is None
    assert find_file(str(tmp_path / "nowhere"), NAME) is None


def test_a_checkpoint_without_numbers_is_neither_resumed_nor_exported(
    tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    config = make_config("qwen3")
    model = AutoModelForCausalLM.from_config(config)
    trained = {name: value.detach().clone() for name, value in model.named_parameters()}
    trained[NAME][-1, -1] = float("nan")
    checkpoint = save_as_ranks(trained, tmp_path / "step-1")
    sources, _ = index_sources(checkpoint)
    key, numel = f"model.{NAME}", trained[NAME].numel()
    # a resumed run's weights and moments come this way
    said = [explain(read_range, sources[key], f"{key}|master", 0, numel, error=CheckpointError)]
    assert len(read_range(sources[key], f"{key}|master", 0, numel // 3)) == numel // 3
    said.append(explain(export, checkpoint, tmp_path / "ours", config, error=CheckpointError))
    trained[NAME][-1, -1] = -1e5
    large = save_as_ranks(trained, tmp_path / "step-2")
    said.append(explain(export, large, tmp_path / "ours", config, dtype=torch.float16, error=CheckpointError))
    assert said == snapshot
    assert not list(tmp_path.glob("ours*"))
    export(large, tmp_path / "ours", config, dtype=torch.bfloat16)


PACKAGE = ROOT / "ulysses_cli"


class Payload:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    marker, folder = tmp_path / "the code ran", tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    torch.save({"lm_head.weight": Payload(marker)}, folder / "pytorch_model.bin")
    making = ModelOptions(AutoConfig.for_model(**CONFIG), torch.float32, "eager")
    assert explain(load_pretrained, making, str(folder), error=BuildError) == snapshot
    assert not marker.exists()
    torch.load(folder / "pytorch_model.bin", weights_only=False)  # proves that the pickle would have run
    assert marker.exists()


def test_only_four_files_unpickle() -> None:
    """prove/ranks.py reads what its own processes have just written in a folder of its own, and choosing.py what the
    process that started it writes; consistency.py and rendezvous.py read what carries the run's seal."""
    found = {
        str(file.relative_to(PACKAGE))
        for file in PACKAGE.rglob("*.py")
        if re.search(r"\bpickle\.loads?\b|torch\.load\(|joblib|allow_pickle=True", file.read_text())
    }
    sealed = {"train/processes/consistency.py", "train/processes/rendezvous.py"}
    assert found <= {"prove/ranks.py", "train/choosing.py", *sealed}
