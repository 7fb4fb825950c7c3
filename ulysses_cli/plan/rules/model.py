"""Rules that need the model's shape: heads, attention, weights, 32-bit bounds, and positions: the trained length and
the stretch of the rotary encoding. check.py runs them. Each yields Problems."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from ulysses_cli.plan.attention import BACK_ENDS, Device, list_able, list_needs
from ulysses_cli.plan.layout import list_divisors
from ulysses_cli.plan.levers import explain_no_leaves, explain_no_overlap
from ulysses_cli.plan.models.families import UNSERVED
from ulysses_cli.plan.models.family import Trait
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.problem import Problem, Problems
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.plan.resolved import (
    compute_rope_factor,
    compute_rope_theta,
    find_ring_size,
    find_sharing_obstacle,
    get_original_positions,
)
from ulysses_cli.plan.rows.indexing import RowSizes, list_excess
from ulysses_cli.plan.units import format_count


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


def check_overlapped_exchange(recipe: Recipe, shape: ModelShape) -> Problems:
    """A chunk of heads travels while another attends."""
    memory, num_ranks = recipe.memory, _count_ulysses_ranks(recipe, shape)
    if memory.overlap_exchange is not True or not num_ranks:
        return
    if why := explain_no_overlap(shape, num_ranks):
        yield Problem("memory.overlap_exchange", f"cannot be true: {why}", "leave it out")
    elif memory.attention_head_chunks == 1:
        yield Problem(
            "memory.overlap_exchange",
            "cannot be true with memory.attention_head_chunks: 1, which exchanges all heads at once",
            "leave out memory.attention_head_chunks, or this one",
        )


def check_leaf_layers(recipe: Recipe, shape: ModelShape) -> Problems:
    """Layers are leaf modules where DeepSpeed then computes the same."""
    why = explain_no_leaves(shape, recipe.zero_stage, recipe.memory.offload_param)
    if recipe.memory.leaf_layers is True and why:
        yield Problem("memory.leaf_layers", f"cannot be true: {why}", "leave it out")


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


def check_saved_layers(recipe: Recipe, shape: ModelShape) -> Problems:
    """Others are recomputed, and what these save stays on the GPU."""
    memory, key, asked = recipe.memory, "memory.saved_layers", recipe.memory.saved_layers
    if asked == "auto" or not asked:
        return
    if memory.gradient_checkpointing is False:
        what = "counts layers that are not recomputed, and memory.gradient_checkpointing: false recomputes none"
        yield Problem(key, what, "leave it out")
    elif memory.activation_offloading not in ("auto", False, 0):
        what = "keeps on the GPU what layers save, and memory.activation_offloading moves it to the host"
        yield Problem(key, what, "leave one of the two out")
    elif asked >= shape.num_layers:
        what = f"{asked} leaves none of the {format_count(shape.num_layers, 'layer')} of {shape.name} to recompute"
        yield Problem(key, what, "set memory.gradient_checkpointing: false, or fewer layers")


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
    """A router loss follows from the recipe alone: one that the config asks for would silently be missing. Only a model
    with experts has routers."""
    if shape.has_router_loss:
        yield Problem(
            _name_model(recipe),
            f"the config of {shape.name} asks for a router loss (output_router_logits), and transformers' own sees the "
            "tokens of one rank alone",
            "set output_router_logits: false in a local copy of its config.json, and train.router_aux_loss_coef here",
        )
    if recipe.train.router_aux_loss_scope == "model" and not recipe.train.router_aux_loss_coef:
        yield Problem("train.router_aux_loss_scope", "is not used without train.router_aux_loss_coef", "leave it out")
    for name in ("router_aux_loss_coef", "router_z_loss_coef"):
        key = f"train.{name}"
        if not getattr(recipe.train, name):
            continue
        if not any(layer.num_experts for layer in shape.layers):
            yield Problem(key, f"{shape.name} has no experts, so no router", "leave it out")
        elif recipe.train.freeze_router:
            yield Problem(key, "would train routers, and train.freeze_router keeps them", "leave one of the two out")
        elif Trait.BESIDE_MLP in shape.traits:
            yield Problem(key, f"the routers of {shape.name} give no logits but their softmax", "leave it out")


def check_frozen_routers(recipe: Recipe, shape: ModelShape) -> Problems:
    """Only a model with experts has routers, and adapters leave them as they are."""
    key = "train.freeze_router"
    if not recipe.train.freeze_router:
        return
    if not any(layer.num_experts for layer in shape.layers):
        yield Problem(key, f"{shape.name} has no experts, so no router", "leave it out")
    elif recipe.lora is not None:
        yield Problem(key, "adapters leave the weights of routers as they are", "leave it out")


def check_muon_model(recipe: Recipe, shape: ModelShape) -> Problems:
    """Experts of a layer are one tensor, which ranks would have to take apart."""
    if recipe.train.optim == "muon" and any(layer.num_experts for layer in shape.layers):
        yield Problem("train.optim", f"muon is not offered for {shape.name}, which has experts", "use adamw")


def check_experts(recipe: Recipe, shape: ModelShape) -> Problems:
    """Only a model with experts has a use for an implementation, and adapters of experts run in one way."""
    key, name = "model.experts_implementation", recipe.model.experts_implementation
    if name == "auto":
        return
    if not shape.num_experts:
        yield Problem(key, f"{shape.name} has no experts", "leave it out")
    elif name == "sonicmoe" and recipe.run.device == "cpu":
        yield Problem(key, "sonicmoe needs a GPU", "use auto")
    elif name != "grouped_mm" and recipe.lora is not None and recipe.lora.experts:
        yield Problem(key, f"adapters of experts run beside grouped products, not {name}", "use auto")


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
        tokens=recipe.micro_step_tokens,
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


def check_shared_prompts(recipe: Recipe, shape: ModelShape) -> Problems:
    """Answers read one copy of their prompt only where that is exact."""
    if recipe.preference is not None and recipe.preference.share_prompts is True:
        obstacle = find_sharing_obstacle(recipe, shape)
        if obstacle:
            what = f"answers of {shape.name} cannot read one copy of their prompt: {obstacle}"
            yield Problem("preference.share_prompts", what, "use auto: each answer then has a copy")


MODEL_RULES: tuple[Callable[[Recipe, ModelShape], Problems], ...] = (
    check_shared_prompts,
    check_heads,
    check_convolutions,
    check_head_chunks,
    check_overlapped_exchange,
    check_leaf_layers,
    check_offloading,
    check_saved_layers,
    check_exactness,
    check_attention_kind,
    check_packed_layers,
    check_router_loss,
    check_frozen_routers,
    check_muon_model,
    check_experts,
    check_dropout,
    check_weights,
    check_attention,
    check_index_bounds,
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


REPLACEABLE = ("default", "llama3", "yarn")
KEEPS_THETA = ("default", "yarn")  # what these do with another base is known from published models
ROPE_NUMBERS: dict[str, tuple[str, ...]] = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow"),
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "linear": (),
    "dynamic": (),
}
LLAMA_3 = {"low_freq_factor": 1, "high_freq_factor": 4}


def check_positions(recipe: Recipe, shape: ModelShape) -> Problems:
    """Rows stay inside the positions that the model or its stretch covers. Without rotary positions no number of a
    token enters the model, so a row of any length is computed as the model defines it."""
    if not shape.rope_type:
        return
    length, covered = recipe.data.max_length, shape.max_position_embeddings
    scaling, original = recipe.model.rope_scaling, get_original_positions(recipe, shape)
    has_own_theta = recipe.model.rope_theta is not None  # the base reaches as far as it is trained
    if scaling is None:
        if length > covered and not has_own_theta:
            factor = f"factor: {_round_up(length / original):g}, original_max_position_embeddings: {original}"
            yield Problem(
                "data.max_length",
                f"{length} is longer than the {covered} positions that {shape.name} was made for",
                f"write model.rope_scaling: {{type: yarn, {factor}}}{_offer_theta(shape)}"
                if shape.rope_type in REPLACEABLE
                else f"use {covered} or less",
            )
        return
    stretch = compute_rope_factor(recipe, shape) or 1.0
    reached = int(original * stretch)
    if original > covered:
        yield Problem(
            "model.rope_scaling.original_max_position_embeddings",
            f"{original} is more than the {covered} positions that {shape.name} was made for",
            f"write {covered}, or leave it out",
        )
    elif length > original * stretch and not has_own_theta:
        yield Problem(
            "model.rope_scaling.factor",
            f"{stretch:g} x {original} = {reached} positions do not cover max_length {length}",
            f"write factor: {_round_up(length / original):g}, or leave it out",
        )


def check_rotary(recipe: Recipe, shape: ModelShape) -> Problems:
    """A model's own stretch must stay, and a model without rotary positions has nothing to stretch."""
    scaling = recipe.model.rope_scaling
    if scaling is not None and not shape.rope_type:
        yield Problem(
            "model.rope_scaling",
            f"{shape.name} has no rotary positions, so a stretch would do nothing",
            "leave it out: a row of any length is computed without",
        )
    elif scaling is not None and shape.rope_type not in REPLACEABLE:
        yield Problem(
            "model.rope_scaling",
            f"{shape.name} has a stretch of its own ({shape.rope_type}), which this one would take away",
            "leave rope_scaling out, or use a model with plain, llama3 or yarn positions",
        )


def check_rope_theta(recipe: Recipe, shape: ModelShape) -> Problems:
    """Another base reaches further only where the rest of the formula keeps its meaning, and no nearer than before."""
    key, written, own = "model.rope_theta", recipe.model.rope_theta, shape.rope_theta
    scaling = recipe.model.rope_scaling
    if written is None:
        return
    kind = scaling.type if scaling else shape.rope_type
    if not shape.rope_type:
        what = f"{shape.name} has no rotary positions, so a base would do nothing"
        yield Problem(key, what, "leave it out: a row of any length is computed without")
    elif kind not in KEEPS_THETA:
        whose = "model.rope_scaling" if scaling else shape.name
        yield Problem(
            key,
            f"the positions of {whose} are of the kind {kind}, whose numbers were chosen for the model's own base",
            "leave rope_theta out, or write model.rope_scaling: {type: yarn}"
            if shape.rope_type in REPLACEABLE
            else "leave rope_theta out",
        )
    elif written == "auto" and own is None:
        yield Problem(key, f"auto starts from the model's own base, and {shape.name} does not say it", "write a number")
    elif written == "auto" and scaling is not None and scaling.factor is None:
        what = "both auto and rope_scaling without a factor would cover the whole of max_length"
        yield Problem(key, what, "write a number, or a factor in model.rope_scaling")
    elif (theta := compute_rope_theta(recipe, shape)) is not None and own is not None and theta < own:
        what = f"{theta:,g} is below the {own:,g} of {shape.name}: far positions would turn further than it has seen"
        yield Problem(key, what, "write auto, or a larger number")


def check_rope_numbers(recipe: Recipe, shape: ModelShape) -> Problems:
    """Each type of stretch takes its own numbers and no others."""
    scaling = recipe.model.rope_scaling
    if scaling is None:
        return
    own = ROPE_NUMBERS[scaling.type]
    for name in sorted({name for names in ROPE_NUMBERS.values() for name in names} - set(own)):
        if getattr(scaling, name) is not None:
            takes = ", ".join(("factor", *own))
            yield Problem(
                f"model.rope_scaling.{name}", f"is not part of {scaling.type}", f"{scaling.type} takes {takes}"
            )
    for name in own if scaling.type == "llama3" else ():
        if getattr(scaling, name) is None:
            yield Problem(f"model.rope_scaling.{name}", "llama3 needs it", f"Llama 3.1 has {name}: {LLAMA_3[name]}")
    for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
        below, above = getattr(scaling, low), getattr(scaling, high)
        if below is not None and above is not None and below >= above:
            yield Problem(f"model.rope_scaling.{low}", f"{below:g} is not below {high} {above:g}", "exchange the two")


POSITION_RULES: tuple[Callable[[Recipe, ModelShape], Problems], ...] = (
    check_positions,
    check_rotary,
    check_rope_theta,
    check_rope_numbers,
)


def _offer_theta(shape: ModelShape) -> str:
    return ", or model.rope_theta: auto" if shape.rope_type in KEEPS_THETA and shape.rope_theta else ""


def _round_up(factor: float) -> float:
    """To a short number that still covers: 7.63 -> 7.7."""
    return -(-factor * 10 // 1) / 10
