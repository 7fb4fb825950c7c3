"""Asks a model questions on all ranks: each group of sequence ranks answers prompts of its own, and rank 0 scores and
records them. Makes questions from held-out chats: the prompt of a turn in which the assistant calls tools, as
training shows it.

Used by `ulysses evaluate` and between the steps of a run."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ulysses_cli.data.store import CALL, SAID, TARGET, Flags, Ids
from ulysses_cli.evaluate.prompts import Prompter, TaskPrompt
from ulysses_cli.evaluate.results import describe_answer
from ulysses_cli.evaluate.sample import Sample
from ulysses_cli.evaluate.scoring import read_calls, write_calls
from ulysses_cli.evaluate.suites import CALLS, make_source
from ulysses_cli.plan.problem import Problem, RecipeError
from ulysses_cli.plan.units import format_count
from ulysses_cli.train.engine import Engine
from ulysses_cli.train.generation.decoding import Generator, count_shared_tokens, generating
from ulysses_cli.train.processes.consistency import gather_values, scatter_values
from ulysses_cli.train.processes.groups import Groups

Document = tuple[Ids, Flags | None]
MAX_READ = 2000  # turns with calls, of which those to ask are drawn
ROOM = 16  # tokens of an answer, beside twice those of the right one
SHOWN_CHARS = 200  # of a prompt's end


def make_call_prompts(
    documents: Iterable[Document], tokenizer: Any, number: int, *, seed: int, limit: int, thinking: int = 0
) -> tuple[list[TaskPrompt], list[str]]:
    """`number` turns of those that are targets, drawn by the seed; and notes. `limit`: the most tokens of a prompt with
    its answer. `thinking`: further tokens for an answer. Raises RecipeError where there is no such turn."""
    found, num_unread, num_long = list[TaskPrompt](), 0, 0
    for tokens, flags in documents:
        for turn, (start, stop) in enumerate(_find_answers(flags)):
            bits = np.bitwise_or.reduce(flags[start:stop]) if flags is not None else 0
            if not (bits & CALL and bits & TARGET):
                continue
            calls = read_calls(tokenizer.decode(tokens[start:stop].tolist(), skip_special_tokens=False))
            # few sizes, since questions of one size can share a prefill
            room = (1 << (2 * (stop - start) + ROOM).bit_length()) + thinking
            if not calls:
                num_unread += 1
            elif limit and start + room > limit:
                num_long += 1
            else:
                found.append(_make_prompt(tokens[:start], tokenizer.decode, calls, turn, room, len(found)))
        if len(found) >= max(MAX_READ, number):
            break
    if not found:
        raise RecipeError([_explain_nothing(num_unread, num_long, limit)])
    order = list(range(len(found)))
    make_source(seed, CALLS, 0, 0).shuffle(order)
    chosen = [found[at] for at in sorted(order[:number])]
    notes = [f"calls are asked at {len(chosen):,} of {format_count(len(found), 'turn')} with calls"]
    if num_long:
        notes.append(f"{format_count(num_long, 'turn')} with calls left out: longer than {limit:,} tokens")
    if num_unread:
        notes.append(f"{format_count(num_unread, 'turn')} with calls left out: their form is not known here")
    return chosen, notes


def _find_answers(flags: Flags | None) -> list[tuple[int, int]]:
    """The spans of tokens that the assistant says."""
    if flags is None:
        return []
    edges = np.flatnonzero(np.diff(((flags & SAID) > 0).astype(np.int8), prepend=0, append=0))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _make_prompt(
    tokens: Ids, decode: Callable[..., str], calls: Sequence[Any], turn: int, room: int, index: int
) -> TaskPrompt:
    names = ", ".join(dict.fromkeys(name for name, _ in calls))
    sample = Sample(
        CALLS, decode(tokens[-SHOWN_CHARS:].tolist()), (write_calls(calls),), "calls", room, with_template=False,
        facts={"turn": turn + 1}, groups={"tool": names}, number=index,
    )  # fmt: skip
    return TaskPrompt(sample, tuple(map(int, tokens)), (), index)


def _explain_nothing(num_unread: int, num_long: int, limit: int) -> Problem:
    if num_unread:
        message = f"the {format_count(num_unread, 'turn')} with calls have them in a form that is not known here"
        return Problem("--suite", message, f"leave {CALLS} out")
    if num_long:
        message = f"each of {format_count(num_long, 'turn')} with calls is longer than {limit:,} tokens with its answer"
        return Problem("--max-length", message, "use a larger one")
    hint = "name chats in which the assistant calls tools, with a chat template that shows calls"
    return Problem("--path", "no turn of the chats has a call that is a target", hint)


MAX_TOGETHER = 32  # prompts that share a prefill
MAX_APART = 512  # tokens of a prompt that it does not share with those it is read with: they are read without tiles


@dataclass(frozen=True)
class Question:
    """What travels to the ranks: tokens, the tokens of an answer that is scored, () for none, and texts at which an
    answer ends."""

    tokens: tuple[int, ...]
    max_new_tokens: int
    answer: tuple[int, ...] = ()
    until: tuple[str, ...] = ()

    @property
    def kind(self) -> tuple[int, bool, tuple[str, ...]]:
        """Questions of one kind can be answered together."""
        return self.max_new_tokens, bool(self.answer), self.until


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
    should_stop: Callable[[], bool] | None = None,
    report: Callable[[int], None] = lambda _: None,
) -> bool:
    """Collective over all ranks. Returns whether all questions were asked: `should_stop` of any rank ends it early,
    between two tokens of an answer too.
    `report` is told on each rank how many were asked so far."""
    if quiz is None:
        return answer_questions(engine, None, stop_tokens, should_stop=should_stop, report=report)
    asked: deque[TaskPrompt] = deque()

    def walk() -> Iterator[Question]:
        for prompt in quiz.prompts:
            asked.append(prompt)
            yield _make_question(prompt, quiz)

    def keep(answer: Answer) -> None:
        quiz.record(_describe(asked.popleft(), answer, quiz.prompter))

    return answer_questions(engine, walk(), stop_tokens, keep, should_stop=should_stop, report=report)


def answer_questions(
    engine: Engine,
    questions: Iterable[Question] | None,
    stop_tokens: Collection[int],
    keep: Callable[[Answer], None] = lambda _: None,
    decode: Callable[[list[int]], str] | None = None,
    should_stop: Callable[[], bool] | None = None,
    report: Callable[[int], None] = lambda _: None,
) -> bool:
    """Collective over all ranks. Rank 0 has the questions, and `keep` gets their answers there, in their order.
    `decode` turns an answer into text, on all ranks alike, where questions end at a text. Returns as above."""
    groups, num_asked = engine.groups, 0
    num_groups = groups.layout.world_size // groups.sp_axis.size
    batches = _collect(questions) if questions is not None else iter(())
    with generating(engine, should_stop=should_stop) as generator:
        while True:
            batch_of_group = [next(batches, []) for _ in range(num_groups)] if questions is not None else []
            if any(gather_values(should_stop is not None and should_stop(), groups.host_group)):
                return False
            # rank 0 sends each rank its group's questions, on the host
            shares = _share(batch_of_group, groups) if questions is not None else None
            num_next, own = scatter_values(shares, groups.host_group)
            if not num_next:
                return True
            num_asked += num_next
            report(num_asked)
            answers = _answer(generator, own, stop_tokens, decode)
            generator.finish()
            answered = dict(gather_values((groups.dp_index, answers), groups.host_group))
            for index in range(len(batch_of_group)):
                for answer in answered[index]:
                    keep(answer)
    return False


def _share(batches: Sequence[list[Question]], groups: Groups) -> list[tuple[int, list[Question]]]:
    """For each rank: how many questions all groups are asked, and its own group's."""
    num_next = sum(map(len, batches))
    own = [(num_next, batch) for batch in batches]
    return [own[groups.layout.get_dp_index(rank)] for rank in range(groups.layout.world_size)]


def _collect(questions: Iterable[Question]) -> Iterator[list[Question]]:
    """Yields neighbours that begin alike together."""
    batch: list[Question] = []
    for question in questions:
        if batch and (len(batch) == MAX_TOGETHER or not _begin_alike(batch[0], question)):
            yield batch
            batch = []
        batch.append(question)
    if batch:
        yield batch


def _begin_alike(first: Question, second: Question) -> bool:
    if first.kind != second.kind:
        return False
    longest = max(len(first.tokens), len(second.tokens))
    return longest - count_shared_tokens([first.tokens, second.tokens]) <= MAX_APART


def _make_question(prompt: TaskPrompt, quiz: Quiz) -> Question:
    sample, answer = prompt.sample, list[int]()
    has_one = sample.task in quiz.one_answer_tasks or sample.has_one_answer
    if has_one and len(sample.references) == 1 and not quiz.prompter.thinks_about(sample):
        answer = quiz.prompter.encode_answer(prompt, sample.references[0])
    return Question(prompt.tokens, quiz.prompter.count_new_tokens(sample), tuple(answer))


def _answer(
    generator: Generator,
    questions: Sequence[Question],
    stop_tokens: Collection[int],
    decode: Callable[[list[int]], str] | None,
) -> list[Answer]:
    """This group's answers. The group's ranks have the same questions."""
    if not questions:
        return []
    started = time.monotonic()
    generator.read([question.tokens for question in questions])
    until = questions[0].until

    def has_ended(answer: list[int]) -> bool:
        text = decode(answer) if decode is not None and until else ""
        return any(end in text for end in until)

    given = generator.generate(questions[0].max_new_tokens, stop_tokens, has_ended=has_ended)
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
    text, is_reached = prompter.read_answer(sample, answer.tokens)
    measured = {
        "answer_tokens": len(answer.tokens),
        "log_probability": answer.log_probability,
        "is_greedy": answer.is_greedy,
        "seconds": round(answer.seconds, 4),
        **({"has_answer": is_reached} if prompter.thinks_about(sample) else {}),
    }
    return describe_answer(prompt, text, measured)
