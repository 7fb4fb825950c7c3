"""What ZeRO-1 and 2 hold of gradients, phase by phase, and take when they start and step: DeepSpeed's
runtime/zero/stage_1_and_2.py. N trained elements, W ranks, b bytes of the model's dtype. Sizes only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.ledger.weights import LAYERS, Weights, count_shard

MOVED = "moved"  # a line that is taken from the gradients
NORM_BYTES = 8  # runtime/utils.py: get_norm_dtype


def adds_up(job: Job) -> bool:
    return job.accumulation > 1


def is_compact(job: Job) -> bool:
    """Sums in float32 of a narrower model have one flat buffer, from the first micro-step to the update
    (_use_compact_grad_partition_buffer)."""
    return job.engine.gradient_bytes == 4 and job.dtype_bytes < 4


def compute_own_gradients(job: Job) -> int:
    """This rank's share of a micro-step: 4 N / W of the flat buffer, also with the optimizer on the host; or copied out
    of the bucket, b of each weight of which a part is this rank's (copy_grads_in_partition), which an optimizer on the
    host takes there."""
    if is_compact(job):
        return 4 * count_shard(job.weights.num_trained, job.world_size)
    if job.levers.offload_optimizer != "none":
        return 0
    touched = sum(size for size, _ in _list_touched(job.weights, job.world_size))
    return job.dtype_bytes * max(touched, count_shard(job.weights.num_trained, job.world_size))


@lru_cache(maxsize=64)
def _list_touched(weights: Weights, num_ranks: int) -> tuple[tuple[int, int], ...]:
    """All weights of which the last rank, whose share comes first, has a part (params_in_partition): elements of the
    whole and of that part."""
    left = count_shard(weights.num_trained, num_ranks)
    sizes = {name: size for module in weights.modules if module.is_trained for name, size in module.weights}
    touched: list[tuple[int, int]] = []
    for size in reversed(sizes.values()):
        if left <= 0:
            break
        touched.append((size, min(size, left)))
        left -= size
    return tuple(touched)


@dataclass(frozen=True)
class Sent:
    """When a backward first sends gradients: how many elements, and in which layer, when the gradient of which weight
    comes; `ABOVE` all layers, or `NEVER` before the embedding's."""

    layer: int
    num_elements: int
    weight: str = ""


ABOVE, NEVER = 1 << 30, -1


@lru_cache(maxsize=64)
def find_first_sent(weights: Weights, bucket: int) -> Sent:
    """Gradients come from the last weight to the first. One that does not fit any more sends what is there, and one
    larger than the bucket goes when the next comes (reduce_independent_p_g_buckets_and_remove_grads)."""
    filled, seen = 0, {"embedding"}
    for module in reversed(weights.modules):
        for name, size in reversed(module.weights):
            if not module.is_trained or name in seen:
                continue
            if filled and filled + size > bucket:
                return Sent(module.layer if module.part == LAYERS else ABOVE, filled, name.partition(".")[2])
            seen.add(name)
            filled += size
    return Sent(NEVER, filled)


def compute_gradients(
    job: Job, phase: str, *, is_reducing: bool, has_sent: bool = True, is_sending: bool = False
) -> int:
    """`is_reducing`: a gradient of this backward has come; `has_sent`: some have been sent, and this rank's share laid
    by, which is there earlier, while they are sent (`is_sending`), where it has a flat buffer. ZeRO-2 adds a
    micro-step's share to that of those before it; ZeRO-1 keeps all gradients whole, b N, until the last micro-step
    moves them to the bucket one by one. For an optimizer on the host each passes through a buffer as large as the
    largest (temp_grad_buffer_for_gpu_offload)."""
    own, whole = compute_own_gradients(job), job.dtype_bytes * job.weights.num_trained
    passing = job.dtype_bytes * _count_largest(job) if job.levers.offload_optimizer != "none" else 0
    if phase == "optimizer_step":
        return own + passing
    if phase not in ("forward", "backward"):
        return passing
    before = 0
    if adds_up(job):
        shard = job.dtype_bytes * count_shard(job.weights.num_trained, job.world_size)
        before = whole if job.zero_stage == 1 else own if is_compact(job) else min(own, shard)
    if not is_reducing or not (has_sent or is_sending):
        return before + passing
    if not has_sent and not is_compact(job):
        own = 0
    if adds_up(job) and job.zero_stage == 1:
        moved = find_first_sent(job.weights, job.engine.reduce_bucket).num_elements
        return before + own - job.dtype_bytes * moved + passing
    return own + (0 if is_compact(job) else before) + passing


def compute_moved(job: Job, num_sent: int) -> int:
    """Of the gradients that ZeRO-1 keeps whole, those that have gone since the first were sent."""
    if job.zero_stage > 1 or not adds_up(job):
        return 0
    first = find_first_sent(job.weights, job.engine.reduce_bucket).num_elements
    return job.dtype_bytes * max(0, num_sent - first)


def compute_buckets(job: Job, *, is_reducing: bool) -> int:
    """Two of the model's dtype, one of which fills while the other is sent, from a backward's first gradient to its end
    (setup_buckets). ZeRO-1 ends no backward but the last of a step."""
    has_any = is_reducing or (adds_up(job) and job.zero_stage == 1)
    return 2 * job.engine.reduce_bucket * job.dtype_bytes if has_any else 0


def sends_head(job: Job) -> bool:
    """Whether a head that is not tied is sent by itself, before any gradient of a layer."""
    if job.zero_stage == 3 or job.shape.tie_word_embeddings or job.adapters is not None:
        return False
    return find_first_sent(job.weights, job.engine.reduce_bucket).layer == ABOVE


def compute_kept_gradients(job: Job, num_sent: int) -> int:
    """With the flat buffer this rank's gradients are cleared at the end of the backward, and only then
    (copy_grads_in_partition); of those that have come when `num_sent` elements were sent, one that is larger than the
    bucket has memory of its own. A tied head's comes last."""
    if job.zero_stage == 3 or not is_compact(job):
        return 0
    large = list_large(job.weights, job.engine.reduce_bucket, job.world_size)
    return job.dtype_bytes * sum(each.num_elements for each in large if each.num_before < num_sent)


@dataclass(frozen=True)
class Large:
    """A weight larger than the bucket, a part of which is the last rank's: what is sent before it, and in which layer
    it is, -1 outside all."""

    num_before: int
    num_elements: int
    layer: int


@lru_cache(maxsize=64)
def list_large(weights: Weights, bucket: int, num_ranks: int) -> tuple[Large, ...]:
    """In the order in which a backward makes gradients. The last rank's share is what comes first."""
    share = count_shard(weights.num_trained, num_ranks)
    found, sent, seen = [], 0, {"embedding"}
    for module in reversed(weights.modules):
        for name, size in reversed(module.weights):
            if not module.is_trained or name in seen:
                continue
            seen.add(name)
            if size > bucket and sent < share:
                found.append(Large(sent, size, module.layer))
            sent += size
    return tuple(found)


def list_layers_below(job: Job) -> dict[int, int]:
    """Layers with more kept in layers above them than there is before any, and how many elements are sent by then."""
    if job.zero_stage == 3 or not is_compact(job):
        return {}
    large = list_large(job.weights, job.engine.reduce_bucket, job.world_size)
    return {each.layer - 1: each.num_before + each.num_elements for each in large if each.layer > 0}


def compute_load_transients(job: Job) -> int:
    """Beside weights and master: weights are laid flat beside themselves, b N, before the master is made, or on the
    host the buffer for gradients; and with the master, zeros as large are made (initialize_optimizer_states)."""
    flat = job.dtype_bytes * job.weights.num_trained
    if job.levers.offload_optimizer != "none":
        return flat - job.dtype_bytes * _count_largest(job)
    master = 4 * count_shard(job.weights.num_trained, job.world_size)
    return max(flat - master, master)


def compute_step_transients(job: Job) -> int:
    """The norm casts one gradient of this rank's share at a time to float64 (get_grad_norm_direct). Then the share is
    laid flat, b N / W, and cast, 4 N / W; the flat buffer is both already."""
    if job.levers.offload_optimizer != "none":
        return 0
    shard = count_shard(job.weights.num_trained, job.world_size)
    cast = 4 if job.dtype_bytes < 4 else 0
    flat = 0 if is_compact(job) else (job.dtype_bytes + cast) * shard
    largest = max(part for _, part in _list_touched(job.weights, job.world_size))
    return max(NORM_BYTES * largest, flat)


def compute_host_pinned(job: Job) -> int:
    """Per rank: master and its gradient, 8 N / W, a copy in the model's dtype, a buffer as large as the largest weight;
    where micro-steps add up without a flat buffer, their sum too (async_accumulate_grad_in_cpu_via_gpu)."""
    copies = 1 + (adds_up(job) and not is_compact(job))
    shard = count_shard(job.weights.num_trained, job.world_size)
    return (8 + copies * job.dtype_bytes) * shard + job.dtype_bytes * _count_largest(job)


def _count_largest(job: Job) -> int:
    return max(size for module in job.weights.modules if module.is_trained for _, size in module.weights)
