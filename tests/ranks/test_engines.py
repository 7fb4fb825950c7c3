"""Tests that engines of one process follow each other without a trace: nothing of one is alive when it is closed."""

import gc
import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta
from itertools import chain, product
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.runtime.zero import parameter_offload
from support.byte_counter import ByteCounter
from support.rank_pool import run_on_ranks
from support.run_harness import RunHarness
from support.training import CONFIG, MemoryRows, make_recipe

from ulysses_cli.hardware_table import load_hardware
from ulysses_cli.plan.models.shape import read_model_shape
from ulysses_cli.plan.planner.lever_choice import choose_levers
from ulysses_cli.plan.resolved import choose_layout, settle
from ulysses_cli.train.engine import Engine
from ulysses_cli.train.loop import train
from ulysses_cli.train.model import build
from ulysses_cli.train.model.build import build_for_answers
from ulysses_cli.train.processes.groups import make_groups

ROWS = MemoryRows([[(20, 0), (28, 3)], [(40, 0)]] * 2)
SAVED = ("memory.activation_offloading=true", "memory.gradient_checkpointing=true", "memory.tiled_mlp=true")


def watch(engine: Engine) -> list[weakref.ref[object]]:
    wrapped = engine.wrapped
    parts = [engine, wrapped, wrapped.module, wrapped.optimizer, *wrapped.module.parameters()]
    return [weakref.ref(part) for part in parts]


def run_steps(words: Sequence[str], counter: ByteCounter | None = None) -> list[weakref.ref[object]]:
    harness = RunHarness(make_recipe(*words, "data.max_length=48"), ROWS, 2)
    for parameter in harness.built.module.parameters():
        if counter is not None:
            counter.track(parameter)
    harness.train_state.num_steps = 2
    train(harness.train_state)
    parts = watch(harness.built.engine)
    harness.built.engine.close()
    return parts


def list_living(*words: str) -> list[str]:
    """What is left of an engine, and modules that DeepSpeed takes for running. Those of another test's engine, which is
    still there, do not count."""
    before = list(map(id, parameter_offload.FWD_MODULE_STACK))
    parts = run_steps(words)
    gc.collect()
    running = [module for module in parameter_offload.FWD_MODULE_STACK if id(module) not in before]
    return [type(part).__name__ for part in (*(each() for each in parts), *running) if part is not None]


@pytest.mark.parametrize(
    "words",
    [
        SAVED,
        pytest.param(
            ("memory.offload_optimizer=cpu", *SAVED), marks=[pytest.mark.check, pytest.mark.operator("cpu_adam")]
        ),
        pytest.param(("lora={r: 4}",), marks=pytest.mark.full),
        pytest.param(("parallel.zero_stage=2",), marks=pytest.mark.check),
        pytest.param(("parallel.zero_stage=1",), marks=pytest.mark.full),
    ],
    ids=" ".join,
)
def test_nothing_of_a_closed_engine_is_alive(words: tuple[str, ...]) -> None:
    assert run_on_ranks(2, list_living, *words, "parallel.sp_size=2") == [[], []]


def test_an_engine_on_a_cpu_compiles_nothing() -> None:
    """DeepSpeed would compile sums in shared memory, which its inference alone uses."""
    assert run_on_ranks(1, find_compiled) == [None]


def find_compiled() -> object:
    from deepspeed.comm import comm

    run_steps(())
    return comm.cdb.shm_comm_op


def run_settled(words: Sequence[str]) -> tuple[int, list[float], dict[str, torch.Tensor]]:
    """The engine's stage, and what a run computes with levers chosen for a GPU for which its model is small."""
    recipe = make_recipe(*words, "data.max_length=48", "parallel.dp_shard_size=2")
    harness = RunHarness(recipe, ROWS, 2, gpu=load_hardware().get_gpu("h100-80gb"))
    train(harness.train_state)
    return harness.built.engine.wrapped.zero_optimization_stage(), harness.losses, harness.read_weights()


@pytest.mark.parametrize("micro_steps", [1, pytest.param(2, marks=pytest.mark.check)])
def test_a_run_has_the_stage_that_was_chosen(micro_steps: int) -> None:
    """Values are those of the same stage in the recipe, to the bit."""
    words = (f"train.gradient_accumulation_steps={micro_steps}", "memory.leaf_layers=false", "model.dtype=bfloat16")
    stage = min(2, micro_steps)
    chosen = run_on_ranks(2, run_settled, (*words, "parallel.zero_stage=auto"))
    written = run_on_ranks(2, run_settled, (*words, f"parallel.zero_stage={stage}"))
    for (own_stage, losses, weights), (_, other_losses, others) in zip(chosen, written, strict=True):
        assert own_stage == stage
        assert losses == other_losses
        assert all(torch.equal(weights[name], others[name]) for name in others)


def walk_anew(module: Any, recurse: bool = False) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """As DeepSpeed lists the weights of a module."""
    return chain(module.named_parameters(recurse=recurse), module.ds_external_parameters())


def compare_walks(*words: str) -> int:
    """Elements that differ where hooks list weights once; each list is the module's own afterwards."""
    values = []
    for walk in (walk_anew, build._walk_weights):
        with mock.patch.object(build, "_walk_weights", walk):
            harness = RunHarness(make_recipe(*words, "data.max_length=48"), ROWS, 3)
            train(harness.train_state)
        values.append(harness.read_weights())
    listed = [module for module in harness.built.module.modules() if "_walked_weights" in vars(module)]
    assert listed
    for module, recurse in product(listed, (False, True)):
        pairs = zip(build._walk_weights(module, recurse), walk_anew(module, recurse), strict=True)
        assert all(name == other and weight is same for (name, weight), (other, same) in pairs)
    return sum(int((value != values[1][name]).sum()) for name, value in values[0].items())


@pytest.mark.parametrize("more", [(), pytest.param(("lora={r: 4}",), marks=pytest.mark.check)])
@pytest.mark.parametrize("leaves", ["true", pytest.param("false", marks=pytest.mark.check)])
def test_weights_that_hooks_list_once_are_all_of_a_module(leaves: str, more: tuple[str, ...]) -> None:
    assert run_on_ranks(2, compare_walks, f"memory.leaf_layers={leaves}", "parallel.sp_size=2", *more) == [0, 0]


def list_living_answers() -> list[str]:
    def answer() -> list[weakref.ref[object]]:
        recipe = make_recipe("parallel.sp_size=2", "data.max_length=48")
        shape = read_model_shape(CONFIG, "test")
        plan = settle(recipe, shape, choose_levers(recipe, shape, None).levers)
        groups = make_groups(choose_layout(recipe, shape), timedelta(seconds=60))
        harness_engine = build_for_answers(plan, groups, torch.device("cpu"))
        return end(harness_engine)

    def end(engine: Engine) -> list[weakref.ref[object]]:
        parts = watch(engine)
        engine.close()
        return parts

    parts = answer()
    gc.collect()
    return [type(part()).__name__ for part in parts if part() is not None]


def test_nothing_of_a_closed_engine_for_answers_is_alive() -> None:
    assert run_on_ranks(2, list_living_answers) == [[], []]


def measure_peaks(*words: str) -> list[int]:
    """The most bytes alive with each of three engines that follow each other."""
    peaks = []
    with ByteCounter(ignored_device="meta") as counter:
        for _ in range(3):
            gc.collect()
            counter.peak = counter.now
            run_steps(words, counter)
            peaks.append(counter.peak)
    return peaks


@pytest.mark.full
def test_a_second_engine_has_the_peak_of_the_first() -> None:
    for first, *others in run_on_ranks(2, measure_peaks, *SAVED, "parallel.sp_size=2"):
        assert first > 100_000
        assert others == pytest.approx([first] * 2, abs=10_000), "weights alone are 390,000"
