"""8-bit quantization of float32 numbers, block by block: a number is an entry of a table of 256 times its block's
scale.

The format is that of bitsandbytes' optimizers. Encoding decoded numbers gives the same codes: a run that resumes from
float32 numbers has its former codes. Takes tensors; imports nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator

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
