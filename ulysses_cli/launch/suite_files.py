"""Finds the files of a benchmark: a path on this machine, or a data set of the hub, which is downloaded once into the
hub's cache. Archives are unpacked next to this tool's other downloads.
"""

from __future__ import annotations

import os
import re
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from ulysses_cli.plan.files.addresses import CACHE
from ulysses_cli.plan.files.row_files import ROWS, list_row_files
from ulysses_cli.plan.problem import Problem, RecipeError
from ulysses_cli.plan.secrets import collect_secrets, mask_text
from ulysses_cli.readers.expansion import Expansion
from ulysses_cli.readers.problems import DataError

OPTION = "--path"
NAME = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")


def find_suite_path(path: str, report: Callable[[str], None]) -> Path:
    """`path`: a file or folder, or owner/name of a data set on the hub, with @REVISION if wanted. Raises
    RecipeError."""
    local = Path(path).expanduser()
    found = NAME.fullmatch(path)
    if local.exists() or found is None or local.suffix in ROWS:
        return local  # what is missing is said by its reader
    report(f"reading the data set {path} of the hub")
    folder = _download(found["name"], found["revision"])
    if list_row_files(folder):
        return folder
    archives = sorted(folder.rglob("*.zip"))
    if not archives:
        hint = "name a data set that holds JSON, JSON lines or Parquet, or download its files and name their folder"
        raise RecipeError([Problem(OPTION, f"the data set {path} holds no file of rows", hint)])
    cache = Path(CACHE).expanduser()
    target = cache / "unpacked" / f"{found['name'].replace('/', '--')}-{folder.name}"
    for archive in archives:
        _unpack(archive, target / archive.relative_to(folder), cache / "unpacking")
    return target


def _download(name: str, revision: str | None) -> Path:
    """The folder of a data set's files in the hub's cache, which serves also where the hub cannot be reached."""
    from huggingface_hub import errors, snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    try:
        folder = snapshot_download(
            name,
            repo_type="dataset",
            revision=revision,
            allow_patterns=[f"*{suffix}" for suffix in (*ROWS, ".zip")],
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
            members = [member for member in opened.infolist() if member.filename.endswith(ROWS)]
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
