"""Opens a data set of a recipe as a source: its fingerprint, its facts and its blocks. Reads hub data sets with the
datasets library, trees of files in a stable order without what .gitignore names, files, and generated documents:
short stories from a small grammar, the same for a seed, with log-normal lengths like those of real documents.  Next
to the tokenizer, the only code in data/ that uses the network, by the library's rules (HF_HUB_OFFLINE, HF_TOKEN)."""

from __future__ import annotations

import os
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from ulysses_cli.data.transaction import FileHashes, hash_parts
from ulysses_cli.plan.files import describe_special
from ulysses_cli.plan.problem import Problem, RecipeError, Where
from ulysses_cli.plan.recipe.sections import Dataset, RowType
from ulysses_cli.plan.rules.files import is_local
from ulysses_cli.plan.units import format_count
from ulysses_cli.readers import blocks, files
from ulysses_cli.readers.blocks import Block, drop_nulls, make_header
from ulysses_cli.readers.columns import SAME, Names
from ulysses_cli.readers.files import BOM
from ulysses_cli.readers.pairs import Origin, find_kind
from ulysses_cli.readers.problems import DataError

REACH_SECONDS = 10


@cache
def find_obstacle() -> str:
    """Why the hub cannot be asked; '' if it can. If it cannot, the libraries of this process go into offline mode."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE forbids downloads"
    try:
        get_session().head(constants.ENDPOINT, timeout=REACH_SECONDS)
    except Exception as error:  # noqa: BLE001 - the HTTP library is the hub library's choice
        constants.HF_HUB_OFFLINE = True
        return f"{constants.ENDPOINT} cannot be reached ({_describe(error)})"
    return ""


def explain_absence(key: str, what: str, obstacle: str, download: str) -> Problem:
    """`download`: the arguments of `hf download` on a machine with a network."""
    cause = "unset it" if obstacle.startswith("HF_HUB_OFFLINE") else "check the connection and its proxy"
    hint = f"{cause}; to work offline, run `hf download {download} --local-dir DIR` elsewhere, and name a copy of DIR"
    return Problem(key, f"{what} is not on this machine, and {obstacle}", hint)


def _describe(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__


ROWS_PER_BLOCK = 200


@dataclass(frozen=True)
class HubSet:
    """A loaded split. `rows` is a datasets.Dataset or IterableDataset."""

    name: str
    rows: Any
    fingerprint: str
    num_bytes: int | None

    def walk_blocks(self) -> Iterator[Block]:
        try:
            yield from self._walk()
        except OSError as error:
            hint = "check the connection and the library's cache, and run again"
            raise DataError([Problem("", f"cannot be read: {error}", hint, Where(self.name))]) from None

    def _walk(self) -> Iterator[Block]:
        first = 1
        for columns in self.rows.iter(batch_size=ROWS_PER_BLOCK):
            names = list(columns)
            count = len(columns[names[0]]) if names else 0
            rows = [(first + at, drop_nulls({name: columns[name][at] for name in names})) for at in range(count)]
            yield Block(self.name, "rows", rows, self._share(count))
            first += count

    def _share(self, count: int) -> int:
        return self.num_bytes * count // max(1, len(self.rows)) if self.num_bytes else 0


def is_saved(path: Path) -> bool:
    """A folder that Dataset.save_to_disk or DatasetDict.save_to_disk wrote."""
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()


def load_hub_set(dataset: Dataset, key: str) -> HubSet:
    """Raises RecipeError when there is no such data set, configuration or split."""
    path = str(dataset.path)
    local = Path(os.path.expanduser(path))
    obstacle = "" if is_saved(local) else find_obstacle()
    import datasets

    name = f"{path}{f' ({dataset.name})' if dataset.name else ''} [{dataset.split}]"
    try:
        if is_saved(local):
            saved = datasets.load_from_disk(str(local))
            rows = saved[dataset.split] if isinstance(saved, dict) else saved
            return HubSet(name, rows, hash_parts("saved", rows._fingerprint, len(rows)), rows.data.nbytes)
        files = [os.path.expanduser(file) for file in dataset.data_files or ()] or None
        builder = datasets.load_dataset_builder(path, dataset.name, data_files=files)
        parts = (path, dataset.name, dataset.split, builder.hash, builder.config_id, files)
        if dataset.streaming:
            rows = datasets.load_dataset(path, dataset.name, data_files=files, split=dataset.split, streaming=True)
            return HubSet(name, rows, hash_parts("stream", *parts), None)
        rows = datasets.load_dataset(path, dataset.name, data_files=files, split=dataset.split)
        return HubSet(name, rows, hash_parts("hub", *parts, len(rows)), rows.data.nbytes)
    except Exception as error:  # noqa: BLE001 - the library raises many kinds; the user needs a place and a remedy
        raise RecipeError([_explain(error, dataset, key, obstacle)]) from None


def _explain(error: Exception, dataset: Dataset, key: str, obstacle: str) -> Problem:
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    kind = type(error).__name__
    if "split" in reason.lower() and isinstance(error, ValueError | KeyError):
        return Problem(f"{key}.split", f"{dataset.path} has no split {dataset.split}: {reason}", "name one that it has")
    if isinstance(error, KeyError):
        return Problem(f"{key}.split", f"{dataset.path} has no split {dataset.split}", "name one that it has")
    if isinstance(error, ValueError) and "config" in reason.lower():
        return Problem(f"{key}.name", reason, "write the configuration as data.datasets.N.name")
    if obstacle and isinstance(error, OSError):
        return explain_absence(f"{key}.path", str(dataset.path), obstacle, f"{dataset.path} --repo-type dataset")
    if kind == "DatasetNotFoundError" or isinstance(error, FileNotFoundError):
        hint = "check the name; a private or gated one needs HF_TOKEN; a local file or folder must exist"
        return Problem(f"{key}.path", reason, hint)
    if isinstance(error, ConnectionError):
        hint = "check the connection, or copy the files here"
        return Problem(f"{key}.path", f"the hub cannot be reached for {dataset.path}: {reason}", hint)
    return Problem(f"{key}.path", f"{dataset.path} cannot be loaded: {kind}: {reason}", "try again, or copy the files")


PROBE_BYTES = 8192
Ignores = tuple[tuple[str, Any], ...]  # (folder with a trailing slash, its patterns), deepest last


@dataclass
class FolderTree:
    """The files of a tree. `left_out` counts the paths that are not read by reason; `examples` names one for each."""

    root: Path
    output_folders: frozenset[str] = frozenset()
    files: list[str] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def leave_out(self, reason: str, path: str) -> None:
        self.left_out[reason] += 1
        self.examples.setdefault(reason, path)


def walk_tree(root: Path, output_folders: Sequence[Path] = ()) -> FolderTree:
    """Lists the text files below the root. Paths have slashes and are sorted part by part, files and folders together.
    `output_folders`, which runs write to, are no data."""
    tree = FolderTree(root, frozenset(os.path.realpath(path) for path in output_folders))
    _walk(tree, "", _read_above(root))
    return tree


def _read_above(root: Path) -> Ignores:
    """The patterns of the repository that contains the root: .git/info/exclude, then each .gitignore between the
    repository's top and the root. Their "folder" begins with a slash: it is the path from that file down to the
    root."""
    here = Path(os.path.realpath(root))
    top = next((folder for folder in (here, *here.parents) if (folder / ".git").exists()), None)
    if top is None:
        return ()
    parts = here.relative_to(top).parts
    ignores: Ignores = _read_patterns(top / ".git" / "info" / "exclude", "/".join(("", *parts, "")))
    for depth in range(len(parts)):
        ignores += _read_patterns(top.joinpath(*parts[:depth]) / ".gitignore", "/".join(("", *parts[depth:], "")))
    return ignores


def _read_patterns(file: Path, folder: str) -> Ignores:
    from pathspec import GitIgnoreSpec

    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ()  # there is no such file
    return ((folder, GitIgnoreSpec.from_lines(filter(_is_pattern, lines))),)


def _walk(tree: FolderTree, folder: str, ignores: Ignores) -> None:
    here = tree.root / folder
    try:
        entries = sorted(os.scandir(here), key=lambda entry: os.fsencode(entry.name))
    except OSError as error:
        if not folder:
            raise
        tree.leave_out(f"folder that cannot be read ({error.strerror})", folder)
        return
    ignores += _read_patterns(here / ".gitignore", folder)
    for entry in entries:
        path = folder + entry.name
        is_folder = entry.is_dir(follow_symlinks=False)
        if entry.name == ".git":
            continue
        if not entry.name.isprintable() or not _is_utf8(entry.name):
            tree.leave_out("name that is no text", repr(path))
        elif is_ignored(f"{path}/" if is_folder else path, ignores):
            tree.leave_out("path ignored by .gitignore", path)
        elif entry.is_symlink():
            tree.leave_out("link", path)
        elif is_folder and os.path.realpath(tree.root / path) in tree.output_folders:
            tree.leave_out("folder that runs write to", path)
        elif is_folder:
            _walk(tree, path + "/", ignores)
        elif entry.is_file():
            _add_file(tree, path)
        else:
            tree.leave_out("special file", path)


def _is_utf8(name: str) -> bool:
    """False for a file name with bytes that are not UTF-8: os.scandir gives those as lone surrogates."""
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _is_pattern(line: str) -> bool:
    """Whether a line is a valid pattern. git skips invalid ones."""
    from pathspec import GitIgnoreSpec

    try:
        GitIgnoreSpec.from_lines([line])
    except ValueError:
        return False
    return True


def is_ignored(path: str, ignores: Ignores) -> bool:
    """The last pattern of the deepest .gitignore that matches the path itself decides. Patterns that match a folder
    above it do not count: an ignored folder is never entered, and a folder that is not ignored decides nothing about
    its content."""
    for folder, spec in reversed(ignores):
        below = folder[1:] + path if folder.startswith("/") else path[len(folder) :]
        for pattern in reversed(spec.patterns):
            if pattern.include is not None and _matches_itself(pattern.regex, below):
                return bool(pattern.include)
    return False


def _matches_itself(regex: re.Pattern[str], path: str) -> bool:
    """Whether a pattern matches the path itself, not a folder above it. The library's group ps_d matches the slash
    after a folder that the pattern names, even if the path continues below that folder. Patterns without the group,
    such as `a/**`, match only what is below the folder."""
    if "ps_d" not in regex.groupindex:
        return regex.search(path.rstrip("/")) is not None
    return any(match["ps_d"] is None or match.end() == len(path) for match in regex.finditer(path))


def _add_file(tree: FolderTree, path: str) -> None:
    try:
        with open(tree.root / path, "rb") as stream:
            start = stream.read(PROBE_BYTES)
    except OSError as error:
        tree.leave_out(f"file that cannot be read ({error.strerror})", path)
        return
    if not start.removeprefix(BOM).strip() and os.path.getsize(tree.root / path) <= PROBE_BYTES:
        tree.leave_out("empty file", path)
    elif b"\0" in start:
        tree.leave_out("binary file", path)
    else:
        tree.files.append(path)


def walk_blocks(tree: FolderTree, *, is_joined: bool) -> Iterator[Block]:
    """The whole tree as one block, or one block per file."""
    if is_joined:
        content = [(path, _read(tree.root / path)) for path in tree.files]
        if content:
            yield Block(str(tree.root), "tree", content, sum(len(data) for _, data in content))
        return
    for path in tree.files:
        data = _read(tree.root / path).removeprefix(BOM)
        header = make_header(path).encode()
        yield Block(str(tree.root / path), "text", header + data, len(data))


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise DataError([Problem("", f"cannot be read: {error.strerror}", "run again", Where(str(file)))]) from None


NUM_DOCUMENTS = 400
DOCUMENTS_PER_BLOCK = 100
MEDIAN_CHARS, SPREAD, MAX_CHARS = 700.0, 0.9, 16_000
NAMES = ("Ada", "Ben", "Cleo", "Dan")
THINGS = ("lamp", "drum", "kite", "boat")
PLACES = ("hill", "lake", "barn", "yard")
SENTENCES = (
    "{name} has the {thing} at the {place}.",
    "The {thing} of {name} is at the {place}.",
    "At the {place} {name} finds the {thing}.",
)


def walk_stories(seed: int) -> Iterator[Block]:
    for first in range(0, NUM_DOCUMENTS, DOCUMENTS_PER_BLOCK):
        numbers = range(first, first + DOCUMENTS_PER_BLOCK)
        rows = [(number + 1, {"text": make_document(seed, number)}) for number in numbers]
        size = sum(len(row["text"]) for _, row in rows)
        yield Block("synthetic", "rows", rows, size)


def make_document(seed: int, number: int) -> str:
    """A story that repeats one name, one thing and four places, so that earlier sentences predict later ones."""
    draw = random.Random(f"{seed}/{number}")
    length = min(MAX_CHARS, int(draw.lognormvariate(0.0, SPREAD) * MEDIAN_CHARS) + 40)
    name, thing = draw.choice(NAMES), draw.choice(THINGS)
    parts: list[str] = []
    size = 0
    while size < length:
        parts.append(draw.choice(SENTENCES).format(name=name, thing=thing, place=draw.choice(PLACES)))
        size += len(parts[-1]) + 1
    return " ".join(parts)


KINDS: dict[str, RowType] = {
    "text": "text",
    "folder": "text",
    "synthetic": "text",
    "chat": "chat",
    "completion": "completion",
    "answers": "answers",
    "conversations": "conversations",
    "instruction": "instruction",
    "tokens": "tokens",
    "preference": "preference",
    "unpaired": "unpaired",
}


@dataclass(frozen=True)
class Source:
    """`key` is its place in the recipe. `fingerprint` changes when its content changes. `facts` are for the report."""

    name: str
    key: str
    fingerprint: str
    num_bytes: int | None
    walk_blocks: Callable[[], Iterator[Block]]
    kind: RowType | None
    has_lines: bool = True
    is_joined: bool = False
    columns: Names = field(default_factory=lambda: SAME)
    train_field: str = "auto"
    variables: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def find_kind(self) -> RowType:
        """The kind that the recipe names, or the one that the columns of the first readable row show."""
        if self.kind is not None:
            return self.kind
        return find_kind(self.walk_blocks(), Origin(self.key, self.name, self.has_lines), self.columns)


def open_source(
    dataset: Dataset, key: str, seed: int, hashes: FileHashes, output_folders: Sequence[Path] = ()
) -> Source:
    """Lists the source's files, and reads only what the fingerprint needs. `output_folders`, which runs write to, are
    no data even if they are inside the source's folder."""
    opened = _open(dataset, key, seed, hashes, output_folders)
    variables = dataset.chat_template_kwargs
    return replace(opened, columns=dataset.columns, train_field=dataset.train_field, variables=variables)


def _open(dataset: Dataset, key: str, seed: int, hashes: FileHashes, output_folders: Sequence[Path]) -> Source:
    kind = KINDS.get(dataset.type)
    if dataset.type == "synthetic":
        fingerprint = hash_parts("synthetic", 1, seed, NUM_DOCUMENTS)
        size = sum(block.num_bytes for block in walk_stories(seed))
        return Source("synthetic", key, fingerprint, size, lambda: walk_stories(seed), kind, has_lines=False)
    path = Path(os.path.expanduser(dataset.path or "."))
    if dataset.type == "folder":
        return _open_folder(dataset, path, key, hashes, output_folders)
    is_on_disk = dataset.path is None or is_local(dataset.path)
    if not is_on_disk or is_saved(path):
        hub_set = load_hub_set(dataset, key)
        return Source(
            hub_set.name, key, hub_set.fingerprint, hub_set.num_bytes, hub_set.walk_blocks, kind, has_lines=False
        )
    return _open_files(dataset, path, key, kind, hashes, output_folders)


def _open_files(
    dataset: Dataset, path: Path, key: str, kind: RowType | None, hashes: FileHashes, output_folders: Sequence[Path]
) -> Source:
    try:
        listing = files.list_files(dataset.path, dataset.data_files, output_folders)
    except OSError as error:
        raise RecipeError([Problem(f"{key}.path", f"{path} cannot be read: {error.strerror}")]) from None
    paths = listing.files
    if special := describe_special(path).replace("a folder", ""):
        hint = "write its content to a file"
        raise RecipeError([Problem(f"{key}.path", f"{path} is {special}, not a file", hint)])
    if not paths:
        hint = f"write type: folder for any tree of text files; data files end in {', '.join(files.ROWS + files.TEXTS)}"
        raise RecipeError([Problem(f"{key}.path", f"{path} holds no data file", hint)])
    digests = {file: _hash(file, key, hashes) for file in paths}  # also raises for a file that cannot be read
    blank = [file for file in paths if _is_blank(file)]
    listing.leave_out("empty file", blank)
    if len(blank) == len(paths):
        what = f"holds no text: all of its {len(paths):,} files are empty" if len(paths) > 1 else "is empty"
        raise RecipeError([Problem(f"{key}.path", f"{path} {what}", "name another file or folder")])
    left_out = set(blank)
    paths = [file for file in paths if file not in left_out]
    size = sum(file.stat().st_size for file in paths)
    is_packed = any(file.name.lower().endswith(blocks.PACKED) for file in paths)
    is_text = all(files.get_format(file) not in files.ROWS for file in paths)
    return Source(
        str(path) if len(paths) > 1 else str(paths[0]),
        key,
        hash_parts("files", *((str(file), digests[file]) for file in paths)),
        None if is_packed else size,
        lambda: files.walk_blocks(paths),
        kind or ("text" if is_text else None),
        has_lines=files.has_lines(paths),
        facts={"num_files": len(paths), "left_out": listing.left_out},
    )


def _is_blank(file: Path) -> bool:
    """False for a file that cannot be read: its reader reports the error."""
    try:
        return files.is_blank(file)
    except Exception:  # noqa: BLE001 - each format's library has errors of its own
        return False


def _open_folder(dataset: Dataset, path: Path, key: str, hashes: FileHashes, output_folders: Sequence[Path]) -> Source:
    try:
        tree = walk_tree(path, output_folders)
    except OSError as error:
        raise RecipeError([Problem(f"{key}.path", f"{path} cannot be read: {error.strerror}")]) from None
    if not tree.files:
        reason = ", ".join(format_count(count, name) for name, count in tree.left_out.items()) or "it is empty"
        raise RecipeError([Problem(f"{key}.path", f"{path} holds no text file: {reason}", "name another folder")])
    digests = [(name, _hash(path / name, key, hashes)) for name in tree.files]
    return Source(
        str(path),
        key,
        hash_parts("folder", str(path), dataset.join_files, *digests),
        sum((path / name).stat().st_size for name in tree.files),
        lambda: walk_blocks(tree, is_joined=dataset.join_files),
        "text",
        is_joined=dataset.join_files,
        facts={
            "num_files": len(tree.files),
            "left_out": {
                name: {"count": n, "example": tree.examples[name]} for name, n in sorted(tree.left_out.items())
            },
        },
    )


def _hash(file: Path, key: str, hashes: FileHashes) -> str:
    try:
        return hashes.hash_file(file)
    except OSError as error:
        hint = "make it readable, or leave it out"
        raise RecipeError([Problem(f"{key}.path", f"{file} cannot be read: {error.strerror}", hint)]) from None
