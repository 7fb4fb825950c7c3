"""Rules that need the model's shape: heads, attention, weights, adapters, 32-bit bounds. Run by check.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

from ulysses_cli.plan.attention import BACK_ENDS, Device, list_able, list_needs
from ulysses_cli.plan.layout import list_divisors
from ulysses_cli.plan.models.refusals import UNSERVED
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.nouns import format_count
from ulysses_cli.plan.problem import Problem
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.plan.resolved import find_ring_size, find_sharing_obstacle
from ulysses_cli.plan.rows.indexing import RowSizes, list_excess

Problems = Iterator[Problem]


def check_heads(recipe: Recipe, shape: ModelShape) -> Problems:
    """Ranks that exchange heads get the same number of query heads each. A ring makes fewer of them."""
    parallel, legal = recipe.parallel, shape.list_ring_sizes(recipe.parallel.sp_size)
    ring_size = parallel.ring_size
    if shape.inexact or ring_size in legal or (ring_size == "auto" and legal):
        return
    heads = " and ".join(format_count(count, f"{kind} head") for kind, count in shape.head_counts)
    if ring_size == "auto" or ring_size == 1:
        sizes = list(shape.sp_sizes)
        nearest = min(sizes, key=lambda size: (abs(size - parallel.sp_size), size))
        others = f", or ring_size: {legal[0]}" if legal else f"; no ring is possible, since {shape.ring_obstacle}"
        yield Problem(
            "parallel.sp_size",
            f"{parallel.sp_size} does not divide the {heads} of {shape.name}",
            f"use {_list_choices(sizes)}; {nearest} is nearest{others}",
        )
        return
    fix = f"use auto, {_list_choices(list(legal))}" if legal else "use auto and another sp_size"
    if parallel.sp_size % ring_size:
        yield Problem("parallel.ring_size", f"{ring_size} does not divide sp_size {parallel.sp_size}", fix)
    elif shape.ring_obstacle:
        yield Problem(
            "parallel.ring_size",
            f"{ring_size} deals the tokens of a row to ranks in another order, and {shape.ring_obstacle}: "
            f"{shape.name} cannot be trained on a ring",
            f"use ring_size: 1 with sp_size {_list_choices(list(shape.sp_sizes))}",
        )
    else:
        yield Problem(
            "parallel.ring_size",
            f"{ring_size} leaves {format_count(parallel.sp_size // ring_size, 'rank')} to exchange "
            f"heads, which do not divide the {heads} of {shape.name}",
            fix,
        )


def check_convolutions(recipe: Recipe, shape: ModelShape) -> Problems:
    """A convolution takes its earlier tokens from the rank before, and from no other."""
    if recipe.parallel.sp_size == 1 or not shape.conv_tokens:
        return
    local, needed = recipe.data.max_length // recipe.parallel.sp_size, shape.conv_tokens - 1
    if local < needed:
        yield Problem(
            "data.max_length",
            f"a rank's {format_count(local, 'token')} are fewer than the {needed} that the convolutions of "
            f"{shape.name} read from the rank before",
            f"use {needed * recipe.parallel.sp_size} or more",
        )


def check_head_chunks(recipe: Recipe, shape: ModelShape) -> Problems:
    """Chunks of heads are equal."""
    chunks, num_ranks = recipe.memory.attention_head_chunks, _count_ulysses_ranks(recipe, shape)
    if chunks == "auto" or not num_ranks:
        return
    local = shape.common_heads // num_ranks
    if local % chunks:
        yield Problem(
            "memory.attention_head_chunks",
            f"{chunks} does not divide the {format_count(local, 'head')} of a rank "
            f"({shape.common_heads} / {num_ranks})",
            f"use auto, {_list_choices(list_divisors(local))}",
        )


def check_offloading(recipe: Recipe, shape: ModelShape) -> Problems:
    """No more offloaded layers than the model has, and recomputation that saves something to offload."""
    memory, key = recipe.memory, "memory.activation_offloading"
    asked = memory.activation_offloading
    if asked == "auto" or not asked:
        return
    if memory.gradient_checkpointing is False:
        yield Problem(
            key,
            "moves what recomputation starts from, and memory.gradient_checkpointing: false recomputes nothing",
            "set memory.gradient_checkpointing: true, or memory.activation_offloading: false",
        )
    elif asked is not True and asked > shape.num_layers:
        yield Problem(
            key,
            f"{asked} is more than the {format_count(shape.num_layers, 'layer')} of {shape.name}",
            "use true, auto, or fewer layers",
        )


def check_exactness(recipe: Recipe, shape: ModelShape) -> Problems:
    """Refuses layer kinds that would be silently wrong when a row is split over ranks."""
    if recipe.parallel.sp_size > 1 and shape.inexact:
        yield Problem(
            "parallel.sp_size",
            f"{shape.name} cannot be split over {recipe.parallel.sp_size} ranks exactly: {shape.inexact}",
            "use sp_size: 1, or a model with plain, grouped or sliding-window attention in every layer",
        )


def check_attention_kind(recipe: Recipe, shape: ModelShape) -> Problems:
    """Refuses attention that no kernel here computes: it would be computed as plain causal attention."""
    if recipe.parallel.sp_size == 1 and shape.inexact in UNSERVED:
        yield Problem(_name_model(recipe), f"{shape.name} cannot be trained here: {shape.inexact}", "use another model")


def check_packed_layers(recipe: Recipe, shape: ModelShape) -> Problems:
    """Only attention separates the documents of a row; layers that carry a state would mix them."""
    if recipe.parallel.sp_size == 1 and recipe.data.packing == "documents" and shape.crosses_documents:
        yield Problem(
            "data.packing",
            f"documents of one row would see each other in {shape.name}: {shape.inexact}",
            "use packing: off, one document per row",
        )


def check_router_loss(recipe: Recipe, shape: ModelShape) -> Problems:
    """The loss is the tokens' loss only: a router loss that the config asks for would silently be missing."""
    if shape.has_router_loss:
        yield _refuse_config(recipe, shape, "a router loss (output_router_logits)", "output_router_logits: false")


def check_dropout(recipe: Recipe, shape: ModelShape) -> Problems:
    """Refuses a model's own dropout: one rank and several do not draw the same numbers."""
    for field, rate in (("attention_dropout", shape.attention_dropout), *shape.other_dropouts):
        if rate:
            yield _refuse_config(recipe, shape, f"{field} {rate:g}", f"{field}: 0.0")


def check_weights(recipe: Recipe, shape: ModelShape) -> Problems:
    """Quantized weights cannot be trained, except mxfp4, which transformers converts to bfloat16."""
    if shape.quantization and shape.quantization != "mxfp4":
        yield Problem(
            "model.name_or_path",
            f"the weights of {shape.name} are quantized by {shape.quantization} and cannot be trained",
            "use the model's bfloat16 weights; lora with the levers of memory takes the least",
        )


def check_attention(recipe: Recipe, shape: ModelShape) -> Problems:
    """The named back end serves this model on this device."""
    device: Device = "cpu" if recipe.run.device == "cpu" else "cuda"
    dtype: Literal["bfloat16", "float32"] = recipe.model.dtype
    has_ring = 0 < _count_ulysses_ranks(recipe, shape) < recipe.parallel.sp_size
    name, needs = recipe.model.attn_implementation, list_needs(shape, dtype, has_more_keys=has_ring)
    obstacles = ("" if name == "auto" else BACK_ENDS[name].find_obstacle(need, device) for need in needs)
    obstacle = next(filter(None, obstacles), "")
    if obstacle:
        able = [each for each in BACK_ENDS if all(each in list_able(need, device) for need in needs)]
        yield Problem("model.attn_implementation", f"{name} {obstacle}", f"use auto, {_list_choices(able)}")


def check_index_bounds(recipe: Recipe, shape: ModelShape) -> Problems:
    """No call of an operator that counts in 32 bits sees a tensor of 2^31 elements (plan/rows/indexing.py)."""
    sp_size, chunks, lora = recipe.parallel.sp_size, recipe.memory.attention_head_chunks, recipe.lora
    num_ranks = _count_ulysses_ranks(recipe, shape) or sp_size
    sizes = RowSizes(
        tokens=recipe.train.per_device_train_batch_size * recipe.data.max_length,
        sp_size=sp_size,
        ring_size=sp_size // num_ranks,
        head_chunks=max(1, shape.common_heads // num_ranks) if chunks == "auto" else chunks,
        tiled_mlp=recipe.memory.tiled_mlp is not False,
        is_quantized=lora is not None and lora.quantize_base is not None,
        uses_dora=lora is not None and lora.use_dora,
        num_rows=recipe.train.per_device_train_batch_size,
        kernel=recipe.model.attn_implementation,
    )
    for excess in list_excess(shape, sizes):
        yield Problem(
            excess.key,
            f"{excess.name} of a rank would have {excess.numel:,} elements, past the 2^31 that kernels of this kind "
            f"({excess.operator}) index safely",
            f"use {excess.remedy}shorter or fewer rows",
        )


def check_lora_targets(recipe: Recipe, shape: ModelShape) -> Problems:
    """Adapters go on linear layers that the model has. Experts' matrices are parts of one tensor and not layers. A
    number is also the name of a decoder layer, which peft refuses."""
    if recipe.lora is None or not shape.linear_modules:
        return
    if recipe.lora.target_modules == "all-linear":
        if shape.adapts_experts:
            why = "whose adapters are added to all of their weights in every forward: nothing is saved"
            message = f"all-linear takes in the experts of {shape.model_type} models, {why}"
        else:
            layer = shape.refused_by_peft
            message = f"all-linear takes in {layer} of {shape.model_type} models, on which peft adds no adapter"
        if not shape.adapts_all:
            yield Problem("lora.target_modules", message, f"use [{', '.join(shape.linear_modules)}]")
        return
    names = [name for name in shape.linear_modules if not name.isdigit()]
    unknown = [name for name in recipe.lora.target_modules if name not in names]
    if unknown:
        yield Problem(
            "lora.target_modules",
            f"{', '.join(unknown)}: no linear layer of {shape.name} that takes an adapter",
            f"write a list: [{', '.join(filter(None, (name.strip() for name in unknown[0].split(','))))}]"
            if "," in unknown[0]
            else f"use {'all-linear, or ' if shape.adapts_all else ''}some of {', '.join(names)}",
        )


def check_shared_prompts(recipe: Recipe, shape: ModelShape) -> Problems:
    """Answers read one copy of their prompt only where that is exact."""
    if recipe.preference is not None and recipe.preference.share_prompts is True:
        obstacle = find_sharing_obstacle(recipe, shape)
        if obstacle:
            what = f"answers of {shape.name} cannot read one copy of their prompt: {obstacle}"
            yield Problem("preference.share_prompts", what, "use auto: each answer then has a copy")


RULES: tuple[Callable[[Recipe, ModelShape], Problems], ...] = (
    check_shared_prompts,
    check_heads,
    check_convolutions,
    check_head_chunks,
    check_offloading,
    check_exactness,
    check_attention_kind,
    check_packed_layers,
    check_router_loss,
    check_dropout,
    check_weights,
    check_attention,
    check_index_bounds,
    check_lora_targets,
)


def _count_ulysses_ranks(recipe: Recipe, shape: ModelShape) -> int:
    """Ranks that exchange heads; 0 where check_heads has a problem."""
    sp_size, ring_size = recipe.parallel.sp_size, recipe.parallel.ring_size
    legal = shape.list_ring_sizes(sp_size)
    if ring_size == "auto":
        return sp_size // find_ring_size(shape, sp_size) if legal else 0
    return sp_size // ring_size if ring_size in legal else 0


def _refuse_config(recipe: Recipe, shape: ModelShape, asked: str, setting: str) -> Problem:
    return Problem(
        _name_model(recipe),
        f"the config of {shape.name} asks for {asked}, which is not offered",
        f"set {setting} in a local copy of its config.json",
    )


def _name_model(recipe: Recipe) -> str:
    return "model.config" if recipe.model.config is not None else "model.name_or_path"


def _list_choices(choices: list[int] | list[str]) -> str:
    words = [str(choice) for choice in choices]
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " or " + words[-1]
