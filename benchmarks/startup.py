"""Measures how long the light half takes to start, against a bare import of its libraries, in one run.

Bars: `validate-config` and `--help` under 0.3 s and at most 3x the bare import. Prints the medians and the ratios.
"""

import statistics
import subprocess
import sys
import time

from paths import ROOT

BARE = [sys.executable, "-c", "import typer, pydantic, yaml"]
COMMANDS = {
    "validate-config": ["validate-config", str(ROOT / "recipes" / "llama-3.1-8b-128k-8gpu.yaml")],
    "--help": ["--help"],
}
NUM_RUNS = 15
MAX_SECONDS, MAX_RATIO = 0.3, 3.0


def time_command(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
    return time.perf_counter() - start


def main() -> int:
    commands = {"bare import": BARE}
    commands |= {name: [sys.executable, "-m", "ulysses_cli", *words] for name, words in COMMANDS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for command in commands.values():
        time_command(command)  # the first start fills the disk cache
    for _ in range(NUM_RUNS):  # in turns, so that noise of the machine slows all of them
        for name, command in commands.items():
            seconds[name].append(time_command(command))
    bare = statistics.median(seconds["bare import"])
    is_slow = False
    for name, values in seconds.items():
        median = statistics.median(values)
        print(f"{name:<16} median {median:.3f} s  min {min(values):.3f} s  {median / bare:.2f}x the bare import")
        is_slow |= name != "bare import" and (median > MAX_SECONDS or median / bare > MAX_RATIO)
    return int(is_slow)


if __name__ == "__main__":
    sys.exit(main())
