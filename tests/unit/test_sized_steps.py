"""Runs on sizes: layers that are alike run once, what is kept of a run serves others, and what searches propose is
confirmed."""

import json
import random
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from support.paths import ROOT
from support.random_recipes import YARDSTICK, make_drawn_job, read_recipe
from support.tiers import sample
from support.training import make_recipe

from ulysses_cli.hardware_table import load_hardware
from ulysses_cli.plan.layout import Layout, list_divisors
from ulysses_cli.plan.ledger import ledger as ledger_room
from ulysses_cli.plan.ledger import moments
from ulysses_cli.plan.ledger.job import Job, make_job
from ulysses_cli.plan.ledger.ledger import measure_ledger, weigh_ledger
from ulysses_cli.plan.ledger.moments import find_fullest_ranks, join, run_step
from ulysses_cli.plan.ledger.parts import weigh
from ulysses_cli.plan.levers import Levers
from ulysses_cli.plan.models.shape import ModelShape, read_model_shape
from ulysses_cli.plan.planner.estimate import compute_estimate
from ulysses_cli.plan.planner.fit import confirm_length, find_max_length, judge
from ulysses_cli.plan.planner.lever_choice import COSTS, choose_for_job, read_levers
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.plan.recipe.sections import Lora

sys.path.append(str(ROOT / "benchmarks"))

import gpu

KNOWN = (
    "Llama-3.1-8B", "Qwen3-30B-A3B", "Qwen3.5-9B", "gemma-3-27b-pt", "gemma-4-31B", "gpt-oss-20b",
    "granite-4.0-h-small", "Falcon-H1-7B-Base", "GLM-4.7-Flash", "LFM2-2.6B",
)  # fmt: skip
STEP = ("forward", "backward", "optimizer_step")


def read_known(name: str) -> ModelShape:
    file = next(file for file in (ROOT / "ulysses_cli" / "plan" / "models").glob("*.json") if file.stem.endswith(name))
    return read_model_shape(json.loads(file.read_text())["config"], name)


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


@pytest.mark.parametrize("name", sample(KNOWN, KNOWN[:1], KNOWN[1:6]))
def test_a_search_weighs_about_what_a_run_takes(name: str) -> None:
    """Of known models: layouts, lengths and levers in any combination, with adapters and without."""
    dice, shape = random.Random(name), read_known(name)
    errors = []
    for lora in (None, Lora(r=8), None, Lora(r=8)):
        sp_size = dice.choice([size for size in shape.sp_sizes if size <= 8])
        chunks = list_divisors(shape.common_heads // sp_size)
        recomputes = dice.choice((True, "full"))
        levers = Levers(
            gradient_checkpointing=recomputes,
            head_chunks=dice.choice((1, chunks[-1])),
            tiled_loss=dice.choice((False, True)),
            tiled_mlp=dice.choice((False, True)),
            offloaded_layers=dice.choice((0, dice.randrange(shape.num_layers))),
            offload_optimizer=dice.choice(("none", "cpu")),
        )
        layout = Layout(dp_shard_size=dice.choice((1, 2, 8)), sp_size=sp_size)
        job = Job(shape, layout, dice.choice((16384, 65536)) * sp_size, levers, lora=lora, evaluates=False)
        job = replace(job, fused_norms=True)
        ran = Counter[str]()
        for rank in find_fullest_ranks(job):
            ran |= Counter(join(job, rank).measure())
        errors.append(max(weigh(job).values()) / max(size for phase, size in ran.items() if phase in STEP) - 1)
    assert max(map(abs, errors)) <= 0.12, errors
    assert sorted(map(abs, errors))[1] <= 0.02, errors


OWNERS = ("Llama-3.1-8B", "Qwen3-0.6B", "gemma-3-1b-pt", "LFM2-1.2B")
BELOW_3 = ((16, 1, 2, "none"), (8, 2, 2, "none"), (4, 1, 4, "none"), (4, 2, 2, "cpu"))  # ranks, stage, bytes of a sum


@pytest.mark.parametrize("name", sample(OWNERS, (), OWNERS[2:3]))
def test_below_stage_3_no_rank_is_fuller_than_those_that_count(name: str) -> None:
    """The last alone has up to 11 % less: other ranks own the embedding, or their part of it on the host is larger."""
    shape = read_known(name)
    for ranks, stage, sum_bytes, offload in BELOW_3:
        levers = Levers(tiled_loss=True, offload_optimizer=offload)
        job = Job(shape, Layout(dp_shard_size=ranks), 2048, levers, evaluates=False, zero_stage=stage, accumulation=2)
        job = replace(job, engine=replace(job.engine, gradient_bytes=sum_bytes))
        peaks = [max(join(job, rank).measure().values()) for rank in range(ranks)]
        assert max(peaks[rank] for rank in find_fullest_ranks(job)) >= 0.995 * max(peaks), (ranks, stage, offload)


def test_runs_for_a_gpu_and_for_a_cpu_may_take_turns() -> None:
    """Of a model whose layers' functions are replaced in the module that has their name."""
    drawn = next(row["recipe"] for row in ROWS if row["recipe"]["model"]["config"]["model_type"] == "nemotron_h")
    job = make_drawn_job(read_recipe(drawn))
    for is_on_cpu in (False, True, False, True):
        moments.RECORDINGS.values.clear()
        moments.STACKS.values.clear()
        assert join(replace(job, is_on_cpu=is_on_cpu), 0).measure()


@pytest.mark.check
def test_what_a_run_refutes_is_proposed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that weighs 4 % less than the recipe's own code takes."""
    drawn = next(row["recipe"] for row in ROWS if row["recipe"]["model"]["config"]["model_type"] == "falcon_h1")
    job, weigh_all = make_drawn_job(read_recipe(drawn)), ledger_room.weigh

    def weigh_less(job: Job) -> dict[str, int]:
        return {name: size * 24 // 25 for name, size in weigh_all(job).items()}

    monkeypatch.setattr(ledger_room, "weigh", weigh_less)
    weighed = weigh_ledger(job)
    room = weighed.gpu_peak_bytes + weighed.uncertainty_bytes + (1 << 20)
    gpu = replace(load_hardware().get_gpu("h100-80gb"), memory_bytes=room, host_bytes_per_gpu=10**12)

    def judge_run(tried: Job) -> str:
        return judge(tried, measure_ledger(tried), gpu).verdict

    assert (judge(job, weighed, gpu).verdict, judge_run(job)) == ("fits", "too_close")
    choice, ledger = choose_for_job(job, gpu, list(COSTS))
    settled = replace(job, levers=choice.levers)
    assert (settled != job, judge_run(settled), ledger) == (True, "fits", measure_ledger(settled))
    longest = confirm_length(job, gpu, find_max_length(job, gpu), job.levers)
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


@pytest.mark.parametrize(("part", "row", "model", "changes", "tokens"), sample(MEASURED, MEASURED[1:4], MEASURED))
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
