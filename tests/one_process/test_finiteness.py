"""Tests that NaN and infinity in weights are named where they are read: in a model, in a checkpoint, in an export."""

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.checkpoints import save_as_ranks
from support.families import make_config
from torch import nn
from transformers import AutoModelForCausalLM

from ulysses_cli.data.tokenizing.tokenizer import make_bytes_tokenizer
from ulysses_cli.run.checkpoints import CheckpointError
from ulysses_cli.train.checkpoint.format import index_sources, read_range
from ulysses_cli.train.export.weights import export_model
from ulysses_cli.train.tensor_file import find_file, find_nonfinite, is_finite

NAME = "model.layers.1.mlp.up_proj.weight"


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


def test_a_checkpoint_without_numbers_is_neither_resumed_nor_exported(tmp_path: Path) -> None:
    config = make_config("qwen3")
    model = AutoModelForCausalLM.from_config(config)
    trained = {name: value.detach().clone() for name, value in model.named_parameters()}
    trained[NAME][-1, -1] = float("nan")
    checkpoint = save_as_ranks(trained, tmp_path / "step-1")
    sources, _ = index_sources(checkpoint)
    key, numel = f"model.{NAME}", trained[NAME].numel()
    words = r"rank-00002\.safetensors holds NaN or infinity in model\.model\.layers\.1\.mlp\.up_proj\.weight\|master"
    with pytest.raises(CheckpointError, match=words):  # a resumed run's weights and moments come this way
        read_range(sources[key], f"{key}|master", 0, numel)
    assert len(read_range(sources[key], f"{key}|master", 0, numel // 3)) == numel // 3
    export = partial(
        export_model, config=config, tokenizer=make_bytes_tokenizer(), adapter_config=None, card="a card", step=1
    )
    with pytest.raises(CheckpointError, match=words):
        export(checkpoint, tmp_path / "ours", dtype=torch.float32)
    trained[NAME][-1, -1] = -1e5
    large = save_as_ranks(trained, tmp_path / "step-2")
    with pytest.raises(CheckpointError, match=f"{NAME} holds NaN or infinity as torch.float16: .* value is 100000"):
        export(large, tmp_path / "ours", dtype=torch.float16)
    assert not list(tmp_path.glob("ours*"))
    export(large, tmp_path / "ours", dtype=torch.bfloat16)
