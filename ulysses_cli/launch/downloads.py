"""Downloads what a run needs from remote disks before its ranks start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ulysses_cli.plan.problem import Problem, RecipeError
from ulysses_cli.plan.recipe.loader import Loaded
from ulysses_cli.run_folder.archive import CheckpointError
from ulysses_cli.run_folder.bucket import Bucket, BucketError
from ulysses_cli.run_folder.remote_archive import bring_newest


def bring_checkpoint(loaded: Loaded, run_dir: Path, report: Callable[[str], None]) -> None:
    """On the first machine, for --resume auto: a checkpoint in run.checkpoint_uri that is newer than the newest valid
    one in the run folder is downloaded there."""
    address, key = loaded.recipe.run.checkpoint_uri, "run.checkpoint_uri"
    if address is None:
        return
    try:
        bring_newest(Bucket(address), run_dir, report)
    except (BucketError, CheckpointError, OSError, ImportError) as error:
        hint = "check the address, the network and your rights; without the address, --resume auto looks in output_dir"
        problem = Problem(key, f"no checkpoint could be downloaded: {error}", hint)
        raise RecipeError([replace(problem, where=loaded.locate(key))]) from error
