"""Takes training steps of several runs in turns, in one process, and compares their times pair by pair.

One of the runs is a second copy of the reference. Its ratio, which should be 1, shows how far the machine's noise moves
a median: no difference smaller than that counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

CLOCKS: dict[str, Callable[[], float]] = {"cpu": time.process_time, "clock": time.perf_counter}
NUM_WARMUP = 2
Sides = dict[str, list[float]]


def measure_in_turns(harnesses: Mapping[str, Any], num_rounds: int) -> dict[str, Sides]:
    """Returns seconds of each side's steps by each clock: this process's CPU time, and the clock on the wall."""
    seconds: dict[str, Sides] = {clock: {side: [] for side in harnesses} for clock in CLOCKS}
    names = list(harnesses)
    for number in range(NUM_WARMUP + num_rounds):
        first = number % len(names)  # each side is first, second and third equally often
        for side in names[first:] + names[:first]:
            before = {clock: read() for clock, read in CLOCKS.items()}
            take_step(harnesses[side])
            for clock, read in CLOCKS.items():
                seconds[clock][side].append(read() - before[clock])
    return {clock: {side: values[NUM_WARMUP:] for side, values in sides.items()} for clock, sides in seconds.items()}


def take_step(harness: Any) -> None:
    from ulysses_cli.train.loop import train

    harness.train_state.num_steps = harness.train_state.step + 1
    train(harness.train_state)


def compare(sides: Sides, side: str, reference: str) -> list[float]:
    """Quartiles of a side's steps over those of the reference, pair by pair."""
    pairs = zip(sides[side], sides[reference], strict=True)
    return statistics.quantiles((own / plain for own, plain in pairs), n=4)


def summarize(seconds: Mapping[str, Sides], side: str, reference: str, copy: str) -> dict[str, Any]:
    """Prints ratios and their noise by each clock, and returns them."""
    result: dict[str, Any] = {}
    for clock, sides in seconds.items():
        ours, noise = compare(sides, side, reference), compare(sides, copy, reference)
        medians = {name: statistics.median(values) for name, values in sides.items()}
        result[clock] = {"seconds": medians, "ratio": ours, "noise": noise}
        print(f"{clock} seconds of a step: { ({name: round(value, 4) for name, value in medians.items()}) }")
        for name, (low, middle, high) in ((side, ours), (copy, noise)):
            print(f"  {name} / {reference}: {middle:.3f} (quartiles {low:.3f} to {high:.3f})")
    return result
