"""Rules about adapters and the base under them. Run by check.py. Which layers take an adapter: model.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ulysses_cli.plan.ledger.job import is_known
from ulysses_cli.plan.models.families import FAMILIES
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
    elif not is_known(shape) or _shares_blocks(shape):
        yield Problem(
            key,
            f"is proven for plain attention with gated MLPs, and {shape.name} has other layers",
            "leave quantize_base out; ZeRO-3 shards the base",
        )


def check_whole_parts(recipe: Recipe, shape: ModelShape) -> Problems:
    """Parts that are trained whole are saved as peft saves them."""
    key, lora = "lora.modules_to_save", recipe.lora
    if lora is None or not lora.modules_to_save:
        return
    tied = [name for name in lora.modules_to_save if name != "norm"]
    if tied and shape.tie_word_embeddings:
        other = "lm_head" if tied[0] == "embed_tokens" else "embed_tokens"
        yield Problem(
            key,
            f"{tied[0]} of {shape.name} shares its weight with {other}: peft would load it into one of the two, and "
            "they would differ",
            "leave it out; the whole model, with the tied weight, is trained without the lora section",
        )
    if "norm" in lora.modules_to_save and FAMILIES[shape.model_type].norm_parts == 0:
        yield Problem(key, f"the norms of {shape.name} have no weights to train", "leave norm out")
    if len(set(lora.modules_to_save)) < len(lora.modules_to_save):
        yield Problem(key, "names a part twice", "name each part once")


def check_dora(recipe: Recipe, shape: ModelShape) -> Problems:
    """DoRA needs a base whose weights can be read exactly, in linear layers of their own."""
    key, lora = "lora.use_dora", recipe.lora
    if lora is None or not lora.use_dora:
        return
    if lora.quantize_base is not None:
        yield Problem(
            key,
            f"divides by the lengths of the base's rows, and with lora.quantize_base: {lora.quantize_base} they are "
            "those of rounded weights",
            "leave quantize_base out, or use lora.use_rslora",
        )
    if recipe.parallel.zero_stage == 3:
        yield Problem(
            key,
            "reads the base's weights outside of their modules, where ZeRO-3 has them in shards",
            "write parallel.zero_stage: 2, or use lora.use_rslora",
        )
    if _shares_blocks(shape):
        yield Problem(
            key,
            f"layers of {shape.name} share the weights of a block: there is no memory formula for the lengths that "
            "each of them would have",
            "leave it out, or use lora.use_rslora",
        )


def _shares_blocks(shape: ModelShape) -> bool:
    return any(layer.shared for layer in shape.layers)


RULES: tuple[Callable[[Recipe, ModelShape], Problems], ...] = (check_quantized_base, check_whole_parts, check_dora)
