"""Locks a run's folder at the start. A second run in the folder is refused, with the differences of their recipes."""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ulysses_cli.host.children import narrow_umask
from ulysses_cli.plan.files.locks import HINT_WHILE_LIVE, take_lock
from ulysses_cli.plan.files.regular_files import find_foreign_link, open_own
from ulysses_cli.plan.problem import Problem, RecipeError
from ulysses_cli.plan.recipe.changes import list_differences, shorten_list
from ulysses_cli.plan.secrets import collect_secrets, mask_secrets
from ulysses_cli.run_folder.failure_record import read_json


@dataclass(frozen=True)
class NewLock:
    """The lock file, open, and locked where its file system has locks. The ranks hold a lock on the same file:
    run_folder/run_lock.py."""

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
