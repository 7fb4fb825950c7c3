"""Compares what commands print for programs with docs/json.md, which names every field."""

import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from support.paths import ROOT

Field = tuple[str, ...]


def find_undocumented(section: str, answer: Any) -> list[str]:
    """Fields of an answer that the section does not name."""
    known = list_fields(section)
    return sorted({".".join(path) for path, ends in _walk(answer) if not any(_is(f, path, ends) for f in known)})


def find_unused(section: str, answers: Sequence[Any]) -> list[str]:
    """Fields of the section that no answer has, nor might have where it has null or an empty list."""
    seen = {found for answer in answers for found in _walk(answer)}
    return [".".join(f) for f in list_fields(section) if not any(_is(f, path, ends) for path, ends in seen)]


@cache
def list_fields(section: str) -> list[Field]:
    """Of a heading of the page, with the fields of the parts that its tables refer to."""
    page = (ROOT / "docs" / "json.md").read_text()
    sections = dict(re.findall(r"^##+ (.+)\n((?:(?!##).*\n)*)", page, flags=re.MULTILINE))
    parts = {head.lower().replace(" ", "-"): text for head, text in sections.items()}
    return list(_read_tables(next(text for head, text in sections.items() if section in head.split(", ")), parts))


def _read_tables(text: str, parts: dict[str, str]) -> Iterator[Field]:
    for cell, meaning in re.findall(r"^\| (`.*?) \| (.*) \|$", text, flags=re.MULTILINE):
        part = re.search(r"^\[.*?\]\(#([\w-]+)\)", meaning)
        inner = list(_read_tables(parts[part[1]], parts)) if part else [()]
        for name in re.findall(r"`([^`]+)`", cell):
            field = tuple(name.replace("[]", ".[]").lstrip(".").split("."))
            yield from ((*field, *more) for more in inner)


def _walk(value: Any, path: Field = ()) -> Iterator[tuple[Field, bool]]:
    """The path of each value, and whether one is there: not null, and nothing empty."""
    listed = [("[]", each) for each in value] if isinstance(value, list) else []
    inner = list(value.items()) if isinstance(value, dict) else listed
    for name, each in inner:
        yield from _walk(each, (*path, name))
    if not inner:
        yield path, value is not None and not isinstance(value, dict | list)


def _is(field: Field, path: Field, is_there: bool) -> bool:
    """`<name>` stands for any key, `*` for all that is below. What is missing may be any field that begins so."""
    if not is_there:
        field = field[: len(path)]
    elif "*" in field:
        field, path = field[:-1], path[: len(field) - 1]
    same = all(name in (other, "*") or name.startswith("<") for name, other in zip(field, path, strict=False))
    return same and (len(field) == len(path) or field[-1:] == ("*",))
