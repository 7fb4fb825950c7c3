"""Counts of a recipe's steps: rows per step, rows of the run, the FLOPs of a row. `steps.py` then says which rows."""

from __future__ import annotations

from ulysses_cli.data.steps import Batching
from ulysses_cli.plan.flops import compute_model_flops, compute_pair_flops
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.plan.resolved import Resolved
from ulysses_cli.plan.rows.order import Ring
from ulysses_cli.plan.rows.packing import RowCost


def make_batching(recipe: Recipe, shape: ModelShape, resolved: Resolved) -> Batching:
    train = recipe.train
    return Batching(
        dp_size=resolved.layout.dp_size,
        rows_per_micro_step=train.per_device_train_batch_size,
        micro_steps=train.gradient_accumulation_steps,
        pad_multiple=resolved.pad_to_multiple_of,
        seed=recipe.run.seed,
        work=make_work(shape),
        fixed_row_tokens=None if recipe.parallel.sp_seq_length_is_variable else resolved.row_tokens,
        ring=make_ring(shape, resolved),
    )


def make_eval_batching(shape: ModelShape, resolved: Resolved) -> Batching:
    """One row per sp group and micro-step, in order, so that every layout evaluates the same rows."""
    return Batching(
        dp_size=resolved.layout.dp_size,
        rows_per_micro_step=1,
        micro_steps=1,
        pad_multiple=resolved.pad_to_multiple_of,
        work=make_work(shape),
        is_shuffled=False,
        ring=make_ring(shape, resolved),
    )


def make_ring(shape: ModelShape, resolved: Resolved) -> Ring:
    """How rows are dealt to the ranks of their group, by the work of the model's layers."""
    return Ring(resolved.layout.ring_size, shape.window_counts)


def make_work(shape: ModelShape) -> RowCost:
    """FLOPs of one token, and of one pair of tokens in attention without a window."""
    return RowCost(compute_model_flops(shape, [1]), compute_pair_flops(shape))


def count_rows(recipe: Recipe, num_rows: int, rows_per_step: int) -> int:
    """Rows of the whole run. The last step may have fewer rows than the others."""
    if recipe.train.max_steps is not None:
        return recipe.train.max_steps * rows_per_step
    return max(1, round(num_rows * (recipe.train.num_train_epochs or 1.0)))
