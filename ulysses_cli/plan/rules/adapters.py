"""Rules for adapters and the base under them, by the layers that the model has. check.py runs them. Each yields
Problems."""

from __future__ import annotations

from collections.abc import Callable

from ulysses_cli.plan.ledger.job import is_known
from ulysses_cli.plan.ledger.weights import list_linear_modules, read_weights
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.problem import Problem, Problems
from ulysses_cli.plan.recipe.recipe import Recipe

FOR_EXPERTS = "lora.experts: [gate_up, down] adapts experts"
EXPERT_NAMES = {"gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3"}


def check_lora_targets(recipe: Recipe, shape: ModelShape) -> Problems:
    """Adapters go on linear layers that the model has. Experts' matrices are parts of one tensor and not layers; by
    their old names peft would find them, with other ranks. A number is also the name of a decoder layer, which peft
    refuses."""
    if recipe.lora is None or not (able := list_linear_modules(shape)):
        return
    if recipe.lora.target_modules == "all-linear":
        if shape.adapts_experts:
            message = f"all-linear takes in the experts and routers of {shape.model_type} models, as peft reads it"
        else:
            layer = shape.refused_by_peft
            message = f"all-linear takes in {layer} of {shape.model_type} models, on which peft adds no adapter"
        if not shape.adapts_all:
            others = f"; {FOR_EXPERTS}" if shape.adapts_experts else ""
            yield Problem("lora.target_modules", message, f"use [{', '.join(able)}]{others}")
        return
    names = [name for name in able if not name.isdigit()]
    unknown = [name for name in recipe.lora.target_modules if name not in names]
    if unknown:
        yield Problem(
            "lora.target_modules",
            f"{', '.join(unknown)}: no linear layer of {shape.name} that takes an adapter",
            f"write a list: [{', '.join(filter(None, (name.strip() for name in unknown[0].split(','))))}]"
            if "," in unknown[0]
            else f"use {'all-linear, or ' if shape.adapts_all else ''}some of {', '.join(names)}"
            + (f"; {FOR_EXPERTS}" if shape.num_experts and set(unknown) & EXPERT_NAMES else ""),
        )


def check_quantized_base(recipe: Recipe, shape: ModelShape) -> Problems:
    """bitsandbytes' layers hold whole weights, and only linear layers have them."""
    key, lora = "lora.quantize_base", recipe.lora
    if lora is None or lora.quantize_base is None:
        return
    if recipe.zero_stage == 3:
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
    if "norm" in lora.modules_to_save and not any("norm" in each.name for each in read_weights(shape, None).every):
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
    if recipe.zero_stage == 3:
        yield Problem(
            key,
            "reads the base's weights outside of their modules, where ZeRO-3 has them in shards",
            "write parallel.zero_stage: 2, or use lora.use_rslora",
        )
    if _shares_blocks(shape):
        yield Problem(
            key,
            f"layers of {shape.name} share the weights of a block: no trace has shown what the lengths take that "
            "each of them would have",
            "leave it out, or use lora.use_rslora",
        )


def check_expert_adapters(recipe: Recipe, shape: ModelShape) -> Problems:
    """Only a model with experts has them, and peft's adapters of experts are plain ones."""
    key, lora = "lora.experts", recipe.lora
    if lora is None:
        return
    if not lora.experts:
        if lora.expert_r != "auto":
            yield Problem(
                "lora.expert_r", f"is not used without {key}", "leave it out, or write lora.experts: [gate_up, down]"
            )
        return
    if not shape.num_experts:
        yield Problem(key, f"{shape.name} has no experts", "leave it out; target_modules names linear layers")
    elif shape.family is None:
        yield Problem(key, f"how {shape.model_type} models store their experts is not known here", "leave it out")
    if len(set(lora.experts)) < len(lora.experts):
        yield Problem(key, "names a matrix twice", "name each once")
    if lora.dropout:
        yield Problem("lora.dropout", "peft's adapters of experts have no dropout", "set it to 0")
    if lora.use_dora:
        yield Problem("lora.use_dora", "peft's adapters of experts train no magnitudes", "leave it out")


def _shares_blocks(shape: ModelShape) -> bool:
    return any(layer.shared_block > 0 for layer in shape.layers)


ADAPTER_RULES: tuple[Callable[[Recipe, ModelShape], Problems], ...] = (
    check_lora_targets,
    check_quantized_base,
    check_whole_parts,
    check_expert_adapters,
    check_dora,
)
