"""At which gradients of a step a bucket is full and is sent, and the bytes of gradients under ZeRO-1 and 2 in each
phase (DeepSpeed: stage3.py, stage_1_and_2.py). states.py has the gradients of ZeRO-3. N trained elements, W ranks,
b bytes of the model's dtype. Holds no tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby
from typing import NamedTuple

from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.ledger.modules import EMBEDDING, LAYERS, Module
from ulysses_cli.plan.ledger.weights import CHILD_DEPTH, Weights, count_shard, name_weight

NO_LEAVES: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Flush:
    """The bucket is sent: in the backward of which weight of which layer, how many elements it held, and how many have
    been sent in all by then. `num_coming`: elements of that weight; `num_waiting`: in an MLP, or experts beside one,
    the same and those of the weights whose gradients are made after it."""

    layer: int
    name: str
    in_mlp: bool
    num_elements: int
    num_sent: int
    largest: int
    num_coming: int
    num_waiting: int

    @property
    def weight(self) -> str:
        """Its name in the layer, or in a block that layers share."""
        return name_weight(self.name)

    @property
    def num_before(self) -> int:
        return self.num_sent - self.num_elements


@lru_cache(maxsize=64)
def list_flushes(weights: Weights, bucket: int, leaves: frozenset[int] = NO_LEAVES) -> tuple[Flush, ...]:
    """Gradients fill the bucket in the order in which the backward makes them. One that does not fit first sends what
    is there; one larger than the bucket is sent alone, when the next is made (stage3.py:
    reduce_independent_p_g_buckets_and_remove_grads). A tied embedding is last. In layers whose MLP is a leaf module its
    gradients wait until all are made, and are added in the order of weights (reduce_leaf_module_grads)."""
    filled = 0
    sent = 0
    largest = 0
    flushes = []
    seen = {"embedding"}
    blocks: dict[int, dict[str, int]] = {}
    for number, module in _number_blocks(weights):
        if module.is_trained:
            blocks.setdefault(number, {}).update(module.weights)
    for number, module, name, size in _walk_gradients(weights, leaves):
        if name in seen or weights.first_layers[name] != module.layer:
            continue
        seen.add(name)
        if filled and filled + size > bucket:
            sent += filled
            if module.part == LAYERS:
                rest = size + sum(n for key, n in blocks[number].items() if key not in seen)
                place = module.layer, name, module.in_mlp
                flushes.append(Flush(*place, filled, sent, largest, size, rest * module.in_mlp))
            filled = largest = 0
        filled, largest = filled + size, max(largest, size)
    return tuple(flushes)


def _number_blocks(weights: Weights) -> list[tuple[int, Module]]:
    """The number of a module is that of the part of a layer which it is, or is inside. The MLP of a shared block is a
    part too."""
    modules = weights.modules
    begins = (
        int(module.depth <= CHILD_DEPTH or module.in_mlp != before.in_mlp)
        for before, module in zip((modules[0], *modules), modules, strict=False)
    )
    return list(zip(accumulate(begins), modules, strict=True))


def _walk_gradients(weights: Weights, leaves: frozenset[int]) -> Iterator[tuple[int, Module, str, int]]:
    for number, group in groupby(reversed(_number_blocks(weights)), lambda numbered: numbered[0]):
        modules = [module for _, module in group]
        gradients = [
            (number, module, *weight) for module in modules if module.is_trained for weight in reversed(module.weights)
        ]
        is_leaf = any(module.in_mlp and module.layer in leaves for module in modules)
        yield from reversed(gradients) if is_leaf else gradients


class FilledBucket(NamedTuple):
    """Elements in the bucket when it is sent, those of its largest weight, and those sent before it."""

    num_elements: int
    largest: int
    num_before: int


@lru_cache(maxsize=64)
def list_last_filled(weights: Weights, bucket: int) -> tuple[FilledBucket, FilledBucket]:
    """What is sent when the embedding's gradient is made (nothing where it fits into the bucket), and at the end."""
    sizes = {name: size for module in weights.modules if module.is_trained for name, size in module.weights}
    embedding = sizes.pop("embedding", 0)
    filled = largest = sent = 0
    for size in reversed(sizes.values()):
        if filled and filled + size > bucket:
            sent, filled, largest = sent + filled, 0, 0
        filled, largest = filled + size, max(largest, size)
    if filled and embedding and filled + embedding > bucket:
        return FilledBucket(filled, largest, sent), FilledBucket(embedding, embedding, sent + filled)
    return FilledBucket(0, 0, sent), FilledBucket(filled + embedding, max(largest, embedding), sent)


@lru_cache(maxsize=64)
def find_filled(weights: Weights, bucket: int, name: str) -> FilledBucket:
    """What is sent when the gradient of the weight `name` is made; nothing where it fits into the bucket."""
    sizes = {name: size for module in weights.modules if module.is_trained for name, size in module.weights}
    sizes.pop("embedding", 0)
    filled = largest = sent = 0
    for each, size in reversed(sizes.items()):
        is_sent = filled and filled + size > bucket
        if each == name:
            return FilledBucket(filled, largest, sent) if is_sent else FilledBucket(0, 0, sent)
        if is_sent:
            sent, filled, largest = sent + filled, 0, 0
        filled, largest = filled + size, max(largest, size)
    return FilledBucket(0, 0, sent)


FREED_GRADIENTS = "freed_gradients"  # a line that is subtracted from the gradients
NORM_BYTES = 8  # runtime/utils.py: get_norm_dtype


def accumulates(job: Job) -> bool:
    return job.accumulation > 1


def keeps_whole(job: Job) -> bool:
    """Whether all gradients are kept whole until the last micro-step, whose own are added to them."""
    return job.zero_stage == 1 and accumulates(job)


def is_compact(job: Job) -> bool:
    """Whether gradients of a narrower model are summed in one flat float32 buffer, which lives from the first
    micro-step to the update (_use_compact_grad_partition_buffer)."""
    return job.engine.gradient_bytes == 4 and job.dtype_bytes < 4


def compute_own_gradients(job: Job) -> int:
    """This rank's share of a micro-step: 4 N / W of the flat buffer, also with the optimizer on the host. Without the
    flat buffer it is copied out of the bucket, b for each weight of which a part is this rank's
    (copy_grads_in_partition); an optimizer on the host keeps that copy there."""
    if is_compact(job):
        return 4 * count_shard(job.weights.num_trained, job.world_size)
    if job.levers.offload_optimizer != "none":
        return 0
    touched = sum(size for size, _ in _list_touched(job.weights, job.world_size))
    return job.dtype_bytes * max(touched, count_shard(job.weights.num_trained, job.world_size))


@lru_cache(maxsize=64)
def _list_touched(weights: Weights, num_ranks: int) -> tuple[tuple[int, int], ...]:
    """(Elements of a weight, elements of its part) for all weights of which the last rank has a part
    (params_in_partition). The last rank's share is made first, but for late weights."""
    left = count_shard(weights.num_trained, num_ranks)
    late, whole = find_late(weights), _list_sizes(weights)
    sizes = {
        name: whole[name] for name in sorted(whole, key=lambda name: (2 if name == "head" else 0) + int(name in late))
    }
    touched: list[tuple[int, int]] = []
    for size in reversed(sizes.values()):
        if left <= 0:
            break
        touched.append((size, min(size, left)))
        left -= size
    return tuple(touched)


def _list_sizes(weights: Weights) -> dict[str, int]:
    return {name: size for module in weights.modules if module.is_trained for name, size in module.weights}


@lru_cache(maxsize=64)
def find_late(weights: Weights) -> frozenset[str]:
    """What makes vectors of single layers is registered after all layers and runs before them (modeling_gemma4.py:
    Gemma4TextModel.__init__): its place is in the last rank's share, and its gradients come late."""
    beside = (module for module in weights.modules if module.part == EMBEDDING)
    return frozenset(name for module in beside for name, _ in module.weights if name != "embedding")


@lru_cache(maxsize=1024)
def count_behind(weights: Weights, num_before: int) -> int:
    """Elements behind a weight in the order of the ranks' shares. `num_before`: whose gradients are made before its
    own."""
    sizes, late = _list_sizes(weights), find_late(weights)
    num_late = sum(size for name, size in sizes.items() if name in late)
    num_head = sizes.get("head", 0)
    num_usual = sum(sizes.values()) - num_late - sizes.get("embedding", 0)
    if num_before < num_usual:
        return num_before + (num_late if num_before >= num_head else 0)
    return num_before - num_usual + num_head if num_before < num_usual + num_late else num_before


@dataclass(frozen=True)
class Sent:
    """When a backward first sends gradients: in which layer, how many elements, and when the gradient of which weight
    is made. The layer is `ABOVE_LAYERS` for weights above all layers, `NEVER` if nothing is sent before the
    embedding's."""

    layer: int
    num_elements: int
    weight: str = ""


ABOVE_LAYERS, NEVER = 1 << 30, -1


@lru_cache(maxsize=64)
def find_first_sent(weights: Weights, bucket: int) -> Sent:
    """Gradients are made from the last weight to the first. One that does not fit first sends what is there; one larger
    than the bucket is sent when the next is made (reduce_independent_p_g_buckets_and_remove_grads)."""
    filled, seen = 0, {"embedding"}
    for module in reversed(weights.modules):
        for name, size in reversed(module.weights):
            if not module.is_trained or name in seen or weights.first_layers[name] != module.layer:
                continue
            if filled and filled + size > bucket:
                return Sent(module.layer if module.part == LAYERS else ABOVE_LAYERS, filled, name_weight(name))
            seen.add(name)
            filled += size
    return Sent(NEVER, filled)


def compute_gradients(
    job: Job, phase: str, *, is_reducing: bool, has_sent: bool = True, is_sending: bool = False
) -> int:
    """`is_reducing`: this backward has made a gradient. `has_sent`: some have been sent, and this rank's share is
    stored; a flat buffer exists earlier, while they are sent (`is_sending`). ZeRO-2 adds a micro-step's share to that
    of the micro-steps before it. ZeRO-1 keeps all gradients whole, b N, until the last micro-step moves them to the
    bucket one by one. For an optimizer on the host each gradient passes through a buffer of the largest one's size
    (temp_grad_buffer_for_gpu_offload)."""
    own, whole = compute_own_gradients(job), job.dtype_bytes * job.weights.num_trained
    passing = job.dtype_bytes * _count_largest(job) if job.levers.offload_optimizer != "none" else 0
    if phase == "optimizer_step":
        return own + passing
    if phase not in ("forward", "backward"):
        return passing
    before = 0
    if accumulates(job):
        before = whole if job.zero_stage == 1 else own
    if not is_reducing or not (has_sent or is_sending):
        return before + passing
    if not has_sent and not is_compact(job):
        own = 0
    if accumulates(job) and job.zero_stage == 1:
        moved = find_first_sent(job.weights, job.engine.reduce_bucket).num_elements
        return before + own - job.dtype_bytes * moved + passing
    return own + (0 if is_compact(job) else before) + passing


def compute_freed_gradients(job: Job, num_sent: int) -> int:
    """Of the gradients that ZeRO-1 keeps whole, the bytes freed since the first were sent."""
    if job.zero_stage > 1 or not accumulates(job):
        return 0
    first = find_first_sent(job.weights, job.engine.reduce_bucket).num_elements
    return job.dtype_bytes * max(0, num_sent - first)


def compute_buckets(job: Job, *, is_reducing: bool) -> int:
    """Two buckets of the model's dtype, from a backward's first gradient to its end: one fills while the other is sent
    (setup_buckets). ZeRO-1 frees them only after the last backward of a step."""
    has_any = is_reducing or (accumulates(job) and job.zero_stage == 1)
    return 2 * job.engine.reduce_bucket * job.dtype_bytes if has_any else 0


def sends_head(job: Job) -> bool:
    """Whether an untied head is sent by itself, before any gradient of a layer."""
    if job.zero_stage == 3 or job.shape.tie_word_embeddings or not job.trains("lm_head"):
        return False
    return find_first_sent(job.weights, job.engine.reduce_bucket).layer == ABOVE_LAYERS


def compute_retained_gradients(job: Job, num_sent: int) -> int:
    """Of the gradients made by the time `num_sent` elements were sent, each that is larger than the bucket has memory
    of its own, and some keep it to the end of the backward (reduce_ipg_grads). ZeRO-1 clears no gradient: those of
    which this rank has a part are copied to its share, all others stay. ZeRO-2 clears those of other ranks; with the
    flat buffer this rank's are freed only at the end (copy_grads_in_partition). A tied head's is made last."""
    retained = (weight for weight in _list_retained(job) if weight.num_before < num_sent)
    return job.dtype_bytes * sum(weight.num_elements for weight in retained)


def _list_retained(job: Job) -> tuple[LargeWeight, ...]:
    if job.zero_stage == 3 or not (job.zero_stage == 1 or is_compact(job)):
        return ()
    large = list_large(job.weights, job.engine.reduce_bucket, job.world_size)
    return tuple(weight for weight in large if weight.is_own == is_compact(job))


@dataclass(frozen=True)
class LargeWeight:
    """A weight larger than the bucket: elements sent before it, its elements, its layer (-1 outside all layers), and
    whether a part of it is the last rank's."""

    num_before: int
    num_elements: int
    layer: int
    is_own: bool


@lru_cache(maxsize=64)
def list_large(weights: Weights, bucket: int, num_ranks: int) -> tuple[LargeWeight, ...]:
    """In the order in which a backward makes gradients. The last rank's share is made first."""
    share = count_shard(weights.num_trained, num_ranks)
    large, sent, seen = [], 0, {"embedding"}
    for module in reversed(weights.modules):
        for name, size in reversed(module.weights):
            if not module.is_trained or name in seen or weights.first_layers[name] != module.layer:
                continue
            seen.add(name)
            if size > bucket:
                large.append(LargeWeight(sent, size, module.layer, is_own=count_behind(weights, sent) < share))
            sent += size
    return tuple(large)


def list_layers_below(job: Job) -> dict[int, int]:
    """Layers below one whose large gradients stay, and the elements sent by the time their backward begins."""
    large = _list_retained(job)
    return {weight.layer - 1: weight.num_before + weight.num_elements for weight in large if weight.layer > 0}


def compute_step_transients(job: Job) -> int:
    """The norm casts one gradient of this rank's share at a time to float64 (get_grad_norm_direct). Then the share is
    concatenated, b N / W, and cast, 4 N / W; a flat buffer needs neither."""
    if job.levers.offload_optimizer != "none":
        return 0
    shard = count_shard(job.weights.num_trained, job.world_size)
    cast = 4 if job.dtype_bytes < 4 else 0
    flat = 0 if is_compact(job) else (job.dtype_bytes + cast) * shard
    largest = max(part for _, part in _list_touched(job.weights, job.world_size))
    return max(NORM_BYTES * largest, flat)


def compute_host_pinned(job: Job) -> int:
    """Per rank: master and its gradient, 8 N / W, a copy in the model's dtype, a buffer as large as the largest weight;
    where micro-steps are accumulated without a flat buffer, also their sum (async_accumulate_grad_in_cpu_via_gpu)."""
    copies = 1 + int(accumulates(job) and not is_compact(job))
    shard = count_shard(job.weights.num_trained, job.world_size)
    return (8 + copies * job.dtype_bytes) * shard + job.dtype_bytes * _count_largest(job)


def _count_largest(job: Job) -> int:
    return max(size for module in job.weights.modules if module.is_trained for _, size in module.weights)
