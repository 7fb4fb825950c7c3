"""The exchange between slices of rows with all heads and whole rows with this rank's heads: one collective each way.

Tensors are copied once into the send buffer and read in place where they arrive. No attention here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ulysses_cli.plan.rows.indexing import wraps
from ulysses_cli.train.attention.heads import Spans, find_pattern
from ulysses_cli.train.processes.sequence_axis import SequenceAxis
from ulysses_cli.train.telemetry.clock import part_of_step

# Shapes. B rows in a batch, S tokens of a row on this rank, P ranks that share it, T = B x P x S tokens in all,
# h heads of one tensor on one rank, w heads of all exchanged tensors on one rank, D head_dim.


def exchange_in(slices: list[Tensor], spans: Sequence[Spans], axis: SequenceAxis) -> list[Tensor]:
    """Takes tensors [B, S, all heads, D], returns tensors [T, h, D], usually views of one buffer. `spans` lists which
    heads of each tensor each rank gets. Neighbours with the same D share a collective; each other D has its own.

    `slices` is emptied: each tensor is released as soon as it is copied.
    """
    rows = []
    for part in _list_groups(slices):
        group = slices[: part.stop - part.start]
        del slices[: len(group)]
        rows += _exchange_group_in(group, spans[part], axis)
    return rows


def _exchange_group_in(slices: list[Tensor], spans: Sequence[Spans], axis: SequenceAxis) -> list[Tensor]:
    if axis.group is None:
        parts = [
            part[:, :, rank_spans[0].start : rank_spans[0].stop] for part, rank_spans in zip(slices, spans, strict=True)
        ]
        rows = [(part if part.stride(-1) == 1 else part.contiguous()).flatten(0, 1) for part in parts]
        return [_bound_reach(row) for row in rows]
    batch, tokens, _, dim = slices[0].shape
    widths = [sum(rank_spans[rank].num_heads for rank_spans in spans) for rank in range(axis.size)]
    send = slices[0].new_empty(sum(widths) * batch * tokens * dim)
    segments = _split(send, widths, batch, tokens, dim)
    offsets = [0] * axis.size
    for rank_spans in spans:
        _pack(slices.pop(0), segments, rank_spans, offsets)
        offsets = [offset + span.num_heads for offset, span in zip(offsets, rank_spans, strict=True)]
    width = widths[axis.rank]
    received = send.new_empty(axis.size, batch, tokens, width, dim)
    _all_to_all(received, send, [width] * axis.size, widths, axis)
    del send, segments
    # With one row in the batch, tokens arrive in the row's order and nothing is moved.
    rows = received.transpose(0, 1).reshape(-1, width, dim)
    del received
    return [_bound_reach(row) for row in rows.split([rank_spans[axis.rank].num_heads for rank_spans in spans], dim=1)]


def _bound_reach(row: Tensor) -> Tensor:
    """Kernels may address a row by its stride in 32 bits. A view of a buffer that is wider than the row is copied where
    such an address would wrap; the ledger counts that copy (plan/ledger/attention.py)."""
    return row.contiguous() if wraps(row.size(0), row.stride(0)) else row


def exchange_out(
    parts: list[Tensor],
    spans: Sequence[Spans],
    axis: SequenceAxis,
    batch: int,
    into: Sequence[Tensor] | None = None,
    num_heads: Sequence[int] = (),
    *,
    adds: Sequence[bool] = (),
) -> Sequence[Tensor]:
    """The reverse: takes tensors [T, h, D], returns [B, S, all heads, D], written or, with `adds`, added into `into`.

    Heads that went to several ranks come back as a sum. `parts` is emptied: each is released as soon as it is copied.
    """
    adds, results = adds or [False] * len(parts), list[Tensor]()
    for part in _list_groups(parts):
        group = parts[: part.stop - part.start]
        del parts[: len(group)]
        own = None if into is None else into[part]
        results += _exchange_group_out(group, spans[part], axis, batch, own, num_heads[part], adds[part])
    return results


def _list_groups(tensors: Sequence[Tensor]) -> list[slice]:
    """Runs of neighbours with the same D. All ranks have the same shapes, and so the same runs."""
    dims = [tensor.size(-1) for tensor in tensors]
    starts = [at for at, dim in enumerate(dims) if at == 0 or dim != dims[at - 1]]
    return [slice(start, stop) for start, stop in zip(starts, [*starts[1:], len(dims)], strict=True)]


def _exchange_group_out(
    parts: list[Tensor],
    spans: Sequence[Spans],
    axis: SequenceAxis,
    batch: int,
    into: Sequence[Tensor] | None,
    num_heads: Sequence[int],
    adds: Sequence[bool],
) -> Sequence[Tensor]:
    if axis.group is None:
        if into is None:
            return [part.unflatten(0, (batch, -1)) for part in parts]
        for part, rank_spans, whole, add in zip(parts, spans, into, adds, strict=True):
            target, received = whole[:, :, rank_spans[0].start : rank_spans[0].stop], part.unflatten(0, (batch, -1))
            target.add_(received) if add else target.copy_(received)
        return into
    counts = [part.size(1) for part in parts]
    total, _, dim = parts[0].shape
    tokens = total // (batch * axis.size)
    dtype, device = parts[0].dtype, parts[0].device
    rows = _join(parts)
    send = rows.unflatten(0, (batch, axis.size, tokens)).transpose(0, 1).contiguous()
    del rows
    widths = [sum(rank_spans[rank].num_heads for rank_spans in spans) for rank in range(axis.size)]
    received = send.new_empty(sum(widths) * batch * tokens * dim)
    _all_to_all(received, send, widths, [sum(counts)] * axis.size, axis)
    del send
    if into is None:
        into = [torch.empty(batch, tokens, heads, dim, dtype=dtype, device=device) for heads in num_heads]
    segments = _split(received, widths, batch, tokens, dim)
    offsets = [0] * axis.size
    for rank_spans, whole, add in zip(spans, into, adds, strict=True):
        _unpack(whole, segments, rank_spans, offsets, add=add)
        offsets = [offset + span.num_heads for offset, span in zip(offsets, rank_spans, strict=True)]
    return into


def _all_to_all(
    received: Tensor, send: Tensor, widths_in: list[int], widths_out: list[int], axis: SequenceAxis
) -> None:
    """One collective on the axis. All its ranks reach it: they run the same layers on slices of the same rows."""
    splits: tuple[list[int], ...] = ()
    if len(set(widths_in)) > 1 or len(set(widths_out)) > 1:
        unit = send.numel() // sum(widths_out)
        splits = ([width * unit for width in widths_in], [width * unit for width in widths_out])
    with part_of_step("exchange"):
        dist.all_to_all_single(received.view(-1), send.view(-1), *splits, group=axis.group)


def _split(buffer: Tensor, widths: list[int], batch: int, tokens: int, dim: int) -> list[Tensor] | Tensor:
    """Views a flat buffer as one [B, S, w, D] segment per rank, or as one [P, B, S, w, D] where all are equal."""
    if len(set(widths)) == 1:
        return buffer.view(len(widths), batch, tokens, widths[0], dim)
    sizes = [width * batch * tokens * dim for width in widths]
    parts = zip(buffer.split(sizes), widths, strict=True)
    return [part.view(batch, tokens, width, dim) for part, width in parts]


def _pack(part: Tensor, segments: list[Tensor] | Tensor, spans: Spans, offsets: list[int]) -> None:
    """Copies each rank's heads of a slice to its segment, in a single copy where the spans follow a pattern."""
    pattern = find_pattern(spans)
    if isinstance(segments, Tensor) and pattern is not None:
        target = segments[..., offsets[0] : offsets[0] + pattern.num_heads, :]
        target = target.unflatten(0, (pattern.num_distinct, pattern.num_copies))
        target.copy_(_view_heads(part, spans)[:, None].expand_as(target))
        return
    for segment, span, offset in zip(segments, spans, offsets, strict=True):
        segment[:, :, offset : offset + span.num_heads] = part[:, :, span.start : span.stop]


def _unpack(whole: Tensor, segments: list[Tensor] | Tensor, spans: Spans, offsets: list[int], *, add: bool) -> None:
    """The reverse of _pack. Heads that are in several segments are summed, in float32 or better."""
    pattern = find_pattern(spans)
    if isinstance(segments, Tensor) and pattern is not None:
        received = segments[..., offsets[0] : offsets[0] + pattern.num_heads, :]
        received = received.unflatten(0, (pattern.num_distinct, pattern.num_copies))
        precision = torch.promote_types(whole.dtype, torch.float32)
        summed = received[:, 0] if pattern.num_copies == 1 else received.sum(1, dtype=precision)
        target = _view_heads(whole, spans)
        target.add_(summed) if add else target.copy_(summed)
        return
    for segment, span, offset in zip(segments, spans, offsets, strict=True):
        target, part = whole[:, :, span.start : span.stop], segment[:, :, offset : offset + span.num_heads]
        target.add_(part) if add else target.copy_(part)


def _view_heads(whole: Tensor, spans: Spans) -> Tensor:
    """Views [B, S, all heads, D] as [distinct spans, B, S, h, D] without a copy."""
    pattern = find_pattern(spans)
    if pattern is None:
        raise AssertionError(f"no pattern in {spans}")
    windows = whole[:, :, pattern.start :].unfold(2, pattern.num_heads, pattern.step)[:, :, : pattern.num_distinct]
    return windows.permute(2, 0, 1, 4, 3)


def _join(parts: list[Tensor]) -> Tensor:
    """Joins tensors [T, h, D] along the heads. Empties the list, so that each part is released once it is copied."""
    if len(parts) == 1:
        return parts.pop()
    width = sum(part.size(1) for part in parts)
    joined = parts[0].new_empty(parts[0].size(0), width, parts[0].size(2))
    offset = 0
    while parts:
        part = parts.pop(0)
        joined[:, offset : offset + part.size(1)] = part
        offset += part.size(1)
    return joined
