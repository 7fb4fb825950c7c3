"""Bytes of what reads other tokens in a decoder layer: softmax attention, a recurrence, a short convolution (LFM2) or
a shared block of attention and MLP (Zamba2), whose embedding and gradients wait through the step. A layer may have
none, or attention beside a recurrence, which runs first; a shared block is counted whole. Letters as in layer.py.
attention.py and recurrence.py have the formulas of those two."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from ulysses_cli.plan.ledger import adapters, attention, layer, recurrence
from ulysses_cli.plan.ledger.attention import compute_input_norm_saved
from ulysses_cli.plan.ledger.job import Job, Lines
from ulysses_cli.plan.ledger.layer import compute_layer_input, saves_input
from ulysses_cli.plan.ledger.mlp import compute_dense_saved
from ulysses_cli.plan.ledger.modules import (
    GATE_ADAPTER,
    LAST_MATRIX,
    MLP_NORM,
    OF_MIXER,
    name_block,
    name_last_projection,
    split_layer,
)
from ulysses_cli.plan.ledger.recurrence import RecurrentMixer
from ulysses_cli.plan.ledger.weights import Weights
from ulysses_cli.plan.models.layers import AttentionMixer, DeltaNetMixer, KimiDeltaMixer, Layer, Mamba2Mixer
from ulysses_cli.plan.models.shape import ModelShape


def _count_convolution_bytes(job: Job, num_tensors: float) -> int:
    """b c S of each tensor; a convolution has as many channels as the hidden state."""
    return round(num_tensors * compute_layer_input(job))


def compute_convolution_saved(job: Job) -> int:
    """The norm's part, the projection's input and output (4 c b S), the convolution's input with its halo, its result
    and the input of the output projection."""
    projected = int(saves_input(job, "in_proj")) + int(saves_input(job, name_last_projection(job.family)))
    return compute_input_norm_saved(job) + _count_convolution_bytes(job, 3 + 2 + projected)


def compute_convolution_first_unsaved(job: Job) -> int:
    """What it does not save where nothing before the output projection is trained: all but the norm's part and that
    projection's input."""
    if job.adapters is None or job.adapters.adapts("in_proj"):
        return 0
    return _count_convolution_bytes(job, 3 + 2 + int(saves_input(job, "in_proj")))


def compute_convolution_output_input(job: Job) -> int:
    return _count_convolution_bytes(job, saves_input(job, name_last_projection(job.family)))


def compute_convolution_forward(job: Job) -> int:
    """The projection's input and output, the gated input, one row's result, and two copies of all rows' results while
    they are put together: b c S (7 + 1 / B)."""
    return _count_convolution_bytes(job, 7 + 1 / job.batch)


def compute_recomputed_convolution(job: Job) -> int:
    """As in the forward, with what is saved: the norm's part and the convolution's input."""
    return compute_input_norm_saved(job) + compute_convolution_forward(job) + _count_convolution_bytes(job, 1)


def compute_convolution_left_for_projection(job: Job) -> int:
    """What is left when the first projection computes its gradients from that of its result, 3 c b S."""
    return compute_input_norm_saved(job) + _count_convolution_bytes(job, 3 + int(saves_input(job, "in_proj")))


def compute_convolution_gates_backward(job: Job) -> int:
    """At the product of gate and convolution, in addition to what is saved: its gradient and those of both."""
    return _count_convolution_bytes(job, 3)


@lru_cache(maxsize=64)
def widen_to_block(job: Job) -> Job:
    """The job as the block's attention sees it, whose input is twice as wide."""
    shape = replace(job.shape, hidden_size=2 * job.shape.hidden_size)
    return replace(job, shape=shape, model=job.model or job.shape)


def _compute_block_unshared(job: Job) -> int:
    """What a norm saves of an input that is a tensor of its own and not, as in other layers, the layer's input."""
    return layer.compute_norm_saved(job, job.shape.hidden_size) - attention.compute_input_norm_saved(job)


def compute_block_attention_saved(job: Job, kind: Layer) -> int:
    """Apart from its result. Adapters share their input with the matrix beside them and save their narrow result."""
    shared, wide = split_layer(kind)[0], widen_to_block(job)
    adapters = 3 * shared.rank * shared.adapts_attention if layer.saves_input(job, "1") else 0
    own = attention.compute_attention_saved(wide) + _compute_block_unshared(wide)
    return own + job.dtype_bytes * adapters * job.local_tokens


def compute_block_mlp_saved(job: Job, kind: Layer) -> int:
    """The norm's part, the MLP's input and, outside tiles, its inside: 4 i b and the adapter's narrow result."""
    norm, own_input = layer.compute_norm_saved(job, job.shape.hidden_size), layer.compute_layer_input(job)
    if layer.is_tiled(job):
        return norm + own_input
    narrow = (job.dtype_bytes * split_layer(kind)[0].rank if layer.saves_input(job, "1") else 0) * job.local_tokens
    needs = layer.saves_input(job, "gate_up_proj", "0")
    return norm + own_input * needs + compute_dense_saved(job, job.local_tokens) + narrow


def compute_inside_block_saved(job: Job, kind: Layer) -> int:
    """Of attention, MLP and the matrix behind them, with attention's result where recomputation makes it again."""
    result = 0 if layer.saves_result(job) else attention.compute_attention_result(job)
    behind = layer.compute_layer_input(job) if layer.saves_input(job, LAST_MATRIX) else 0
    return compute_block_attention_saved(job, kind) + result + compute_block_mlp_saved(job, kind) + behind


def compute_block_result(job: Job, kind: Layer) -> int:
    return attention.compute_attention_result(job) + recurrence.compute_result(job, split_layer(kind)[3])


def compute_block_saved(job: Job, kind: Layer) -> int:
    """In addition to the results."""
    result = 0 if layer.saves_result(job) else attention.compute_attention_result(job)
    of_mixer = recurrence.compute_saved(job, split_layer(kind)[3]) + _compute_block_unshared(job)
    return compute_inside_block_saved(job, kind) - result + of_mixer


def compute_block_saved_output(job: Job) -> int:
    """b h S: what is behind an MLP in tiles needs its output again, so it is saved."""
    return layer.compute_layer_input(job) if layer.is_tiled(job) and layer.saves_result(job) else 0


def compute_block_forward(job: Job, kind: Layer) -> int:
    """The norm of both inputs, attention, or the mixer beside the block's result."""
    wide, mixer = widen_to_block(job), split_layer(kind)[3]
    norm = layer.compute_norm_forward(wide, wide.shape.hidden_size)
    behind = layer.compute_layer_input(job) + recurrence.compute_forward(job, mixer)
    return max(norm, attention.compute_attention_forward(wide), behind)


def compute_block_mlp_forward(job: Job, kind: Layer) -> int:
    """Its input, then the result of the first matrix, the adapter's and their sum, 6 i b, or the sum, the activated
    gate and the product, 4 i b. In tiles also the output."""
    tile = layer.count_mlp_tile_tokens(job)
    inside = job.dtype_bytes * 6 * job.shape.intermediate_size * tile
    return (1 + int(layer.is_tiled(job))) * layer.compute_layer_input(job) + inside


def compute_block_again(job: Job, kind: Layer) -> int:
    """While it is recomputed, part by part, with what the parts before have saved."""
    wide, own_input, mixer = widen_to_block(job), layer.compute_layer_input(job), split_layer(kind)[3]
    result = 0 if layer.saves_result(job) else attention.compute_attention_result(job)
    attending = attention.compute_recomputed_attention(wide) + _compute_block_unshared(wide)
    inside = 0 if layer.is_tiled(job) else compute_block_mlp_forward(job, kind)
    norm = layer.compute_norm_saved(job, job.shape.hidden_size)
    in_mlp = compute_block_attention_saved(job, kind) + result + norm + inside
    mixing = own_input + recurrence.compute_recomputed(job, mixer) + _compute_block_unshared(job)
    return max(attending, in_mlp, compute_inside_block_saved(job, kind) + mixing)


def list_block_mixer_backward(job: Job, kind: Layer) -> Iterator[tuple[str, int, int]]:
    """(Name, what is left of what was saved, tensors in use) of the mixer and its norm, while all of the block is
    there."""
    block, own_input = compute_inside_block_saved(job, kind), layer.compute_layer_input(job)
    norm = layer.compute_norm_saved(job, job.shape.hidden_size)
    for name, left, work in recurrence.list_backward(job, split_layer(kind)[3]):
        yield name, block + left + _compute_block_unshared(job), work
    yield "mixer's norm", block + norm, layer.compute_norm_backward(job, job.shape.hidden_size) + own_input


def count_block_left(job: Job, kind: Layer, weight: str) -> int:
    """Saved bytes that are left when the gradient of `weight` exists."""
    name, _, inside = weight.partition(".")
    whole = compute_inside_block_saved(job, kind)
    if name == OF_MIXER:
        mixer = split_layer(kind)[3]
        if inside.startswith("in_proj"):
            return whole + recurrence.compute_left_for_projections(job, mixer) + _compute_block_unshared(job)
        return whole + recurrence.compute_saved(job, mixer) + _compute_block_unshared(job)
    of_mlp = compute_block_mlp_saved(job, kind)
    if name == LAST_MATRIX:
        return whole
    attended = whole - of_mlp - (layer.compute_layer_input(job) if layer.saves_input(job, LAST_MATRIX) else 0)
    if name in ("down_proj", "gate_up_proj", GATE_ADAPTER):
        return attended + of_mlp
    if name == MLP_NORM:
        return attended + layer.compute_norm_saved(job, job.shape.hidden_size)
    wide = widen_to_block(job)
    if name == "o_proj":
        return attended
    return min(attended, attention.compute_attention_saved(wide) + _compute_block_unshared(wide))


def has_blocks(job: Job) -> bool:
    return job.family.shares_blocks and any(kind.shared for kind in job.shape.layer_kinds)


def compute_kept_embedding(job: Job) -> int:
    """b h S: a copy of the embedding's output (modeling_zamba2.py: Zamba2Model.forward). Checkpointing keeps it for
    every layer, to the end of the backward (train/memory/offload.py: what earlier layers have saved stays)."""
    return compute_layer_input(job) if has_blocks(job) else 0


def list_kept_embedding(job: Job) -> Lines:
    return {"block_embedding": compute_kept_embedding(job)} if has_blocks(job) else {}


def list_block_gradients(job: Job, num_left: int) -> Lines:
    """In the backward when the first `num_left` layers are left: gradients of blocks' weights, which autograd adds up
    until the first layer that uses the block has made its own; and the embedding's, from the layers that are done. Of
    one layer it is half of a tensor, of several a sum."""
    if not has_blocks(job):
        return {}
    waiting = 0
    for first, last, num_trained in _list_blocks(job.model or job.shape, job.weights).values():
        waiting += num_trained if first < num_left <= last else 0
    num_done = sum(layer.shared is not None for layer in job.shape.layers[num_left:])
    embedding = compute_layer_input(job) * {0: 0, 1: 2}.get(num_done, 1) if job.trains("embed_tokens") else 0
    lines = {"shared_gradients": job.dtype_bytes * waiting, "embedding_beside_gradient": embedding}
    return lines | ({"block_embedding": 0} if job.levers.gradient_checkpointing is False else {})


@lru_cache(maxsize=64)
def _list_blocks(shape: ModelShape, weights: Weights) -> dict[int, tuple[int, int, int]]:
    """By block: the first and the last layer that uses it, and its trained elements."""
    found: dict[int, tuple[int, int, int]] = {}
    for number, kind in enumerate(shape.layers):
        if kind.shared:
            first, _, size = found.get(kind.shared.number, (number, 0, 0))
            prefix = f"{name_block(kind.shared)}."
            own = {
                name: num
                for module in weights.modules
                if module.is_trained and module.layer == first
                for name, num in module.weights
                if name.startswith(prefix)
            }
            found[kind.shared.number] = first, number, size or sum(own.values())
    return found


def find_recurrence(kind: Layer) -> RecurrentMixer | None:
    return next((mixer for mixer in kind.mixers if isinstance(mixer, DeltaNetMixer | Mamba2Mixer)), None)


def find_latent(kind: Layer) -> AttentionMixer | None:
    return kind.attention if kind.attention and kind.attention.latent else None


def is_convolution(kind: Layer) -> bool:
    """Whether its only mixer is a short convolution."""
    return bool(kind.mixers) and kind.attention is None and find_recurrence(kind) is None and find_kimi(kind) is None


def find_kimi(kind: Layer) -> KimiDeltaMixer | None:
    return next((mixer for mixer in kind.mixers if isinstance(mixer, KimiDeltaMixer)), None)


def compute_result(job: Job, kind: Layer) -> int:
    """Bytes of the mixers' saved results, with which recomputation does not run the mixers again."""
    if kind.shared:
        return compute_block_result(job, kind)
    if latent_mixer := find_latent(kind):
        return attention.compute_latent_result(job, latent_mixer)
    if kimi_mixer := find_kimi(kind):
        return recurrence.compute_kimi_result(job, kimi_mixer)
    of_attention = attention.compute_attention_result(job) if kind.attention else 0
    recurrent = find_recurrence(kind)
    return of_attention + (recurrence.compute_result(job, recurrent) if recurrent else 0)


def compute_saved(job: Job, kind: Layer) -> int:
    """Mixers side by side share the norm before them; each scales its output by itself (modeling_falcon_h1.py:
    FalconH1DecoderLayer.forward)."""
    if kind.shared:
        return compute_block_saved(job, kind)
    of_magnitudes = adapters.compute_dora_saved(job, kind, job.local_tokens, in_mlp=False)
    if latent_mixer := find_latent(kind):
        return attention.compute_latent_saved(job, latent_mixer) + of_magnitudes
    if kimi_mixer := find_kimi(kind):
        return recurrence.compute_kimi_saved(job, kimi_mixer) + of_magnitudes
    if not kind.mixers:
        return attention.compute_input_norm_saved(job)
    recurrent = find_recurrence(kind)
    if recurrent and kind.attention is None:
        return recurrence.compute_saved(job, recurrent) + of_magnitudes
    saved = attention.compute_attention_saved(job) if kind.attention else compute_convolution_saved(job)
    return saved + of_magnitudes + compute_beside(job, kind)


def compute_beside(job: Job, kind: Layer) -> int:
    """What a recurrence saves beside attention, apart from the norm that both have."""
    recurrent = find_recurrence(kind)
    if recurrent is None or kind.attention is None:
        return 0
    return recurrence.compute_saved(job, recurrent) - attention.compute_input_norm_saved(job)


def compute_forward(job: Job, kind: Layer) -> int:
    if kind.shared:
        return compute_block_forward(job, kind)
    if latent_mixer := find_latent(kind):
        return attention.compute_latent_forward(job, latent_mixer)
    if kimi_mixer := find_kimi(kind):
        return recurrence.compute_kimi_forward(job, kimi_mixer)
    if not kind.mixers:
        return layer.compute_layer_input(job)
    works = []
    if recurrent := find_recurrence(kind):
        works.append(recurrence.compute_forward(job, recurrent))
    if kind.attention:
        works.append(attention.compute_attention_forward(job))
    return _find_most(job, kind, works or [compute_convolution_forward(job)])


def _find_most(job: Job, kind: Layer, works: Sequence[int]) -> int:
    """Of mixers side by side: the first runs beside the norm's output, of which it has a scaled copy, the second also
    beside the first one's result."""
    beside = layer.compute_layer_input(job) if len(works) > 1 else 0
    return max(work + (1 + number) * beside for number, work in enumerate(works))


def compute_recomputed(job: Job, kind: Layer) -> int:
    """While they are recomputed."""
    if kind.shared:
        return compute_block_again(job, kind)
    of_magnitudes = adapters.compute_dora_saved(job, kind, job.local_tokens, in_mlp=False)
    if latent_mixer := find_latent(kind):
        return attention.compute_latent_again(job, latent_mixer) + of_magnitudes
    if kimi_mixer := find_kimi(kind):
        return recurrence.compute_kimi_again(job, kimi_mixer)
    if not kind.mixers:
        return attention.compute_input_norm_saved(job) + layer.compute_layer_input(job)
    works = []
    if recurrent := find_recurrence(kind):
        works.append(recurrence.compute_recomputed(job, recurrent))
    if kind.attention:
        works.append(attention.compute_recomputed_attention(job) + compute_beside(job, kind))
    recomputed = _find_most(job, kind, works or [compute_recomputed_convolution(job)])
    return recomputed + (0 if recurrent else of_magnitudes)


def compute_left_for_projections(job: Job, kind: Layer, weight: str) -> int:
    """What is left of them when the first projections compute their gradients from those of their results. Of two
    mixers the last runs its backward first."""
    if latent_mixer := find_latent(kind):
        return attention.compute_latent_left_for_projections(job, latent_mixer)
    if kimi_mixer := find_kimi(kind):
        return recurrence.compute_kimi_left_for_projections(job, kimi_mixer)
    recurrent = find_recurrence(kind)
    if recurrent and (kind.attention is None or weight == "in_proj"):
        return recurrence.compute_left_for_projections(job, recurrent)
    if not kind.mixers:
        return attention.compute_input_norm_saved(job)
    if kind.attention is None:
        return compute_convolution_left_for_projection(job)
    gone = attention.compute_attention_rows(job) + attention.compute_output_input(job)
    width = job.query_width + attention.count_gate(job) + 2 * job.own_kv_width
    gradients = job.dtype_bytes * width * job.local_tokens
    return attention.compute_attention_saved(job) - gone + gradients + compute_beside(job, kind)
