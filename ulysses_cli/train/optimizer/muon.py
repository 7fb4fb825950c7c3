"""Muon for weights that ZeRO-3 shards: a layer's matrices move along the orthogonal factor of their momentum, all other
weights by AdamW. The update is that of torch.optim.Muon with `adjust_lr_fn="match_rms_adamw"`, so that AdamW's learning
rate and decay suit both.

Momentum is float32 and stays sharded. Each rank gets whole matrices in turn, in the model's dtype, which Newton-Schulz
computes in too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ulysses_cli.train.optimizer.shards import get_masters, get_shape

MOMENTUM = 0.95
A, B, C, NUM_ITERATIONS, EPSILON = 3.4445, -4.7750, 2.0315, 5, 1e-7  # https://kellerjordan.github.io/posts/muon/
RMS = 0.2  # of AdamW's usual update: arXiv 2502.16982
IS_MUON = "is_muon"  # of a group of the optimizer


def orthogonalize(matrix: Tensor) -> Tensor:
    """Newton-Schulz: brings all singular values near 1."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.mT if is_tall else matrix
    x = x / (torch.linalg.vector_norm(x, dtype=torch.float32) + EPSILON)
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.mT
        factor = torch.addmm(gram, gram, gram, beta=B, alpha=C)
        x = torch.addmm(x, factor, x, beta=A)
    return x.mT if is_tall else x


@dataclass(frozen=True)
class ShardedMatrix:
    """`share` elements of each rank's flat tensor, from `start`, of which the last rank's may be padding."""

    shape: tuple[int, ...]
    start: int
    share: int


class Muon(torch.optim.AdamW):
    """ZeRO-3's inner optimizer on one rank. Groups with IS_MUON hold matrices."""

    def __init__(self, groups: Any, dtype: torch.dtype, **settings: Any) -> None:
        super().__init__(groups, fused=True, **settings)
        self.dtype = dtype
        self.matrices: dict[Tensor, list[ShardedMatrix]] = {}  # of the flat tensors that hold matrices

    def find_matrices(self, zero: Any) -> None:
        """`zero`: the engine's optimizer around this one."""
        for number, (flat, weights) in enumerate(zip(get_masters(zero), zero.fp16_groups, strict=True)):
            if self.param_groups[zero.sub_group_to_group_id[number]].get(IS_MUON):
                positions = [zero.grad_position[zero.get_param_id(weight)] for weight in weights]
                self.matrices[flat] = [
                    ShardedMatrix(get_shape(weight), start, share)
                    for weight, (_, start, share) in zip(weights, positions, strict=True)
                ]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Collective over all ranks for matrices. ZeRO-3 gives one flat tensor at a time, in the same order on each."""
        given = [(flat, group) for group in self.param_groups if group.get(IS_MUON) for flat in group["params"]]
        for flat, group in given:
            self._step_matrices(flat, group)
        return None if given else super().step(closure)

    def _step_matrices(self, flat: Tensor, group: dict[str, Any]) -> None:
        state, gradient, num_ranks = self.state[flat], flat.grad, dist.get_world_size()
        if "exp_avg" not in state:
            state["step"], state["exp_avg"] = torch.tensor(0.0), torch.zeros_like(flat.data)
        state["step"] += 1
        state["exp_avg"].lerp_(gradient, 1 - MOMENTUM)
        gradient.lerp_(state["exp_avg"], MOMENTUM)  # Nesterov
        flat.data.mul_(1 - group["lr"] * group["weight_decay"])
        matrices = self.matrices[flat]
        for first in range(0, len(matrices), num_ranks):
            self._step_round(flat.data, gradient, matrices[first : first + num_ranks], group["lr"])

    def _step_round(self, flat: Tensor, gradient: Tensor, matrices: Sequence[ShardedMatrix], rate: float) -> None:
        """Collective over all ranks: each orthogonalizes at most one of the matrices."""
        num_ranks, rank = dist.get_world_size(), dist.get_rank()
        own = matrices[rank] if rank < len(matrices) else ShardedMatrix((0, 0), 0, 0)
        shares = [each.share for each in matrices]
        of_others, of_own = [*shares, *[0] * (num_ranks - len(shares))], [own.share] * num_ranks
        parts = torch.cat([gradient[each.start :][: each.share].to(self.dtype) for each in matrices])
        whole = parts.new_empty(own.share * num_ranks)
        dist.all_to_all_single(whole, parts, of_own, of_others)
        if own.share:
            matrix = whole[: math.prod(own.shape)].view(own.shape)
            matrix.copy_(orthogonalize(matrix))
        dist.all_to_all_single(parts, whole, of_others, of_own)
        for each, update in zip(matrices, parts.split(shares), strict=True):
            flat[each.start :][: each.share].add_(update, alpha=-rate * RMS * math.sqrt(max(each.shape)))
