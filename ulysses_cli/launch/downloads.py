"""Downloads what a run needs from remote disks before its ranks start: models, data, the checkpoint to resume from."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

from ulysses_cli.plan.files.addresses import SCHEMES, find_address, get_scheme
from ulysses_cli.plan.problem import Problem, RecipeError
from ulysses_cli.plan.recipe.loader import Loaded, load_recipe
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.run_folder.archive import CheckpointError
from ulysses_cli.run_folder.bucket import Bucket, BucketError, each
from ulysses_cli.run_folder.remote_archive import bring_newest
from ulysses_cli.run_folder.transfers import watch_download

Report = Callable[[str], None]


def explain_access(address: str) -> str:
    """A hint for an address that does not answer as it should."""
    credentials = SCHEMES[get_scheme(address)].credentials
    hint = "check the address, the network and your rights"
    return f"{hint}; keys are read from the environment: {credentials}" if credentials else hint


def find_missing_package(key: str, address: str) -> Problem | None:
    scheme = SCHEMES[get_scheme(address)]
    if find_spec(scheme.package) is not None:
        return None
    return Problem(key, f"{scheme.package} is not installed", f"pip install ulysses-cli[{scheme.extra}]")


def bring_checkpoint(loaded: Loaded, run_dir: Path, report: Report) -> None:
    """On the first machine, for --resume auto: a checkpoint in run.checkpoint_uri that is newer than the newest valid
    one in the run folder is downloaded there."""
    address, key = loaded.recipe.run.checkpoint_uri, "run.checkpoint_uri"
    if address is None:
        return
    if (problem := find_missing_package(key, address)) is None:
        try:
            bring_newest(Bucket(address), run_dir, report)
            return
        except (BucketError, CheckpointError, OSError) as error:
            problem = Problem(key, f"no checkpoint could be downloaded: {error}", explain_access(address))
    raise RecipeError([replace(problem, where=loaded.locate(key))])


def bring_inputs(file: str, overrides: Sequence[str], report: Report) -> None:
    """Downloads models and data that the recipe names by an address, unless their copies are there. A recipe that
    cannot be read is left to those who check it."""
    try:
        loaded = load_recipe(file, overrides)
    except RecipeError:
        return
    problems = []
    for key, path in _list_copies(loaded.recipe):
        address, copy = find_address(path), Path(os.path.expanduser(path))
        if copy.exists():
            continue
        if (problem := find_missing_package(key, address)) is None:
            report(f"downloading {address} to {copy}")
            try:
                _download(address, copy, report)
                continue
            except (BucketError, OSError) as error:
                problem = Problem(key, f"{address} could not be downloaded: {error}", explain_access(address))
        problems.append(replace(problem, where=loaded.locate(key)))
    if problems:
        raise RecipeError(problems)


def _list_copies(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yields keys of the recipe with the path of a copy."""
    named = [("model.name_or_path", recipe.model.name_or_path), ("model.tokenizer", recipe.model.tokenizer)]
    for section, datasets in (("datasets", recipe.data.datasets), ("eval_datasets", recipe.data.eval_datasets)):
        named += [(f"data.{section}.{at}.path", dataset.path) for at, dataset in enumerate(datasets)]
    yield from ((key, path) for key, path in named if path is not None and find_address(path))


def _download(address: str, copy: Path, report: Report) -> None:
    """The copy has its name when it is complete."""
    part = copy.with_name(f".{copy.name}.{os.getpid()}.part")
    part.parent.mkdir(parents=True, exist_ok=True)
    try:
        bucket = Bucket(address)
        if bucket.is_object():
            with watch_download(address, part, bucket.get_size(""), report):
                bucket.get_file("", part)
        else:
            names = bucket.list_sizes("")
            if not names:
                raise FileNotFoundError("there is nothing")
            if outside := [name for name in names if PurePosixPath(name).is_absolute() or ".." in name.split("/")]:
                raise OSError(f"{outside[0]} leads out of the folder")

            def fetch(name: str) -> None:
                (part / name).parent.mkdir(parents=True, exist_ok=True)
                bucket.get_file(name, part / name)

            with watch_download(address, part, sum(names.values()), report):
                each(fetch, sorted(names))
        if not copy.exists():  # another process may have been faster
            os.replace(part, copy)
    finally:
        shutil.rmtree(part, ignore_errors=True) if part.is_dir() else part.unlink(missing_ok=True)
