"""Bytes on a local disk (nvme in the memory section), and of the buffers for its files.

From DeepSpeed's runtime/swap_tensor/: a sub-group's optimizer states are one file each, so is every weight. Both pass
through page-locked buffers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import lru_cache
from itertools import accumulate

from ulysses_cli.plan.ledger.job import Job, is_known, make_job
from ulysses_cli.plan.ledger.memory_snapshot import Lines, MemorySnapshot
from ulysses_cli.plan.ledger.saved_results import compute_offloaded
from ulysses_cli.plan.ledger.weights import Weights, count_shard
from ulysses_cli.plan.ledger.zero.coordinator import NOTHING_ON_DISK, WeightsOnDisk
from ulysses_cli.plan.ledger.zero.flushes import list_flushes
from ulysses_cli.plan.ledger.zero.lower_stages import find_first_sent
from ulysses_cli.plan.ledger.zero.sub_groups import list_sub_groups
from ulysses_cli.plan.levers import Levers, swaps_activations
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.recipe.recipe import Recipe

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
    """What offloaded layers save, where it waits on the disk (train/memory/disk.py)."""
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
    return max([*sent, first.num_elements * (first.layer > number)])
