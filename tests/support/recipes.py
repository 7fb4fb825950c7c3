"""Holds a small valid recipe for tests to change."""

from ulysses_cli.plan.models.shape import ModelShape, read_model_shape
from ulysses_cli.plan.problem import Problem
from ulysses_cli.plan.recipe.loader import Loaded, parse_recipe
from ulysses_cli.plan.resolved import ResolvedRecipe, resolve
from ulysses_cli.plan.rules.check import check_recipe

VALID = """\
model:
  name_or_path: owner/model
parallel:
  sp_size: 4
data:
  datasets:
    - path: owner/texts
  max_length: 8Ki
train:
  max_steps: 10
"""

LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 2,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
}  # fmt: skip


def load(*overrides: str, text: str = VALID) -> Loaded:
    return parse_recipe(text, "r.yaml", overrides)


def make_shape(**changes: object) -> ModelShape:
    return read_model_shape({**LLAMA, **changes}, "owner/model")


def check(*overrides: str, num_processes: int | None = None, text: str = VALID, **changes: object) -> list[Problem]:
    return check_recipe(load(*overrides, text=text), make_shape(**changes), num_processes)


def make_plan(loaded: Loaded, shape: ModelShape | None = None) -> ResolvedRecipe:
    """As a command writes it for the processes that it starts."""
    return ResolvedRecipe(loaded, resolve(loaded.recipe, shape or make_shape(), loaded.places))
