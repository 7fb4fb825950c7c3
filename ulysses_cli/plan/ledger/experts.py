"""Bytes inside a block of experts, per rank: a router, experts of which each token is sent to k, and in some families
an expert that every token goes to, before the others or after them. And bytes of experts beside an MLP, which their
layer routes tokens to.

Letters as in layer.py; i is an expert's inner width, s that of the shared one. "Inside" as in mlp.py. The experts are
transformers' (integrations/moe.py: grouped_mm_experts_forward).
"""

from __future__ import annotations

from dataclasses import replace

from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.ledger.layer import (
    compute_layer_input,
    compute_norm_saved,
    count_mlp_tile_tokens,
    is_tiled,
    saves_input,
    saves_norm_input,
    saves_result,
)
from ulysses_cli.plan.ledger.weights import has_norm_behind, is_fused_mlp
from ulysses_cli.plan.models.family import Trait
from ulysses_cli.plan.models.layers import ExpertsMlp, Layer

INDEX_BYTES = 44  # per token and chosen expert: 64-bit indices and a weight
ENTRY_BYTES = 12  # of those, what experts beside an MLP get: an index and a float32 weight


def compute_saved(job: Job, mlp: ExpertsMlp, tokens: int) -> int:
    """For each expert that a token is sent to: the token's copy, tensors of the inner width, and the expert's output, 2
    h b + 4 i b. A matrix's input is saved only for its gradient, the router's in float32 too."""
    b, hidden, trained = job.dtype_bytes, job.shape.hidden_size, job.adapters is None
    inner = (job.family.inner_saved - 1 + trained) * mlp.inner_size
    width = mlp.num_per_token * (b * (inner + (1 + trained) * hidden) + INDEX_BYTES)
    router = 4 * hidden if Trait.PRECISE_ROUTERS in job.shape.traits and saves_input(job, "router") else 0
    return (width + router) * tokens + compute_shared_saved(job, mlp, tokens)


def compute_shared_saved(job: Job, mlp: ExpertsMlp, tokens: int) -> int:
    """4 s b: gate, activated gate, up and their product; ungated, the activation and its square. Where a gate scales
    its result, the result."""
    if not mlp.shared_size:
        return 0
    inner = (3 if mlp.is_gated else 1) + int(saves_input(job, "down_proj"))
    return (
        job.dtype_bytes
        * (inner * mlp.shared_size + (job.shape.hidden_size if job.family.has_shared_gate else 0))
        * tokens
    )


def compute_left(job: Job, mlp: ExpertsMlp, weight: str) -> int | None:
    """What is left of the saved inside when the gradient of `weight` exists; None: all of it. At the experts' last
    matrices their results have gone, and their input, of which a gradient exists; at their first ones all but the
    tokens' copies, whose gradients exist; at a router that was made before them, those too. A shared expert that runs
    first has its backward last; of another one there is the gradient of its input, which a norm behind both has freed
    as much as."""
    all_shared = compute_shared_saved(job, mlp, job.local_tokens)
    shared = all_shared if is_shared_first(job) else 0
    copies = mlp.num_per_token * job.dtype_bytes * job.shape.hidden_size * job.local_tokens
    comes = mlp.shared_size > 0 and not is_shared_first(job) and not has_norm_behind(job.shape)
    came = compute_layer_input(job) * comes
    at_last = compute_saved(job, mlp, job.local_tokens) - all_shared - copies + shared + came
    return {"experts.down": at_last, "experts.gate_up": copies + shared, "router": shared}.get(weight)


def compute_gone(job: Job, layer: Layer) -> int:
    """What is freed when the experts are fetched for their backward: what a shared expert that runs last has saved."""
    if not isinstance(layer.mlp, ExpertsMlp) or is_shared_first(job):
        return 0
    return compute_shared_saved(job, layer.mlp, job.local_tokens)


def is_shared_first(job: Job) -> bool:
    return Trait.SHARED_FIRST in job.shape.traits


def compute_forward(job: Job, mlp: ExpertsMlp, tokens: int) -> int:
    return max(compute_routed_forward(job, mlp, tokens), compute_shared_forward(job, mlp, tokens))


def compute_routed_forward(job: Job, mlp: ExpertsMlp, tokens: int) -> int:
    """For each expert of a token, the larger of the inner tensors and four copies of the token (and their biases), two
    of which may be float32. The result of a shared expert that ran before."""
    b, hidden = job.dtype_bytes, job.shape.hidden_size
    copies = (b * (2 + job.family.experts_have_bias) + 2 * _count_result_bytes(job)) * hidden
    inner = job.family.inner_at_once * mlp.inner_size
    experts = mlp.num_per_token * (max(copies, b * (hidden + inner)) + INDEX_BYTES) * tokens
    return experts + (b * hidden * tokens if mlp.shared_size and is_shared_first(job) else 0)


def compute_shared_forward(job: Job, mlp: ExpertsMlp, tokens: int) -> int:
    """3 s b: of a shared expert; the result of the others, where they ran before."""
    before = 0 if is_shared_first(job) else job.shape.hidden_size
    return job.dtype_bytes * (3 * mlp.shared_size + before) * tokens if mlp.shared_size else 0


def compute_backward(job: Job, mlp: ExpertsMlp, tokens: int) -> int:
    """In addition to what is saved. For each expert of a token: three gradients of its copies, 3 h b, or float32 where
    results are weighted so; or one of the inner width and the gradients of all experts' matrices; or two of the inner
    width while the last matrices' gradient, where it is larger than the bucket, waits in its own memory. Without gates
    the square of an activation has three gradients, 3 i b.

    A shared expert that runs last has its backward first: it has freed what it saved and made a gradient of the input.
    Where its result has a gate, that result's gradient and the input's come first, and the result is gone."""
    b, hidden, trained = job.dtype_bytes, job.shape.hidden_size, job.adapters is None
    inner, k = mlp.inner_size, mlp.num_per_token
    matrix = b * mlp.num_experts * inner * hidden * trained
    result_bytes, down = _count_result_bytes(job), k * b * inner * tokens + matrix
    results = max(3 * k * result_bytes * hidden * tokens, _compute_recomputed(job, mlp, tokens))
    if mlp.is_gated:
        gate_up = compute_first_backward(job, mlp, tokens)
        waiting = matrix if mlp.num_experts * inner * hidden > job.engine.reduce_bucket else 0
        gate = k * b * ((3 - trained) * inner - hidden) * tokens  # frozen matrices have not saved the gate times up
        widest = max(
            results, down, gate + waiting - _count_kept_views(job) * b * mlp.num_experts * inner * hidden, gate_up
        )
    else:
        widest = max(results, 3 * k * b * inner * tokens, down)
    scaled = b * hidden * tokens if Trait.SCALED_BLOCKS in job.shape.traits else 0
    if not mlp.shared_size:
        return widest + scaled
    if is_shared_first(job):
        return widest + (b * hidden * tokens if job.family.has_shared_gate else 0)
    widest += b * hidden * tokens - compute_shared_saved(job, mlp, tokens) - _compute_input_gone(job, tokens)
    views = 3 * _count_kept_views(job) * b * mlp.num_experts * inner * hidden
    own = b * mlp.shared_size * (tokens + max(tokens, hidden * trained))
    return scaled + max(widest, max(own, _compute_recomputed_shared(job, mlp, tokens)) - views)


def compute_first_backward(job: Job, mlp: ExpertsMlp, tokens: int) -> int:
    """In addition to what is saved, when gate and up of all experts compute their gradient: that gradient, and the
    tokens' copies, while what the last matrices saved has gone."""
    b, hidden, inner = job.dtype_bytes, job.shape.hidden_size, mlp.inner_size
    matrices = 2 * b * mlp.num_experts * inner * hidden if job.adapters is None else 0
    return matrices - mlp.num_per_token * b * (hidden + 2 * inner) * tokens


def _compute_recomputed_shared(job: Job, mlp: ExpertsMlp, tokens: int) -> int:
    """In addition to what is saved, while a shared expert that runs last is computed again with adapters: a frozen
    matrix's result and its adapter's beside their sum, the residual, the other experts' result and the adapter's
    gradient that waits."""
    names = ("gate_proj", "up_proj", "gate_up_proj")
    recomputes = job.levers.gradient_checkpointing is not False and not is_tiled(job)
    if job.adapters is None or not (recomputes and job.adapters.adapts(*names)):
        return 0
    width = (1 + int(is_fused_mlp(job.family))) * mlp.shared_size + 3 * job.shape.hidden_size
    return job.dtype_bytes * width * tokens


def _count_kept_views(job: Job) -> int:
    """1 where a recomputation keeps views of frozen experts until their products' backward, while they are gathered
    again (zero/coordinator.py: Coordinator._release); else 0. A shared expert's backward comes before they are
    gathered; when gate and up have their gradients, the view of the last matrices is gone."""
    is_behind = has_norm_behind(job.shape) or not is_shared_first(job)
    recomputes = job.levers.gradient_checkpointing is not False and not is_tiled(job)
    is_gathered = job.zero_stage == 3 and job.world_size > 1
    return int(job.adapters is not None and is_gathered and recomputes and is_behind)


def _compute_input_gone(job: Job, tokens: int) -> int:
    """The block's input, where the shared expert alone has saved it: experts have copies of their tokens, and the
    router a float32 one."""
    is_alone = Trait.PRECISE_ROUTERS in job.shape.traits and saves_input(job, "gate_proj", "up_proj", "gate_up_proj")
    return job.dtype_bytes * job.shape.hidden_size * tokens if is_alone and not is_tiled(job) else 0


def _compute_recomputed(job: Job, mlp: ExpertsMlp, tokens: int) -> int:
    """In addition to what is saved, while the inside is computed again. The results' gradient is there before that: the
    sum over a token's experts copies it for each of them. With it the token's copy, if frozen matrices have not saved
    it, and at the end the weighted results and the biases. Or the first biases, 2 i b, and one more tensor of the inner
    width, until the last biases are there. A layer that is computed again holds its residual, and the result of a
    shared expert that runs first."""
    if not is_tiled(job) and job.levers.gradient_checkpointing is False:
        return 0
    b, hidden, has_bias = job.dtype_bytes, job.shape.hidden_size, job.family.experts_have_bias
    result = _count_result_bytes(job) * hidden
    copies, ending = b * hidden if job.adapters is not None else 0, result + (b * hidden if has_bias else 0)
    recomputed = mlp.num_per_token * (result + copies + max(ending, 3 * b * mlp.inner_size if has_bias else 0))
    waiting = mlp.shared_size > 0 and is_shared_first(job) and not job.family.has_shared_gate
    return (recomputed + (b * hidden * (1 + waiting) if not is_tiled(job) else 0)) * tokens


def _count_result_bytes(job: Job) -> int:
    """Of one element of an expert's result times its routing weight."""
    return 4 if Trait.PRECISE_RESULTS in job.shape.traits else job.dtype_bytes


def is_beside(job: Job, layer: Layer) -> bool:
    """Whether experts have norms of their own beside the MLP."""
    return isinstance(layer.mlp, ExpertsMlp) and Trait.BESIDE_MLP in job.shape.traits


def get_alone(layer: Layer) -> ExpertsMlp:
    """The experts beside an MLP without it: each of the two runs in tiles by itself (train/memory/tiled_mlp.py)."""
    assert isinstance(layer.mlp, ExpertsMlp)
    return replace(layer.mlp, shared_size=0)


def saves_output(job: Job) -> bool:
    """A norm behind a block in tiles needs the block's output again, so it is saved (train/memory/tiled_mlp.py)."""
    return is_tiled(job) and saves_result(job) and has_norm_behind(job.shape)


def compute_beside_saved(job: Job, layer: Layer) -> int:
    """The norms behind the MLP and around the experts, the router's, and what experts in tiles save. Norms that save
    their inputs alone share the residual, which the norm before the MLP reads too; and where the forward has saved both
    blocks' outputs, the norms behind them save nothing, and the norm of their sum does."""
    num_norms = 3 - (1 + int(saves_output(job)) if saves_norm_input(job) else 0)
    saved = num_norms * compute_norm_saved(job, job.shape.hidden_size) + compute_router_saved(job)
    return saved + (compute_entry_saved(job, get_alone(layer)) if is_tiled(job) else 0)


def compute_router_saved(job: Job) -> int:
    """Its norm has no weights, saves its float32 input and, for the scale's gradient and the router's, two tensors in
    the model's dtype, (4 + 2 b) h S. A frozen router saves its input under ZeRO-3, as linear layers do (layer.py:
    saves_input)."""
    is_trained = job.adapters is None
    num_saved = int(is_trained) + int(is_trained or job.zero_stage == 3)
    return (4 + num_saved * job.dtype_bytes) * job.shape.hidden_size * job.local_tokens


def compute_entry_saved(job: Job, mlp: ExpertsMlp) -> int:
    """Of experts in tiles, for their backward: all tokens, b h S, and where they go."""
    return compute_layer_input(job) + ENTRY_BYTES * mlp.num_per_token * job.local_tokens


def compute_tiles_forward(job: Job, layer: Layer) -> int:
    """While experts beside an MLP run in tiles: the residual, the MLP's normed result, the input, the output and the
    inside of one tile; outputs that are not saved for a recomputation, the MLP's too. Before that, at the router, whose
    norm runs in no tiles, its float32 input, the normed one and its cast, (8 + b) h S."""
    own, unsaved = compute_layer_input(job), not saves_output(job)
    inside = compute_forward(job, get_alone(layer), count_mlp_tile_tokens(job))
    router = (8 + job.dtype_bytes) * job.shape.hidden_size * job.local_tokens
    return max((3 + 2 * unsaved) * own + inside, (2 + unsaved) * own + router)


def compute_tiles_backward(job: Job, layer: Layer, mlp_backward: int) -> int:
    """In addition to what is saved: all of one tile's inside, the gradient of the input, and the float32 sums of the
    weights' gradients. When that is over, five float32 tensors at the norm of the router, which runs in no tiles; and
    when those are gone, with the result of the MLP, its own `mlp_backward`."""
    alone, tile = get_alone(layer), count_mlp_tile_tokens(job)
    own, gone = compute_layer_input(job), compute_entry_saved(job, alone)
    num_elements = (2 + int(alone.is_gated)) * alone.num_experts * alone.inner_size * job.shape.hidden_size
    inside = compute_saved(job, alone, tile) + compute_backward(job, alone, tile)
    router = (4 + 5 * 4) * job.shape.hidden_size * job.local_tokens - compute_router_saved(job)
    after_router = mlp_backward - compute_router_saved(job) - 2 * own
    return max(inside + own + (4 * num_elements if job.adapters is None else 0), router - gone, after_router - gone)
