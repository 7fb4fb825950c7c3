"""The exchange of heads around a recurrence, with gradients: slices of rows with all heads become whole rows with this
rank's heads, and back. A head that several ranks use gets its gradient as the sum of theirs.

A recurrence takes tensors of unlike widths and dtypes. They travel as bytes in one collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ulysses_cli.train.attention.heads import Spans
from ulysses_cli.train.processes.sequence_axis import SequenceAxis
from ulysses_cli.train.telemetry.clock import part_of_step

ALIGNMENT_BYTES = 16  # a tensor of any dtype may begin there

# Shapes. B rows in a batch, S tokens of a row on this rank, P ranks that share it, T = B x P x S tokens in all,
# h heads of one tensor on one rank, D values of a head.


def gather_rows(slices: Sequence[Tensor], spans: Sequence[Spans], axis: SequenceAxis) -> list[Tensor]:
    """Takes tensors [B, S, all heads, D], returns [T, h, D]. `spans` lists which heads of each tensor each rank gets.
    Collective over the axis: one exchange forward, one backward."""
    if axis.group is None:
        return [part.flatten(0, 1) for part in slices]
    return list(_ToRows.apply(axis, tuple(spans), *slices))


def scatter_rows(rows: Tensor, spans: Spans, axis: SequenceAxis, batch: int) -> Tensor:
    """Takes [T, h, D], returns [B, S, all heads, D]. Collective over the axis: one exchange forward, one backward."""
    if axis.group is None:
        return rows.unflatten(0, (batch, -1))
    slices: Tensor = _ToSlices.apply(axis, spans, batch, rows)
    return slices


class _ToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: SequenceAxis, spans: tuple[Spans, ...], *slices: Tensor) -> tuple[Tensor, ...]:
        ctx.axis, ctx.spans, ctx.batch = axis, spans, slices[0].size(0)
        return tuple(_exchange_in(slices, spans, axis))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *_exchange_out(grads, ctx.spans, ctx.axis, ctx.batch)


class _ToSlices(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: SequenceAxis, spans: Spans, batch: int, rows: Tensor) -> Tensor:
        ctx.axis, ctx.spans = axis, spans
        return _exchange_out([rows], [spans], axis, batch)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, _exchange_in([grad], [ctx.spans], ctx.axis)[0]


def _exchange_in(slices: Sequence[Tensor], spans: Sequence[Spans], axis: SequenceAxis) -> list[Tensor]:
    outgoing = [
        [part[:, :, slice(*of_ranks[rank])] for part, of_ranks in zip(slices, spans, strict=True)]
        for rank in range(axis.size)
    ]
    incoming = _trade(outgoing, [outgoing[axis.rank]] * axis.size, axis)
    return [torch.stack(parts, 1).flatten(0, 2) for parts in zip(*incoming, strict=True)]


def _exchange_out(rows: Sequence[Tensor], spans: Sequence[Spans], axis: SequenceAxis, batch: int) -> tuple[Tensor, ...]:
    by_rank = [row.unflatten(0, (batch, axis.size, -1)).unbind(1) for row in rows]
    like = [
        [
            parts[0][:, :, :1].expand(-1, -1, of_ranks[rank].num_heads, -1)
            for parts, of_ranks in zip(by_rank, spans, strict=True)
        ]
        for rank in range(axis.size)
    ]
    incoming = _trade([list(parts) for parts in zip(*by_rank, strict=True)], like, axis)
    return tuple(
        _add_up(list(parts), of_ranks) for parts, of_ranks in zip(zip(*incoming, strict=True), spans, strict=True)
    )


def _add_up(parts: Sequence[Tensor], spans: Spans) -> Tensor:
    """Puts each rank's heads in their place. Heads of several ranks are summed, in float32 or better."""
    batch, tokens, _, dim = parts[0].shape
    num_heads, is_shared = max(span.stop for span in spans), sum(span.num_heads for span in spans)
    dtype = parts[0].dtype if is_shared == num_heads else torch.promote_types(parts[0].dtype, torch.float32)
    whole = torch.zeros(batch, tokens, num_heads, dim, dtype=dtype, device=parts[0].device)
    for part, span in zip(parts, spans, strict=True):
        whole[:, :, slice(*span)] += part
    return whole.to(parts[0].dtype)


def _trade(
    outgoing: Sequence[Sequence[Tensor]], like: Sequence[Sequence[Tensor]], axis: SequenceAxis
) -> list[list[Tensor]]:
    """Sends each rank its tensors, returns each rank's tensors, shaped `like`. One collective on the axis: all its
    ranks reach it, since they run the same layers on slices of the same rows."""
    device = outgoing[0][0].device
    send = torch.empty(sum(map(_count_bytes, outgoing)), dtype=torch.uint8, device=device)
    received = torch.empty(sum(map(_count_bytes, like)), dtype=torch.uint8, device=device)
    for target, part in zip(_view_parts(send, outgoing), outgoing, strict=True):
        for view, tensor in zip(target, part, strict=True):
            view.copy_(tensor)
    with part_of_step("exchange"):
        splits = [_count_bytes(parts) for parts in like], [_count_bytes(parts) for parts in outgoing]
        dist.all_to_all_single(received, send, *splits, group=axis.group)
    return _view_parts(received, like)


def _view_parts(buffer: Tensor, like: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    views: list[list[Tensor]] = []
    begin = 0
    for tensors in like:
        views.append([])
        for tensor in tensors:
            num_bytes = tensor.numel() * tensor.dtype.itemsize
            views[-1].append(buffer[begin : begin + num_bytes].view(tensor.dtype).view(tensor.shape))
            begin += _align(num_bytes)
    return views


def _count_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(_align(tensor.numel() * tensor.dtype.itemsize) for tensor in tensors)


def _align(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
