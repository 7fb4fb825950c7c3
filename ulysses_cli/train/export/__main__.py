"""`python -m ulysses_cli.train.export`: exports a checkpoint as a model folder, in one process, without the run's
ranks. Reports progress to the command that started it, as JSON lines through a pipe.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import Any

from ulysses_cli.data.transaction import lock
from ulysses_cli.plan.problem import FAILED, USAGE, get_signal_code
from ulysses_cli.plan.rules.merged_models import MergedModel
from ulysses_cli.plan.secrets import collect_secrets, mask_text
from ulysses_cli.run.checkpoints import CheckpointError, choose_checkpoint, choose_last, load_state
from ulysses_cli.train.export.job import ExportError, ExportJob


def _refuse(to: Path) -> None:
    raise CheckpointError(f"another process writes {to} right now: wait for it, or name another folder")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m ulysses_cli.train.export")
    parser.add_argument("models", nargs="+", help="a checkpoint or a run; with --weights, models to merge")
    parser.add_argument("--weights", help="those of the models: 0.9,0.1")
    parser.add_argument("--last", type=int, default=1)
    parser.add_argument("--to", required=True, type=Path)
    parser.add_argument("--best", action="store_true")
    parser.add_argument("--dtype")
    parser.add_argument("--merge-lora", action="store_true")
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--events", required=True, type=int, help="a pipe for JSON lines")
    options = parser.parse_args(arguments)
    signal.signal(
        signal.SIGTERM, lambda number, _: sys.exit(get_signal_code(number))
    )  # unfinished files are removed on exit
    with os.fdopen(options.events, "w", encoding="utf-8") as events:

        def emit(**event: Any) -> None:
            events.write(json.dumps(event) + "\n")
            events.flush()

        try:
            run = _make_job(options, lambda phase: emit(phase=phase))
            options.to.parent.mkdir(parents=True, exist_ok=True)
            with lock(options.to.with_name(f".{options.to.name}.lock"), lambda: _refuse(options.to)):
                emit(result=run(options.to, lambda phase: emit(phase=phase)))
        except (CheckpointError, ExportError, OSError) as error:
            problem = _explain(error, Path(options.models[0]), options.to)
            emit(problem=mask_text(problem, collect_secrets({}, os.environ)))
            return USAGE if isinstance(error, ExportError) else FAILED
    return 0


def _make_job(options: argparse.Namespace, report: Callable[[str], None]) -> Callable[..., dict[str, Any]]:
    if options.weights is not None:
        from ulysses_cli.train.export.job import merge_models

        weights = map(float, options.weights.split(","))
        return partial(merge_models, list(starmap(MergedModel, zip(options.models, weights, strict=True))))
    path = Path(options.models[0])
    report("checking the checkpoint" if options.last == 1 else "checking the checkpoints")
    if options.last == 1:
        checkpoints = [choose_checkpoint(path, report, wants_best=options.best)]
    else:
        checkpoints = choose_last(path, options.last, report)
    job = ExportJob(
        checkpoints[0], load_state(checkpoints[0]), options.dtype, options.merge_lora,
        trusts_code=options.trust_remote_code, earlier=checkpoints[1:],
    )  # fmt: skip
    return job.run


def _explain(error: Exception, checkpoint: Path, folder: Path) -> str:
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    if error.filename and Path(str(error.filename)).is_relative_to(checkpoint):
        return f"{error.filename} cannot be read: {error.strerror}"
    return f"{folder} cannot be written: {error.strerror}\n\nhint: name a folder on another disk with --to"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
