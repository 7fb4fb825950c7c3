"""What a GPU holds besides torch's tensors (CUDA context, NCCL's buffers, cuBLAS, the allocator's slack), and how far
the ledger may be off. No trace sees these bytes; each term names its source."""

from __future__ import annotations

from collections.abc import Mapping

from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.ledger.mlp import compute_mlp_forward
from ulysses_cli.plan.ledger.zero.states import compute_reduce_flush

MIB = 1 << 20
# One H200, CUDA 13 (benchmarks/results/gpu-nvidia-h200.json): what the GPU has in use and torch has not reserved. ALST,
# arXiv 2506.13996: "CUDA context about 1 GiB". Kernels are loaded as they are first used.
CONTEXT_BYTES = 1343 * MIB
CUBLAS_BYTES = 32 * MIB  # torch: CUBLAS_WORKSPACE_CONFIG default on Hopper and newer, 8 MiB before
CUBLAS_THREADS = 2  # a workspace for the thread of forwards, and one for that of backwards
NCCL_CHANNEL_BYTES = 10 * MIB  # a connection's buffers: NCCL_BUFFSIZE 4 MiB, LL128 about 5 MiB, LL 1 MiB
NCCL_CHANNELS, NCCL_CONNECTIONS = 16, 4  # a ring and a tree have two neighbours each
SHARE_UNSURE, DEVICE_SHARE_UNSURE = 0.03, 0.5  # of torch's bytes; of all others


def compute_context(job: Job) -> int:
    """The CUDA context with its loaded kernels."""
    return CONTEXT_BYTES


def compute_nccl(job: Job) -> int:
    """Buffers per communicator: one of all ranks, one of the ranks that exchange heads, one of a ring, one of the
    replicas' ranks; none on one rank. A communicator that carries nothing makes no buffers."""
    if job.world_size == 1:
        return 0
    layout = job.layout
    groups = 1 + (layout.ulysses_size > 1) + (layout.ring_size > 1) + (layout.dp_replicate_size > 1)
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
    return (
        reserved
        + allocated // 100
        + max(plain, max(compute_mlp_forward(job.view(kind), kind) for kind in job.shape.layer_kinds if kind.mlp))
    )


def compute_uncertainty(gpu_lines: Mapping[str, int]) -> int:
    """How far the ledger may be off, up or down: 3 % of torch's bytes, half of all others."""
    others = sum(gpu_lines.get(name, 0) for name in DEVICE_LINES)
    return round(SHARE_UNSURE * (sum(gpu_lines.values()) - others) + DEVICE_SHARE_UNSURE * others)


DEVICE_LINES = ("cuda_context", "nccl", "allocator")
