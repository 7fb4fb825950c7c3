"""Tests that gradients which leave the GPU once, and groups which step while the backward goes on, end with the bits of
DeepSpeed's own order: also in steps that are clipped, that have a gradient which is not finite, and after a resume."""

from concurrent.futures import Executor, Future
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support import run_harness
from support.moved_bytes import count_moved
from support.rank_pool import run_on_ranks
from support.real_steps import make_case
from support.run_harness import ROWS, RunHarness
from support.tiers import mark_by
from support.training import CONFIG, MemoryRows, make_recipe

from ulysses_cli.plan.ledger.weights import read_weights
from ulysses_cli.plan.models.shape import read_model_shape
from ulysses_cli.plan.planner.lever_choice import choose_levers
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.plan.resolved import choose_layout, settle
from ulysses_cli.train.model import build
from ulysses_cli.train.model.build import assemble_run
from ulysses_cli.train.model.loading import load_model_config
from ulysses_cli.train.optimizer.host_gradients import HostGradients, keeps_gradients
from ulysses_cli.train.optimizer.overlapped_optimizer import OverlappedOptimizer
from ulysses_cli.train.processes.groups import make_groups

NEEDS_ADAM = pytest.mark.operator("cpu_adam")
NUM_STEPS, BAD_STEP, SAVED = 5, 2, 3
SMALL = ("memory.offload_optimizer=cpu", "deepspeed.zero_optimization.sub_group_size=4000")
BUCKET = "deepspeed.zero_optimization.reduce_bucket_size=4000"  # gradients leave in many pieces, as a large model's do


class AtOnce(Executor):
    """Steps each group as soon as it may, so that what is early does not depend on threads."""

    def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*args, **kwargs))
        return future


def make(*overrides: str, overlap: bool) -> Recipe:
    words = ("train.learning_rate=0.01", "train.lr_scheduler_type=constant", f"memory.overlap_optimizer={overlap}")
    return make_recipe(*SMALL, BUCKET, *words, *overrides, config=CONFIG)


def get_early(harness: RunHarness) -> OverlappedOptimizer | None:
    owner = getattr(harness.built.engine.wrapped.optimizer.step, "__self__", None)
    return owner if isinstance(owner, OverlappedOptimizer) else None


Outcome = tuple[list[list[torch.Tensor]], list[float], list[int]]


def run_deepspeeds(recipe: Recipe) -> Outcome:
    """Gradients come as DeepSpeed brings them."""
    with mock.patch.object(build, "HostGradients"):
        return run(recipe, is_deepspeeds=True)


def run(recipe: Recipe, waits: bool = False, forgets: bool = False, is_deepspeeds: bool = False) -> Outcome:
    """Returns states after each step, norms, and how many early steps of groups were kept in each step."""
    harness = RunHarness(recipe, MemoryRows(ROWS), NUM_STEPS)
    receive = harness.built.engine.wrapped.optimizer.partition_grads
    assert isinstance(receive.__self__, HostGradients | OverlappedOptimizer) != is_deepspeeds
    early = get_early(harness)
    if early is not None and not waits:
        early.executor = AtOnce()
    if early is not None and forgets:
        early._undo = early.stepped.remove  # type: ignore[method-assign]
    harness.spoil_gradient(BAD_STEP)
    states, norms, kept = [], [], []
    for step in range(1, NUM_STEPS + 1):
        before = early.num_kept if early is not None else 0
        harness.train_until(step)
        states.append([*harness.read_states(), *harness.read_weights().values()])
        norms.append(harness.results[-1].update.grad_norm)
        kept.append(early.num_kept - before if early is not None else 0)
        share = harness.results[-1].update.overlapped_share
        assert share == (kept[-1] / len(early.copies) if early is not None else None), "what metrics.jsonl holds"
    return states, norms, kept


def is_same(ours: Outcome, right: Outcome) -> bool:
    pairs = zip(ours[0], right[0], strict=True)
    has_right_states = all(torch.equal(a, b) for own, other in pairs for a, b in zip(own, other, strict=True))
    return has_right_states and str(ours[1]) == str(right[1])


TWICE = ("parallel.dp_shard_size=2", "train.gradient_accumulation_steps=2")
# ranks, a limit that clips some of the steps and not all, settings
CASES = {
    "one rank": (1, 2.0, ()),
    "two ranks": (2, 2.0, ("parallel.sp_size=2",)),
    "two micro-steps": (2, 0.8007, TWICE),
    "bfloat16": (2, 2.0, ("parallel.sp_size=2", "model.dtype=bfloat16")),
    "bfloat16, two micro-steps": (2, 0.8007, (*TWICE, "model.dtype=bfloat16")),
    "weights on the host": (1, 2.0, ("memory.offload_param=cpu",)),
    "tiles": (2, 2.0, ("parallel.sp_size=2", "memory.tiled_mlp=true", "memory.tiled_loss=true")),
    "adapters": (2, 0.4, ("parallel.sp_size=2", "lora.r=32")),
}


@NEEDS_ADAM
@pytest.mark.parametrize("case", [pytest.param(name, marks=mark_by(False, name == "two ranks")) for name in CASES])
def test_gradients_that_leave_once_and_early_steps_change_no_bit(case: str) -> None:
    num_ranks, limit, words = CASES[case]
    words = (*words, f"train.max_grad_norm={limit}")
    expected = run_on_ranks(num_ranks, run_deepspeeds, make(*words, overlap=False))
    ours = run_on_ranks(num_ranks, run, make(*words, overlap=False))
    assert all(map(is_same, ours, expected))
    for waits in (False, True):
        for ours, right in zip(run_on_ranks(num_ranks, run, make(*words, overlap=True), waits), expected, strict=True):
            assert is_same(ours, right)
            if not waits:
                kept = ours[2]
                assert any(kept), "no group stepped early"
                assert kept[BAD_STEP] == 0
                assert 0 in kept[:BAD_STEP] + kept[BAD_STEP + 1 :], "no step was clipped"


@pytest.mark.parametrize(
    ("words", "down", "up"),
    [
        pytest.param((), 2, 0, marks=pytest.mark.check),
        pytest.param(("memory.overlap_optimizer=true",), 2, 0, marks=pytest.mark.full),
        pytest.param(("train.gradient_accumulation_steps=2",), 8, 4, marks=pytest.mark.full),
    ],
)
def test_a_gradient_leaves_the_gpu_once(words: tuple[str, ...], down: int, up: int) -> None:
    """Bytes of a weight of this rank. The sum of two micro-steps is float32, and made on the GPU."""
    common = ("parallel.sp_size=2", "memory.offload_optimizer=cpu", "model.dtype=bfloat16", "run.device=cuda")
    recipe = make_case({}, *common, *words)
    share = read_weights(read_model_shape(recipe.model.config, "test"), recipe.lora).num_trained // 2
    assert count_moved(recipe) == {"down": down * share, "up": up * share}
    moved = {"down": (down + 4) * share, "up": (up + max(up, 2)) * share}
    assert count_moved(recipe, is_deepspeeds=True) == moved, "it comes back and leaves again in float32"


@NEEDS_ADAM
@pytest.mark.full
def test_an_early_step_that_is_not_undone_is_noticed() -> None:
    words = ("train.max_grad_norm=0",)
    expected = run_on_ranks(1, run, make(*words, overlap=False))[0]
    faulty = run_on_ranks(1, run, make(*words, overlap=True), False, True)[0]
    assert not is_same(faulty, expected)
    states, norms = ([outcome[part][:BAD_STEP] for outcome in (faulty, expected)] for part in (0, 1))
    assert is_same(*zip(states, norms, ([], []), strict=True))


@NEEDS_ADAM
@pytest.mark.full
@pytest.mark.parametrize("overlaps", [(False, True), (True, False), (True, True)])
def test_a_resumed_run_has_the_same_bits(tmp_path: Path, overlaps: tuple[bool, bool]) -> None:
    writes, reads = (make("parallel.sp_size=2", "train.max_grad_norm=0.5", overlap=each) for each in overlaps)
    given = (MemoryRows(ROWS), str(tmp_path), SAVED, NUM_STEPS)
    expected = run_on_ranks(2, run_harness.train_and_save, writes, *given)
    assert all(map(run_harness.is_same, run_on_ranks(2, run_harness.resume, reads, *given, True), expected))


@pytest.mark.parametrize(("norm", "limit"), [(0.5, 1.0), (1.0, 1.0), (0.9999995, 1.0), (3.0, 0.0), (7.0, 2.0)])
def test_gradients_are_kept_where_deepspeed_multiplies_by_one(norm: float, limit: float) -> None:
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    class Group:
        grad = torch.linspace(-1, 1, 100)

    class Zero:
        clip_grad, loss_scale, fp32_partitioned_groups_flat = limit, 1.0, (Group,)

    scaled = Group.grad.clone()
    Group.grad = scaled.clone()
    DeepSpeedZeroOptimizer_Stage3.unscale_and_clip_grads(Zero(), 0, torch.tensor(norm))
    assert torch.equal(Group.grad, scaled) == keeps_gradients(torch.tensor(norm), 1.0, limit)


@NEEDS_ADAM
@pytest.mark.check
def test_adam_without_pythons_lock_is_deepspeeds() -> None:
    assert run_on_ranks(1, step_unlocked)[0] == [True, True, True]


def step_unlocked() -> list[bool]:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    from ulysses_cli.train.optimizer.overlapped_optimizer import UnlockedAdam, unlock

    sides = []
    for unlocks in (False, True):
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(100_001))
        optimizer = DeepSpeedCPUAdam([weight], lr=0.01, betas=(0.85, 0.97), weight_decay=0.1)
        assert not unlocks or unlock(optimizer)
        for _ in range(3):
            weight.grad = torch.randn_like(weight)
            optimizer.step()
        sides.append((weight.data, optimizer.state[weight]["exp_avg"], isinstance(optimizer.ds_opt_adam, UnlockedAdam)))
    (weights, moments, was_unlocked), (others, other_moments, is_unlocked) = sides
    return [torch.equal(weights, others), torch.equal(moments, other_moments), is_unlocked and not was_unlocked]


def build_locked() -> int:
    recipe, lines = make(overlap=True), list[str]()
    shape = read_model_shape(load_model_config(recipe).to_dict(), "test")
    plan = settle(recipe, shape, choose_levers(recipe, shape, None).levers)
    groups = make_groups(choose_layout(recipe, shape), timedelta(seconds=60))
    with mock.patch.object(build, "unlock", return_value=False):
        assemble_run(plan, groups, torch.device("cpu"), MemoryRows(ROWS), 1, report=lines.append)
    return lines.count(build.LOCKED)


@NEEDS_ADAM
@pytest.mark.check
def test_a_run_says_that_its_early_steps_hold_pythons_lock() -> None:
    assert run_on_ranks(1, build_locked) == [1]
