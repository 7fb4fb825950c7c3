"""Tests on a GPU that experts run exactly, by the implementation that a run chooses and with adapters beside them."""

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from ulysses_cli.train.choosing import measure_error
from ulysses_cli.train.experts import (
    SPEED_CLASSES,
    TOLERANCE,
    ExpertsProbe,
    choose_experts,
    find_experts,
    find_missing_package,
    serve_adapted_experts,
    try_experts,
)

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")
LAYER = {"num_hidden_layers": 1, "vocab_size": 256}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**LAYER, "hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128},
    "gpt_oss": {**LAYER, "hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 32},
}


def make_experts(kind: str) -> Any:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **MODELS[kind]))
    return next(iter(find_experts(model).values()))


@pytest.mark.parametrize("kind", MODELS)
def test_an_exact_implementation_is_chosen_by_time(kind: str) -> None:
    experts = make_experts(kind)
    probe = ExpertsProbe(type(experts), experts.config, 4, GPU, torch.bfloat16, 2048)
    assert try_experts(probe, "grouped_mm").obstacle == ""
    chosen = choose_experts("auto", probe, {"sonicmoe": find_missing_package(GPU)})
    assert chosen.name in SPEED_CLASSES
    assert "exact here" in chosen.reason


@pytest.mark.parametrize("rank", [1, 8])
@pytest.mark.parametrize("kind", MODELS)
def test_adapters_are_exact_in_bfloat16(kind: str, rank: int) -> None:
    """A rank of one is no multiple of what a grouped product reads at once."""
    experts = make_experts(kind)
    block, _ = ExpertsProbe(type(experts), experts.config, 4, torch.device("cpu"), torch.float32, 2048).make_block()
    holder = nn.Module()
    holder.experts, holder.config = block, None
    names = ["experts.gate_up_proj", "experts.down_proj"]
    get_peft_model(holder, LoraConfig(r=rank, target_modules=[], target_parameters=names, init_lora_weights=False))
    hidden = torch.randn(64, block.down_proj.size(2 if block.is_transposed else 1))
    chosen = torch.stack([torch.randperm(block.num_experts - 1)[:4] for _ in range(64)])
    shares, results = torch.rand(64, 4), []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        own = copy.deepcopy(holder).to(device, dtype)
        serve_adapted_experts(own)
        trained = {name: weight for name, weight in own.named_parameters() if weight.requires_grad}
        out = own.experts(hidden.to(device, dtype), chosen.to(device), shares.to(device, dtype))
        grads = torch.autograd.grad(out.float().square().sum(), list(trained.values()))
        results.append([each.detach().float().cpu() for each in (out, *grads)])
    for exact, found in zip(*results, strict=True):
        assert measure_error(found, exact) <= TOLERANCE[torch.bfloat16]
