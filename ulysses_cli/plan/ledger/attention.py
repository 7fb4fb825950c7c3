"""Bytes of softmax attention and of multi-head latent attention (MLA) in a decoder layer, per rank and micro-step:
saved, and used in the forward and the backward. Letters as in layer.py; n is the number of chunks of heads.
Layers are transformers' (MLA: modeling_deepseek_v3.py, DeepseekV3Attention) with our exchange and kernel."""

from __future__ import annotations

from collections.abc import Iterator

from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.ledger.layer import (
    compute_layer_input,
    compute_norm_saved,
    compute_query_norm_saved,
    saves_input,
    saves_input_unchanged,
    saves_result,
)
from ulysses_cli.plan.ledger.weights import has_norm_before
from ulysses_cli.plan.models.family import Trait
from ulysses_cli.plan.models.layers import AttentionMixer
from ulysses_cli.plan.rows.indexing import wraps
from ulysses_cli.plan.rows.ring import RoundShare


def compute_attention_result(job: Job) -> int:
    """The attention kernel's output for this rank's heads and whole rows, b q S, and its log-sum-exp, 4 heads S."""
    return (job.dtype_bytes * job.query_width + 4 * job.shape.num_heads) * job.local_tokens


def compute_query_norms_saved(job: Job) -> int:
    """The norms of queries and keys, where the family has them. One of values has no weight and saves its float32 input
    alone, 4 k S."""
    values = 4 * job.own_kv_width * job.local_tokens if Trait.NORMS_OF_VALUES in job.shape.traits else 0
    if not job.shape.query_key_norm:
        return 0
    return compute_query_norm_saved(job, job.query_width + job.own_kv_width) + values


def saves_slices(job: Job) -> bool:
    """With several chunks of heads, and where recomputation spares attention, a rank saves its own slices and the
    backward exchanges them again. Otherwise it saves the whole rows that the kernel saw
    (train/attention/ulysses.py)."""
    return job.levers.head_chunks > 1 or job.levers.gradient_checkpointing is True


def compute_attention_rows(job: Job) -> int:
    """Saved queries, keys and values: b (q + 2 k) S as slices, b (q + 2 r) S as whole rows. Where v is saved as it was
    projected and the family projects q, k and v together, v is a view that keeps the whole projection alive."""
    is_own = saves_slices(job) or job.layout.ulysses_size == 1
    kv = job.own_kv_width if is_own else job.row_kv_width
    return job.dtype_bytes * (job.query_width + 2 * kv + (count_fused(job) if is_own else 0)) * job.local_tokens


def count_fused(job: Job) -> int:
    """q + k per token that live as long as v does, in addition to the rotated ones: a family that projects q, k and v
    together slices v out of the whole (transformers: modeling_phi3.py, Phi3Attention.forward)."""
    return job.query_width + job.kv_width if "qkv_proj" in job.family.attention_modules else 0


def count_copy(job: Job, part: int, width: int) -> int:
    """Elements per token of a chunk's part of a tensor of this width, where a rank that exchanges no heads copies it:
    as a view it would reach farther than kernels index (train/attention/ulysses.py). What is exchanged is copied too,
    but then its buffer is gone."""
    is_copied = job.layout.ulysses_size == 1 and part < width and wraps(job.local_tokens, width)
    return part if is_copied else 0


def _count_copied_rows(job: Job) -> int:
    """Copies of a chunk's queries, keys and values."""
    q, k, r = job.query_width, job.kv_width, job.chunk_kv_width
    return (
        count_copy(job, q // job.levers.head_chunks, q)
        + count_copy(job, r, k)
        + count_copy(job, r, k + count_fused(job))
    )


def compute_attention_saved(job: Job) -> int:
    """What attention's backward needs in addition to its result: saved norms, inputs of the projections, rows, and
    (where rows are exchanged) the result again as the input of the output projection."""
    saved = compute_query_norms_saved(job) + compute_attention_rows(job) + compute_output_input(job)
    saved += _compute_rotary_saved(job)
    projected = compute_layer_input(job) if saves_input(job, "q_proj", "k_proj", "v_proj", "qkv_proj") else 0
    if has_norm_before(job.shape):
        return saved + compute_input_norm_saved(job) + projected
    # projections of a layer without a norm before them save the layer's input, which recomputation starts from
    return saved + (projected if job.levers.gradient_checkpointing is False else 0)


def _compute_rotary_saved(job: Job) -> int:
    share = job.family.interleaved_rotary
    size = 4 if Trait.PRECISE_ROTARY in job.shape.traits else job.dtype_bytes
    return round(2 * size * share * job.shape.head_dim) * job.local_tokens


def compute_input_norm_saved(job: Job) -> int:
    """What the norm before attention saves. With recomputation, an input that it saves unchanged is the layer's input,
    which is counted already."""
    is_shared = saves_input_unchanged(job) and job.levers.gradient_checkpointing is not False
    return compute_norm_saved(job, job.shape.hidden_size) - (compute_layer_input(job) if is_shared else 0)


def count_gate(job: Job) -> int:
    """Gates per token, as many as queries, where queries are projected with them (modeling_qwen3_5.py:
    Qwen3_5Attention)."""
    return job.query_width if job.family.attention_gate == "elements" else 0


def compute_output_input(job: Job) -> int:
    """The input of the output projection: b q S. On one rank, and where slices are saved, it is attention's result;
    that result times the activated gates is another tensor, and both factors are saved. Gates of heads are small."""
    if job.family.attention_gate:
        own = job.layout.ulysses_size == 1 or saves_slices(job)
        num = int(count_gate(job) > 0) + int(not own) + int(saves_input(job, "o_proj"))
        return job.dtype_bytes * num * job.query_width * job.local_tokens
    is_same = job.layout.ulysses_size == 1 or saves_slices(job) or not saves_input(job, "o_proj")
    return 0 if is_same else job.dtype_bytes * job.query_width * job.local_tokens


def compute_attention_forward(job: Job) -> int:
    """The projections' input and the rank's own q, k, v: b (h + q + 2 k) S. In addition the largest of: rotation, 3 q
    or q + 3 k; the exchange before the kernel, 2 (q + 2 r) / n, with the previous chunk's result and the output; the
    exchange after the kernel, with rows, result, a send buffer and a receive buffer."""
    h = job.shape.hidden_size
    q = job.query_width
    k = job.own_kv_width
    r = job.chunk_kv_width
    n = job.levers.head_chunks
    own = (h if has_norm_before(job.shape) else 0) + q + 2 * k + 2 * count_gate(job)
    if job.layout.ulysses_size == 1:
        widest = (q if n == 1 else q + q // n) + _count_copied_rows(job)
    elif n == 1:
        widest = max(2 * (q + 2 * r), q + 2 * r + 3 * q)
    else:
        widest = max(q + 2 * (q // n + 2 * r) + q // n, q + q // n + 2 * r + 2 * (q // n))
    widest = max([widest, *(_count_copied_rows(job) + each for each in list_ring_forward(job, q, 2 * r))])
    widest = max(count_rotating(job), widest + count_fused(job))
    return (job.dtype_bytes * (own + widest) + 4 * job.shape.num_heads) * job.local_tokens


def list_ring_forward(job: Job, q: int, kv: int) -> list[int]:
    """On a ring, with the exchanged rows, (q + kv) / n, where `kv` is the width of keys and values together (of one
    rank alone they are views): while keys are fetched, send and receive buffers, then receive buffer and keys; while
    the kernel runs, keys, the whole result and a part's. Where answers share a prompt, on one rank too, keys are copied
    into the order that the kernel takes."""
    n, share = job.levers.head_chunks, job.ring_share
    rows = (q // n + kv if job.layout.ulysses_size > 1 else 0) + (q if n > 1 else 0)
    if job.num_branches:
        fetched, copied = share.keys if share.fetched > 0 else 0, (1 + job.num_branches) * share.keys
        sending = max(share.sent + share.fetched, share.fetched + share.keys) if fetched else 0.0
        return [rows + round(max(sending, fetched + copied) * kv), rows + round(copied * kv) + q // n]
    if not share.fetched:
        return []
    if share.rounds:
        return [rows + _count_rounds_forward(job, q // n, kv)]
    fetching = max(share.sent + share.fetched, share.fetched + share.keys)
    running = share.keys * kv + (1 + (share.largest_part if share.num_parts > 1 else 0)) * (q // n)
    return [rows + round(fetching * kv), rows + round(running)]


def _count_rounds_forward(job: Job, q: int, kv: int) -> int:
    """In rounds: the result in float32, a round's keys, the next round's with what is sent for it, and the result of a
    part; in the end the result in b bytes."""
    moving = (
        kv * ((each.keys if not each.is_own else 0) + each.arriving + each.sent) for each in job.ring_share.rounds
    )
    parts = (q * each.largest_part for each in job.ring_share.rounds)
    return 4 * q // job.dtype_bytes + round(max(q, *map(sum, zip(moving, parts, strict=True))))


def count_rotating(job: Job) -> int:
    """Elements per token while queries and keys are rotated; twice as many where rotation is in float32."""
    q, k = job.query_width, job.own_kv_width
    if Trait.COPIES_TO_ROTATE in job.shape.traits and job.dtype_bytes < 4:
        return 2 * max(4 * q + k, 2 * q + 4 * k)
    is_precise = Trait.PRECISE_ROTARY in job.shape.traits and job.dtype_bytes < 4
    return max(3 * q, q + 3 * k) * (2 if is_precise else 1)


def compute_recomputed_attention(job: Job) -> int:
    """While a layer's attention is recomputed: as in the forward, and what its norms save. Where its result is saved,
    recomputation ends after the rotation."""
    h, q, k = job.shape.hidden_size, job.query_width, job.own_kv_width
    saved = compute_query_norms_saved(job)
    if has_norm_before(job.shape):
        saved += compute_input_norm_saved(job)
    if saves_result(job):
        own = (h if has_norm_before(job.shape) else 0) + q + 2 * k + 2 * count_gate(job)
        return saved + job.dtype_bytes * (own + count_rotating(job)) * job.local_tokens
    return saved + compute_attention_forward(job)


def compute_attention_exchange(job: Job) -> int:
    """Backward, in addition to what is saved, during the exchange: the output's gradient, b q S, and buffers for
    sending and receiving: 2 q for that gradient, or 2 (3 q + 2 r) / n where slices were saved and travel too. With one
    chunk a slice is freed once it is copied, and the result and its gradient travel after the others. With several
    chunks there is also room for all gradients."""
    q = job.query_width
    k = job.own_kv_width
    r = job.chunk_kv_width
    b = job.dtype_bytes
    n = job.levers.head_chunks
    gate = b * count_gate(job)  # its gradient waits for that of the queries
    if job.layout.ulysses_size == 1:
        return (gate + b * q + (_count_room_bytes(job) if n > 1 else 0)) * job.local_tokens
    if n > 1:
        return (gate + b * (q + 2 * (3 * (q // n) + 2 * r)) + _count_room_bytes(job)) * job.local_tokens
    if saves_slices(job):
        return (gate + b * (max(2 * q + 4 * r, 4 * q + 2 * r) - 2 * k - count_fused(job))) * job.local_tokens
    return (gate + b * 3 * q) * job.local_tokens


def list_kernel_runs(job: Job) -> Iterator[tuple[int, int]]:
    """(Bytes in addition to what is saved, bytes that only kernels see) of a backward, while the kernel runs: this
    rank's slice of the output's gradient, b q S; where rows had to be exchanged, whole rows of that gradient, q, k, v
    and the result; and the gradients of q, k and v. Saved slices are freed by then, unless further chunks of heads need
    them. Sinks get their gradient after the kernel, on a ring when all keys are done."""
    q = job.query_width
    k = job.own_kv_width
    r = job.chunk_kv_width
    b = job.dtype_bytes
    n = job.levers.head_chunks
    is_split = job.layout.ulysses_size > 1
    if n > 1:
        copied = _count_copied_rows(job) + 2 * count_copy(job, q // n, q)
        rows, room = 3 * (q // n) + 2 * r if is_split else copied, _count_room_bytes(job)
    else:
        rows, room = (
            (3 * q + 2 * r - 2 * q - 2 * k - count_fused(job) if saves_slices(job) else q)
            if is_split
            else _count_copied_rows(job),
            0,
        )
    own, gradients = b * (q + rows + count_gate(job)) + room, b * (q // n + 2 * r)
    for bytes_per_token, share in list_ring_backward(job, q // n, 2 * r) or [(gradients, 1.0)]:
        num_bytes = (own + max(gradients, bytes_per_token)) * job.local_tokens
        yield num_bytes, round(share * _compute_kernel_workspace(job))
    yield (own + gradients) * job.local_tokens, _compute_sink_work(job)


def list_ring_backward(job: Job, q: int, kv: int) -> list[tuple[int, float]]:
    """On a ring, (bytes per token in place of the gradients of q, k and v, the share of queries in one kernel): the
    keys, fetched again, with the gradients of all of them and of a part's, or while gradients return, send and receive
    buffers and their float32 sum. Where answers share a prompt, on one rank too, the same of the keys' copies. `kv`:
    the width of keys and values together."""
    b, n = job.dtype_bytes, job.ring_share
    if job.num_branches:
        copied, fetched = (1 + job.num_branches) * n.keys * b, (n.keys if n.fetched > 0 else 0) * b
        adding = copied + n.keys * (4 + (b if b < 4 else 0)) + (n.fetched + n.sent) * b
        running = max(fetched + copied, 2 * copied)
        return [(round(q * b + running * kv), 1.0), (round(q * b + adding * kv), 0.0)]
    if not n.fetched:
        return []
    if n.rounds:
        return _list_rounds_backward(job, q, kv)
    own = q + kv
    fetching = (max(n.sent + n.fetched, n.fetched + n.keys)) * kv * b
    sums = n.keys * kv * (4 if n.num_parts > 2 else b) if n.num_parts > 1 else 0
    part = (n.largest_part * q + n.keys * kv) * b + (n.largest_part * q * b if n.num_parts > 1 else 0)
    running = n.keys * kv * b + (q * b if n.num_parts > 1 else 0) + sums + part
    gradients = sums or n.keys * kv * b
    cast = b if b < 4 else 0
    returning = q * b + gradients + max((n.fetched + n.sent) * b, n.sent * b + 4 + cast) * kv
    return [(round(max(own * b, fetching, running, returning)), 1.0)]


def _list_rounds_backward(job: Job, q: int, kv: int) -> list[tuple[int, float]]:
    """Of each round: float32 sums of the gradients of q, k and v; a round's keys with their gradients, the next round's
    with what is sent for it, what returns of the round before, and the gradients of a part."""
    b = job.dtype_bytes

    def count(each: RoundShare) -> float:
        block = 0 if each.is_own else each.keys
        moving = (block + each.arriving + each.sent + each.returning) * kv * b
        joined = block * kv * (4 if each.num_parts > 2 else b)
        part = each.largest_part * q * b * (1 if each.is_own else 2) + each.keys * kv * b
        return moving + joined + part

    return [(4 * q + 4 * kv + round(count(each)), each.largest_part) for each in job.ring_share.rounds]


def _count_room_bytes(job: Job) -> int:
    """Per token, room for the gradients of all chunks; those of shared keys are summed in float32."""
    return job.dtype_bytes * job.query_width + 2 * job.kv_width * (4 if job.kv_gradients_add_up else job.dtype_bytes)


def _compute_kernel_workspace(job: Job) -> int:
    """Inside flash attention's backward: a float32 accumulator of dq and one number per token and head. Where the heads
    of this rank and chunk share keys, also dk and dv: of every query head in b bytes (FlashAttention 2, flash_api.cpp:
    dk_expanded), or of every key head in float32 (3 and newer: dk_accum). No trace of operators sees it."""
    n, expanded = job.levers.head_chunks, 0
    if job.chunk_kv_width < job.query_width // n:
        is_old = job.kernel not in ("flash_attention_3", "flash_attention_4")
        expanded = 2 * job.dtype_bytes * job.query_width // n if is_old else 8 * job.chunk_kv_width
    return (4 * (job.query_width + job.shape.num_heads) // n + expanded) * job.local_tokens


def _compute_sink_work(job: Job) -> int:
    """For trained sinks, three float32 tensors of one head and whole rows (train/attention/kernels/operators.py:
    compute_sink_gradient)."""
    trained = job.shape.has_sinks and job.adapters is None
    return 12 * job.shape.head_dim * job.layout.ulysses_size * job.local_tokens * trained


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


def count_latent_weights(job: Job, mixer: AttentionMixer) -> int:
    """Of its projections."""
    widths, hidden = LatentWidths(job, mixer), job.shape.hidden_size
    rank = mixer.latent.query_rank if mixer.latent else None
    of_queries = hidden * widths.queries if rank is None else rank * (hidden + widths.queries)
    return of_queries + hidden * (widths.compressed + widths.values) + widths.kv_rank * widths.expanded


def count_latent_exchanged(job: Job, mixer: AttentionMixer) -> int:
    """Elements per token that the exchange of heads carries in a micro-step: rows and the result in each forward; in
    the backward the result's gradient, with slices and the result where these were saved, and gradients of rows."""
    widths, forwards = LatentWidths(job, mixer), 1 + int(job.levers.gradient_checkpointing == "full")
    backward = widths.values + (widths.rows + widths.values if saves_slices(job) else 0) + widths.rows
    return (widths.rows + widths.values) * forwards + backward


def compute_latent_result(job: Job, mixer: AttentionMixer) -> int:
    """The kernel's output, b v S, and its log-sum-exp."""
    widths = LatentWidths(job, mixer)
    return (job.dtype_bytes * widths.values + FLOAT * widths.heads) * job.local_tokens


def _count_latent_projected(job: Job, widths: LatentWidths) -> int:
    """Bytes that the projections save: the layer's normed input, and the latents' norms with their results."""
    total = compute_layer_input(job) if saves_input(job, "q_proj", "q_a_proj", "kv_a_proj_with_mqa") else 0
    for rank, name in ((widths.query_rank, "q_b_proj"), (widths.kv_rank, "kv_b_proj")):
        total += (
            compute_norm_saved(job, rank) + (job.dtype_bytes * rank if saves_input(job, name) else 0) * job.local_tokens
        )
    return total


def _count_latent_rows(job: Job, widths: LatentWidths) -> int:
    """Saved queries, keys and values, as slices or as whole rows."""
    is_own = saves_slices(job) or job.layout.ulysses_size == 1
    return job.dtype_bytes * (widths.slices if is_own else widths.rows) * job.local_tokens


def _count_latent_output_input(job: Job, widths: LatentWidths) -> int:
    """The input of the output projection, where it is another tensor than the kernel's result. Times a gate for each
    head it is, and both are saved."""
    if job.family.attention_gate:
        own = job.layout.ulysses_size == 1 or saves_slices(job)
        return job.dtype_bytes * (int(not own) + int(saves_input(job, "o_proj"))) * widths.values * job.local_tokens
    is_same = job.layout.ulysses_size == 1 or saves_slices(job) or not saves_input(job, "o_proj")
    return 0 if is_same else job.dtype_bytes * widths.values * job.local_tokens


def compute_latent_saved(job: Job, mixer: AttentionMixer) -> int:
    """In addition to the result."""
    widths = LatentWidths(job, mixer)
    own = (
        _count_latent_projected(job, widths) + _count_latent_rows(job, widths) + _count_latent_output_input(job, widths)
    )
    return compute_input_norm_saved(job) + own


def _count_latent_exchanging(job: Job, widths: LatentWidths) -> int:
    """Elements per token in addition to slices while rows are made and attended to. Tensors of one width travel
    together, so that narrower values come after queries and keys. Kernels fill up values and results to the width of
    keys."""
    q, v, n = widths.queries, widths.values, job.levers.head_chunks
    rows, padding = widths.rows // n, 2 * q // n - v // n if widths.is_padded else 0
    if job.layout.ulysses_size == 1:
        copied = _count_latent_copied(job, widths)
        on_ring = [each + padding for each in list_ring_forward(job, q, (q + v) // n)]
        return copied + max([v + (v // n if n > 1 else 0) + padding, *on_ring])
    arriving = max(4 * q, 2 * q + 2 * v) if widths.is_padded else 2 * widths.rows
    result = v if n > 1 else 0
    on_ring = [each + padding for each in list_ring_forward(job, q, (q + v) // n)]
    return max([result + max(arriving // n, rows + v // n + padding, rows + 3 * v // n), *on_ring])


def _count_latent_copied(job: Job, widths: LatentWidths) -> int:
    """Copies of a chunk's queries, keys and values; values are a view of what was expanded. Queries and keys are joined
    head by head, so that tokens of several rows do not lie one behind another."""
    n, q, v = job.levers.head_chunks, widths.queries, widths.values
    moved = q // n if job.batch > 1 and job.layout.ulysses_size == 1 else count_copy(job, q // n, q)
    return 2 * moved + count_copy(job, v // n, widths.expanded)


def compute_latent_forward(job: Job, mixer: AttentionMixer) -> int:
    """The projections' input, what is held around, slices, and the exchange with the kernel."""
    widths = LatentWidths(job, mixer)
    width = job.shape.hidden_size + widths.around + widths.slices + _count_latent_exchanging(job, widths)
    return (job.dtype_bytes * width + FLOAT * widths.heads) * job.local_tokens


def compute_latent_again(job: Job, mixer: AttentionMixer) -> int:
    """While it is recomputed: what its norms and projections save, and what is held around; where the result was not
    saved, also the exchange."""
    widths, b = LatentWidths(job, mixer), job.dtype_bytes
    width = widths.slices + widths.around - widths.kv_rank  # the normed latents are counted as an input
    saved = compute_input_norm_saved(job) + _count_latent_projected(job, widths)
    if not saves_result(job):
        width += _count_latent_exchanging(job, widths)
    return saved + b * width * job.local_tokens


def compute_latent_left_for_projections(job: Job, mixer: AttentionMixer) -> int:
    """What is left of it when its first projections compute their gradients from those of their results."""
    widths = LatentWidths(job, mixer)
    gradients = job.dtype_bytes * (widths.query_rank or widths.queries) * job.local_tokens
    return compute_input_norm_saved(job) + compute_layer_input(job) + gradients


def list_latent_backward(job: Job, mixer: AttentionMixer) -> Iterator[tuple[str, int, int, int]]:
    """(Name, what is left of what was saved, tensors in use, bytes inside kernels) from its end to its beginning: rows
    are exchanged, the kernel runs, and gradients of keys and values become those of the latents."""
    widths = LatentWidths(job, mixer)
    b = job.dtype_bytes
    tokens = job.local_tokens
    n = job.levers.head_chunks
    q, v = widths.queries, widths.values
    saved = compute_latent_saved(job, mixer) + (compute_latent_result(job, mixer) if not saves_result(job) else 0)
    rest = saved - _count_latent_output_input(job, widths)
    own = v  # the output's gradient
    gone = widths.slices if n == 1 and saves_slices(job) and job.layout.ulysses_size > 1 else 0
    room = widths.rows if n > 1 else 0
    if job.layout.ulysses_size > 1:
        of_results = 4 * v // n - (v if gone > 0 else 0) if saves_slices(job) else 2 * v
        arriving = max(4 * q, 2 * q + 2 * v) if widths.is_padded else 2 * widths.rows
        rows = widths.rows // n if saves_slices(job) else 0
        first = arriving // n if saves_slices(job) else 0
        yield "exchange", rest, b * (own + room - gone + max(first, rows + of_results)) * tokens, 0
        own += rows + (2 * v // n - (v if gone > 0 else 0) if saves_slices(job) else v)
    kernel = FLOAT * (q + widths.heads) // n + (b * (4 * q - v) // n if widths.is_padded else 0)
    copied = _count_latent_copied(job, widths) if saves_slices(job) else 0  # else the copies were saved
    own += copied + 2 * count_copy(job, v // n, v)
    own, gradients = b * (own + room - gone), b * widths.rows // n
    for num_bytes, share in list_ring_backward(job, q // n, (q + v) // n) or [(gradients, 1.0)]:
        yield "attention", rest, (own + max(gradients, num_bytes)) * tokens, round(share * kernel) * tokens
    left = compute_input_norm_saved(job) + _count_latent_projected(job, widths)
    # keys are written into one tensor in two parts, each of which copies the gradient of the whole
    yield "latents", left, b * (3 * q + 2 * widths.expanded - v) * tokens, 0
