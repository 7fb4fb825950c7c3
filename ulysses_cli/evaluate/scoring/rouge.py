"""ROUGE-L of whole summaries, as two packages compute it. They differ in sentences, words and counts, so that their
values must not be mixed: LongBench's are those of `rouge`, InfiniteBench's those of `rouge_score`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence

Words = Sequence[str]


def measure_by_sets(answer: str, reference: str) -> float:
    """`rouge`: sentences end at a full stop, words at a space. A word counts once, however often it comes: longest
    common subsequences are joined as sets of words."""
    own, wanted = (_cut_at_stops(text) for text in (answer, reference))
    if not own or not wanted:
        return 0.0
    common = {
        sentence[at]
        for sentence in wanted
        for other in own
        for at in find_common(sentence, other, lambda above, left: above > left)
    }
    recall = len(common) / len({word for sentence in wanted for word in sentence})
    precision = len(common) / len({word for sentence in own for word in sentence})
    return 2 * precision * recall / (precision + recall + 1e-8)


def _cut_at_stops(text: str) -> list[list[str]]:
    """Blanks between two full stops are a sentence of one empty word, which the package counts."""
    return [" ".join(part.split()).split(" ") for part in text.split(".") if part]


def measure_by_lines(answer: str, reference: str) -> float:
    """`rouge_score`'s rougeLsum without stems: sentences are lines, words are runs of a-z and 0-9. A word counts as
    often as it comes in both texts."""
    own, wanted = (_cut_lines(text) for text in (answer, reference))
    left, left_wanted = (Counter(word for line in text for word in line) for text in (own, wanted))
    sizes = left.total(), left_wanted.total()
    if not all(sizes):
        return 0.0
    hits = 0
    for line in wanted:
        places = {at for other in own for at in find_common(line, other, lambda above, left: above >= left)}
        for word in (line[at] for at in sorted(places)):
            if left[word] > 0 and left_wanted[word] > 0:
                hits += 1
                left[word] -= 1
                left_wanted[word] -= 1
    return 2 * hits / sum(sizes)


def _cut_lines(text: str) -> list[list[str]]:
    return [re.findall("[a-z0-9]+", line.lower()) for line in text.split("\n") if line]


def find_common(words: Words, others: Words, goes_up: Callable[[int, int], bool]) -> list[int]:
    """Places in `words` of one longest common subsequence. There may be several, and each package takes another one:
    `goes_up` decides from the lengths without the last word of `words`, and without the last of `others`."""
    table = [[0] * (len(others) + 1)]
    for word in words:
        above, row = table[-1], [0]
        for at, other in enumerate(others):
            row.append(above[at] + 1 if word == other else max(above[at + 1], row[at]))
        table.append(row)
    first, second, places = len(words), len(others), list[int]()
    while first and second:
        if words[first - 1] == others[second - 1]:
            first, second = first - 1, second - 1
            places.append(first)
        elif goes_up(table[first - 1][second], table[first][second - 1]):
            first -= 1
        else:
            second -= 1
    return places
