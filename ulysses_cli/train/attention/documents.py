"""The bounds of documents in the tokens of a row: made once per row, passed to every layer.

Bounds are data: they are never derived from positions, and reading them never waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch


@dataclass(frozen=True, eq=False)
class Documents:
    """Lengths of the documents in the tokens of all ranks, on the host, and their bounds on the device.

    With several rows in a batch, the rows' documents follow each other: row 0's, then row 1's.
    """

    lengths: tuple[int, ...]
    cu_seqlens: torch.Tensor  # int32 [num_documents + 1]

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def max_tokens(self) -> int:
        return max(self.lengths)

    def check_num_tokens(self, batch: int, tokens: int, num_ranks: int) -> None:
        """Documents must fill the rows that the ranks hold together, `batch` of `tokens` on each."""
        if self.num_tokens != batch * tokens * num_ranks:
            raise ValueError(
                f"documents hold {self.num_tokens} tokens, but {batch} rows x {tokens} tokens x {num_ranks} ranks make "
                f"{batch * tokens * num_ranks}"
            )

    def walk(self) -> Iterator[tuple[int, int]]:
        """Yields (first token, one past the last) of each document."""
        return walk_bounds(self.lengths)


def make_documents(lengths: Sequence[int], device: torch.device | str = "cpu") -> Documents:
    """Makes documents of these lengths, one after another. Padding is a document of its own."""
    if not lengths or min(lengths) < 1:
        raise ValueError(f"document lengths must be positive, not {list(lengths)}")
    bounds = [0, *accumulate(lengths)]
    if bounds[-1] >= 2**31:
        raise ValueError(f"{bounds[-1]} tokens in one call: bounds are 32-bit integers")
    pinned = torch.tensor(bounds, dtype=torch.int32, pin_memory=torch.device(device).type == "cuda")
    return Documents(tuple(lengths), pinned.to(device, non_blocking=True))


def walk_bounds(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    end = 0
    for length in lengths:
        yield end, end + length
        end += length
