"""Work of convolutions and recurrences in a step: operations, memory traffic, bytes that they send, and seconds."""

from __future__ import annotations

from ulysses_cli.plan.flops import count_state_flops
from ulysses_cli.plan.hardware import Gpu
from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.ledger.recurrence.kernels import count_rows, count_values
from ulysses_cli.plan.ledger.recurrence.kimi import KimiBytes
from ulysses_cli.plan.models.layers import (
    AttentionMixer,
    ConvolutionMixer,
    DeltaNetMixer,
    KimiDeltaMixer,
    Layer,
    Mamba2Mixer,
    Mixer,
)

GIGA, TERA = 1e9, 1e12
CONVOLUTION_PASSES = 14  # over b c: two gates, three reads or writes each; the convolution and three copies, two each
RECURRENT_PASSES = 8  # over the convolution's channels: the convolution and three copies, a read and a write each
GATED_NORM_PASSES = 26  # over the result: transformers' norm and gate, most of their passes in float32
GATE_PASSES = 5  # over the result: the activation and a product
BACKWARD_RECURRENCE = 3.0  # two products for each of the forward's, whose states are made again (fla: chunk.py)


def compute_recurrence_flops(job: Job) -> float:
    """Forward, of one rank in a micro-step: what convolutions and recurrences do for each token."""
    return float(sum(map(count_state_flops, job.shape.layers))) * job.local_tokens


def compute_recurrence_bytes(job: Job) -> float:
    """Memory traffic of a forward of convolutions, with the copies around them."""
    mixers = (mixer for layer in job.shape.layers for mixer in layer.mixers)
    return float(job.dtype_bytes * sum(map(_count_convolved, mixers))) * job.local_tokens


def _count_convolved(mixer: Mixer) -> int:
    """Elements read and written per token."""
    if isinstance(mixer, ConvolutionMixer):
        return CONVOLUTION_PASSES * mixer.conv_channels
    return 0 if isinstance(mixer, AttentionMixer) else RECURRENT_PASSES * mixer.conv_channels


def compute_recurrence_seconds(job: Job, gpu: Gpu) -> tuple[float, float]:
    """Of a forward, and of all else in a micro-step: the recomputation of convolutions, and the backward, in which the
    rule of a checkpointed layer is computed once more (train/memory/saved_results.py). Products run at attention's
    rates, since no rate of these kernels has been measured."""
    peak, memory = gpu.tflops * TERA, gpu.memory_gb_s * GIGA * gpu.efficiency.memory
    recomputes = job.levers.gradient_checkpointing is not False
    flops, moving = compute_recurrence_flops(job), compute_recurrence_bytes(job) / memory
    forward, backward = flops / (peak * gpu.attention_forward), flops / (peak * gpu.attention_backward)
    return forward + moving, recomputes * forward + BACKWARD_RECURRENCE * backward + (2 + recomputes) * moving


def count_norm_passes(mixer: Mixer) -> int:
    """Elements read and written per token by the norm and gate of a recurrence, or by its gate alone."""
    if isinstance(mixer, Mamba2Mixer) and mixer.gating == "alone":
        return GATE_PASSES * count_values(mixer)
    if isinstance(mixer, KimiDeltaMixer):
        return GATED_NORM_PASSES * mixer.num_heads * mixer.head_dim
    return GATED_NORM_PASSES * count_values(mixer) if isinstance(mixer, DeltaNetMixer | Mamba2Mixer) else 0


def count_halos(job: Job, kind: Layer) -> float:
    """Bytes that the convolutions of a layer send: of t taps, the slice's last t - 1 tokens to every other rank of the
    row (train/recurrence/halo.py: _gather), b c (t - 1) (u - 1) for each row; in every forward, since no convolution's
    result is saved, and as gradients."""
    num_ranks, forwards = job.layout.ulysses_size, 1 + (job.levers.gradient_checkpointing is not False)
    mixers = [mixer for mixer in kind.mixers if not isinstance(mixer, AttentionMixer)]
    tails = sum((mixer.conv_tokens - 1) * mixer.conv_channels for mixer in mixers)
    return float((forwards + 1) * job.dtype_bytes * tails * job.batch * (num_ranks - 1))


def count_recurrence_exchanged(job: Job, kind: Layer) -> float:
    """Bytes of what the rule takes and of its result, in every forward and as gradients. Where a layer saves the
    result, its backward computes the rule once more for what autograd needs, instead of the recomputation
    (train/memory/saved_results.py: compute_and_save)."""
    num_ranks, forwards = job.layout.ulysses_size, 1 + (job.levers.gradient_checkpointing is not False)
    mixers = [mixer for mixer in kind.mixers if isinstance(mixer, DeltaNetMixer | Mamba2Mixer)]
    widths = [count_rows(mixer, num_ranks, job.dtype_bytes) + job.dtype_bytes * count_values(mixer) for mixer in mixers]
    own = [KimiBytes(job, mixer) for mixer in kind.mixers if isinstance(mixer, KimiDeltaMixer)]
    widths += [each.rows + each.result for each in own]
    return (forwards + 1) * sum(widths) * job.local_tokens * (num_ranks - 1) / num_ranks
