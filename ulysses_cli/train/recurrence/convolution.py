"""Causal depthwise convolutions on split rows: each slice is preceded by its halo, and no tap crosses the beginning
of a document.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ulysses_cli.train.attention.documents import Documents, walk_bounds
from ulysses_cli.train.processes.sequence_axis import SequenceAxis
from ulysses_cli.train.recurrence.halo import gather_halo


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
