"""The last tokens of the slice before this one: what a causal convolution looks back to across ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ulysses_cli.train.processes.sequence_axis import SequenceAxis
from ulysses_cli.train.telemetry.clock import part_of_step


def fetch_halo(slices: Tensor, num_tokens: int, axis: SequenceAxis) -> Tensor:
    """[B, C, S] -> [B, C, num_tokens]: the end of the previous rank's slice, zeros on the first rank.

    Ranks of the axis call this together, with equal shapes: one collective forward, one backward.
    """
    if slices.size(2) < num_tokens:
        raise ValueError(
            f"a slice of {slices.size(2)} tokens is shorter than the {num_tokens} that the next rank needs"
        )
    if axis.group is None or num_tokens == 0:
        return slices.new_zeros(*slices.shape[:2], num_tokens)
    halo: Tensor = _Halo.apply(slices, num_tokens, axis)
    return halo


class _Halo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, slices: Tensor, num_tokens: int, axis: SequenceAxis) -> Tensor:
        ctx.num_tokens, ctx.axis, ctx.shape = num_tokens, axis, slices.shape
        return _pass_on(slices[:, :, -num_tokens:].contiguous(), axis, step=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dhalo: Tensor) -> tuple[Tensor | None, ...]:
        grad = dhalo.new_zeros(ctx.shape)
        grad[:, :, -ctx.num_tokens :] = _pass_on(dhalo.contiguous(), ctx.axis, step=-1)
        return grad, None, None


def _pass_on(tail: Tensor, axis: SequenceAxis, step: int) -> Tensor:
    """Each rank's tensor goes to the rank `step` further on; zeros where nobody sends. One collective on the axis: all
    its ranks are here, since they run the same layers on slices of the same rows."""
    to, source = axis.rank + step, axis.rank - step
    num_sent = tail.numel() if 0 <= to < axis.size else 0
    num_received = tail.numel() if 0 <= source < axis.size else 0
    received = tail.new_empty(num_received)
    widths_out = [num_sent if rank == to else 0 for rank in range(axis.size)]
    widths_in = [num_received if rank == source else 0 for rank in range(axis.size)]
    with part_of_step("exchange"):
        dist.all_to_all_single(received, tail.view(-1)[:num_sent], widths_in, widths_out, group=axis.group)
    return received.view(tail.shape) if num_received else torch.zeros_like(tail)
