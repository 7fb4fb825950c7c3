"""Downloads what a run or an evaluation needs before ranks start: models, data and the checkpoint to resume from, from
remote disks; the files of a benchmark, from the hub, once. Unpacks archives next to this tool's other downloads."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

from ulysses_cli.plan.files import ADDRESS_CACHE, ROW_SUFFIXES, SCHEMES, find_address, get_scheme, list_row_files
from ulysses_cli.plan.problem import Problem, RecipeError
from ulysses_cli.plan.recipe.loader import Loaded, load_recipe
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.plan.secrets import collect_secrets, mask_text
from ulysses_cli.readers.blocks import Expansion
from ulysses_cli.readers.problems import DataError
from ulysses_cli.run.bucket import Bucket, BucketError, each, watch_download
from ulysses_cli.run.checkpoints import CheckpointError
from ulysses_cli.run.remote_checkpoints import bring_newest

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


OPTION = "--path"
NAME = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")


def find_suite_path(path: str, report: Callable[[str], None]) -> Path:
    """`path`: a file or folder, or owner/name of a data set on the hub, with @REVISION if wanted. Raises
    RecipeError."""
    local = Path(path).expanduser()
    found = NAME.fullmatch(path)
    if local.exists() or found is None or local.suffix in ROW_SUFFIXES:
        return local  # what is missing is said by its reader
    report(f"reading the data set {path} of the hub")
    folder = _download_suite(found["name"], found["revision"])
    if list_row_files(folder):
        return folder
    archives = sorted(folder.rglob("*.zip"))
    if not archives:
        hint = "name a data set that holds JSON, JSON lines or Parquet, or download its files and name their folder"
        raise RecipeError([Problem(OPTION, f"the data set {path} holds no file of rows", hint)])
    cache = Path(ADDRESS_CACHE).expanduser()
    target = cache / "unpacked" / f"{found['name'].replace('/', '--')}-{folder.name}"
    for archive in archives:
        _unpack(archive, target / archive.relative_to(folder), cache / "unpacking")
    return target


def _download_suite(name: str, revision: str | None) -> Path:
    """The folder of a data set's files in the hub's cache, which serves also where the hub cannot be reached."""
    from huggingface_hub import errors, snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    try:
        folder = snapshot_download(
            name,
            repo_type="dataset",
            revision=revision,
            allow_patterns=[f"*{suffix}" for suffix in (*ROW_SUFFIXES, ".zip")],
            endpoint=os.environ.get("HF_ENDPOINT") or None,
        )
        return Path(folder)
    except errors.GatedRepoError:
        hint = "accept its terms on the hub, and set HF_TOKEN"
        message = f"the data set {name} asks to accept its terms first"
    except errors.RevisionNotFoundError:
        message, hint = f"the data set {name} has no revision {revision}", "name a branch, a tag or a commit of it"
    except errors.RepositoryNotFoundError:
        hint = "check the name; a private one needs HF_TOKEN; a local file or folder must exist"
        message = f"neither this machine nor the hub has {name}"
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = mask_text(str(error).strip().splitlines()[0], collect_secrets({}, os.environ))
        message = f"the data set {name} cannot be read from the hub: {reason}"
        hint = "check the connection and HF_HUB_OFFLINE, or download its files and name their folder"
    raise RecipeError([Problem(OPTION, message, hint)]) from None


def _unpack(archive: Path, target: Path, scratch: Path) -> None:
    """Unpacks the files of rows, once: the folder appears under the archive's name when it is complete. Before that its
    files are in a folder of `scratch`, which no evaluation reads."""
    if target.is_dir():
        return
    try:
        scratch.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=scratch) as place, zipfile.ZipFile(archive) as opened:
            part = Path(place) / target.name
            members = [member for member in opened.infolist() if member.filename.endswith(ROW_SUFFIXES)]
            Expansion(archive).check(sum(member.file_size for member in members))
            for member in (
                members
            ):  # no more bytes than its size says, and never outside of its folder: extract drops `..` and roots
                opened.extract(member, part / archive.stem)
            if not members:
                raise ValueError("it holds no file of rows")
            target.parent.mkdir(parents=True, exist_ok=True)
            part.replace(target)
    except DataError as error:
        (problem,) = error.problems
        raise RecipeError([Problem(OPTION, f"{archive} {problem.message}", problem.hint)]) from None
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        if target.is_dir():
            return  # another process was faster
        raise RecipeError([Problem(OPTION, f"{archive} cannot be unpacked: {error}", "download it again")]) from None
