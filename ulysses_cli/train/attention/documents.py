"""The bounds of documents in the tokens of a row: made once per row, passed to every layer.

Bounds are data: they are never derived from positions, and reading them never waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch

from ulysses_cli.plan.rows.indexing import CallSize, find_overrun
from ulysses_cli.plan.rows.ring import (
    MAX_SHARES,
    KeyPlan,
    Order,
    QueryPart,
    Round,
    Rounds,
    Shared,
    TokenRun,
    check_order,
    cut_runs,
    plan_keys,
    plan_rounds,
)
from ulysses_cli.train.processes.groups import SequenceAxis


@dataclass(frozen=True, eq=False)
class Documents:
    """Lengths of documents, on the host, and their bounds on the device. A kernel gets two of each: a document's
    queries are the last of its keys, usually all of them; in the rounds of a ring they stand behind the keys.

    For a model's forward they are the documents of the tokens of all ranks, and `order` says which of these tokens each
    rank of a ring holds; a rank that attends to the keys of more than `max_shares` of them gets these in rounds. With
    several rows in a batch, the rows' documents follow each other: row 0's, then row 1's. `shared`: documents whose
    first tokens are those of another one (plan/rows/ring.py).
    """

    lengths: tuple[int, ...]
    cu_seqlens: torch.Tensor  # int32 [num_documents + 1]
    key_lengths: tuple[int, ...]
    key_cu_seqlens: torch.Tensor
    order: Order = ()  # empty: one rank holds all tokens
    max_shares: float = MAX_SHARES
    shared: Shared = ()
    calls: dict[tuple[int | None, int, KernelHeads], KernelCalls] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def max_tokens(self) -> int:
        return max(self.lengths)

    @cached_property
    def long_bounds(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The bounds in 64 bits, on the device and on the host. All layers get the same tensors: kernels know by these
        what they have derived for a row."""
        return self.cu_seqlens.long(), torch.tensor([0, *accumulate(self.lengths)])

    @property
    def max_key_tokens(self) -> int:
        return max(self.key_lengths)

    def check_num_tokens(self, batch: int, tokens: int, num_ranks: int) -> None:
        """Documents must fill the rows that the ranks hold together, `batch` of `tokens` on each."""
        if self.num_tokens != batch * tokens * num_ranks:
            raise ValueError(
                f"documents hold {self.num_tokens} tokens, but {batch} rows x {tokens} tokens x {num_ranks} ranks make "
                f"{batch * tokens * num_ranks}"
            )

    def walk(self) -> Iterator[tuple[slice, slice]]:
        """Yields each document's queries and keys."""
        for queries, keys in zip(walk_bounds(self.lengths), walk_bounds(self.key_lengths), strict=True):
            yield slice(*queries), slice(*keys)

    def list_local_lengths(self, batch: int, tokens: int, axis: SequenceAxis) -> torch.Tensor:
        """The length of the document of each token of this rank, [B, S] on the host."""
        self.check_num_tokens(batch, tokens, axis.size)
        counts = torch.tensor(self.lengths)
        rows, order = counts.repeat_interleave(counts), self.order or ((TokenRun(0, self.num_tokens),),)
        ring_rank, inner_rank = divmod(axis.rank, axis.size // len(order))
        share = self.num_tokens // len(order) // batch
        parts = []
        for row in range(batch):
            first = row * share + inner_rank * tokens
            parts += [rows[start:stop] for start, stop in cut_runs(order[ring_rank], first, first + tokens)]
        return torch.cat(parts).view(batch, tokens)

    def plan_calls(self, window_tokens: int | None, ring: SequenceAxis, heads: KernelHeads) -> KernelCalls:
        """Which keys this rank needs under a window, and its kernel calls. Made once per row, window and kind of
        layer."""
        key = (window_tokens, ring.rank, heads)
        if key not in self.calls:
            self.calls[key] = self._make_calls(window_tokens, ring, heads)
        return self.calls[key]

    def _make_calls(self, window_tokens: int | None, ring: SequenceAxis, heads: KernelHeads) -> KernelCalls:
        order = self.order or ((TokenRun(0, self.num_tokens),),)
        if len(order) != ring.size:
            raise ValueError(f"the rows are dealt to {len(order)} ranks of a ring of {ring.size}")
        if ring.size == 1 and not self.shared:
            whole = TokenRun(0, self.num_tokens)
            parts = heads.cut(QueryPart(whole, whole, self.lengths, self.key_lengths))
            if len(parts) == 1:
                return KernelCalls(None, (KernelCall(slice(*whole), slice(*whole), self),))
            return KernelCalls(None, self._list_calls(parts, heads))
        check_order(order, self.num_tokens)
        rounds: Rounds = ()
        if ring.size > 1:
            rounds = plan_rounds(self.lengths, order, window_tokens, ring.rank, self.max_shares, self.shared)
        if rounds:
            return KernelCalls(rounds=tuple((each, self._list_calls(each.parts, heads)) for each in rounds))
        plan = plan_keys(self.lengths, order, window_tokens, ring.rank, self.shared)
        return KernelCalls(plan, self._list_calls(plan.parts, heads))

    def _list_calls(self, parts: Sequence[QueryPart], heads: KernelHeads) -> tuple[KernelCall, ...]:
        device = self.cu_seqlens.device
        return tuple(
            KernelCall(slice(*part.queries), slice(*part.keys), make_documents(part.lengths, device, part.key_lengths))
            for whole in parts
            for part in heads.cut(whole)
        )


class IndexLimitError(ValueError):
    """A document is too long for the indices of an attention kernel."""


class KernelHeads(NamedTuple):
    """The heads of this rank's kernel calls, whose indices bound the tokens of a call (plan/rows/indexing.py)."""

    kernel: str
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def cut(self, part: QueryPart) -> list[QueryPart]:
        """As few calls as these indices allow: usually one. Kernels leave room after each document, so that what
        counts besides tokens is how many there are. One document is never cut."""
        if not self._find_overrun(sum(part.lengths), sum(part.key_lengths), len(part.lengths)):
            return [part]
        if len(part.lengths) == 1:
            raise IndexLimitError(
                f"attention of a document of {part.lengths[0]:,} queries and {part.key_lengths[0]:,} keys in one call: "
                f"{self.kernel} {self._find_overrun(part.lengths[0], part.key_lengths[0], 1)}; use more chunks of heads"
            )
        middle = len(part.lengths) // 2
        query, key = part.queries.start + sum(part.lengths[:middle]), part.keys.start + sum(part.key_lengths[:middle])
        first = QueryPart(
            TokenRun(part.queries.start, query),
            TokenRun(part.keys.start, key),
            part.lengths[:middle],
            part.key_lengths[:middle],
        )
        last = QueryPart(
            TokenRun(query, part.queries.stop),
            TokenRun(key, part.keys.stop),
            part.lengths[middle:],
            part.key_lengths[middle:],
        )
        return [*self.cut(first), *self.cut(last)]

    def _find_overrun(self, queries: int, keys: int, num_documents: int) -> str:
        call = CallSize(queries, keys, self.num_heads, self.num_kv_heads, self.head_dim, num_documents)
        return find_overrun(self.kernel, call)


@dataclass(frozen=True, eq=False)
class KernelCall:
    """One call of a kernel: slices of this rank's queries and of its keys, and the documents in them."""

    queries: slice
    keys: slice
    documents: Documents


@dataclass(frozen=True, eq=False)
class KernelCalls:
    """The kernel calls of a rank for a layer. `plan`: the keys that ranks of its ring trade, and how calls take them;
    None where a rank's own are taken as they are. In their place `rounds`, with the calls of each: what a rank attends
    to is then fetched block by block."""

    plan: KeyPlan | None = None
    parts: tuple[KernelCall, ...] = ()
    rounds: tuple[tuple[Round, tuple[KernelCall, ...]], ...] = ()


def make_documents(
    lengths: Sequence[int],
    device: torch.device | str = "cpu",
    key_lengths: Sequence[int] | None = None,
    order: Order = (),
    max_shares: float = MAX_SHARES,
    shared: Shared = (),
) -> Documents:
    """Makes documents of these lengths, one after another. Padding is a document of its own."""
    if not lengths or min(lengths) < 1:
        raise ValueError(f"document lengths must be positive, not {list(lengths)}")
    bounds = _make_bounds(lengths, device)
    if key_lengths is None or tuple(key_lengths) == tuple(lengths):
        shared = shared if any(shared) else ()
        return Documents(tuple(lengths), bounds, tuple(lengths), bounds, order, max_shares, shared)
    key_bounds = _make_bounds(key_lengths, device)
    return Documents(tuple(lengths), bounds, tuple(key_lengths), key_bounds, order, max_shares)


def _make_bounds(lengths: Sequence[int], device: torch.device | str) -> torch.Tensor:
    bounds = [0, *accumulate(lengths)]
    if bounds[-1] >= 2**31:
        raise ValueError(f"{bounds[-1]} tokens in one call: bounds are 32-bit integers")
    pinned = torch.tensor(bounds, dtype=torch.int32, pin_memory=torch.device(device).type == "cuda")
    return pinned.to(device, non_blocking=True)


def walk_bounds(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields (first token, one past the last) of each document."""
    end = 0
    for length in lengths:
        yield end, end + length
        end += length
