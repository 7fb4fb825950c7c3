"""Bytes of the part of a decoder layer that reads other tokens: softmax attention, or a convolution.

Each function takes the job as its kind of layer sees it (Job.view).
"""

from __future__ import annotations

from ulysses_cli.plan.ledger import attention, convolution
from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.models.layers import Layer


def compute_result(job: Job, kind: Layer) -> int:
    """What recomputation is spared by saving it."""
    return attention.compute_attention_result(job) if kind.attention else 0


def compute_saved(job: Job, kind: Layer) -> int:
    return attention.compute_attention_saved(job) if kind.attention else convolution.compute_saved(job)


def compute_forward(job: Job, kind: Layer) -> int:
    return attention.compute_attention_forward(job) if kind.attention else convolution.compute_forward(job)


def compute_again(job: Job, kind: Layer) -> int:
    """While it is recomputed."""
    return attention.compute_attention_again(job) if kind.attention else convolution.compute_again(job)


def compute_left_for_projections(job: Job, kind: Layer) -> int:
    """What is left of it when its first projections compute their gradients from those of their results."""
    if kind.attention is None:
        return convolution.compute_left_for_projection(job)
    gone = attention.compute_attention_rows(job) + attention.compute_output_input(job)
    gradients = job.dtype_bytes * (job.query_width + 2 * job.kv_width) * job.local_tokens
    return attention.compute_attention_saved(job) - gone + gradients
