"""`python -m ulysses_cli.prove`: runs one proof in a process of its own. The task is read as JSON from stdin; progress
goes to stderr, findings go as JSON to stdout. The command has validated and resolved the recipe, if there is one.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ulysses_cli.plan.problem import DONE, FAILED, USAGE, Problem, RecipeError, get_signal_code
from ulysses_cli.plan.recipe.loader import Loaded
from ulysses_cli.plan.resolved import parse_plan
from ulysses_cli.prove.ranks import RankFailureError, warm_up
from ulysses_cli.report import printing

Findings = dict[str, Any]


def main() -> int:
    signal.signal(signal.SIGTERM, end_on_signal)
    task: dict[str, Any] = json.load(sys.stdin)
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    progress = os.fdopen(os.dup(2), "w", encoding="utf-8", errors="backslashreplace")
    log = redirect_output(task["command"])
    try:
        findings, code = prove(task, partial(printing.write_to, progress), log)
    except SystemExit:
        log.unlink(missing_ok=True)
        raise
    answer.write(json.dumps(findings, default=str))
    answer.close()
    if code != FAILED or "problems" not in findings:
        log.unlink(missing_ok=True)
    return code


def end_on_signal(number: int, _: object) -> None:
    """Ends by an exception, so that ranks are ended and temporary folders removed."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(get_signal_code(number))


def redirect_output(command: str) -> Path:
    """Sends stdout and stderr to a log: what libraries and their C++ code print is of use only when something fails."""
    handle, name = tempfile.mkstemp(prefix=f"ulysses-{command}-", suffix=".log")
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
    return Path(name)


def prove(task: dict[str, Any], report: Callable[[str], None], log: Path) -> tuple[Findings, int]:
    """Returns findings or problems, and their exit code."""
    try:
        findings = run(task, parse_plan(task["plan"]).loaded if task["plan"] else None, report)
    except Exception as error:  # noqa: BLE001 - every error becomes a problem; its trace goes to the log
        if isinstance(error, RecipeError | RankFailureError) and error.problems:
            return {"problems": [problem.as_json() for problem in error.problems]}, USAGE
        if type(error).__name__ == "BuildError":
            return {"problems": [Problem("model", str(error)).as_json()]}, USAGE
        traceback.print_exc()
        sys.stderr.flush()
        first = (str(error).strip().splitlines() or [""])[0][:300]
        message = f"{task['command']} failed: {type(error).__name__}: {first}"
        return {"problems": [Problem("", message, f"the whole trace: {log}").as_json()]}, FAILED
    return findings, DONE if findings["passed"] else FAILED


def run(task: dict[str, Any], loaded: Loaded | None, report: Callable[[str], None]) -> Findings:
    options: dict[str, Any] = task["options"]
    recipe, subject = (loaded.recipe, loaded.file) if loaded is not None else (None, "")
    if task["device"] == "cpu":
        report("loading torch and DeepSpeed")
        warm_up()
    if task["command"] == "verify" and recipe is not None:
        from ulysses_cli.prove.verify import verify

        return verify(recipe, task["config"], subject, report, is_all=options["all"]).describe()
    if task["command"] == "bench" and recipe is not None:
        from ulysses_cli.hardware_table import load_hardware
        from ulysses_cli.prove.bench import BenchSweep, bench

        sweep = BenchSweep(tuple(options.pop("lengths")), tuple(options.pop("sp_sizes")), **options)
        return bench(recipe, task["config"], subject, load_hardware(), sweep, report).describe()
    if task["command"] == "doctor":
        from ulysses_cli.hardware_table import load_hardware
        from ulysses_cli.plan.models.shape import read_model_shape
        from ulysses_cli.prove.doctor import examine

        shape = read_model_shape(task["config"], subject) if recipe is not None else None
        return examine(recipe, shape, load_hardware(), subject, report).describe()
    if task["command"] == "evaluate":
        from ulysses_cli.prove.quality.evaluation import run_task

        return run_task(options, task["device"], report)
    raise AssertionError(f"no proof is called {task['command']}")


if __name__ == "__main__":
    sys.exit(main())
