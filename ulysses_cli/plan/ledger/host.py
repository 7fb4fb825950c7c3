"""Bytes of host memory on the fullest node, by line. Page-locked memory cannot be swapped and counts in full."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.ledger.layer import (
    compute_attention_result,
    compute_kept_output,
    compute_layer_input,
    keeps_result,
)
from ulysses_cli.plan.ledger.weights import Weights, count_shard, list_sub_groups
from ulysses_cli.plan.ledger.zero import states

PROCESS_BYTES = 3 << 30  # a rank: Python, torch with CUDA's libraries, DeepSpeed; resident set as ranks report it
LARGEST_FILE_BYTES = 5 << 30  # transformers writes weights in files of this size
ADAM_SAVED_BYTES = 12  # of a weight: float32 weight and moments
SHARE_UNSURE, PROCESS_SHARE_UNSURE = 0.03, 0.5  # of what is allocated by size; of what a process takes by itself


def compute_kept_pinned(job: Job) -> int:
    """Per rank: what recomputation starts from, of every offloaded layer: ALST's tokens / world x hidden x layers x 2 x
    ranks of the node, and results that are kept. Buffers are page-locked as large as they are
    (train/memory/offload.py)."""
    kept = compute_layer_input(job) + compute_kept_output(job)
    return job.levers.offloaded_layers * (kept + (compute_attention_result(job) if keeps_result(job) else 0))


def compute_pinned_rounding(job: Job) -> int:
    """DeepSpeed's page-locked buffers are torch's, which rounds each up to a power of two (CachingHostAllocator.h);
    those through which files pass are as large as asked for (deepspeed_pin_tensor.cpp)."""
    levers, shard = job.levers, count_shard(job.weights.num_trained, job.world_size)
    blocks = [states.compute_host_parameters(job)] if levers.offload_param == "cpu" else []
    if levers.offload_optimizer != "none":
        blocks.append(job.engine.gradient_bytes * shard)
    in_groups = 0
    if levers.offload_optimizer == "cpu":
        in_groups = _round_groups(job.weights, job.world_size, job.engine.sub_group)
    return sum(round_up(size) - size for size in blocks) + in_groups


@lru_cache(maxsize=256)
def _round_groups(weights: Weights, num_ranks: int, size: int) -> int:
    """What rounding adds to the float32 gradients of each sub-group."""
    return sum(round_up(4 * group) - 4 * group for group in list_sub_groups(weights, num_ranks, size))


def round_up(size: int) -> int:
    """To the next power of two."""
    return 1 << (size - 1).bit_length() if size else 0


def compute_save_copy(job: Job) -> int:
    """Per rank: of everything that a checkpoint holds; or of the tensors on their way to the file, three at a time
    (train/tensor_file.py: MAX_CHUNKS), those of the largest weight. Host memory is written as it is."""
    shard = count_shard(job.weights.num_trained, job.world_size)
    if job.async_save:
        return ADAM_SAVED_BYTES * shard
    largest = job.weights.largest_trained
    share = count_shard(largest, job.world_size) if job.zero_stage == 3 else min(largest, shard)
    return 0 if job.levers.offload_optimizer == "cpu" else ADAM_SAVED_BYTES * share


def compute_host_uncertainty(lines: Mapping[str, int]) -> int:
    """How far the truth may be off either way."""
    process = lines.get("process", 0)
    return round(SHARE_UNSURE * (sum(lines.values()) - process) + PROCESS_SHARE_UNSURE * process)


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
    kept = {"activations_pinned": compute_kept_pinned(job)}
    copied = {"save_copy": compute_save_copy(job)}
    # below ZeRO-3 each rank reads the whole model before it moves (train/assembly/loading.py)
    read = {"parameters_read": job.dtype_bytes * job.weights.num_elements if job.zero_stage < 3 else 0}
    found = {}
    for phase in phases:
        lines = {**always, **({} if phase in ("load", "evaluation") else kept)}
        lines |= {"load": read, "save": copied}.get(phase, {})
        found[phase] = {name: ranks * size for name, size in lines.items() if size}
        if phase in ("load", "save"):
            found[phase]["weights_file"] = LARGEST_FILE_BYTES
    return found
