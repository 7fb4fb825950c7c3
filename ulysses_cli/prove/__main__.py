"""`python -m ulysses_cli.prove`: a proof in a process of its own. What is to be done comes as JSON on stdin; progress
goes to stderr, findings as JSON to stdout. The command has validated the recipe before.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from ulysses_cli.plan.load import load_recipe
from ulysses_cli.plan.problem import Problem, RecipeError
from ulysses_cli.plan.recipe import Recipe
from ulysses_cli.report import printing

DONE, FAILED, USAGE = 0, 1, 2


def main() -> int:
    task: dict[str, Any] = json.load(sys.stdin)
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries say much on stdout
    try:
        recipe = load_recipe(task["recipe"], task["overrides"]).recipe if task["recipe"] else None
        findings = run(task, recipe)
    except RecipeError as error:
        findings = {"problems": [problem.as_json() for problem in error.problems]}
    except Exception as error:
        if type(error).__name__ != "BuildError":
            raise
        findings = {"problems": [Problem("model", str(error)).as_json()]}
    answer.write(json.dumps(findings, default=str))
    answer.close()
    if "problems" in findings:
        return USAGE
    return DONE if findings["passed"] else FAILED


def run(task: dict[str, Any], recipe: Recipe | None) -> dict[str, Any]:
    options: dict[str, Any] = task["options"]
    subject: str = task["recipe"]
    if task["command"] == "verify" and recipe is not None:
        from ulysses_cli.prove.verify import verify

        return verify(recipe, task["config"], subject, printing.print_talk, is_all=options["all"]).describe()
    if task["command"] == "bench" and recipe is not None:
        from ulysses_cli.hardware_table import load_hardware
        from ulysses_cli.prove.bench import Sweep, bench

        sweep = Sweep(tuple(options.pop("lengths")), tuple(options.pop("sp_sizes")), **options)
        return bench(recipe, task["config"], subject, load_hardware(), sweep, printing.print_talk).describe()
    if task["command"] == "doctor":
        from ulysses_cli.hardware_table import load_hardware
        from ulysses_cli.plan.model_shape import read_model_shape
        from ulysses_cli.prove.doctor import examine

        shape = read_model_shape(task["config"], subject) if recipe is not None else None
        return examine(recipe, shape, load_hardware(), subject, printing.print_talk).describe()
    raise AssertionError(f"no proof is called {task['command']}")


if __name__ == "__main__":
    sys.exit(main())
