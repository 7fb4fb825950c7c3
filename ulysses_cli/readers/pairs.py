"""Turns a row into two answers to one prompt, or into one answer and whether it is wanted.

A branch is a sample like any other: prompt and completion, a chat whose last turns are the answer, or text. Where the
prompt of texts ends is not guessed here: tokens decide (data/tokenizing/pairs.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ulysses_cli.plan.recipe.data_section import RowType
from ulysses_cli.readers.columns import (
    PLAIN,
    Chat,
    Completion,
    Reading,
    Row,
    Sample,
    list_columns,
    read_messages,
    read_sample,
    rename,
)
from ulysses_cli.readers.problems import BadRow


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


def read_row(kind: RowType, row: Row, *, has_template: bool = True, reading: Reading = PLAIN) -> Sample | Pair | Judged:
    """Raises BadRow with the reason if the row cannot be used."""
    if kind == "preference":
        return read_pair(row, reading)
    if kind == "unpaired":
        return read_judged(row, reading)
    return read_sample(kind, row, has_template=has_template, reading=reading)


def read_pair(row: Row, reading: Reading = PLAIN) -> Pair:
    if not isinstance(row, dict):
        raise BadRow("no mapping where a row of columns is needed")
    row = _split_messages(rename(row, reading.names))
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
