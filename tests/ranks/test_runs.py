"""Tests what a run guarantees besides exact steps: copies of parameters, bad steps, checkpoints of any layout,
agreement."""

import math
import re
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.prepared import make_prepared
from support.rank_pool import RankError, run_on_ranks
from support.run_harness import ROWS, RunHarness
from support.training import MemoryRows, make_recipe, measure_difference
from torch import Tensor

from ulysses_cli.data.steps import make_eval_batching
from ulysses_cli.data.store import open_rows
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.train.evaluation import evaluate
from ulysses_cli.train.loop import train
from ulysses_cli.train.processes.consistency import compare_facts


def count_gathers(recipe: Recipe) -> tuple[list[float], dict[str, Tensor], list[tuple[int, ...]]]:
    """Returns losses, weights, and for each gather of the second step the ranks of its group."""
    from deepspeed.runtime.zero import partition_parameters
    from deepspeed.utils import groups

    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None  # an earlier engine's in this process
    harness = RunHarness(recipe, MemoryRows(ROWS), 2)
    real, gathers = partition_parameters._dist_allgather_fn, []

    def count(source: Tensor, target: Tensor, group: Any = None) -> Any:
        gathers.append(tuple(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)))
        return real(source, target, group)

    harness.train_state.pre_step_hooks = (lambda _: gathers.clear(),)
    with mock.patch.object(partition_parameters, "_dist_allgather_fn", count):
        train(harness.train_state)
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    return harness.losses, harness.read_weights(), gathers


@pytest.mark.full
def test_parameter_copies_keep_gathers_inside_a_replica_and_change_no_value() -> None:
    zero = ("param_persistence_threshold", "max_live_parameters", "max_reuse_distance", "prefetch_bucket_size")
    common = ["parallel.sp_size=2", *(f"deepspeed.zero_optimization.{name}=0" for name in zero)]
    common += ["train.gradient_accumulation_steps=3", "memory.gradient_checkpointing=false"]
    whole = run_on_ranks(4, count_gathers, make_recipe(*common, "parallel.dp_shard_size=2"))
    copied = run_on_ranks(4, count_gathers, make_recipe(*common, "parallel.dp_replicate_size=2"))
    for rank, (ours, expected) in enumerate(zip(copied, whole, strict=True)):
        assert ours[0] == pytest.approx(expected[0], rel=1e-6)
        assert measure_difference(ours[1], expected[1]) < 1e-5
        assert set(expected[2]) == {(0, 1, 2, 3)}
        replica = (0, 1) if rank < 2 else (2, 3)
        assert set(ours[2]) == {(0, 1, 2, 3), replica}
        # Only the first forward of a step crosses replicas. Five more passes (2 forwards, 3 backwards) stay inside.
        assert ours[2].count((0, 1, 2, 3)) * 4 <= ours[2].count(replica), ours[2]


CLASSES = {"thoughts": 4 | 8, "calls": 4 | 16, "answers": 4}
# Two chats, of a user's words (0) and the assistant's: turns 1, 2 and 1 to 4.
CHAT_FLAGS = [
    [0] * 9 + [13] * 7 + [21] * 4 + [0] * 6 + [5] * 8,
    [0, 0, 5, 5, 0, 21, 21, 21, 0, 0, 13, 5, 0, 4, 4, 4, 0],
]


def evaluate_chats(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What an evaluation on the ranks finds, and what the plain model says of each token."""
    generator = np.random.default_rng(2)
    documents = [generator.integers(0, 64, len(flags)).tolist() for flags in CHAT_FLAGS]
    harness = RunHarness(make_recipe("parallel.sp_size=2"), MemoryRows(ROWS), 1)
    state = harness.train_state
    if state.groups.is_first:
        make_prepared(folder, [documents], flags=[CHAT_FLAGS], max_length=64)
    dist.barrier()
    batching = make_eval_batching(harness.plan.shape, harness.plan.resolved)
    found = evaluate(state.engine, state.groups, open_rows(folder / "rows" / "r", "train"), batching)
    plain = harness.make_plain_model()
    losses: dict[str, dict[str, list[float]]] = {"by_class": defaultdict(list), "by_turn": defaultdict(list)}
    for tokens, flags in zip(documents, CHAT_FLAGS, strict=True):
        with torch.no_grad():
            logits = plain(torch.tensor([tokens]), use_cache=False).logits[0].double()
        each = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(tokens[1:]), reduction="none").tolist()
        for at, loss in enumerate(each, 1):
            if flags[at] & 1:
                turn = sum(bool(now & 4) > bool(before & 4) for before, now in pairwise([0, *flags[: at + 1]]))
                losses["by_turn"][str(turn) if turn < 3 else "3-4"].append(loss)
                kind = next(name for name, bits in CLASSES.items() if flags[at] & bits == bits)
                losses["by_class"][kind].append(loss)
    return found, losses


@pytest.mark.check
def test_an_evaluation_tells_losses_by_class_and_by_turn(tmp_path: Path) -> None:
    for found, losses in run_on_ranks(2, evaluate_chats, tmp_path):
        for key in ("by_class", "by_turn"):
            assert found[key].keys() == losses[key].keys()
            for name, own in losses[key].items():
                assert found[key][name]["tokens"] == len(own)
                assert found[key][name]["loss"] == pytest.approx(sum(own) / len(own), rel=1e-5)
        assert found["tokens"] == sum(map(len, losses["by_class"].values()))


class PoisonedRows(MemoryRows):
    """Rows of which row 2 has a token whose embedding is not a number."""

    def __init__(self) -> None:
        super().__init__(ROWS, vocabulary=60)
        self.documents[2][0][0][1] = 63


def train_on_poisoned_rows(recipe: Recipe) -> tuple[list[str], list[float], list[bool], bool]:
    harness = RunHarness(recipe, PoisonedRows(), 5)
    embedding = harness.built.module.model.get_input_embeddings()
    embedding.register_forward_hook(
        lambda _, given, out: torch.where((given[0] == 63)[..., None], torch.full_like(out, math.nan), out)
    )
    train(harness.train_state)
    is_sane = all(bool(torch.isfinite(weight).all()) for weight in harness.read_weights().values())
    return harness.warnings, harness.losses, [result.update.was_applied for result in harness.results], is_sane


@pytest.mark.parametrize("stage", [3, pytest.param(2, marks=pytest.mark.full), pytest.param(1, marks=pytest.mark.full)])
def test_a_step_without_a_finite_loss_is_not_applied_and_its_row_is_named(stage: int) -> None:
    recipe = make_recipe("parallel.sp_size=2", f"parallel.zero_stage={stage}", "run.max_bad_steps=1")
    for warnings, losses, applied, is_sane in run_on_ranks(2, train_on_poisoned_rows, recipe):
        assert [math.isfinite(loss) for loss in losses] == applied
        assert applied.count(False) == 1
        assert is_sane
        assert len(warnings) == 1
        at = applied.index(False) + 1
        assert re.fullmatch(rf"step {at} .*, rows 2", warnings[0])


@pytest.mark.check
def test_too_many_bad_steps_end_the_run() -> None:
    with pytest.raises(RankError, match="0 allowed"):
        run_on_ranks(2, train_on_poisoned_rows, make_recipe("parallel.sp_size=2", "run.max_bad_steps=0"))


def disagree(facts: dict[int, Any]) -> list[int]:
    own = facts.get(dist.get_rank(), "as planned")
    return compare_facts({"lengths": own, "rows": (1, 2)}, dist.group.WORLD, dist.get_rank(), 7)


def test_ranks_that_disagree_are_named_with_the_field() -> None:
    assert run_on_ranks(4, disagree, {}) == [[3, 7]] * 4
    with pytest.raises(RankError, match=r"rank 2 .* lengths"):
        run_on_ranks(4, disagree, {2: "something else"})
