"""What is evaluated between steps, on the run's own ranks: loss on the held-out split, in total, by position and by
turn; questions from a seed and calls of held-out chats; a few prompts that are continued greedily.

run.keep_best goes by these results: the best model so far is saved, and a run that no longer gets better ends. The
later buckets of positions show what a longer context is worth. A rehearsal runs one step, evaluation and save at the
longest rows before training, without effect on the losses."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from operator import add
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ulysses_cli.data.steps import Batching, Rows, get_shared, plan_longest, plan_step, read_micro_batch
from ulysses_cli.data.store import CALL, SAID, THOUGHT, TURN_BITS
from ulysses_cli.data.tokenizing.pieces import list_parting_letters
from ulysses_cli.data.tokenizing.renderer import Renderer, TemplateProblem
from ulysses_cli.evaluate.prompts import Prompter, TaskPrompt
from ulysses_cli.evaluate.suites import CALLS, Amount, Sources, check_lengths, make_prompts, plan_suites
from ulysses_cli.evaluate.summary import summarize
from ulysses_cli.plan.files import remove_own
from ulysses_cli.plan.hardware import GIB
from ulysses_cli.plan.problem import Problem, RecipeError
from ulysses_cli.plan.schedule import (
    MEASURES,
    SCORE_MEASURE,
    choose_best,
    describe_measure,
    describe_stall,
    has_stalled,
)
from ulysses_cli.train.checkpoint.format import CheckpointContext, save_checkpoint
from ulysses_cli.train.document_losses import ShortCheck
from ulysses_cli.train.engine import Engine, find_positions
from ulysses_cli.train.generation.decoding import generating
from ulysses_cli.train.generation.questions import Document, Quiz, ask_questions, make_call_prompts
from ulysses_cli.train.loop import StepResult, StopConditions, TrainState, compare_plans, every, run_step
from ulysses_cli.train.processes.consistency import compare_facts, gather_values
from ulysses_cli.train.processes.device import StartError, get_rng_states, set_rng_states
from ulysses_cli.train.processes.groups import Groups
from ulysses_cli.train.record import Record

FIRST_BOUND = 2048
MAX_PERPLEXITY_LOSS = 700.0  # beyond, exp overflows
CLASSES = ("thoughts", "calls", "answers")  # of what the assistant says
TURN_BOUNDS = [1, 2, 4, 8, 16, 32, 64, 1 << 55]  # upper bounds of the assistant's turns, from 0
TURN_NAMES = ["1", "2", "3-4", "5-8", "9-16", "17-32", "33-64", "over 64"]


def list_bounds(longest: int) -> list[int]:
    """Upper bounds of the buckets: 2K, 8K, 32K, ...; the last one is beyond the longest position."""
    bounds = [FIRST_BOUND]
    while bounds[-1] < longest:
        bounds.append(bounds[-1] * 4)
    return bounds


def name_bucket(low: int, high: int) -> str:
    return f"{low // 1024}-{high // 1024}K"


def evaluate(
    engine: Engine,
    groups: Groups,
    rows: Rows,
    batching: Batching,
    report: Callable[[str], None] = lambda _: None,
    stop: StopConditions | None = None,
) -> dict[str, Any]:
    """Collective over all ranks. Reads every row once, in order. Empty when any rank has a reason to stop early."""
    stop = stop or StopConditions()
    longest = max(max(map(add, rows.get_lengths(row), get_shared(rows, row))) for row in range(len(rows)))
    bounds = torch.tensor(list_bounds(longest))
    first_class, first_turn = len(bounds), len(bounds) + len(CLASSES)
    sums = torch.zeros(first_turn + len(TURN_BOUNDS), 2, dtype=torch.float64, device=engine.device)
    objective, divisor, position = engine.objective, 0.0, 0
    measured = sums.new_zeros(len(objective.eval_names))
    while position < len(rows):
        report(f"evaluation, row {position + 1} of {len(rows)}")
        plan = plan_step(rows, batching, position, len(rows))
        if stop.name(compare_facts(plan.list_facts(), groups.host_group, *stop.read_flags())):
            return {}
        for micro_step in range(plan.num_micro_steps):
            batch = read_micro_batch(rows, plan, groups.dp_index, micro_step, groups.sp_axis.rank, groups.sp_axis.size)
            losses, loaded = engine.compute_token_losses(batch, is_measured=objective.is_measured)
            measured += objective.measure(losses, loaded["answers"])
            losses = losses[0] if objective.is_measured else losses
            positions = find_positions(loaded)
            buckets = torch.bucketize(positions, bounds.to(positions.device), right=True)
            _add(sums, buckets, losses)
            if batch.classes is not None:
                codes = batch.classes[batch.labels >= 0]
                is_said = torch.from_numpy((codes & SAID) > 0).to(losses.device)
                kinds, turns = (torch.from_numpy(each).to(losses.device) for each in _classify(codes))
                _add(sums, first_class + kinds[is_said], losses[is_said])
                _add(sums, first_turn + turns[is_said], losses[is_said])
        position, divisor = plan.next_position, divisor + objective.count(plan)
    sums = engine.sum_over_ranks(sums).cpu()
    if objective.eval_names:
        loss, *means = (engine.sum_over_ranks(measured) / (divisor or 1)).tolist()
        return {"loss": loss, **objective.describe(means), "tokens": int(sums[:first_class, 1].sum())}
    by_class, by_turn = sums[first_class:first_turn], sums[first_turn:]
    return {
        **summarize_losses(sums[:first_class], bounds.tolist()),
        **({"by_class": _list_losses(CLASSES, by_class), "by_turn": _list_losses(TURN_NAMES, by_turn)}
           if by_class[:, 1].any() else {}),
    }  # fmt: skip


def _add(sums: torch.Tensor, at: torch.Tensor, losses: torch.Tensor) -> None:
    sums[:, 0].index_add_(0, at, losses.double())
    sums[:, 1].index_add_(0, at, torch.ones_like(losses, dtype=torch.float64))


def _classify(codes: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of what the assistant says: its class, and its bucket of turns."""
    kinds = np.select([(codes & THOUGHT) > 0, (codes & CALL) > 0], [0, 1], 2)
    return kinds.astype(np.int64), np.searchsorted(TURN_BOUNDS, codes >> TURN_BITS, "right")


def _list_losses(names: Sequence[str], sums: torch.Tensor) -> dict[str, dict[str, Any]]:
    return {
        name: {"loss": part / number, "tokens": int(number)}
        for name, (part, number) in zip(names, sums.tolist(), strict=True)
        if number
    }


def summarize_losses(sums: torch.Tensor, bounds: list[int]) -> dict[str, Any]:
    total, count = sums[:, 0].sum().item(), int(sums[:, 1].sum().item())
    loss = total / count if count else math.nan
    lows = [0, *bounds[:-1]]
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, MAX_PERPLEXITY_LOSS)) if count else math.nan,
        "tokens": count,
        "by_position": _list_losses([name_bucket(*ends) for ends in zip(lows, bounds, strict=True)], sums),
    }


class Evaluation:
    """A post-step hook that evaluates the held-out rows and writes their losses. Without such rows it does nothing.
    `judge` is called after each evaluation."""

    def __init__(
        self,
        rows: Rows | None,
        batching: Batching,
        write: Callable[[dict[str, Any]], None],
        judge: Callable[[TrainState], None],
    ) -> None:
        self.rows = rows
        self.batching = batching
        self.write = write
        self.judge = judge

    def run(self, state: TrainState, stop: StopConditions | None = None) -> bool:
        """Collective over all ranks. `stop`: reasons to end it early; by default the run's own. Returns whether it came
        to its end, alike on all ranks."""
        if line := self.measure(state, stop):
            line = gather_values(line, state.groups.host_group)[0]
            for name, measure in MEASURES.items():
                if (value := measure.read(line)) is not None:
                    state.evaluated[name][state.step] = value
            self.judge(state)
        return bool(line) or self.rows is None

    def measure(self, state: TrainState, stop: StopConditions | None = None) -> dict[str, Any]:
        """Collective over all ranks. Chooses nothing: before step 1 the losses are the base model's, of which no
        checkpoint is kept."""
        if self.rows is None:
            return {}
        state.phase = "evaluation"
        set_phase = partial(setattr, state, "phase")
        losses = evaluate(state.engine, state.groups, self.rows, self.batching, set_phase, stop or state.stop)
        if losses:
            self.write({"step": state.step, **losses})
            state.last_eval_step = state.step
        return losses


TRAIN_ON = "to train on, use --resume auto and a larger run.early_stopping_patience"


class ModelChoice:
    """Called after each evaluation. `save` saves a model that is the best so far; None saves none. `patience` None: no
    early stop."""

    def __init__(
        self,
        save: Callable[[TrainState], None] | None,
        patience: int | None,
        threshold: float,
        report: Callable[[str], None],
    ) -> None:
        self.save = save
        self.patience = patience
        self.threshold = threshold
        self.report = report

    def judge_loss(self, state: TrainState) -> None:
        """Collective over all ranks, after the held-out losses are known."""
        if state.measure != SCORE_MEASURE:
            self.judge(state)

    def judge_score(self, state: TrainState) -> None:
        """Collective over all ranks, after the score of run.eval_suite is known."""
        if state.measure == SCORE_MEASURE:
            self.judge(state)

    def judge(self, state: TrainState) -> None:
        """Collective over all ranks: all of them know the same losses or scores."""
        losses = state.measured
        best = choose_best(losses, losses)
        if best == state.step and self.save is not None:
            self.save(state)
        if state.step < state.num_steps and has_stalled(losses, self.patience, self.threshold):
            state.num_steps = state.step
            stall = describe_stall(state.measure, losses, self.threshold)
            highest = (
                ""
                if best is None
                else f"; the best was {describe_measure(state.measure, losses[best])}, at step {best}"
            )
            self.report(f"early stop after step {state.step}: {stall}{highest}; {TRAIN_ON}")


class EvalSuite:
    """A post-step hook. Without tasks it does nothing, nor at a step whose score is known, also from before a resume.
    `judge` is called after all questions have been asked. Raises
    RecipeError, on all ranks alike, for a task that does not fit the shortest length."""

    def __init__(
        self,
        names: Collection[str],
        amount: Amount,
        tokenizer: Any,
        stop_tokens: Collection[int],
        write: Callable[[dict[str, Any]], None],
        judge: Callable[[TrainState], None] = lambda _: None,
        variables: Mapping[str, Any] | None = None,
        chats: Iterable[Document] = (),
    ) -> None:
        """`chats`: held-out ones, whose calls are asked."""
        self.amount = amount
        self.stop_tokens = stop_tokens
        self.write = write
        self.judge = judge
        self.plan, self.prompts = plan_suites([name for name in names if name != CALLS], Sources()), list[TaskPrompt]()
        if CALLS in names:
            try:
                self.prompts, _ = make_call_prompts(
                    chats, tokenizer, amount.num_samples, seed=amount.seed, limit=max(amount.lengths)
                )
            except RecipeError as error:
                raise RecipeError([replace(each, key="run.eval_suite") for each in error.problems]) from None
        if self.plan.tasks or self.prompts:
            with closing(Renderer(tokenizer, variables=variables)) as renderer:
                letters = list_parting_letters(tokenizer)
                self.prompter = Prompter(tokenizer, renderer.render_text, letters=letters)
            try:
                check_lengths(self.plan, self.prompter, amount)
            except RecipeError as error:
                key = "run.eval_suite_lengths"
                raise RecipeError([Problem(key, each.message, each.hint) for each in error.problems]) from None

    def run(self, state: TrainState, stop: StopConditions | None = None) -> None:
        """Collective over all ranks. A reason to stop that any rank has ends it without a result. `stop`: reasons to
        end it early; by default the run's own."""
        if not (self.plan.tasks or self.prompts) or state.step in state.evaluated[SCORE_MEASURE]:
            return
        read_flags = (stop or state.stop).read_flags

        def show(num_asked: int) -> None:
            state.phase = f"asking question {num_asked} of run.eval_suite"  # the watchdog sees that it changes

        state.phase = "asking the questions of run.eval_suite"
        results: list[dict[str, Any]] = []
        quiz = None
        if state.groups.is_first:
            prompts = chain(make_prompts(self.plan, self.prompter, self.amount, lambda _: None), self.prompts)
            one_answer = {task.name for task in self.plan.tasks if task.has_one_answer}
            quiz = Quiz(prompts, self.prompter, one_answer, results.append)
        if ask_questions(state.engine, quiz, self.stop_tokens, lambda: any(read_flags()), show):
            score = None
            if results:
                summary = summarize(results)
                score = fmean(length["score"] for length in summary["mean"])
                self.write({"step": state.step, "score": score, "scores": summary["scores"], "mean": summary["mean"]})
            score = gather_values(score, state.groups.host_group)[0]  # rank 0 has the answers
            if score is not None:
                state.evaluated[SCORE_MEASURE][state.step] = MEASURES[SCORE_MEASURE].order(score)
                self.judge(state)


@dataclass(frozen=True)
class SamplePrompt:
    text: str
    tokens: tuple[int, ...]


def encode_prompts(
    tokenizer: Any, texts: Sequence[str], *, as_chat: bool, variables: Mapping[str, Any] | None = None
) -> list[SamplePrompt]:
    """With `as_chat` a text is what a user says, in the tokenizer's chat template with its `variables`. Otherwise it is
    the beginning of a document, and an end that the tokenizer appends is taken off. Raises TemplateProblem."""
    prompts = []
    with closing(Renderer(tokenizer, variables=variables)) as renderer:
        for text in texts:
            if as_chat:
                said = renderer.render_text([{"role": "user", "content": text}], add_generation_prompt=True)
                tokens = tokenizer(said, add_special_tokens=False)["input_ids"]
            else:
                tokens = tokenizer(text)["input_ids"]
                tokens = tokens[:-1] if len(tokens) > 1 and tokens[-1] == tokenizer.eos_token_id else tokens
            prompts.append(SamplePrompt(text, tuple(tokens)))
    return prompts


class Samples:
    """A post-step hook. Without prompts it does nothing. `decode` takes tokens, returns text."""

    def __init__(
        self,
        prompts: Sequence[SamplePrompt],
        stop_tokens: Collection[int],
        max_new_tokens: int,
        decode: Callable[[list[int]], str],
        write: Callable[[dict[str, Any]], None],
    ) -> None:
        self.prompts, self.stop_tokens, self.max_new_tokens = prompts, stop_tokens, max_new_tokens
        self.decode, self.write = decode, write

    def run(self, state: TrainState, stop: StopConditions | None = None) -> None:
        """Collective over all ranks. Groups of ranks that share rows each take some of the prompts. `stop`: reasons to
        end it early, without a result; by default the run's own."""
        if not self.prompts or state.last_sample_step == state.step:
            return
        groups, answers = state.groups, dict[int, list[int]]()
        read_flags = (stop or state.stop).read_flags
        with generating(state.engine, should_stop=lambda: any(read_flags())) as generator:
            for at in range(groups.dp_index, len(self.prompts), groups.layout.dp_size):
                title = f"sample {at + 1} of {len(self.prompts)}"
                state.phase = title
                generator.read([self.prompts[at].tokens])
                show = partial(_show_progress, state, title)
                (answers[at],) = generator.generate(self.max_new_tokens, self.stop_tokens, show)
        if generator.is_stopped:
            return
        everything = {at: tokens for part in gather_values(answers, groups.host_group) for at, tokens in part.items()}
        samples = [
            {"prompt": prompt.text, "text": self.decode(everything[at]), "num_tokens": len(everything[at])}
            for at, prompt in enumerate(self.prompts)
        ]
        self.write({"step": state.step, "samples": samples})
        state.last_sample_step = state.step


def make_samples(
    tokenizer: Any, texts: Sequence[str], stop_tokens: Collection[int], max_new_tokens: int,
    write: Callable[[dict[str, Any]], None], *, as_chat: bool, variables: Mapping[str, Any] | None,
) -> Samples:  # fmt: skip
    """Raises StartError for what the recipe asks and the tokenizer's chat template does not give."""
    if texts and as_chat and tokenizer.chat_template is None:
        raise StartError(
            "run.sample_as_chat: the tokenizer has no chat template: set data.chat_template, or leave it out"
        )
    try:
        prompts = encode_prompts(tokenizer, texts, as_chat=as_chat, variables=variables)
    except TemplateProblem as error:
        raise StartError(f"run.sample_as_chat: the tokenizer's template cannot be used: {error}") from None
    return Samples(prompts, stop_tokens, max_new_tokens, tokenizer.decode, write)


def _show_progress(state: TrainState, title: str, num_tokens: int) -> None:
    """The watchdog sees that the phase changes: run.step_timeout is for one token, not for a whole sample."""
    state.phase = f"{title}, token {num_tokens}"


@dataclass(frozen=True)
class Measures:
    """What a run measures between its steps and at its end. `*_steps`: how often; None: at the end alone."""

    evaluation: Evaluation
    samples: Samples
    suite: EvalSuite
    short_check: ShortCheck
    eval_steps: int | None = None
    sample_steps: int | None = None
    suite_steps: int | None = None

    def list_hooks(self) -> list[Callable[[TrainState, StepResult | None], None]]:
        """Of losses, the samples and the questions, in this order."""
        return [
            every(self.eval_steps, self.measure_losses),
            every(self.sample_steps, self.samples.run),
            every(self.suite_steps, self.suite.run),
        ]

    def measure_losses(self, state: TrainState, stop: StopConditions | None = None) -> None:
        """Collective over all ranks: of the held-out rows, then, unless that was ended early, of the short texts."""
        if self.evaluation.run(state, stop):
            self.short_check.run(state)

    def measure_again(self, state: TrainState) -> None:
        """Collective over all ranks, after a resume: what is due after the checkpoint's step, as far as a signal or a
        kill had ended it. What is known of that step is rank 0's, on all ranks."""
        evaluate_if_due, *ask_if_due = self.list_hooks()
        if state.last_eval_step < state.step:
            evaluate_if_due(state, None)
        for hook in ask_if_due:
            hook(state, None)

    def measure_last(self, state: TrainState) -> str:
        """Collective over all ranks, after the last step. Returns the reason to stop that ended it early, or ''."""
        signals = StopConditions(is_asked=state.stop.is_asked)  # all steps are done: max_hours and max_cost are over
        measures = [self.measure_losses] if state.last_eval_step != state.step else []
        for measure in (*measures, self.samples.run, self.suite.run):
            measure(state, signals)
            if reason := signals.decide(state.groups.host_group):
                return reason
        return ""


class LongestRow:
    """The longest row of a split, alone: the one for which evaluation needs most memory."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.row = max(range(len(rows)), key=lambda row: sum(rows.get_lengths(row)))

    def __len__(self) -> int:
        return 1

    def get_lengths(self, row: int) -> tuple[int, ...]:
        return self.rows.get_lengths(self.row)

    def count_targets(self, row: int) -> int:
        return self.rows.count_targets(self.row)

    def read(self, row: int, start: int, stop: int) -> Any:
        return self.rows.read(self.row, start, stop)

    def get_shared(self, row: int) -> tuple[int, ...]:
        return get_shared(self.rows, self.row)

    def get_reference(self, row: int) -> Any:
        find = getattr(self.rows, "get_reference", None)
        return find(self.row) if find is not None else np.zeros(len(self.get_lengths(row)))


def rehearse(
    state: TrainState, eval_rows: Rows | None, eval_batching: Batching, context: CheckpointContext, scratch: Path,
    report: Callable[[str], None],
) -> int:  # fmt: skip
    """Collective over all ranks. Returns the tokens of the longest row that was tried."""
    device = state.engine.device
    rng_states = get_rng_states(device)
    stop, state.stop = state.stop, StopConditions()  # no rank stops during a rehearsal
    plan = plan_longest(state.rows, state.batching)
    longest = max(max(part) for part in plan.padded_tokens)
    try:
        report(f"a step at {longest:,} tokens per row")
        state.phase = "rehearsal: step"
        compare_plans(state, plan)
        run_step(state, plan, learning_rate=0.0)
        if eval_rows is not None and len(eval_rows):
            state.phase = "rehearsal: evaluation"
            evaluate(state.engine, state.groups, LongestRow(eval_rows), replace(eval_batching, seed=0))
        state.phase = "rehearsal: save"
        path = save_checkpoint(context, scratch, 0, {"rehearsal": True})
        if context.owns_disk:
            remove_own(path.parent.parent)
    finally:
        state.stop = stop
    state.engine.reset_optimizer()
    set_rng_states(rng_states, device)
    state.phase = ""
    return longest


def rehearse_and_report(
    state: TrainState, eval_rows: Rows | None, eval_batching: Batching, context: CheckpointContext, record: Record,
    predicted: str,
) -> None:  # fmt: skip
    """Collective over all ranks. `predicted`: what is said of the peak beside the measured one."""
    record.set_phase("rehearsal")
    started, device, memory = time.perf_counter(), state.engine.device, ""
    longest = rehearse(state, eval_rows, eval_batching, context, record.run_dir / "rehearsal", record.set_phase)
    if device.type == "cuda":
        memory = f", peak {torch.cuda.max_memory_allocated(device) / GIB:.2f} GiB{predicted}"
        torch.cuda.reset_peak_memory_stats(device)
    seconds = time.perf_counter() - started
    record.report(f"rehearsed step, evaluation and save at {longest:,} tokens per row in {seconds:.1f} s{memory}")
