"""Rules about chats: the template can be read, and the tokenizer has its markers. Run by check.py."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

from ulysses_cli.plan.models.chat_template import (
    explain_markers,
    explain_no_template,
    find_missing_markers,
    read_template,
)
from ulysses_cli.plan.models.vocabulary import TokenizerFacts
from ulysses_cli.plan.problem import Problem, RecipeError
from ulysses_cli.plan.recipe.data_section import Dataset
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.plan.rules.files import CHAT_TYPES

MAX_ROW_BYTES = 4 << 20
Problems = Iterator[Problem]


def check_chats(recipe: Recipe, tokenizer: TokenizerFacts | None) -> Problems:
    """`tokenizer`: facts from its files; None where they are not on disk, and `prepare` checks the same later."""
    yield from _check_added(recipe)
    data, template = recipe.data, None
    if data.chat_template is not None:
        try:
            template = read_template(data.chat_template)
        except RecipeError as error:
            yield from error.problems
            return
    if tokenizer is None:
        return
    if template is None:
        if not tokenizer.has_template and (source := find_chats(recipe)):
            yield explain_no_template(tokenizer.name, source)
    elif tokenizer.vocabulary is not None:
        missing = find_missing_markers(template, {*tokenizer.vocabulary.ids, *data.added_tokens})
        if missing:
            yield explain_markers(template, missing, data.added_tokens, tokenizer.name)


def _check_added(recipe: Recipe) -> Problems:
    added = recipe.data.added_tokens
    for index, token in enumerate(added):
        if token in added[:index]:
            yield Problem(f"data.added_tokens.{index}", f"{token} is written twice", "keep one of the two")
        elif not token.strip():
            yield Problem(f"data.added_tokens.{index}", "is white space alone", "write a marker such as <|im_end|>")
    if added and recipe.memory.offload_param == "nvme" and recipe.model.name_or_path is not None:
        message = "nvme keeps each weight in a file of its size, which data.added_tokens may change"
        yield Problem("memory.offload_param", message, "use memory.offload_param: cpu")


def find_chats(recipe: Recipe) -> str:
    """The key of a source that holds chats, by its type or by the first row of its file; '' if there is none."""
    for section in ("datasets", "eval_datasets"):
        for index, dataset in enumerate(getattr(recipe.data, section)):
            if dataset.type in CHAT_TYPES or (dataset.type == "auto" and _begins_with_chat(dataset)):
                return f"data.{section}.{index}"
    return ""


def _begins_with_chat(dataset: Dataset) -> bool:
    """Reads one row of a file of lines; files of other kinds are left to `prepare`."""
    path = os.path.expanduser(dataset.path or "")
    if not path.endswith((".jsonl", ".ndjson")) or not os.path.isfile(path):
        return False
    try:
        with open(path, "rb") as stream:
            row = json.loads(stream.readline(MAX_ROW_BYTES).decode("utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(row, dict) and bool({"messages", "conversations"} & row.keys())
