"""Bytes of multi-head latent attention (MLA) in a decoder layer, per rank and micro-step: saved, and used in the
forward and the backward.

The layer is transformers' (modeling_deepseek_v3.py: DeepseekV3Attention) with our exchange and kernel. Letters as in
layer.py; q is the width of all queries, as of all keys, and v that of all values; e is what keys' latents are expanded
to: values, and the parts of keys that differ between heads.
"""

from __future__ import annotations

from collections.abc import Iterator

from ulysses_cli.plan.ledger.attention import (
    compute_input_norm_saved,
    count_copy,
    list_ring_backward,
    list_ring_forward,
    saves_slices,
)
from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.ledger.layer import compute_layer_input, compute_norm_saved, saves_input, saves_result
from ulysses_cli.plan.models.family import Trait
from ulysses_cli.plan.models.layers import AttentionMixer

FLOAT = 4


class LatentWidths:
    """Elements per token of one layer's tensors."""

    def __init__(self, job: Job, mixer: AttentionMixer) -> None:
        if mixer.latent is None:
            raise ValueError("an attention without latents")
        rope, self.query_rank, self.kv_rank = mixer.latent.rope_dim, mixer.latent.query_rank or 0, mixer.latent.kv_rank
        self.heads, self.queries = mixer.num_heads, mixer.num_heads * mixer.head_dim
        self.values = mixer.num_heads * mixer.value_head_dim
        rotated = mixer.num_heads * rope
        self.expanded = self.queries - rotated + self.values
        self.rows = 2 * self.queries + self.values
        self.compressed = self.kv_rank + rope
        # values are a view of what was expanded, and keep it
        self.slices = 2 * self.queries + self.expanded
        self.is_padded = mixer.head_dim != mixer.value_head_dim
        # what the layer's forward holds to its end besides slices: queries before the rotation, their rotated parts,
        # keys' latents before the norm and after it, and the part that all heads' keys share, before and after
        self.around = self.kv_rank + self.compressed
        if Trait.WITHOUT_ROTATION not in job.shape.traits:
            self.around += self.queries + rotated + rope


def count_weights(job: Job, mixer: AttentionMixer) -> int:
    """Of its projections."""
    widths, hidden = LatentWidths(job, mixer), job.shape.hidden_size
    rank = mixer.latent.query_rank if mixer.latent else None
    of_queries = hidden * widths.queries if rank is None else rank * (hidden + widths.queries)
    return of_queries + hidden * (widths.compressed + widths.values) + widths.kv_rank * widths.expanded


def count_exchanged(job: Job, mixer: AttentionMixer) -> int:
    """Elements per token that the exchange of heads carries in a micro-step: rows and the result in each forward; in
    the backward the result's gradient, with slices and the result where these were saved, and gradients of rows."""
    widths, forwards = LatentWidths(job, mixer), 1 + (job.levers.gradient_checkpointing == "full")
    backward = widths.values + (widths.rows + widths.values) * saves_slices(job) + widths.rows
    return (widths.rows + widths.values) * forwards + backward


def compute_result(job: Job, mixer: AttentionMixer) -> int:
    """The kernel's output, b v S, and its log-sum-exp."""
    widths = LatentWidths(job, mixer)
    return (job.dtype_bytes * widths.values + FLOAT * widths.heads) * job.local_tokens


def _count_projected(job: Job, widths: LatentWidths) -> int:
    """Bytes that the projections save: the layer's normed input, and the latents' norms with their results."""
    total = compute_layer_input(job) * saves_input(job, "q_proj", "q_a_proj", "kv_a_proj_with_mqa")
    for rank, name in ((widths.query_rank, "q_b_proj"), (widths.kv_rank, "kv_b_proj")):
        total += compute_norm_saved(job, rank) + job.dtype_bytes * rank * saves_input(job, name) * job.local_tokens
    return total


def _count_rows(job: Job, widths: LatentWidths) -> int:
    """Saved queries, keys and values, as slices or as whole rows."""
    is_own = saves_slices(job) or job.layout.ulysses_size == 1
    return job.dtype_bytes * (widths.slices if is_own else widths.rows) * job.local_tokens


def _count_output_input(job: Job, widths: LatentWidths) -> int:
    """The input of the output projection, where it is another tensor than the kernel's result. Times a gate for each
    head it is, and both are saved."""
    if job.family.attention_gate:
        own = job.layout.ulysses_size == 1 or saves_slices(job)
        return job.dtype_bytes * ((not own) + saves_input(job, "o_proj")) * widths.values * job.local_tokens
    is_same = job.layout.ulysses_size == 1 or saves_slices(job) or not saves_input(job, "o_proj")
    return 0 if is_same else job.dtype_bytes * widths.values * job.local_tokens


def compute_saved(job: Job, mixer: AttentionMixer) -> int:
    """In addition to the result."""
    widths = LatentWidths(job, mixer)
    own = _count_projected(job, widths) + _count_rows(job, widths) + _count_output_input(job, widths)
    return compute_input_norm_saved(job) + own


def _count_exchanging(job: Job, widths: LatentWidths) -> int:
    """Elements per token in addition to slices while rows are made and attended to. Tensors of one width travel
    together, so that narrower values come after queries and keys. Kernels fill up values and results to the width of
    keys."""
    q, v, n = widths.queries, widths.values, job.levers.head_chunks
    rows, padding = widths.rows // n, (2 * q // n - v // n) * widths.is_padded
    if job.layout.ulysses_size == 1:
        copied = _count_copied(job, widths)
        on_ring = [each + padding for each in list_ring_forward(job, q, (q + v) // n)]
        return copied + max([v + (v // n) * (n > 1) + padding, *on_ring])
    arriving = max(4 * q, 2 * q + 2 * v) if widths.is_padded else 2 * widths.rows
    result = v if n > 1 else 0
    on_ring = [each + padding for each in list_ring_forward(job, q, (q + v) // n)]
    return max([result + max(arriving // n, rows + v // n + padding, rows + 3 * v // n), *on_ring])


def _count_copied(job: Job, widths: LatentWidths) -> int:
    """Copies of a chunk's queries, keys and values; values are a view of what was expanded. Queries and keys are joined
    head by head, so that tokens of several rows do not lie one behind another."""
    n, q, v = job.levers.head_chunks, widths.queries, widths.values
    moved = q // n if job.batch > 1 and job.layout.ulysses_size == 1 else count_copy(job, q // n, q)
    return 2 * moved + count_copy(job, v // n, widths.expanded)


def compute_forward(job: Job, mixer: AttentionMixer) -> int:
    """The projections' input, what is held around, slices, and the exchange with the kernel."""
    widths = LatentWidths(job, mixer)
    width = job.shape.hidden_size + widths.around + widths.slices + _count_exchanging(job, widths)
    return (job.dtype_bytes * width + FLOAT * widths.heads) * job.local_tokens


def compute_again(job: Job, mixer: AttentionMixer) -> int:
    """While it is recomputed: what its norms and projections save, and what is held around; where the result was not
    saved, also the exchange."""
    widths, b = LatentWidths(job, mixer), job.dtype_bytes
    width = widths.slices + widths.around - widths.kv_rank  # the normed latents are counted as an input
    saved = compute_input_norm_saved(job) + _count_projected(job, widths)
    if not saves_result(job):
        width += _count_exchanging(job, widths)
    return saved + b * width * job.local_tokens


def compute_left_for_projections(job: Job, mixer: AttentionMixer) -> int:
    """What is left of it when its first projections compute their gradients from those of their results."""
    widths = LatentWidths(job, mixer)
    gradients = job.dtype_bytes * (widths.query_rank or widths.queries) * job.local_tokens
    return compute_input_norm_saved(job) + compute_layer_input(job) + gradients


def list_backward(job: Job, mixer: AttentionMixer) -> Iterator[tuple[str, int, int, int]]:
    """(Name, what is left of what was saved, tensors in use, bytes inside kernels) from its end to its beginning: rows
    are exchanged, the kernel runs, and gradients of keys and values become those of the latents."""
    widths, b, tokens, n = LatentWidths(job, mixer), job.dtype_bytes, job.local_tokens, job.levers.head_chunks
    q, v = widths.queries, widths.values
    saved = compute_saved(job, mixer) + compute_result(job, mixer) * (not saves_result(job))
    rest = saved - _count_output_input(job, widths)
    own = v  # the output's gradient
    gone = widths.slices * (n == 1 and saves_slices(job) and job.layout.ulysses_size > 1)
    room = widths.rows * (n > 1)
    if job.layout.ulysses_size > 1:
        of_results = 4 * v // n - v * (gone > 0) if saves_slices(job) else 2 * v
        arriving = max(4 * q, 2 * q + 2 * v) if widths.is_padded else 2 * widths.rows
        rows = widths.rows // n if saves_slices(job) else 0
        first = arriving // n if saves_slices(job) else 0
        yield "exchange", rest, b * (own + room - gone + max(first, rows + of_results)) * tokens, 0
        own += rows + (2 * v // n - v * (gone > 0) if saves_slices(job) else v)
    kernel = FLOAT * (q + widths.heads) // n + b * (4 * q - v) // n * widths.is_padded
    copied = _count_copied(job, widths) if saves_slices(job) else 0  # else the copies were saved
    own += copied + 2 * count_copy(job, v // n, v)
    own, gradients = b * (own + room - gone), b * widths.rows // n
    for num_bytes, share in list_ring_backward(job, q // n, (q + v) // n) or [(gradients, 1.0)]:
        yield "attention", rest, (own + max(gradients, num_bytes)) * tokens, round(share * kernel) * tokens
    left = compute_input_norm_saved(job) + _count_projected(job, widths)
    # keys are written into one tensor in two parts, each of which copies the gradient of the whole
    yield "latents", left, b * (3 * q + 2 * widths.expanded - v) * tokens, 0
