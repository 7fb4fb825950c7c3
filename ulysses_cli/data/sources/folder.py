"""Reads a tree of files, such as a code repository, as blocks: in a stable order, each file under its path.

Leaves out what .gitignore names, as git does. Does not follow links. Counts the files that are not text.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ulysses_cli.plan.problem import Problem, Where
from ulysses_cli.readers.blocks import Block, make_header
from ulysses_cli.readers.files import BOM
from ulysses_cli.readers.problems import DataError

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
        elif is_ignored(path + "/" * is_folder, ignores):
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
