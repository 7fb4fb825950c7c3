"""Bytes of Kimi delta attention in a decoder layer, per rank and micro-step.

Letters as in layer.py; w is the width of all heads. The layer is transformers' (modeling_kimi_linear.py:
KimiLinearDeltaAttention) with our convolution, exchange and saved result (train/recurrence/). The kernel is
flash-linear-attention's (fla/ops/kda/chunk.py); prove/trace/recurrent_kernels.py makes the same tensors.
"""

from __future__ import annotations

from collections.abc import Iterator

from ulysses_cli.plan.ledger.attention import compute_input_norm_saved
from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.ledger.layer import saves_input, saves_result
from ulysses_cli.plan.models.layers import KimiDeltaMixer

FLOAT, MASK = 4, 1
CHUNK, BLOCK = 64, 16  # tokens whose products make one matrix, and those on its diagonal (chunk_intra.py: BT, BC)


class KimiBytes:
    """Bytes per local token of one mixer's tensors."""

    def __init__(self, job: Job, mixer: KimiDeltaMixer) -> None:
        b, heads, width = job.dtype_bytes, mixer.num_heads, mixer.num_heads * mixer.head_dim
        self.hidden, self.result, self.wide, self.conv = (
            b * job.shape.hidden_size,
            b * width,
            FLOAT * width,
            3 * b * width,
        )
        self.is_split, self.strength = job.layout.ulysses_size > 1, b * heads
        # Kimi's forget gate keeps the exponential, one more than that, a mask, the logarithm and a narrow vector. That
        # of modeling_bailing_hybrid.py keeps its input and its activation, and rounds the decay.
        is_narrow = job.family.has_narrow_gates
        self.forget = 3 * self.wide + MASK * width if is_narrow else 2 * self.wide
        # A frozen A_log needs no logarithm for its gradient.
        self.forget_saved = self.forget - self.wide * (is_narrow and job.adapters is not None)
        self.narrow = b * mixer.head_dim * is_narrow
        self.decay = self.wide if is_narrow else self.result
        self.rows = self.conv + self.decay + self.strength
        self.states = b * heads * mixer.head_dim**2 // CHUNK
        self.matrix, self.wide_matrix, self.block = b * CHUNK * heads, FLOAT * CHUNK * heads, FLOAT * BLOCK * heads
        # of the gated norm: its input, that normalized, that scaled, and the activated gate
        self.norm_saved = (3 + job.trains("norm")) * self.wide

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


def count_weights(hidden: int, mixer: KimiDeltaMixer, *, is_narrow: bool) -> int:
    """Of its projections."""
    width = mixer.num_heads * mixer.head_dim
    gate = mixer.head_dim * (hidden + width) if is_narrow else hidden * width
    return hidden * (4 * width + mixer.num_heads) + 2 * gate


def compute_result(job: Job, mixer: KimiDeltaMixer) -> int:
    """What recomputation is spared: the rule's result as slices, b w S."""
    return KimiBytes(job, mixer).result * job.local_tokens if saves_result(job) else 0


def _count_projected(job: Job, own: KimiBytes) -> int:
    """The first projections' input, and the narrow vectors of both gates."""
    return own.hidden * saves_input(job, "q_proj", "k_proj", "v_proj") + 2 * own.narrow


def _count_convolved(job: Job, own: KimiBytes) -> int:
    """From the convolution to the rule."""
    if saves_result(job):
        return 2 * own.conv + own.forget_saved + own.decay + own.strength
    return own.conv + own.forget_saved + own.strength * own.is_split + own.kernel_saved


def compute_saved(job: Job, mixer: KimiDeltaMixer) -> int:
    """In addition to that result, which is let go when its layer has been computed again."""
    own = KimiBytes(job, mixer)
    inside = _count_convolved(job, own) + own.norm_saved + own.result * saves_input(job, "o_proj")
    total = compute_input_norm_saved(job) + (inside + _count_projected(job, own)) * job.local_tokens
    return total - compute_result(job, mixer)


def _list_forward(job: Job, own: KimiBytes) -> Iterator[int]:
    """The convolution, with two copies of its result while rows are put together; the forget gate; the gated norm."""
    yield own.hidden + round((3 + 1 / job.batch) * own.conv)
    yield own.hidden + own.conv + own.result + own.forget + own.decay - own.wide
    yield own.hidden + own.conv + own.decay + own.strength + 2 * own.result + 3 * own.wide


def _list_rule(own: KimiBytes) -> Iterator[int]:
    """While the rule runs, beside what the layer has: rows arrive, the kernel runs, its result returns."""
    if own.is_split:
        yield 2 * own.rows
        yield own.rows + 3 * own.result
    yield own.rows + own.kernel_forward


def compute_forward(job: Job, mixer: KimiDeltaMixer) -> int:
    own = KimiBytes(job, mixer)
    around = own.hidden + own.conv + own.decay + own.strength
    return max(*_list_forward(job, own), *(around + rule for rule in _list_rule(own))) * job.local_tokens


def compute_again(job: Job, mixer: KimiDeltaMixer) -> int:
    """As in the forward, with what is saved; without the rule where its result was saved."""
    own = KimiBytes(job, mixer)
    convolving, _, norming = _list_forward(job, own)
    kept = own.conv + own.forget_saved + 2 * own.narrow
    moments = [convolving + own.conv, norming + kept + own.norm_saved - 2 * own.wide]
    if not saves_result(job):
        around = own.hidden + own.conv + own.decay + own.strength
        moments += [around + kept + rule for rule in _list_rule(own)]
    return compute_input_norm_saved(job) + max(moments) * job.local_tokens


def compute_left_for_projections(job: Job, mixer: KimiDeltaMixer) -> int:
    """What is left when the first projections compute their gradients from those of their results."""
    own = KimiBytes(job, mixer)
    return compute_input_norm_saved(job) + (_count_projected(job, own) + own.conv) * job.local_tokens


def list_backward(job: Job, mixer: KimiDeltaMixer) -> Iterator[tuple[str, int, int]]:
    """(Name, what is left of what was saved, tensors in use) from the mixer's end to its beginning."""
    own, saved, tokens = KimiBytes(job, mixer), compute_saved(job, mixer), job.local_tokens
    output = own.result * saves_input(job, "o_proj") * tokens
    yield "gated norm", saved - output, (3 * own.wide + own.result) * tokens
    before = compute_input_norm_saved(job) + _count_projected(job, own) * tokens
    left = _count_convolved(job, own) - (0 if saves_result(job) else own.kernel_saved)
    again = own.result * saves_result(job)
    rule = [own.kernel_backward + again]
    if own.is_split:
        rule.append(3 * own.rows + again)
    if saves_result(job):
        rule += _list_rule(own)
    yield "rule", before + left * tokens, (own.result + own.hidden + max(rule)) * tokens
    gates = own.conv + own.strength + own.hidden + 4 * own.wide  # gradients of the rule's inputs, and of the gate's
    yield "forget gate", before + (own.conv + own.forget_saved) * tokens, gates * tokens
    yield "convolution", before + own.conv * tokens, (own.hidden + 4 * own.conv) * tokens
