"""Generates short stories from a small grammar, for demos and tests without a download.

The same seed gives the same stories, which are easy to learn. Lengths are log-normal, like those of real documents.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from ulysses_cli.readers.blocks import Block

NUM_DOCUMENTS = 400
DOCUMENTS_PER_BLOCK = 100
MEDIAN_CHARS, SPREAD, MAX_CHARS = 700.0, 0.9, 16_000
NAMES = ("Ada", "Ben", "Cleo", "Dan")
THINGS = ("lamp", "drum", "kite", "boat")
PLACES = ("hill", "lake", "barn", "yard")
SENTENCES = (
    "{name} has the {thing} at the {place}.",
    "The {thing} of {name} is at the {place}.",
    "At the {place} {name} finds the {thing}.",
)


def walk_blocks(seed: int) -> Iterator[Block]:
    for first in range(0, NUM_DOCUMENTS, DOCUMENTS_PER_BLOCK):
        numbers = range(first, first + DOCUMENTS_PER_BLOCK)
        rows = [(number + 1, {"text": make_document(seed, number)}) for number in numbers]
        size = sum(len(row["text"]) for _, row in rows)
        yield Block("synthetic", "rows", rows, size)


def make_document(seed: int, number: int) -> str:
    """A story that repeats one name, one thing and four places, so that earlier sentences predict later ones."""
    draw = random.Random(f"{seed}/{number}")
    length = min(MAX_CHARS, int(draw.lognormvariate(0.0, SPREAD) * MEDIAN_CHARS) + 40)
    name, thing = draw.choice(NAMES), draw.choice(THINGS)
    parts: list[str] = []
    size = 0
    while size < length:
        parts.append(draw.choice(SENTENCES).format(name=name, thing=thing, place=draw.choice(PLACES)))
        size += len(parts[-1]) + 1
    return " ".join(parts)
