"""The tokens before a rank's slice: what a causal convolution looks back to across ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ulysses_cli.train.processes.sequence_axis import SequenceAxis
from ulysses_cli.train.telemetry.clock import part_of_step


def gather_halo(slices: Tensor, num_tokens: int, num_kept: Sequence[int], axis: SequenceAxis) -> Tensor:
    """Takes [B, C, S], returns [B, C, num_tokens]: the tokens of the row before this rank's slice. Of each row only the
    last `num_kept` are kept, those of the document that goes on in this rank's slice; the others are zeros.

    Collective over the axis, with equal shapes on all its ranks: one forward, one backward. The result must be used, or
    the backward would miss this rank.
    """
    if axis.group is None:
        return slices.new_zeros(*slices.shape[:2], num_tokens)
    halo: Tensor = _Halo.apply(slices, num_tokens, tuple(num_kept), axis)
    return halo


class _Halo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, slices: Tensor, num_tokens: int, num_kept: tuple[int, ...], axis: SequenceAxis) -> Tensor:
        ctx.num_tokens, ctx.num_kept, ctx.axis, ctx.shape = num_tokens, num_kept, axis, slices.shape
        local_tokens = slices.size(2)
        tails = _gather(slices[:, :, max(0, local_tokens - num_tokens) :], axis)
        halo = slices.new_zeros(*slices.shape[:2], num_tokens)
        for source, of_tail, of_halo in _list_overlaps(range(axis.rank), axis.rank, local_tokens, num_tokens):
            halo[:, :, of_halo] = tails[source][:, :, of_tail]
        return _clear(halo, num_kept)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dhalo: Tensor) -> tuple[Tensor | None, ...]:
        axis, local_tokens = ctx.axis, ctx.shape[2]
        dhalos = _gather(_clear(dhalo.clone(), ctx.num_kept), axis)
        grad = dhalo.new_zeros(ctx.shape)
        dtail = grad[:, :, max(0, local_tokens - ctx.num_tokens) :]
        for later in range(axis.rank + 1, axis.size):
            for _, of_tail, of_halo in _list_overlaps([axis.rank], later, local_tokens, ctx.num_tokens):
                dtail[:, :, of_tail] += dhalos[later][:, :, of_halo]
        return grad, None, None, None


def _list_overlaps(
    sources: Sequence[int], rank: int, local_tokens: int, num_tokens: int
) -> Iterator[tuple[int, slice, slice]]:
    """Where tails of ranks before it lie in a rank's halo: source, part of the source's tail, part of the halo. A halo
    spans several slices where these are shorter."""
    width = min(local_tokens, num_tokens)
    for source in sources:
        end = num_tokens - (rank - source - 1) * local_tokens
        begin = max(0, end - width)
        if begin < end:
            yield source, slice(width - (end - begin), width), slice(begin, end)


def _clear(halo: Tensor, num_kept: Sequence[int]) -> Tensor:
    for row, num in enumerate(num_kept):
        halo[row, :, : halo.size(2) - num] = 0
    return halo


def _gather(part: Tensor, axis: SequenceAxis) -> list[Tensor]:
    """Every rank's part. One collective on the axis: all its ranks are here, since they run the same layers on slices
    of the same rows. Parts are a few tokens, so that all may get all of them."""
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(axis.size)]
    with part_of_step("exchange"):
        dist.all_gather(parts, part.contiguous(), group=axis.group)
    return parts
