"""Bytes of keys and values that later layers borrow, per rank and micro-step. k: their width."""

from __future__ import annotations

from ulysses_cli.plan.ledger.job import Job


def is_lending(job: Job) -> bool:
    return any(layer.attention and layer.attention.borrows_kv for layer in job.shape.layer_kinds)


def find_lenders(job: Job) -> dict[int, tuple[int, int]]:
    """By the number of a layer whose keys later ones use: (the last of those, the width of its keys)."""
    lenders: dict[bool, int] = {}
    found: dict[int, tuple[int, int]] = {}
    for number, layer in enumerate(job.shape.layers):
        attention = layer.attention
        if attention is None:
            continue
        slides = attention.window_tokens is not None
        if not attention.borrows_kv:
            lenders[slides] = number
        else:
            found[lenders[slides]] = number, attention.num_kv_heads * attention.head_dim
    return found


def compute_lent(job: Job) -> int:
    """2 k b S for each lending layer: every layer's recomputation may read them."""
    return sum(2 * job.dtype_bytes * width * job.local_tokens for _, width in find_lenders(job).values())


def compute_waiting(job: Job, num_left: int) -> int:
    """2 k b S: in the backward when the first `num_left` layers are left, the gradients of borrowed keys wait for the
    layer that made them."""
    waiting = (width for at, (last, width) in find_lenders(job).items() if at < num_left <= last)
    return sum(2 * job.dtype_bytes * width * job.local_tokens for width in waiting)
