"""Bytes of recurrences in a decoder layer, per rank and micro-step: a gated delta net, a Mamba2 mixer and Kimi delta
attention, with their kernels (flash-linear-attention's gated delta rule, mamba-ssm's scan); and their work in a
step. Letters as in layer.py; c channels of the convolution, v values of all heads, e what the exchange of heads
brings, w the width of Kimi's heads. After the exchange a rank has all tokens of the row and its own heads."""

from __future__ import annotations

from collections.abc import Iterator

from ulysses_cli.plan.flops import count_state_flops
from ulysses_cli.plan.hardware import Gpu
from ulysses_cli.plan.layout import compute_kv_heads
from ulysses_cli.plan.ledger.attention import compute_input_norm_saved
from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.ledger.layer import saves_input, saves_result
from ulysses_cli.plan.ledger.modules import projects_gate_last
from ulysses_cli.plan.ledger.weights import LATE_PROJECTIONS, RECURRENT_PROJECTIONS
from ulysses_cli.plan.models.family import Trait
from ulysses_cli.plan.models.layers import (
    AttentionMixer,
    ConvolutionMixer,
    DeltaNetMixer,
    KimiDeltaMixer,
    Layer,
    Mamba2Mixer,
    Mixer,
)

RecurrentMixer = DeltaNetMixer | Mamba2Mixer
FLOAT = 4
DELTA_CHUNK = 64  # fla/ops/gated_delta_rule/chunk.py: chunk_size


def count_values(mixer: RecurrentMixer) -> int:
    """Elements of the result."""
    return mixer.num_heads * (mixer.head_dim if isinstance(mixer, Mamba2Mixer) else mixer.value_head_dim)


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
    small = dtype_bytes if isinstance(mixer, Mamba2Mixer) else dtype_bytes + FLOAT
    return dtype_bytes * (2 * count_shared(mixer, num_ranks) + count_values(mixer)) + small * mixer.num_heads


def count_kernel_saved(mixer: RecurrentMixer, job: Job) -> int:
    """Delta rule: normalized queries and keys, values, decay and strength, and a matrix for each chunk and head
    (ChunkGatedDeltaRuleFunction). Scan: result, inputs and decay (MambaChunkScanCombinedFn)."""
    b, rows = job.dtype_bytes, count_rows(mixer, job.layout.ulysses_size, job.dtype_bytes)
    if isinstance(mixer, Mamba2Mixer):
        return rows + b * count_values(mixer) + FLOAT * mixer.num_heads
    return rows + b * DELTA_CHUNK * mixer.num_heads


def count_kernel_forward(mixer: RecurrentMixer, job: Job) -> int:
    """In addition to the rows. Delta rule: normalized queries and keys, the chunks' matrices, w, u, states, new values
    and the result. Scan: steps and decay, then states in float32 and again in the dtype, or these with products of
    chunks and the result."""
    b, v, states = job.dtype_bytes, count_values(mixer), _count_states(mixer)
    if isinstance(mixer, Mamba2Mixer):
        products = FLOAT * mixer.num_groups * mixer.chunk_tokens
        return 2 * FLOAT * mixer.num_heads + max((FLOAT + b) * states, b * states + products + b * v)
    shared, w = count_shared(mixer, job.layout.ulysses_size), mixer.num_heads * mixer.key_head_dim
    return b * (2 * shared + DELTA_CHUNK * mixer.num_heads + w + states + 3 * v) + FLOAT * mixer.num_heads


def count_kernel_backward(mixer: RecurrentMixer, job: Job) -> int:
    """With what was saved, and without the gradient of the result."""
    b, v, states = job.dtype_bytes, count_values(mixer), _count_states(mixer)
    shared, saved = count_shared(mixer, job.layout.ulysses_size), count_kernel_saved(mixer, job)
    if isinstance(mixer, Mamba2Mixer):
        products = FLOAT * mixer.num_groups * mixer.chunk_tokens
        begun = b * (2 * shared + 2 * mixer.num_heads) + 2 * FLOAT * mixer.num_heads + products
        passing = (2 * FLOAT + 2 * b) * states
        ending = 2 * b * states + b * v + 2 * FLOAT * shared + 3 * FLOAT * mixer.num_heads + 2 * products
        return saved + begun + max(passing, ending)
    w = mixer.num_heads * mixer.key_head_dim
    grouped = shared if mixer.num_heads > mixer.num_key_heads else 0
    begun = b * (w + 3 * v + 2 * states)  # w, u, states and their gradients, new values and their gradient
    keys = b * (3 * w + grouped)  # gradients of queries, keys and w; one of them summed over its heads
    values = b * (2 * w + 2 * (grouped or w) + v)  # the gradient of w, keys' once more, queries' and keys', values'
    return saved + begun + max(keys, values) + 4 * FLOAT * mixer.num_heads


def _count_states(mixer: RecurrentMixer) -> int:
    """A state for each chunk and head."""
    if isinstance(mixer, Mamba2Mixer):
        return mixer.num_heads * mixer.head_dim * mixer.state_dim // mixer.chunk_tokens
    return mixer.num_heads * mixer.key_head_dim * mixer.value_head_dim // DELTA_CHUNK


class RecurrentBytes:
    """Bytes per local token of one mixer's tensors. Numbers per head are the small ones: gates and steps."""

    def __init__(self, job: Job, mixer: RecurrentMixer) -> None:
        b, self.mixer = job.dtype_bytes, mixer
        self.is_scan = isinstance(mixer, Mamba2Mixer)
        self.scales_precisely = Trait.PRECISE_GATED_NORMS in job.shape.traits
        self.trains_norm = job.trains("norm")
        self.gating = mixer.gating if isinstance(mixer, Mamba2Mixer) else "after norm"
        self.has_norm = self.gating != "alone"
        self.hidden, self.conv = b * job.shape.hidden_size, b * mixer.conv_channels
        self.result, self.wide_result = b * count_values(mixer), FLOAT * count_values(mixer)
        # results of the first projections that live as long as the layer's forward, besides the convolution's input:
        # of Mamba2 one tensor holds all
        self.is_late = projects_gate_last(job.family)
        self.gates = (self.result if not self.is_late else 0) + (1 if self.is_scan else 2) * b * mixer.num_heads
        self.late_gate = self.result if self.is_late else 0
        # Qwen3-Next projects all at once and takes copies of the parts (modeling_qwen3_next.py:
        # fix_query_key_value_ordering); the whole lives as long as the layer's forward
        is_joined = "in_proj_qkvz" in job.family.linear_extras
        self.joined = self.conv + self.result + 2 * b * mixer.num_heads if is_joined else 0
        self.small = 0 if self.is_scan else (3 * FLOAT + b) * mixer.num_heads
        self.last = "o_proj" if self.is_late else "out_proj"
        self.first = LATE_PROJECTIONS if self.is_late else ("in_proj", *RECURRENT_PROJECTIONS)
        self.rows = count_rows(mixer, job.layout.ulysses_size, b)
        self.is_split = job.layout.ulysses_size > 1

    @property
    def norm_saved(self) -> int:
        """Of the gated norm, float32: its input, the gate and the activated gate, for Mamba2 also their product; and
        what its weight's gradient needs, unless it is frozen. Falcon-H1 multiplies with the weight in float32. A gate
        alone saves its input and the activated gate."""
        if not self.has_norm:
            return 2 * self.result
        if self.scales_precisely:
            own_input = self.wide_result if self.gating == "after norm" else self.result
            return (3 + int(self.trains_norm)) * self.wide_result + own_input
        scaled = self.result * (int(self.trains_norm) + int(not self.is_scan))
        return (4 if self.is_scan else 3) * self.wide_result + scaled


def compute_result(job: Job, mixer: RecurrentMixer) -> int:
    """What recomputation is spared: the rule's result as slices, b v S."""
    return RecurrentBytes(job, mixer).result * job.local_tokens if saves_result(job) else 0


def compute_saved(job: Job, mixer: RecurrentMixer) -> int:
    """In addition to that result, which is let go when its layer has been computed again."""
    own = RecurrentBytes(job, mixer)
    inside = _count_convolved(job, own) + own.norm_saved + (own.result if saves_input(job, own.last) else 0)
    if own.is_scan and not (own.has_norm or own.is_split or saves_result(job)):
        inside -= own.result  # on one rank the scan's kernel and the gate save the same result
    return (
        compute_input_norm_saved(job)
        + (inside + _count_projected(job, own)) * job.local_tokens
        - compute_result(job, mixer)
    )


def _count_projected(job: Job, own: RecurrentBytes) -> int:
    """The first projections' input; Mamba2's gate and steps are views that keep the whole projection."""
    return own.hidden if saves_input(job, *own.first) else 0


def _count_convolved(job: Job, own: RecurrentBytes) -> int:
    """From the convolution to the rule: the convolution's input with its halo; then its result, from which the rule is
    computed again where its result was saved, or what the rule's kernel saves. Of a scan, steps that are saved as they
    were projected keep the whole projection; so does a gate without a norm."""
    keeps_projection = own.is_scan and (saves_result(job) or not own.is_split or not own.has_norm)
    projection = own.gates + own.conv if keeps_projection else 0
    if saves_result(job):
        return 2 * own.conv + own.small + projection
    return own.conv + own.small + count_kernel_saved(own.mixer, job) + projection


def _list_forward(job: Job, own: RecurrentBytes) -> Iterator[int]:
    """The convolution, with two copies of its result while rows are put together; the gated norm."""
    around = own.hidden + own.gates + own.joined
    yield around + round((3 + 1 / job.batch + int(bool(own.joined))) * own.conv)
    wide = 3 * own.wide_result if own.is_scan else 2 * own.wide_result + own.result
    wide = wide if own.has_norm else 2 * own.result
    yield around + own.conv * (1 + int(own.is_scan)) + own.result + own.late_gate + own.small + wide


def _list_rule(job: Job, own: RecurrentBytes) -> Iterator[int]:
    """While the rule runs, beside what the layer has: rows arrive, the kernel runs, its result returns."""
    if own.is_split:
        yield 2 * own.rows
        yield own.rows + 3 * own.result
    yield own.rows + count_kernel_forward(own.mixer, job)


def compute_forward(job: Job, mixer: RecurrentMixer) -> int:
    own = RecurrentBytes(job, mixer)
    around = own.hidden + own.gates + own.joined + own.conv * (1 + int(own.is_scan)) + own.small
    most = max(*_list_forward(job, own), *(around + rule for rule in _list_rule(job, own)))
    return most * job.local_tokens


def compute_recomputed(job: Job, mixer: RecurrentMixer) -> int:
    """As in the forward, with what is saved; without the rule where its result was saved."""
    own = RecurrentBytes(job, mixer)
    convolving, norming = _list_forward(job, own)
    kept = own.norm_saved - (own.wide_result if own.has_norm else 2 * own.result)
    moments = [convolving + own.conv, norming + own.conv + kept]
    if not saves_result(job):
        around = own.hidden + own.gates + own.joined + 2 * own.conv
        moments += [around + rule for rule in _list_rule(job, own)]
    return compute_input_norm_saved(job) + max(moments) * job.local_tokens


def compute_left_for_projections(job: Job, mixer: RecurrentMixer) -> int:
    """What is left when the first projections compute their gradients from those of their results."""
    own = RecurrentBytes(job, mixer)
    return compute_input_norm_saved(job) + (_count_projected(job, own) + own.conv + own.gates) * job.local_tokens


def list_backward(job: Job, mixer: RecurrentMixer) -> Iterator[tuple[str, int, int]]:
    """(Name, what is left of what was saved, tensors in use) from the mixer's end to its beginning."""
    own, saved, tokens = RecurrentBytes(job, mixer), compute_saved(job, mixer), job.local_tokens
    output = (own.result if saves_input(job, own.last) else 0) * tokens
    scaled = own.result if own.trains_norm else 0  # what the weight's gradient was made of is gone
    norming = 5 * own.wide_result - scaled if own.is_scan else 3 * own.wide_result + own.result
    norming = norming if own.has_norm else 3 * own.result  # gradients of the product, of the gate and of the result
    yield "gated norm", saved - output, norming * tokens
    before = compute_input_norm_saved(job) + _count_projected(job, own) * tokens
    # of the gate, which waits, and of the rule's result; a gate that was projected last has passed its gradient on
    gradients = own.result + (own.hidden if own.is_late else own.result)
    left = _count_convolved(job, own) - (0 if saves_result(job) else count_kernel_saved(mixer, job))
    rule = [count_kernel_backward(mixer, job) + (own.result if saves_result(job) else 0)]
    if own.is_split:
        rule.append(3 * own.rows + (own.result if saves_result(job) else 0))
    if saves_result(job):
        rule += _list_rule(job, own)
    yield "rule", before + left * tokens, (gradients + max(rule)) * tokens
    yield "convolution", before + own.conv * tokens, (own.result + 4 * own.conv) * tokens


KIMI_FLOAT, KIMI_MASK = 4, 1
KIMI_CHUNK, KIMI_BLOCK = (
    64,
    16,
)  # tokens whose products make one matrix, and those on its diagonal (chunk_intra.py: BT, BC)


class KimiBytes:
    """Bytes per local token of one mixer's tensors."""

    def __init__(self, job: Job, mixer: KimiDeltaMixer) -> None:
        b, heads, width = job.dtype_bytes, mixer.num_heads, mixer.num_heads * mixer.head_dim
        self.hidden = b * job.shape.hidden_size
        self.result = b * width
        self.wide = KIMI_FLOAT * width
        self.conv = 3 * b * width
        self.is_split, self.strength = job.layout.ulysses_size > 1, b * heads
        # Kimi's forget gate keeps the exponential, one more than that, a mask, the logarithm and a narrow vector. That
        # of modeling_bailing_hybrid.py keeps its input and its activation, and rounds the decay.
        is_narrow = job.family.has_narrow_gates
        self.forget = 3 * self.wide + KIMI_MASK * width if is_narrow else 2 * self.wide
        # A frozen A_log needs no logarithm for its gradient.
        self.forget_saved = self.forget - (self.wide if is_narrow and job.adapters is not None else 0)
        self.narrow = b * mixer.head_dim if is_narrow else 0
        self.decay = self.wide if is_narrow else self.result
        self.rows = self.conv + self.decay + self.strength
        self.states = b * heads * mixer.head_dim**2 // KIMI_CHUNK
        self.matrix, self.wide_matrix, self.block = (
            b * KIMI_CHUNK * heads,
            KIMI_FLOAT * KIMI_CHUNK * heads,
            KIMI_FLOAT * KIMI_BLOCK * heads,
        )
        # of the gated norm: its input, that normalized, that scaled, and the activated gate
        self.norm_saved = (3 + int(job.trains("norm"))) * self.wide

    @property
    def kernel_saved(self) -> int:
        """What the exchange brings, with normalized queries and keys; the decay's sums and two matrices of a chunk."""
        return self.rows + self.wide + 2 * self.matrix

    @property
    def kernel_forward(self) -> int:
        """In addition to the rows: normalized queries and keys, sums, matrices, w, u and decayed keys; then a block's
        matrix, or states, new values and the result."""
        made = 2 * self.result + self.wide + 2 * self.matrix + 3 * self.result
        return made + max(self.block, self.states + 2 * self.result)

    @property
    def kernel_backward(self) -> int:
        """With what was saved, without the gradient of the result: w, u, decayed queries and keys, new values, states
        and their gradients, those of both matrices and of values; and twice those of queries, keys and the decay."""
        made = 5 * self.result + 2 * self.states + 2 * self.wide_matrix + self.result
        return self.kernel_saved + made + 6 * self.wide


def count_kimi_weights(hidden: int, mixer: KimiDeltaMixer, *, is_narrow: bool) -> int:
    """Of its projections."""
    width = mixer.num_heads * mixer.head_dim
    gate = mixer.head_dim * (hidden + width) if is_narrow else hidden * width
    return hidden * (4 * width + mixer.num_heads) + 2 * gate


def compute_kimi_result(job: Job, mixer: KimiDeltaMixer) -> int:
    """What recomputation is spared: the rule's result as slices, b w S."""
    return KimiBytes(job, mixer).result * job.local_tokens if saves_result(job) else 0


def _count_kimi_projected(job: Job, own: KimiBytes) -> int:
    """The first projections' input, and the narrow vectors of both gates."""
    return (own.hidden if saves_input(job, "q_proj", "k_proj", "v_proj") else 0) + 2 * own.narrow


def _count_kimi_convolved(job: Job, own: KimiBytes) -> int:
    """From the convolution to the rule."""
    if saves_result(job):
        return 2 * own.conv + own.forget_saved + own.decay + own.strength
    return own.conv + own.forget_saved + (own.strength if own.is_split else 0) + own.kernel_saved


def compute_kimi_saved(job: Job, mixer: KimiDeltaMixer) -> int:
    """In addition to that result, which is let go when its layer has been computed again."""
    own = KimiBytes(job, mixer)
    inside = _count_kimi_convolved(job, own) + own.norm_saved + (own.result if saves_input(job, "o_proj") else 0)
    total = compute_input_norm_saved(job) + (inside + _count_kimi_projected(job, own)) * job.local_tokens
    return total - compute_kimi_result(job, mixer)


def _list_kimi_forward(job: Job, own: KimiBytes) -> Iterator[int]:
    """The convolution, with two copies of its result while rows are put together; the forget gate; the gated norm."""
    yield own.hidden + round((3 + 1 / job.batch) * own.conv)
    yield own.hidden + own.conv + own.result + own.forget + own.decay - own.wide
    yield own.hidden + own.conv + own.decay + own.strength + 2 * own.result + 3 * own.wide


def _list_kimi_rule(own: KimiBytes) -> Iterator[int]:
    """While the rule runs, beside what the layer has: rows arrive, the kernel runs, its result returns."""
    if own.is_split:
        yield 2 * own.rows
        yield own.rows + 3 * own.result
    yield own.rows + own.kernel_forward


def compute_kimi_forward(job: Job, mixer: KimiDeltaMixer) -> int:
    own = KimiBytes(job, mixer)
    around = own.hidden + own.conv + own.decay + own.strength
    return max(*_list_kimi_forward(job, own), *(around + rule for rule in _list_kimi_rule(own))) * job.local_tokens


def compute_kimi_again(job: Job, mixer: KimiDeltaMixer) -> int:
    """As in the forward, with what is saved; without the rule where its result was saved."""
    own = KimiBytes(job, mixer)
    convolving, _, norming = _list_kimi_forward(job, own)
    kept = own.conv + own.forget_saved + 2 * own.narrow
    moments = [convolving + own.conv, norming + kept + own.norm_saved - 2 * own.wide]
    if not saves_result(job):
        around = own.hidden + own.conv + own.decay + own.strength
        moments += [around + kept + rule for rule in _list_kimi_rule(own)]
    return compute_input_norm_saved(job) + max(moments) * job.local_tokens


def compute_kimi_left_for_projections(job: Job, mixer: KimiDeltaMixer) -> int:
    """What is left when the first projections compute their gradients from those of their results."""
    own = KimiBytes(job, mixer)
    return compute_input_norm_saved(job) + (_count_kimi_projected(job, own) + own.conv) * job.local_tokens


def list_kimi_backward(job: Job, mixer: KimiDeltaMixer) -> Iterator[tuple[str, int, int]]:
    """(Name, what is left of what was saved, tensors in use) from the mixer's end to its beginning."""
    own, saved, tokens = KimiBytes(job, mixer), compute_kimi_saved(job, mixer), job.local_tokens
    output = (own.result if saves_input(job, "o_proj") else 0) * tokens
    yield "gated norm", saved - output, (3 * own.wide + own.result) * tokens
    before = compute_input_norm_saved(job) + _count_kimi_projected(job, own) * tokens
    left = _count_kimi_convolved(job, own) - (0 if saves_result(job) else own.kernel_saved)
    recomputed = own.result if saves_result(job) else 0
    rule = [own.kernel_backward + recomputed]
    if own.is_split:
        rule.append(3 * own.rows + recomputed)
    if saves_result(job):
        rule += _list_kimi_rule(own)
    yield "rule", before + left * tokens, (own.result + own.hidden + max(rule)) * tokens
    gates = own.conv + own.strength + own.hidden + 4 * own.wide  # gradients of the rule's inputs, and of the gate's
    yield "forget gate", before + (own.conv + own.forget_saved) * tokens, gates * tokens
    yield "convolution", before + own.conv * tokens, (own.hidden + 4 * own.conv) * tokens


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
    return float(job.dtype_bytes * sum(map(_count_convolution_passes, mixers))) * job.local_tokens


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
    own = [KimiBytes(job, mixer) for mixer in kind.mixers if isinstance(mixer, KimiDeltaMixer)]
    widths += [each.rows + each.result for each in own]
    return (forwards + 1) * sum(widths) * job.local_tokens * (num_ranks - 1) / num_ranks
