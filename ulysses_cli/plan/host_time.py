"""Seconds that a processor takes to launch a step's kernels and to run DeepSpeed's hooks. A GPU that computes for less
time waits for it. The costs of hardware.yaml were measured by benchmarks/host.py, and on a GPU by gpu_model.py.
"""

from __future__ import annotations

import math

from ulysses_cli.plan.hardware import HostCosts
from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.tiles import compute_loss_tile_tokens, compute_num_mlp_tiles

MILLI = 1e-3


def compute_host_seconds(job: Job, costs: HostCosts) -> float:
    """Of a micro-step: forward, recomputation, backward, and what brings gradients together."""
    levers, tokens, size = job.levers, job.local_tokens, job.shape.hidden_size
    layer = costs.get_layer(job.zero_stage, job.world_size)
    if job.shape.query_key_norm:
        layer += costs.head_norms
    if job.adapters is not None:
        layer *= 1 + costs.adapters
    if levers.gradient_checkpointing:
        is_full = levers.gradient_checkpointing == "full"
        layer += costs.recomputation if is_full else costs.part_recomputation
    if job.layout.sp_size > 1:
        layer += costs.exchange
    layer += costs.head_chunk * (levers.head_chunks - 1)
    if levers.offload_optimizer != "none":
        layer += costs.offload_optimizer
    if levers.tiled_mlp:
        layer += costs.tile * compute_num_mlp_tiles(tokens, size, is_large=levers.large_tiles)
    total = job.shape.num_layers * layer + costs.offloaded_layer * levers.offloaded_layers
    if levers.tiled_loss:
        tile = compute_loss_tile_tokens(tokens, job.shape.vocab_size, size, is_large=levers.large_tiles)
        total += costs.loss_tile * math.ceil(tokens / tile)
    return MILLI * costs.on_gpu * total / costs.core_speed


def compute_optimizer_host_seconds(job: Job, costs: HostCosts) -> float:
    """Of an optimizer step on the GPU. DeepSpeed waits for the gradients' norm and goes through parameters one by one,
    so that the GPU has no other work."""
    return MILLI * (costs.optimizer + costs.optimizer_layer * job.shape.num_layers) / costs.core_speed
