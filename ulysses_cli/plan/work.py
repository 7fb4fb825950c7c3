"""What a rank works on in a micro-step beside the products of dense layers: elements, bytes and operations of
recurrences, latent keys and exchanges, which the speed model turns into seconds. c channels of a convolution, v values
of all heads, u ranks that exchange heads."""

from __future__ import annotations

from functools import lru_cache

from ulysses_cli.plan.flops import count_state_flops, count_values
from ulysses_cli.plan.hardware import Gpu
from ulysses_cli.plan.layout import compute_kv_heads
from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.ledger.weights import read_weights
from ulysses_cli.plan.levers import LAST_LINEARS, NORMS_AFTER
from ulysses_cli.plan.models.layers import (
    AttentionMixer,
    ConvolutionMixer,
    DeltaNetMixer,
    KimiDeltaMixer,
    Layer,
    Mamba2Mixer,
    Mixer,
)
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.recipe.sections import Lora

RecurrentMixer = DeltaNetMixer | Mamba2Mixer
FLOAT_BYTES = 4


def count_spared(job: Job) -> int:
    """Weights by which no token is multiplied again: a recomputation stops before the last product of a layer's dense
    MLP, and a tile's backward makes none (train/memory/tiled_mlp.py). It is made again under an adapter, and outside
    tiles where a norm reads its result."""
    recomputes, is_tiled = job.levers.gradient_checkpointing is not False, job.levers.tiled_mlp
    if not job.spares_products or not (recomputes or is_tiled) or job.quantized is not None:
        return 0
    num_elements, has_norm = _count_last_products(job.shape, job.lora)
    return 0 if has_norm and not is_tiled else num_elements


@lru_cache(maxsize=64)
def _count_last_products(shape: ModelShape, lora: Lora | None) -> tuple[int, bool]:
    """Elements of the last linear layers of dense MLPs, as `layers.0.mlp.down_proj.weight`; whether norms follow."""
    num_elements, has_norm = 0, False
    for weight in read_weights(shape, lora).every:
        number, *_, last, kind = ["", "", "", *weight.name.split(".")][-4:]
        num_elements += weight.num_elements if number.isdigit() and last in LAST_LINEARS and kind == "weight" else 0
        has_norm = has_norm or last in NORMS_AFTER
    return num_elements, has_norm


def saves_slices(job: Job) -> bool:
    """With several chunks of heads, and where recomputation spares attention, a rank saves its own slices and the
    backward exchanges them again. Otherwise it saves the whole rows that the kernel saw
    (train/attention/ulysses.py)."""
    return job.levers.head_chunks > 1 or job.levers.gradient_checkpointing is True


def count_latent_exchanged(job: Job, mixer: AttentionMixer) -> int:
    """Elements per token that the exchange of heads carries in a micro-step: rows and the result in each forward; in
    the backward the result's gradient, with slices and the result where these were saved, and gradients of rows."""
    values, forwards = mixer.num_heads * mixer.value_head_dim, 1 + int(job.levers.gradient_checkpointing == "full")
    rows = 2 * mixer.num_heads * mixer.head_dim + values
    backward = values + (rows + values if saves_slices(job) else 0) + rows
    return (rows + values) * forwards + backward


def count_shared(mixer: RecurrentMixer, num_ranks: int) -> int:
    """Elements of one of the two tensors that groups of heads share: queries or keys, B or C. A group goes to every
    rank that has heads of it; all count as the rank that gets most."""
    num, width = (
        (mixer.num_groups, mixer.state_dim)
        if isinstance(mixer, Mamba2Mixer)
        else (mixer.num_key_heads, mixer.key_head_dim)
    )
    return num_ranks * compute_kv_heads(mixer.num_heads, num, num_ranks).num_local * width


def count_rows(mixer: RecurrentMixer, num_ranks: int, dtype_bytes: int) -> int:
    """What the exchange brings: shared tensors, values, and numbers of each head: steps, or decay (float32) and
    strength."""
    small = dtype_bytes if isinstance(mixer, Mamba2Mixer) else dtype_bytes + FLOAT_BYTES
    return dtype_bytes * (2 * count_shared(mixer, num_ranks) + count_values(mixer)) + small * mixer.num_heads


GIGA, TERA = 1e9, 1e12
CONVOLUTION_PASSES = 14  # over b c: two gates, three reads or writes each; the convolution and three copies, two each
RECURRENT_PASSES = 8  # over the convolution's channels: the convolution and three copies, a read and a write each
GATED_NORM_PASSES = 26  # over the result: transformers' norm and gate, most of their passes in float32
GATE_PASSES = 5  # over the result: the activation and a product
BACKWARD_RECURRENCE = 3.0  # two products for each of the forward's, whose states are made again (fla: chunk.py)


def compute_recurrence_flops(job: Job) -> float:
    """Forward, of one rank in a micro-step: what convolutions and recurrences do for each token."""
    return _count_recurrence(job.shape)[0] * job.local_tokens


def compute_recurrence_bytes(job: Job) -> float:
    """Memory traffic of a forward of convolutions, with the copies around them."""
    return job.dtype_bytes * _count_recurrence(job.shape)[1] * job.local_tokens


@lru_cache(maxsize=64)
def _count_recurrence(shape: ModelShape) -> tuple[float, float]:
    """Operations, and elements read and written, for each token."""
    mixers = (mixer for layer in shape.layers for mixer in layer.mixers)
    return float(sum(map(count_state_flops, shape.layers))), float(sum(map(_count_convolution_passes, mixers)))


def _count_convolution_passes(mixer: Mixer) -> int:
    """Elements read and written per token."""
    if isinstance(mixer, ConvolutionMixer):
        return CONVOLUTION_PASSES * mixer.conv_channels
    return 0 if isinstance(mixer, AttentionMixer) else RECURRENT_PASSES * mixer.conv_channels


def compute_recurrence_seconds(job: Job, gpu: Gpu) -> tuple[float, float]:
    """Of a forward, and of all else in a micro-step: the recomputation of convolutions, and the backward, in which the
    rule of a checkpointed layer is computed once more (train/memory/checkpointing.py). Products run at attention's
    rates, since no rate of these kernels has been measured."""
    peak, memory = gpu.tflops * TERA, gpu.memory_gb_s * GIGA * gpu.efficiency.memory
    recomputes = job.levers.gradient_checkpointing is not False
    flops, moving = compute_recurrence_flops(job), compute_recurrence_bytes(job) / memory
    forward, backward = flops / (peak * gpu.attention_forward), flops / (peak * gpu.attention_backward)
    return forward + moving, (forward if recomputes else 0) + BACKWARD_RECURRENCE * backward + (
        2 + int(recomputes)
    ) * moving


def count_norm_passes(mixer: Mixer) -> int:
    """Elements read and written per token by the norm and gate of a recurrence, or by its gate alone."""
    if isinstance(mixer, Mamba2Mixer) and mixer.gating == "alone":
        return GATE_PASSES * count_values(mixer)
    if isinstance(mixer, KimiDeltaMixer):
        return GATED_NORM_PASSES * mixer.num_heads * mixer.head_dim
    return GATED_NORM_PASSES * count_values(mixer) if isinstance(mixer, DeltaNetMixer | Mamba2Mixer) else 0


def count_halos(job: Job, kind: Layer) -> float:
    """Bytes that the convolutions of a layer send: of t taps, the slice's last t - 1 tokens to every other rank of the
    row (train/recurrence/convolution.py: _gather), b c (t - 1) (u - 1) for each row; in every forward, since no
    convolution's result is saved, and as gradients."""
    num_ranks, forwards = job.layout.ulysses_size, 1 + int(job.levers.gradient_checkpointing is not False)
    mixers = [mixer for mixer in kind.mixers if not isinstance(mixer, AttentionMixer)]
    tails = sum((mixer.conv_tokens - 1) * mixer.conv_channels for mixer in mixers)
    return float((forwards + 1) * job.dtype_bytes * tails * job.batch * (num_ranks - 1))


def count_recurrence_exchanged(job: Job, kind: Layer) -> float:
    """Bytes of what the rule takes and of its result, in every forward and as gradients. Where a layer saves the
    result, its backward computes the rule once more for what autograd needs, instead of the recomputation
    (train/memory/checkpointing.py: compute_and_save)."""
    num_ranks, forwards = job.layout.ulysses_size, 1 + int(job.levers.gradient_checkpointing is not False)
    mixers = [mixer for mixer in kind.mixers if isinstance(mixer, DeltaNetMixer | Mamba2Mixer)]
    widths = [count_rows(mixer, num_ranks, job.dtype_bytes) + job.dtype_bytes * count_values(mixer) for mixer in mixers]
    widths += [_count_kimi_exchanged(job, mixer) for mixer in kind.mixers if isinstance(mixer, KimiDeltaMixer)]
    return (forwards + 1) * sum(widths) * job.local_tokens * (num_ranks - 1) / num_ranks


def _count_kimi_exchanged(job: Job, mixer: KimiDeltaMixer) -> int:
    """Queries, keys, values, decay (float32 where gates are narrow), strength, and the result."""
    width, decay = mixer.num_heads * mixer.head_dim, FLOAT_BYTES if job.family.has_narrow_gates else job.dtype_bytes
    return (4 * job.dtype_bytes + decay) * width + job.dtype_bytes * mixer.num_heads
