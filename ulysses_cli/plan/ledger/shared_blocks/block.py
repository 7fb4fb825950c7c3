"""Bytes of a layer that uses a shared block, per rank and micro-step (transformers: modeling_zamba2.py,
Zamba2HybridLayer): attention over the hidden state beside the embedding, an MLP, a matrix, and then a Mamba2 mixer.
None of the first three has a residual.

Letters as in layer.py; t the rank of the block's adapters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from ulysses_cli.plan.ledger import attention, layer
from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.ledger.mlp import compute_dense_saved
from ulysses_cli.plan.ledger.recurrence import mixer as recurrence
from ulysses_cli.plan.ledger.shared_blocks.modules import GATE_ADAPTER, LAST_MATRIX, MLP_NORM, OF_MIXER, split_layer
from ulysses_cli.plan.models.layers import Layer


@lru_cache(maxsize=64)
def widen(job: Job) -> Job:
    """The job as the block's attention sees it, whose input is twice as wide."""
    shape = replace(job.shape, hidden_size=2 * job.shape.hidden_size)
    return replace(job, shape=shape, model=job.model or job.shape)


def _compute_unshared(job: Job) -> int:
    """What a norm saves of an input that is a tensor of its own and not, as in other layers, the layer's input."""
    return layer.compute_norm_saved(job, job.shape.hidden_size) - attention.compute_input_norm_saved(job)


def compute_attention_saved(job: Job, kind: Layer) -> int:
    """Apart from its result. Adapters share their input with the matrix beside them and save their narrow result."""
    shared, wide = split_layer(kind)[0], widen(job)
    adapters = 3 * shared.rank * shared.adapts_attention * layer.saves_input(job, "1")
    own = attention.compute_attention_saved(wide) + _compute_unshared(wide)
    return own + job.dtype_bytes * adapters * job.local_tokens


def compute_mlp_saved(job: Job, kind: Layer) -> int:
    """The norm's part, the MLP's input and, outside tiles, its inside: 4 i b and the adapter's narrow result."""
    norm, own_input = layer.compute_norm_saved(job, job.shape.hidden_size), layer.compute_layer_input(job)
    if layer.is_tiled(job):
        return norm + own_input
    narrow = job.dtype_bytes * split_layer(kind)[0].rank * layer.saves_input(job, "1") * job.local_tokens
    needs = layer.saves_input(job, "gate_up_proj", "0")
    return norm + own_input * needs + compute_dense_saved(job, job.local_tokens) + narrow


def compute_block_saved(job: Job, kind: Layer) -> int:
    """Of attention, MLP and the matrix behind them, with attention's result where recomputation makes it again."""
    result = 0 if layer.saves_result(job) else attention.compute_attention_result(job)
    behind = layer.compute_layer_input(job) * layer.saves_input(job, LAST_MATRIX)
    return compute_attention_saved(job, kind) + result + compute_mlp_saved(job, kind) + behind


def compute_result(job: Job, kind: Layer) -> int:
    return attention.compute_attention_result(job) + recurrence.compute_result(job, split_layer(kind)[3])


def compute_saved(job: Job, kind: Layer) -> int:
    """In addition to the results."""
    result = 0 if layer.saves_result(job) else attention.compute_attention_result(job)
    of_mixer = recurrence.compute_saved(job, split_layer(kind)[3]) + _compute_unshared(job)
    return compute_block_saved(job, kind) - result + of_mixer


def compute_saved_output(job: Job) -> int:
    """b h S: what is behind an MLP in tiles needs its output again, so it is saved."""
    return layer.compute_layer_input(job) * (layer.is_tiled(job) and layer.saves_result(job))


def compute_forward(job: Job, kind: Layer) -> int:
    """The norm of both inputs, attention, or the mixer beside the block's result."""
    wide, mixer = widen(job), split_layer(kind)[3]
    norm = layer.compute_norm_forward(wide, wide.shape.hidden_size)
    behind = layer.compute_layer_input(job) + recurrence.compute_forward(job, mixer)
    return max(norm, attention.compute_attention_forward(wide), behind)


def compute_mlp_forward(job: Job, kind: Layer) -> int:
    """Its input, then the result of the first matrix, the adapter's and their sum, 6 i b, or the sum, the activated
    gate and the product, 4 i b. In tiles also the output."""
    tile = layer.count_mlp_tile_tokens(job)
    inside = job.dtype_bytes * 6 * job.shape.intermediate_size * tile
    return (1 + layer.is_tiled(job)) * layer.compute_layer_input(job) + inside


def compute_again(job: Job, kind: Layer) -> int:
    """While it is recomputed, part by part, with what the parts before have saved."""
    wide, own_input, mixer = widen(job), layer.compute_layer_input(job), split_layer(kind)[3]
    result = 0 if layer.saves_result(job) else attention.compute_attention_result(job)
    attending = attention.compute_attention_again(wide) + _compute_unshared(wide)
    inside = 0 if layer.is_tiled(job) else compute_mlp_forward(job, kind)
    norm = layer.compute_norm_saved(job, job.shape.hidden_size)
    in_mlp = compute_attention_saved(job, kind) + result + norm + inside
    mixing = own_input + recurrence.compute_again(job, mixer) + _compute_unshared(job)
    return max(attending, in_mlp, compute_block_saved(job, kind) + mixing)


def list_mixer_backward(job: Job, kind: Layer) -> Iterator[tuple[str, int, int]]:
    """(Name, what is left of what was saved, tensors in use) of the mixer and its norm, while all of the block is
    there."""
    block, own_input = compute_block_saved(job, kind), layer.compute_layer_input(job)
    norm = layer.compute_norm_saved(job, job.shape.hidden_size)
    for name, left, work in recurrence.list_backward(job, split_layer(kind)[3]):
        yield name, block + left + _compute_unshared(job), work
    yield "mixer's norm", block + norm, layer.compute_norm_backward(job, job.shape.hidden_size) + own_input


def count_left(job: Job, kind: Layer, weight: str) -> int:
    """Saved bytes that are left when the gradient of `weight` exists."""
    name, _, inside = weight.partition(".")
    whole = compute_block_saved(job, kind)
    if name == OF_MIXER:
        mixer = split_layer(kind)[3]
        if inside.startswith("in_proj"):
            return whole + recurrence.compute_left_for_projections(job, mixer) + _compute_unshared(job)
        return whole + recurrence.compute_saved(job, mixer) + _compute_unshared(job)
    of_mlp = compute_mlp_saved(job, kind)
    if name == LAST_MATRIX:
        return whole
    attended = whole - of_mlp - layer.compute_layer_input(job) * layer.saves_input(job, LAST_MATRIX)
    if name in ("down_proj", "gate_up_proj", GATE_ADAPTER):
        return attended + of_mlp
    if name == MLP_NORM:
        return attended + layer.compute_norm_saved(job, job.shape.hidden_size)
    wide = widen(job)
    if name == "o_proj":
        return attended
    return min(attended, attention.compute_attention_saved(wide) + _compute_unshared(wide))
