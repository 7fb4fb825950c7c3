"""Scores an answer by the rule of its benchmark: 1 is right, 0 is wrong. `score` is the only entry."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

from ulysses_cli.evaluate.sample import Sample
from ulysses_cli.evaluate.scoring import infinite
from ulysses_cli.evaluate.scoring.calls import score_calls
from ulysses_cli.evaluate.scoring.rouge import measure_by_lines, measure_by_sets

Facts = Mapping[str, Any]
CHINESE_MARKS = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—"
    "‘’‛“”„‟…‧﹏."
)
MARKS = frozenset(string.punctuation + CHINESE_MARKS)


def score(sample: Sample, answer: str) -> float:
    """Returns the score of the answer in [0, 1]."""
    text = answer.lstrip("\n").split("\n")[0] if sample.first_line else answer
    return float(SCORERS[sample.metric](text, sample.references, sample.facts))


def _clean(text: str) -> str:
    """RULER: control characters become line ends."""
    return re.sub(r"[\x00-\x1f]", "\n", text.strip()).strip()


def score_all(answer: str, references: Sequence[str], _: Facts) -> float:
    """The share of references that the answer contains."""
    text = _clean(answer).lower()
    return sum(reference.lower() in text for reference in references) / len(references)


def score_part(answer: str, references: Sequence[str], _: Facts) -> float:
    """Whether the answer contains any of the references."""
    text = _clean(answer).lower()
    return float(any(reference.lower() in text for reference in references))


def score_line(answer: str, references: Sequence[str], _: Facts) -> float:
    """Whether the answer contains the line of code, however its blanks are written."""
    text = " ".join(answer.split())
    return float(any(" ".join(reference.split()) in text for reference in references))


def score_none(answer: str, _: Sequence[str], __: Facts) -> float:
    """Whether the answer says none, and names no number."""
    return float(bool(re.search(r"\bnone\b", answer.lower())) and not re.search(r"\d{4,}", answer))


def score_sets(answer: str, references: Sequence[str], _: Facts) -> float:
    """F1 of the list in the answer's last line. Two empty lists are equal."""
    found = re.search(r"Final Answer: ?\[(.*)\]", answer.rstrip().split("\n")[-1])
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


def _take_best(measure: Callable[[str, str], float]) -> Callable[[str, Sequence[str], Facts], float]:
    return lambda answer, references, _: max((measure(answer, each) for each in references), default=0.0)


def _drop_marks(text: str) -> str:
    return "".join(letter for letter in text.lower() if letter not in MARKS and not letter.isspace())


def _cut_chinese(text: str) -> list[str]:
    import jieba

    return list(jieba.cut(text, cut_all=False))


def _list_words(text: str) -> list[str]:
    """Chinese words by jieba, without punctuation."""
    return [word for word in map(_drop_marks, _cut_chinese(text)) if word]


def _measure_chinese_rouge(answer: str, reference: str) -> float:
    """Punctuation stays: it is words of its own."""
    return measure_by_sets(*(" ".join(_cut_chinese(text)) for text in (answer, reference)))


def score_classes(answer: str, references: Sequence[str], facts: Facts) -> float:
    """1 / the classes that the answer names, where the right one is among them. A class whose name is part of the right
    one's does not count. LongBench drops such classes from the list that it walks, so that it never looks at the one
    behind a dropped one; so does this."""
    best = 0.0
    for right in references:
        named = [name for name in facts["classes"] if name in answer]
        at = 0
        while at < len(named):
            if named[at] in right and named[at] != right:
                del named[at]
            at += 1
        best = max(best, 1 / len(named) if right in named else 0.0)
    return best


def score_numbers(answer: str, references: Sequence[str], _: Facts) -> float:
    """The share of the answer's numbers that are the right one."""
    numbers = re.findall(r"\d+", answer)
    wanted = [found.group() for reference in references if (found := re.search(r"\d+", reference))]
    return max((numbers.count(each) / len(numbers) for each in wanted), default=0.0) if numbers else 0.0


def score_code(answer: str, references: Sequence[str], _: Facts) -> float:
    """Similarity of the first line that is no comment and no fence."""
    from rapidfuzz import fuzz

    lines = answer.lstrip("\n").split("\n")
    line = next((each for each in lines if not any(mark in each for mark in ("`", "#", "//"))), "")
    return float(max(round(fuzz.ratio(line, reference)) / 100 for reference in references))


def score_sentence(answer: str, references: Sequence[str], _: Facts) -> float:
    """LongBench v2: the letter in the sentence that was asked for."""
    text = answer.replace("*", "")
    found = re.search(r"The correct answer is \(([A-D])\)", text) or re.search(r"The correct answer is ([A-D])", text)
    return float(found is not None and found.group(1) in references)


def score_copy(answer: str, references: Sequence[str], facts: Facts) -> float:
    """MRCR: 0 unless the answer begins with the string that was asked for, else the similarity of the rest."""
    start = str(facts["start"])
    if not answer.startswith(start):
        return 0.0
    return max(
        SequenceMatcher(None, answer.removeprefix(start), reference.removeprefix(start)).ratio()
        for reference in references
    )


def _leave_out_facts(rule: Callable[[str, Sequence[str]], float]) -> Callable[[str, Sequence[str], Facts], float]:
    return lambda answer, references, _: float(rule(answer, references))


SCORERS: dict[str, Callable[[str, Sequence[str], Facts], float]] = {
    "all": score_all,
    "part": score_part,
    "line": score_line,
    "none": score_none,
    "set_f1": score_sets,
    "token_f1": _take_best(lambda answer, reference: _compute_f1(_normalize(answer), _normalize(reference))),
    "chinese_f1": _take_best(lambda answer, reference: _compute_f1(_list_words(answer), _list_words(reference))),
    "character_f1": _take_best(lambda answer, reference: _compute_f1(_drop_marks(answer), _drop_marks(reference))),
    "rouge_sets": _take_best(measure_by_sets),
    "rouge_chinese": _take_best(_measure_chinese_rouge),
    "rouge_lines": _take_best(measure_by_lines),
    "classes": score_classes,
    "share_right": score_numbers,
    "code_similarity": score_code,
    "sentence": score_sentence,
    "ordered_copy": score_copy,
    "calls": score_calls,
    "choice": _leave_out_facts(infinite.score_choice),
    "debug": _leave_out_facts(infinite.score_debug),
    "first_integer": _leave_out_facts(infinite.score_first_integer),
    "whole_word": _leave_out_facts(infinite.score_word),
    "name": _leave_out_facts(infinite.score_name),
    "last_integer": _leave_out_facts(infinite.score_last_integer),
    "first_number": _leave_out_facts(infinite.score_first_number),
    "first_numbers": _leave_out_facts(infinite.score_first_numbers),
}
