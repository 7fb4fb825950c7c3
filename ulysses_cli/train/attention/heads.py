"""Which heads each rank gets, chunk by chunk. Pure integers; no tensor is touched here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple


class Span(NamedTuple):
    """Heads [start, stop)."""

    start: int
    stop: int

    @property
    def num_heads(self) -> int:
        return self.stop - self.start


Spans = tuple[Span, ...]  # one for each rank of the axis


class Pattern(NamedTuple):
    """Spans that repeat: rank r has `num_heads` heads from `start + (r // num_copies) x step` on."""

    start: int
    num_heads: int
    step: int
    num_distinct: int
    num_copies: int


@dataclass(frozen=True)
class Chunk:
    """What one exchange carries: for each rank its query heads, and just the key/value heads that they need."""

    queries: Spans
    keys: Spans


@dataclass(frozen=True)
class HeadPlan:
    """Every chunk of an attention layer. `group_size`: query heads that share one key/value head."""

    group_size: int
    chunks: tuple[Chunk, ...]
    adds_up: bool  # gradients of a key/value head arrive piecemeal, from several chunks or in no regular pattern

    def list_runs(self, chunk: Chunk, rank: int) -> list[tuple[Span, Span]]:
        """A rank's heads as runs in which each key/value head serves the same number of query heads, relative to the
        rank's own first head: kernels know only such runs. Nearly always there is just one."""
        queries, keys = chunk.queries[rank], chunk.keys[rank]
        runs: list[tuple[Span, Span]] = []
        for key in range(keys.start, keys.stop):
            start = max(queries.start, key * self.group_size) - queries.start
            stop = min(queries.stop, (key + 1) * self.group_size) - queries.start
            at = key - keys.start
            if runs and runs[-1][0].num_heads == (stop - start) * runs[-1][1].num_heads:
                runs[-1] = (Span(runs[-1][0].start, stop), Span(runs[-1][1].start, at + 1))
            else:
                runs.append((Span(start, stop), Span(at, at + 1)))
        return runs


@cache
def plan_heads(num_heads: int, num_kv_heads: int, sp_size: int, num_chunks: int = 1) -> HeadPlan:
    """Query heads in order over ranks, each rank's in order over chunks."""
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_kv_heads} key/value heads do not divide {num_heads} query heads")
    if num_heads % (sp_size * num_chunks):
        raise ValueError(f"{sp_size} ranks x {num_chunks} chunks do not divide {num_heads} query heads")
    local, group_size = num_heads // sp_size, num_heads // num_kv_heads
    width = local // num_chunks
    chunks = []
    for chunk in range(num_chunks):
        starts = [rank * local + chunk * width for rank in range(sp_size)]
        queries = tuple(Span(start, start + width) for start in starts)
        keys = tuple(Span(q.start // group_size, (q.stop - 1) // group_size + 1) for q in queries)
        chunks.append(Chunk(queries, keys))
    is_shared = sum(span.num_heads for chunk in chunks for span in chunk.keys) > num_kv_heads
    is_regular = all(find_pattern(chunk.keys) for chunk in chunks)
    return HeadPlan(group_size, tuple(chunks), is_shared and (num_chunks > 1 or not is_regular))


@cache
def find_pattern(spans: Spans) -> Pattern | None:
    """The pattern that spans follow without overlap, or None."""
    starts = [span.start for span in spans]
    num_copies = starts.count(starts[0])
    distinct = sorted(set(starts))
    step = distinct[1] - distinct[0] if len(distinct) > 1 else spans[0].num_heads
    found = Pattern(starts[0], spans[0].num_heads, step, len(distinct), num_copies)
    expected = [Span(found.start + r // num_copies * step, 0) for r in range(len(spans))]
    is_whole = len(distinct) * num_copies == len(spans)
    follows = is_whole and all(
        span == (want.start, want.start + found.num_heads) for span, want in zip(spans, expected, strict=True)
    )
    return found if follows and step >= found.num_heads else None
