"""Bytes of a gated delta net or a Mamba2 mixer in a decoder layer, per rank and micro-step.

Letters as in layer.py; c channels of the convolution, v values of all heads (the width of the result), e what the
exchange of heads brings. The layer is transformers' (modeling_qwen3_5.py: Qwen3_5GatedDeltaNet; modeling_bamba.py:
BambaMixer) with our convolution, exchange and saved result (train/recurrence/); kernels.py has the kernels.
"""

from __future__ import annotations

from collections.abc import Iterator

from ulysses_cli.plan.ledger.attention import compute_input_norm_saved
from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.ledger.layer import saves_input, saves_result
from ulysses_cli.plan.ledger.recurrence.kernels import (
    RecurrentMixer,
    count_kernel_backward,
    count_kernel_forward,
    count_kernel_saved,
    count_rows,
    count_values,
)
from ulysses_cli.plan.ledger.recurrence.modules import projects_gate_last
from ulysses_cli.plan.ledger.weights import LATE_PROJECTIONS, RECURRENT_PROJECTIONS
from ulysses_cli.plan.models.family import Trait
from ulysses_cli.plan.models.layers import Mamba2Mixer

FLOAT = 4


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
        self.gates = self.result * (not self.is_late) + (1 if self.is_scan else 2) * b * mixer.num_heads
        self.late_gate = self.result * self.is_late
        # Qwen3-Next projects all at once and takes copies of the parts (modeling_qwen3_next.py:
        # fix_query_key_value_ordering); the whole lives as long as the layer's forward
        is_joined = "in_proj_qkvz" in job.family.linear_extras
        self.joined = is_joined * (self.conv + self.result + 2 * b * mixer.num_heads)
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
            return (3 + self.trains_norm) * self.wide_result + own_input
        scaled = self.result * (self.trains_norm + (not self.is_scan))
        return (4 if self.is_scan else 3) * self.wide_result + scaled


def compute_result(job: Job, mixer: RecurrentMixer) -> int:
    """What recomputation is spared: the rule's result as slices, b v S."""
    return RecurrentBytes(job, mixer).result * job.local_tokens if saves_result(job) else 0


def compute_saved(job: Job, mixer: RecurrentMixer) -> int:
    """In addition to that result, which is let go when its layer has been computed again."""
    own = RecurrentBytes(job, mixer)
    inside = _count_convolved(job, own) + own.norm_saved + own.result * saves_input(job, own.last)
    if own.is_scan and not (own.has_norm or own.is_split or saves_result(job)):
        inside -= own.result  # on one rank the scan's kernel and the gate save the same result
    return (
        compute_input_norm_saved(job)
        + (inside + _count_projected(job, own)) * job.local_tokens
        - compute_result(job, mixer)
    )


def _count_projected(job: Job, own: RecurrentBytes) -> int:
    """The first projections' input; Mamba2's gate and steps are views that keep the whole projection."""
    return own.hidden * saves_input(job, *own.first)


def _count_convolved(job: Job, own: RecurrentBytes) -> int:
    """From the convolution to the rule: the convolution's input with its halo; then its result, from which the rule is
    computed again where its result was saved, or what the rule's kernel saves. Of a scan, steps that are saved as they
    were projected keep the whole projection; so does a gate without a norm."""
    keeps_projection = own.is_scan and (saves_result(job) or not own.is_split or not own.has_norm)
    projection = (own.gates + own.conv) * keeps_projection
    if saves_result(job):
        return 2 * own.conv + own.small + projection
    return own.conv + own.small + count_kernel_saved(own.mixer, job) + projection


def _list_forward(job: Job, own: RecurrentBytes) -> Iterator[int]:
    """The convolution, with two copies of its result while rows are put together; the gated norm."""
    around = own.hidden + own.gates + own.joined
    yield around + round((3 + 1 / job.batch + bool(own.joined)) * own.conv)
    wide = 3 * own.wide_result if own.is_scan else 2 * own.wide_result + own.result
    wide = wide if own.has_norm else 2 * own.result
    yield around + own.conv * (1 + own.is_scan) + own.result + own.late_gate + own.small + wide


def _list_rule(job: Job, own: RecurrentBytes) -> Iterator[int]:
    """While the rule runs, beside what the layer has: rows arrive, the kernel runs, its result returns."""
    if own.is_split:
        yield 2 * own.rows
        yield own.rows + 3 * own.result
    yield own.rows + count_kernel_forward(own.mixer, job)


def compute_forward(job: Job, mixer: RecurrentMixer) -> int:
    own = RecurrentBytes(job, mixer)
    around = own.hidden + own.gates + own.joined + own.conv * (1 + own.is_scan) + own.small
    most = max(*_list_forward(job, own), *(around + rule for rule in _list_rule(job, own)))
    return most * job.local_tokens


def compute_again(job: Job, mixer: RecurrentMixer) -> int:
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
    output = own.result * saves_input(job, own.last) * tokens
    scaled = own.result * own.trains_norm  # what the weight's gradient was made of is gone
    norming = 5 * own.wide_result - scaled if own.is_scan else 3 * own.wide_result + own.result
    norming = norming if own.has_norm else 3 * own.result  # gradients of the product, of the gate and of the result
    yield "gated norm", saved - output, norming * tokens
    before = compute_input_norm_saved(job) + _count_projected(job, own) * tokens
    # of the gate, which waits, and of the rule's result; a gate that was projected last has passed its gradient on
    gradients = own.result + (own.hidden if own.is_late else own.result)
    left = _count_convolved(job, own) - (0 if saves_result(job) else count_kernel_saved(mixer, job))
    rule = [count_kernel_backward(mixer, job) + own.result * saves_result(job)]
    if own.is_split:
        rule.append(3 * own.rows + own.result * saves_result(job))
    if saves_result(job):
        rule += _list_rule(job, own)
    yield "rule", before + left * tokens, (gradients + max(rule)) * tokens
    yield "convolution", before + own.conv * tokens, (own.result + 4 * own.conv) * tokens
