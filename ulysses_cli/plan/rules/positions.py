"""Rules about positions: the model's trained length, and the stretch of its rotary encoding. Run by check.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.problem import Problem
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.plan.resolved import compute_rope_factor, compute_rope_theta, get_original_positions

REPLACEABLE = ("default", "llama3", "yarn")
KEEPS_THETA = ("default", "yarn")  # what these do with another base is known from published models
ROPE_NUMBERS: dict[str, tuple[str, ...]] = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow"),
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "linear": (),
    "dynamic": (),
}
LLAMA_3 = {"low_freq_factor": 1, "high_freq_factor": 4}
Problems = Iterator[Problem]


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


RULES: tuple[Callable[[Recipe, ModelShape], Problems], ...] = (
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
