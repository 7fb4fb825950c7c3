"""The suites by name: which tasks they have, and the samples of each length, always the same for a seed."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

from ulysses_cli.evaluate.documents import CODE_FILES, make_code_task, make_question_task
from ulysses_cli.evaluate.files import FILE_SUITES, list_file_notes, read_suite
from ulysses_cli.evaluate.made_tasks import (
    COUNTING_TASKS,
    GRAPHS,
    JSON_LOOKUP,
    TEXT_TASKS,
    BookHaystack,
    draw_sentences,
    list_needle_tasks,
)
from ulysses_cli.evaluate.prompts import Fitter, Progress, Prompter, TaskPrompt, check_draft, name_prompt
from ulysses_cli.evaluate.sample import Sample, Task
from ulysses_cli.evaluate.summary import RULER_TASKS
from ulysses_cli.evaluate.summary import TASK as LOSS
from ulysses_cli.plan.files import read_regular
from ulysses_cli.plan.problem import Problem, RecipeError
from ulysses_cli.plan.units import format_count

NEEDLES = tuple(name for name in RULER_TASKS if name.startswith("niah"))
QUESTIONS = ("qa_1", "qa_2")
SEEDED: dict[str, tuple[str, ...]] = {
    "ruler": (*NEEDLES, "vt", "cwe", "fwe", *QUESTIONS),
    "niah": (*NEEDLES, "niah_none"),
    "graphs": ("graphs",),
    "helmet-recall": ("niah_multikey_2", "niah_multikey_3", "niah_multivalue", "json_kv"),
    "code": ("code_recall",),
}
DEFAULT_SAMPLES = 20
MAX_TEXT_BYTES = 1 << 30  # of a haystack's file
# Endings of the files that are read below a folder; a folder of code may hold checkpoints too.
READ = {"text": (".txt",), "code": CODE_FILES, "path": (".json", ".jsonl", ".parquet")}
CALLS = "calls"  # turns of held-out chats in which the assistant calls tools
HARNESS = "lm-eval:"  # before the name of one of its tasks
SUITES = (*SEEDED, LOSS, CALLS, *FILE_SUITES, f"{HARNESS}TASK")


@dataclass(frozen=True)
class Sources:
    """The user's files. `text`: of haystacks; `squad`, `hotpotqa`: of the two question tasks; `code`: a folder; `path`:
    of the suite that is read from files; `documents`: whose loss is measured, or chats whose calls are asked, data sets
    as a recipe writes them;
    `harness`: a folder of task files for lm-eval."""

    text: Path | None = None
    squad: Path | None = None
    hotpotqa: Path | None = None
    code: Path | None = None
    path: Path | None = None
    harness: Path | None = None
    documents: tuple[Mapping[str, Any], ...] = ()

    def as_json(self) -> dict[str, Any]:
        paths = {name: str(path) if path else None for name, path in self._list_paths().items()}
        return {**paths, "documents": [dict(each) for each in self.documents]}

    def hash_content(self) -> dict[str, str]:
        """Of the files and folders that are named. Documents are compared one by one, when they are read."""
        return {
            name: _hash_files(path, READ.get(name)) for name, path in self._list_paths().items() if path is not None
        }

    def _list_paths(self) -> dict[str, Path | None]:
        return {name: value for name, value in vars(self).items() if name != "documents"}

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Sources:
        """Takes what `as_json` returned."""
        paths = {name: Path(value) if value else None for name, value in values.items() if name != "documents"}
        return cls(**paths, documents=tuple(values["documents"]))


def _hash_files(path: Path, endings: Collection[str] | None) -> str:
    """Names and content of a file, or of the files below a folder whose names end so; None: of all."""
    found = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
    digest = hashlib.sha256()
    for file in found:
        if file == path or endings is None or file.suffix in endings:
            with open(file, "rb") as stream:
                content = hashlib.file_digest(stream, "sha256").hexdigest()
            digest.update(f"{file.relative_to(path).as_posix()} {content}\n".encode())
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Amount:
    """Which samples are made of each task. `of_files`: how many are taken of each task that is read from files; None:
    all."""

    lengths: tuple[int, ...]
    num_samples: int = DEFAULT_SAMPLES
    seed: int = 0
    of_files: int | None = None


@dataclass(frozen=True)
class Plan:
    """What is evaluated. `notes`: what is left out, and why; `has_loss`: whether the documents' loss is measured;
    `has_calls`: whether their calls are asked; `harness`: names of lm-eval's tasks."""

    tasks: tuple[Task, ...]
    samples: tuple[Sample, ...]
    notes: tuple[str, ...]
    has_loss: bool = False
    has_calls: bool = False
    harness: tuple[str, ...] = ()


def plan_suites(names: Sequence[str], sources: Sources, amount: Amount | None = None) -> Plan:
    """Finds the tasks and reads the files. Names of single tasks serve too. What is wrong is said at once."""
    amount = amount or Amount(())
    text = draw_sentences if sources.text is None else BookHaystack(_read_text(sources.text))
    known = {task.name: task for task in (*list_needle_tasks(text), *COUNTING_TASKS, GRAPHS, JSON_LOOKUP)}
    wanted: dict[str, bool] = {}  # by task: whether it was named itself
    samples: list[Sample] = []
    problems, notes = list[Problem](), list[str]()
    for name in names:
        if name in SEEDED:
            wanted.update({task: wanted.get(task, False) for task in SEEDED[name]})
        elif name in known or name in (*QUESTIONS, "code_recall"):
            wanted[name] = True
        elif name in FILE_SUITES:
            read = _choose_rows(read_suite(name, sources.path), amount)
            samples += read
            notes += list_file_notes(name, sources.path, read)
        elif name in (LOSS, CALLS):
            if not sources.documents:
                noun = "documents" if name == LOSS else "chats"
                hint = f"add --path with a file, a folder or a data set of {noun}"
                problems.append(Problem("--suite", f"{name} is measured on {noun}, and none were named", hint))
        elif name.startswith(HARNESS):
            if find_spec("lm_eval") is None:
                hint = "pip install 'ulysses-cli[lm-eval]'"
                problems.append(Problem("--suite", f"{name} needs lm_eval, which is not installed", hint))
        else:
            every = ", ".join(dict.fromkeys((*SUITES, *known, *QUESTIONS, "code_recall")))
            problems.append(Problem("--suite", f"no suite or task is called {name}", f"use some of: {every}"))
    tasks = []
    for name, is_named in wanted.items():
        if name in known:
            tasks.append(known[name])
            continue
        option, file = {
            "qa_1": ("--squad", sources.squad),
            "qa_2": ("--hotpotqa", sources.hotpotqa),
            "code_recall": ("--code", sources.code),
        }[name]
        if file is not None:
            tasks.append(make_code_task(file) if name == "code_recall" else make_question_task(name, file))
        elif is_named or name == "code_recall":
            problems.append(Problem("--suite", f"{name} is made from your files", f"add {option} PATH"))
        else:
            notes.append(f"{name} is left out: it is made from your files, add {option} PATH")
    problems += _find_unread(names, sources, wanted)
    if problems:
        raise RecipeError(problems)
    harness = tuple(name.removeprefix(HARNESS) for name in names if name.startswith(HARNESS))
    return Plan(tuple(tasks), tuple(samples), tuple(notes), LOSS in names, CALLS in names, harness)


def _choose_rows(samples: Sequence[Sample], amount: Amount) -> list[Sample]:
    """As many of each task as are wanted, numbered by their place in the files. Those of a small number are among those
    of a larger one, with which an evaluation can be continued."""
    numbered = [replace(sample, number=at) for at, sample in enumerate(samples)]
    if amount.of_files is None:
        return numbered
    tasks = defaultdict[str, list[int]](list)
    for sample in numbered:
        tasks[sample.task].append(sample.number)
    chosen = set[int]()
    for task, numbers in tasks.items():
        make_source(amount.seed, task, 0, 0).shuffle(numbers)
        chosen.update(numbers[: amount.of_files])
    return [sample for sample in numbered if sample.number in chosen]


def _find_unread(names: Sequence[str], sources: Sources, tasks: Collection[str]) -> Iterator[Problem]:
    """Files that none of the tasks reads."""
    readers = (
        ("--text", sources.text, TEXT_TASKS),
        ("--squad", sources.squad, ("qa_1",)),
        ("--hotpotqa", sources.hotpotqa, ("qa_2",)),
        ("--code", sources.code, ("code_recall",)),
    )
    for option, file, own in readers:
        if file is not None and not set(own) & set(tasks):
            hint = f"leave it out, or add one of {', '.join(own)} to --suite"
            yield Problem(option, f"no task of {', '.join(names)} reads it", hint)


def _read_text(path: Path) -> str:
    files = [path] if path.is_file() else sorted(path.rglob("*.txt"))
    try:
        text = "\n".join(read_regular(file, MAX_TEXT_BYTES).decode() for file in files)
    except (OSError, ValueError) as error:
        raise RecipeError([Problem("--text", f"{path} cannot be read as text: {error}")]) from None
    if not text.strip():
        what = "holds no text" if path.exists() else "does not exist"
        raise RecipeError([Problem("--text", f"{path} {what}", "name a text file, or a folder of .txt files")])
    return text


def make_source(seed: int, task: str, length: int, index: int) -> Random:
    """A random source that is the same on every machine, and independent of which other samples are made."""
    digest = hashlib.sha256(f"{seed} {task} {length} {index}".encode()).digest()
    return Random(int.from_bytes(digest[:8]))


def make_prompts(
    plan: Plan, prompter: Prompter, amount: Amount, report: Progress, done: Collection[str] = ()
) -> Iterator[TaskPrompt]:
    """Yields the prompts of all tasks and lengths, the shortest length first, then those of files, but for those in
    `done`."""
    fitter = Fitter(prompter)
    for length in sorted(amount.lengths):
        for task in plan.tasks:
            report(f"{task.name}, {length:,} tokens")
            left = [at for at in range(amount.num_samples) if name_prompt(task.name, length, at) not in done]
            for index in [0, *left] if left and left[0] else left:
                draft = task.make(make_source(amount.seed, task.name, length, index), length)
                prompt = fitter.fit(task.name, draft, length, index)
                if index in left:
                    yield prompt
    for sample in order_alike(plan.samples):
        if name_prompt(sample.task, 0, sample.number) not in done:
            yield prompter.make(sample, sample.number)


def order_alike(samples: Sequence[Sample]) -> list[Sample]:
    """Those over one text beside each other, since neighbours that begin alike share a prefill
    (train/generation/questions.py). Texts come in the order in which they stand in the files."""
    groups: dict[tuple[str, str], list[Sample]] = {}
    for sample in samples:
        end = sample.context[1] if sample.context is not None else len(sample.content)
        groups.setdefault((sample.task, sample.content[:end]), []).append(sample)
    return [each for group in groups.values() for each in group]


def check_lengths(plan: Plan, prompter: Prompter, amount: Amount) -> None:
    """Raises RecipeError for a task that does not fit the shortest length: by its first sample, or where the user's
    files decide how long a question is at least, by any of them."""
    shortest = Amount(tuple(sorted(amount.lengths)[:1]), 1, amount.seed)
    problems: list[Problem] = []
    for task in plan.tasks:
        try:
            list(make_prompts(Plan((task,), (), ()), prompter, shortest, lambda _: None))
            for length in shortest.lengths if task.is_of_files else ():
                for index in range(1, amount.num_samples):
                    draft = task.make(make_source(amount.seed, task.name, length, index), length)
                    check_draft(task.name, draft, length, prompter)
        except RecipeError as error:
            problems += error.problems
    if problems:
        raise RecipeError(problems)


def check_samples(plan: Plan, prompter: Prompter, limit: int) -> None:
    """Raises RecipeError where no question of the files fits with its answer. The shortest texts are counted first, so
    that as a rule one is enough."""
    least = 0
    for sample in sorted(plan.samples, key=lambda sample: len(sample.content)):
        needed = len(prompter.encode(sample)) + prompter.count_new_tokens(sample)
        if needed <= limit:
            return
        least = min(least or needed, needed)
    if plan.samples:
        number = format_count(len(plan.samples), "question")
        message = f"{limit:,} tokens hold none of {number} of the files: with its answer the shortest needs {least:,}"
        raise RecipeError([Problem("--max-length", message, f"use {least:,} or more")])


def count_prompts(plan: Plan, amount: Amount) -> Counter[int]:
    """By their length; 0 for samples of files."""
    number = len(plan.tasks) * amount.num_samples
    return Counter({**dict.fromkeys(amount.lengths, number), 0: len(plan.samples)})
