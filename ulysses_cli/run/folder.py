"""Takes a run's folder for a new run: locks it, refuses a second run with the differences of their recipes, and sets
the results of an earlier run aside while the new one trains, then restores or deletes them."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ulysses_cli.plan.files import HINT_WHILE_LIVE, find_foreign_link, open_own, remove_own, take_lock
from ulysses_cli.plan.problem import Problem, RecipeError
from ulysses_cli.plan.recipe.changes import list_differences, shorten_list
from ulysses_cli.plan.secrets import collect_secrets, mask_secrets
from ulysses_cli.run.checkpoints import EVALUATIONS, get_step, list_checkpoints, read_model_steps
from ulysses_cli.run.environments import refuse
from ulysses_cli.run.host import narrow_umask
from ulysses_cli.run.records import NOTIFICATIONS, read_json


@dataclass(frozen=True)
class NewLock:
    """The lock file, open, and locked where its file system has locks. The ranks hold a lock on the same file:
    run/lock.py."""

    file: Path
    handle: int
    is_locked: bool = True


def lock_run(run_dir: Path, node_rank: int, recipe: Mapping[str, Any] | None = None) -> NewLock:
    """`recipe` is written into the lock file, so that a second run can name the differences."""
    file = run_dir / f"lock-{node_rank}"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        if foreign := find_foreign_link(run_dir):
            raise OSError(errno.EINVAL, f"{foreign.name} is a link that another user has made")
        handle = open_own(file, os.O_RDWR | os.O_CREAT, 0o666 & ~narrow_umask(run_dir))
        if link := next((log for log in sorted((run_dir / "logs").glob("*")) if log.is_symlink()), None):
            os.close(handle)
            raise OSError(errno.EINVAL, f"logs/{link.name} is a link, not a file")
    except OSError as error:
        problem = Problem("run.output_dir", f"{run_dir} cannot be written: {error.strerror}", "choose another folder")
        raise RecipeError([problem]) from None
    try:
        is_locked = take_lock(handle)
        facts = {"process": os.getpid(), "host": socket.gethostname(), "started": time.time(), "recipe": recipe}
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(mask_secrets(facts, known=collect_secrets(recipe, os.environ))).encode(), 0)
        take_lock(handle, shares=True)
    except BlockingIOError:
        os.close(handle)
        raise RecipeError([_describe_live_run(run_dir, read_json(file), recipe)]) from None
    return NewLock(file, handle, is_locked)


def _describe_live_run(run_dir: Path, facts: Any, recipe: Mapping[str, Any] | None) -> Problem:
    """Who holds the folder, and where the new recipe differs from that run's recipe."""
    message = f"{run_dir} is in use by a run that is still going on"
    hint = HINT_WHILE_LIVE
    if not isinstance(facts, dict) or not isinstance(facts.get("started"), float):
        return Problem("run.output_dir", message, hint)
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(facts["started"]))
    message += f" (process {facts.get('process')} on {facts.get('host')}, since {since})"
    details: tuple[str, ...] = ()
    if isinstance(facts.get("recipe"), dict) and recipe is not None:
        differs = list_differences(facts["recipe"], mask_secrets(recipe, known=collect_secrets(recipe, os.environ)))
        message += "; this recipe differs from its recipe in:" if differs else "; its recipe is the same"
        details = shorten_list(differs)
    return Problem("run.output_dir", message, hint, details=details)


RESULTS = ("checkpoints", "model")
RECORDS = (
    "metrics.jsonl",
    "eval.jsonl",
    "samples.jsonl",
    "quality.jsonl",
    "short_check.jsonl",
    NOTIFICATIONS,
    "run.json",
    EVALUATIONS,
)
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


def is_model_of_newest(run_dir: Path) -> bool:
    """Whether the run's model was made from its last checkpoint."""
    newest, steps = next(iter(list_checkpoints(run_dir)), None), read_model_steps(run_dir / "model")
    return newest is not None and steps is not None and steps[1] == get_step(newest)
