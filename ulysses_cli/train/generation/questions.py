"""Asks a model questions on all ranks: each group of sequence ranks answers prompts of its own, and rank 0 scores and
records them. Used by `ulysses evaluate` and between the steps of a run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ulysses_cli.evaluate.prompts import Prompter, TaskPrompt
from ulysses_cli.evaluate.scorers import score
from ulysses_cli.train.engine import Engine
from ulysses_cli.train.generation.decoding import Generator, count_shared_tokens
from ulysses_cli.train.generation.on_engine import generating
from ulysses_cli.train.processes.consistency import gather_values, scatter_values
from ulysses_cli.train.processes.groups import Groups

MAX_TOGETHER = 32  # prompts that share a prefill
MAX_APART = 512  # tokens of a prompt that it does not share with those it is read with: they are read without tiles


@dataclass(frozen=True)
class Question:
    """What travels to the ranks: tokens, and the tokens of the right answer where it has one form."""

    tokens: tuple[int, ...]
    max_new_tokens: int
    answer: tuple[int, ...]


@dataclass(frozen=True)
class Answer:
    """What comes back. `seconds`: its share of the group's time."""

    tokens: list[int]
    log_probability: float | None
    is_greedy: bool | None
    seconds: float


@dataclass(frozen=True, eq=False)
class Quiz:
    """What rank 0 has: prompts in their order, and what is done with each result. Other ranks have none."""

    prompts: Iterable[TaskPrompt]
    prompter: Prompter
    one_answer_tasks: Collection[str]
    record: Callable[[dict[str, Any]], None]


def ask_questions(
    engine: Engine,
    quiz: Quiz | None,
    stop_tokens: Collection[int],
    should_stop: Callable[[], bool] = lambda: False,
    report: Callable[[int], None] = lambda _: None,
) -> bool:
    """Collective over all ranks. Returns whether all questions were asked: `should_stop` of any rank ends it early.
    `report` is told on each rank how many were asked so far."""
    groups, num_asked = engine.groups, 0
    num_groups = groups.layout.world_size // groups.sp_axis.size
    batches = _collect(quiz.prompts) if quiz is not None else iter(())
    with generating(engine) as generator:
        while True:
            prompts = [next(batches, []) for _ in range(num_groups)] if quiz is not None else []
            if any(gather_values(should_stop(), groups.host_group)):
                return False
            # rank 0 sends each rank its group's questions, on the host
            num_next, own = scatter_values(
                _share(prompts, quiz, groups) if quiz is not None else None, groups.host_group
            )
            if not num_next:
                return True
            num_asked += num_next
            report(num_asked)
            answers = _answer(generator, own, stop_tokens)
            generator.finish()
            answered = gather_values((groups.dp_index, answers), groups.host_group)
            if quiz is not None:
                by_group = dict(answered)
                for index, batch in enumerate(prompts):
                    for prompt, answer in zip(batch, by_group[index], strict=True):
                        quiz.record(_describe(prompt, answer, quiz.prompter))


def _share(prompts: Sequence[Sequence[TaskPrompt]], quiz: Quiz, groups: Groups) -> list[tuple[int, list[Question]]]:
    """For each rank: how many questions all groups are asked, and its own group's."""
    num_next = sum(map(len, prompts))
    own = [(num_next, [_make_question(prompt, quiz) for prompt in batch]) for batch in prompts]
    return [own[groups.layout.get_dp_index(rank)] for rank in range(groups.layout.world_size)]


def _collect(prompts: Iterable[TaskPrompt]) -> Iterator[list[TaskPrompt]]:
    """Yields neighbours that begin alike together."""
    batch: list[TaskPrompt] = []
    for prompt in prompts:
        if batch and (len(batch) == MAX_TOGETHER or not _begin_alike(batch[0], prompt)):
            yield batch
            batch = []
        batch.append(prompt)
    if batch:
        yield batch


def _begin_alike(first: TaskPrompt, second: TaskPrompt) -> bool:
    if first.sample.task != second.sample.task or first.sample.max_new_tokens != second.sample.max_new_tokens:
        return False
    longest = max(len(first.tokens), len(second.tokens))
    return longest - count_shared_tokens([first.tokens, second.tokens]) <= MAX_APART


def _make_question(prompt: TaskPrompt, quiz: Quiz) -> Question:
    sample, answer = prompt.sample, list[int]()
    if sample.task in quiz.one_answer_tasks and len(sample.references) == 1:
        answer = quiz.prompter.encode_answer(prompt, sample.references[0])
    return Question(prompt.tokens, sample.max_new_tokens, tuple(answer))


def _answer(generator: Generator, questions: Sequence[Question], stop_tokens: Collection[int]) -> list[Answer]:
    """This group's answers. The group's ranks have the same questions."""
    if not questions:
        return []
    started = time.monotonic()
    generator.read([question.tokens for question in questions])
    given = generator.generate(questions[0].max_new_tokens, stop_tokens)
    scores = None
    if all(question.answer for question in questions):
        scores = generator.score([question.answer for question in questions])
    seconds = (time.monotonic() - started) / len(questions)
    return [
        Answer(
            tokens, scores[at].log_probability if scores else None, scores[at].is_greedy if scores else None, seconds
        )
        for at, tokens in enumerate(given)
    ]


def _describe(prompt: TaskPrompt, answer: Answer, prompter: Prompter) -> dict[str, Any]:
    sample = prompt.sample
    text = prompter.tokenizer.decode(answer.tokens, skip_special_tokens=True)
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
        "answer_tokens": len(answer.tokens),
        "score": score(sample, text),
        "log_probability": answer.log_probability,
        "is_greedy": answer.is_greedy,
        "seconds": round(answer.seconds, 4),
        **({"facts": dict(sample.facts)} if sample.facts else {}),
    }
