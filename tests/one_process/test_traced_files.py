"""Traces a step whose optimizer states and weights are in files, and compares it with a run on sizes."""

from typing import Any

import pytest
from support.random_recipes import DrawnRecipe, make_drawn_job, run_phases, start_trace
from support.real_steps import ZERO, make_case
from support.training import make_recipe

from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.ledger.states import compute_state_file_bytes, compute_weight_file_bytes

SIZES = {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8, "head_dim": 128, "vocab_size": 4096}
COMMON = ("parallel.sp_size=2", "data.max_length=1024", "memory.nvme_path=.", "run.device=auto")
STATES, WEIGHTS = "memory.offload_optimizer=nvme", "memory.offload_param=nvme"


def trace_and_make_job(*words: str) -> tuple[dict[str, Any], dict[str, int], Job]:
    recipe = make_recipe(*COMMON, *words, config={"model_type": "llama", "num_hidden_layers": 3, **SIZES})
    drawn = DrawnRecipe({"model": {"config": dict(recipe.model.config or {})}}, recipe)
    job = make_drawn_job(drawn)
    return start_trace(drawn), run_phases(drawn), job


@pytest.mark.parametrize(
    "words",
    [
        pytest.param((STATES,), id="states", marks=pytest.mark.full),
        pytest.param((WEIGHTS,), id="weights", marks=pytest.mark.full),
        pytest.param((STATES, WEIGHTS), id="both", marks=pytest.mark.check),
    ],
)
def test_a_trace_counts_files_as_the_ledger_does(words: tuple[str, ...]) -> None:
    traced, ran, job = trace_and_make_job(*words)
    assert max(ran.values()) == pytest.approx(max(traced["device"].values()), rel=0.03)
    files = traced["disk"]
    assert (files["states"] > 0, files["weights"] > 0) == (STATES in words, WEIGHTS in words)
    # what is too small for a file, or behind the last whole block, stays in memory
    assert files["states"] == pytest.approx(compute_state_file_bytes(job), rel=0.05)
    assert files["weights"] == pytest.approx(compute_weight_file_bytes(job), rel=0.05)


@pytest.mark.full
def test_without_files_none_is_counted() -> None:
    traced, _, _ = trace_and_make_job("memory.offload_param=cpu", "memory.nvme_path=null")
    assert traced["disk"] == {"activations": 0, "states": 0, "weights": 0}


@pytest.mark.full
def test_a_frozen_weight_that_is_soon_used_twice_is_read_once() -> None:
    """DeepSpeed lists it twice among the weights to read ahead, and then fails."""
    sizes = {"num_hidden_layers": 4, "hidden_size": 1024, "intermediate_size": 2048}
    narrow = (f"{ZERO}.max_reuse_distance=700000", f"{ZERO}.max_live_parameters=1500000", "data.max_length=256")
    recipe = make_case(sizes, "parallel.sp_size=2", *narrow, WEIGHTS, "memory.nvme_path=.", "lora.r=16")
    traced = start_trace(DrawnRecipe({"model": {"config": dict(recipe.model.config or {})}}, recipe))
    assert traced["disk"]["weights"] > 0
    assert traced["disk"]["states"] == traced["disk"]["activations"] == 0  # they have no files
