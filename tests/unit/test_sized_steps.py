"""Runs on sizes: layers that are alike run once, what is kept of a run serves others, and what formulas propose is
confirmed."""

import json
import sys
from dataclasses import replace
from typing import Any

import pytest
from support.paths import ROOT
from support.random_recipes import YARDSTICK, make_drawn_job, read_recipe
from support.tiers import sample
from support.training import make_recipe

from ulysses_cli.hardware_table import load_hardware
from ulysses_cli.plan.ledger.job import Job, make_job
from ulysses_cli.plan.ledger.ledger import compute_ledger
from ulysses_cli.plan.ledger.sized import moments
from ulysses_cli.plan.ledger.sized.moments import join, measure_ledger, run_step
from ulysses_cli.plan.models.shape import read_model_shape
from ulysses_cli.plan.planner.estimate import compute_estimate
from ulysses_cli.plan.planner.fit import confirm_length, find_max_length, judge
from ulysses_cli.plan.planner.lever_choice import COSTS, choose_for_job, read_levers
from ulysses_cli.plan.recipe.recipe import Recipe

sys.path.append(str(ROOT / "benchmarks"))

import gpu

ROWS: list[dict[str, Any]] = json.loads(YARDSTICK.read_text())["rows"]


def make_request(recipe: Recipe) -> dict[str, Any]:
    shape = read_model_shape(recipe.model.config, "the model")
    return {"recipe": recipe, "shape": shape, "levers": read_levers(recipe, shape)[0]}


def deepen(config: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """Returns a config of more layers, in the same pattern."""
    few = config["num_hidden_layers"]
    lists = {name: [*each] for name, each in config.items() if isinstance(each, list | tuple) and len(each) == few > 1}
    grown = {name: (each * num_layers)[:num_layers] for name, each in lists.items()}
    return {**config, **grown, "num_hidden_layers": num_layers}


UNEVEN = {"gemma4_unified_text", "zamba2"}  # layers differ by place, which more layers would mix
DEEP = [n for n, row in enumerate(ROWS) if row["recipe"]["model"]["config"]["model_type"] not in UNEVEN]


@pytest.mark.parametrize("number", sample(DEEP, DEEP[2::97], DEEP[::32]))
def test_layers_that_are_alike_need_run_only_once(number: int) -> None:
    drawn = read_recipe(ROWS[number]["recipe"]).recipe
    if "num_hidden_layers" not in drawn.model.config:
        pytest.skip("its layers are a list of their own")
    config = deepen(drawn.model.config, 12)
    offloads = drawn.memory.activation_offloading is not False
    memory = drawn.memory.model_copy(update={"activation_offloading": 7 if offloads else False})
    model = drawn.model.model_copy(update={"config": config})
    recipe = drawn.model_copy(update={"model": model, "memory": memory})
    job = make_job(**make_request(recipe))
    few, every = (run_step(job, 0, runs_all=runs_all) for runs_all in (False, True))
    for phase, moment in every.items():
        assert few[phase].num_bytes == pytest.approx(moment.num_bytes, rel=1e-6, abs=4096), phase
        assert few[phase].lines.keys() == moment.lines.keys()


def test_a_deep_model_of_like_layers_is_run_once_and_not_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = (read_recipe(row["recipe"]) for row in ROWS)
    recipe = next(each.recipe for each in drawn if each.family == "llama" and each.recipe.memory.gradient_checkpointing)
    model = recipe.model.model_copy(update={"config": deepen(recipe.model.config, 60)})
    memory = recipe.memory.model_copy(update={"activation_offloading": False})
    job = make_job(**make_request(recipe.model_copy(update={"model": model, "memory": memory})))
    made: list[Any] = []
    run = moments.SizedRun
    monkeypatch.setattr(moments, "SizedRun", lambda *words: made.append(words[2].live) or run(*words))
    found = run_step(job, 0)
    assert [len(live) for live in made] == [3]
    assert found["optimizer_step"].name == "the optimizer's work"


@pytest.mark.parametrize("number", sample(DEEP, DEEP[5:6], DEEP[3::97]))
def test_what_is_kept_of_a_run_is_right_for_others(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For other numbers of offloaded layers, ranks and rows, in any order."""
    drawn = read_recipe(ROWS[number]["recipe"]).recipe
    if "num_hidden_layers" not in drawn.model.config:
        pytest.skip("its layers are a list of their own")
    model = drawn.model.model_copy(update={"config": deepen(drawn.model.config, 14)})
    job = make_job(**make_request(drawn.model_copy(update={"model": model})))
    changes = ((0, 1, 1), (5, 1, 1), (8, 3, 1), (8, 1, 2), (0, 3, 2))  # layers offloaded, shards, rows
    jobs = [
        replace(
            job,
            max_length=rows * job.max_length,
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


def test_a_formula_knows_the_first_layer_that_is_trained_behind_a_window() -> None:
    """Beside an MLP, where the last projection alone has adapters."""
    row = next(row for row in ROWS if row["recipe"]["model"]["config"]["model_type"] == "cohere2_moe")
    settings = {**row["recipe"], "lora": {"r": 8, "target_modules": ["o_proj"]}}
    job = make_drawn_job(read_recipe(settings))
    assert compute_ledger(job).gpu_peak_bytes == pytest.approx(measure_ledger(job).gpu_peak_bytes, rel=0.01)


def test_what_a_run_refutes_is_proposed_anew() -> None:
    """Of one recipe formulas say 2 % less than its own code takes."""
    drawn = [row["recipe"] for row in ROWS if row["recipe"]["model"]["config"]["model_type"] == "falcon_h1"]
    jobs = [make_drawn_job(read_recipe(recipe)) for recipe in drawn]
    job = max(jobs, key=lambda each: measure_ledger(each).gpu_peak_bytes / compute_ledger(each).gpu_peak_bytes)
    formula = compute_ledger(job)
    room = formula.gpu_peak_bytes + formula.uncertainty_bytes + (1 << 20)
    gpu = replace(load_hardware().get_gpu("h100-80gb"), memory_bytes=room, host_bytes_per_gpu=10**12)

    def judge_run(tried: Job) -> str:
        return judge(tried, measure_ledger(tried), gpu).verdict

    assert (judge(job, formula, gpu).verdict, judge_run(job)) == ("fits", "too_close")
    choice, ledger = choose_for_job(job, gpu, list(COSTS))
    settled = replace(job, levers=choice.levers)
    assert (settled != job, judge_run(settled), ledger) == (True, "fits", measure_ledger(settled))
    longest = confirm_length(job, gpu, lambda less: (find_max_length(job, less), job.levers))
    assert 0 < longest < find_max_length(job, gpu)
    assert judge_run(replace(job, max_length=longest)) == "fits"


MEASURED = [
    ("8B's layers, levers as chosen, 8Ki and 32Ki", 0, "LAYER", {}, 8192),
    ("8B's layers, levers as chosen, 8Ki and 32Ki", 1, "LAYER", {}, 32768),
    ("8B's layers, levers as chosen, 128Ki", 0, "LAYER", {}, 131072),
    ("against the Trainer, two layers of 8B, 32Ki", 0, "LAYER", {"num_hidden_layers": 2}, 32768),
    ("a whole model of 0.5B, 8Ki and 32Ki", 0, "HALF", {}, 8192),
    ("a whole model of 0.5B, 8Ki and 32Ki", 1, "HALF", {}, 32768),
]


@pytest.mark.parametrize(("part", "row", "model", "changes", "tokens"), MEASURED)
def test_a_gpu_took_the_bytes_of_a_run_on_sizes(
    part: str, row: int, model: str, changes: dict[str, Any], tokens: int
) -> None:
    """What one H200 measured, without what a trace cannot see: the context, and pages that are not full."""
    record = json.loads((ROOT / "benchmarks" / "results" / "gpu-nvidia-h200.json").read_text())
    config = {**getattr(gpu, model), **changes}
    levers = "memory.gradient_checkpointing=true"  # as chosen on that day
    words = (f"data.max_length={tokens}", "model.dtype=bfloat16", "run.device=cuda", levers)
    shape, kind = read_model_shape(config, "the model"), load_hardware().get_gpu("h200")
    ledger = compute_estimate(make_recipe(*words, config=config), shape, kind).ledger
    measured = record["parts"][part]["rows"][row]["peak_memory_bytes"]
    assert ledger.gpu_allocated_bytes == pytest.approx(measured, rel=2e-4)
