"""Retrieval beside length: the same questions with no context, with what BM25 finds in it, and with the evidence alone.

Scores and question stay as they are; only the context is replaced. Where BM25's budget holds the whole context there
is nothing to choose from, and no such question is asked.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from statistics import fmean
from typing import Any

from ulysses_cli.evaluate.prompts import Prompter, TaskPrompt
from ulysses_cli.evaluate.sample import Sample, Span
from ulysses_cli.evaluate.summary import compare_pairs, estimate_mean
from ulysses_cli.plan.problem import Problem, RecipeError

CHUNKS = (256, 512, 1024, 2048)  # tokens
BUDGETS = (4096, 16384, 65536)  # tokens of the chunks that are shown together
NONE, ORACLE, WHOLE = "none", "oracle", "whole"
K1, B = 1.5, 0.75
OPTION = "--against-retrieval"
GAP = "\n\n"  # between chunks that are not neighbours
# A Chinese, Japanese or Korean character is a word of its own: these languages put no spaces between words.
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+")
UNIT = re.compile(r"[^\n.!?。！？]*[\n.!?。！？]+\s*|[^\n.!?。！？]+$")  # a sentence or a line, with what follows it

Result = Mapping[str, Any]


@dataclass(frozen=True)
class Passage:
    """Characters of a context, and how many tokens they are."""

    span: Span
    num_tokens: int


def check_retrieval(samples: Iterable[Sample], has_tasks: bool) -> list[str]:
    """Returns notes on what cannot be asked. Raises RecipeError where nothing can, or bm25s is missing."""
    if find_spec("bm25s") is None:
        message = "BM25 is computed by bm25s, which is not installed"
        raise RecipeError([Problem(OPTION, message, "pip install 'ulysses-cli[evaluate]'")])
    can_ask: dict[str, bool] = {}
    for sample in samples:
        can_ask[sample.task] = can_ask.get(sample.task, False) or sample.context is not None
    if not has_tasks and not any(can_ask.values()):
        message = "no question can be parted from its context"
        raise RecipeError([Problem(OPTION, message, "use a suite from a seed, or files with a context of their own")])
    return [
        f"{task} is asked with its whole prompt alone: its files do not part the question from the context"
        for task, can in can_ask.items()
        if not can
    ]


def make_ways(prompt: TaskPrompt, prompter: Prompter, budgets: Sequence[int] = BUDGETS) -> Iterator[TaskPrompt]:
    """Yields the same question with no context, with BM25's chunks, and with the evidence, where that is known."""
    sample = prompt.sample
    if sample.context is None:
        return
    first, last = sample.context
    yield _make(prompt, prompter, NONE, [], {})
    units = cut_units(sample.content[first:last], prompter, min(CHUNKS))
    num_tokens = sum(unit.num_tokens for unit in units)
    for size in CHUNKS:
        smaller = [budget for budget in budgets if size <= budget < num_tokens]
        if not smaller:
            continue
        chunks = join_units(units, size)
        order = rank_chunks([sample.content[first:last][slice(*chunk.span)] for chunk in chunks], _find_query(sample))
        for budget in smaller:
            spans = [(first + begin, first + end) for begin, end in choose_chunks(chunks, order, budget)]
            facts = {"chunk_tokens": size, "budget_tokens": budget}
            yield _make(prompt, prompter, f"bm25-{size}-{budget}", spans, facts)
    if sample.evidence:
        yield _make(prompt, prompter, ORACLE, sorted(set(sample.evidence)), {})


def _make(
    prompt: TaskPrompt, prompter: Prompter, way: str, spans: Sequence[Span], chosen: Mapping[str, Any]
) -> TaskPrompt:
    sample = prompt.sample
    assert sample.context is not None
    shown = GAP.join(sample.content[slice(*span)].strip("\n") for span in join_neighbours(spans))
    content = sample.content[: sample.context[0]] + shown + sample.content[sample.context[1] :]
    told = {"way": way, **chosen, "recall": compute_recall(sample.evidence, spans)}
    facts = {**sample.facts, "retrieval": told}
    changed = replace(sample, content=content, evidence=(), context=None, facts=facts, messages=())
    return prompter.make(changed, prompt.index, prompt.length, way)


def _find_query(sample: Sample) -> str:
    """The question: what follows the context, or what stands before it where nothing follows."""
    assert sample.context is not None
    first, last = sample.context
    return sample.content[last:] if sample.content[last:].strip() else sample.content[:first]


def cut_units(text: str, prompter: Prompter, most: int) -> list[Passage]:
    """Cuts a text into sentences and lines; those of more than `most` tokens are cut further, between words."""
    spans = [found.span() for found in UNIT.finditer(text)]
    units: list[Passage] = []
    for span, number in zip(spans, _count_tokens(text, spans, prompter), strict=True):
        units += [Passage(span, number)] if number <= most else _cut_unit(text, span, number, prompter, most)
    return units


def _cut_unit(text: str, span: Span, number: int, prompter: Prompter, most: int) -> list[Passage]:
    """Halves a span until its parts are small enough; a part of one character stays as it is."""
    if number <= most or span[1] - span[0] < 2:
        return [Passage(span, number)]
    middle = (span[0] + span[1]) // 2
    space = text.rfind(" ", span[0] + 1, middle)
    cut = space if space > span[0] else middle
    parts = [(span[0], cut), (cut, span[1])]
    counts = _count_tokens(text, parts, prompter)
    return [
        chunk for part, own in zip(parts, counts, strict=True) for chunk in _cut_unit(text, part, own, prompter, most)
    ]


def _count_tokens(text: str, spans: Sequence[Span], prompter: Prompter) -> list[int]:
    return [len(tokens) for tokens in prompter.tokens.tokenize([text[slice(*span)] for span in spans], False)]


def join_units(units: Sequence[Passage], size: int) -> list[Passage]:
    """Joins neighbours into chunks of at most `size` tokens, each as long as it can be."""
    chunks: list[Passage] = []
    for unit in units:
        if chunks and chunks[-1].num_tokens + unit.num_tokens <= size:
            chunks[-1] = Passage((chunks[-1].span[0], unit.span[1]), chunks[-1].num_tokens + unit.num_tokens)
        else:
            chunks.append(unit)
    return chunks


def list_words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def rank_chunks(texts: Sequence[str], query: str) -> list[int]:
    """Returns the chunks' numbers, the best first by BM25 (Lucene's, k1 1.5, b 0.75); equals in their order."""
    import bm25s

    words, asked = [list_words(text) for text in texts], list_words(query)
    if not asked or not any(words):
        return list(range(len(texts)))
    index = bm25s.BM25(method="lucene", k1=K1, b=B)
    index.index(words, show_progress=False)
    scores = index.get_scores(asked)
    return sorted(range(len(texts)), key=lambda at: (-float(scores[at]), at))


def choose_chunks(chunks: Sequence[Passage], order: Sequence[int], budget: int) -> list[Span]:
    """The best chunks that fit into the budget together, in the order of the text."""
    chosen: list[int] = []
    left = budget
    for at in order:
        if chunks[at].num_tokens > left:
            break
        left -= chunks[at].num_tokens
        chosen.append(at)
    return [chunks[at].span for at in sorted(chosen)]


def join_neighbours(spans: Sequence[Span]) -> list[Span]:
    """Joins spans that touch."""
    joined: list[Span] = []
    for first, last in spans:
        if joined and joined[-1][1] == first:
            joined[-1] = joined[-1][0], last
        else:
            joined.append((first, last))
    return joined


def compute_recall(evidence: Sequence[Span], shown: Sequence[Span]) -> float | None:
    """The share of the pieces of evidence that are shown whole. None where the evidence is not known."""
    if not evidence:
        return None
    whole = join_neighbours(shown)
    return fmean(any(first <= begin and end <= last for first, last in whole) for begin, end in evidence)


def get_way(result: Result) -> str:
    facts = result.get("facts") or {}
    return str((facts.get("retrieval") or {}).get("way", WHOLE))


def keep_whole(results: Iterable[Result]) -> list[Result]:
    """The answers to questions with their whole context."""
    return [result for result in results if get_way(result) == WHOLE]


def summarize_retrieval(
    results: Iterable[Result], ranks_per_question: int, usd_per_rank_hour: float | None
) -> dict[str, Any]:
    """Accuracy, recall and cost by task, length and way. `without`: the score over the questions that are not answered
    right with no context. Differences are those to the whole context, question by question."""
    groups: dict[tuple[str, int], dict[str, dict[int, Result]]] = defaultdict(lambda: defaultdict(dict))
    for result in results:
        length = result["length"] or 0
        groups[result["task"], length][get_way(result)][result["index"]] = result
    rows = []
    for (task, length), ways in sorted(groups.items()):
        if ways.keys() == {WHOLE}:
            continue
        for way, own in sorted(ways.items(), key=lambda item: _order(item[0])):
            rows.append({"task": task, "length": length, **_describe(way, own, ways)})
    cost = 0.0 if usd_per_rank_hour is None else ranks_per_question * usd_per_rank_hour / 3600
    for row in rows:
        row["usd"] = row["seconds"] * cost if usd_per_rank_hour is not None else None
    known = [
        result["id"].removesuffix(f"/{NONE}")
        for ways in groups.values()
        for result in ways.get(NONE, {}).values()
        if result["score"] >= 1
    ]
    return {"rows": rows, "answered_without_context": sorted(known)}


def _order(way: str) -> tuple[int, list[int]]:
    numbers = [int(part) for part in way.split("-")[1:]]
    return {NONE: 0, WHOLE: 2, ORACLE: 3}.get(way, 1), numbers[::-1]


def _describe(way: str, own: Mapping[int, Result], ways: Mapping[str, Mapping[int, Result]]) -> dict[str, Any]:
    results = list(own.values())
    interval = estimate_mean([result["score"] for result in results])
    told = [result["facts"]["retrieval"] for result in results] if way != WHOLE else []
    recalls = [each["recall"] for each in told if each["recall"] is not None]
    guessed = {index for index, result in ways.get(NONE, {}).items() if result["score"] >= 1}
    others = [result["score"] for index, result in own.items() if index not in guessed]
    whole = ways.get(WHOLE, {})
    common = [index for index in own if index in whole]
    change = None
    if common and way != WHOLE:
        change = compare_pairs([whole[index]["score"] for index in common], [own[index]["score"] for index in common])
    return {
        "way": way,
        "chunk_tokens": told[0].get("chunk_tokens") if told else None,
        "budget_tokens": told[0].get("budget_tokens") if told else None,
        "n": len(results),
        "score": interval.mean,
        "low": interval.low,
        "high": interval.high,
        "recall": fmean(recalls) if recalls else None,
        "without": fmean(others) if others else None,
        "difference": change.mean if change else None,
        "difference_low": change.low if change else None,
        "difference_high": change.high if change else None,
        "prompt_tokens": fmean(result["prompt_tokens"] for result in results),
        "seconds": fmean(result["seconds"] for result in results),
    }
