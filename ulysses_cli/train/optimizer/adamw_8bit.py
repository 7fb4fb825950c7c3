"""AdamW with 8-bit moments: bitsandbytes' operator makes the update, on ZeRO's flat float32 weights. A moment is an
8-bit code per weight and a float32 scale per 256: 2.03 bytes per weight for both moments.  The format is that of
bitsandbytes' optimizers, which is imported when the optimizer is made. Encoding decoded numbers gives the same
codes: a run that resumes from float32 numbers has its former codes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

BLOCK = 256
CHUNK = 1 << 22  # elements at a time, a multiple of the block: bounds the memory that lookups take besides the result
ULPS = (0, 1, -1, 2, -2)  # units in the last place by which a division may miss a scale


def count_blocks(numel: int) -> int:
    return -(-numel // BLOCK)


def decode(codes: Tensor, scales: Tensor, table: Tensor, start: int, numel: int) -> Tensor:
    """Decodes elements [start, start + numel) of a flat tensor."""
    out = torch.empty(numel, dtype=torch.float32, device=codes.device)
    for low in range(start, start + numel, CHUNK):
        high = min(low + CHUNK, start + numel)
        first = low // BLOCK
        parts = scales[first : count_blocks(high)].repeat_interleave(BLOCK)[low - first * BLOCK : high - first * BLOCK]
        torch.mul(table[codes[low:high].int()], parts, out=out[low - start : high - start])
    return out


def encode(values: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (codes, scales). The scale is a block's largest magnitude; where the numbers were decoded from another
    scale, as when the largest of them is negative, that scale is recovered. `table` is sorted."""
    codes = torch.empty(values.numel(), dtype=torch.uint8, device=values.device)
    scales = torch.empty(count_blocks(values.numel()), dtype=torch.float32, device=values.device)
    for low in range(0, values.numel(), CHUNK):
        part = values[low : low + CHUNK]
        blocks = part.new_zeros(count_blocks(part.numel()) * BLOCK)
        blocks[: part.numel()] = part
        blocks = blocks.view(-1, BLOCK)
        block_codes, block_scales = _encode_blocks(blocks, table)
        codes[low : low + CHUNK] = block_codes.view(-1)[: part.numel()]
        scales[low // BLOCK : low // BLOCK + len(blocks)] = block_scales
    return codes, scales


def _encode_blocks(blocks: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    peaks = blocks.abs().amax(1)
    scales, codes = peaks.clone(), _find_nearest(blocks, peaks, table)
    inexact = _find_inexact(blocks, codes, scales, table)
    for candidates in _walk_scales(peaks, table):
        if not len(inexact):
            break
        rows = blocks[inexact]
        new_scales = candidates[inexact]
        new_codes = _find_nearest(rows, new_scales, table)
        is_inexact = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
        is_inexact[_find_inexact(rows, new_codes, new_scales, table)] = True
        exact = inexact[~is_inexact]
        codes[exact], scales[exact] = new_codes[~is_inexact], new_scales[~is_inexact]
        inexact = inexact[is_inexact]
    return codes, scales


def _walk_scales(peaks: Tensor, table: Tensor) -> Iterator[Tensor]:
    """Yields scales with which the largest number would be one of the table's outermost entries."""
    for entry in (table[0], table[-2], table[1]):
        if not entry:
            continue
        exact = peaks / entry.abs()
        for ulps in ULPS:
            scales, direction = exact, torch.full_like(exact, torch.inf if ulps > 0 else 0.0)
            for _ in range(abs(ulps)):
                scales = torch.nextafter(scales, direction)
            yield scales


def _find_nearest(blocks: Tensor, scales: Tensor, table: Tensor) -> Tensor:
    midpoints = (table[1:] + table[:-1]) / 2
    normalized = torch.where(scales[:, None] > 0, blocks / scales[:, None], 0.0)
    return torch.bucketize(normalized, midpoints, out_int32=True).to(torch.uint8)


def _find_inexact(blocks: Tensor, codes: Tensor, scales: Tensor, table: Tensor) -> Tensor:
    """Indices of the blocks that these codes do not decode to exactly."""
    return ((table[codes.int()] * scales[:, None]) != blocks).any(1).nonzero().view(-1)


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
