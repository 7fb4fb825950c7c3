"""Tests that a GPU runs recurrences and convolutions by an installed package's kernel, chosen against torch's code, and
that without the package torch's code is exact on packed documents."""

from typing import Any

import pytest
import torch
from transformers.models.bamba import modeling_bamba
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.qwen3_next import modeling_qwen3_next

from ulysses_cli.plan.models.layers import DeltaNetMixer, KimiDeltaMixer, Mamba2Mixer
from ulysses_cli.train.choosing import measure_error
from ulysses_cli.train.recurrence.choice import PackedProbe, choose_recurrence_kernel, find_missing, try_kernel

pytestmark = pytest.mark.gpu
# With the widths of Qwen3-Next, Kimi-Linear and Nemotron-3.
RULES: dict[str, Any] = {
    "delta net": (modeling_qwen3_next, "torch_chunk_gated_delta_rule", DeltaNetMixer(16, 32, 128, 128, 4)),
    "kimi delta": (modeling_kimi_linear, "chunk_kimi_delta_attention", KimiDeltaMixer(32, 128, 4)),
    "mamba2": (modeling_bamba, "mamba2_chunk_scan", Mamba2Mixer(64, 64, 8, 128, 4, 128)),
}


def make_probe(module: Any, name: str, mixer: Any, *, is_installed: bool = True) -> PackedProbe:
    """Of transformers' own function, where another test has served a model of this family."""
    function = getattr(module, name)
    original = function.__wrapped__ if hasattr(function, "is_served") else function
    if is_installed and (missing := find_missing(original)):
        pytest.skip(missing)
    return PackedProbe(name, original, mixer, torch.device("cuda"))


@pytest.mark.parametrize("rule", RULES)
def test_an_installed_kernel_takes_whole_rows(rule: str) -> None:
    choice = choose_recurrence_kernel(make_probe(*RULES[rule]), torch.bfloat16)
    assert choice.name == "packed", choice.reason


@pytest.mark.parametrize("rule", RULES)
def test_torch_code_in_bfloat16_is_near_float32(rule: str) -> None:
    run = make_probe(*RULES[rule], is_installed=False).run
    pairs = zip(run("torch", torch.bfloat16), run("torch", torch.float32), strict=True)
    assert max(measure_error(ours, right) for ours, right in pairs) < 0.1


def test_an_installed_convolution_is_used() -> None:
    probe = make_probe(modeling_bamba, "causal_conv1d_fn", RULES["mamba2"][2])
    assert try_kernel(probe, "by document", torch.bfloat16).obstacle == ""
