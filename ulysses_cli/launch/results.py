"""What an earlier run left in the folder: looked for, set aside while a new run trains, put back or dropped."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from ulysses_cli.launch.nodes import refuse
from ulysses_cli.plan.problem import Problem, RecipeError
from ulysses_cli.run_folder.manifest import read_model_step

RESULTS = ("checkpoints", "model")
RECORDS = ("metrics.jsonl", "eval.jsonl", "run.json")
REPLACED = "replaced"


def check_run_dir(run_dir: Path, inputs: Sequence[str], *, overwrite: bool) -> None:
    """A run that starts anew finds no older one's results in its folder, and deletes nothing unless told to."""
    for name in RESULTS:
        folder = run_dir / name
        inside = [path for path in inputs if Path(os.path.expanduser(path)).resolve().is_relative_to(folder.resolve())]
        if inside:
            raise refuse(f"{inside[0]} lies in {folder}, where this run writes", "choose another run.output_dir")
        if not overwrite and folder.is_dir() and any(folder.iterdir()):
            problem = Problem(
                "run.output_dir",
                f"{folder} holds the results of an earlier run",
                "go on with --resume auto, choose another run.output_dir, or replace them with --overwrite",
            )
            raise RecipeError([problem])


def set_results_aside(run_dir: Path) -> Path | None:
    """What an earlier run left is kept until the new one has a model: a run that fails at its first step has then
    destroyed nothing. -> where it is kept, None when there was nothing."""
    shutil.rmtree(run_dir / "rehearsal", ignore_errors=True)
    there = [run_dir / name for name in (*RESULTS, *RECORDS) if (run_dir / name).exists()]
    if not any(path.is_dir() and any(path.iterdir()) for path in there):
        return None
    aside = next(path for at in itertools.count(1) if not (path := run_dir / REPLACED / str(at)).exists())
    aside.mkdir(parents=True)
    for path in there:
        path.rename(aside / path.name)
    return aside


def restore_results(run_dir: Path, aside: Path) -> bool:
    """After a run that failed: put an earlier run's results back, unless the new one has left some of its own."""
    if any((run_dir / name).is_dir() and any((run_dir / name).iterdir()) for name in RESULTS):
        return False
    for path in aside.iterdir():
        mine = run_dir / path.name
        shutil.rmtree(mine) if mine.is_dir() else mine.unlink(missing_ok=True)
        path.rename(mine)
    aside.rmdir()
    return True


def drop_replaced_results(run_dir: Path) -> None:
    """The new run's model stands."""
    shutil.rmtree(run_dir / REPLACED, ignore_errors=True)


def find_newest_checkpoint(run_dir: Path) -> Path | None:
    """By name: what is in it, the ranks judge."""
    found = [path for path in run_dir.glob("checkpoints/step-*") if path.name.removeprefix("step-").isdecimal()]
    return max(found, key=lambda path: int(path.name.removeprefix("step-")), default=None)


def is_model_of_newest(run_dir: Path) -> bool:
    """The run's last checkpoint has become its model."""
    newest = find_newest_checkpoint(run_dir)
    return newest is not None and read_model_step(run_dir / "model") == int(newest.name.removeprefix("step-"))
