"""Asks the model questions from a seed between steps, on the run's own ranks: does it learn to use the length? Asks for
the calls of held-out chats, too."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import closing
from dataclasses import replace
from itertools import chain
from statistics import fmean
from typing import Any

from ulysses_cli.data.tokenizing.pieces import list_parting_letters
from ulysses_cli.data.tokenizing.renderer import Renderer
from ulysses_cli.evaluate.prompts import Prompter, TaskPrompt
from ulysses_cli.evaluate.suites import CALLS, Amount, Sources, check_lengths, make_prompts, plan_suites
from ulysses_cli.evaluate.summary import summarize
from ulysses_cli.plan.models.model_choice import invert_score
from ulysses_cli.plan.problem import Problem, RecipeError
from ulysses_cli.train.generation.call_turns import Document, make_call_prompts
from ulysses_cli.train.generation.questions import Quiz, ask_questions
from ulysses_cli.train.guard.stop_conditions import StopConditions
from ulysses_cli.train.processes.consistency import gather_values
from ulysses_cli.train.train_state import TrainState


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
        self.amount, self.stop_tokens, self.write, self.judge = amount, stop_tokens, write, judge
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
        if not (self.plan.tasks or self.prompts) or state.step in state.eval_lacks:
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
                state.eval_lacks[state.step] = invert_score(score)
                self.judge(state)
