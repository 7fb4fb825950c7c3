"""A run on sizes alone, by the model's and this package's own code, beside traces of torch's tensors without data."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from support.paths import ROOT
from support.random_recipes import draw_again
from support.tiers import sample

from ulysses_cli.plan.ledger.sized.step import measure_step
from ulysses_cli.plan.models.shape import read_model_shape
from ulysses_cli.plan.planner.lever_choice import read_levers
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.plan.sizes.tensor import UnknownOperator
from ulysses_cli.prove.trace.trace import list_ranks

# By seed: recipes without adapters, of 52 families. Together they have layers that are recomputed whole or but for
# attention, layers on the host or on a disk, heads in chunks, tiles of all kinds, replicas, rings in
# rounds, an optimizer on the host or on a disk, early steps, ZeRO-1 and 2 with and without sums of several micro-steps,
# experts, convolutions, scans and delta rules, and evaluations.
STORED = {
    "20261128": (
        2, 3, 5, 8, 20, 39, 40, 42, 43, 44, 52, 54, 55, 64, 65, 68, 70, 79,
    ),
    "20261129": (
        2, 6, 14, 26, 39, 42, 50, 51, 57, 58, 61, 65, 79, 94, 96, 105, 106, 107, 117, 125, 126, 127, 136, 138, 146,
        147, 154, 159, 162, 164, 165, 172, 176, 181, 186, 190, 196,
    ),
    "20261202": (
        0, 2, 9, 11, 17, 34, 42, 44, 52, 54, 55, 61, 67, 72, 82, 90, 92, 111, 112, 117, 135, 148, 154, 156, 157, 166,
        167, 174, 175, 183, 184, 186, 189, 192, 193,
    ),
}  # fmt: skip
RECIPES = [(seed, number) for seed, numbers in STORED.items() for number in numbers]
QUICK = [
    ("20261128", 43), ("20261128", 44), ("20261129", 2), ("20261129", 26), ("20261129", 58), ("20261129", 186),
    ("20261202", 157),
]  # fmt: skip


@cache
def read_stored(seed: str) -> dict[str, Any]:
    stored: dict[str, Any] = json.loads((ROOT / f"benchmarks/results/estimate-random-wide-{seed}.json").read_text())
    return stored


def make_request(recipe: Recipe) -> dict[str, Any]:
    assert recipe.model.config is not None
    shape = read_model_shape(recipe.model.config, "the model")
    levers = read_levers(recipe, shape)[0]
    return {"recipe": recipe, "shape": shape, "levers": levers}


@pytest.mark.parametrize(("seed", "number"), sample(RECIPES, QUICK, RECIPES[::3]))
def test_a_step_takes_the_bytes_of_its_trace(seed: str, number: int) -> None:
    stored = read_stored(seed)
    row = stored["rows"][number]
    recipe = draw_again(stored, row).recipe
    request, phases = make_request(recipe), dict(row["traced"])
    traced = {
        "recipe": recipe.model_dump(mode="json"), "config": recipe.model.config, "levers": vars(request["levers"]),
    }  # fmt: skip
    peaks = [measure_step(**request, rank=rank) for rank in list_ranks(traced)]
    del phases["load"]
    for phase, num_bytes in phases.items():
        assert max(each[phase] for each in peaks) == pytest.approx(num_bytes, rel=3e-4), phase


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"lora": {"r": 8}}, "adapters"),
    ],
)
def test_what_the_engine_does_not_know_is_refused(change: dict[str, Any], name: str) -> None:
    stored = read_stored("20261128")
    drawn = draw_again(stored, stored["rows"][43]).recipe.model_dump(mode="json")
    for section, values in change.items():
        drawn[section] = {**(drawn[section] or {}), **values}
    with pytest.raises(UnknownOperator, match=name):
        measure_step(**make_request(Recipe.model_validate_json(json.dumps(drawn))), rank=0)
