"""The user's documents as rows of exact lengths: reads and tokenizes them as training does, and builds a rank's part of
the model without an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ulysses_cli.data.steps import Batching, make_eval_batching
from ulysses_cli.data.store import TARGET, Flags, Ids
from ulysses_cli.data.tokenizing.encoder import Encoder, EncoderSettings
from ulysses_cli.data.tokenizing.tokenizer import load_tokenizer, read_stop_tokens
from ulysses_cli.data.tokenizing.workers import walk_documents
from ulysses_cli.evaluate.prompts import TaskPrompt
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.planner.lever_choice import choose_levers
from ulysses_cli.plan.problem import Problem, RecipeError
from ulysses_cli.plan.recipe.loader import parse_recipe
from ulysses_cli.plan.resolved import choose_layout, settle
from ulysses_cli.plan.rows.packing import IGNORE_INDEX
from ulysses_cli.plan.units import format_count
from ulysses_cli.train.document_losses import CutDocument
from ulysses_cli.train.engine import Engine
from ulysses_cli.train.generation.decoding import agree_on_stop_tokens
from ulysses_cli.train.model.build import build_for_answers
from ulysses_cli.train.model.loading import load_model_config, read_shape
from ulysses_cli.train.processes.groups import Groups, make_groups

GROUP_TIMEOUT = timedelta(days=1)


@dataclass(frozen=True, eq=False)
class EvaluatedModel:
    """What all ranks have. `max_length`: tokens of a prompt with its answer."""

    engine: Engine
    tokenizer: Any
    shape: ModelShape
    stop_tokens: set[int]
    batching: Batching  # of whole documents
    max_length: int

    @property
    def groups(self) -> Groups:
        return self.engine.groups


def load_for_evaluation(text: str, device: Any, report: Callable[[str], None]) -> EvaluatedModel:
    """Collective over all ranks. `text`: of a recipe; `report` is called on rank 0 alone."""
    recipe = parse_recipe(text, "evaluate", []).recipe
    tokenizer = load_tokenizer(recipe.model, recipe.data, is_finished=True)
    shape = read_shape(recipe, load_model_config(recipe), tokenizer)
    groups = make_groups(choose_layout(recipe, shape), GROUP_TIMEOUT)
    plan = settle(recipe, shape, choose_levers(recipe, shape, None).levers)
    told = report if groups.is_first else _ignore
    told("loading the model")
    engine = build_for_answers(plan, groups, device, told)
    stop_tokens = agree_on_stop_tokens(engine, tokenizer)
    batching = make_eval_batching(shape, plan.resolved)
    return EvaluatedModel(engine, tokenizer, shape, stop_tokens, batching, recipe.data.max_length)


def _ignore(_: str) -> None:
    return None


OPTION = "--path"
Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Found:
    """The documents of all lengths, the shortest length first, what is said of the rest, and the prompts of turns with
    calls."""

    documents: tuple[CutDocument, ...]
    notes: tuple[str, ...]
    prompts: tuple[TaskPrompt, ...] = ()


def read_documents(sets: Sequence[Mapping[str, Any]], tokenizer: Any, lengths: Sequence[int], number: int) -> Found:
    """For each length the first `number` documents that reach it, cut there. `sets`: data sets as a recipe writes
    them. Raises RecipeError where no document reaches any length, or a row cannot be read."""
    wanted: dict[int, list[CutDocument]] = {length: [] for length in sorted(lengths)}
    num_read = num_short = longest = 0
    for ids, flags, source in _walk(sets, Encoder(tokenizer)):
        tokens = np.asarray(ids, np.int64)
        targets = tokens if flags is None else np.where(flags & TARGET, tokens, IGNORE_INDEX)
        num_read, longest = num_read + 1, max(longest, len(tokens))
        num_short += len(tokens) < min(wanted)
        for length, found in wanted.items():
            if len(found) < number and len(tokens) >= length and (targets[1:length] != IGNORE_INDEX).any():
                found.append(CutDocument(length, len(found), source, tokens[:length].copy(), targets[:length].copy()))
        if all(len(found) == number for found in wanted.values()):
            break
    if not any(wanted.values()):
        message = f"no document has {min(wanted):,} tokens: the longest of {num_read:,} has {longest:,}"
        raise RecipeError([Problem(OPTION, message, "use a shorter --max-length, or name longer documents")])
    read = format_count(num_read, "document")
    notes = [
        f"the loss at {length:,} tokens is that of {len(found):,} of {read}"
        for length, found in wanted.items()
        if len(found) < number
    ]
    if num_short:
        short = format_count(num_short, "document")
        notes.append(f"no loss is measured on {short} shorter than {min(wanted):,} tokens")
    return Found(tuple(document for found in wanted.values() for document in found), tuple(notes))


def read_chats(sets: Sequence[Mapping[str, Any]], tokenizer: Any) -> Iterator[tuple[Ids, Flags | None]]:
    """The chats of data sets as they are trained where each turn stands behind the prompt that the model gets."""
    stops = read_stop_tokens(str(tokenizer.name_or_path), None, tokenizer)
    encoder = Encoder(tokenizer, EncoderSettings(assistant_only_loss=True, on_rewritten_turns="split"), stops)
    for tokens, flags, _ in _walk(sets, encoder):
        yield tokens, flags


def _walk(sets: Sequence[Mapping[str, Any]], encoder: Encoder) -> Iterator[tuple[Ids, Flags | None, str]]:
    try:
        yield from walk_documents(sets, encoder, OPTION)
    except RecipeError as error:
        raise RecipeError([_rename(problem) for problem in error.problems]) from None


def _rename(problem: Problem) -> Problem:
    hint = problem.hint.replace(f"{OPTION}.type", "a type in data.eval_datasets of the run")
    return Problem(OPTION, problem.message, hint, problem.where)
