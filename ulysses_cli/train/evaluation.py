"""Loss on the held-out split by the same sharded forward: one sum over one count, in total and by position in a
document.

The later buckets show what a longer context is worth.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ulysses_cli.data.steps import Batching, Rows, plan_step, read_micro_batch
from ulysses_cli.train.engine import Engine
from ulysses_cli.train.guard.stop_conditions import StopConditions
from ulysses_cli.train.processes.consistency import compare_facts, gather_values
from ulysses_cli.train.processes.groups import Groups
from ulysses_cli.train.train_state import TrainState

FIRST_BOUND = 2048
MAX_PERPLEXITY_LOSS = 700.0  # beyond, exp overflows


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
    longest = max(max(rows.get_lengths(row)) for row in range(len(rows)))
    bounds = torch.tensor(list_bounds(longest))
    sums = torch.zeros(len(bounds), 2, dtype=torch.float64, device=engine.device)
    position = 0
    while position < len(rows):
        report(f"evaluation, row {position + 1} of {len(rows)}")
        plan = plan_step(rows, batching, position, len(rows))
        if stop.name(compare_facts(plan.list_facts(), groups.host_group, *stop.read_flags())):
            return {}
        for micro_step in range(plan.num_micro_steps):
            batch = read_micro_batch(rows, plan, groups.dp_index, micro_step, groups.sp_axis.rank, groups.sp_axis.size)
            losses, positions = engine.evaluate_micro_batch(batch)
            buckets = torch.bucketize(positions, bounds.to(positions.device), right=True)
            sums[:, 0].index_add_(0, buckets, losses.double())
            sums[:, 1].index_add_(0, buckets, torch.ones_like(losses, dtype=torch.float64))
        position = plan.next_position
    sums = engine.sum_over_ranks(sums).cpu()
    return summarize(sums, bounds.tolist())


def summarize(sums: torch.Tensor, bounds: list[int]) -> dict[str, Any]:
    total, count = sums[:, 0].sum().item(), int(sums[:, 1].sum().item())
    loss = total / count if count else math.nan
    lows = [0, *bounds[:-1]]
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, MAX_PERPLEXITY_LOSS)) if count else math.nan,
        "tokens": count,
        "by_position": {
            name_bucket(low, high): {"loss": part / number, "tokens": int(number)}
            for low, high, (part, number) in zip(lows, bounds, sums.tolist(), strict=True)
            if number
        },
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
