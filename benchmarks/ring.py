"""Measures a ring inside sequence parallelism: the work of its ranks against a zigzag order of the row, the keys that
travel, and the time of ring 2 x Ulysses 2 against Ulysses 4 on CPU ranks with the same kernel, in rounds and with one
fetch. Compares rounds with the zigzag ring of ring-flash-attention (ring_peer.py). With --links, only times a link of
limited rate between two machines made of namespaces (ring_links.py).

Bars: work within 1 % of the mean; no more than the zigzag order's; exact (tests/ranks/test_ring.py); no more bytes sent
than the peer, and values no further from the truth.

    python benchmarks/ring.py [--tokens 4096] [--repeats 5] [--links 0,1000,200] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from datetime import timedelta
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import paths  # noqa: F401 - makes tests/support importable
import torch
from ring_links import measure_links
from ring_peer import compare_with_peer
from support import networks

from ulysses_cli.plan.layout import Layout
from ulysses_cli.plan.rows.ring import Order, Ring, TokenRun, count_pairs, deal_row, plan_keys
from ulysses_cli.prove.ranks import run_on_ranks
from ulysses_cli.train.attention.documents import make_documents
from ulysses_cli.train.attention.kernels.native import Rule
from ulysses_cli.train.attention.ulysses import ulysses_attention
from ulysses_cli.train.processes.groups import make_groups

ROW = 1 << 20
HEADS, KV_HEADS, DIM = 8, 2, 64
ALWAYS, NEVER = 0.0, 1e9  # shares beyond which keys come in rounds
SIDES = (
    ("ulysses 4", 1, NEVER),
    ("ring 2 x ulysses 2, in rounds", 2, ALWAYS),
    ("ring 2 x ulysses 2, at once", 2, NEVER),
    ("ring 4, in rounds", 4, ALWAYS),
    ("ring 4, at once", 4, NEVER),
)
SOFTCAP = 30.0  # with it, a CPU computes whole documents and parts of them with the same kernel


def draw_lengths(mean: int) -> tuple[int, ...]:
    draw, lengths = random.Random(3), list[int]()
    while sum(lengths) < ROW:
        lengths.append(min(ROW - sum(lengths), 1 + int(draw.expovariate(1 / mean))))
    return tuple(lengths)


MIXES: dict[str, tuple[int, tuple[int, ...]]] = {
    "one document, 4 shares": (4, (ROW,)),
    "documents of 3/4 and 1/4, 2 shares": (2, (3 * ROW // 4, ROW // 4)),
    "mean 128Ki, 4 shares": (4, draw_lengths(1 << 17)),
    "mean 16Ki, 4 shares": (4, draw_lengths(1 << 14)),
    "mean 2Ki, 8 shares": (8, draw_lengths(1 << 11)),
}


def measure_imbalance(order: Order, lengths: tuple[int, ...]) -> float:
    """Returns the most (query, key) pairs of a share over the mean."""
    bounds, works = [0, *accumulate(lengths)], []
    for runs in order:
        total = 0
        for run in runs:
            for start, end in pairwise(bounds):
                first, last = max(start, run.start) - start, min(end, run.stop) - start
                total += count_pairs(last, None) - count_pairs(first, None) if first < last else 0
        works.append(total)
    return max(works) * len(works) / sum(works)


def deal_zigzag(size: int) -> Order:
    width = ROW // (2 * size)
    pieces = [TokenRun(at * width, (at + 1) * width) for at in range(2 * size)]
    return tuple((pieces[at], pieces[-1 - at]) for at in range(size))


def measure_order() -> dict[str, dict[str, float]]:
    results = {}
    for name, (size, lengths) in MIXES.items():
        order = deal_row(lengths, Ring(size))
        plans = [plan_keys(lengths, order, None, rank) for rank in range(size)]
        started = time.process_time()
        plan_keys.__wrapped__(lengths, deal_row.__wrapped__(lengths, Ring(size)), None, 0)
        results[name] = {
            "zigzag": round(measure_imbalance(deal_zigzag(size), lengths), 3),
            "dealt": round(measure_imbalance(order, lengths), 4),
            "most keys, of a share's tokens": round(max(plan.num_keys for plan in plans) * size / ROW, 3),
            "most kernel calls": max(len(plan.parts) for plan in plans),
            "CPU milliseconds of a row's plan": round(1e3 * (time.process_time() - started), 2),
        }
    return results


def time_layouts(device: torch.device, tokens: int, repeats: int) -> dict[str, float]:
    """Seconds of forward and backward on a rank, the fastest of interleaved repeats, which other processes disturbed
    least; one document fills the row."""
    sides = {}
    for name, ring_size, max_shares in SIDES:
        groups = make_groups(Layout(sp_size=4, ring_size=ring_size), timedelta(seconds=60))
        order = deal_row((tokens,), Ring(ring_size))
        sides[name] = groups, make_documents((tokens,), order=order, max_shares=max_shares)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, tokens // 4, heads, DIM, generator=generator).requires_grad_()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(1 + repeats):
        for name, (groups, documents) in sides.items():
            torch.distributed.barrier()
            started = time.perf_counter()
            out = ulysses_attention(
                q, k, v, documents, Rule(0.125, softcap=SOFTCAP),
                axis=groups.ulysses_axis, ring=groups.ring_axis, kernel="sdpa",
            )  # fmt: skip
            out.sum().backward()
            torch.distributed.barrier()
            seconds[name].append(time.perf_counter() - started)
    return {name: min(times[1:]) for name, times in seconds.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--links", type=lambda text: [int(word) for word in text.split(",")], help="rates in Mbit/s")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    facts = json.loads(options.json.read_text()) if options.json and options.json.is_file() else {}
    passed = True
    if options.links:
        facts["links"] = {"tokens": options.tokens, "rates": print_links(options)}
    else:
        passed = measure_all(options, facts)
    if options.json:
        options.json.write_text(json.dumps(facts, indent=1) + "\n")
    return 0 if passed else 1


def print_links(options: argparse.Namespace) -> list[dict[str, Any]]:
    obstacle = networks.find_obstacle()
    if obstacle:
        raise SystemExit(f"there can be no namespaces here: {obstacle}")
    results = measure_links(options.links, options.tokens, options.repeats)
    for row in results:
        rate = f"{row['megabits_per_second']:,} Mbit/s" if row["megabits_per_second"] else "no limit"
        base = row["seconds"]["ulysses 4"]
        for name, seconds in row["seconds"].items():
            sent = row["bytes that a machine sends"][name] / 2**20
            print(f"{rate:<14} {name:<30} {seconds:8.3f} s, {seconds / base:.2f} of ulysses 4; {sent:.1f} MiB sent")
    return results


def measure_all(options: argparse.Namespace, facts: dict[str, Any]) -> bool:
    orders = measure_order()
    for name, values in orders.items():
        print(f"{name:<36} " + ", ".join(f"{key} {value}" for key, value in values.items()))
    times = run_on_ranks(4, time_layouts, options.tokens, options.repeats, device="cpu", time_limit=600)
    ratios = {name: round(seconds / times["ulysses 4"], 3) for name, seconds in times.items()}
    for name, ratio in ratios.items():
        print(f"{options.tokens:,} tokens on 4 ranks: {name} takes {ratio:.2f} of the time of ulysses 4")
    peer = run_on_ranks(4, compare_with_peer, options.tokens // 2, device="cpu", time_limit=600)
    for name, values in peer.items():
        print(f"{name:<36} " + ", ".join(f"{key} {value:.3g}" for key, value in values.items()))
    ours, theirs = peer["ours, in rounds"], peer["zigzag ring"]
    sent, error = "sent, of a rank's keys and values", "largest error of a gradient"
    facts |= {"orders": orders, "tokens": options.tokens, "seconds": times, "ratios": ratios, "peer": peer}
    return (
        all(each["dealt"] <= min(1.01, each["zigzag"] + 1e-3) for each in orders.values())
        and ours[sent] <= theirs[sent]
        and ours[error] <= 1.1 * theirs[error]
    )


if __name__ == "__main__":
    sys.exit(main())
