"""The ranks of which one needs most memory."""

from __future__ import annotations

from functools import cache
from typing import Any

from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.rows.order import deal_row
from ulysses_cli.plan.rows.ring_share import count_held_keys
from ulysses_cli.plan.sizes.sources import ModelSources


def find_fullest_ranks(job: Job) -> list[int]:
    """Under ZeRO-3, the first one whose share of the work is the largest. Below it also the last rank, which holds the
    gradients of the last layers, computed first; and of its own group the one with the largest share."""
    widest, last, size = _find_widest(job), job.world_size - 1, job.layout.sp_size
    if job.zero_stage == 3:
        return [widest[0]]
    return [last] if size - 1 in widest else [last, last + 1 - size + widest[0]]


def _find_widest(job: Job) -> list[int]:
    """Of an sp group, the ranks with the most key/value heads in a chunk, since heads may not divide evenly over ranks;
    on a ring, of the shares that hold most keys at once."""
    shape, layout, size = job.shape, job.layout, job.layout.ulysses_size
    chunks = _load_heads().plan_heads(shape.num_heads, shape.num_kv_heads, size, job.levers.head_chunks).chunks
    heads = [max(chunk.keys[rank].num_heads for chunk in chunks) for rank in range(size)]
    lengths, window = (job.row_tokens,), shape.window_counts[0][0]
    order = deal_row(lengths, job.make_ring())
    keys = [count_held_keys(lengths, order, window, rank) for rank in range(layout.ring_size)]
    return [
        outer * size + inner
        for outer in range(layout.ring_size)
        for inner in range(size)
        if (keys[outer], heads[inner]) == (max(keys), max(heads))
    ]


@cache
def _load_heads() -> Any:
    return ModelSources().load_own("ulysses_cli.train.attention.heads")
