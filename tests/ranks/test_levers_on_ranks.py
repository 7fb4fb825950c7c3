"""Tests memory levers over ranks: split rows, weights that ZeRO-3 shards, rows of unequal length."""

import dataclasses
from contextlib import nullcontext
from typing import Any
from unittest import mock

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

    with mock.patch.object(ulysses, "_all_to_all", wraps=ulysses._all_to_all) as exchange:
        run_split(Case("llama", levers))
    return exchange.call_count / 2


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


GRID = [
    (kind, levers, sp_size, lora)
    for kind in ("llama", "qwen3", "gemma2", "gemma3_text", "qwen3_moe", "gpt_oss", "gemma4_text")
    for levers in (
        ALL, Levers(loss_tile=7), Levers(mlp_tiles=5), KEPT, SAVED,
        Levers(checkpointing="full", mlp_tiles=3, offloaded=2),
    )
    for sp_size in (1, 2)
    for lora in ((), ("q_proj", "gate_proj", "down_proj"))
]  # fmt: skip
QUICK = ("llama", ALL, 2, ADAPTED)


@pytest.mark.parametrize(
    ("kind", "levers", "sp_size", "lora"),
    sample([QUICK, *GRID], quick=[QUICK], checked=[("gemma4_text", ALL, 2, ())]),
    ids=str,
)
def test_zero3(kind: str, levers: Levers, sp_size: int, lora: tuple[str, ...]) -> None:
    """At sp 1 the second rank's row has 5 tokens: fewer tokens than tiles, and other counts than the first rank's."""
    if lora and kind in ("qwen3_moe", "gpt_oss"):
        lora = ("q_proj", "o_proj")  # experts are no linear layers
    case = Case(kind, levers, dtype=torch.float32, lora=lora, changes=GROUPED.get(kind, {}))
    assert max(run_on_ranks(2, compare_zero3, case, sp_size)) < TOLERANCE


def compare_alone(case: Case, levers: Levers, changes: dict[str, Any]) -> float:
    """On sharded weights of two ranks with these levers, and in one process without."""
    expected = run_alone(case)
    result = run_zero3(dataclasses.replace(case, levers=levers, changes=changes), 2, steps=1)
    loss = result["losses"][0].clone()
    if not case.is_preference:
        dist.all_reduce(loss)
    found = {name: 50 * result[f"grad of {name}"] for name in expected if name != "loss"}  # run_zero3 divides by 50
    return max(measure_difference({"loss": loss, **found}, expected).values())


GROUPED_EXPERTS = Case("qwen3_moe", dtype=torch.float32)  # transformers takes grouped_mm by default
PREFERENCE = Case("llama", dtype=torch.float32, first_target=sum(LENGTHS) // 2, is_preference=True)


@pytest.mark.parametrize(
    ("case", "levers", "changes"),
    [
        (PREFERENCE, Levers(loss_tile=7), {}),
        pytest.param(dataclasses.replace(PREFERENCE, lora=ADAPTED), ALL, {}, marks=pytest.mark.check),
        pytest.param(PREFERENCE, Levers(), {}, marks=pytest.mark.check),
        pytest.param(GROUPED_EXPERTS, ALL, {"experts_implementation": "grouped_mm"}, marks=pytest.mark.check),
        pytest.param(GROUPED_EXPERTS, Levers(), {"experts_implementation": "grouped_mm"}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_sharded_weights_have_the_gradients_of_one_process(case: Case, levers: Levers, changes: dict[str, Any]) -> None:
    """A preference's loss follows from the losses of all ranks' targets, of which rank 0 has none. Experts run in
    grouped products, and each by itself."""
    assert max(run_on_ranks(2, compare_alone, case, levers, changes)) < TOLERANCE


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


HOST = ("memory.offload_optimizer=cpu", "memory.overlap_optimizer=true", "memory.offload_param=cpu")
OFFLOADED = ("memory.activation_offloading=true", "memory.gradient_checkpointing=true")


@pytest.mark.parametrize(
    "words",
    [
        (*OFFLOADED, "parallel.sp_size=2", "memory.tiled_mlp=true", "memory.tiled_loss=true"),
        pytest.param(
            (*OFFLOADED, "parallel.dp_shard_size=2", *HOST), marks=[pytest.mark.full, pytest.mark.operator("cpu_adam")]
        ),
        pytest.param(("parallel.zero_stage=2", "memory.gradient_checkpointing=full"), marks=pytest.mark.check),
        pytest.param(("parallel.zero_stage=1", "lora={r: 4}", *OFFLOADED), marks=pytest.mark.full),
        pytest.param(("parallel.sp_size=2", "parallel.ring_size=2", *OFFLOADED), marks=pytest.mark.full),
    ],
    ids=" ".join,
)
def test_a_backward_in_another_thread_changes_no_bit(words: tuple[str, ...]) -> None:
    """A GPU's backward runs in a thread of its own, with all hooks of DeepSpeed and all recomputations."""
    assert run_on_ranks(2, compare_threads, *words) == [0, 0]


def run_unmarked() -> Any:
    from support import levers

    original = levers.tile_mlps
    with mock.patch.object(levers, "tile_mlps", lambda model, count_tiles, _: original(model, count_tiles)):
        return run_zero3(Case("llama", Levers(mlp_tiles=3), dtype=torch.float32), 1)


def test_a_block_that_would_gather_for_each_tile_is_refused() -> None:
    with pytest.raises(RankError, match="ZeRO-3 leaf"):
        run_on_ranks(2, run_unmarked)
