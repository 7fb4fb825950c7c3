"""Bytes of a rank between steps: weights, gradients, Adam, on the GPU, on the host or on a local disk with the buffers
for its files (DeepSpeed: runtime/zero/stage3.py, runtime/swap_tensor/). A sub-group's optimizer states are one file
each, so is every weight. N trained elements, F frozen, W ranks that shard, b bytes of the model's dtype."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache

from ulysses_cli.plan.ledger.depth import find_number
from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.ledger.weights import Weights, count_shard, get_weights


@lru_cache(maxsize=64)
def list_sub_groups(weights: Weights, num_ranks: int, size: int) -> tuple[int, ...]:
    """Elements of this rank's shards that the optimizer steps together. Weights are added until there are `size` or
    more, so a group may be larger by up to one weight's shard (stage3.py: _create_fp16_sub_groups)."""
    whole = count_shard(weights.num_trained, num_ranks)
    if size >= whole:
        return (whole,)
    groups, filled = [], 0
    for numel in weights.trained:
        filled += count_shard(numel, num_ranks)
        if filled >= size:
            groups.append(filled)
            filled = 0
    return (*groups, filled) if filled else tuple(groups)


STATE_FILES, GRADIENT_FILES = 3, 1  # of float32 numbers: weights and two moments; what a step starts from
NUM_BUFFERS = 4  # offload_config.py: buffer_count
SMALLEST_FILE_BYTES = 1 << 20  # swap_tensor/utils.py: MIN_AIO_BYTES; what is smaller stays in memory
FLOAT_BYTES = 4
SPARE_BUFFERS = 1  # for a weight that is read or written while others are in use


def compute_state_file_bytes(job: Job) -> int:
    """16 N / W."""
    if job.levers.offload_optimizer != "nvme":
        return 0
    return FLOAT_BYTES * (STATE_FILES + GRADIENT_FILES) * count_shard(get_weights(job).num_trained, job.world_size)


def compute_weight_file_bytes(job: Job) -> int:
    """b (N + F) / W."""
    if job.levers.offload_param != "nvme":
        return 0
    return job.dtype_bytes * count_shard(get_weights(job).num_elements, job.world_size)


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
    buffers = size_weight_buffers(get_weights(job), job.world_size, job.dtype_bytes)
    return job.dtype_bytes * (buffers["buffer_count"] * buffers["buffer_size"] + count_largest_group(job))


def count_largest_group(job: Job) -> int:
    """May exceed sub_group_size by one weight's shard; on few ranks the embedding's shard is most of the group."""
    return max(list_sub_groups(get_weights(job), job.world_size, job.engine.sub_group))


def size_weight_buffers(weights: Weights, num_ranks: int, dtype_bytes: int) -> Mapping[str, int]:
    """DeepSpeed's settings: as many buffers as a layer has weights with files, each of the largest one's size.
    DeepSpeed fails where no buffer is free. Frozen weights gathered for a recomputation stay until their layer's
    backward is done."""
    shares = [count_shard(each.num_elements, num_ranks) for each in weights.every]
    in_use = [sum(has_file(size, num_ranks, dtype_bytes) for size in block) for block in weights.blocks]
    largest = max((share for share in shares if share * dtype_bytes >= SMALLEST_FILE_BYTES), default=1)
    return {"buffer_count": max(in_use, default=0) + SPARE_BUFFERS, "buffer_size": largest}


def has_file(size: int, num_ranks: int, dtype_bytes: int) -> bool:
    """Whether a weight's share is large enough for a file."""
    return count_shard(size, num_ranks) * dtype_bytes >= SMALLEST_FILE_BYTES


CODE_BLOCK = 256  # train/optimizer/adamw_8bit.py: weights that share a scale


def compute_parameters(job: Job) -> int:
    """b (N + F) / W at stage 3 (stage3.py: lp_param_buffer); on the host with offload_param."""
    if job.levers.offload_param != "none":
        return 0
    return job.dtype_bytes * count_shard(get_weights(job).num_elements, job.world_size)


def compute_secondary_shard(job: Job) -> int:
    """b (N + F) / replica: with dp_replicate_size > 1 a copy for gathering inside each replica (hpZ:
    partition_parameters.py, ds_secondary_tensor), but for small weights, which stay gathered. With offload_param it is
    on the host (_partition_param_sec: remote_device)."""
    if job.layout.dp_replicate_size == 1 or job.levers.offload_param != "none":
        return 0
    sizes = [weight.num_elements for weight in get_weights(job).every]
    away = sum(size for size in sizes if size > job.engine.persistence_threshold)
    return job.dtype_bytes * away // job.layout.replica_size


def compute_gradients(job: Job) -> int:
    """g N / W at stage 3 (stage3.py: grad_partitions_flat_buffer); on the host with offload_optimizer."""
    if job.levers.offload_optimizer != "none":
        return 0
    return job.engine.gradient_bytes * count_shard(get_weights(job).num_trained, job.world_size)


def compute_reduce_flush(job: Job) -> int:
    """A full bucket's gradients are concatenated for the reduce-scatter (coalesced_collectives.py: torch.cat): as much
    again as the bucket holds, at most N. Below stage 3 the parts of several ranks are concatenated, and then cast where
    they travel in another dtype (stage_1_and_2.py: allreduce_bucket)."""
    filled, sent = min(job.engine.reduce_bucket, get_weights(job).num_trained), job.engine.communication_bytes
    if job.zero_stage == 3:
        return filled * sent
    is_cut = job.world_size > 1 or is_compact(job)  # else it is one piece
    return filled * ((job.dtype_bytes if is_cut else 0) + (sent if sent != job.dtype_bytes else 0))


def is_compact(job: Job) -> bool:
    """Whether gradients of a narrower model are summed in one flat float32 buffer, which lives from the first
    micro-step to the update (_use_compact_grad_partition_buffer)."""
    return job.engine.gradient_bytes == 4 and job.dtype_bytes < 4


def compute_master(job: Job) -> int:
    """4 N / W float32 weights, also where the model itself is float32 (stage3.py: _create_fp32_partitions clones)."""
    if job.levers.offload_optimizer != "none":
        return 0
    return 4 * count_shard(get_weights(job).num_trained, job.world_size)


def compute_adam(job: Job) -> int:
    """8 N / W from the first step on. In 8 bits: two one-byte codes per weight, two float32 scales per 256 weights. Of
    layers' matrices muon has half; their vectors, 0.1 %, are counted as if they were some."""
    if job.levers.offload_optimizer != "none":
        return 0
    shard = count_shard(get_weights(job).num_trained, job.world_size)
    if job.optim == "muon":
        return 8 * shard - 4 * count_shard(sum(list_layer_weights(job)), job.world_size)
    return 8 * shard if job.optim == "adamw" else 2 * shard + 8 * -(-shard // CODE_BLOCK)


def list_layer_weights(job: Job) -> Iterator[int]:
    """Elements of each weight that is trained in a layer."""
    for weight in get_weights(job).every:
        if weight.is_trained and find_number(weight.name) is not None:
            yield weight.num_elements


def compute_host_optimizer_pinned(job: Job) -> int:
    """Per rank: gradients g N / W, page-locked (stage3.py: grad_partitions_flat_buffer). On NVMe also DeepSpeed's four
    buffers of a sub-group's states."""
    shard = count_shard(get_weights(job).num_trained, job.world_size)
    if job.levers.offload_optimizer == "cpu":
        return job.engine.gradient_bytes * shard if job.zero_stage == 3 else _compute_lower_pinned(job)
    if job.levers.offload_optimizer == "nvme":
        return job.engine.gradient_bytes * shard + compute_locked_state_bytes(job)
    return 0


def _compute_lower_pinned(job: Job) -> int:
    """Per rank, below stage 3: master and its gradient, 8 N / W, a copy in the model's dtype, a buffer as large as the
    largest weight; where micro-steps are accumulated without a flat buffer, also their sum
    (async_accumulate_grad_in_cpu_via_gpu)."""
    copies = 1 + int(job.accumulation > 1 and not is_compact(job))
    shard = count_shard(get_weights(job).num_trained, job.world_size)
    largest = max(get_weights(job).trained)
    return (8 + copies * job.dtype_bytes) * shard + job.dtype_bytes * largest


def compute_host_optimizer_pageable(job: Job) -> int:
    """Per rank: master weights 4 N / W and Adam 8 N / W, in ordinary memory, and the float32 gradient of the largest
    group, where gradients are kept in another dtype (train/optimizer/host_gradients.py); below stage 3 Adam alone. And
    copies of 12 bytes per weight that steps early (train/optimizer/overlapped_optimizer.py)."""
    if job.levers.offload_optimizer != "cpu":
        return 0
    shard = count_shard(get_weights(job).num_trained, job.world_size)
    if job.zero_stage < 3:
        return 8 * shard
    cast = 0 if job.engine.gradient_bytes == FLOAT_BYTES else FLOAT_BYTES * count_largest_group(job)
    return 12 * shard + cast + 12 * sum(list_overlapped_groups(job))


def list_overlapped_groups(job: Job) -> tuple[int, ...]:
    """Elements of this rank's groups that may step early: the last ones, whose gradients come first. The first group
    is complete when the backward is over."""
    groups = list_sub_groups(get_weights(job), job.world_size, job.engine.sub_group)
    num_overlapped = min(job.levers.early_groups, len(groups) - 1)
    return groups[len(groups) - num_overlapped :] if job.levers.offload_optimizer == "cpu" else ()


def compute_host_parameters(job: Job) -> int:
    """Per rank: b (N + F) / W, page-locked (stage3.py: _create_param_groups_fp16_flat_cpu_memory); on NVMe the
    buffers through which they pass."""
    weights = get_weights(job)
    if job.levers.offload_param == "cpu":
        return job.dtype_bytes * count_shard(weights.num_elements, job.world_size)
    return compute_locked_weight_bytes(job)
