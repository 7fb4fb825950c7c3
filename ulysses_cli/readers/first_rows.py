"""Looks at the first rows of a source: which kind their columns show, and whether rows of that kind can be read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ulysses_cli.plan.problem import Problem, RecipeError, Where
from ulysses_cli.plan.recipe.data_section import COLUMNS, OPTIONAL, RowType
from ulysses_cli.plan.rules.files import CHAT_TYPES
from ulysses_cli.readers.blocks import Block, walk_rows
from ulysses_cli.readers.columns import SAME, Names, Row, detect_kind, rename
from ulysses_cli.readers.pairs import read_row
from ulysses_cli.readers.problems import MAX_SHOWN, SOURCE, BadRow, DataError, explain_bad_rows, make_where


@dataclass(frozen=True)
class Origin:
    """Where rows come from, for messages: the source's key in the recipe, its name, and how its rows are numbered."""

    key: str
    name: str
    has_lines: bool = True


def find_kind(blocks: Iterable[Block], origin: Origin, names: Names = SAME) -> RowType:
    """The kind that the columns of the first readable row show. Raises DataError, and RecipeError for a
    column that the recipe names in vain."""
    bad: list[tuple[str, int, str]] = []
    for file, line, row in _walk(blocks):
        if not isinstance(row, BadRow):
            return _detect(row, names, origin, make_where(file, line, has_lines=origin.has_lines))
        bad.append((file, line, str(row)))
        if len(bad) >= MAX_SHOWN:
            otherwise = f"write {origin.key}.type: no row so far shows what the columns are"
            raise DataError(explain_bad_rows(bad, len(bad), otherwise, has_lines=origin.has_lines))
    otherwise = f"name another file in {origin.key}.path"
    if bad:
        otherwise += ", as no row of this one can be used"
        raise DataError(explain_bad_rows(bad, len(bad), otherwise, has_lines=origin.has_lines))
    raise DataError([Problem("", "holds no row", otherwise, Where(origin.name))])


def _walk(blocks: Iterable[Block]) -> Iterator[tuple[str, int, Row | BadRow]]:
    for block in blocks:
        yield from ((block.file, line, row) for line, row in walk_rows(block))


def _detect(row: Row, names: Names, origin: Origin, where: Where) -> RowType:
    try:
        kind = detect_kind(row, names)
    except BadRow as error:
        hint = f"rename the columns, name them in {origin.key}.columns, or write {origin.key}.type"
        raise DataError([Problem("", str(error), hint, where)]) from None
    if kind in CHAT_TYPES and rename(row, names).get("text"):
        message = f"a row holds a chat in `{names.get(COLUMNS[kind][0], COLUMNS[kind][0])}`, and `text` beside it"
        hint = f"write {origin.key}.type: {kind} for the chat, or {origin.key}.type: text"
        raise DataError([Problem("", message, hint, where)])
    used = (*COLUMNS[kind], *OPTIONAL[kind])
    if unused := [name for name in names if name not in used]:
        message = f"is not used: the columns show rows of type {kind}, which have {', '.join(used)}"
        hint = f"leave it out, or write {origin.key}.type"
        raise RecipeError([Problem(f"{origin.key}.columns.{unused[0]}", message, hint)])
    return kind


def explain_absent(names: Names, absent: Iterable[str], columns: str, key: str) -> list[Problem]:
    """`absent`: those of `names` whose column no row has. `columns`: those that there are."""
    hint = f"name one of these, or leave it out: {columns}"
    return [Problem(f"{key}.columns.{name}", f"no row has a column `{names[name]}`", hint) for name in absent]


def read_first_rows(blocks: Iterator[Block], kind: RowType, origin: Origin) -> tuple[int, bool]:
    """Reads the rows of the first block that holds any. Returns their number, and whether there are more. Raises
    DataError for those that cannot be used."""
    for block in blocks:
        num_rows, bad, remedies = 0, list[tuple[str, int, str]](), dict[str, None]()
        for line, row in walk_rows(block):
            num_rows += 1
            try:
                if isinstance(row, BadRow):
                    raise row
                read_row(kind, row)
            except BadRow as error:
                bad.append((block.file, line, str(error)))
                remedies |= dict.fromkeys([error.remedy.replace(SOURCE, origin.key)] if error.remedy else [])
        if bad:
            otherwise = "set data.on_bad_row: skip to leave them out and count them"
            raise DataError(explain_bad_rows(bad, len(bad), otherwise, remedies, has_lines=origin.has_lines))
        if num_rows:
            return num_rows, next(_walk(blocks), None) is not None
    return 0, False
