"""Tests memory levers over ranks: split rows, weights that ZeRO-3 shards, rows of unequal length."""

import dataclasses
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.levers import LENGTHS, Case, Levers, measure_difference, run_alone, run_split, run_zero3
from support.other_thread import backward_in_another_thread
from support.rank_pool import RankError, run_on_ranks
from support.run_harness import RunHarness
from support.tiers import sample
from support.training import MemoryRows, make_recipe
from torch import Tensor

from ulysses_cli.data.steps import StepPlan
from ulysses_cli.train.loop import train
from ulysses_cli.train.loss import Loss, NextToken, Places

ALL = Levers(loss_tile=7, mlp_tiles=5, checkpointing="save_attention", offloaded=1, chunks=2)
KEPT = Levers(checkpointing="save_attention")
SAVED = Levers(checkpointing="save_attention", saved=1)
# Each expert by itself calls its activation, a module: as often as the rank's tokens reach experts.
GROUPED = {"gemma4_text": {"experts_implementation": "grouped_mm"}}
ADAPTED = ("q_proj", "down_proj", "gate_proj", "lm_head")


def compare_split(case: Case) -> float:
    expected = run_split(dataclasses.replace(case, levers=Levers()))
    return max(measure_difference(run_split(case), expected).values())


def compare_zero3(case: Case, sp_size: int) -> float:
    expected = run_zero3(dataclasses.replace(case, levers=Levers()), sp_size)
    result = run_zero3(case, sp_size)
    del expected["gathers"], result["gathers"]
    return max(measure_difference(result, expected).values())


@pytest.mark.parametrize("levers", [ALL, KEPT, SAVED], ids=["all", "kept", "saved"])
@pytest.mark.parametrize("kind", sample(["llama", "gemma2", "gpt_oss"], quick=["gemma2"]))
def test_split_rows_in_float64(kind: str, levers: Levers) -> None:
    assert max(run_on_ranks(2, compare_split, Case(kind, levers))) < 1e-6


def count_exchanges(levers: Levers) -> float:
    """Counts a layer's all-to-alls in one forward and backward."""
    from ulysses_cli.train.attention import ulysses

    calls, original = [0], ulysses._all_to_all

    def counted(*args: Any) -> Any:
        calls[0] += 1
        return original(*args)

    ulysses._all_to_all = counted  # type: ignore[assignment]
    try:
        run_split(Case("llama", levers))
    finally:
        ulysses._all_to_all = original
    return calls[0] / 2


@pytest.mark.parametrize(
    ("levers", "exchanges"),
    [
        (Levers(), 4),
        (Levers(checkpointing="full"), 6),
        (Levers(checkpointing="save_attention"), 5),
        pytest.param(Levers(checkpointing="save_attention", chunks=2), 8, marks=pytest.mark.check),
        pytest.param(Levers(checkpointing="full", chunks=2), 12, marks=pytest.mark.check),
    ],
    ids=str,
)
def test_a_recomputation_that_keeps_attention_exchanges_nothing(levers: Levers, exchanges: int) -> None:
    assert run_on_ranks(2, count_exchanges, levers) == [exchanges, exchanges]


# float32 and two steps of SGD; deep sums run in another order
TOLERANCE = 2e-5
SAMPLE = [
    ("llama", 1, ()), ("llama", 2, ADAPTED), ("qwen3", 2, ()), ("gemma3_text", 1, ()), ("qwen3_moe", 2, ()),
    ("gemma4_text", 2, ()),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "sp_size", "lora"), sample(SAMPLE, quick=SAMPLE[1:2], checked=SAMPLE[5:]), ids=str)
def test_zero3(kind: str, sp_size: int, lora: tuple[str, ...]) -> None:
    """At sp 1 the second rank's row has 5 tokens: fewer tokens than tiles, and other counts than the first rank's."""
    case = Case(kind, ALL, dtype=torch.float32, lora=lora, changes=GROUPED.get(kind, {}))
    assert max(run_on_ranks(2, compare_zero3, case, sp_size)) < TOLERANCE


def compare_grouped(levers: Levers, sp_size: int) -> float:
    """Experts in grouped products on sharded weights, and each expert by itself in one process."""
    grouped = {"experts_implementation": "grouped_mm"}
    case = Case("qwen3_moe", dtype=torch.float32)
    expected = run_alone(case)
    result = run_zero3(dataclasses.replace(case, levers=levers, changes=grouped), sp_size, steps=1)
    loss = result["losses"][0].clone()
    dist.all_reduce(loss)
    found = {name: 50 * result[f"grad of {name}"] for name in expected if name != "loss"}  # run_zero3 divides by 50
    return max(measure_difference({"loss": loss, **found}, expected).values())


@pytest.mark.parametrize("levers", sample([Levers(), ALL], quick=[], checked=[ALL]), ids=["without tiles", "tiles"])
def test_grouped_experts_on_sharded_weights_equal_single_ones_on_one_process(levers: Levers) -> None:
    """grouped_mm is what transformers takes by default."""
    assert max(run_on_ranks(2, compare_grouped, levers, 2)) < TOLERANCE


def compare_preferences(levers: Levers, lora: tuple[str, ...]) -> float:
    """A loss that follows from the losses of all ranks' targets, of which rank 0 has none, and the same in one
    process."""
    case = Case("llama", dtype=torch.float32, lora=lora, first_target=sum(LENGTHS) // 2, is_preference=True)
    expected = run_alone(case)
    result = run_zero3(dataclasses.replace(case, levers=levers), 2, steps=1)
    found = {name: 50 * result[f"grad of {name}"] for name in expected if name != "loss"}  # run_zero3 divides by 50
    return max(measure_difference({"loss": result["losses"][0], **found}, expected).values())


PREFERENCES = [(Levers(loss_tile=7), ()), (ALL, ADAPTED), (Levers(), ())]


@pytest.mark.parametrize(("levers", "lora"), sample(PREFERENCES, quick=PREFERENCES[:1], checked=PREFERENCES))
def test_losses_of_targets_on_sharded_weights_and_a_rank_without_any(levers: Levers, lora: tuple[str, ...]) -> None:
    assert max(run_on_ranks(2, compare_preferences, levers, lora)) < TOLERANCE


@pytest.mark.full
@pytest.mark.parametrize("lora", [(), ("q_proj", "gate_proj", "down_proj")], ids=["full", "lora"])
@pytest.mark.parametrize("sp_size", [1, 2])
@pytest.mark.parametrize(
    "levers",
    [
        ALL,
        Levers(loss_tile=7),
        Levers(mlp_tiles=5),
        KEPT,
        SAVED,
        Levers(checkpointing="full", mlp_tiles=3, offloaded=2),
    ],
    ids=["all", "loss", "mlp", "kept", "saved", "full"],
)
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "gemma3_text", "qwen3_moe", "gpt_oss", "gemma4_text"])
def test_zero3_grid(kind: str, levers: Levers, sp_size: int, lora: tuple[str, ...]) -> None:
    if lora and kind in ("qwen3_moe", "gpt_oss"):
        lora = ("q_proj", "o_proj")  # experts are no linear layers
    case = Case(kind, levers, dtype=torch.float32, lora=lora, changes=GROUPED.get(kind, {}))
    assert max(run_on_ranks(2, compare_zero3, case, sp_size)) < TOLERANCE


def count_gathers_of(case: Case, parts: tuple[str, ...]) -> dict[str, int]:
    """Counts gathers of weights that are released as soon as their module has run."""
    gathers: dict[str, int] = run_zero3(case, 1, reuse=0)["gathers"]
    return {name: count for name, count in gathers.items() if any(part in name for part in parts)}


@pytest.mark.check
def test_gathers_do_not_grow_with_the_number_of_tiles() -> None:
    """Each weight is gathered at most once in the forward and once for the backward, where the recomputation finds it
    gathered. The head, whose one pass computes everything, is gathered at most once more when the backward passes it.
    """
    few, many, plain = (
        run_on_ranks(2, count_gathers_of, Case("llama", levers, dtype=torch.float32), (".mlp.", "lm_head"))[0]
        for levers in (
            Levers(loss_tile=40, mlp_tiles=2, checkpointing="save_attention"),
            Levers(loss_tile=3, mlp_tiles=9, checkpointing="save_attention"),
            Levers(checkpointing="save_attention"),
        )
    )
    assert few == many
    assert max(many.values()) <= 2, many
    assert sum(many.values()) <= sum(plain.values())


def compare_threads(*words: str) -> float:
    """A whole engine's steps, with their backwards in a thread of their own and in the caller's."""
    results = []
    for is_own in (False, True):
        layout = () if "parallel.sp_size=2" in words else ("parallel.dp_shard_size=2",)
        recipe = make_recipe(*words, *layout, "train.learning_rate=0.01", "data.max_length=48")
        harness = RunHarness(recipe, MemoryRows([[(20, 0), (28, 3)], [(40, 0)]] * 2), 2)
        harness.train_state.num_steps = 2
        with backward_in_another_thread() if is_own else nullcontext([2]) as count:
            train(harness.train_state)
        assert count[0] >= 2
        results.append({"losses": torch.tensor(harness.losses), **harness.read_weights()})
        harness.built.engine.close()
    return max(measure_difference(*results).values())


class Mean(NextToken):
    """Twice each target's loss over twice the targets, and beside it what NextToken's loss is."""

    names = ("single",)

    def compute(self, loss: Loss, hidden: Tensor, labels: Tensor, places: Places | None, answers: Any) -> Tensor:
        total = loss(hidden, labels, places)
        return torch.stack([2 * total, 2 * total.detach()])

    def count(self, plan: StepPlan) -> int:
        return 2 * plan.num_targets


def run_objectives() -> list[Any]:
    """The steps' losses, what is measured beside them, and the weights, with each objective."""
    results = []
    for objective in (NextToken(), Mean()):
        recipe = make_recipe("parallel.sp_size=2", "train.gradient_accumulation_steps=2", "train.learning_rate=0.01")
        harness = RunHarness(recipe, MemoryRows([[(20, 0), (28, 3)], [(40, 35)]] * 2), 2)
        engine: Any = harness.built.engine
        engine.objective = engine.wrapped.module.objective = objective
        train(harness.train_state)
        measures = [result.measures for result in harness.results]
        results.append((harness.losses, measures, harness.read_weights()))
        engine.close()
    return results


def test_what_is_minimized_and_measured_is_a_value() -> None:
    """Loop and engine divide by what an objective counts, and write what it names."""
    for (losses, none, weights), (same, measures, others) in run_on_ranks(2, run_objectives):
        assert none == [{}, {}]
        assert [each["single"] for each in measures] == pytest.approx(losses, rel=1e-6)
        assert same == pytest.approx(losses, rel=1e-6)
        assert max(measure_difference(others, weights).values()) < TOLERANCE


HOST = (
    "parallel.dp_shard_size=2",
    "memory.offload_optimizer=cpu",
    "memory.overlap_optimizer=true",
    "memory.offload_param=cpu",
)
SAVED = ("memory.activation_offloading=true", "memory.gradient_checkpointing=true")


@pytest.mark.parametrize(
    "words",
    [
        (*SAVED, "parallel.sp_size=2", "memory.tiled_mlp=true", "memory.tiled_loss=true"),
        pytest.param((*SAVED, *HOST), marks=[pytest.mark.full, pytest.mark.operator("cpu_adam")]),
        pytest.param(("parallel.zero_stage=2", "memory.gradient_checkpointing=full"), marks=pytest.mark.check),
        pytest.param(("parallel.zero_stage=1", "lora={r: 4}", *SAVED), marks=pytest.mark.full),
        pytest.param(("parallel.sp_size=2", "parallel.ring_size=2", *SAVED), marks=pytest.mark.full),
    ],
    ids=" ".join,
)
def test_a_backward_in_another_thread_changes_no_bit(words: tuple[str, ...]) -> None:
    """A GPU's backward runs in a thread of its own, with all hooks of DeepSpeed and all recomputations."""
    assert run_on_ranks(2, compare_threads, *words) == [0, 0]


def run_unmarked() -> Any:
    from support import levers

    original = levers.tile_mlps
    levers.tile_mlps = lambda model, count_tiles, _: original(model, count_tiles)  # type: ignore[assignment]
    try:
        return run_zero3(Case("llama", Levers(mlp_tiles=3), dtype=torch.float32), 1)
    finally:
        levers.tile_mlps = original


def test_a_block_that_would_gather_for_each_tile_is_refused() -> None:
    with pytest.raises(RankError, match="not gathered as a whole: mark it as a ZeRO-3 leaf"):
        run_on_ranks(2, run_unmarked)
