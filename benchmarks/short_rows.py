"""What a step could gain at most if short documents were computed by fewer ranks than long ones, as Megatron's dynamic
context parallelism does: an upper bound by the speed model, on documents of mixed lengths.

    python benchmarks/short_rows.py [--documents 20000] [--json FILE]

Today every row is shared by `sp_size` ranks, of the size that is fastest for the mix, and rows are dealt so that groups
have equal work. The bound leaves out every exchange, which only documents that fit one rank would spare, and lets no
rank wait for another one. Lengths are
log-normal, about a median of 38Ki as in CoderForge's agent runs, or of 2Ki as in chats.
"""

import argparse
import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.model_shapes import get_shape

from ulysses_cli.hardware_table import load_hardware
from ulysses_cli.plan.layout import Layout
from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.levers import Levers
from ulysses_cli.plan.rows.packing import RowCost, RowPieces, cut_documents, locate_row, pack_documents, share_rows
from ulysses_cli.plan.speed import compute_speed

MODEL, GPU, SP_SIZES, ROWS_PER_STEP = "meta-llama/Llama-3.1-8B", "h100-80gb", (4, 8, 16, 32, 64), 32
MOST_TOKENS = 64 << 10  # of a rank
MIXES = {"agents, median 38Ki": (38 << 10, 0.9), "chats and agents, median 2Ki": (2 << 10, 1.6)}
CASES = [(row << 10, num_gpus) for row in (128, 512) for num_gpus in (8, 64)]


def draw_lengths(count: int, median: int, spread: float, most: int) -> list[int]:
    draw = random.Random(0)
    return [min(most, max(16, int(median * draw.lognormvariate(0.0, spread)))) for _ in range(count)]


@dataclass(frozen=True)
class Parts:
    """Seconds of a micro-step: attention over one document that fills the row, the exchange, and all else."""

    attention: float
    exchange: float
    rest: float


def measure_parts(row_tokens: int, layout: Layout, num_micro_steps: int) -> Parts:
    levers = Levers(tiled_mlp=True, tiled_loss=True)
    job = Job(get_shape(MODEL), layout, row_tokens, levers, accumulation=num_micro_steps, fused_norms=True)
    seconds = compute_speed(job, load_hardware().get_gpu(GPU)).parts
    parts = {name: each / num_micro_steps for name, each in seconds.items()}
    attention, exchange = parts.pop("attention"), parts.pop("exchange")
    return Parts(attention, exchange, sum(parts.values()))


def compute_pairs(rows: RowPieces, index: int, row_tokens: int) -> float:
    """Of a row, as a share of those of one document that fills it."""
    return rows.compute_work(index, RowCost(per_token=0.0, per_pair=1.0)) / (row_tokens**2 / 2)


def time_steps(lengths: list[int], row_tokens: int, layout: Layout) -> tuple[float, float, Parts]:
    """Seconds of all steps as they are today, at least, and the parts of a micro-step."""
    num_groups = layout.dp_size
    num_micro_steps = ROWS_PER_STEP // num_groups
    parts = measure_parts(row_tokens, layout, num_micro_steps)
    work = RowCost((parts.rest + parts.exchange) / row_tokens, parts.attention / (row_tokens**2 / 2))
    rows = pack_documents(cut_documents(lengths, row_tokens, "split").pieces, row_tokens, work)
    today = least = 0.0
    for first in range(0, len(rows) - ROWS_PER_STEP + 1, ROWS_PER_STEP):
        step = [locate_row(at, len(rows), 0).row for at in range(first, first + ROWS_PER_STEP)]
        seconds = [parts.rest + parts.attention * compute_pairs(rows, row, row_tokens) for row in step]
        shares = share_rows(seconds, num_groups, first // ROWS_PER_STEP)
        today += sum(parts.exchange + max(seconds[share[at]] for share in shares) for at in range(num_micro_steps))
        least += sum(seconds) / num_groups
    return today, least, parts


def compare(lengths: list[int], row_tokens: int, num_gpus: int) -> dict[str, Any]:
    found = {}
    for sp_size in (size for size in SP_SIZES if size <= num_gpus and row_tokens // size <= MOST_TOKENS):
        layout = Layout(1, num_gpus // sp_size, sp_size, max(1, sp_size // 8))
        found[sp_size] = time_steps(lengths, row_tokens, layout)
    sp_size, (today, _, parts) = min(found.items(), key=lambda each: each[1][0])
    least = min(each for _, each, _ in found.values())
    return {
        "row_tokens": row_tokens,
        "num_gpus": num_gpus,
        "sp_size": sp_size,
        "exchange": parts.exchange / (parts.attention + parts.exchange + parts.rest),
        "gain_at_most": today / least,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = {
        name: [compare(draw_lengths(options.documents, *mix, row_tokens), row_tokens, n) for row_tokens, n in CASES]
        for name, mix in MIXES.items()
    }
    for name, cases in found.items():
        for case in cases:
            place = f"rows of {case['row_tokens'] >> 10}Ki on {case['num_gpus']} GPUs, best sp {case['sp_size']}"
            print(f"{name}; {place}: at most {case['gain_at_most']:.3f} times as fast")
    if options.json is not None:
        settings = {"model": MODEL, "gpu": GPU, "rows_per_step": ROWS_PER_STEP, "documents": options.documents}
        options.json.write_text(json.dumps({"settings": settings, "mixes": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
