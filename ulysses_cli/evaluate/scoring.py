"""Scores an answer by the rule of its benchmark: 1 is right, 0 is wrong. `score` is the only entry. ROUGE-L is computed
as two packages do, which differ in sentences, words and counts: LongBench's values are those of `rouge`,
InfiniteBench's those of `rouge_score`. InfiniteBench's own rules take references as its files have them.  Calls of
tools are read in the forms of known chat templates and compared as JSON."""

from __future__ import annotations

import ast
import json
import math
import re
import string
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from itertools import takewhile
from typing import Any

from ulysses_cli.evaluate.sample import Sample

Call = tuple[str, Mapping[str, Any]]
NUM_RANKED = 10
NAME = r"[\w.:/-]+"
ARGUMENTS = ("arguments", "parameters")
TAGGED = re.compile(
    r"<(?:[\w-]+:)?(?:function=|invoke name=[\"']?)([^>\"'\n]+)[\"']?>(.*?)</(?:[\w-]+:)?(?:function|invoke)>", re.S
)
PARAMETER = re.compile(
    r"<(?:[\w-]+:)?parameter(?:=| name=[\"']?)([^>\"'\n]+)[\"']?[^>]*>(.*?)</(?:[\w-]+:)?parameter>", re.S
)
KEYED = re.compile(
    rf"<tool_call>\s*({NAME})\s*((?:<arg_key>.*?</arg_key>\s*<arg_value>.*?</arg_value>\s*)*)</tool_call>", re.S
)
KEY_AND_VALUE = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.S)
GEMMA = re.compile(rf"call:({NAME})(?=\{{)")
GEMMA_TEXT = re.compile(r"(<\|\"\|>|<escape>)(.*?)\1", re.S)
GEMMA_KEY = re.compile(r"([{,]\s*)([\w.-]+)(\s*:)")
# What stands between a call's name and its object, or before the name; the last one counts.
NAMED = re.compile(rf"(?:\bto=|<｜tool▁call▁begin｜>|<｜tool▁sep｜>|<\|tool_call_begin\|>|\[TOOL_CALLS\])\s*({NAME})")
PYTHON = re.compile(r"\[\s*[A-Za-z_][\w.]*\(.*\)\s*\]", re.S)
CONSTANTS = {"true": True, "false": False, "null": None}
THOUGHT_ENDS = ("</think>", "[/THINK]", "</seed:think>")


def read_calls(text: str) -> list[Call]:
    """The calls in what follows the last thought; [] where there is none in a form that is known."""
    for end in THOUGHT_ENDS:
        text = text.rpartition(end)[2]
    for read in READERS:
        if calls := list(read(text)):
            return [(_name(name), arguments) for name, arguments in calls]
    return []


def score_calls(answer: str, references: Sequence[str], _: Mapping[str, Any]) -> float:
    """Whether the answer makes the calls of the reference, each once, in any order: names, and arguments as JSON."""
    return float(Counter(map(_write, read_calls(answer))) == Counter(map(_write, _parse(references[0]))))


def score_names(answer: str, reference: str) -> float:
    """Whether it calls the same tools, whatever it gives them."""
    return float(Counter(name for name, _ in read_calls(answer)) == Counter(name for name, _ in _parse(reference)))


def write_calls(calls: Sequence[Call]) -> str:
    """The text of a reference."""
    return json.dumps([{"name": name, "arguments": arguments} for name, arguments in calls], ensure_ascii=False)


def _parse(reference: str) -> list[Call]:
    return [(call["name"], call["arguments"]) for call in json.loads(reference)]


def _write(call: Call) -> str:
    """Equal for equal calls. 1.0 is 1, as in JSON; true is not."""
    return json.dumps([call[0], _settle(call[1])], sort_keys=True, ensure_ascii=False)


def _settle(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _settle(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return list(map(_settle, value))
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _name(name: str) -> str:
    """Kimi's ids are functions.find:0."""
    return re.sub(r":\d+$", "", name.strip()).removeprefix("functions.")


def _read_value(text: str) -> Any:
    """Such forms write texts as they are, so that the text 3 and the number 3 are one."""
    text = text.strip()
    if text in ("True", "False", "None"):
        return ast.literal_eval(text)
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _read_tagged(text: str) -> Iterator[Call]:
    for name, inside in TAGGED.findall(text):
        yield name, {key.strip(): _read_value(value) for key, value in PARAMETER.findall(inside)}


def _read_keyed(text: str) -> Iterator[Call]:
    for name, inside in KEYED.findall(text):
        yield name, {key.strip(): _read_value(value) for key, value in KEY_AND_VALUE.findall(inside)}


def _read_gemma(text: str) -> Iterator[Call]:
    for found in GEMMA.finditer(text):
        parts = GEMMA_TEXT.split(text[found.end() :])  # text outside, mark, text inside, ...
        outside = (
            re.sub(r"\bNone\b", "null", GEMMA_KEY.sub(r'\1"\2"\3', part)) if at % 3 == 0 else json.dumps(part)
            for at, part in enumerate(parts)
            if at % 3 != 1
        )
        if isinstance(arguments := _decode("".join(outside))[0], dict):
            yield found.group(1), arguments


def _read_objects(text: str) -> Iterator[Call]:
    at = last = 0
    while (begin := re.compile(r"[{\[]").search(text, at)) is not None:
        value, size = _decode(text[begin.start() :])
        if not isinstance(value, dict | list) or not size:
            at = begin.start() + 1
            continue
        before, at = text[last : begin.start()], begin.start() + size
        own = list(_list_objects(value))
        names = NAMED.findall(before)
        if own:
            yield from own
        elif names and isinstance(value, dict):
            yield names[-1], value
        last = at


def _list_objects(value: Any) -> Iterator[Call]:
    """Calls among an object, or a list of them."""
    for each in value if isinstance(value, list) else [value]:
        holder = each.get("function") if isinstance(each, dict) and isinstance(each.get("function"), dict) else each
        if not isinstance(holder, dict):
            continue
        name = holder.get("name", holder.get("tool_name"))
        arguments = next((holder[key] for key in ARGUMENTS if key in holder), None)
        if isinstance(arguments, str):
            arguments, _ = _decode(arguments)
        if isinstance(name, str) and isinstance(arguments, dict):
            yield name, arguments


def _decode(text: str) -> tuple[Any, int]:
    """The JSON that a text begins with, and its length; (None, 0) where there is none."""
    try:
        return json.JSONDecoder(strict=False).raw_decode(text)
    except (ValueError, RecursionError):
        return None, 0


def _read_python(text: str) -> Iterator[Call]:
    if (found := PYTHON.search(text)) is None:
        return
    for source in (found.group(), found.group().replace("\n", "\\n")):  # some templates write line ends as they are
        try:
            tree = ast.parse(source, mode="eval").body
            calls = tree.elts if isinstance(tree, ast.List) else []
            yield from [
                (ast.unparse(call.func), {str(word.arg): _evaluate(word.value) for word in call.keywords})
                for call in calls
                if isinstance(call, ast.Call)
            ]
            return
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue


def _evaluate(node: ast.expr) -> Any:
    """A literal, in which JSON's constants are taken, too. Raises ValueError for anything else."""
    if isinstance(node, ast.Name) and node.id in CONSTANTS:
        return CONSTANTS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return list(map(_evaluate, node.elts))
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return {str(_evaluate(key)): _evaluate(value) for key, value in pairs if key is not None}
    return ast.literal_eval(node)


READERS: tuple[Callable[[str], Iterator[Call]], ...] = (
    _read_tagged, _read_keyed, _read_gemma, _read_objects, _read_python
)  # fmt: skip


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


def score_plain_part(answer: str, references: Sequence[str], _: Facts) -> float:
    """HELMET: whether the answer holds a reference, both without case, marks and articles."""
    text = " ".join(_normalize(answer))
    return float(any(" ".join(_normalize(reference)) in text for reference in references))


def score_ranking(answer: str, _: Sequence[str], facts: Facts) -> float:
    """HELMET: NDCG of the first ten of the longest `3 > 1 > 2`, by trec_eval's formula. `labels`: of relevant ids."""
    text = re.sub(r"[\[\]:]", "", answer).lower().replace("id", "")
    longest = max(re.findall(r"\d+(?:\s*>\s*\d+)*", text), key=len, default="")
    labels = facts["labels"]
    found = [labels.get(name, 0) for name in dict.fromkeys(re.findall(r"\d+", longest))]
    return _sum_gains(found) / _sum_gains(sorted(labels.values(), reverse=True))


def _sum_gains(labels: Sequence[int]) -> float:
    return math.fsum(label / math.log2(place) for place, label in enumerate(labels[:NUM_RANKED], 2))


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
    "plain_part": score_plain_part,
    "ndcg": score_ranking,
    "choice": _leave_out_facts(score_choice),
    "debug": _leave_out_facts(score_debug),
    "first_integer": _leave_out_facts(score_first_integer),
    "whole_word": _leave_out_facts(score_word),
    "name": _leave_out_facts(score_name),
    "last_integer": _leave_out_facts(score_last_integer),
    "first_number": _leave_out_facts(score_first_number),
    "first_numbers": _leave_out_facts(score_first_numbers),
}
