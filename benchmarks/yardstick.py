"""The yardstick of estimates: 207 recipes that have every family, lever, stage, adapter, ring and place of offloading
in nearly every pair, each with a trace of torch's tensors without data under the real engine.

    python benchmarks/yardstick.py                       compares searches and runs on sizes with the stored traces
    python benchmarks/yardstick.py --trace [NUMBER ...]  traces all recipes anew, or these (`make yardstick`)
    python benchmarks/yardstick.py --add RECIPE ...      traces these recipes and adds them
    python benchmarks/yardstick.py --draw N --seed S     draws N recipes that nobody has seen, traces and compares them

Tracing is nice to other programs, keeps every trace as it comes, and goes on where it was interrupted. A release of
torch, transformers or deepspeed is admitted by `--trace`: what moved is printed. A recipe that is added has the content
of config.json under `model.config`. Exit code 1 when a bar is missed.
"""

import argparse
import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from paths import ROOT

RECORD = ROOT / "benchmarks" / "results" / "yardstick.json"
UNFINISHED = RECORD.with_suffix(".unfinished.json")
# The share of peaks within NEAR, and the worst peak. What searches weigh is held to less: a run confirms it.
NEAR = {"searches": 0.03, "runs on sizes": 0.01}
BARS = {"searches": 0.85, "runs on sizes": 0.99}
WORST = {"searches": 0.35, "runs on sizes": 0.03}
TRACED_WITH = ("torch", "transformers", "deepspeed", "peft")
Settings = dict[str, Any]
Phases = dict[str, int]


def list_versions() -> dict[str, str]:
    return {name: version(name).partition("+")[0] for name in TRACED_WITH}


def trace_each(recipes: Sequence[Settings], file: Path) -> Iterator[Phases]:
    """Yields the trace of each recipe. `file` keeps those of a run that was interrupted, by the same versions."""
    from support.random_recipes import read_recipe, trace_phases

    known = json.loads(file.read_text()) if file.is_file() else {}
    known = known if known.get("versions") == list_versions() else {"versions": list_versions(), "traces": {}}
    os.nice(19)
    for number, settings in enumerate(recipes):
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
        if digest not in known["traces"]:
            known["traces"][digest] = trace_phases(read_recipe(settings))
            file.write_text(json.dumps(known))
        print(f"  {number + 1} of {len(recipes)}: {settings['model']['config']['model_type']}", file=sys.stderr)
        yield known["traces"][digest]


def trace_anew(rows: Sequence[Mapping[str, Any]], numbers: Sequence[int]) -> list[dict[str, Any]]:
    anew = [dict(row) for row in rows]
    numbers = numbers or range(len(rows))
    traced = trace_each([rows[number]["recipe"] for number in numbers], UNFINISHED)
    for number, phases in zip(numbers, traced, strict=True):
        row = rows[number]
        moved = {name: size / row["traced"].get(name, size) - 1 for name, size in phases.items()}
        moved = {name: f"{share:+.2%}" for name, share in moved.items() if abs(share) > 1e-4}
        if moved:
            print(f"{number} {row['recipe']['model']['config']['model_type']} moved: {moved}")
        anew[number]["traced"] = phases
    return anew


def save(rows: Sequence[Mapping[str, Any]]) -> None:
    machine = {"cores": os.cpu_count(), "system": platform.platform()}
    head = json.dumps({"machine": machine, "versions": list_versions()}, indent=1).removesuffix("\n}")
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)  # a row is a line of a comparison
    RECORD.write_text(f'{head},\n "rows": [\n{lines}\n ]\n}}\n')
    UNFINISHED.unlink(missing_ok=True)


def compare(rows: Sequence[Mapping[str, Any]]) -> int:
    """Prints how far searches and runs on sizes are from the traces."""
    from support import random_recipes as recipes

    from ulysses_cli.plan.ledger.parts import weigh

    methods = {
        "searches": lambda drawn: weigh(recipes.make_drawn_job(drawn)),
        "runs on sizes": recipes.run_phases,
    }
    is_good = True
    for name, predict in methods.items():
        print(f"\n{name}")
        compared = [recipes.measure_errors(predict(recipes.read_recipe(row["recipe"])), row["traced"]) for row in rows]
        for number in sorted(range(len(rows)), key=lambda number: -max(map(abs, compared[number].values())))[:12]:
            off = ", ".join(f"{phase} {error:+.2%}" for phase, error in compared[number].items() if abs(error) > 5e-4)
            print(f"  {number:>4} {rows[number]['recipe']['model']['config']['model_type']:<20} {off}")
        peaks = [abs(errors["peak"]) for errors in compared]
        worst = [max(map(abs, errors.values())) for errors in compared]
        near = {f"{bar:.2%}": sum(error <= bar for error in peaks) for bar in (0.0005, 0.005, 0.01, 0.03)}
        print(f"  {len(rows)} recipes; peaks within {near}; every phase within 3 % in {sum(x <= 0.03 for x in worst)}")
        is_good &= sum(error <= NEAR[name] for error in peaks) >= BARS[name] * len(rows) and max(peaks) <= WORST[name]
    return int(not is_good)


def draw(num: int, seed: int, first: int, file: Path | None) -> int:
    """Traces are kept in `file`, where one is given, so that an interrupted run goes on."""
    from support.random_recipes import draw_recipes

    drawn = [each.settings for each in draw_recipes(seed, num, first)]
    traces = trace_each(drawn, file or Path(os.devnull))
    rows = [{"recipe": settings, "traced": phases} for settings, phases in zip(drawn, traces, strict=True)]
    return compare(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=int, nargs="*", metavar="NUMBER", help="trace all recipes anew, or these")
    parser.add_argument("--add", type=Path, nargs="+", default=(), metavar="RECIPE")
    parser.add_argument("--draw", type=int, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, metavar="NUMBER", help="the first recipe of the seed")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="of --draw: where traces are kept")
    options = parser.parse_args()
    if options.draw is not None:
        return draw(options.draw, options.seed, options.first, options.keep)
    rows = json.loads(RECORD.read_text())["rows"]
    if options.trace is not None:
        rows = trace_anew(rows, options.trace)
    if options.add:
        added = [yaml.safe_load(file.read_text()) for file in options.add]
        traces = trace_each(added, UNFINISHED)
        rows += [{"recipe": settings, "traced": phases} for settings, phases in zip(added, traces, strict=True)]
    if options.trace is not None or options.add:
        save(rows)
    return compare(rows)


if __name__ == "__main__":
    sys.exit(main())
