"""What a machine holds besides a rank's tensors on its GPU: the CUDA context, NCCL's buffers, cuBLAS and the
allocator's slack, which no trace sees; the host memory of the fullest node, by line, and its disk. Says how far the
ledger may be off. Page-locked memory cannot be swapped and counts in full. Each term names its source."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ulysses_cli.plan.ledger import states
from ulysses_cli.plan.ledger.job import Job, is_known, make_job
from ulysses_cli.plan.ledger.parts import count_offloaded
from ulysses_cli.plan.ledger.products import count_products
from ulysses_cli.plan.ledger.states import compute_reduce_flush
from ulysses_cli.plan.ledger.weights import count_shard, get_weights
from ulysses_cli.plan.levers import (
    SWAP_CHUNK_BYTES,
    SWAP_THREADS,
    Levers,
    compute_num_mlp_tiles,
    swaps_activations,
)
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.recipe.recipe import Recipe

MIB = 1 << 20
# One H200, CUDA 13 (benchmarks/results/gpu-nvidia-h200.json): what the GPU has in use and torch has not reserved. ALST,
# arXiv 2506.13996: "CUDA context about 1 GiB". Kernels are loaded as they are first used.
CONTEXT_BYTES = 1343 * MIB
CUBLAS_BYTES = 32 * MIB  # torch: CUBLAS_WORKSPACE_CONFIG default on Hopper and newer, 8 MiB before
CUBLAS_THREADS = 2  # a workspace for the thread of forwards, and one for that of backwards
NCCL_CHANNEL_BYTES = 10 * MIB  # a connection's buffers: NCCL_BUFFSIZE 4 MiB, LL128 about 5 MiB, LL 1 MiB
NCCL_CHANNELS, NCCL_CONNECTIONS = 16, 4  # a ring and a tree have two neighbours each
LEDGER_SHARE_UNSURE, DEVICE_SHARE_UNSURE = 0.03, 0.5  # of torch's bytes; of all others


def compute_context(job: Job) -> int:
    """The CUDA context with its loaded kernels."""
    return CONTEXT_BYTES


def compute_nccl(job: Job) -> int:
    """Buffers per communicator: one of all ranks, one of the ranks that exchange heads, one of a ring, one of the
    replicas' ranks; none on one rank. A communicator that carries nothing makes no buffers."""
    if job.world_size == 1:
        return 0
    layout = job.layout
    groups = 1 + int(layout.ulysses_size > 1) + int(layout.ring_size > 1) + int(layout.dp_replicate_size > 1)
    return groups * NCCL_CHANNELS * NCCL_CONNECTIONS * NCCL_CHANNEL_BYTES


def compute_cublas(job: Job) -> int:
    return CUBLAS_THREADS * CUBLAS_BYTES


def compute_allocator(job: Job, allocated: int, *, expandable: bool) -> int:
    """What torch's allocator reserves beyond the bytes in use. Memory of the stream that reduces gradients cannot serve
    other streams, so a flushed bucket's block stays reserved. With expandable segments the rest is pages that are not
    full: one for each of the hundreds of live tensors, 1 %. Without them, a freed block cannot serve a larger tensor:
    plain logits leave b V S under their float32 copies, a layer leaves its widest forward."""
    reserved = compute_reduce_flush(job)
    if expandable:
        return reserved + allocated // 100
    plain = 0 if job.levers.tiled_loss else job.dtype_bytes * job.shape.vocab_size * job.local_tokens
    return reserved + allocated // 100 + max(plain, _compute_widest_forward(job))


def _compute_widest_forward(job: Job) -> int:
    """Of an MLP: at once a tensor as wide as each of its matrices, the input and the residual; of one tile, where it
    has some."""
    tokens, hidden = job.local_tokens, job.shape.hidden_size
    if job.levers.tiled_mlp:
        tokens = -(-tokens // compute_num_mlp_tiles(tokens, hidden, is_large=job.levers.large_tiles))
    width = count_products(job.shape).widest_mlp // hidden
    return job.dtype_bytes * (width * tokens + 2 * hidden * job.local_tokens)


def compute_uncertainty(gpu_lines: Mapping[str, int]) -> int:
    """How far the ledger may be off, up or down: 3 % of torch's bytes, half of all others."""
    others = sum(gpu_lines.get(name, 0) for name in DEVICE_LINES)
    return round(LEDGER_SHARE_UNSURE * (sum(gpu_lines.values()) - others) + DEVICE_SHARE_UNSURE * others)


DEVICE_LINES = ("cuda_context", "nccl", "allocator")


PROCESS_BYTES = 3 << 30  # a rank: Python, torch with CUDA's libraries, DeepSpeed; the resident set that ranks report
READERS = 4  # threads that read weights
LARGEST_FILE_BYTES = 5 << 30  # transformers writes weights in files of this size
ADAM_SAVED_BYTES = 12  # of a weight: float32 weight and moments
HOST_SHARE_UNSURE, PROCESS_SHARE_UNSURE = 0.03, 0.5  # of what is allocated by size; of a process's own memory


def compute_saved_pinned(job: Job) -> int:
    """Per rank, of every offloaded layer: its input (ALST: tokens / world x hidden x layers x 2 x ranks of the node)
    and its saved results. Page-locked buffers have exactly the tensors' sizes (train/memory/offload.py). Tensors
    that wait on a disk pass through a chunk of each thread (train/memory/offload.py)."""
    return SWAP_THREADS * SWAP_CHUNK_BYTES if swaps_activations(job.levers) else count_offloaded(job)


def compute_pinned_rounding(job: Job) -> int:
    """DeepSpeed's page-locked buffers are torch's, which rounds each up to a power of two (CachingHostAllocator.h).
    Buffers for files have the requested size (deepspeed_pin_tensor.cpp)."""
    levers, shard = job.levers, count_shard(get_weights(job).num_trained, job.world_size)
    blocks = [states.compute_host_parameters(job)] if levers.offload_param == "cpu" else []
    if levers.offload_optimizer != "none":
        blocks.append(job.engine.gradient_bytes * shard)
    if levers.offload_optimizer == "cpu" and job.zero_stage < 3:
        blocks.append(states.FLOAT_BYTES * shard)
    return sum(round_up(size) - size for size in blocks)


def round_up(size: int) -> int:
    """To the next power of two."""
    return 1 << (size - 1).bit_length() if size else 0


def compute_read(job: Job) -> int:
    """Per rank: below ZeRO-3 the whole model is read into host memory first (train/model/loading.py); but a
    quantized base is made on the GPU, a few weights at a time (transformers/core_model_loading.py)."""
    if job.zero_stage == 3:
        return 0
    num_elements = READERS * get_weights(job).largest if job.quantized is not None else get_weights(job).num_elements
    return job.dtype_bytes * num_elements


def compute_save_copy(job: Job) -> int:
    """Per rank: a copy of everything that a checkpoint holds (async_save); or of the three tensors of the largest
    weight, since three at a time pass to the file (train/tensor_file.py: MAX_CHUNKS). What is in host memory already
    is written without a copy."""
    shard = count_shard(get_weights(job).num_trained, job.world_size)
    if job.async_save:
        return ADAM_SAVED_BYTES * shard
    largest = max(get_weights(job).trained, default=0)
    share = count_shard(largest, job.world_size) if job.zero_stage == 3 else min(largest, shard)
    return 0 if job.levers.offload_optimizer == "cpu" else ADAM_SAVED_BYTES * share


def compute_host_uncertainty(lines: Mapping[str, int]) -> int:
    """How far the ledger may be off, up or down."""
    process = lines.get("process", 0)
    return round(HOST_SHARE_UNSURE * (sum(lines.values()) - process) + PROCESS_SHARE_UNSURE * process)


def list_host_phases(job: Job, phases: Iterable[str]) -> dict[str, dict[str, int]]:
    """Lines of one node in each phase."""
    ranks = job.ranks_per_node
    always = {
        "process": PROCESS_BYTES,
        "optimizer_pinned": states.compute_host_optimizer_pinned(job),
        "optimizer_pageable": states.compute_host_optimizer_pageable(job),
        "parameters_pinned": states.compute_host_parameters(job),
        "pinned_rounding": compute_pinned_rounding(job),
    }
    offloaded = {"activations_pinned": compute_saved_pinned(job)}
    copied = {"save_copy": compute_save_copy(job)}
    read = {"parameters_read": compute_read(job)}
    host_phases = {}
    for phase in phases:
        lines = {**always, **({} if phase in ("load", "evaluation") else offloaded)}
        lines |= {"load": read, "save": copied}.get(phase, {})
        host_phases[phase] = {name: ranks * size for name, size in lines.items() if size}
        if phase in ("load", "save"):
            whole = job.dtype_bytes * get_weights(job).num_elements
            host_phases[phase]["weights_file"] = min(LARGEST_FILE_BYTES, whole)
    return host_phases


FILE_SLACK = 1.01  # files are rounded up


def compute_swap_need(recipe: Recipe, shape: ModelShape, levers: Levers) -> tuple[int, int]:
    """Returns a rank's bytes (on the disk, in page-locked memory). Zeros for a model of which weights are not known."""
    if not is_known(shape):
        return 0, 0
    job = make_job(recipe, shape, levers)
    return compute_disk_bytes(job), states.compute_locked_state_bytes(job) + states.compute_locked_weight_bytes(job)


def compute_disk_bytes(job: Job) -> int:
    """Per rank."""
    of_states, of_weights = states.compute_state_file_bytes(job), states.compute_weight_file_bytes(job)
    return int((of_states + of_weights + compute_activation_file_bytes(job)) * FILE_SLACK)


def compute_activation_file_bytes(job: Job) -> int:
    """What offloaded layers save, where it waits on the disk (train/memory/offload.py)."""
    return count_offloaded(job) if swaps_activations(job.levers) else 0


def compute_node_disk_bytes(job: Job) -> int:
    """Bytes that the fullest node's ranks need below memory.nvme_path."""
    return job.ranks_per_node * compute_disk_bytes(job)
