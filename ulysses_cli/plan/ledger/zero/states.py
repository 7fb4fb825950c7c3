"""Bytes of a rank between steps and in the optimizer's step: weights, gradients, Adam, buckets, on the GPU, on the
host or on a local disk with the buffers for its files (DeepSpeed: runtime/zero/stage3.py, runtime/swap_tensor/). A
sub-group's optimizer states are one file each, so is every weight. Where stages 1 and 2 differ, see gradients.py.
N trained elements, F frozen, W ranks that shard, b bytes of the model's dtype."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import lru_cache
from itertools import accumulate

from ulysses_cli.plan.ledger.adapters import compute_quantized_spared
from ulysses_cli.plan.ledger.job import Job, Lines, MemorySnapshot, is_known, make_job
from ulysses_cli.plan.ledger.saved_results import compute_offloaded
from ulysses_cli.plan.ledger.weights import Weights, count_shard
from ulysses_cli.plan.ledger.zero import gradients
from ulysses_cli.plan.ledger.zero.coordinator import NOTHING_ON_DISK, WeightsOnDisk
from ulysses_cli.plan.ledger.zero.gradients import find_first_sent, list_flushes
from ulysses_cli.plan.levers import Levers, swaps_activations
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.recipe.recipe import Recipe


@lru_cache(maxsize=64)
def list_sub_groups(weights: Weights, num_ranks: int, size: int) -> tuple[int, ...]:
    """Elements of this rank's shards that the optimizer steps together. Weights are added until there are `size` or
    more, so a group may be larger by up to one weight's shard (stage3.py: _create_fp16_sub_groups)."""
    whole = count_shard(weights.num_trained, num_ranks)
    if size >= whole:
        return (whole,)
    numels = {name: numel for module in weights.modules if module.is_trained for name, numel in module.weights}
    groups, filled = [], 0
    for numel in numels.values():
        filled += count_shard(numel, num_ranks)
        if filled >= size:
            groups.append(filled)
            filled = 0
    return (*groups, filled) if filled else tuple(groups)


UNSWAPPED = "unswapped_gradients"  # a line that replaces the gradients inside a layer's backward
STATE_FILES, GRADIENT_FILES = 3, 1  # of float32 numbers: weights and two moments; what a step starts from
NUM_BUFFERS = 4  # offload_config.py: buffer_count
SMALLEST_FILE_BYTES = 1 << 20  # swap_tensor/utils.py: MIN_AIO_BYTES; what is smaller stays in memory
FLOAT_BYTES = 4
ALIGNED_ELEMENTS = 256  # optimizer_utils.py: numel_alignment; the rest of a gradient stays and keeps all of it alive
FILE_SLACK = 1.01  # files are rounded up
SPARE_BUFFERS = 1  # for a weight that is read or written while others are in use


def compute_swap_need(recipe: Recipe, shape: ModelShape, levers: Levers) -> tuple[int, int]:
    """Returns a rank's bytes (on the disk, in page-locked memory). Zeros for a model without a formula."""
    if not is_known(shape):
        return 0, 0
    job = make_job(recipe, shape, levers)
    return compute_disk_bytes(job), compute_locked_state_bytes(job) + compute_locked_weight_bytes(job)


def compute_disk_bytes(job: Job) -> int:
    """Per rank."""
    files = compute_state_file_bytes(job) + compute_weight_file_bytes(job) + compute_activation_file_bytes(job)
    return int(files * FILE_SLACK)


def compute_activation_file_bytes(job: Job) -> int:
    """What offloaded layers save, where it waits on the disk (train/memory/offload.py)."""
    return compute_offloaded(job) if swaps_activations(job.levers) else 0


def compute_state_file_bytes(job: Job) -> int:
    """16 N / W."""
    if job.levers.offload_optimizer != "nvme":
        return 0
    return FLOAT_BYTES * (STATE_FILES + GRADIENT_FILES) * count_shard(job.weights.num_trained, job.world_size)


def compute_weight_file_bytes(job: Job) -> int:
    """b (N + F) / W."""
    if job.levers.offload_param != "nvme":
        return 0
    return job.dtype_bytes * count_shard(job.weights.num_elements, job.world_size)


def compute_node_disk_bytes(job: Job) -> int:
    """Bytes that the fullest node's ranks need below memory.nvme_path."""
    return job.ranks_per_node * compute_disk_bytes(job)


def compute_locked_state_bytes(job: Job) -> int:
    """Per rank: four buffers of the largest sub-group's float32 numbers (stage3.py: _configure_tensor_swapping)."""
    if job.levers.offload_optimizer != "nvme":
        return 0
    return NUM_BUFFERS * FLOAT_BYTES * count_largest_group(job)


def compute_locked_weight_bytes(job: Job) -> int:
    """Per rank: buffers for weights in use, and one of the largest sub-group, from which updated weights are written
    (partitioned_param_swapper.py: reserve_partitioned_swap_space)."""
    if job.levers.offload_param != "nvme":
        return 0
    buffers = size_weight_buffers(job.weights, job.world_size, job.dtype_bytes)
    return job.dtype_bytes * (buffers["buffer_count"] * buffers["buffer_size"] + count_largest_group(job))


def count_largest_group(job: Job) -> int:
    """May exceed sub_group_size by one weight's shard; on few ranks the embedding's shard is most of the group."""
    return max(list_sub_groups(job.weights, job.world_size, job.engine.sub_group))


def size_weight_buffers(weights: Weights, num_ranks: int, dtype_bytes: int) -> Mapping[str, int]:
    """DeepSpeed's settings: as many buffers as a layer has weights with files, each of the largest one's size.
    DeepSpeed fails where no buffer is free. Frozen weights gathered for a recomputation stay until their layer's
    backward is done."""
    in_use: dict[tuple[str, int], set[str]] = defaultdict(set)
    largest = 1
    for module in weights.modules:
        for name, size in module.weights:
            if has_file(size, num_ranks, dtype_bytes):
                in_use[module.part, module.layer].add(name)
                largest = max(largest, count_shard(size, num_ranks))
    count = max((len(names) for names in in_use.values()), default=0) + SPARE_BUFFERS
    return {"buffer_count": count, "buffer_size": largest}


def has_file(size: int, num_ranks: int, dtype_bytes: int) -> bool:
    """Whether a weight's share is large enough for a file."""
    return count_shard(size, num_ranks) * dtype_bytes >= SMALLEST_FILE_BYTES


def find_on_disk(job: Job) -> WeightsOnDisk:
    if job.levers.offload_param != "nvme":
        return NOTHING_ON_DISK
    weights, num_ranks, dtype_bytes = job.weights, job.world_size, job.dtype_bytes
    sizes = {name: size for module in weights.modules for name, size in module.weights}
    names = frozenset(name for name, size in sizes.items() if has_file(size, num_ranks, dtype_bytes))
    return WeightsOnDisk(names, size_weight_buffers(weights, num_ranks, dtype_bytes)["buffer_count"])


def list_unswapped(job: Job, number: int) -> Lines:
    """The line of a snapshot inside a layer's backward."""
    return {UNSWAPPED: compute_unswapped_gradients(job, number)} if job.levers.offload_optimizer == "nvme" else {}


def compute_unswapped_gradients(job: Job, above: int | None = None) -> int:
    """4 n / W on the GPU, of gradients whose share is too small for a file or is not a multiple of 1 KiB
    (optimizer_utils.py: unswapped_gradients): of all weights, or of those that have been sent when the backward begins
    the layer `above` which they were made. They stay until the optimizer's step has taken them."""
    if job.levers.offload_optimizer != "nvme":
        return 0
    sizes = list_gradient_sizes(job.weights)
    num_sent = sum(sizes) if above is None else count_sent_above(job.weights, job.engine.reduce_bucket, above)
    shares = [
        count_shard(size, job.world_size) for size, end in zip(sizes, accumulate(sizes), strict=True) if end <= num_sent
    ]
    unswapped = [share for share in shares if FLOAT_BYTES * share < SMALLEST_FILE_BYTES or share % ALIGNED_ELEMENTS]
    return FLOAT_BYTES * sum(unswapped)


def settle_gradients(job: Job, snapshot: MemorySnapshot) -> MemorySnapshot:
    """Gradients that have no file on the disk stay on the GPU until the optimizer's step has taken them. A snapshot
    that does not say how many there are is before the last layer's backward, or in that step."""
    if snapshot.phase not in ("backward", "optimizer_step") or job.levers.offload_optimizer != "nvme":
        return snapshot
    lines = dict(snapshot.lines)
    whole = compute_unswapped_gradients(job) if snapshot.phase == "optimizer_step" else 0
    lines["gradients"] = lines.pop(UNSWAPPED, whole)
    return MemorySnapshot(snapshot.phase, snapshot.name, lines)


@lru_cache(maxsize=64)
def list_gradient_sizes(weights: Weights) -> tuple[int, ...]:
    """Elements of trained weights, in the order in which a backward makes their gradients."""
    sizes = {name: size for module in weights.modules if module.is_trained for name, size in module.weights}
    embedding = [sizes.pop("embedding")] if "embedding" in sizes else []
    return (*reversed(sizes.values()), *embedding)


@lru_cache(maxsize=1024)
def count_sent_above(weights: Weights, bucket: int, number: int) -> int:
    """Elements of gradients that have been sent when the backward begins a layer."""
    first = find_first_sent(weights, bucket)
    sent = [flush.num_sent for flush in list_flushes(weights, bucket) if flush.layer > number]
    return max([*sent, first.num_elements if first.layer > number else 0])


NORM_ELEMENTS = 250_000_000  # stage3.py: _constant_buffered_norm2 takes the norm of this many at a time
CODE_BLOCK = 256  # train/optimizer/adamw_8bit.py: weights that share a scale


def compute_parameters(job: Job) -> int:
    """b (N + F) / W at stage 3 (stage3.py: lp_param_buffer), b (N + F) below, less with a quantized base; on the host
    with offload_param."""
    if job.levers.offload_param != "none":
        return 0
    weights = job.weights
    if job.zero_stage < 3:
        return job.dtype_bytes * weights.num_elements - compute_quantized_spared(job)
    return job.dtype_bytes * count_shard(weights.num_elements, job.world_size)


def compute_secondary_shard(job: Job, gathered_bytes: int) -> int:
    """b (N + F) / replica: with dp_replicate_size > 1 a copy for gathering inside each replica (hpZ:
    partition_parameters.py, ds_secondary_tensor). A weight's copy is made when the weight is first released after a
    step (stage3.py: invalidate_secondary_tensor), so weights that are still gathered have none. With offload_param it
    is on the host (_partition_param_sec: remote_device)."""
    if job.zero_stage < 3 or job.layout.dp_replicate_size == 1 or job.levers.offload_param != "none":
        return 0
    persistent = sum(size for size in job.weights.persistent_sizes if size <= job.engine.persistence_threshold)
    released = job.dtype_bytes * (job.weights.num_elements - persistent) - gathered_bytes
    return max(0, released) // job.layout.replica_size


def compute_arriving(job: Job, num_elements: int) -> int:
    """b n / W: a weight's shard in host memory is copied to the GPU to be gathered (partition_parameters.py:
    _all_gather_sequential). A single rank copies the whole weight to its place without that, except in a hook
    (_allgather_params_sequential)."""
    is_offloaded = job.levers.offload_param != "none"
    return job.dtype_bytes * count_shard(num_elements, job.layout.replica_size) if is_offloaded else 0


def compute_gradients(job: Job) -> int:
    """g N / W at stage 3 (stage3.py: grad_partitions_flat_buffer); on the host with offload_optimizer. Below stage 3,
    what exists after a backward's first gradient (lower_stages.py)."""
    trained = job.weights.num_trained
    if job.zero_stage < 3:
        return gradients.compute_gradients(job, "backward", is_reducing=True)
    if job.levers.offload_optimizer != "none":
        return 0
    return job.engine.gradient_bytes * count_shard(trained, job.world_size)


def compute_reduce_bucket(job: Job) -> int:
    """reduce_bucket_size elements of the dtype in which gradients travel, allocated at start (stage3.py: ipg_buckets).
    Below stage 3 there are two, in the backward."""
    if job.zero_stage < 3:
        return gradients.compute_buckets(job, is_reducing=True)
    return job.engine.reduce_bucket * job.engine.communication_bytes


def compute_reduce_flush(job: Job) -> int:
    """A full bucket's gradients are concatenated for the reduce-scatter (coalesced_collectives.py: torch.cat): as much
    again as the bucket holds, at most N. Below stage 3 the parts of several ranks are concatenated, and then cast where
    they travel in another dtype (stage_1_and_2.py: allreduce_bucket)."""
    filled = min(job.engine.reduce_bucket, job.weights.num_trained)
    return filled * _count_sent_bytes(job)


def _count_sent_bytes(job: Job) -> int:
    sent, b = job.engine.communication_bytes, job.dtype_bytes
    if job.zero_stage == 3:
        return sent
    is_cut = job.world_size > 1 or gradients.is_compact(job)  # else it is one piece
    return (b if is_cut else 0) + (sent if sent != b else 0)


def compute_flush(job: Job, num_elements: int, largest: int, num_before: int) -> int:
    """Sending a bucket of `num_elements`. A gradient larger than the bucket is cast whole, in addition to its own
    memory; below stage 3 it too is concatenated with those of other ranks. For an optimizer on the host each gradient's
    norm is taken in float64 before it leaves: at stage 3 of this rank's share, cast to g (stage3.py:
    _constant_buffered_norm2), when the cast of what was concatenated is gone; below, of the whole
    (set_norm_for_param_grad_in_gpu). `largest`: elements of the largest of these gradients; `num_before`: elements that
    were sent before them."""
    b, is_large = job.dtype_bytes, num_elements > job.engine.reduce_bucket
    own, shard = b * num_elements if is_large else 0, count_shard(job.weights.num_trained, job.world_size)
    takes_norm = job.levers.offload_optimizer != "none"
    if job.zero_stage == 3:
        is_alone = num_elements == largest and num_elements % job.world_size == 0  # and is not concatenated
        casts_back = job.engine.communication_bytes != job.engine.gradient_bytes
        sent = 0 if is_alone else num_elements * _count_sent_bytes(job)
        cast = compute_oversize_gradient(job, num_elements)
        share = count_shard(largest, job.world_size)
        # those that go to a disk wait for each other (stage3.py: partition_grads, offload_fp32_gradients)
        waiting = count_shard(num_elements, job.world_size) if job.levers.offload_optimizer == "nvme" else share
        norm = gradients.NORM_BYTES * min(share, NORM_ELEMENTS) + job.engine.gradient_bytes * waiting
        if casts_back:  # this rank's shares are copies, and what was sent is gone when all are made
            shares = job.engine.gradient_bytes * count_shard(num_elements, job.world_size)
            return own + shares + max(sent + cast, norm if takes_norm else 0)
        if is_alone:  # nothing was concatenated: the shares lie in the cast itself
            return own + sent + cast + (norm if takes_norm else 0)
        return own + sent + max(cast, norm if takes_norm else 0)
    num_before = gradients.count_behind(job.weights, num_before)
    own_share = min(largest, max(0, shard - num_before))  # the last rank's share is sent first
    norm = (gradients.NORM_BYTES if takes_norm else 0) * own_share
    return own + max(_compute_lower_sent(job, num_elements, largest, num_before), norm)


def compute_head_flush(job: Job) -> int:
    """Sending the head by itself. A tied head's gradient is sent with the embedding's."""
    num = job.shape.vocab_size * job.shape.hidden_size
    if job.zero_stage < 3:
        return compute_flush(job, num, num, 0) if gradients.sends_head(job) else 0
    is_sent = job.trains("lm_head") and not job.shape.tie_word_embeddings
    return compute_flush(job, num, num, 0) if is_sent and num > job.engine.reduce_bucket else 0


def _compute_lower_sent(job: Job, num_elements: int, largest: int, num_before: int) -> int:
    """Below stage 3. Each rank's shares are a piece. Pieces are concatenated, and cast where they travel in another
    dtype, until they exceed the bucket (stage_1_and_2.py: allreduce_and_scatter). A single piece is not concatenated;
    with a flat buffer each weight is a piece of its own."""
    weights, b, sent = job.weights, job.dtype_bytes, job.engine.communication_bytes
    are_many, cast = gradients.is_compact(job) and num_elements > largest, sent if sent != b else 0
    shard = count_shard(weights.num_trained, job.world_size)
    start = max(0, weights.num_trained - num_before - num_elements)
    most = together = num_pieces = 0
    while num_elements > 0:
        piece = min(num_elements, shard - start % shard)
        start, num_elements = start + piece, num_elements - piece
        together, num_pieces = together + piece, num_pieces + 1
        most = max(most, together * ((b if num_pieces > 1 or are_many else 0) + cast))
        if together > job.engine.reduce_bucket:
            together = num_pieces = 0
    return most


def compute_oversize_gradient(job: Job, num_elements: int) -> int:
    """A gradient that is larger than the bucket bypasses it: it is cast whole to the dtype in which it travels."""
    is_oversize = num_elements > job.engine.reduce_bucket and job.engine.communication_bytes != job.dtype_bytes
    return num_elements * job.engine.communication_bytes if is_oversize else 0


def compute_master(job: Job) -> int:
    """4 N / W float32 weights, also where the model itself is float32 (stage3.py: _create_fp32_partitions clones)."""
    if job.levers.offload_optimizer != "none":
        return 0
    return 4 * count_shard(job.weights.num_trained, job.world_size)


def compute_adam(job: Job) -> int:
    """8 N / W from the first step on. In 8 bits: two one-byte codes per weight, two float32 scales per 256 weights."""
    if job.levers.offload_optimizer != "none":
        return 0
    shard = count_shard(job.weights.num_trained, job.world_size)
    return 8 * shard if job.optim == "adamw" else 2 * shard + 8 * -(-shard // CODE_BLOCK)


def compute_step_transients(job: Job) -> int:
    """The norm casts one gradient's share at a time to float64 (stage3.py: get_grad_norm_direct). Then, per sub-group:
    concatenated gradients, g n_s, and their cast, 4 n_s; fused Adam needs nothing more (stage3.py:
    _prepare_fp32_grad_for_sub_group). With the optimizer on the host the GPU needs nothing."""
    if job.zero_stage < 3:
        return gradients.compute_step_transients(job)
    if job.levers.offload_optimizer != "none":
        return 0
    norm = gradients.NORM_BYTES * count_shard(job.weights.largest_trained, job.world_size)
    per_weight = 4 if job.engine.gradient_bytes == 4 else 4 + job.engine.gradient_bytes
    return max(norm, per_weight * count_largest_group(job))


def compute_host_optimizer_pinned(job: Job) -> int:
    """Per rank: gradients g N / W and their float32 copies 4 N / W, page-locked (stage3.py:
    initialize_optimizer_states, grad_partitions_flat_buffer). On NVMe, instead of the copies: DeepSpeed's four buffers
    of a sub-group's states."""
    shard = count_shard(job.weights.num_trained, job.world_size)
    if job.levers.offload_optimizer == "cpu":
        if job.zero_stage < 3:
            return gradients.compute_host_pinned(job)
        return (job.engine.gradient_bytes + 4) * shard
    if job.levers.offload_optimizer == "nvme":
        return job.engine.gradient_bytes * shard + compute_locked_state_bytes(job)
    return 0


def compute_host_optimizer_pageable(job: Job) -> int:
    """Per rank: master weights 4 N / W and Adam 8 N / W, in ordinary memory; below stage 3 Adam alone. And
    copies of 12 bytes per weight that steps early (train/optimizer/overlapped_optimizer.py)."""
    if job.levers.offload_optimizer != "cpu":
        return 0
    own = 12 if job.zero_stage == 3 else 8
    return own * count_shard(job.weights.num_trained, job.world_size) + 12 * sum(list_overlapped_groups(job))


def list_overlapped_groups(job: Job) -> tuple[int, ...]:
    """Elements of this rank's groups that may step early: the last ones, whose gradients come first. The first group
    is complete when the backward is over."""
    groups = list_sub_groups(job.weights, job.world_size, job.engine.sub_group)
    num_overlapped = min(job.levers.early_groups, len(groups) - 1)
    return groups[len(groups) - num_overlapped :] if job.levers.offload_optimizer == "cpu" else ()


def compute_host_parameters(job: Job) -> int:
    """Per rank: b (N + F) / W, page-locked (stage3.py: _create_param_groups_fp16_flat_cpu_memory); on NVMe the
    buffers through which they pass."""
    weights = job.weights
    if job.levers.offload_param == "cpu":
        return job.dtype_bytes * count_shard(weights.num_elements, job.world_size)
    return compute_locked_weight_bytes(job)
