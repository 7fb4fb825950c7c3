"""Rules about the base under adapters. Run by check.py. Which layers take an adapter is checked in model.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ulysses_cli.plan.ledger.job import is_known
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.problem import Problem
from ulysses_cli.plan.recipe.recipe import Recipe

Problems = Iterator[Problem]


def check_quantized_base(recipe: Recipe, shape: ModelShape) -> Problems:
    """bitsandbytes' layers hold whole weights, and only linear layers have them."""
    key, lora = "lora.quantize_base", recipe.lora
    if lora is None or lora.quantize_base is None:
        return
    if recipe.parallel.zero_stage == 3:
        yield Problem(
            "parallel.zero_stage",
            f"3 shards the base's weights, and with {key}: {lora.quantize_base} each GPU holds all of them",
            "write parallel.zero_stage: 2",
        )
    if any(layer.num_experts for layer in shape.layers):
        yield Problem(
            key,
            f"the experts of {shape.name} are parts of one tensor and not linear layers: they would stay in "
            f"{recipe.model.dtype}",
            "leave quantize_base out; ZeRO-3 shards the base",
        )
    elif not is_known(shape):
        yield Problem(
            key,
            f"is proven for plain attention with gated MLPs, and {shape.name} has other layers",
            "leave quantize_base out; ZeRO-3 shards the base",
        )


RULES: tuple[Callable[[Recipe, ModelShape], Problems], ...] = (check_quantized_base,)
