"""Bytes of the part of a decoder layer that reads other tokens: softmax attention, a convolution or a recurrence.
A layer may have none.

Each function takes the job as its kind of layer sees it (Job.view).
"""

from __future__ import annotations

from ulysses_cli.plan.ledger import attention, layer
from ulysses_cli.plan.ledger.adapters import lengths
from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.ledger.recurrence import convolution
from ulysses_cli.plan.ledger.recurrence import mixer as recurrence
from ulysses_cli.plan.ledger.recurrence.kernels import RecurrentMixer
from ulysses_cli.plan.models.layers import DeltaNetMixer, Layer, Mamba2Mixer


def find_recurrence(kind: Layer) -> RecurrentMixer | None:
    return next((mixer for mixer in kind.mixers if isinstance(mixer, DeltaNetMixer | Mamba2Mixer)), None)


def compute_result(job: Job, kind: Layer) -> int:
    """Bytes of the mixer's saved result, with which recomputation does not run the mixer again."""
    if recurrent := find_recurrence(kind):
        return recurrence.compute_result(job, recurrent)
    return attention.compute_attention_result(job) if kind.attention else 0


def compute_saved(job: Job, kind: Layer) -> int:
    if not kind.mixers:
        return attention.compute_input_norm_saved(job)
    if recurrent := find_recurrence(kind):
        return recurrence.compute_saved(job, recurrent)
    saved = attention.compute_attention_saved(job) if kind.attention else convolution.compute_saved(job)
    return saved + lengths.compute_saved(job, kind, job.local_tokens, in_mlp=False)


def compute_forward(job: Job, kind: Layer) -> int:
    if not kind.mixers:
        return layer.compute_layer_input(job)
    if recurrent := find_recurrence(kind):
        return recurrence.compute_forward(job, recurrent)
    return attention.compute_attention_forward(job) if kind.attention else convolution.compute_forward(job)


def compute_again(job: Job, kind: Layer) -> int:
    """While it is recomputed."""
    if not kind.mixers:
        return attention.compute_input_norm_saved(job) + layer.compute_layer_input(job)
    if recurrent := find_recurrence(kind):
        return recurrence.compute_again(job, recurrent)
    again = attention.compute_attention_again(job) if kind.attention else convolution.compute_again(job)
    return again + lengths.compute_saved(job, kind, job.local_tokens, in_mlp=False)


def compute_left_for_projections(job: Job, kind: Layer) -> int:
    """What is left of it when its first projections compute their gradients from those of their results."""
    if recurrent := find_recurrence(kind):
        return recurrence.compute_left_for_projections(job, recurrent)
    if not kind.mixers:
        return attention.compute_input_norm_saved(job)
    if kind.attention is None:
        return convolution.compute_left_for_projection(job)
    gone = attention.compute_attention_rows(job) + attention.compute_output_input(job)
    width = job.query_width + attention.count_gate(job) + 2 * job.kv_width
    gradients = job.dtype_bytes * width * job.local_tokens
    return attention.compute_attention_saved(job) - gone + gradients
