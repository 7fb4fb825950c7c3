"""The results of an earlier run in the run folder: set aside while a new run trains, then restored or deleted."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from ulysses_cli.launch.environments import refuse
from ulysses_cli.plan.files.regular_files import remove_own
from ulysses_cli.plan.problem import Problem, RecipeError
from ulysses_cli.run_folder.archive import EVALUATIONS, find_damage, list_checkpoints
from ulysses_cli.run_folder.manifest import read_model_steps
from ulysses_cli.run_folder.told import TOLD

RESULTS = ("checkpoints", "model")
RECORDS = ("metrics.jsonl", "eval.jsonl", "samples.jsonl", "quality.jsonl", TOLD, "run.json", EVALUATIONS)
REPLACED = "replaced"


def check_run_dir(run_dir: Path, inputs: Sequence[str], *, overwrite: bool) -> None:
    """Refuses to start a new run over the results of an earlier one, unless `overwrite`."""
    for name in RESULTS:
        folder = run_dir / name
        inside = [path for path in inputs if Path(os.path.expanduser(path)).resolve().is_relative_to(folder.resolve())]
        if inside:
            raise refuse(f"{inside[0]} lies in {folder}, where this run writes", "choose another run.output_dir")
        if not overwrite and folder.is_dir() and any(folder.iterdir()):
            problem = Problem(
                "run.output_dir",
                f"{folder} holds the results of an earlier run",
                "continue it with --resume auto, choose another run.output_dir, or replace it with --overwrite",
            )
            raise RecipeError([problem])


def check_continued_dir(run_dir: Path) -> None:
    """Refuses to continue a run whose model is there and whose checkpoints are gone: it would start anew, and the old
    model would pass for the new run's."""
    folder = run_dir / "model"
    if folder.is_dir() and any(folder.iterdir()) and not list_checkpoints(run_dir):
        raise refuse(
            f"{folder} is the model of an earlier run, and {run_dir} holds no checkpoint to continue it from",
            "choose another run.output_dir, or replace it: leave --resume out and add --overwrite",
        )


def set_results_aside(run_dir: Path) -> Path | None:
    """Moves the results of an earlier run into a folder, so that a new run that fails at its first step has destroyed
    nothing. Returns the folder, or None when there were no results."""
    remove_own(run_dir / "rehearsal")
    results = [run_dir / name for name in (*RESULTS, *RECORDS) if (run_dir / name).exists()]
    if not any(path.is_dir() and any(path.iterdir()) for path in results):
        return None
    aside = next(path for number in itertools.count(1) if not (path := run_dir / REPLACED / str(number)).exists())
    aside.mkdir(parents=True)
    for path in results:
        path.rename(aside / path.name)
    return aside


def restore_results(run_dir: Path, aside: Path) -> bool:
    """After a run that failed: moves the earlier run's results back. Returns False where the new run left results
    too."""
    if any((run_dir / name).is_dir() and any((run_dir / name).iterdir()) for name in RESULTS):
        return False
    for path in aside.iterdir():
        target = run_dir / path.name
        shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)
        path.rename(target)
    aside.rmdir()
    return True


def drop_replaced_results(run_dir: Path) -> None:
    """Call when the new run's model is complete."""
    remove_own(run_dir / REPLACED)


def find_newest_checkpoint(run_dir: Path) -> Path | None:
    """Finds it by its name. The ranks check later whether it is valid."""
    checkpoints = [path for path in run_dir.glob("checkpoints/step-*") if path.name.removeprefix("step-").isdecimal()]
    return max(checkpoints, key=lambda path: int(path.name.removeprefix("step-")), default=None)


def find_resumable_checkpoint(run_dir: Path) -> Path | None:
    """The newest checkpoint whose files have the sizes that its manifest names."""
    return next((path for path in list_checkpoints(run_dir) if not find_damage(path, is_quick=True)), None)


def is_model_of_newest(run_dir: Path) -> bool:
    """Whether the run's model was made from its last checkpoint."""
    newest = find_newest_checkpoint(run_dir)
    steps = read_model_steps(run_dir / "model")
    return newest is not None and steps is not None and steps[1] == int(newest.name.removeprefix("step-"))
