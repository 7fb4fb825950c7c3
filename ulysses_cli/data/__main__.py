"""`python -m ulysses_cli.data [--format json] [--samples N] [--show SOURCE:ROW]`: prepare a recipe's data in a process
of its own. Reads the plan that the command has resolved from its standard input. All output goes through report/."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ulysses_cli.data.prepare import prepare_data
from ulysses_cli.plan.problem import DONE, FAILED, USAGE, Problem, RecipeError, get_signal_code
from ulysses_cli.plan.resolved import parse_plan
from ulysses_cli.readers.problems import DataError
from ulysses_cli.report import data_report, printing
from ulysses_cli.report.live import ProgressLine

PLACE_CHARS = 80


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m ulysses_cli.data")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--show", type=lambda words: tuple(map(int, words.split(":"))), help="SOURCE:ROW")
    parser.add_argument("--place", type=int, help="a file to hold the key of what is being read")
    options = parser.parse_args(arguments)
    is_json = options.format == "json"
    plan = parse_plan(sys.stdin.read())
    loaded, resolved = plan.loaded, plan.resolved
    progress = ProgressLine()
    try:
        try:
            with printing.reserve_stdout():
                prepared = prepare_data(
                    loaded.recipe, resolved.pad_to_multiple_of, partial(_show, progress, options.place),
                    options.samples, options.show, can_share=not resolved.sharing_obstacle,
                )  # fmt: skip
        except RecipeError as error:
            raise RecipeError(
                replace(problem, where=loaded.locate(problem.key)) for problem in error.problems
            ) from None
    except (RecipeError, DataError) as error:
        progress.end()
        printing.print_problems(error.problems)
        if is_json:
            printing.print_json({"problems": [problem.as_json() for problem in error.problems]})
        return FAILED if isinstance(error, DataError) else USAGE
    except OSError as error:
        progress.end()
        message = f"{error.filename or 'the data'} cannot be read: {error.strerror or error}"
        problem = Problem("", message, "check that it exists and that you may read it")
        printing.print_problems([problem])
        if is_json:
            printing.print_json({"problems": [problem.as_json()]})
        return FAILED
    except (KeyboardInterrupt, SystemExit):  # so that the command's message begins a line of its own
        progress.end()
        raise
    progress.end()
    if is_json:
        printing.print_json(prepared.report)
    else:
        printing.print_data(data_report.format_report(prepared.report))
    return DONE


def _show(progress: ProgressLine, place: int | None, event: Mapping[str, Any]) -> None:
    """Shows progress. Also writes the source's key to the file `place`, so that the parent process can name the source
    when this process is killed without a message."""
    if place is not None and "source" in event:
        os.pwrite(place, event["source"].ljust(PLACE_CHARS).encode(), 0)
    progress.show(event)


def _stop(number: int, _: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(get_signal_code(number))  # SystemExit runs the `finally` blocks, which remove partial folders


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(get_signal_code(signal.SIGINT))
