"""Tests that ours equals DeepSpeed's own Ulysses layer bit for bit in float32, where that layer is right (one document
per row)."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.attention import Problem, make_tensors
from support.rank_pool import run_on_ranks
from support.tiers import NUM_RANKS

from ulysses_cli.train.attention.documents import make_documents
from ulysses_cli.train.attention.kernels.native import Rule
from ulysses_cli.train.attention.ulysses import ulysses_attention
from ulysses_cli.train.model.build import take_over_groups
from ulysses_cli.train.processes.groups import make_sequence_axis


def compare_layers(problem: Problem) -> dict[str, bool]:
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if not deepspeed.comm.is_initialized():
        take_over_groups()
    axis, tensors = make_sequence_axis(dist.group.WORLD), make_tensors(problem)
    local = problem.tokens // axis.size
    part = slice(axis.rank * local, (axis.rank + 1) * local)
    positions = torch.arange(problem.tokens)[None, part]
    reference = UlyssesSPAttentionHF(
        sdpa_attention_forward,
        batch_size=1,
        attn_head_count=problem.heads,
        attn_head_size=problem.dim,
        kv_head_count=problem.kv_heads,
        num_hidden_layers=1,
        process_group=dist.group.WORLD,
        seq_length_is_variable=True,
    )
    module: Any = torch.nn.Module()
    module.is_causal, module.num_key_value_groups = True, problem.heads // problem.kv_heads
    results = []
    for is_ours in (True, False):
        q, k, v = (tensors[name][:, part].transpose(1, 2).clone().requires_grad_() for name in "qkv")
        if is_ours:
            heads = (tensor.transpose(1, 2) for tensor in (q, k, v))
            documents, rule = make_documents(problem.lengths), Rule(problem.scale)
            out = ulysses_attention(*heads, documents, rule, axis=axis, kernel="sdpa").flatten(2)
        else:
            out, _ = reference(module, q, k, v, None, scaling=problem.scale, position_ids=positions)
        grads = torch.autograd.grad(out, (q, k, v), tensors["dout"][:, part].flatten(2))
        results.append((out.detach(), *grads))
    return {name: torch.equal(a, b) for name, a, b in zip(("out", "dq", "dk", "dv"), *results, strict=True)}


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
@pytest.mark.parametrize("heads", [(8, 8), (8, 4)], ids=str)
def test_outputs_and_gradients_are_bitwise_equal(num_ranks: int, heads: tuple[int, int]) -> None:
    problem = Problem(*heads, dim=16, lengths=(256,), dtype=torch.float32)
    for equal in run_on_ranks(num_ranks, compare_layers, problem):
        assert all(equal.values()), equal


def test_shared_heads_differ_in_the_order_of_a_sum() -> None:
    """With one key/value head on 4 ranks, DeepSpeed repeats it before the exchange and autograd adds the four gradients
    one by one; ours adds them at once. Outputs and query gradients are bitwise equal, the others equal to rounding."""
    problem = Problem(4, 1, dim=16, lengths=(256,), dtype=torch.float32)
    for equal in run_on_ranks(4, compare_layers, problem):
        assert equal["out"]
        assert equal["dq"]
