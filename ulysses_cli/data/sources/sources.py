"""Opens a data set of a recipe as a source: its fingerprint, its facts and its blocks.

Chooses between files, folders, hub data sets and generated documents. Each of these has a module of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ulysses_cli.data.sources import folder, hub_sets, synthetic
from ulysses_cli.data.sources.fingerprint import FileHashes, hash_parts
from ulysses_cli.plan.files.regular_files import describe_special
from ulysses_cli.plan.nouns import format_count
from ulysses_cli.plan.problem import Problem, RecipeError
from ulysses_cli.plan.recipe.data_section import Dataset, RowType
from ulysses_cli.plan.rules.files import is_local
from ulysses_cli.readers import compressed_files, files
from ulysses_cli.readers.blocks import Block
from ulysses_cli.readers.columns import SAME, Names
from ulysses_cli.readers.first_rows import Origin, find_kind

KINDS: dict[str, RowType] = {
    "text": "text",
    "folder": "text",
    "synthetic": "text",
    "chat": "chat",
    "completion": "completion",
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
        fingerprint = hash_parts("synthetic", 1, seed, synthetic.NUM_DOCUMENTS)
        size = sum(block.num_bytes for block in synthetic.walk_blocks(seed))
        return Source("synthetic", key, fingerprint, size, lambda: synthetic.walk_blocks(seed), kind, has_lines=False)
    path = Path(os.path.expanduser(dataset.path or "."))
    if dataset.type == "folder":
        return _open_folder(dataset, path, key, hashes, output_folders)
    is_on_disk = dataset.path is None or is_local(dataset.path)
    if not is_on_disk or hub_sets.is_saved(path):
        hub_set = hub_sets.load_hub_set(dataset, key)
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
    is_packed = any(file.name.lower().endswith(compressed_files.PACKED) for file in paths)
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
        tree = folder.walk_tree(path, output_folders)
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
        lambda: folder.walk_blocks(tree, is_joined=dataset.join_files),
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
