"""InfiniteBench's rules. Each takes an answer and the references as its files have them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile

CHOICES = "ABCD"
CHOICE_MARKS = ("answer is:", "answer:", "answer is", "option is")
DEBUG_MARKS = ("answer is:", "is:", "answer:", "correct option is:")
QUOTES = "\n\"'.,?!{}"


def blank(text: str, parts: Sequence[str]) -> str:
    """Puts a space in place of each of the parts."""
    for part in parts:
        text = text.replace(part, " ")
    return text


def score_first_integer(answer: str, references: Sequence[str]) -> bool:
    found = re.search("[0-9]+", answer)
    return found is not None and found.group() == references[0]


def score_word(answer: str, references: Sequence[str]) -> bool:
    """Whether the key's value is one of the answer's words."""
    return references[0] in blank(answer, QUOTES + ":").split()


def score_name(answer: str, references: Sequence[str]) -> bool:
    """Whether the name, which is in capitals, is one of the answer's words."""
    return references[0] in blank(answer, QUOTES + ":").upper().split()


def score_last_integer(answer: str, references: Sequence[str]) -> bool:
    words = blank(answer, "\n.`'\":").split()
    try:
        return bool(words) and int(words[-1]) == int(references[0])
    except ValueError:
        return False


def score_first_number(answer: str, references: Sequence[str]) -> bool:
    """The first number without its sign. A whole number is right only if it is written as one."""
    found = re.search(r"\d+\.\d+|\d+", answer)
    if found is None:
        return False
    is_whole = "." not in references[0]
    return not (is_whole and "." in found.group()) and float(found.group()) == float(references[0])


def score_first_numbers(answer: str, references: Sequence[str]) -> float:
    """The share of the numbers that the answer has in the right order, up to the first that is wrong."""
    found = [int(digits) for digits in re.findall("[0-9]+", answer)]
    pairs = zip(found, map(int, references), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) / len(references)


def score_choice(answer: str, references: Sequence[str]) -> bool:
    """`references`: the right option and its letter. The first character counts if it is a letter of an option; then
    what follows a mark; then the first word that is a letter."""
    text = answer.strip()
    if not text or text[0] in CHOICES:
        return bool(text) and text[0] in references
    if text in references:
        return True
    text = re.sub(" +", " ", blank(text, QUOTES))
    if (after := _find_after(text, CHOICE_MARKS)) is not None:
        return _begins_right(after, references)
    # a run such as BC is no single letter, and not right
    return next((word in references for word in text.split() if word in CHOICES), False)


def score_debug(answer: str, references: Sequence[str]) -> bool:
    """`references`: the function with the error, and the letter of its option."""
    text = answer.strip()
    if text[:2] in (f"{references[1]}.", f"{references[1]}:"):
        return True
    text = re.sub(" +", " ", blank(text, ("\n", "`", "'", '"', "-", "*", "Option", "option")))
    after = _find_after(text, DEBUG_MARKS)
    return after is not None and _begins_right(after, references)


def _find_after(text: str, marks: Sequence[str]) -> str | None:
    """The text behind the first of these marks that it has, and behind the space that follows the mark."""
    for mark in marks:
        if mark in text:
            return text.partition(mark)[2][1:]
    return None


def _begins_right(text: str, references: Sequence[str]) -> bool:
    return any(text.startswith(each) for each in references if text)
