"""The last tokens of the slice before this one: what a causal convolution looks back to across ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ulysses_cli.train.processes.sequence_axis import SequenceAxis
from ulysses_cli.train.telemetry.clock import part_of_step


def gather_halo(slices: Tensor, num_tokens: int, num_kept: Sequence[int], axis: SequenceAxis) -> Tensor:
    """Takes [B, C, S], returns [B, C, num_tokens]: the end of the previous rank's slice. Of each row only the last
    `num_kept` tokens are kept, those of the document that goes on in this rank's slice; the others are zeros.

    Collective over the axis, with equal shapes on all its ranks: one forward, one backward. The result must be used, or
    the backward would miss this rank.
    """
    if slices.size(2) < num_tokens:
        raise ValueError(
            f"a slice of {slices.size(2)} tokens is shorter than the {num_tokens} that the next rank's convolution "
            f"needs"
        )
    if axis.group is None:
        return slices.new_zeros(*slices.shape[:2], num_tokens)
    halo: Tensor = _Halo.apply(slices, num_tokens, tuple(num_kept), axis)
    return halo


class _Halo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, slices: Tensor, num_tokens: int, num_kept: tuple[int, ...], axis: SequenceAxis) -> Tensor:
        ctx.num_tokens, ctx.num_kept, ctx.axis, ctx.shape = num_tokens, num_kept, axis, slices.shape
        return _clear(_gather_from(axis.rank - 1, slices[:, :, slices.size(2) - num_tokens :], axis), num_kept)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dhalo: Tensor) -> tuple[Tensor | None, ...]:
        grad = dhalo.new_zeros(ctx.shape)
        dtail = _gather_from(ctx.axis.rank + 1, _clear(dhalo.clone(), ctx.num_kept), ctx.axis)
        grad[:, :, ctx.shape[2] - ctx.num_tokens :] = dtail
        return grad, None, None, None


def _clear(halo: Tensor, num_kept: Sequence[int]) -> Tensor:
    for row, num in enumerate(num_kept):
        halo[row, :, : halo.size(2) - num] = 0
    return halo


def _gather_from(source: int, part: Tensor, axis: SequenceAxis) -> Tensor:
    """The part of another rank, zeros where there is no such rank. One collective on the axis: all its ranks are here,
    since they run the same layers on slices of the same rows. Parts are a few tokens, so that all may get all of
    them."""
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(axis.size)]
    with part_of_step("exchange"):
        dist.all_gather(parts, part.contiguous(), group=axis.group)
    return parts[source] if 0 <= source < axis.size else torch.zeros_like(parts[0])
