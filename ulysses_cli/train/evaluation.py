"""Loss on the held-out split by the same sharded forward: one sum over one count, in total, by position in a document,
and in chats by what the assistant does and by its turn.

The later buckets of positions show what a longer context is worth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from operator import add
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ulysses_cli.data.steps import Batching, Rows, get_shared, plan_step, read_micro_batch
from ulysses_cli.data.store import CALL, SAID, THOUGHT, TURN_BITS
from ulysses_cli.train.engine import Engine, find_positions
from ulysses_cli.train.guard.stop_conditions import StopConditions
from ulysses_cli.train.processes.consistency import compare_facts, gather_values
from ulysses_cli.train.processes.groups import Groups
from ulysses_cli.train.train_state import TrainState

FIRST_BOUND = 2048
MAX_PERPLEXITY_LOSS = 700.0  # beyond, exp overflows
CLASSES = ("thoughts", "calls", "answers")  # of what the assistant says
TURN_BOUNDS = [1, 2, 4, 8, 16, 32, 64, 1 << 55]  # upper bounds of the assistant's turns, from 0
TURN_NAMES = ["1", "2", "3-4", "5-8", "9-16", "17-32", "33-64", "over 64"]


def list_bounds(longest: int) -> list[int]:
    """Upper bounds of the buckets: 2K, 8K, 32K, ...; the last one is beyond the longest position."""
    bounds = [FIRST_BOUND]
    while bounds[-1] < longest:
        bounds.append(bounds[-1] * 4)
    return bounds


def name_bucket(low: int, high: int) -> str:
    return f"{low // 1024}-{high // 1024}K"


def evaluate(
    engine: Engine,
    groups: Groups,
    rows: Rows,
    batching: Batching,
    report: Callable[[str], None] = lambda _: None,
    stop: StopConditions | None = None,
) -> dict[str, Any]:
    """Collective over all ranks. Reads every row once, in order. Empty when any rank has a reason to stop early."""
    stop = stop or StopConditions()
    longest = max(max(map(add, rows.get_lengths(row), get_shared(rows, row))) for row in range(len(rows)))
    bounds = torch.tensor(list_bounds(longest))
    first_class, first_turn = len(bounds), len(bounds) + len(CLASSES)
    sums = torch.zeros(first_turn + len(TURN_BOUNDS), 2, dtype=torch.float64, device=engine.device)
    objective, divisor, position = engine.objective, 0, 0
    measured = sums.new_zeros(len(objective.eval_names))
    while position < len(rows):
        report(f"evaluation, row {position + 1} of {len(rows)}")
        plan = plan_step(rows, batching, position, len(rows))
        if stop.name(compare_facts(plan.list_facts(), groups.host_group, *stop.read_flags())):
            return {}
        for micro_step in range(plan.num_micro_steps):
            batch = read_micro_batch(rows, plan, groups.dp_index, micro_step, groups.sp_axis.rank, groups.sp_axis.size)
            losses, loaded = engine.compute_token_losses(batch)
            measured += objective.measure(losses, loaded["answers"])
            positions = find_positions(loaded)
            buckets = torch.bucketize(positions, bounds.to(positions.device), right=True)
            _add(sums, buckets, losses)
            if batch.classes is not None:
                codes = batch.classes[batch.labels >= 0]
                is_said = torch.from_numpy((codes & SAID) > 0).to(losses.device)
                kinds, turns = (torch.from_numpy(each).to(losses.device) for each in _classify(codes))
                _add(sums, first_class + kinds[is_said], losses[is_said])
                _add(sums, first_turn + turns[is_said], losses[is_said])
        position, divisor = plan.next_position, divisor + objective.count(plan)
    sums = engine.sum_over_ranks(sums).cpu()
    if objective.eval_names:
        loss, *means = (engine.sum_over_ranks(measured) / max(1, divisor)).tolist()
        return {"loss": loss, **objective.describe(means), "tokens": int(sums[:first_class, 1].sum())}
    by_class, by_turn = sums[first_class:first_turn], sums[first_turn:]
    return {
        **summarize(sums[:first_class], bounds.tolist()),
        **({"by_class": _list_losses(CLASSES, by_class), "by_turn": _list_losses(TURN_NAMES, by_turn)}
           if by_class[:, 1].any() else {}),
    }  # fmt: skip


def _add(sums: torch.Tensor, at: torch.Tensor, losses: torch.Tensor) -> None:
    sums[:, 0].index_add_(0, at, losses.double())
    sums[:, 1].index_add_(0, at, torch.ones_like(losses, dtype=torch.float64))


def _classify(codes: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of what the assistant says: its class, and its bucket of turns."""
    kinds = np.select([(codes & THOUGHT) > 0, (codes & CALL) > 0], [0, 1], 2)
    return kinds.astype(np.int64), np.searchsorted(TURN_BOUNDS, codes >> TURN_BITS, "right")


def _list_losses(names: Sequence[str], sums: torch.Tensor) -> dict[str, dict[str, Any]]:
    return {
        name: {"loss": part / number, "tokens": int(number)}
        for name, (part, number) in zip(names, sums.tolist(), strict=True)
        if number
    }


def summarize(sums: torch.Tensor, bounds: list[int]) -> dict[str, Any]:
    total, count = sums[:, 0].sum().item(), int(sums[:, 1].sum().item())
    loss = total / count if count else math.nan
    lows = [0, *bounds[:-1]]
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, MAX_PERPLEXITY_LOSS)) if count else math.nan,
        "tokens": count,
        "by_position": _list_losses([name_bucket(*ends) for ends in zip(lows, bounds, strict=True)], sums),
    }


class Evaluation:
    """A post-step hook that evaluates the held-out rows and writes their losses. Without such rows it does nothing.
    `judge` is called after each evaluation."""

    def __init__(
        self,
        rows: Rows | None,
        batching: Batching,
        write: Callable[[dict[str, Any]], None],
        judge: Callable[[TrainState], None],
    ) -> None:
        self.rows, self.batching, self.write, self.judge = rows, batching, write, judge

    def run(self, state: TrainState, stop: StopConditions | None = None) -> None:
        """Collective over all ranks. `stop`: reasons to end it early; by default the run's own."""
        losses = self.measure(state, stop)
        if losses:
            loss = gather_values(losses["loss"], state.groups.host_group)[0]
            state.eval_losses[state.step] = loss if math.isfinite(loss) else math.inf
            self.judge(state)

    def measure(self, state: TrainState, stop: StopConditions | None = None) -> dict[str, Any]:
        """Collective over all ranks. Chooses nothing: before step 1 the losses are the base model's, of which no
        checkpoint is kept."""
        if self.rows is None:
            return {}
        state.phase = "evaluation"
        set_phase = partial(setattr, state, "phase")
        losses = evaluate(state.engine, state.groups, self.rows, self.batching, set_phase, stop or state.stop)
        if losses:
            self.write({"step": state.step, **losses})
            state.last_eval_step = state.step
        return losses
