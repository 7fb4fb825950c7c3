"""The file of an evaluation's results: one line per question, after a line that says what was evaluated. A killed
evaluation goes on where it was. Also what a line holds, and the time that is left."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ulysses_cli.evaluate.prompts import TaskPrompt
from ulysses_cli.evaluate.scoring import score, score_names
from ulysses_cli.evaluate.suites import Amount, Plan
from ulysses_cli.evaluate.summary import TASK as LOSS
from ulysses_cli.plan.problem import Problem, RecipeError

KIND = "evaluation"
REPORT_SECONDS = 5.0
SPENT = "spent"  # of a result: seconds since the one before it, or since its start


class ResultsFile:
    """Results are appended and written through at once."""

    def __init__(self, file: Path, settings: Mapping[str, Any]) -> None:
        self.file, self.results = file, list[dict[str, Any]]()
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = _read_lines(file)
        if lines:
            _compare(lines[0].get(KIND), dict(settings), file)
            self.results = [line for line in lines[1:] if "score" in line or "loss" in line]
        self.stream = open(file, "a", encoding="utf-8")  # noqa: SIM115 - open as long as the evaluation runs
        if not lines:
            self._write({KIND: dict(settings)})

    @property
    def done(self) -> set[str]:
        return {result["id"] for result in self.results}

    def add(self, result: dict[str, Any]) -> None:
        self.results.append(result)
        self._write(result)

    def _write(self, line: Mapping[str, Any]) -> None:
        self.stream.write(json.dumps(line, ensure_ascii=False) + "\n")
        self.stream.flush()


def _read_lines(file: Path) -> list[dict[str, Any]]:
    """The whole lines. A line that a killed evaluation left unfinished is cut off."""
    if not file.exists():
        return []
    content = file.read_bytes()
    end = content.rfind(b"\n") + 1
    if end < len(content):
        with open(file, "r+b") as stream:
            stream.truncate(end)
    return [json.loads(line) for line in content[:end].splitlines()]


def _compare(before: Any, settings: dict[str, Any], file: Path) -> None:
    """Results of another model or other samples are not mixed."""
    if before == settings:
        return
    changed = sorted(key for key in {*settings, *(before or {})} if (before or {}).get(key) != settings.get(key))
    message = f"{file} holds the results of another evaluation: {', '.join(changed)} differ"
    raise RecipeError([Problem("--output", message, "name another folder, or remove this one")])


FROM_FILES = 0  # stands for a length: questions of files, whose tokens are not counted before they are asked


class TimeLeft:
    """`left`: how many questions of each length are left; `cost`: of reading so many tokens, in any unit. Lengths come
    in rising order, and a long question takes more than its share of the tokens: a mean over those that are answered
    would promise far too little."""

    def __init__(self, left: Mapping[int, int], cost: Callable[[int], float]) -> None:
        self.left, self.cost = Counter(left), cost
        self.seconds: dict[int, list[float]] = defaultdict(list)

    def note(self, length: int, seconds: float) -> None:
        """A question was answered so many seconds after the one before it."""
        self.left[length] -= 1
        self.seconds[length].append(seconds)

    def drop(self, length: int) -> None:
        """A question was answered before this start, or is too long to be asked."""
        self.left[length] -= 1

    def estimate(self) -> float:
        return sum(number * self._expect(length) for length, number in self.left.items() if number > 0)

    def _expect(self, length: int) -> float:
        if length in self.seconds:
            return _mean(self.seconds[length])
        known = [each for each in self.seconds if each != FROM_FILES]
        if length == FROM_FILES or not known:
            return _mean([second for each in self.seconds.values() for second in each])
        nearest = min(known, key=lambda each: abs(each - length))
        return _mean(self.seconds[nearest]) * self.cost(length) / self.cost(nearest)


def _mean(seconds: list[float]) -> float:
    return sum(seconds) / max(1, len(seconds))


def split_results(results: Iterable[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns the answers, and the losses of documents."""
    answers, losses = list[dict[str, Any]](), list[dict[str, Any]]()
    for result in results:
        (answers if "score" in result else losses).append(result)
    return answers, losses


def list_asked(
    results: Iterable[dict[str, Any]], plan: Plan, amount: Amount, prompts: Sequence[TaskPrompt] = ()
) -> list[dict[str, Any]]:
    """The results of what is asked: the folder may hold those of other suites, lengths and samples. `prompts`: those
    that are no part of the plan."""
    made = {task.name for task in plan.tasks} | ({LOSS} if plan.has_loss else set())
    read = {(sample.task, sample.number) for sample in plan.samples}
    read |= {(prompt.sample.task, prompt.index) for prompt in prompts}
    return [
        result
        for result in results
        if (
            result["task"] in made and result["length"] in amount.lengths and result["index"] < amount.num_samples
            if result["length"]
            else (result["task"], result["index"]) in read
        )
    ]


def describe_answer(prompt: TaskPrompt, text: str, measured: Mapping[str, Any]) -> dict[str, Any]:
    """The line of one answer. `measured`: what else is known of it; it goes before what the prompt says."""
    sample = prompt.sample
    return {
        "id": prompt.name,
        "task": sample.task,
        "length": prompt.length,
        "index": prompt.index,
        "prompt_tokens": len(prompt.tokens),
        "depths": list(prompt.depths),
        "prompt_hash": prompt.digest,
        "references": list(sample.references),
        "answer": text,
        "score": score(sample, text),
        **measured,
        **({"names": score_names(text, sample.references[0])} if sample.metric == "calls" else {}),
        **({"facts": dict(sample.facts)} if sample.facts else {}),
        **({"groups": dict(sample.groups)} if sample.groups else {}),
    }
