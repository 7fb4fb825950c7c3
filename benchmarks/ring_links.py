"""Times ring 2 x Ulysses 2 against Ulysses 4 on two machines made of network namespaces, 2 ranks on each, whose link
has a limited rate (`tc tbf`). Ranks of one machine meet over loopback, which has no limit.

Run through benchmarks/ring.py --links; needs to be root, for `ip` and `tc`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import paths  # noqa: F401 - makes tests/support importable
import torch
import torch.distributed as dist
from support import networks

from ulysses_cli.plan.layout import Layout
from ulysses_cli.plan.rows.ring import Ring, deal_row
from ulysses_cli.train.attention.documents import make_documents
from ulysses_cli.train.attention.kernels.native import Rule
from ulysses_cli.train.attention.ulysses import ulysses_attention
from ulysses_cli.train.processes.groups import make_groups

HEADS, KV_HEADS, DIM = 8, 2, 64
RANKS_PER_MACHINE, PORT = 2, 29571
LIMIT = timedelta(seconds=300)
SIDES = {  # ring size, and the shares that a rank fetches at once
    "ulysses 4": (1, 1.5),
    "ring 2 x ulysses 2, in rounds": (2, 0.0),
    "ring 2 x ulysses 2, at once": (2, 1e9),
}


def measure_links(rates: Sequence[int], tokens: int, repeats: int) -> list[dict[str, Any]]:
    """Returns, for each rate in Mbit/s (0: no limit), seconds of a forward and backward and bytes on the link."""
    return measure_on_machines(Path(__file__), RANKS_PER_MACHINE, rates, tokens, repeats)


def measure_on_machines(script: Path, per_machine: int, *options: Any) -> list[dict[str, Any]]:
    """Starts a script on each rank of two machines; it calls run_rank. Returns the first rank's results."""
    with networks.open_networks(2) as machines:
        facts = [json.dumps([rank, 2 * per_machine, *options]) for rank in range(2 * per_machine)]
        children = [
            start_rank(machines[rank // per_machine], script, text, is_first=not rank)
            for rank, text in enumerate(facts)
        ]
        try:
            answer, _ = children[0].communicate(timeout=1800)
            codes = [child.wait(60) for child in children]
        finally:
            for child in children:
                child.kill()
    if any(codes):
        raise RuntimeError(f"ranks ended with exit codes {codes}")
    results: list[dict[str, Any]] = json.loads(answer)
    return results


def start_rank(machine: str, script: Path, facts: str, *, is_first: bool) -> subprocess.Popen[str]:
    command = ["ip", "netns", "exec", machine, sys.executable, str(script.resolve()), facts]
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE if is_first else None, text=True)


def run_rank(measure: Callable[..., list[dict[str, Any]]], facts: str) -> None:
    """A rank's process. The first prints what it has measured."""
    rank, num_ranks, *options = json.loads(facts)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://10.231.7.1:{PORT}", rank=rank, world_size=num_ranks, timeout=LIMIT
    )
    found = measure(rank, *options)
    dist.destroy_process_group()
    if rank == 0:
        print(json.dumps(found))


def measure_rings(rank: int, rates: Sequence[int], tokens: int, repeats: int) -> list[dict[str, Any]]:
    sides = {}
    for name, (ring, max_shares) in SIDES.items():
        order = deal_row((tokens,), Ring(ring))
        documents = make_documents((tokens,), order=order, max_shares=max_shares)
        sides[name] = make_groups(Layout(sp_size=2 * RANKS_PER_MACHINE, ring_size=ring), LIMIT), documents
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, tokens // 4, heads, DIM, generator=generator).bfloat16().requires_grad_()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    results = []
    for rate in rates:
        limit_link(rank, rate, RANKS_PER_MACHINE)
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        sent = dict[str, int]()
        for _ in range(1 + repeats):
            for name, (groups, documents) in sides.items():
                dist.barrier()
                before, started = count_sent(), time.perf_counter()
                out = ulysses_attention(
                    q, k, v, documents, Rule(0.125), axis=groups.ulysses_axis, ring=groups.ring_axis, kernel="sdpa"
                )
                out.sum().backward()
                dist.barrier()
                seconds[name].append(time.perf_counter() - started)
                sent[name] = max(sent.get(name, 0), count_sent() - before)
        results.append(
            {
                "megabits_per_second": rate,
                "seconds": {name: round(min(times[1:]), 4) for name, times in seconds.items()},  # the least disturbed
                "bytes that a machine sends": sent,
            }
        )
    return results


def limit_link(rank: int, rate: int, per_machine: int) -> None:
    """Limits what this machine sends, by its first rank."""
    dist.barrier()
    if rank % per_machine == 0:
        subprocess.run(["tc", "qdisc", "del", "dev", "eth0", "root"], check=False, capture_output=True)
        if rate:
            words = ["rate", f"{rate}mbit", "burst", "256kb", "latency", "400ms"]
            subprocess.run(["tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *words], check=True)
    dist.barrier()


def count_sent() -> int:
    """Bytes that this machine has sent over its link, from the kernel."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if "eth0:" in line)
    return int(re.split(r"\s+", line.partition(":")[2].strip())[8])


if __name__ == "__main__":
    run_rank(measure_rings, sys.argv[1])
