"""Measures how well and how fast document lengths are packed into rows, against first-fit-decreasing in the same run.

Bars: at least 99 % of the space filled; one million lengths in under 20 s and 1 GB on one core; work per data-parallel
rank within 3 % of the mean; the row at any position of ten million in under a second.

    python benchmarks/packing.py [--documents 1000000] [--ranks 8] [--json FILE]
"""

import argparse
import json
import random
import resource
import sys
import time
from pathlib import Path

from ulysses_cli.plan.rows.packing import RowCost, cut_documents, locate_row, pack_documents, share_rows

ROW_TOKENS = 131072
# Llama-3.1-8B: about 2 x 8e9 x 3 FLOPs per token, and 32 layers x 4096 x 2 x 2 x 3 FLOPs per pair of tokens.
WORK = RowCost(per_token=4.8e10, per_pair=1.6e6)
NUM_MICRO_STEPS = 8


def draw_lengths(count: int) -> list[int]:
    draw = random.Random(0)
    return [max(1, int(draw.lognormvariate(8.0, 1.3))) for _ in range(count)]


def pack_first_fit(lengths: list[int], capacity: int) -> float:
    """Returns the efficiency of first-fit-decreasing, the usual way, on a sample."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        for at, room in enumerate(rooms):
            if room >= length:
                rooms[at] -= length
                break
        else:
            rooms.append(capacity - length)
    return sum(lengths) / (capacity * len(rooms))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    pieces = cut_documents(draw_lengths(options.documents), ROW_TOKENS, "split").pieces
    start = time.perf_counter()
    rows = pack_documents(pieces, ROW_TOKENS, WORK)
    pack_seconds = time.perf_counter() - start
    works = [rows.compute_work(index, WORK) for index in range(len(rows))]
    totals, waits = [0.0] * options.ranks, []
    rows_per_step = options.ranks * NUM_MICRO_STEPS
    for first in range(0, len(rows) - rows_per_step + 1, rows_per_step):
        step = [works[locate_row(at, len(rows), 0).row] for at in range(first, first + rows_per_step)]
        shares = share_rows(step, options.ranks, first // rows_per_step)
        for rank, share in enumerate(shares):
            totals[rank] += sum(step[row] for row in share)
        slowest = sum(max(step[share[micro]] for share in shares) for micro in range(NUM_MICRO_STEPS))
        waits.append(slowest / (sum(step) / options.ranks) - 1)
    start = time.perf_counter()
    locate_row(7 * 10_000_000 + 123, 10_000_000, 0)
    locate_seconds = time.perf_counter() - start
    sample = [piece.stop - piece.start for piece in pieces[:20_000]]
    result = {
        "documents": options.documents,
        "rows": len(rows),
        "efficiency": rows.compute_efficiency(),
        "first_fit_efficiency_of_20000": pack_first_fit(sample, ROW_TOKENS),
        "pack_seconds": pack_seconds,
        "max_rss_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        "work_per_rank_above_mean": max(totals) / (sum(totals) / options.ranks) - 1,
        "time_lost_to_waiting": sum(waits) / len(waits),
        "locate_seconds": locate_seconds,
    }
    for name, value in result.items():
        print(f"{name:<32} {value:.6g}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    is_met = result["efficiency"] >= 0.99 and result["work_per_rank_above_mean"] <= 0.03
    return int(not (is_met and pack_seconds < 20 and result["max_rss_gb"] < 1 and locate_seconds < 1))


if __name__ == "__main__":
    sys.exit(main())
