"""Float32 numbers as codes of 8 bits, block by block: a number is an entry of a table of 256 times its block's scale.

The way of bitsandbytes' optimizers. Encoding what was decoded gives it back exactly: a run that goes on from float32
numbers goes on from its codes. Takes tensors; imports nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK = 256
CHUNK = 1 << 22  # elements at a time, a multiple of the block: what lookups take beside the result is bounded
NEIGHBOURS = (0, 1, -1, 2, -2)  # in units of the last place, by which a division may have missed a scale


def count_blocks(numel: int) -> int:
    return -(-numel // BLOCK)


def decode(codes: Tensor, scales: Tensor, table: Tensor, start: int, numel: int) -> Tensor:
    """Elements [start, start + numel) of a flat tensor."""
    out = torch.empty(numel, dtype=torch.float32, device=codes.device)
    for low in range(start, start + numel, CHUNK):
        high = min(low + CHUNK, start + numel)
        first = low // BLOCK
        parts = scales[first : count_blocks(high)].repeat_interleave(BLOCK)[low - first * BLOCK : high - first * BLOCK]
        torch.mul(table[codes[low:high].int()], parts, out=out[low - start : high - start])
    return out


def encode(values: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """-> (codes, scales). The scale is a block's largest magnitude; where the numbers were decoded from another scale,
    as when the largest of them is negative, that one is found again. `table` is sorted."""
    codes = torch.empty(values.numel(), dtype=torch.uint8, device=values.device)
    scales = torch.empty(count_blocks(values.numel()), dtype=torch.float32, device=values.device)
    for low in range(0, values.numel(), CHUNK):
        part = values[low : low + CHUNK]
        blocks = part.new_zeros(count_blocks(part.numel()) * BLOCK)
        blocks[: part.numel()] = part
        blocks = blocks.view(-1, BLOCK)
        found, found_scales = _encode_blocks(blocks, table)
        codes[low : low + CHUNK] = found.view(-1)[: part.numel()]
        scales[low // BLOCK : low // BLOCK + len(blocks)] = found_scales
    return codes, scales


def _encode_blocks(blocks: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    peaks = blocks.abs().amax(1)
    scales, codes = peaks.clone(), _find_nearest(blocks, peaks, table)
    open_rows = _find_missed(blocks, codes, scales, table)
    for trial in _walk_scales(peaks, table):
        if not len(open_rows):
            break
        rows = blocks[open_rows]
        tried = trial[open_rows]
        found = _find_nearest(rows, tried, table)
        missed = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
        missed[_find_missed(rows, found, tried, table)] = True
        hits = open_rows[~missed]
        codes[hits], scales[hits] = found[~missed], tried[~missed]
        open_rows = open_rows[missed]
    return codes, scales


def _walk_scales(peaks: Tensor, table: Tensor) -> Iterator[Tensor]:
    """Scales with which the largest number would be one of the table's outermost entries."""
    for entry in (table[0], table[-2], table[1]):
        if not entry:
            continue
        exact = peaks / entry.abs()
        for units in NEIGHBOURS:
            trial, target = exact, torch.full_like(exact, torch.inf if units > 0 else 0.0)
            for _ in range(abs(units)):
                trial = torch.nextafter(trial, target)
            yield trial


def _find_nearest(blocks: Tensor, scales: Tensor, table: Tensor) -> Tensor:
    middles = (table[1:] + table[:-1]) / 2
    shares = torch.where(scales[:, None] > 0, blocks / scales[:, None], 0.0)
    return torch.bucketize(shares, middles, out_int32=True).to(torch.uint8)


def _find_missed(blocks: Tensor, codes: Tensor, scales: Tensor, table: Tensor) -> Tensor:
    """Numbers of the blocks that these codes do not give back exactly."""
    return ((table[codes.int()] * scales[:, None]) != blocks).any(1).nonzero().view(-1)
