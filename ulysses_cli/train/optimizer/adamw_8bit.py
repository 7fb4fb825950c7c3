"""AdamW with 8-bit moments: bitsandbytes' operator makes the update, on ZeRO's flat float32 weights.

A moment is an 8-bit code per weight and a float32 scale per 256: 2.03 bytes per weight for both moments. bitsandbytes
is imported when the optimizer is made.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ulysses_cli.train.optimizer.quantization import BLOCK, count_blocks

CALL_NUMEL = 1 << 30  # weights per call of the operator, which counts in 32 bits; a multiple of the block


def make_table(moment: str, device: torch.device) -> Tensor:
    """The 256 numbers that codes stand for, between -1 and 1; of squares, between 0 and 1."""
    from bitsandbytes.functional import create_dynamic_map

    table: Tensor = create_dynamic_map(signed=moment == "exp_avg").to(device)
    return table


class AdamW8bit(torch.optim.Optimizer):
    """Makes the update with the new moments in float32, then encodes them."""

    def __init__(self, groups: Any, lr: float, betas: tuple[float, float], eps: float) -> None:
        import bitsandbytes  # noqa: F401 - registers the operator

        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})
        self.update = torch.ops.bitsandbytes.optimizer_update_8bit_blockwise

    def get_state(self, weight: Tensor) -> dict[str, Any]:
        """The moments of one tensor. Makes them, as zeros, before its first step."""
        state: dict[str, Any] = self.state[weight]
        if not state:
            state["step"] = 0
            for moment in ("exp_avg", "exp_avg_sq"):
                state[f"{moment}_codes"] = torch.zeros_like(weight.data, dtype=torch.uint8).view(-1)
                state[f"{moment}_scales"] = weight.data.new_zeros(count_blocks(weight.numel()))
                state[f"{moment}_table"] = make_table(moment, weight.device)
        return state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._step(weight, group)

    def _step(self, weight: Tensor, group: dict[str, Any]) -> None:
        state = self.get_state(weight)
        state["step"] += 1
        flat, grad = weight.data.view(-1), weight.grad.view(-1)
        for low in range(0, flat.numel(), CALL_NUMEL):
            part, blocks = slice(low, low + CALL_NUMEL), slice(low // BLOCK, (low + CALL_NUMEL) // BLOCK)
            self.update(
                "adam", grad[part], flat[part], state["exp_avg_codes"][part], state["exp_avg_sq_codes"][part],
                *group["betas"], 0.0, 0.0, group["eps"], state["step"], group["lr"],
                state["exp_avg_table"], state["exp_avg_sq_table"],
                state["exp_avg_scales"][blocks], state["exp_avg_sq_scales"][blocks],
                group["weight_decay"], 1.0,
            )  # fmt: skip
