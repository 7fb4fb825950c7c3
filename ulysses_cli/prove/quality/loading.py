"""A rank's part of the model that is evaluated: its engine without an optimizer, its tokenizer and its batching."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ulysses_cli.data.batching import make_eval_batching
from ulysses_cli.data.steps import Batching
from ulysses_cli.data.tokenizing.tokenizer import load_tokenizer
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.planner.lever_choice import choose_levers
from ulysses_cli.plan.recipe.loader import parse_recipe
from ulysses_cli.plan.resolved import choose_layout, settle
from ulysses_cli.train.assembly.build import build_for_answers
from ulysses_cli.train.assembly.model_config import load_model_config, read_shape
from ulysses_cli.train.engine import Engine
from ulysses_cli.train.generation.on_engine import agree_on_stop_tokens
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
