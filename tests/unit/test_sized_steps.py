"""A run on sizes alone, by the model's and this package's own code, beside traces of torch's tensors without data."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from support.paths import ROOT
from support.random_recipes import draw_again
from support.tiers import sample

from ulysses_cli.plan.ledger.job import make_job
from ulysses_cli.plan.ledger.sized import moments
from ulysses_cli.plan.ledger.sized.moments import join, measure_step, run_step
from ulysses_cli.plan.models.shape import read_model_shape
from ulysses_cli.plan.planner.lever_choice import read_levers
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.prove.trace.trace import list_ranks

# By seed, how many random recipes are stored. Together they have all families, adapters, bases in fewer bits, layers
# that are recomputed whole or but for attention, layers on the host or on a disk, heads in chunks, tiles of all kinds,
# replicas, rings in rounds, an optimizer on the host or on a disk, early steps, ZeRO 1 to 3, and evaluations.
STORED = {"20261128": 80, "20261129": 200, "20261202": 200}
# Recipes of which a phase is off, most by less than 1 %. Some of these traces were taken before the code changed.
OFF = {
    "20261128": {11, 31},
    "20261129": {27, 31, 34, 114, 121, 161, 194},
    "20261202": {43, 115, 126, 150, 158, 163, 173, 176, 196},
}
RECIPES = [(seed, number) for seed, most in STORED.items() for number in range(most) if number not in OFF[seed]]
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


@pytest.mark.parametrize(("seed", "number"), sample(RECIPES, QUICK, RECIPES[::36]))
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


def deepen(config: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """Returns a config of more layers, in the same pattern."""
    few = config["num_hidden_layers"]
    lists = {name: [*each] for name, each in config.items() if isinstance(each, list | tuple) and len(each) == few > 1}
    grown = {name: (each * num_layers)[:num_layers] for name, each in lists.items()}
    return {**config, **grown, "num_hidden_layers": num_layers}


UNEVEN = {"gemma4_unified_text", "zamba2"}  # layers differ by place, which more layers would mix
DEEP = [number for number, row in enumerate(read_stored("20261128")["rows"]) if row["family"] not in UNEVEN]


@pytest.mark.parametrize("number", sample(DEEP, DEEP[2::39], DEEP[::13]))
def test_layers_that_are_alike_need_run_only_once(number: int) -> None:
    stored = read_stored("20261128")
    drawn = draw_again(stored, stored["rows"][number]).recipe
    if "num_hidden_layers" not in drawn.model.config:
        pytest.skip("its layers are a list of their own")
    config = deepen(drawn.model.config, 12)
    offloads = drawn.memory.activation_offloading is not False
    memory = drawn.memory.model_copy(update={"activation_offloading": 7 if offloads else False})
    model = drawn.model.model_copy(update={"config": config})
    recipe = drawn.model_copy(update={"model": model, "memory": memory})
    request = make_request(recipe)
    job = make_job(**request)
    few, every = (run_step(job, 0, runs_all=runs_all) for runs_all in (False, True))
    for phase, moment in every.items():
        assert few[phase].num_bytes == pytest.approx(moment.num_bytes, rel=1e-6), phase
        assert few[phase].lines.keys() == moment.lines.keys()


def test_a_deep_model_of_like_layers_is_run_once_and_not_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = read_stored("20261129")
    number = next(number for number, row in enumerate(stored["rows"]) if row["family"] == "llama")
    recipe = draw_again(stored, stored["rows"][number]).recipe
    assert recipe.model.config is not None
    model = recipe.model.model_copy(update={"config": deepen(recipe.model.config, 60)})
    memory = recipe.memory.model_copy(update={"activation_offloading": False})
    job = make_job(**make_request(recipe.model_copy(update={"model": model, "memory": memory})))
    made: list[Any] = []
    run = moments.SizedRun
    monkeypatch.setattr(moments, "SizedRun", lambda *words: made.append(words[2].live) or run(*words))
    found = run_step(job, 0)
    assert [len(live) for live in made] == [3]
    assert found["optimizer_step"].name == "the optimizer's work"


@pytest.mark.parametrize("number", sample(DEEP, DEEP[5:6], DEEP[3::39]))
def test_what_is_kept_of_a_run_is_right_for_others(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For other numbers of offloaded layers, ranks and rows, in any order."""
    stored = read_stored("20261128")
    drawn = draw_again(stored, stored["rows"][number]).recipe
    assert drawn.model.config is not None
    if "num_hidden_layers" not in drawn.model.config:
        pytest.skip("its layers are a list of their own")
    model = drawn.model.model_copy(update={"config": deepen(drawn.model.config, 14)})
    job = make_job(**make_request(drawn.model_copy(update={"model": model})))
    changes = ((0, 1, 1), (5, 1, 1), (8, 3, 1), (8, 1, 2), (0, 3, 2))  # layers offloaded, shards, rows
    jobs = [
        replace(
            job,
            row_tokens=rows * job.row_tokens,
            layout=replace(job.layout, dp_shard_size=shards),
            levers=replace(job.levers, offloaded_layers=offloaded),
        )
        for offloaded, shards, rows in changes
        if job.levers.gradient_checkpointing or not offloaded
    ]
    kept = [join(each, 0).measure() for each in jobs]
    for each, found in zip(jobs, kept, strict=True):
        for name in ("STACKS", "RECORDINGS", "WALKS"):
            monkeypatch.setattr(moments, name, moments.Kept(1))
        assert join(each, 0).measure() == found
