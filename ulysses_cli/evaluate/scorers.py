"""Scores an answer by the rule of its benchmark: 1 is right, 0 is wrong. `score` is the only entry."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

from ulysses_cli.evaluate.sample import Sample

CHOICES = "ABCD"


def score(sample: Sample, answer: str) -> float:
    """Returns the score of the answer in [0, 1]."""
    text = answer.lstrip("\n").split("\n")[0] if sample.first_line else answer
    return SCORERS[sample.metric](text, sample.references, sample.facts)


def _clean(text: str) -> str:
    """RULER: control characters become line ends."""
    return re.sub(r"[\x00-\x1f]", "\n", text).strip()


def score_all(answer: str, references: Sequence[str], _: Mapping[str, Any]) -> float:
    """The share of references that the answer contains."""
    text = _clean(answer).lower()
    return sum(reference.lower() in text for reference in references) / len(references)


def score_part(answer: str, references: Sequence[str], _: Mapping[str, Any]) -> float:
    """Whether the answer contains any of the references."""
    text = _clean(answer).lower()
    return float(any(reference.lower() in text for reference in references))


def score_none(answer: str, _: Sequence[str], __: Mapping[str, Any]) -> float:
    """Whether the answer says none, and names no number."""
    return float(bool(re.search(r"\bnone\b", answer.lower())) and not re.search(r"\d{4,}", answer))


def score_sets(answer: str, references: Sequence[str], _: Mapping[str, Any]) -> float:
    """F1 of the list in the answer's last line. Two empty lists are equal."""
    lines = answer.strip().splitlines() or [""]
    found = re.search(r"Final Answer:\s*\[(.*)\]", lines[-1], re.IGNORECASE)
    if found is None:
        return 0.0
    named = {part.strip().strip("'\"") for part in found.group(1).split(",")} - {""}
    wanted = set(references)
    if not named and not wanted:
        return 1.0
    common = len(named & wanted)
    return 2 * common / (len(named) + len(wanted)) if common else 0.0


def _normalize(text: str) -> list[str]:
    text = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def _compute_f1(answer: Sequence[str], reference: Sequence[str]) -> float:
    common = sum((Counter(answer) & Counter(reference)).values())
    return 2 * common / (len(answer) + len(reference)) if common else 0.0


def _take_best(measure: Callable[[str, str], float]) -> Callable[[str, Sequence[str], Mapping[str, Any]], float]:
    return lambda answer, references, _: max((measure(answer, each) for each in references), default=0.0)


def _cut_chinese(text: str, facts: Mapping[str, Any]) -> list[str]:
    """Words of Chinese text without punctuation, by jieba; InfiniteBench takes single characters."""
    marks = string.punctuation + "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～、《》「」“”‘’…·"
    if facts.get("by_character"):
        return [letter for letter in text.lower() if letter not in marks and not letter.isspace()]
    import jieba

    cut = ("".join(letter for letter in word.lower() if letter not in marks) for word in jieba.cut(text, cut_all=False))
    return [word.strip() for word in cut if word.strip()]


def score_chinese(answer: str, references: Sequence[str], facts: Mapping[str, Any]) -> float:
    own = _cut_chinese(answer, facts)
    return max(_compute_f1(own, _cut_chinese(reference, facts)) for reference in references)


def _measure_rouge_l(answer: Sequence[str], reference: Sequence[str]) -> float:
    """F of the longest common subsequence of words."""
    row = [0] * (len(reference) + 1)
    for word in answer:
        diagonal = 0
        for at, other in enumerate(reference, 1):
            above = row[at]
            row[at] = diagonal + 1 if word == other else max(above, row[at - 1])
            diagonal = above
    common = row[-1]
    return 2 * common / (len(answer) + len(reference)) if common else 0.0


def score_rouge(answer: str, references: Sequence[str], facts: Mapping[str, Any]) -> float:
    cut: Callable[[str], list[str]] = str.split
    if facts.get("language") == "zh":
        cut = lambda text: _cut_chinese(text, facts)  # noqa: E731 - chosen once
    return max(_measure_rouge_l(cut(answer), cut(reference)) for reference in references)


def score_classes(answer: str, references: Sequence[str], facts: Mapping[str, Any]) -> float:
    """1 / the classes that the answer names, where the right one is among them. A class whose name is part of the right
    one's does not count."""
    named = [name for name in facts["classes"] if name in answer]
    return max(
        1 / len(counted)
        if right in (counted := [name for name in named if not (name in right and name != right)])
        else 0.0
        for right in references
    )


def score_numbers(answer: str, references: Sequence[str], _: Mapping[str, Any]) -> float:
    """The share of the answer's numbers that are the right one."""
    numbers = re.findall(r"\d+", answer)
    wanted = {found for reference in references for found in re.findall(r"\d+", reference)}
    return sum(number in wanted for number in numbers) / len(numbers) if numbers else 0.0


def score_code(answer: str, references: Sequence[str], _: Mapping[str, Any]) -> float:
    """Similarity of the first line that is no comment and no fence."""
    from rapidfuzz import fuzz

    lines = answer.lstrip("\n").split("\n")
    line = next((each for each in lines if not any(mark in each for mark in ("`", "#", "//"))), "")
    return float(max(round(fuzz.ratio(line, reference)) / 100 for reference in references))


def score_letter(answer: str, references: Sequence[str], facts: Mapping[str, Any]) -> float:
    """The letter of a choice. LongBench v2 wants its sentence; InfiniteBench takes a first letter too."""
    text = answer.replace("*", "")
    if facts.get("any_form"):
        found = re.match(r"\s*\(?([A-D])\b", text) or re.search(r"answer is:?\s*\(?([A-D])\b", text, re.IGNORECASE)
        options = facts.get("options", ())
        named = found.group(1) if found else next(
            (letter for letter, option in zip(CHOICES, options, strict=False) if option and option in text), ""
        )  # fmt: skip
        return float(named in references)
    found = re.search(r"The correct answer is \(([A-D])\)", text) or re.search(r"The correct answer is ([A-D])", text)
    return float(found is not None and found.group(1) in references)


def score_first_integer(answer: str, references: Sequence[str], _: Mapping[str, Any]) -> float:
    found = re.search(r"\d+", answer)
    return float(found is not None and found.group() in references)


def score_word(answer: str, references: Sequence[str], _: Mapping[str, Any]) -> float:
    """Whether the answer has the reference as a whole word."""
    words = re.split(r"[\s:;,.\"'{}\[\]()]+", answer)
    return float(any(reference in words for reference in references))


def score_last_word(answer: str, references: Sequence[str], _: Mapping[str, Any]) -> float:
    """Whether the last word, read as a whole number, is right."""
    words = answer.strip().split()
    try:
        return float(bool(words) and str(int(words[-1].strip(".,"))) in references)
    except ValueError:
        return 0.0


def score_first_number(answer: str, references: Sequence[str], _: Mapping[str, Any]) -> float:
    found = re.search(r"-?\d+\.\d+|-?\d+", answer)
    return float(found is not None and any(float(found.group()) == float(each) for each in references))


def score_copy(answer: str, references: Sequence[str], facts: Mapping[str, Any]) -> float:
    """MRCR: 0 unless the answer begins with the string that was asked for, else the similarity of the rest."""
    start = str(facts["start"])
    if not answer.startswith(start):
        return 0.0
    return max(
        SequenceMatcher(None, answer.removeprefix(start), reference.removeprefix(start)).ratio()
        for reference in references
    )


SCORERS: dict[str, Callable[[str, Sequence[str], Mapping[str, Any]], float]] = {
    "all": score_all,
    "part": score_part,
    "none": score_none,
    "set_f1": score_sets,
    "token_f1": _take_best(lambda answer, reference: _compute_f1(_normalize(answer), _normalize(reference))),
    "chinese_f1": score_chinese,
    "rouge_l": score_rouge,
    "classes": score_classes,
    "share_right": score_numbers,
    "code_similarity": score_code,
    "letter": score_letter,
    "first_integer": score_first_integer,
    "whole_word": score_word,
    "last_word": score_last_word,
    "first_number": score_first_number,
    "ordered_copy": score_copy,
}
