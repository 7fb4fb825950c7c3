"""Compares the trace of a step with the same step on real ranks, and with the ledger."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.paths import RECIPES, TINY_RECIPE
from support.random_recipes import draw_recipe, measure_errors, run_phases, trace_phases
from support.rank_pool import run_on_ranks
from support.real_steps import (
    ZERO,
    make_case,
    make_request,
    measure_step,
    measure_steps,
    predict_step,
    trace_bytes,
    trace_step,
)
from support.tiers import sample

from ulysses_cli.hardware_table import load_hardware
from ulysses_cli.hub import find_model_config
from ulysses_cli.plan.ledger.job import make_job
from ulysses_cli.plan.ledger.ledger import measure_ledger
from ulysses_cli.plan.ledger.machine import compute_activation_file_bytes
from ulysses_cli.plan.levers import SWAP_CHUNK_BYTES, SWAP_THREADS, Levers
from ulysses_cli.plan.models.shape import read_model_shape
from ulysses_cli.plan.planner.estimate import Estimate, compute_estimate
from ulysses_cli.plan.recipe.loader import load_recipe
from ulysses_cli.prove.trace.trace import (
    HELD,
    Layers,
    TracedPeaks,
    cut_layers,
    extrapolate,
    join_ranks,
    list_cuts,
    list_ranks,
)
from ulysses_cli.report.ledger import list_predicted

FILES = sorted(RECIPES.glob("*.yaml"))
TILES = ("memory.tiled_mlp=true", "memory.tiled_loss=true")
TWICE, NARROW = ("train.gradient_accumulation_steps=2",), ("model.dtype=bfloat16",)
CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "one rank": (1, ()),
    "two ranks": (2, ("parallel.sp_size=2",)),
    "two ranks, bfloat16, tiles": (2, ("parallel.sp_size=2", "model.dtype=bfloat16", *TILES)),
    "adapters": (2, ("parallel.sp_size=2", "lora.r=8")),
    "no recomputation": (1, ("memory.gradient_checkpointing=false",)),
    "one layer recomputed": (2, ("parallel.sp_size=2", "memory.gradient_checkpointing=true", "memory.saved_layers=3")),
    "ZeRO-2": (2, ("parallel.sp_size=2", "parallel.zero_stage=2", *TILES)),
    "ZeRO-1, two micro-steps": (2, ("parallel.sp_size=2", "parallel.zero_stage=1", *TILES, *TWICE)),
    "ZeRO-2, sums in float32": (2, ("parallel.sp_size=2", "parallel.zero_stage=2", *TILES, *TWICE, *NARROW)),
    "optimizer on the host": (2, ("parallel.sp_size=2", "memory.offload_optimizer=cpu", *TILES)),
    "states on the host": (
        2,
        ("parallel.sp_size=2", "memory.offload_optimizer=cpu", "memory.offload_param=cpu", *TILES),
    ),
    "early steps of the optimizer": (
        2,
        ("parallel.sp_size=2", "memory.offload_optimizer=cpu", "memory.overlap_optimizer=true", *TILES),
    ),
    "two replicas": (4, ("parallel.sp_size=2", "parallel.dp_replicate_size=2", *TILES)),
}


BROAD = "two ranks, bfloat16, tiles"  # differs from a GPU's step most: it takes blocks, which a GPU does not


WHOLE = ("parallel.sp_size=2", "lora.r=8", "lora.modules_to_save=[embed_tokens,lm_head,norm]")
DORA = ("parallel.sp_size=2", "lora.r=8", "lora.use_dora=true", TILES[1])  # magnitudes learn in a backward
LONG = {
    "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64, "vocab_size": 512,
    "max_position_embeddings": 32768,
}  # fmt: skip
ROW = ("data.max_length=32768", *TILES)  # one document, of which most is attention: keys in rounds, float32 sums
LEDGER_CASES: dict[str, tuple[str, ...]] = {
    "parts trained whole": (*WHOLE, *TILES[1:]),
    "parts trained whole, whole logits": WHOLE,
    "parts trained whole, ZeRO-2": (*WHOLE, *TILES[1:], "parallel.zero_stage=2"),
    "DoRA, ZeRO-2": (*DORA, "parallel.zero_stage=2"),
    "DoRA, ZeRO-1": (*DORA, "parallel.zero_stage=1", *NARROW),
    "DoRA, no recomputation": (*DORA, "parallel.zero_stage=1", "memory.gradient_checkpointing=false"),
    "DoRA, dropout": (*DORA, "parallel.zero_stage=2", "lora.dropout=0.1", *TWICE, *NARROW),
    "DoRA, tiles": (*DORA, "parallel.zero_stage=1", TILES[0]),
    "ring 4": (*ROW, *NARROW, "parallel.sp_size=4", "parallel.ring_size=4"),
    "ring 2 x 2": (
        *ROW, *NARROW, "parallel.sp_size=4", "parallel.ring_size=2", "memory.gradient_checkpointing=false",
    ),
    "ring 2, whole precision": (*ROW, "parallel.sp_size=2", "parallel.ring_size=2"),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("case", LEDGER_CASES)
def test_the_ledger_equals_a_trace(case: str) -> None:
    recipe = make_case(LONG if case.startswith("ring") else {}, *LEDGER_CASES[case])
    assert predict_step(recipe) == pytest.approx(trace_step(recipe), rel=0.03)


@pytest.mark.parametrize("case", sample(CASES, quick=[], checked=[BROAD, "ZeRO-2, sums in float32"]))
def test_trace_and_ledger_equal_a_real_step(case: str) -> None:
    num_ranks, overrides = CASES[case]
    recipe = make_case({}, *overrides)
    measured = max(run_on_ranks(num_ranks, measure_step, recipe))
    assert trace_step(recipe) == pytest.approx(measured, rel=0.01)
    assert predict_step(recipe) == pytest.approx(measured, rel=0.03)


@pytest.mark.full
def test_an_evaluation_leaves_nothing_gathered() -> None:
    """DeepSpeed keeps weights gathered after a forward without a backward, and no longer counts them."""
    small = ("parallel.sp_size=2", "data.max_length=256", *TILES, f"{ZERO}.max_reuse_distance=1000000")
    recipe = make_case({"num_hidden_layers": 8, "intermediate_size": 1536}, *small)
    before, evaluation, after = run_on_ranks(2, measure_steps, recipe, "step", "evaluation", "step")[0]
    assert after == before
    assert evaluation < before


def trace_file(file: Path, *overrides: str) -> tuple[dict[str, Any], Estimate]:
    """Returns the traced bytes of a recipe, and its estimate."""
    recipe = load_recipe(file, overrides).recipe
    config, _ = find_model_config(recipe)
    predicted = next(line for line in file.read_text().splitlines() if line.startswith("# predicted"))
    gpu = load_hardware().get_gpu(predicted.split(" on ")[1] if " on " in predicted else "h100-80gb")
    estimate = compute_estimate(recipe, read_model_shape(config, "the model"), gpu)
    request = {
        "recipe": recipe.model_dump(mode="json"),
        "config": config,
        "levers": vars(estimate.job.levers),
        "world_size": estimate.job.world_size,
    }
    command = [sys.executable, "-m", "ulysses_cli.prove.trace"]
    done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout), estimate


@pytest.mark.full
@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_ledger_and_trace_agree_on_a_shipped_recipe(file: Path) -> None:
    result, estimate = trace_file(file)
    formula = list_predicted(estimate.ledger)
    differences = {phase: formula[phase] / num_bytes - 1 for phase, num_bytes in result["device"].items()}
    assert {phase: off for phase, off in differences.items() if abs(off) > 0.03} == {}
    assert result["device"].keys() >= {"load", "forward", "backward", "optimizer_step"}
    assert result["disk"]["activations"] == pytest.approx(compute_activation_file_bytes(estimate.job), rel=0.001)


@pytest.mark.full
def test_a_trace_counts_activations_on_a_disk(tmp_path: Path) -> None:
    """It writes nothing. The host holds a chunk for each thread, and the file what the ledger says."""
    words = ("parallel.sp_size=2", "run.device=cuda", *NARROW, *TILES, "memory.activation_offloading=6")
    on_disk = ("memory.activation_offload_device=nvme", f"memory.nvme_path={tmp_path}")
    recipe = make_case({"num_hidden_layers": 8}, *words, *on_disk)
    traced, levers = trace_bytes(recipe), Levers(**make_request(recipe)["levers"])
    job = make_job(recipe, read_model_shape(recipe.model.config, "test"), levers)
    assert traced["disk"]["activations"] == compute_activation_file_bytes(job) > 0
    assert 0 <= traced["host"]["forward"] - SWAP_THREADS * SWAP_CHUNK_BYTES < 1 << 20
    formula = list_predicted(measure_ledger(job))
    for phase in ("forward", "backward"):
        assert formula[phase] == pytest.approx(traced["device"][phase], rel=0.03)
    assert list(tmp_path.iterdir()) == []


def test_layers_are_cut_with_their_lists() -> None:
    config = {"num_hidden_layers": 4, "layer_types": ["a", "b", "a", "b"], "sizes": [1, 2]}
    assert cut_layers(config, 2) == {"num_hidden_layers": 2, "layer_types": ["a", "b"], "sizes": [1, 2]}


@pytest.mark.parametrize("few", [8, 11])
@pytest.mark.parametrize("num_offloaded", [0, 1, 2, 7, 20, 34, 35, 36])
def test_two_traces_extrapolate_to_any_number_of_layers(num_offloaded: int, few: int) -> None:
    def make(layers: Layers) -> TracedPeaks:
        offloaded, above = layers
        device = 100 + 7 * (offloaded + above) + 30 * (max(2, above) if offloaded else above)
        return TracedPeaks({"forward": device}, {"forward": 5 + 30 * offloaded}, {"fixed_segments": 3 * device})

    whole = num_offloaded, 36 - num_offloaded
    cuts = list_cuts(whole, few)
    assert 2 <= len(cuts) <= 3
    assert min(sum(cut) for cut in cuts) == few
    assert vars(extrapolate({cut: make(cut) for cut in cuts}, whole)) == vars(make(whole))
    assert list_cuts(whole, 32) == [whole]


def test_a_step_in_groups_takes_the_bytes_of_its_largest_group() -> None:
    def make(num_layers: int, work: int) -> TracedPeaks:
        held = 50 + 10 * num_layers
        return TracedPeaks({HELD: held, "optimizer_step": held + work}, {}, {})

    result = extrapolate({(0, 8): make(8, 31), (0, 12): make(12, 30)}, (0, 36), steps_in_groups=True)
    assert result.device["optimizer_step"] == 50 + 10 * 36 + 31


@pytest.mark.full
def test_the_command_traces_in_a_process_of_its_own_and_remembers(tmp_path: Path) -> None:
    words = ["estimate-memory", str(TINY_RECIPE), "--gpu", "h100-80gb", "run.device=cuda"]

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
        command = [sys.executable, "-m", "ulysses_cli", *words, "--trace", *more]
        return subprocess.run(command, capture_output=True, text=True, env=environ, timeout=240)

    first = run()
    assert first.returncode == 0, first.stderr
    assert "tracing 3 of 3 layers" in first.stderr
    assert "Warning" not in first.stderr
    assert "allocated, GiB per GPU" in first.stdout
    again = run()
    assert again.stdout == first.stdout.rstrip("\n") + ", read from the cache\n"
    assert "tracing" not in again.stderr
    changed = run("data.max_length=2Ki", "model.config.max_position_embeddings=4096")
    assert "tracing" in changed.stderr, "another row is another trace"


@pytest.mark.parametrize(("stage", "ring", "expected"), [(3, 1, [0]), (2, 1, [7, 6]), (3, 4, [1]), (2, 4, [7, 6, 5])])
def test_the_ranks_that_may_need_most_are_traced(stage: int, ring: int, expected: list[int]) -> None:
    """On a ring a rank in the middle holds more keys of others than the last one."""
    words = ("parallel.sp_size=4", f"parallel.ring_size={ring}", "parallel.dp_shard_size=2")
    assert list_ranks(make_request(make_case({}, f"parallel.zero_stage={stage}", *words))) == expected


def test_traces_of_several_ranks_are_joined_phase_by_phase() -> None:
    traces = [
        {"num_layers": 2, **vars(TracedPeaks({"load": load, "backward": 9 - load}, {"load": 0}, {"load": 1}))}
        for load in (3, 5)
    ]
    assert join_ranks(traces) == {**traces[0], "device": {"load": 5, "backward": 6}}


NUM_RECIPES, SEED = 10, 20261203


@pytest.mark.full
@pytest.mark.parametrize("number", range(NUM_RECIPES))
def test_run_on_sizes_and_trace_agree(number: int) -> None:
    drawn = draw_recipe(SEED, number)
    assert abs(measure_errors(run_phases(drawn), trace_phases(drawn))["peak"]) <= 0.01, drawn.command
