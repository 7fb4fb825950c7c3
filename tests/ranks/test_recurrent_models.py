"""Families with convolutions and recurrences on split rows, against the plain model document by document."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.rank_pool import run_on_ranks
from support.tiers import NUM_RANKS, sample
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from ulysses_cli.train.attention.documents import make_documents
from ulysses_cli.train.attention.interface import register_attention
from ulysses_cli.train.processes.sequence_axis import make_sequence_axis
from ulysses_cli.train.recurrence.interface import find_unserved_layers, serve_recurrent_layers

LENGTHS = (21, 1, 2, 28, 12)  # one token; shorter than a convolution; over the bounds of slices
TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 128,
    "attention_dropout": 0.0,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_next": {**DELTA, **EXPERTS},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**DELTA, **EXPERTS},
    "olmo_hybrid": {**DELTA, "linear_num_key_heads": 4},
    "kimi_linear": {},
    "nemotron_h": {
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 8,
        "chunk_size": 8,
        "layer_types": ["mamba", "moe", "mamba", "attention"],
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 24,
    },
    "granitemoehybrid": {
        **MAMBA,
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 24,
    },
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64, "num_hidden_layers": 2},
    "bamba": {**MAMBA, "attn_layer_indices": [1], "num_hidden_layers": 3},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {
        "layer_types": ["conv", "conv", "full_attention", "conv"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "num_dense_layers": 1,
    },
    "lfm3": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
}


def make_model(model_type: str, attention: str, **changes: Any) -> torch.nn.Module:
    values = {**TINY, **FAMILIES[model_type], **changes, "attn_implementation": attention}
    config = AutoConfig.for_model(model_type, **values, experts_implementation="eager")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).double()
    for name, parameter in model.named_parameters():
        if name.endswith(("A_log", "dt_bias", "conv1d.bias", "conv.bias")):
            torch.nn.init.uniform_(parameter, 0.1, 1.0)
    return model


def make_row() -> tuple[Tensor, Tensor]:
    ids = torch.randint(3, 64, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    return ids, torch.cat([torch.arange(length) for length in LENGTHS])[None]


def compute_loss(logits: Tensor, ids: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).double(), ids.flatten() * 7 % 64, reduction="sum")


def run_plain(model_type: str, **changes: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model = make_model(model_type, "eager", **changes)
    ids, _ = make_row()
    total = torch.zeros((), dtype=torch.float64)
    for document in ids.split(LENGTHS, 1):
        total = total + compute_loss(model(document, use_cache=False).logits, document)
    total.backward()
    return total.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def run_split(model_type: str, checkpointing: bool, **changes: Any) -> tuple[Tensor, dict[str, Tensor]]:
    axis = make_sequence_axis(dist.group.WORLD if dist.is_initialized() else None)
    model = make_model(model_type, register_attention(axis, "sdpa", 1), **changes)
    serve_recurrent_layers(model)
    assert find_unserved_layers(model) == []
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids, positions = (whole.chunk(axis.size, 1)[axis.rank] for whole in make_row())
    out = model(ids, position_ids=positions, use_cache=False, documents=make_documents(LENGTHS), sequence_axis=axis)
    loss = compute_loss(out.logits, ids)
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    total = loss.detach()
    if axis.group is not None:
        for tensor in (total, *grads.values()):
            dist.all_reduce(tensor)
    return total, grads


def compare_models(model_type: str, checkpointing: bool = False, changes: dict[str, Any] | None = None) -> float:
    """Largest difference of loss and gradients, relative to each one's largest value."""
    expected_loss, expected = run_plain(model_type, **(changes or {}))
    loss, grads = run_split(model_type, checkpointing, **(changes or {}))
    assert grads.keys() == expected.keys()
    errors = [
        ((grads[name] - expected[name]).abs().max() / expected[name].abs().max().clamp(min=1e-12)).item()
        for name in expected
    ]
    return max(*errors, abs(loss - expected_loss).item() / expected_loss.item())


TOLERANCE = 1e-4  # transformers' own rules compute in float32


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_family_is_exact_on_one_rank(model_type: str) -> None:
    assert compare_models(model_type) < TOLERANCE


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_family_is_exact(model_type: str, num_ranks: int) -> None:
    assert max(run_on_ranks(num_ranks, compare_models, model_type)) < TOLERANCE


@pytest.mark.parametrize("model_type", sample(["qwen3_5_text", "nemotron_h", "lfm2"], quick=["qwen3_5_text"]))
def test_with_checkpointing(model_type: str) -> None:
    assert max(run_on_ranks(2, compare_models, model_type, True)) < TOLERANCE
