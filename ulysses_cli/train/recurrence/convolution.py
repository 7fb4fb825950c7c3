"""Causal depthwise convolutions on split rows: each slice is preceded by its halo, and no tap crosses the beginning
of a document.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ulysses_cli.train.attention.documents import Documents
from ulysses_cli.train.processes.sequence_axis import SequenceAxis
from ulysses_cli.train.recurrence.halo import fetch_halo


def convolve(
    convolution: Callable[..., Tensor],
    slices: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    documents: Documents,
    axis: SequenceAxis,
    **options: Any,
) -> Tensor:
    """[B, C, S] -> [B, C, S]. `convolution`: the model's own, which looks back over weight.size(-1) - 1 tokens and
    takes what comes before a sequence as zeros.

    Zeros are put in front of each document that begins inside the slice, so that any kernel serves. A row that is one
    document is not copied but for its halo.
    """
    num_before = weight.size(-1) - 1
    halo = fetch_halo(slices, num_before, axis)
    results = []
    for row, bounds in enumerate(list_slice_bounds(documents, slices.size(0), slices.size(2), axis)):
        begins_document, starts = bounds
        first = torch.zeros_like(halo[row]) if begins_document else halo[row]
        pieces, positions, end = [first], [], num_before
        for start, stop in pairwise([*starts, slices.size(2)]):
            if start:
                pieces.append(torch.zeros_like(first))
                end += num_before
            pieces.append(slices[row, :, start:stop])
            positions.append((end, end + stop - start))
            end += stop - start
        out = convolution(torch.cat(pieces, 1)[None], weight, bias, **options)[0]
        results.append(torch.cat([out[:, start:stop] for start, stop in positions], 1))
    return torch.stack(results)


def list_slice_bounds(
    documents: Documents, num_rows: int, local_tokens: int, axis: SequenceAxis
) -> list[tuple[bool, list[int]]]:
    """For each row of this rank's slices: whether a document begins with the slice, and where stretches of one document
    begin in it; the first begins at 0."""
    row_tokens = local_tokens * axis.size
    begins = [start for start, _ in documents.walk()]
    bounds = []
    for row in range(num_rows):
        first = row * row_tokens + axis.rank * local_tokens
        inside = [begin - first for begin in begins if first <= begin < first + local_tokens]
        bounds.append((0 in inside, [0, *(begin for begin in inside if begin)]))
    return bounds
