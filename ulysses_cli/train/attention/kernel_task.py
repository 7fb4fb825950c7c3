"""What a rank computes for one chunk of heads, besides its tensors, and which tokens each kernel call takes of its
tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from ulysses_cli.train.attention.documents import KernelCall, KernelCalls
from ulysses_cli.train.attention.heads import Span
from ulysses_cli.train.attention.kernels.rule import Rule
from ulysses_cli.train.processes.sequence_axis import SequenceAxis


@dataclass(frozen=True, eq=False)
class KernelTask:
    """`runs`: query heads and their key heads that a kernel takes at once."""

    calls: KernelCalls
    runs: Sequence[tuple[Span, Span]]
    ring: SequenceAxis
    kernel: str
    rule: Rule

    def walk(self, parts: Iterable[KernelCall]) -> Iterator[tuple[slice, slice, KernelCall]]:
        """Yields the heads and the tokens of each kernel call."""
        for part in parts:
            for queries, keys in self.runs:
                yield slice(*queries), slice(*keys), part


def cut(rows: Sequence[Tensor], queries: slice, keys: slice, part: KernelCall) -> tuple[Tensor, Tensor, Tensor]:
    """The queries, keys and values of a kernel call."""
    q, k, v = rows
    return q[part.queries, queries], k[part.keys, keys], v[part.keys, keys]
