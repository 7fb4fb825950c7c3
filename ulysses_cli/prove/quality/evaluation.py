"""Evaluates a model on ranks of this machine: builds it without an optimizer, asks all questions, sums up."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ulysses_cli.evaluate.prompts import Prompter, TaskPrompt
from ulysses_cli.evaluate.suites import Amount, Plan, Sources, count_prompts, make_prompts, plan_suites
from ulysses_cli.evaluate.summary import summarize
from ulysses_cli.plan.files.weight_files import list_weight_files
from ulysses_cli.plan.recipe.loader import parse_recipe
from ulysses_cli.prove.quality.results_file import ResultsFile
from ulysses_cli.prove.ranks.ranks import run_on_ranks
from ulysses_cli.prove.results import describe_machine

TIME_LIMIT = 14 * 24 * 3600.0
GROUP_TIMEOUT = timedelta(days=1)
REPORT_SECONDS = 5.0


@dataclass(frozen=True)
class ModelEvaluation:
    """Everything that the ranks need to know. `model`: the text of a recipe; `output`: the folder of the results."""

    model: str
    suites: tuple[str, ...]
    amount: Amount
    sources: Sources
    num_ranks: int
    output: str
    with_template: bool | None = None
    max_prompt_tokens: int = 0

    def list_settings(self, tokenizer: Any) -> dict[str, Any]:
        """What results depend on. Tokenizer and template are hashed, since two models may share a name."""
        vocabulary = hashlib.sha256(repr(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()[:16]
        template = hashlib.sha256(str(getattr(tokenizer, "chat_template", "")).encode()).hexdigest()[:16]
        recipe = parse_recipe(self.model, "evaluate", []).recipe
        return {
            "model": recipe.model.model_dump(mode="json"),
            "weights": _fingerprint(Path(recipe.model.name_or_path or "").expanduser()),
            "seed": self.amount.seed,
            "tokenizer": vocabulary,
            "template": template,
            "with_template": self.with_template,
            "sources": {name: str(path) if path else None for name, path in asdict(self.sources).items()},
        }


def _fingerprint(folder: Path) -> str:
    """Differs after other weights were written into the folder. '' for a model of the hub."""
    if not folder.is_dir():
        return ""
    facts = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in list_weight_files(folder)]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def run_evaluation(evaluation: ModelEvaluation, device: str, report: Callable[[str], None]) -> dict[str, Any]:
    """Returns the findings that report/quality.py shows."""
    ours, theirs = Pipe(duplex=False)
    listener = threading.Thread(target=_pass_on, args=(ours, report), daemon=True)
    listener.start()
    started = time.monotonic()
    try:
        findings: dict[str, Any] = run_on_ranks(
            evaluation.num_ranks, _run_rank, evaluation, theirs, device=device, time_limit=TIME_LIMIT
        )
    finally:
        theirs.close()
    return {
        **findings,
        "command": "evaluate",
        "passed": True,
        "seconds": round(time.monotonic() - started, 2),
        "num_ranks": evaluation.num_ranks,
        "machine": describe_machine(),
    }


def _pass_on(pipe: Connection, report: Callable[[str], None]) -> None:
    while True:
        try:
            report(pipe.recv())
        except (EOFError, OSError):
            return


def _run_rank(device: Any, evaluation: ModelEvaluation, pipe: Connection) -> dict[str, Any] | None:
    """One rank. Returns rank 0's findings."""
    from ulysses_cli.data.tokenizing.tokenizer import load_tokenizer
    from ulysses_cli.plan.planner.lever_choice import choose_levers
    from ulysses_cli.plan.resolved import make_layout, settle
    from ulysses_cli.train.assembly.build import build_for_answers
    from ulysses_cli.train.assembly.model_config import load_model_config, read_shape
    from ulysses_cli.train.generation.questions import Quiz, ask_questions
    from ulysses_cli.train.processes.groups import make_groups

    recipe = parse_recipe(evaluation.model, "evaluate", []).recipe
    tokenizer = load_tokenizer(recipe.model, recipe.data)
    shape = read_shape(recipe, load_model_config(recipe), tokenizer)
    groups = make_groups(make_layout(recipe), GROUP_TIMEOUT)
    send = pipe.send if groups.is_first else _ignore
    plan = settle(recipe, shape, choose_levers(recipe, shape, None).levers)
    send("loading the model")
    engine = build_for_answers(plan, groups, device, send)
    quiz, own = None, None
    if groups.is_first:
        own = _Questions(evaluation, tokenizer, send)
        quiz = Quiz(own.walk(), own.prompter, own.one_answer_tasks, own.record)
    ask_questions(engine, quiz, list_stop_tokens(tokenizer, engine.wrapped.module.model))
    return own.describe() if own is not None else None


def _ignore(_: object) -> None:
    return None


def list_stop_tokens(tokenizer: Any, model: Any) -> set[int]:
    """Tokens at which an answer ends: the tokenizer's and those of the model's generation config."""
    ends = {tokenizer.eos_token_id}
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ends.update(named if isinstance(named, (list, tuple)) else [named])
    for token in ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>"):
        number = tokenizer.convert_tokens_to_ids(token)
        if number is not None and number != tokenizer.unk_token_id:
            ends.add(number)
    return {end for end in ends if isinstance(end, int)}


class _Questions:
    """Rank 0's side: which questions are left, their results, and the progress with the time that is left."""

    def __init__(self, evaluation: ModelEvaluation, tokenizer: Any, send: Callable[[str], None]) -> None:
        self.evaluation, self.send = evaluation, send
        self.prompter = Prompter(tokenizer, with_template=evaluation.with_template)
        self.plan: Plan = plan_suites(evaluation.suites, evaluation.sources)
        self.one_answer_tasks = {task.name for task in self.plan.tasks if task.has_one_answer}
        self.file = ResultsFile(Path(evaluation.output) / "results.jsonl", evaluation.list_settings(tokenizer))
        self.too_long: list[dict[str, Any]] = []
        self.total = count_prompts(self.plan, evaluation.amount)
        self.num_before = len(self.file.results)
        self.started = self.told = time.monotonic()
        if self.num_before:
            send(f"going on: {self.num_before} questions are answered already")

    def walk(self) -> Iterator[TaskPrompt]:
        """Questions that are too long are listed, and not cut."""
        limit = self.evaluation.max_prompt_tokens
        for prompt in make_prompts(self.plan, self.prompter, self.evaluation.amount, _ignore, self.file.done):
            needed = len(prompt.tokens) + prompt.sample.max_new_tokens
            if limit and not prompt.length and needed > limit:
                self.too_long.append({"id": prompt.name, "task": prompt.sample.task, "tokens": needed})
                continue
            yield prompt

    def record(self, result: dict[str, Any]) -> None:
        self.file.add(result)
        now, number = time.monotonic(), len(self.file.results) - self.num_before
        if now - self.told >= REPORT_SECONDS or number == 1:
            self.told = now
            left = (now - self.started) / number * max(0, self.total - self.num_before - number - len(self.too_long))
            place = f"{number + self.num_before} of {self.total - len(self.too_long)}"
            self.send(f"question {place}, {result['task']} at {result['prompt_tokens']:,} tokens; {left:.0f} s left")

    def describe(self) -> dict[str, Any]:
        wanted = {task.name for task in self.plan.tasks}
        lengths, number = self.evaluation.amount.lengths, self.evaluation.amount.num_samples
        results = [
            result
            for result in self.file.results
            if not result["length"]
            or (result["task"] in wanted and result["length"] in lengths and result["index"] < number)
        ]
        return {**summarize(results, self.too_long), "results": results, "notes": list(self.plan.notes)}
