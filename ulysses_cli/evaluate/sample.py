"""A question at some length with its right answers, and a draft of one: a question whose haystack can still grow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Literal

Metric = Literal[
    "all", "part", "line", "none", "set_f1", "token_f1", "chinese_f1", "character_f1", "rouge_sets", "rouge_chinese",
    "rouge_lines", "classes", "share_right", "code_similarity", "sentence", "choice", "debug", "first_integer",
    "whole_word", "name", "last_integer", "first_number", "first_numbers", "ordered_copy", "calls",
]  # fmt: skip


Span = tuple[int, int]


@dataclass(frozen=True)
class Sample:
    """What a model is asked. `answer_prefix` stands after the assistant's header, and the model goes on from there.
    `with_template`: the content is a user's message; or `messages` are a conversation, of roles and texts, of which the
    content is then a written copy for models without a template. Spans count characters of `content`: `context` is the
    haystack, where it can be parted from the question, and `evidence` is what the answer is found in, where that is
    known. `groups`: what else its score is summed up by, such as the difficulty."""

    task: str
    content: str
    references: tuple[str, ...]
    metric: Metric
    max_new_tokens: int
    answer_prefix: str = ""
    evidence: tuple[Span, ...] = ()
    with_template: bool = True
    first_line: bool = False  # only the answer's first line counts
    facts: Mapping[str, Any] = field(default_factory=dict)  # what is reported with it
    context: Span | None = None
    messages: tuple[tuple[str, str], ...] = ()
    groups: Mapping[str, str] = field(default_factory=dict)
    has_one_answer: bool = False  # one right text: teacher forcing says something about it
    number: int = 0  # its place in the files that it was read from


def fill_up(sample: Sample, text: str) -> Sample:
    """The sample with more text at its context's end, after all evidence."""
    assert sample.context is not None, "a sample from a seed can be parted from its question"
    begin, end = sample.context
    content = sample.content[:end] + text + sample.content[end:]
    return replace(sample, content=content, context=(begin, end + len(text)))


# Takes the number of units of haystack.
Draft = Callable[[int], Sample]


@dataclass(frozen=True)
class Task:
    """Makes drafts from a random source; `length` is the number of tokens that the sample shall have. Teacher-forced
    scores mean something only where there is one right order of one right answer. `is_of_files`: the user's files
    decide how long a sample is at least."""

    name: str
    make: Callable[[Random, int], Draft]
    has_one_answer: bool = True
    is_of_files: bool = False
