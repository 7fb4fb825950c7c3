"""Asks what a user would ask of a shipped recipe before a GPU is rented: does the formula's memory agree with a trace,
phase by phase, and does `ulysses verify` pass with the recipe's layers and levers on CPU ranks?

    python benchmarks/recipes.py [NAME ...] [--json FILE]

Without names: the recipes of the families with recurrences, convolutions and layers of two head sizes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from paths import ROOT

RECIPES = ROOT / "recipes"
NAMES = ("qwen3.5-9b-256k-8gpu", "gemma-4-31b-128k-2x8gpu", "nemotron-3-nano-256k-2x8gpu", "lfm2-1.2b-32k-24gb")
BAR = 0.03


def run(*words: str) -> dict[str, Any]:
    environ = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "ulysses_cli", *words, "--format", "json"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if not done.stdout.strip():
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def read_gpu(file: Path) -> str:
    """The kind of GPU that the recipe's head names."""
    predicted = next(line for line in file.read_text().splitlines() if line.startswith("# predicted"))
    return predicted.split(" on ")[1]


def measure(name: str) -> dict[str, Any]:
    file = RECIPES / f"{name}.yaml"
    started = time.monotonic()
    (result,) = run("estimate-memory", str(file), "--gpu", read_gpu(file), "--trace")["results"]
    traced = result["trace"]
    errors = {phase: round(traced["formula_phases"][phase] / size - 1, 4) for phase, size in traced["phases"].items()}
    proof = run("verify", str(file))
    return {
        "trace_peak_bytes": traced["gpu_peak_allocated_bytes"],
        "peak_error": round(traced["difference"], 4),
        "phase_errors": errors,
        "verify_passed": proof["passed"],
        "verify": [
            {"what": f"{row['group']}: {row['name']}", "verdict": row["verdict"], **row["values"]}
            for row in proof["rows"]
        ],
        "seconds": round(time.monotonic() - started, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=NAMES, help="recipes, by their names without .yaml")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    found: dict[str, Any] = {}
    print(f"{'recipe':34}{'traced':>10}{'peak':>9}{'worst phase':>13}  verify")
    for name in options.names:
        each = found[name] = measure(name)
        worst = max(each["phase_errors"].values(), key=abs)
        verdict = "PASS" if each["verify_passed"] else "FAIL"
        peak = f"{each['trace_peak_bytes'] / 2**30:.1f} GiB"
        print(f"{name:34}{peak:>10}{each['peak_error']:>+9.1%}{worst:>+13.1%}  {verdict}", flush=True)
    is_good = all(
        each["verify_passed"] and max(map(abs, each["phase_errors"].values())) <= BAR for each in found.values()
    )
    if options.json:
        versions = {name: version(name) for name in ("torch", "deepspeed", "transformers")}
        report = {
            "recipes": found,
            "bar": BAR,
            "is_good": is_good,
            "versions": versions,
            "machine": platform.platform(),
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
