"""Runs a small training run on ranks, with the code that `train` uses, and records what verify compares.

Recorded on rank 0, gathered from all ranks: losses, gradients, weights, an evaluation, and leaks between documents."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ulysses_cli.data.steps import Batching, Rows, get_shared, make_eval_batching, plan_step, read_micro_batch
from ulysses_cli.data.store import open_rows
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.planner.lever_choice import choose_levers
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.plan.resolved import settle
from ulysses_cli.plan.rows.ring import Order, Ring, cut_runs, deal_row
from ulysses_cli.prove.rows import ChangedRows
from ulysses_cli.train.attention.documents import make_documents
from ulysses_cli.train.attention.kernels.native import Rule
from ulysses_cli.train.attention.ulysses import ulysses_attention
from ulysses_cli.train.evaluation import evaluate
from ulysses_cli.train.loop import train
from ulysses_cli.train.model.build import Built, RunLength, assemble_run, choose_objective, choose_references
from ulysses_cli.train.processes.consistency import gather_values
from ulysses_cli.train.processes.groups import Groups, make_groups

GROUP_TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True)
class Probe:
    """Some tokens of a row are changed. `outside`: the largest change where nothing may change; `inside`: where it
    must."""

    name: str
    outside: float
    inside: float


@dataclass(frozen=True)
class RecordedSteps:
    """What rank 0 returns; all values are gathered, and the same on all ranks."""

    kernel: str
    losses: list[float]
    norms: list[float]
    grads: list[dict[str, Tensor]]
    weights: dict[str, Tensor]
    eval_loss: float
    eval_tokens: int
    probes: list[Probe]


def record_steps(
    recipe: Recipe, shape: ModelShape, prepared: Path, num_steps: int, end: int, device: torch.device
) -> RecordedSteps:
    """Collective over all ranks of the world."""
    plan = settle(recipe, shape, choose_levers(recipe, shape, None).levers)
    groups = make_groups(plan.layout, GROUP_TIMEOUT)
    rows, held_out = open_rows(prepared, "train"), open_rows(prepared, "eval")
    objective, length = choose_objective(recipe, groups), RunLength(num_steps, end)
    run = assemble_run(plan, groups, device, rows, length, eval_rows=held_out, objective=objective)
    built, batching = run.built, make_eval_batching(shape, plan.resolved)
    references = choose_references(run, prepared.name, prepared / "reference", held_out, batching)
    references.fill(run.state, lambda _: None, is_fresh=True)
    eval_rows = references.eval_rows or held_out
    evaluated = evaluate(built.engine, groups, eval_rows, batching)
    probes = _probe_documents(built, groups, eval_rows, batching, shape.vocab_size)
    recorder = StepRecorder(built)
    run.state.post_step_hooks = (
        references.check,
        lambda _, result: recorder.results.append((result.loss, result.update.grad_norm)),
    )
    train(run.state)
    return RecordedSteps(
        kernel=built.kernel.name,
        losses=[loss for loss, _ in recorder.results],
        norms=[norm for _, norm in recorder.results],
        grads=recorder.grads,
        weights=recorder.read_weights(),
        eval_loss=float(evaluated["loss"]),
        eval_tokens=int(evaluated["tokens"]),
        probes=[*probes, *_probe_window(shape, groups, built.kernel.pick(shape.head_dim), device)],
    )


class StepRecorder:
    """Records gradients between the last backward of a step and its update, when they are complete, and weights."""

    def __init__(self, built: Built) -> None:
        self.trained = {
            name.removeprefix("model."): p for name, p in built.module.named_parameters() if p.requires_grad
        }
        self.grads: list[dict[str, Tensor]] = []
        self.results: list[tuple[float, float]] = []
        wrapped = built.engine.wrapped
        real_step = wrapped.step

        def record_and_step() -> None:
            if wrapped.is_gradient_accumulation_boundary():
                self.grads.append(self.read_grads())
            real_step()

        wrapped.step = record_and_step

    def read_grads(self) -> dict[str, Tensor]:
        """Collective over all ranks."""
        from deepspeed.utils import safe_get_full_grad

        grads = {name: safe_get_full_grad(p) for name, p in self.trained.items()}
        return {
            name: torch.zeros_like(self.trained[name]).cpu() if grad is None else grad.detach().cpu().clone()
            for name, grad in grads.items()
        }

    def read_weights(self) -> dict[str, Tensor]:
        """Collective over all ranks."""
        from deepspeed.utils import safe_get_full_fp32_param

        return {name: safe_get_full_fp32_param(p).detach().cpu().clone() for name, p in self.trained.items()}


def _gather_losses(built: Built, groups: Groups, rows: Rows, batching: Batching, row: int) -> Tensor:
    """Losses of a row, token by token, 0 where there is no target; the slices of an sp group in order. Collective over
    all ranks."""
    engine, axis = built.engine, groups.sp_axis
    plan = plan_step(rows, batching, row, row + 1)
    holder = next(group for group, share in enumerate(plan.shares) if max(share[0]) >= 0)
    batch = read_micro_batch(rows, plan, holder, 0, axis.rank, axis.size)
    losses, _ = engine.evaluate_micro_batch(batch)
    is_target = torch.from_numpy(batch.labels >= 0)
    local = torch.zeros(is_target.shape)
    if losses.numel() == int(is_target.sum()):
        local[is_target] = losses.float().cpu()
    else:  # more or fewer losses than targets: kept as they are, so that the caller sees the wrong count
        local = losses.float().cpu()[None]
    parts = gather_values(local.flatten(), groups.host_group)
    return _restore_order(torch.cat(parts[: axis.size]), batch.order)


def _restore_order(gathered: Tensor, order: Order) -> Tensor:
    """Values of the ranks of an sp group, one after another, in the order of the row. Too many or too few stay as they
    are."""
    tokens = [token for runs in order for run in runs for token in range(*run)]
    if len(gathered) != len(tokens):
        return gathered
    whole = torch.empty_like(gathered)
    whole[tokens] = gathered
    return whole


class Learned(NamedTuple):
    """A document with a target, and those that read the copy of what they begin with. `late`: tokens of it that only
    its own later tokens see."""

    start: int
    stop: int
    late: tuple[int, int]


def find_learned(rows: Rows, row: int) -> list[Learned]:
    lengths, shared, found, start = rows.get_lengths(row), get_shared(rows, row), list[Learned](), 0
    labels = rows.read(row, 0, sum(lengths)).labels
    for length, copied in zip(lengths, shared, strict=True):
        stop, learned = start + length, np.flatnonzero(labels[start : start + length] >= 0)
        if copied and found:
            stem = found.pop()
            found.append(Learned(stem.start, stop, (max(stem.late[0], stem.start + copied), stem.late[1])))
        elif len(learned):
            found.append(Learned(start, stop, ((start + start + int(learned[-1]) + 1) // 2, stop)))
        start = stop
    return found


def _probe_documents(built: Built, groups: Groups, rows: Rows, batching: Batching, vocabulary: int) -> list[Probe]:
    """Changes the first document of the row with the most documents, then the last, and then late tokens of the first.
    A change shows only in documents that have targets."""
    row = max(range(len(rows)), key=lambda index: len(find_learned(rows, index)))
    documents, total, spans = find_learned(rows, row), sum(rows.get_lengths(row)), dict[str, tuple[int, int]]()
    if len(rows.get_lengths(row)) > 1:
        spans = {"the first document": documents[0][:2], "the last document": documents[-1][:2]}
    spans["late tokens"] = documents[0].late
    before = _gather_losses(built, groups, rows, batching, row)
    probes = []
    for name, (start, stop) in spans.items():
        changed = ChangedRows(rows, row, start, stop, vocabulary)
        after = _gather_losses(built, groups, changed, batching, row)
        if after.shape != before.shape or len(before) < total:
            probes.append(Probe(name, float("nan"), float("nan")))
            continue
        moved = (after - before).abs()
        is_inside = torch.zeros(len(before), dtype=torch.bool)
        is_inside[start:stop] = True
        probes.append(Probe(name, moved[~is_inside].max().item(), moved[is_inside].max().item()))
    return probes


def _probe_window(shape: ModelShape, groups: Groups, kernel: str, device: torch.device) -> list[Probe]:
    """Attention alone, on one document as long as the row: changes the key and value of the first token. Only outputs
    in the window that starts there may change. Collective over all ranks."""
    if not shape.windows:
        return []
    window, axis = shape.windows[0], groups.sp_axis
    local = -(-2 * window // axis.size)
    generator = torch.Generator().manual_seed(3 + axis.rank)
    q, k, v = (
        torch.randn(1, local, heads, shape.head_dim, generator=generator).to(device)
        for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    )
    lengths, rule = (local * axis.size,), Rule(shape.attention_scale, window)
    order = deal_row(lengths, Ring(groups.ring_axis.size))
    start = groups.ulysses_axis.rank * local
    has_first = cut_runs(order[groups.ring_axis.rank], start, start + local)[0].start == 0
    documents = make_documents(lengths, device, order=order)
    outs = []
    for change in (0.0, 1.0):
        key, value = k.clone(), v.clone()
        if has_first:
            key[:, 0] += change
            value[:, 0] += change
        with torch.no_grad():
            axes: Any = {"axis": groups.ulysses_axis, "ring": groups.ring_axis}
            outs.append(ulysses_attention(q, key, value, documents, rule, **axes, kernel=kernel))
    moved: Any = (outs[1] - outs[0]).abs().amax((0, 2, 3)).cpu()
    row_moved = _restore_order(torch.cat(gather_values(moved, groups.host_group)[: axis.size]), order)
    return [
        Probe(
            f"the token before a window of {window}", row_moved[window:].max().item(), row_moved[:window].min().item()
        )
    ]
