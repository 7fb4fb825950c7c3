"""Tests that what rank 0 alone tries ends on all ranks alike, also when it fails, and that ranks tell each other which
kernels they have."""

import dataclasses
import re
from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.rank_pool import run_on_ranks
from support.run_harness import RunHarness
from support.small_run import CONFIG
from support.tiers import sample
from support.training import MemoryRows, make_recipe
from syrupy.assertion import SnapshotAssertion
from torch import Tensor

from ulysses_cli.plan.hardware import GIB
from ulysses_cli.plan.layout import Layout
from ulysses_cli.plan.ledger.job import make_job
from ulysses_cli.plan.ledger.ledger import measure_ledger
from ulysses_cli.plan.models.shape import read_model_shape
from ulysses_cli.plan.planner.lever_choice import choose_levers
from ulysses_cli.plan.resolved import RunPlan, settle
from ulysses_cli.train import sequence_parallel
from ulysses_cli.train.attention.kernels import choice
from ulysses_cli.train.attention.kernels.choice import Presence
from ulysses_cli.train.attention.kernels.trial import ANY_MIX
from ulysses_cli.train.choosing import Outcome
from ulysses_cli.train.elementwise import operators
from ulysses_cli.train.elementwise.choice import NO_IMPLEMENTATIONS, ElementwiseChoice
from ulysses_cli.train.loop import train
from ulysses_cli.train.memory import tiling
from ulysses_cli.train.model import parts
from ulysses_cli.train.model.build import assemble_run
from ulysses_cli.train.model.loading import load_model_config
from ulysses_cli.train.processes.groups import make_groups

GPU = torch.device("cuda")
STAGE_3 = (3, True)
FLASH = ("flash_attention_2", "flash_attention_3", "flash_attention_4")


def make_plan(*words: str) -> RunPlan:
    recipe = make_recipe(*words)
    shape = read_model_shape(load_model_config(recipe).to_dict(), "test")
    return settle(recipe, shape, choose_levers(recipe, shape, None).levers)


def test_norms_that_the_plan_did_not_count_cost_bytes(snapshot: SnapshotAssertion) -> None:
    words, slower = ("data.max_length=64Ki", "model.dtype=bfloat16"), ElementwiseChoice(NO_IMPLEMENTATIONS, "measured")
    plan, plain = make_plan(*words), make_plan(*words, "model.fused_kernels=false")
    jobs = [make_job(each.recipe, each.shape, each.levers) for each in (plan, plain)]
    counted, needed = (measure_ledger(job).gpu_peak_bytes / GIB for job in jobs)
    assert needed > counted + 0.01
    told = parts.describe_plain_norms(plan, slower, ["rounded"])
    assert re.findall(r"([\d.]+) GiB", told) == [f"{needed - counted:.2f}", f"{needed:.2f}"]
    assert re.sub(r"[\d.]+ GiB", "GIB", told) == snapshot
    assert parts.describe_plain_norms(plain, slower, ["rounded"]) == ""
    served = ElementwiseChoice({**NO_IMPLEMENTATIONS, "rounded": "torch"}, "measured")
    assert parts.describe_plain_norms(plan, served, ["rounded"]) == ""
    assert parts.describe_plain_norms(plan, served, ["rounded", "offset"])
    assert parts.describe_plain_norms(plan, served, []) == told, "norms of an unknown formula, as another release has"


def report_norms() -> list[str]:
    """Returns what a run says whose norms are measured as slower than transformers' own."""
    groups, lines = make_groups(Layout(), timedelta(seconds=60)), list[str]()
    slower = dataclasses.replace(
        parts.REAL_PARTS, choose_implementations=lambda *_: ElementwiseChoice(NO_IMPLEMENTATIONS, "measured")
    )
    rows = MemoryRows([[(20, 1), (30, 1)]] * 4)
    assemble_run(make_plan(), groups, torch.device("cpu"), rows, 1, parts=slower, report=lines.append)
    return [line for line in lines if line.startswith("norms run by transformers' own code")]


@pytest.mark.full
def test_a_run_says_at_its_start_that_norms_cost_more() -> None:
    assert len(run_on_ranks(1, report_norms)[0]) == 1


def count_rotations(*words: str) -> int:
    """Returns how often queries or keys are rotated in one pass, in a step of one row."""
    harness = RunHarness(make_recipe(*words), MemoryRows([[(40, 0)]] * 2), 1)
    calls, rotate = list[str](), operators.rotate

    def count(hidden: Tensor, cos: Tensor, sin: Tensor, implementation: str) -> Tensor:
        calls.append(implementation)
        turned: Tensor = rotate(hidden, cos, sin, implementation)
        return turned

    with mock.patch.object(operators, "rotate", count):
        train(harness.train_state)
    return len(calls)


@pytest.mark.parametrize(("stage", "recomputes"), sample([STAGE_3, (3, False), (2, False)], quick=[STAGE_3]))
def test_rotations_of_one_pass_run_inside_the_engine(stage: int, recomputes: bool) -> None:
    """In each forward and recomputation, also at stage 3, whose hooks copy what modules return."""
    words = (f"parallel.zero_stage={stage}", f"memory.gradient_checkpointing={str(recomputes).lower()}")
    assert run_on_ranks(1, count_rotations, *words) == [CONFIG["num_hidden_layers"] * 2 * (1 + recomputes)]


def add_products(*words: str) -> tuple[int, int, list[float]]:
    """Returns how many products of a step were added to sums as they were made, how many gradients of matrices were
    added apart, and the losses. A CPU's products stand for a GPU's, which take bfloat16 and return float32."""
    made: list[int] = []
    take = tiling.WeightSums._take_gradient

    def multiply(left: Tensor, right: Tensor, out_dtype: torch.dtype) -> Tensor:
        made.append(1)
        return left.to(out_dtype) @ right.to(out_dtype)

    def add(total: Tensor, left: Tensor, right: Tensor, out_dtype: torch.dtype, out: Tensor) -> None:
        out.copy_(total + multiply(left, right, out_dtype))

    apart: list[int] = []

    def count(sums: tiling.WeightSums, weight: Tensor) -> None:
        apart.append(weight.dim())
        take(sums, weight)

    harness = RunHarness(make_recipe(*words), MemoryRows([[(64, 0)]] * 4), 2)
    with (
        mock.patch.object(tiling, "adds_in_product", return_value=True),
        mock.patch.object(tiling.WeightSums, "_take_gradient", count),
        mock.patch.multiple(torch, mm=multiply, addmm=add),
    ):
        train(harness.train_state)
    return len(made), apart.count(2), harness.losses


@pytest.mark.check
def test_products_of_tiles_are_added_inside_the_engine() -> None:
    """In bfloat16, with weights that ZeRO-3 shards: each matrix of a tiled MLP."""
    words = ("memory.tiled_mlp=true", "memory.tiled_loss=true", "model.dtype=bfloat16")
    ((num_products, num_apart, losses),) = run_on_ranks(1, add_products, *words)
    assert num_products >= 2 * 3 * CONFIG["num_hidden_layers"], "gate, up and down of each layer in each step"
    assert num_apart == 0
    ((_, _, plain),) = run_on_ranks(1, add_products, "model.dtype=bfloat16")
    assert losses == pytest.approx(plain, rel=0.01)


def test_a_gpu_without_such_products_is_told(snapshot: SnapshotAssertion) -> None:
    words = ("memory.tiled_mlp=true", "model.dtype=bfloat16")
    with mock.patch.object(parts, "adds_in_product", return_value=False):
        assert parts.describe_sums(make_plan(*words), GPU) == snapshot
        assert parts.describe_sums(make_plan("memory.tiled_mlp=false", "memory.tiled_loss=false"), GPU) == ""
        assert parts.describe_sums(make_plan(*words), torch.device("cpu")) == "", "no plan counted on it"
    with mock.patch.object(parts, "adds_in_product", return_value=True):
        assert parts.describe_sums(make_plan(*words), GPU) == ""


def make_function(has_package: bool) -> Callable[..., Any]:
    """As transformers wraps its torch code, with a package's kernel or without."""

    def compute(hidden: Any, **options: Any) -> Any:
        return hidden.size()

    @wraps(compute)
    def run(hidden: Any, **options: Any) -> Any:
        return hidden.size() if has_package else compute(hidden, **options)

    return run


def choose_recurrences(lacking_rank: int | None) -> list[str]:
    """Returns the obstacle that rank 0 is told for each function."""
    groups = make_groups(Layout(sp_size=2), timedelta(seconds=60))
    functions = {"rule": make_function(dist.get_rank() != lacking_rank), "scan": make_function(has_package=True)}
    with mock.patch.object(parts, "_choose_recurrence", side_effect=lambda *args: args[-1]):
        choices: Any = parts.choose_recurrences(functions, mock.Mock(), groups, GPU)
    return [choices["rule"], choices["scan"]]


def test_a_recurrence_runs_by_a_package_that_all_ranks_have() -> None:
    assert run_on_ranks(2, choose_recurrences, None, time_limit=60) == [["", ""]] * 2
    for missing, none in run_on_ranks(2, choose_recurrences, 1, time_limit=60):
        assert missing.endswith(" (rank 1)")
        assert none == ""


def choose_attention(lacking_rank: int | None, is_own_loop: bool) -> tuple[str, str, list[str]]:
    """Returns the choice of two ranks on a GPU for which FlashAttention 3 was made, and what rank 0 tried."""
    owner: Any = sequence_parallel if is_own_loop else parts
    plan = make_plan("parallel.sp_size=2", "model.dtype=bfloat16")
    groups = make_groups(plan.layout, timedelta(seconds=60))
    tried: list[str] = []

    def read(_: torch.device) -> Presence:
        lacks = dist.get_rank() == lacking_rank
        missing = dict.fromkeys(FLASH, "") | {"flash_attention_3": "is not installed" if lacks else ""}
        return Presence(f"m{dist.get_rank()}", "H100", (9, 0), {"torch": "2"}, dict.fromkeys(FLASH, "1.0"), missing)

    def run(name: str, *_: Any, **__: Any) -> Outcome:
        tried.append(name)
        return Outcome("", 1.0)

    with (
        mock.patch.object(owner, "read_presence", read),
        mock.patch.object(choice, "_try", run),
        mock.patch.object(choice, "choose_once", lambda facts, sources, choose, is_known: choose()),
    ):
        if is_own_loop:
            loop: Any = mock.Mock(groups=groups, _wanted="auto")
            kernels = sequence_parallel.SequenceParallel._choose_kernels(loop, plan.shape, torch.bfloat16, GPU)
            return next(iter(kernels.values())), "", tried
        chosen = parts.choose_common_kernel(plan, groups, GPU, ANY_MIX)
    return chosen.name, chosen.reason, tried


@pytest.mark.parametrize("is_own_loop", [False, True])
def test_a_kernel_that_one_rank_lacks_is_not_tried(is_own_loop: bool) -> None:
    """In a run, and in a user's own loop."""
    name, _, tried = run_on_ranks(2, choose_attention, None, is_own_loop, time_limit=60)[1]
    assert (name, tried) == ("flash_attention_3", [])
    first, second = run_on_ranks(2, choose_attention, 1, is_own_loop, time_limit=60)
    assert first[:2] == second[:2]
    assert "flash_attention_3" not in [first[0], *first[2]]
    assert is_own_loop or "m1 (rank 1)" in first[1]
    assert second[2] == []
