"""Steps of the real engine on the ranks of a small run, with all that can be compared gathered whole: losses,
gradients, weights, losses of an evaluation, and what a changed token changes.

The run's own build, plan of steps, engine and evaluation are used; nothing of them is written again here.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from ulysses_cli.data.batching import make_batching, make_eval_batching
from ulysses_cli.data.steps import Batching, plan_step, read_micro_batch
from ulysses_cli.plan.lever_choice import choose_levers
from ulysses_cli.plan.model_shape import ModelShape
from ulysses_cli.plan.recipe import Recipe
from ulysses_cli.plan.resolved import make_layout
from ulysses_cli.prove.rows import MadeRows
from ulysses_cli.train.agreement import gather_values
from ulysses_cli.train.build import Built, build
from ulysses_cli.train.documents import make_documents
from ulysses_cli.train.evaluation import evaluate
from ulysses_cli.train.groups import Groups, make_groups
from ulysses_cli.train.torch_kernels import Rule
from ulysses_cli.train.ulysses import ulysses_attention

GROUP_TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True)
class Probe:
    """Some tokens of row 0 are changed -> how far losses moved at most, where they may not and where they must."""

    name: str
    outside: float
    inside: float


@dataclass(frozen=True)
class Traced:
    """What rank 0 hands back; everything is whole and the same on all ranks."""

    kernel: str
    losses: list[float]
    norms: list[float]
    grads: list[dict[str, Tensor]]
    weights: dict[str, Tensor]
    eval_loss: float
    eval_tokens: int
    seen_tokens: int  # that all ranks of an sp group evaluated, over the tokens of the row
    row_tokens: int
    probes: list[Probe]


def trace_steps(
    recipe: Recipe, shape: ModelShape, rows: MadeRows, held_out: MadeRows, num_steps: int, device: torch.device
) -> Traced:
    """Collective over all ranks of the world."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

    groups = make_groups(make_layout(recipe), GROUP_TIMEOUT)
    torch.manual_seed(recipe.run.seed)
    built = build(recipe, shape, groups, device, num_steps, choose_levers(recipe, shape, None).levers)
    engine = built.engine
    eval_batching = make_eval_batching(recipe, shape)
    found = evaluate(engine, groups, held_out, eval_batching)
    before = _list_losses(built, groups, held_out, eval_batching)
    probes = _probe_documents(built, groups, held_out, eval_batching, before, shape)
    trained = {name.removeprefix("model."): p for name, p in built.module.named_parameters() if p.requires_grad}
    losses, grads, norms = [], [], []
    real_step = engine.wrapped.step

    def step_and_tell() -> None:
        if engine.wrapped.is_gradient_accumulation_boundary():
            own = {name: safe_get_full_grad(p) for name, p in trained.items()}
            grads.append({
                name: torch.zeros_like(trained[name]).cpu() if grad is None else grad.detach().cpu().clone()
                for name, grad in own.items()
            })  # fmt: skip
        real_step()

    engine.wrapped.step = step_and_tell
    batching = make_batching(recipe, shape)
    position = 0
    for step in range(num_steps):
        plan = plan_step(rows, batching, position, end=1 << 30)
        rate = engine.learning_rate_at(step)
        engine.set_learning_rate(rate)
        total = torch.zeros(1, device=device)
        for micro_step in range(plan.num_micro_steps):
            axis = groups.sp_axis
            batch = read_micro_batch(rows, plan, groups.dp_index, micro_step, axis.rank, axis.size)
            total += engine.train_micro_step(batch, plan.num_targets)
        losses.append(engine.sum_over_ranks(total).item() / max(1, plan.num_targets))
        norms.append(engine.read_update(rate).grad_norm)
        position = plan.next_position
    weights = {name: safe_get_full_fp32_param(p).detach().cpu().clone() for name, p in trained.items()}
    probes += _probe_window(shape, groups, built.kernel.name, device)
    return Traced(
        kernel=built.kernel.name,
        losses=losses,
        norms=norms,
        grads=grads,
        weights=weights,
        eval_loss=float(found["loss"]),
        eval_tokens=int(found["tokens"]),
        seen_tokens=len(before),
        row_tokens=_pad(held_out, eval_batching),
        probes=probes,
    )


def _pad(rows: MadeRows, batching: Batching) -> int:
    return max(own[0] for own in plan_step(rows, batching, 0, 1).row_tokens)


def _list_losses(built: Built, groups: Groups, rows: MadeRows, batching: Batching) -> Tensor:
    """Losses of row 0, token by token, 0 where there is no target; slices of the first sp group in order. Collective
    over all ranks."""
    engine, axis = built.engine, groups.sp_axis
    plan = plan_step(rows, batching, 0, 1)
    holder = next(group for group, share in enumerate(plan.shares) if max(share[0]) >= 0)
    batch = read_micro_batch(rows, plan, holder, 0, axis.rank, axis.size)
    losses, _ = engine.evaluate_micro_batch(batch)
    kept = torch.from_numpy(batch.labels >= 0)
    whole = torch.zeros(kept.shape)
    if losses.numel() == int(kept.sum()):
        whole[kept] = losses.float().cpu()
    else:  # more or fewer than this slice's: as they came, which the count shows
        whole = losses.float().cpu()[None]
    parts = gather_values(whole.flatten(), groups.host_group)
    return torch.cat(parts[: axis.size])


def _probe_documents(
    built: Built, groups: Groups, rows: MadeRows, batching: Batching, before: Tensor, shape: ModelShape
) -> list[Probe]:
    """Row 0 is packed: its first document is changed, then its last; and then late tokens of its first."""
    lengths = rows.get_lengths(0)
    total, first, last = sum(lengths), lengths[0], lengths[-1]
    cases = {"the first document": (0, first), "the last document": (total - last, total)}
    spans = {name: span for name, span in cases.items() if len(lengths) > 1}
    spans["late tokens"] = (first - first // 4, first)
    found = []
    for name, (start, stop) in spans.items():
        after = _list_losses(built, groups, rows.perturb(0, start, stop, shape.vocab_size), batching)
        if after.shape != before.shape or len(before) < total:
            found.append(Probe(name, float("nan"), float("nan")))
            continue
        moved = (after - before).abs()
        is_inside = torch.zeros(len(before), dtype=torch.bool)
        is_inside[start:stop] = True
        found.append(Probe(name, moved[~is_inside].max().item(), moved[is_inside].max().item()))
    return found


def _probe_window(shape: ModelShape, groups: Groups, kernel: str, device: torch.device) -> list[Probe]:
    """Attention alone, in one document as long as the row: the first token's key and value are changed, and only the
    window that begins with it may see that. Collective over all ranks."""
    if not shape.windows:
        return []
    window, axis = shape.windows[0], groups.sp_axis
    local = -(-2 * window // axis.size)
    generator = torch.Generator().manual_seed(3 + axis.rank)
    q, k, v = (
        torch.randn(1, local, heads, shape.head_dim, generator=generator).to(device)
        for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    )
    documents, rule = make_documents([local * axis.size], device), Rule(shape.attention_scale, window)
    outs = []
    for change in (0.0, 1.0):
        key, value = k.clone(), v.clone()
        if axis.rank == 0:
            key[:, 0] += change
            value[:, 0] += change
        with torch.no_grad():
            outs.append(ulysses_attention(q, key, value, documents, rule, axis=axis, kernel=kernel))
    moved: Any = (outs[1] - outs[0]).abs().amax((0, 2, 3)).cpu()
    whole = torch.cat(gather_values(moved, groups.host_group)[: axis.size])
    return [Probe(f"the token before a window of {window}", whole[window:].max().item(), whole[:window].min().item())]
