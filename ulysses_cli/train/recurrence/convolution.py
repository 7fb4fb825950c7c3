"""Causal depthwise convolutions on split rows: each slice is preceded by its halo, the tokens before it from the
ranks before, and no tap crosses the beginning of a document."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ulysses_cli.train.attention.documents import Documents, walk_bounds
from ulysses_cli.train.clock import part_of_step
from ulysses_cli.train.processes.groups import SequenceAxis


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
        ctx.num_tokens = num_tokens
        ctx.num_kept = num_kept
        ctx.axis = axis
        ctx.shape = slices.shape
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


def convolve(
    convolution: Callable[..., Tensor],
    slices: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    documents: Documents,
    axis: SequenceAxis,
    **options: Any,
) -> Tensor:
    """Takes and returns [B, C, S]. `convolution`: the model's own, which looks back over weight.size(-1) - 1 tokens and
    takes what comes before a sequence as zeros. Collective over the axis.

    Zeros are put in front of each document that begins inside the slice, so that any kernel serves. A row that is one
    document is not copied but for its halo.
    """
    documents.check_num_tokens(slices.size(0), slices.size(2), axis.size)
    num_before = weight.size(-1) - 1
    rows = list_stretches(documents, slices.size(0), slices.size(2), axis)
    halo = gather_halo(slices, num_before, [min(row.num_earlier, num_before) for row in rows], axis)
    results = []
    for row, stretches in enumerate(rows):
        pieces, positions, end = [halo[row]], [], num_before
        for start, stop in pairwise([*stretches.starts, slices.size(2)]):
            if start:
                pieces.append(torch.zeros_like(halo[row]))
                end += num_before
            pieces.append(slices[row, :, start:stop])
            positions.append((end, end + stop - start))
            end += stop - start
        out = convolution(torch.cat(pieces, 1)[None], weight, bias, **options)[0]
        results.append(torch.cat([out[:, start:stop] for start, stop in positions], 1))
    return torch.stack(results)


class Stretches(NamedTuple):
    """A row's stretches of one document in a rank's slice. `num_earlier`: tokens of the first stretch's document that
    come before the slice. `starts`: where stretches begin in the slice; the first begins at 0."""

    num_earlier: int
    starts: list[int]


def list_stretches(documents: Documents, num_rows: int, local_tokens: int, axis: SequenceAxis) -> list[Stretches]:
    """Lists the stretches of each row. Every row begins with a document."""
    row_tokens = local_tokens * axis.size
    begins = [begin for begin, _ in walk_bounds(documents.lengths)]
    rows = []
    for row in range(num_rows):
        first = row * row_tokens + axis.rank * local_tokens
        last_begin = begins[bisect_right(begins, first) - 1]
        inside = [begin - first for begin in begins if first < begin < first + local_tokens]
        rows.append(Stretches(first - last_begin, [0, *inside]))
    return rows
