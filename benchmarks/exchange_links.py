"""Measures how much of the exchange of heads attention hides, on two machines made of network namespaces, one rank on
each, whose link has a limited rate (`tc tbf`). One model takes steps in three ways, in turn: heads at once, in chunks,
and in chunks of which the next travels while one attends. What is hidden is the time by which the third is faster than
the second, of the time that the second spends in exchanges.

Bars: at least half of the exchange hidden; values bit for bit those of the same chunks; a step faster than both others.
Needs to be root, for `ip` and `tc`.

    python benchmarks/exchange_links.py [--rates 300,600] [--tokens 4096] [--chunks 4] [--repeats 9] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import paths  # noqa: F401 - makes tests/support importable
import torch
import torch.distributed as dist
from ring_links import LIMIT, limit_link, measure_on_machines, run_rank
from torch import Tensor, nn

from ulysses_cli.plan.layout import Layout
from ulysses_cli.train.attention.documents import make_documents
from ulysses_cli.train.attention.interface import register_attention
from ulysses_cli.train.clock import Clock
from ulysses_cli.train.processes.groups import make_groups

HEADS, KV_HEADS, HIDDEN, LAYERS = 16, 16, 1024, 2
NUM_RANKS = 2
BEFORE, CHUNKS, OVERLAP = "heads at once", "chunks", "chunks that overlap"
LEAST_HIDDEN = 0.5
Side = Callable[[], tuple[Tensor, ...]]


def make_side(tokens: int, num_chunks: int, overlaps: bool) -> Side:
    """A model of Llama's layers, and a forward and backward of this rank's slice. Returns the loss and gradients."""
    from transformers import LlamaConfig, LlamaModel

    axis = make_groups(Layout(sp_size=NUM_RANKS), LIMIT).ulysses_axis
    config = LlamaConfig(
        vocab_size=16, hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=tokens,
    )  # fmt: skip
    config._attn_implementation = register_attention(axis, "sdpa", num_chunks, overlaps=overlaps)
    torch.manual_seed(0)
    model: nn.Module = LlamaModel(config).bfloat16().train()
    documents = make_documents((tokens,))
    ids = torch.randint(16, (1, tokens), generator=torch.Generator().manual_seed(1)).chunk(NUM_RANKS, 1)[axis.rank]
    positions = torch.arange(tokens)[None].chunk(NUM_RANKS, 1)[axis.rank]

    def step() -> tuple[Tensor, ...]:
        model.zero_grad()
        out = model(input_ids=ids, position_ids=positions, documents=documents, use_cache=False).last_hidden_state
        out.float().square().mean().backward()
        return out.detach(), *(each.grad for each in model.parameters() if each.grad is not None)

    return step


def measure(rank: int, rates: Sequence[int], tokens: int, num_chunks: int, repeats: int) -> list[dict[str, Any]]:
    ways = {BEFORE: (1, False), CHUNKS: (num_chunks, False), OVERLAP: (num_chunks, True)}
    sides = {name: make_side(tokens, *way) for name, way in ways.items()}
    results = []
    for rate in rates:
        limit_link(rank, rate, 1)
        seconds: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
        values = dict[str, tuple[Tensor, ...]]()
        for _ in range(1 + repeats):
            for name, step in sides.items():
                dist.barrier()
                clock, started = Clock(torch.device("cpu")), time.perf_counter()
                clock.start()
                values[name] = step()
                parts = clock.stop()
                dist.barrier()
                seconds[name].append({"step": time.perf_counter() - started, "exchange": parts["exchange"]})
        results.append(
            {
                "megabits_per_second": rate,
                "seconds": {name: times[1:] for name, times in seconds.items()},
                "same_bits": all(map(torch.equal, values[CHUNKS], values[OVERLAP])),
            }
        )
    return results


def summarize(result: dict[str, Any]) -> dict[str, Any]:
    """Of each repeat, in which the sides are timed one after another, what it shows; the median over repeats."""
    triples = list(zip(*(result["seconds"][name] for name in (BEFORE, CHUNKS, OVERLAP)), strict=True))

    def find_middle(show: Callable[..., float]) -> float:
        return round(statistics.median(show(*each) for each in triples), 3)

    return {
        "megabits_per_second": result["megabits_per_second"],
        "exchange_of_a_step": find_middle(lambda before, chunks, overlap: before["exchange"] / before["step"]),
        "hidden": find_middle(lambda before, chunks, overlap: (chunks["step"] - overlap["step"]) / chunks["exchange"]),
        "step_of_heads_at_once": find_middle(lambda before, chunks, overlap: overlap["step"] / before["step"]),
        "step_of_the_same_chunks": find_middle(lambda before, chunks, overlap: overlap["step"] / chunks["step"]),
        "step_seconds": find_middle(lambda before, chunks, overlap: overlap["step"]),
        "same_bits": result["same_bits"],
    }


def meets_bars(result: dict[str, Any]) -> bool:
    is_faster = max(result["step_of_heads_at_once"], result["step_of_the_same_chunks"]) < 1
    return bool(is_faster and result["same_bits"] and result["hidden"] >= LEAST_HIDDEN)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="300,600", help="Mbit/s")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rates = [int(rate) for rate in options.rates.split(",")]
    facts = rates, options.tokens, options.chunks, options.repeats
    found = measure_on_machines(Path(__file__), 1, *facts)
    results = [summarize(result) for result in found]
    for result in results:
        print(json.dumps(result, indent=1))
    if options.json:
        machine = {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine()}
        report = {"machine": machine, "tokens": options.tokens, "chunks": options.chunks, "rates": results}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return int(not all(map(meets_bars, results)))


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("["):
        run_rank(measure, sys.argv[1])
    else:
        sys.exit(main())
