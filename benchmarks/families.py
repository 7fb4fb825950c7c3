"""Compares the ledger with traces of small models of families that `estimate.py --random` does not draw.

    python benchmarks/families.py [FAMILY ...] [--workers W]
    python benchmarks/families.py --add RECIPE ... [--workers W]

Without `--add`, traces the saved recipes of these families anew, or all of them. A recipe that is added has the content
of config.json under `model.config`. The traces are saved in results/estimate-families.json, with which
tests/unit/test_family_estimates.py compares the formulas. Exit code 1 when a row misses its bars.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from paths import ROOT

RECORD = ROOT / "benchmarks" / "results" / "estimate-families.json"


def list_recipes(record: dict[str, Any], families: list[str], added: list[Path]) -> Iterator[dict[str, Any]]:
    for file in added:
        yield yaml.safe_load(file.read_text())
    for row in () if added else record["rows"]:
        if not families or row["family"] in families:
            yield row["recipe"]


def compare(settings: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Returns the row that is saved, and whether it is within its bars."""
    from support import random_recipes

    from ulysses_cli.plan.recipe.loader import parse_recipe

    recipe = parse_recipe(yaml.safe_dump(settings), "a saved recipe", []).recipe
    drawn = random_recipes.DrawnRecipe(0, 0, settings, recipe)
    result = random_recipes.compare(drawn)
    phase, error = result.worst_phase
    print(f"  {drawn.family:<18} peak {result.peak_error:+.1%}; {phase} {error:+.1%}", flush=True)
    is_good = abs(result.peak_error) <= random_recipes.PEAK_BAR and abs(error) <= random_recipes.PHASE_BAR
    row = {"family": drawn.family, "traced": result.traced, "formula": result.formula, "recipe": settings}
    return row, is_good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY")
    parser.add_argument("--add", nargs="+", type=Path, default=[], metavar="RECIPE")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    record = json.loads(RECORD.read_text())
    recipes = list(list_recipes(record, options.families, options.add))
    with ThreadPoolExecutor(options.workers) as pool:
        results = list(pool.map(compare, recipes))
    rows = [row for row, _ in results]
    numbers = {json.dumps(row["recipe"], sort_keys=True): number for number, row in enumerate(record["rows"])}
    for row in rows:
        number = numbers.get(json.dumps(row["recipe"], sort_keys=True), len(record["rows"]))
        record["rows"][number : number + 1] = [row]
    if len(rows) == len(record["rows"]):
        record["versions"] = {name: version(name) for name in record["versions"]}
    RECORD.write_text(json.dumps(record) + "\n")
    num_missed = sum(not is_good for _, is_good in results)
    print(f"\n{len(rows)} rows, {num_missed} missed")
    return int(num_missed > 0)


if __name__ == "__main__":
    sys.exit(main())
