"""Bytes that shared blocks keep through a step, per rank and micro-step: the embedding beside the hidden state, and
gradients that wait for the first layer that uses a block."""

from __future__ import annotations

from functools import lru_cache

from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.ledger.layer import compute_layer_input
from ulysses_cli.plan.ledger.memory_snapshot import Lines
from ulysses_cli.plan.ledger.shared_blocks.modules import name_block
from ulysses_cli.plan.ledger.weights import Weights
from ulysses_cli.plan.models.shape import ModelShape


def has_blocks(job: Job) -> bool:
    return job.family.shares_blocks and any(kind.shared for kind in job.shape.layer_kinds)


def compute_embedding(job: Job) -> int:
    """b h S: a copy of the embedding's output (modeling_zamba2.py: Zamba2Model.forward). Checkpointing keeps it for
    every layer, to the end of the backward (train/memory/offload.py: what earlier layers have saved stays)."""
    return compute_layer_input(job) * has_blocks(job)


def list_saved(job: Job) -> Lines:
    return {"block_embedding": compute_embedding(job)} if has_blocks(job) else {}


def list_gradients(job: Job, num_left: int) -> Lines:
    """In the backward when the first `num_left` layers are left: gradients of blocks' weights, which autograd adds up
    until the first layer that uses the block has made its own; and the embedding's, from the layers that are done. Of
    one layer it is half of a tensor, of several a sum."""
    if not has_blocks(job):
        return {}
    waiting = 0
    for first, last, num_trained in _list_blocks(job.model or job.shape, job.weights).values():
        waiting += num_trained * (first < num_left <= last)
    num_done = sum(layer.shared is not None for layer in job.shape.layers[num_left:])
    embedding = compute_layer_input(job) * {0: 0, 1: 2}.get(num_done, 1) * job.trains("embed_tokens")
    lines = {"shared_gradients": job.dtype_bytes * waiting, "embedding_beside_gradient": embedding}
    return lines | ({"block_embedding": 0} if job.levers.gradient_checkpointing is False else {})


@lru_cache(maxsize=64)
def _list_blocks(shape: ModelShape, weights: Weights) -> dict[int, tuple[int, int, int]]:
    """By block: the first and the last layer that uses it, and its trained elements."""
    found: dict[int, tuple[int, int, int]] = {}
    for number, layer in enumerate(shape.layers):
        if layer.shared:
            first, _, size = found.get(layer.shared.number, (number, 0, 0))
            prefix = f"{name_block(layer.shared)}."
            own = {
                name: num
                for module in weights.modules
                if module.is_trained and module.layer == first
                for name, num in module.weights
                if name.startswith(prefix)
            }
            found[layer.shared.number] = first, number, size or sum(own.values())
    return found
