"""Measures a tile of the loss on a CPU against an earlier commit: losses and the logits' gradient, in turns in one
process, and the memory of each in a process of its own. Logits of 441 tokens and a vocabulary of 151,936, and of 1,365
and 49,152, which is what a tile holds; two thirds of the tokens are targets.

    python benchmarks/losses.py [--commit 702dfed8] [--rounds 8]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch
from paths import RESULTS

from ulysses_cli.train.elementwise.operators import compute_losses
from ulysses_cli.train.loss import HeadRule

FILE, COMMIT = "ulysses_cli/train/memory/tiled_loss.py", "702dfed8"
CASES = [
    (tokens, width, dtype) for tokens, width in ((441, 151_936), (1365, 49_152)) for dtype in ("bfloat16", "float32")
]
Compute = Callable[[torch.Tensor, torch.Tensor], Any]


def load_sides(commit: str) -> dict[str, Compute]:
    show = ["git", "show", f"{commit}:{FILE}"]
    text = subprocess.run(show, check=True, capture_output=True, text=True, cwd=Path(__file__).parent).stdout
    before = ModuleType("tiled_loss_before")
    sys.modules["tiled_loss_before"] = before
    exec(compile(text, FILE, "exec"), vars(before))
    return {
        "before": lambda logits, labels: before.compute_losses(logits, labels, HeadRule(), with_grad=True),
        "now": lambda logits, labels: compute_losses(logits, labels, HeadRule(), with_grad=True, overwrites=True),
    }


def draw(tokens: int, width: int, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, width, (tokens,), generator=generator)
    labels[::3] = -100
    return (3 * torch.randn(tokens, width, generator=generator)).to(getattr(torch, dtype)), labels


def measure_memory(commit: str, side: str, case: tuple[int, int, str], to: Any) -> None:
    """Peak bytes of the process above those that it had with the logits."""
    compute, (logits, labels) = load_sides(commit)[side], draw(*case)
    compute(*draw(8, 64, case[2]))  # what the library takes at its first call
    Path("/proc/self/clear_refs").write_text("5")
    before = read_status("VmRSS")
    kept = compute(logits, labels)
    to.send(read_status("VmHWM") - before)
    del kept


def read_status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) << 10


def measure(commit: str, case: tuple[int, int, str], rounds: int) -> dict[str, Any]:
    sides, (logits, labels) = load_sides(commit), draw(*case)
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    results = {}
    for _ in range(rounds):
        for side, compute in sides.items():
            given = logits.clone()
            start = time.perf_counter()
            results[side] = compute(given, labels)
            seconds[side].append(time.perf_counter() - start)
    ratios = [now / before for now, before in zip(seconds["now"], seconds["before"], strict=True)]
    (losses, grad), (old_losses, old_grad) = results["now"], results["before"]
    memory = {}
    for side in sides:
        receiver, sender = get_context("spawn").Pipe(duplex=False)
        process = get_context("spawn").Process(target=measure_memory, args=(commit, side, case, sender))
        process.start()
        memory[side] = receiver.recv()
        process.join()
    return {
        "seconds": {side: min(each) for side, each in seconds.items()},
        "ratio": statistics.median(ratios),
        "extra_bytes": memory,
        "largest_difference": {
            "loss": (losses - old_losses).abs().max().item(), "gradient": (grad - old_grad).abs().max().item(),
        },
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", default=COMMIT)
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    cases = {f"{tokens} x {width} {dtype}": measure(options.commit, (tokens, width, dtype), options.rounds)
             for tokens, width, dtype in CASES}  # fmt: skip
    result = {"commit": options.commit, "rounds": options.rounds, "threads": torch.get_num_threads(), "cases": cases}
    print(json.dumps(result, indent=1))
    (RESULTS / "losses-cpu.json").write_text(json.dumps(result, indent=1) + "\n")
    is_good = all(case["ratio"] <= 0.7 and case["extra_bytes"]["now"] <= case["extra_bytes"]["before"]
                  for case in cases.values())  # fmt: skip
    return int(not is_good)


if __name__ == "__main__":
    sys.exit(main())
