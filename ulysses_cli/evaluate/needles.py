"""Needles in a haystack: RULER's eight tasks of this kind, and one whose needle is missing."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Literal

from ulysses_cli.evaluate import words
from ulysses_cli.evaluate.sample import Draft, Sample, Span, Task

DRAW = {"words": lambda random: words.draw_keys(random, 1)[0], "numbers": words.draw_number, "uuids": words.draw_uuid}
NAMES = {"words": "word", "numbers": "number", "uuids": "uuid"}
# After a full stop and a blank, after a mark of Chinese or Japanese, and at an empty line.
SENTENCE_ENDS = re.compile(r"(?<=[.!?])\s+|(?<=[。！？])|\n\s*\n")
MAX_SENTENCE = 300  # bytes
# Gives that many sentences of haystack, the same for the same source.
Haystack = Callable[[Random, int], list[str]]


def repeat_noise(_: Random, number: int) -> list[str]:
    return [words.NOISE] * number


def draw_sentences(random: Random, number: int) -> list[str]:
    return [words.draw_sentence(random) for _ in range(number)]


class BookHaystack:
    """Sentences of a text that the user brings, from a random place on; it begins anew at its end. A sentence ends at
    a mark of its script or with its paragraph, and a very long one is cut."""

    def __init__(self, text: str) -> None:
        parts = [" ".join(part.split()) for part in SENTENCE_ENDS.split(text)]
        self.sentences = [piece for part in parts for piece in _cut_at_words(part)]
        if not self.sentences:
            raise ValueError("the text has no sentences")

    def __call__(self, random: Random, number: int) -> list[str]:
        start = random.randrange(len(self.sentences))
        return [self.sentences[(start + at) % len(self.sentences)] for at in range(number)]


def _cut_at_words(sentence: str) -> list[str]:
    """Pieces of about MAX_SENTENCE bytes, cut between words where there are any. [] of an empty one."""
    pieces = []
    most = MAX_SENTENCE * len(sentence) // max(1, len(sentence.encode()))
    while len(sentence) > most:
        end = sentence.rfind(" ", most // 2, most)
        end = most if end < 0 else end
        pieces.append(sentence[:end])
        sentence = sentence[end:].lstrip()
    return [*pieces, sentence] if sentence else pieces


@dataclass(frozen=True)
class NeedleTask:
    """Parameters of one task. With `haystack` "needles" the haystack is made of needles that nobody asks for."""

    name: str
    haystack: Literal["noise", "text", "needles"] = "text"
    key_kind: str = "words"
    value_kind: str = "numbers"
    num_keys: int = 1
    num_values: int = 1
    num_queries: int = 1
    is_missing: bool = False

    def make(self, text: Haystack, random: Random, _: int) -> Draft:
        seed = random.getrandbits(64)
        return lambda num_units: self._render(text, Random(seed), num_units)

    def _render(self, text: Haystack, random: Random, num_units: int) -> Sample:
        num_keys = max(self.num_keys, self.num_queries) + int(self.is_missing)
        keys = self._draw_different(self.key_kind, random, num_keys)
        values = [[DRAW[self.value_kind](random) for _ in range(self.num_values)] for _ in keys]
        asked = keys[-1:] if self.is_missing else random.sample(keys, self.num_queries)
        needles = [
            (self._write(key, value), key in asked)
            for key, own in zip(keys, values, strict=True)
            for value in own
            if not (self.is_missing and key == keys[-1])
        ]
        depths = [random.random() for _ in needles]
        hay = random.getrandbits(64)
        units = self._make_haystack(text, Random(hay), num_units, keys)
        lines = [(at, False, unit) for at, unit in enumerate(units)]
        for depth, (line, is_asked) in zip(depths, needles, strict=True):
            lines.append((int(depth * num_units) - 0.5, is_asked, line))  # type: ignore[arg-type]
        lines.sort(key=lambda line: line[0])
        kind = NAMES[self.value_kind]
        head = (
            f"The text below has some special magic {kind}s in it. Keep them in mind: there will be a question about "
            "them.\n"
        )
        parts, evidence, end = [], list[Span](), len(head)
        for _, is_asked, line in lines:
            if is_asked:
                evidence.append((end, end + len(line)))
            parts.append(line)
            end += len(line) + 1
        names, is_plural = _list_names(asked), self.num_values * len(asked) > 1
        word, verb = (f"{kind}s", "are") if is_plural else (kind, "is")
        none = " Answer none if the text does not say it." if self.is_missing else ""
        content = head + "\n".join(parts) + f"\nWhat {verb} the special magic {word} for {names} in the text?{none}"
        by_key = dict(zip(keys, values, strict=True))
        references = ("none",) if self.is_missing else tuple(value for key in asked for value in by_key[key])
        prefix = "" if self.is_missing else f" The special magic {word} for {names} in the text {verb}"
        metric = "none" if self.is_missing else "all"
        return Sample(
            self.name, content, references, metric, 128, prefix, tuple(evidence),  # type: ignore[arg-type]
            context=(len(head), end - 1),
        )  # fmt: skip

    def _draw_different(self, kind: str, random: Random, number: int) -> list[str]:
        return words.draw_keys(random, number) if kind == "words" else [DRAW[kind](random) for _ in range(number)]

    def _make_haystack(self, text: Haystack, random: Random, number: int, taken: Sequence[str]) -> list[str]:
        """`taken`: keys of the needles. A second one with such a key would be another right answer."""
        if self.haystack == "noise":
            return repeat_noise(random, number)
        if self.haystack == "text":
            return text(random, number)
        keys = self._draw_different(self.key_kind, random, number + len(taken))
        free = [key for key in keys if key not in taken][:number]
        return [self._write(key, DRAW[self.value_kind](random)) for key in free]

    def _write(self, key: str, value: str) -> str:
        return f"One of the special magic {NAMES[self.value_kind]}s for {key} is: {value}."


def _list_names(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


KINDS = (
    NeedleTask("niah_single_1", "noise"),
    NeedleTask("niah_single_2"),
    NeedleTask("niah_single_3", value_kind="uuids"),
    NeedleTask("niah_multikey_1", num_keys=4),
    NeedleTask("niah_multikey_2", "needles"),
    NeedleTask("niah_multikey_3", "needles", key_kind="uuids", value_kind="uuids"),
    NeedleTask("niah_multivalue", num_values=4),
    NeedleTask("niah_multiquery", num_queries=4),
    NeedleTask("niah_none", num_keys=4, is_missing=True),
)


TEXT_TASKS = tuple(kind.name for kind in KINDS if kind.haystack == "text")


def list_needle_tasks(text: Haystack = draw_sentences) -> list[Task]:
    """`text`: the haystack of the tasks that RULER hides in essays."""
    tasks = []
    for kind in KINDS:
        has_one_answer = kind.num_values * kind.num_queries == 1
        tasks.append(Task(kind.name, partial(kind.make, text), has_one_answer))
    return tasks
