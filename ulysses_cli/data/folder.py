"""A tree of files, such as a code repository -> blocks: in a stable order, each file under its path.

What .gitignore names is left out, as git would; links are not followed; what is no text is counted.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ulysses_cli.data.blocks import Block, make_header
from ulysses_cli.data.files import BOM
from ulysses_cli.data.problems import DataError
from ulysses_cli.plan.problem import Problem, Where

PROBE_BYTES = 8192
Ignores = tuple[tuple[str, Any], ...]  # (folder with a slash behind, its .gitignore), deepest last


@dataclass
class Tree:
    """The files of a tree, and how many were left out and why."""

    root: Path
    files: list[str] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def leave_out(self, why: str, path: str) -> None:
        self.left_out[why] += 1
        self.examples.setdefault(why, path)


def walk_tree(root: Path) -> Tree:
    """Paths below the root, with slashes, sorted part by part; folders and files of one folder in one order."""
    tree = Tree(root)
    _walk(tree, "", ())
    return tree


def _walk(tree: Tree, folder: str, ignores: Ignores) -> None:
    from pathspec import GitIgnoreSpec

    here = tree.root / folder
    try:
        entries = sorted(os.scandir(here), key=lambda entry: os.fsencode(entry.name))
    except OSError as error:
        if not folder:
            raise
        tree.leave_out(f"folders that cannot be read ({error.strerror})", folder)
        return
    try:
        lines = (here / ".gitignore").read_text(encoding="utf-8", errors="replace").splitlines()
        ignores = (*ignores, (folder, GitIgnoreSpec.from_lines(filter(_is_pattern, lines))))
    except OSError:
        pass  # none here
    for entry in entries:
        path = folder + entry.name
        is_folder = entry.is_dir(follow_symlinks=False)
        if entry.name == ".git":
            continue
        if not entry.name.isprintable() or _has_no_letters(entry.name):
            tree.leave_out("names that are no text", repr(path))
        elif is_ignored(path + "/" * is_folder, ignores):
            tree.leave_out("ignored by .gitignore", path)
        elif entry.is_symlink():
            tree.leave_out("links", path)
        elif is_folder:
            _walk(tree, path + "/", ignores)
        elif entry.is_file():
            _add_file(tree, path)
        else:
            tree.leave_out("neither files nor folders", path)


def _has_no_letters(name: str) -> bool:
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


def _is_pattern(line: str) -> bool:
    """git passes over what it cannot read as a pattern."""
    from pathspec import GitIgnoreSpec

    try:
        GitIgnoreSpec.from_lines([line])
    except ValueError:
        return False
    return True


def is_ignored(path: str, ignores: Ignores) -> bool:
    """The deepest .gitignore that speaks of a path decides."""
    for folder, spec in reversed(ignores):
        verdict = spec.check_file(path[len(folder) :]).include
        if verdict is not None:
            return bool(verdict)
    return False


def _add_file(tree: Tree, path: str) -> None:
    try:
        with open(tree.root / path, "rb") as stream:
            start = stream.read(PROBE_BYTES)
    except OSError as error:
        tree.leave_out(f"files that cannot be read ({error.strerror})", path)
        return
    if not start.removeprefix(BOM).strip() and os.path.getsize(tree.root / path) <= PROBE_BYTES:
        tree.leave_out("empty files", path)
    elif b"\0" in start:
        tree.leave_out("binary files", path)
    else:
        tree.files.append(path)


def walk_blocks(tree: Tree, *, is_joined: bool) -> Iterator[Block]:
    """The whole tree in one block, or one for each file."""
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
