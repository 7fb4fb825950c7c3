"""Optimizer states on a local disk (memory.offload_optimizer: nvme): what DeepSpeed's swapper takes there and beside.

From DeepSpeed's runtime/swap_tensor/: files of whole sub-groups, buffers through which they pass.
"""

from __future__ import annotations

from ulysses_cli.plan.ledger.job import Job, is_known, make_job
from ulysses_cli.plan.ledger.weights import count_shard
from ulysses_cli.plan.levers import Levers
from ulysses_cli.plan.model_shape import ModelShape
from ulysses_cli.plan.recipe import Recipe

STATE_FILES, GRADIENT_FILES = 3, 1  # of float32 numbers: weights and two moments; what a step starts from
NUM_BUFFERS = 4  # offload_config.py: buffer_count
SMALLEST_FILE_BYTES = 1 << 20  # swap_tensor/utils.py: MIN_AIO_BYTES; what is smaller stays in memory
FLOAT_BYTES = 4
ALIGNED_ELEMENTS = 256  # optimizer_utils.py: numel_alignment; the rest of a longer gradient stays, and holds all of it
FILE_SLACK = 1.01  # files are rounded up


def compute_swapped_bytes(elements: int) -> int:
    """16 N / W bytes of disk per rank."""
    return int(FLOAT_BYTES * (STATE_FILES + GRADIENT_FILES) * elements * FILE_SLACK)


def compute_locked_bytes(elements: int, sub_group: int) -> int:
    """Four buffers of a sub-group's float32 numbers per rank, locked in memory."""
    return NUM_BUFFERS * FLOAT_BYTES * min(elements, sub_group)


def count_swapped(recipe: Recipe, shape: ModelShape, levers: Levers) -> tuple[int, int]:
    """-> (elements of a rank's share of what is trained, of a sub-group). Zeros where no formula knows the model."""
    if not is_known(shape):
        return 0, 0
    job = make_job(recipe, shape, levers)
    return count_shard(job.weights.num_trained, job.world_size), job.engine.sub_group


def compute_unswapped_gradients(job: Job) -> int:
    """4 n / W on the GPU from the backward to the step, of gradients whose share is too small for a file of its own, or
    no multiple of 1 KiB (optimizer_utils.py: unswapped_gradients)."""
    if job.levers.offload_optimizer != "nvme":
        return 0
    sizes = {name: size for module in job.weights.modules if module.is_trained for name, size in module.weights}
    shares = [count_shard(size, job.world_size) for size in sizes.values()]
    stay = [each for each in shares if FLOAT_BYTES * each < SMALLEST_FILE_BYTES or each % ALIGNED_ELEMENTS]
    return FLOAT_BYTES * sum(stay)


def compute_node_disk_bytes(job: Job) -> int:
    """What the fullest node's ranks need below memory.nvme_path."""
    if job.levers.offload_optimizer != "nvme":
        return 0
    return job.ranks_per_node * compute_swapped_bytes(count_shard(job.weights.num_trained, job.world_size))
