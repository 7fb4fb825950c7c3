"""Tasks made from a seed: RULER's eight kinds of needles in a haystack and one whose needle is missing; tracing of
variables, counting of words, and walks in graphs, whose whole context matters; keys of a JSON object. Reads no file."""

from __future__ import annotations

import re
import string
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise
from random import Random
from typing import Literal

from ulysses_cli.evaluate import sample
from ulysses_cli.evaluate.sample import Draft, Sample, Span, Task

DRAW = {
    "words": lambda random: sample.draw_keys(random, 1)[0],
    "numbers": sample.draw_number,
    "uuids": sample.draw_uuid,
}
NAMES = {"words": "word", "numbers": "number", "uuids": "uuid"}
# After a full stop and a blank, after a mark of Chinese or Japanese, and at an empty line.
SENTENCE_ENDS = re.compile(r"(?<=[.!?])\s+|(?<=[。！？])|\n\s*\n")
MAX_SENTENCE = 300  # bytes
# Gives that many sentences of haystack, the same for the same source.
Haystack = Callable[[Random, int], list[str]]


def repeat_noise(_: Random, number: int) -> list[str]:
    return [sample.NOISE] * number


def draw_sentences(random: Random, number: int) -> list[str]:
    return [sample.draw_sentence(random) for _ in range(number)]


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
        return sample.draw_keys(random, number) if kind == "words" else [DRAW[kind](random) for _ in range(number)]

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


NUM_HOPS = 4
NUM_COMMON, COMMON_TIMES, RARE_TIMES = 10, 30, 3
SHORT_LENGTH, SHORT_COMMON_TIMES, SHORT_RARE_TIMES = 4096, 6, 1
CODED_ALPHA, CODED_LETTERS = 2.0, 6
MIN_NODES, TOKENS_OF_NODE = 16, 50  # an edge has about 20 tokens: each node has two or three at any length
MAX_REACHED, MAX_STARTS = 20, 100


def trace_variables(random: Random, _: int) -> Draft:
    """One chain of five names of one value, among noise; an example stands before it."""
    seed = random.getrandbits(64)

    def render(num_units: int) -> Sample:
        own = Random(seed)
        example, example_names, example_value, _ = _make_chain(own, 5)
        text, names, value, evidence = _make_chain(own, num_units)
        head = "Variables are set in the text below, some to the values of others.\n"
        shown = f"{example}\n{_ask(example_value)} They are: {' '.join(example_names)}\n\n"
        content = f"{head}{shown}{text}\n{_ask(value)}"
        at = len(head) + len(shown)
        spans = tuple((at + first, at + last) for first, last in evidence)
        context = at, at + len(text)
        return Sample("vt", content, tuple(names), "all", 30, " They are:", spans, context=context)

    return render


def _ask(value: str) -> str:
    return f"Which {NUM_HOPS + 1} variables have the value {value} in the end?"


def _make_chain(random: Random, num_units: int) -> tuple[str, list[str], str, list[Span]]:
    names: list[str] = []
    while len(names) <= NUM_HOPS:
        name = "".join(random.choices(string.ascii_uppercase, k=5))
        names += [name] if name not in names else []
    value = str(random.randrange(10000, 100000))
    lines = [f"VAR {names[0]} = {value}"]
    lines += [f"VAR {new} = VAR {old}" for old, new in pairwise(names)]
    places = sorted(random.random() for _ in lines)
    hay = [(float(at), sample.NOISE) for at in range(num_units)]
    hay += [(int(place * num_units) - 0.5, line) for place, line in zip(places, lines, strict=True)]
    evidence, parts, end = list[Span](), [], 0
    for _, line in sorted(hay, key=lambda each: each[0]):
        if line.startswith("VAR"):
            evidence.append((end, end + len(line)))
        parts.append(line)
        end += len(line) + 1
    return "\n".join(parts), names, value, evidence


def count_common_words(random: Random, length: int) -> Draft:
    """Ten words come more often than the others of a numbered list; an example stands before it."""
    seed = random.getrandbits(64)
    common_times, rare_times = COMMON_TIMES, RARE_TIMES
    if length < SHORT_LENGTH:
        common_times, rare_times = SHORT_COMMON_TIMES, SHORT_RARE_TIMES

    def render(num_units: int) -> Sample:
        own = Random(seed)
        example, example_words = _make_list(own, 20, 3, 1)
        text, common = _make_list(own, num_units, common_times, rare_times)
        head = f"Below is a numbered list of words. Remember the {NUM_COMMON} that come most often.\n"
        question = f"\nWhich {NUM_COMMON} words come most often in the list above?"
        shown = f"{example}{question} They are: {' '.join(example_words)}\n\n"
        begin = len(head) + len(shown)
        return Sample(
            "cwe", f"{head}{shown}{text}{question}", tuple(common), "all", 120, " They are:",
            context=(begin, begin + len(text)),
        )  # fmt: skip

    return render


def _make_list(random: Random, num_rare: int, common_times: int, rare_times: int) -> tuple[str, list[str]]:
    drawn = sample.draw_words(random, NUM_COMMON + num_rare)
    common, rare = drawn[:NUM_COMMON], drawn[NUM_COMMON:]
    listed = common * common_times + rare * rare_times
    random.shuffle(listed)
    return " ".join(f"{number}. {word}" for number, word in enumerate(listed, 1)), common


def find_frequent_words(random: Random, length: int) -> Draft:
    """Coded words whose frequencies fall with the square of their rank; the most frequent word is dots. The question
    asks for the next three."""
    seed = random.getrandbits(64)
    vocabulary_size = max(8, length // 50)

    def render(num_units: int) -> Sample:
        own = Random(seed)
        coded: dict[str, None] = {}
        while len(coded) < vocabulary_size:
            coded["".join(own.choices(string.ascii_lowercase, k=CODED_LETTERS))] = None
        ranked = ["...", *coded]
        weights = [rank**-CODED_ALPHA for rank in range(1, len(ranked) + 1)]
        total, listed = sum(weights), list[str]()
        for word, weight in zip(ranked, weights, strict=True):
            listed += [word] * round(num_units * weight / total)
        listed += [own.choice(ranked[5:]) for _ in range(num_units - len(listed))]
        listed = listed[:num_units] if len(listed) > num_units else listed
        own.shuffle(listed)
        head = "Read the coded text below, and count how often each coded word comes. Leave out the dots.\n"
        question = "\nWhich three coded words come most often in the text above?"
        text = " ".join(listed)
        return Sample(
            "fwe", f"{head}{text}{question}", tuple(ranked[1:4]), "all", 50, " They are:",
            context=(len(head), len(head) + len(text)),
        )  # fmt: skip

    return render


def walk_graph(random: Random, length: int) -> Draft:
    """A list of edges between nodes that each have two or three. The question asks for the nodes that a number of steps
    from one node lead to; it begins at one from which so few are reached that their names fit an answer."""
    seed, num_nodes = random.getrandbits(64), max(MIN_NODES, length // TOKENS_OF_NODE)

    def render(num_units: int) -> Sample:
        own = Random(seed)
        nodes = [f"{own.getrandbits(40):010x}" for _ in range(num_nodes)]
        edges: dict[tuple[str, str], None] = {}
        while len(edges) < min(max(4, num_units), num_nodes**2 // 2):  # the same edges come first
            edges[own.choice(nodes), own.choice(nodes)] = None
        num_steps = Random(seed + 1).choice((1, 2))
        targets = defaultdict[str, list[str]](list)
        for source, target in edges:
            targets[source].append(target)
        start, frontier, used = _choose_start(targets, num_steps)
        head = "Below is a directed graph, one edge per line.\n"
        lines = [f"{source} -> {target}" for source, target in edges]
        question = (
            f"\nFollow the edges from {start}. Which nodes are at a distance of exactly {num_steps}, by the shortest "
            "way? End with one line: Final Answer: [node, node, ...]"
        )
        evidence, end = list[Span](), len(head)
        for line, (source, _) in zip(lines, edges, strict=True):
            if source in used:
                evidence.append((end, end + len(line)))
            end += len(line) + 1
        content = f"{head}" + "\n".join(lines) + question
        context = len(head), end - 1
        return Sample(
            "graphs", content, tuple(sorted(frontier)), "set_f1", 512, "", tuple(evidence), context=context
        )  # fmt: skip

    return render


def _choose_start(targets: Mapping[str, Sequence[str]], num_steps: int) -> tuple[str, set[str], set[str]]:
    """The first node that reaches some others, but few, or else the one that reaches fewest: with those that it
    reaches, and those whose edges lead there."""
    walks = [(start, *_walk(targets, start, num_steps)) for start in islice(targets, MAX_STARTS)]
    for start, frontier, used in walks:
        if 0 < len(frontier) <= MAX_REACHED:
            return start, frontier, used
    return min(walks, key=lambda walk: len(walk[1]))


def _walk(targets: Mapping[str, Sequence[str]], start: str, num_steps: int) -> tuple[set[str], set[str]]:
    reached, frontier, used = {start}, {start}, set[str]()
    for _ in range(num_steps):
        used |= frontier
        frontier = {target for source in frontier for target in targets.get(source, ())} - reached
        reached |= frontier
    return frontier, used


def look_up_uuids(random: Random, _: int) -> Draft:
    """A JSON object whose keys and values are all uuids. The question asks for the value of one key."""
    seed = random.getrandbits(64)

    def render(num_units: int) -> Sample:
        own = Random(seed)
        key, value, depth = sample.draw_uuid(own), sample.draw_uuid(own), own.random()
        pairs = [f'"{sample.draw_uuid(own)}": "{sample.draw_uuid(own)}"' for _ in range(num_units)]
        at, asked = int(depth * num_units), f'"{key}": "{value}"'
        pairs.insert(at, asked)
        head = "Below is a JSON object.\n"
        text = "{" + ",\n".join(pairs) + "}"
        begin = len(head) + 1 + sum(len(pair) + 2 for pair in pairs[:at])
        question = f"\nWhich value does the JSON object give to the key {key}?"
        return Sample(
            "json_kv", f"{head}{text}{question}", (value,), "all", 128, f" The value of the key {key} is",
            ((begin, begin + len(asked)),), context=(len(head), len(head) + len(text)),
        )  # fmt: skip

    return render


JSON_LOOKUP = Task("json_kv", look_up_uuids)
COUNTING_TASKS = (
    Task("vt", trace_variables, has_one_answer=False),
    Task("cwe", count_common_words, has_one_answer=False),
    Task("fwe", find_frequent_words, has_one_answer=False),
)
GRAPHS = Task("graphs", walk_graph, has_one_answer=False)
