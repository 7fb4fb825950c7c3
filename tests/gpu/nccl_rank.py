"""Runs one rank of Ulysses over NCCL on a shared GPU. test_gpu_kernels.py starts it; it exits with 1 on a
difference."""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.attention import Problem, compute_reference, make_tensors

from ulysses_cli.plan.attention import BACK_ENDS, Need
from ulysses_cli.train.attention.documents import make_documents
from ulysses_cli.train.attention.kernels.native import Rule
from ulysses_cli.train.attention.kernels.operators import KERNELS
from ulysses_cli.train.attention.ulysses import ulysses_attention
from ulysses_cli.train.processes.groups import make_sequence_axis

PROBLEM = Problem(8, 2, 64, (300, 1, 130, 81), dtype=torch.bfloat16, scale=0.125)
TOLERANCE = 0.03


def main() -> int:
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    axis, tensors = make_sequence_axis(dist.group.WORLD), make_tensors(PROBLEM)
    expected = compute_reference(PROBLEM, tensors)
    local = PROBLEM.tokens // axis.size
    part = slice(axis.rank * local, (axis.rank + 1) * local)
    is_wrong = False
    for kernel in sys.argv[1:] or BACK_ENDS:
        capability = torch.cuda.get_device_capability()
        obstacle = BACK_ENDS[kernel].find_obstacle(Need(PROBLEM.dim), "cuda", capability)
        obstacle = obstacle or KERNELS[kernel].find_missing()
        if obstacle:
            continue
        for chunks, overlaps in ((1, False), (2, False), (2, True)):
            q, k, v = (tensors[name][:, part].cuda().requires_grad_() for name in "qkv")
            documents, rule = make_documents(PROBLEM.lengths, "cuda"), Rule(PROBLEM.scale)
            how: dict[str, Any] = {"kernel": kernel, "num_head_chunks": chunks, "overlaps": overlaps}
            out = ulysses_attention(q, k, v, documents, rule, axis=axis, **how)
            grads = torch.autograd.grad(out, (q, k, v), tensors["dout"][:, part].cuda())
            for name, result in zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True):
                value = expected[name][:, part]
                error = ((result.cpu().double() - value).abs().max() / value.abs().max()).item()
                print(f"rank {axis.rank} {kernel} chunks {chunks}{' overlapped' * overlaps} {name} {error:.4f}")
                is_wrong |= not error < TOLERANCE
    dist.destroy_process_group()
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
