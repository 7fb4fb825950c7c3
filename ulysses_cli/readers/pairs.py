"""Turns a row into two answers to one prompt, or into one answer and whether it is wanted, and looks at a source's
first rows: which kind their columns show, and whether rows of that kind can be read.

Where the prompt of texts ends is not guessed here: tokens decide (data/tokenizing/workers.py)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ulysses_cli.plan.problem import Problem, RecipeError, Where
from ulysses_cli.plan.recipe.sections import COLUMNS, OPTIONAL, RowType
from ulysses_cli.plan.rules.files import CHAT_TYPES
from ulysses_cli.plan.units import format_count
from ulysses_cli.readers.blocks import Block, walk_rows
from ulysses_cli.readers.columns import (
    PLAIN,
    SAME,
    Chat,
    Completion,
    Names,
    Reading,
    Row,
    Sample,
    Tokens,
    detect_kind,
    find_pair,
    list_columns,
    read_messages,
    read_sample,
    rename,
)
from ulysses_cli.readers.problems import MAX_SHOWN, SOURCE, BadRow, DataError, explain_bad_rows, make_where

MAX_REPEATED = 64 << 20  # as many as a row may hold
MAX_WEIGHT = 1e30  # sums of float32 stay finite
OMITTED = "write 0 where nothing is to be learned of it"
RENAMED = "rename the column where it is no weight of the loss"


@dataclass(frozen=True)
class Pair:
    chosen: Sample
    rejected: Sample


@dataclass(frozen=True)
class Judged:
    """`other`: the same prompt with an answer to another one, which says how far the model is from its reference."""

    answer: Sample
    is_wanted: bool
    other: Sample | None = None


@dataclass(frozen=True)
class Weighted:
    """A sample whose targets count in the loss as often as `weight` says, for all of them or for each of its tokens."""

    sample: Sample
    weight: float | list[float]


@dataclass(frozen=True)
class Answers:
    """Several answers to one prompt."""

    samples: list[Weighted]


AnySample = Sample | Pair | Judged | Weighted | Answers


def read_row(kind: RowType, row: Row, *, has_template: bool = True, reading: Reading = PLAIN) -> AnySample:
    """Raises BadRow with the reason if the row cannot be used."""
    if kind == "preference":
        return read_pair(row, reading)
    if kind == "unpaired":
        return read_judged(row, reading)
    if kind == "answers":
        return read_answers(row, reading)
    sample = read_sample(kind, row, has_template=has_template, reading=reading)
    weight = _find_weight(sample, rename(row, reading.names))
    return sample if weight is None else Weighted(sample, weight)


def _find_weight(sample: Sample, row: Row) -> float | list[float] | None:
    """What a row's columns `weight` and, beside token ids, `weights` say."""
    weight = row.get("weight")
    whole = None if weight is None else read_weight(weight, "column `weight`")
    weights = row.get("weights")
    if weights is None or not isinstance(sample, Tokens):
        return whole
    if whole is not None:
        raise BadRow("a row has `weight` or `weights`, not both")
    if not isinstance(weights, list) or len(weights) != len(sample.ids):
        size = format_count(len(weights), "element") if isinstance(weights, list) else "no list"
        raise BadRow(f"column `weights` has {size} for {len(sample.ids):,} input_ids")
    return [read_weight(each, f"element {at} of column `weights`") for at, each in enumerate(weights)]


def read_answers(row: Row, reading: Reading = PLAIN) -> Answers:
    """Prompt, completions and their weights. Of an answer without weight nothing would be learned: it is left out,
    unless no other is left."""
    if not isinstance(row, dict):
        raise BadRow("no mapping where a row of columns is needed")
    given, row = row, rename(row, reading.names)
    for column in COLUMNS["answers"]:
        if row.get(column) is None:
            raise BadRow(f"column `{reading.names.get(column, column)}` is missing; there is {list_columns(given)}")
    answers, weights = row["completions"], row.get("weights")
    if not isinstance(answers, list) or not answers:
        raise BadRow("column `completions` is not a list of answers, or is an empty one")
    weights = [1.0] * len(answers) if weights is None else weights
    if not isinstance(weights, list) or len(weights) != len(answers):
        size = format_count(len(weights), "element") if isinstance(weights, list) else "no list"
        raise BadRow(f"column `weights` has {size} for {format_count(len(answers), 'answer')}")
    num_letters = len(answers) * len(str(row["prompt"]))
    if num_letters > MAX_REPEATED:
        what = f"{len(answers):,} answers repeat a prompt, {num_letters:,} letters in all, more than {MAX_REPEATED:,}"
        raise BadRow(what, "make several rows of it, each with some of the answers")
    rest = {name: value for name, value in row.items() if name not in ("completions", "weights")}
    samples = []
    for at, (answer, weight) in enumerate(zip(answers, weights, strict=True)):
        if isinstance(row["prompt"], list) and isinstance(answer, str):
            answer = [{"role": "assistant", "content": answer}]
        sample = read_sample("completion", {**rest, "completion": answer}, reading=_without_names(reading))
        samples.append(Weighted(sample, read_weight(weight, f"element {at} of column `weights`")))
    return Answers([each for each in samples if each.weight] or samples[:1])


def read_weight(value: Any, name: str) -> float:
    """How often a target counts."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise BadRow(f"{name} is {value!r}, not a number", RENAMED)
    if not math.isfinite(value) or value > MAX_WEIGHT:
        raise BadRow(f"{name} is {value!r}, not a finite number", OMITTED)
    if value < 0:
        raise BadRow(f"{name} is {value!r}: a weight is 0 or more", OMITTED)
    return float(value)


def read_pair(row: Row, reading: Reading = PLAIN) -> Pair:
    if not isinstance(row, dict):
        raise BadRow("no mapping where a row of columns is needed")
    row = _split_messages(find_pair(rename(row, reading.names)))
    for column in ("chosen", "rejected"):
        if row.get(column) is None:
            raise BadRow(f"column `{reading.names.get(column, column)}` is missing; there is {list_columns(row)}")
    prompt, chosen, rejected = row.get("prompt"), row["chosen"], row["rejected"]
    if isinstance(chosen, list) != isinstance(rejected, list):
        raise BadRow("columns `chosen` and `rejected` must both be text, or both be turns")
    if chosen == rejected:
        raise BadRow("columns `chosen` and `rejected` are the same: there is nothing to prefer")
    rest = {name: value for name, value in row.items() if name not in ("prompt", "chosen", "rejected")}
    if isinstance(chosen, list):
        prompt, chosen, rejected = _find_prompt(prompt, chosen, rejected)
    elif isinstance(prompt, list):
        chosen, rejected = ([{"role": "assistant", "content": text}] for text in (chosen, rejected))

    def read(answer: Any) -> Sample:
        if prompt is None:
            return read_sample("text", {**rest, "text": answer}, reading=_without_names(reading))
        return read_sample(
            "completion", {**rest, "prompt": prompt, "completion": answer}, reading=_without_names(reading)
        )

    return Pair(read(chosen), read(rejected))


def read_judged(row: Row, reading: Reading = PLAIN) -> Judged:
    """Prompt, completion and label."""
    if not isinstance(row, dict):
        raise BadRow("no mapping where a row of columns is needed")
    given, row = row, rename(row, reading.names)
    if "label" not in row:
        name = reading.names.get("label", "label")
        raise BadRow(f"column `{name}` is missing; there is {list_columns(given)}")
    label = row["label"]
    if label not in (0, 1) or isinstance(label, str):
        raise BadRow(f"column `label` is {label!r}; only true and false, or 1 and 0, are understood")
    sample = {name: value for name, value in row.items() if name != "label"}
    return Judged(read_sample("completion", sample, reading=_without_names(reading)), bool(label))


def swap_answers(judged: Sequence[Judged]) -> list[Judged]:
    """Each with the answer of the one before, the first with that of the last. One that stands alone, or whose
    neighbour is of another form, keeps its own."""
    others = [*judged[-1:], *judged[:-1]]
    return [
        replace(each, other=_answer_as(each.answer, before.answer)) for each, before in zip(judged, others, strict=True)
    ]


def _answer_as(own: Sample, other: Sample) -> Sample:
    if isinstance(own, Completion) and isinstance(other, Completion):
        return Completion(own.prompt, other.completion)
    if isinstance(own, Chat) and isinstance(other, Chat):
        messages = [*own.messages[: own.first_target], *other.messages[other.first_target :]]
        flags = (*own.flags[: own.first_target], *other.flags[other.first_target :])
        return replace(own, messages=messages, flags=flags if own.flags and other.flags else ())
    return own


def _without_names(reading: Reading) -> Reading:
    """Columns have been renamed."""
    return replace(reading, names={})


def _split_messages(row: Row) -> Row:
    """A chat whose last turn is the chosen answer, and the rejected one beside it."""
    if "messages" not in row or "rejected_response" not in row:
        return row
    messages = read_messages(row["messages"], "messages")
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise BadRow("column `messages` must end with the assistant's turn, which `rejected_response` competes with")
    rejected = row["rejected_response"]
    if isinstance(rejected, str):
        rejected = [{"role": "assistant", "content": rejected}]
    rest = {name: value for name, value in row.items() if name not in ("messages", "rejected_response")}
    return {**rest, "prompt": messages[:-1], "chosen": messages[-1:], "rejected": rejected}


def _find_prompt(prompt: Any, chosen: list[Any], rejected: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """Answers are turns. They may repeat the prompt, which may stand beside them as text; it is then the turns with
    which both begin."""
    if isinstance(prompt, list):
        return prompt, chosen, rejected
    first, second = read_messages(chosen, "chosen"), read_messages(rejected, "rejected")
    shared = 0
    while shared < min(len(first), len(second)) and first[shared] == second[shared]:
        shared += 1
    if prompt is None and not shared:
        raise BadRow("columns `chosen` and `rejected` begin with different turns, and there is no column `prompt`")
    if prompt is not None and not isinstance(prompt, str):
        raise BadRow("column `prompt` must be text or turns")
    if prompt is not None and not shared:
        return [{"role": "user", "content": prompt}], chosen, rejected
    asked = [turn["content"] for turn in first[:shared] if turn["role"] == "user"]
    if prompt is not None and prompt not in asked:
        raise BadRow("column `prompt` is no turn that `chosen` and `rejected` begin with")
    if shared == min(len(first), len(second)):
        raise BadRow("one of `chosen` and `rejected` is the beginning of the other")
    return chosen[:shared], chosen[shared:], rejected[shared:]


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
