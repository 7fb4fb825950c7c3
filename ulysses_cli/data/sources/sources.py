"""A data set of a recipe -> a source: what it holds, as a fingerprint, and its blocks.

Chooses between files, folders, hub data sets and generated documents; each is read in a file of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ulysses_cli.data.problems import BadRow, DataError, make_where
from ulysses_cli.data.sources import compressed_files as packed_files
from ulysses_cli.data.sources import files, folder, hub_sets, synthetic
from ulysses_cli.data.sources.blocks import Block, walk_rows
from ulysses_cli.data.sources.columns import Kind, detect_kind
from ulysses_cli.data.sources.fingerprint import FileHashes, hash_parts
from ulysses_cli.plan.files.regular_files import describe_special
from ulysses_cli.plan.nouns import format_count
from ulysses_cli.plan.problem import Problem, RecipeError, Where
from ulysses_cli.plan.recipe.recipe import Dataset
from ulysses_cli.plan.rules.files import is_local

KINDS: dict[str, Kind] = {
    "text": "text",
    "folder": "text",
    "synthetic": "text",
    "chat": "chat",
    "completion": "completion",
    "conversations": "conversations",
    "instruction": "instruction",
    "tokens": "tokens",
}


@dataclass(frozen=True)
class Source:
    """`key`: its place in the recipe. `fingerprint`: changes when its content does. `facts`: for the report."""

    name: str
    key: str
    fingerprint: str
    num_bytes: int | None
    walk_blocks: Callable[[], Iterator[Block]]
    kind: Kind | None
    has_lines: bool = True
    is_joined: bool = False
    facts: dict[str, Any] = field(default_factory=dict)

    def find_kind(self) -> Kind:
        """As written, or by the columns of the first row that can be read."""
        if self.kind is not None:
            return self.kind
        bad: list[Problem] = []
        for block in self.walk_blocks():
            for line, row in walk_rows(block):
                where = make_where(block.file, line, has_lines=self.has_lines)
                try:
                    if not isinstance(row, BadRow):
                        return detect_kind(row)
                    bad.append(Problem("", str(row), "", where))
                except BadRow as error:
                    hint = f"rename the columns, or write {self.key}.type"
                    raise DataError([Problem("", str(error), hint, where)]) from None
                if len(bad) >= 20:
                    raise DataError(bad)
        raise DataError(bad or [Problem("", "holds no row", f"see {self.key}", Where(self.name))])


def open_source(dataset: Dataset, key: str, seed: int, hashes: FileHashes, own: Sequence[Path] = ()) -> Source:
    """Looks at what is there and reads nothing but what the fingerprint needs. `own`: folders that runs write to, which
    are no data even inside of a tree."""
    kind = KINDS.get(dataset.type)
    if dataset.type == "synthetic":
        mark = hash_parts("synthetic", 1, seed, synthetic.NUM_DOCUMENTS)
        size = sum(block.num_bytes for block in synthetic.walk_blocks(seed))
        return Source("synthetic", key, mark, size, lambda: synthetic.walk_blocks(seed), kind, has_lines=False)
    path = Path(os.path.expanduser(dataset.path or "."))
    if dataset.type == "folder":
        return _open_folder(dataset, path, key, hashes, own)
    is_here = dataset.path is None or is_local(dataset.path)
    if not is_here or hub_sets.is_saved(path):
        found = hub_sets.load_hub_set(dataset, key)
        return Source(found.name, key, found.fingerprint, found.num_bytes, found.walk_blocks, kind, has_lines=False)
    return _open_files(dataset, path, key, kind, hashes, own)


def _open_files(
    dataset: Dataset, path: Path, key: str, kind: Kind | None, hashes: FileHashes, own: Sequence[Path]
) -> Source:
    try:
        listing = files.list_files(dataset.path, dataset.data_files, own)
    except OSError as error:
        raise RecipeError([Problem(f"{key}.path", f"{path} cannot be read: {error.strerror}")]) from None
    found = listing.files
    if special := describe_special(path).replace("a folder", ""):
        raise RecipeError([Problem(f"{key}.path", f"{path} is {special}, not a file", "write what it holds to a file")])
    if not found:
        hint = f"write type: folder for any tree of text files; data files end in {', '.join(files.ROWS + files.TEXTS)}"
        raise RecipeError([Problem(f"{key}.path", f"{path} holds no data file", hint)])
    marks = [_hash(file, key, hashes) for file in found]
    blank = [file for file in found if _is_blank(file)]
    listing.leave_out("empty file", blank)
    if len(blank) == len(found):
        what = f"holds no text: all of its {len(found):,} files are empty" if len(found) > 1 else "is empty"
        raise RecipeError([Problem(f"{key}.path", f"{path} {what}", "name another file or folder")])
    gone = set(blank)
    marks = [mark for file, mark in zip(found, marks, strict=True) if file not in gone]
    found = [file for file in found if file not in gone]
    size = sum(file.stat().st_size for file in found)
    is_packed = any(file.name.lower().endswith(packed_files.PACKED) for file in found)
    is_text = all(files.get_format(file) not in files.ROWS for file in found)
    return Source(
        str(path) if len(found) > 1 else str(found[0]),
        key,
        hash_parts("files", *((str(file), mark) for file, mark in zip(found, marks, strict=True))),
        None if is_packed else size,
        lambda: files.walk_blocks(found),
        kind or ("text" if is_text else None),
        has_lines=files.has_lines(found),
        facts={"num_files": len(found), "left_out": listing.left_out},
    )


def _is_blank(file: Path) -> bool:
    """A file that cannot be read is said to be so by its reader."""
    try:
        return files.is_blank(file)
    except Exception:  # noqa: BLE001 - each format's library has errors of its own
        return False


def _open_folder(dataset: Dataset, path: Path, key: str, hashes: FileHashes, own: Sequence[Path]) -> Source:
    try:
        tree = folder.walk_tree(path, own)
    except OSError as error:
        raise RecipeError([Problem(f"{key}.path", f"{path} cannot be read: {error.strerror}")]) from None
    if not tree.files:
        why = ", ".join(format_count(count, name) for name, count in tree.left_out.items()) or "it is empty"
        raise RecipeError([Problem(f"{key}.path", f"{path} holds no text file: {why}", "name another folder")])
    marks = [(name, _hash(path / name, key, hashes)) for name in tree.files]
    return Source(
        str(path),
        key,
        hash_parts("folder", str(path), dataset.join_files, *marks),
        sum((path / name).stat().st_size for name in tree.files),
        lambda: folder.walk_blocks(tree, is_joined=dataset.join_files),
        "text",
        is_joined=dataset.join_files,
        facts={
            "num_files": len(tree.files),
            "left_out": {why: {"count": n, "example": tree.examples[why]} for why, n in sorted(tree.left_out.items())},
        },
    )


def _hash(file: Path, key: str, hashes: FileHashes) -> str:
    try:
        return hashes.hash_file(file)
    except OSError as error:
        hint = "make it readable, or leave it out"
        raise RecipeError([Problem(f"{key}.path", f"{file} cannot be read: {error.strerror}", hint)]) from None
