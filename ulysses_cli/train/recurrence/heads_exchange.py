"""The exchange of heads around a recurrence, with gradients: slices of rows with all heads <-> whole rows with this
rank's heads. A head that several ranks use gets its gradient as a sum of theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ulysses_cli.train.attention.exchange import exchange_in, exchange_out
from ulysses_cli.train.attention.heads import Spans
from ulysses_cli.train.processes.sequence_axis import SequenceAxis


def gather_rows(slices: Sequence[Tensor], spans: Sequence[Spans], axis: SequenceAxis) -> list[Tensor]:
    """Each [B, S, all heads, D] of one dtype and one D -> [T, h, D]. One collective forward, one backward."""
    return list(_ToRows.apply(axis, tuple(spans), *slices))


def scatter_rows(rows: Tensor, spans: Spans, axis: SequenceAxis, batch: int, num_heads: int) -> Tensor:
    """[T, h, D] -> [B, S, all heads, D]. One collective forward, one backward."""
    slices: Tensor = _ToSlices.apply(axis, spans, batch, num_heads, rows)
    return slices


class _ToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: SequenceAxis, spans: tuple[Spans, ...], *slices: Tensor) -> tuple[Tensor, ...]:
        ctx.axis, ctx.spans, ctx.shapes = axis, spans, [part.shape for part in slices]
        return tuple(part.clone() for part in exchange_in(list(slices), spans, axis))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # summed in float32 or better where a head went to several ranks
        into = [
            torch.zeros(shape, dtype=torch.promote_types(grads[0].dtype, torch.float32), device=grads[0].device)
            for shape in ctx.shapes
        ]
        adds = [True] * len(grads)
        exchange_out(list(grads), ctx.spans, ctx.axis, ctx.shapes[0][0], into, adds=adds)
        return None, None, *(grad.to(grads[0].dtype) for grad in into)


class _ToSlices(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: SequenceAxis, spans: Spans, batch: int, num_heads: int, rows: Tensor) -> Tensor:
        ctx.axis, ctx.spans = axis, spans
        return exchange_out([rows.contiguous()], [spans], axis, batch, num_heads=[num_heads])[0].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (rows,) = exchange_in([grad.contiguous()], [ctx.spans], ctx.axis)
        return None, None, None, None, rows.clone()
