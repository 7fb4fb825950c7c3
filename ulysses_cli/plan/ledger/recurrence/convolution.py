"""Bytes of a short convolution in a decoder layer, per rank and micro-step: saved, and used in forward and backward.

Letters as in layer.py. The layer's input is projected to two gates and the convolution's input, c channels each
(transformers: modeling_lfm2.py, Lfm2ShortConv.forward). Convolutions take rows with the tokens before them
(train/recurrence/convolution.py: convolve).
"""

from __future__ import annotations

from ulysses_cli.plan.ledger.attention import compute_input_norm_saved
from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.ledger.layer import compute_layer_input, saves_input
from ulysses_cli.plan.ledger.recurrence.modules import name_last_projection


def _count_bytes(job: Job, num_tensors: float) -> int:
    """b c S of each tensor; a convolution has as many channels as the hidden state."""
    return round(num_tensors * compute_layer_input(job))


def compute_saved(job: Job) -> int:
    """The norm's part, the projection's input and output (4 c b S), the convolution's input with its halo, its result
    and the input of the output projection."""
    projected = saves_input(job, "in_proj") + saves_input(job, name_last_projection(job.family))
    return compute_input_norm_saved(job) + _count_bytes(job, 3 + 2 + projected)


def compute_first_unsaved(job: Job) -> int:
    """What it does not save where nothing before the output projection is trained: all but the norm's part and that
    projection's input."""
    if job.adapters is None or job.adapters.adapts("in_proj"):
        return 0
    return _count_bytes(job, 3 + 2 + saves_input(job, "in_proj"))


def compute_output_input(job: Job) -> int:
    return _count_bytes(job, saves_input(job, name_last_projection(job.family)))


def compute_forward(job: Job) -> int:
    """The projection's input and output, the gated input, one row's result, and two copies of all rows' results while
    they are put together: b c S (7 + 1 / B)."""
    return _count_bytes(job, 7 + 1 / job.batch)


def compute_again(job: Job) -> int:
    """As in the forward, with what is saved: the norm's part and the convolution's input."""
    return compute_input_norm_saved(job) + compute_forward(job) + _count_bytes(job, 1)


def compute_left_for_projection(job: Job) -> int:
    """What is left when the first projection computes its gradients from that of its result, 3 c b S."""
    return compute_input_norm_saved(job) + _count_bytes(job, 3 + saves_input(job, "in_proj"))


def compute_gates_backward(job: Job) -> int:
    """At the product of gate and convolution, in addition to what is saved: its gradient and those of both."""
    return _count_bytes(job, 3)
