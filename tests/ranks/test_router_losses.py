"""Compares the losses of routers on ranks with transformers' own function on one process: values and every gradient."""

from typing import Any

import pytest
import torch
from support.families import make_config
from support.rank_pool import run_on_ranks
from support.run_harness import RunHarness
from support.training import MemoryRows, ScaledRows, make_plain_model, make_recipe, measure_difference
from torch import Tensor
from torch.nn import functional
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from ulysses_cli.data.steps import StepPlan
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.train.loop import train
from ulysses_cli.train.model.routers import find_routers

ROWS = [[(40, 0), (17, 3)], [(59, 0)], [(22, 9), (9, 0), (11, 0)]]  # with padding, which counts for nothing
COEFS = ("train.router_aux_loss_coef=2", "train.router_z_loss_coef=0.5")
Step = tuple[float, dict[str, float], dict[str, Tensor]]


def run(recipe: Recipe, num_rows: int, kind: type[MemoryRows] = MemoryRows) -> tuple[Step, StepPlan]:
    """One step, in which the stream ends after so many rows."""
    harness = RunHarness(recipe, kind(ROWS), 1)
    grads = harness.collect_grads()
    harness.train_state.end = num_rows
    train(harness.train_state)
    (result,) = harness.results
    return (result.loss, result.measures, grads[0]), result.plan


def measure_balance(logits: list[Tensor], chosen: list[Tensor], recipe: Recipe, *, by_sigmoid: bool) -> Tensor:
    """Of the tokens of a micro-step, by layer."""
    num_experts, k = logits[0].size(1), chosen[0].size(1)
    if recipe.train.router_aux_loss_scope == "model":
        return load_balancing_loss_func(tuple(logits), num_experts, k)
    if not by_sigmoid:
        return torch.stack([load_balancing_loss_func((each,), num_experts, k) for each in logits]).mean()
    losses = []
    for each, experts in zip(logits, chosen, strict=True):
        scores = functional.normalize(each.sigmoid(), p=1, dim=1)
        shares = functional.one_hot(experts, num_experts).sum(1).double().mean(0)
        losses.append(num_experts * (shares * scores.mean(0)).sum())
    return torch.stack(losses).mean()


def run_plainly(recipe: Recipe, plan: StepPlan, *, by_sigmoid: bool) -> Step:
    """On one process, one document at a time."""
    model = make_plain_model(recipe, experts_implementation="eager").double()
    outputs: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in find_routers(model)}
    for name, router in find_routers(model).items():
        router.register_forward_hook(lambda _, __, out, name=name: outputs[name].append((out[0], out[2])))
    documents, tokens_loss, balance, square = MemoryRows(ROWS).documents, 0.0, 0.0, 0.0
    for micro_step in range(plan.num_micro_steps):
        for each in outputs.values():
            each.clear()
        members = [member for share in plan.shares for member in share[micro_step] if member >= 0]
        for tokens, labels in [document for member in members for document in documents[plan.rows[member]]]:
            logits = model(torch.from_numpy(tokens)[None], use_cache=False).logits[0].double()
            tokens_loss = tokens_loss + functional.cross_entropy(logits, torch.from_numpy(labels), reduction="sum")
        if not members:
            continue
        by_layer = [[torch.cat(parts) for parts in zip(*each, strict=True)] for each in outputs.values()]
        all_logits, chosen = [each[0].double() for each in by_layer], [each[1] for each in by_layer]
        share = len(all_logits[0]) / plan.num_tokens
        balance = balance + share * measure_balance(all_logits, chosen, recipe, by_sigmoid=by_sigmoid)
        square = square + share * torch.stack([each.logsumexp(1).square().mean() for each in all_logits]).mean()
    train_settings = recipe.train
    loss: Any = tokens_loss / plan.num_targets + train_settings.router_aux_loss_coef * balance
    loss = loss + train_settings.router_z_loss_coef * square
    loss.backward()
    grads = {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in model.named_parameters()}
    return loss.item(), {"router_aux_loss": float(balance), "router_z_loss": float(square)}, grads


TILES = ("memory.tiled_mlp=true", "memory.gradient_checkpointing=full")
ACCUMULATE = ("train.gradient_accumulation_steps=2",)
LAYOUTS: dict[str, tuple[int, int, tuple[str, ...]]] = {  # ranks, rows of the step
    "one, nothing recomputed": (1, 2, (*ACCUMULATE, "memory.gradient_checkpointing=false", "parallel.zero_stage=1")),
    "one, tiles": (1, 2, (*ACCUMULATE, *TILES)),
    "one, two rows at once": (1, 2, ("train.per_device_train_batch_size=2", "memory.tiled_mlp=true")),
    "sp 2": (2, 3, ("parallel.sp_size=2", "train.gradient_accumulation_steps=3")),
    "sp 2, tiles": (2, 2, ("parallel.sp_size=2", *ACCUMULATE, *TILES)),
    "sp 2, zero 2": (2, 2, ("parallel.sp_size=2", *ACCUMULATE, "parallel.zero_stage=2")),
    "ring 2": (2, 2, ("parallel.sp_size=2", "parallel.ring_size=2", *ACCUMULATE)),
    "dp 2": (2, 3, ("parallel.dp_shard_size=2", *ACCUMULATE)),
    "dp 2, a rank without a row": (2, 1, ("parallel.dp_shard_size=2", *TILES)),
    "sp 4": (4, 2, ("parallel.sp_size=4", *ACCUMULATE, *TILES)),
    "sp 2 x dp 2": (4, 3, ("parallel.sp_size=2", "parallel.dp_shard_size=2", *ACCUMULATE)),
}
CASES = [("qwen3_moe", layout, "layer") for layout in LAYOUTS]
CASES += [(kind, "sp 2, tiles", scope) for kind in ("glm4_moe", "gpt_oss", "mixtral") for scope in ("layer", "model")]
CASES += [("qwen3_moe", layout, "model") for layout in ("sp 2", "dp 2")]
QUICK = [("qwen3_moe", "sp 2, tiles", "layer")]


@pytest.mark.parametrize(
    ("kind", "layout", "scope"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.check) for case in CASES],
)
def test_losses_and_gradients_are_those_of_one_process(kind: str, layout: str, scope: str) -> None:
    num_ranks, num_rows, words = LAYOUTS[layout]
    config = make_config(kind, initializer_range=0.05).to_dict()
    recipe = make_recipe(*COEFS, f"train.router_aux_loss_scope={scope}", *words, config=config)
    results = run_on_ranks(num_ranks, run, recipe, num_rows)
    by_sigmoid, plan = kind == "glm4_moe", results[0][1]
    loss, measures, grads = run_plainly(recipe, plan, by_sigmoid=by_sigmoid)
    off = recipe.train.model_copy(update={"router_aux_loss_coef": 0.0, "router_z_loss_coef": 0.0})
    without = run_plainly(recipe.model_copy(update={"train": off}), plan, by_sigmoid=by_sigmoid)[2]
    assert measure_difference(pick_routers(without), pick_routers(grads)) > 0.5, "these losses move the routers"
    for (own_loss, own_measures, own_grads), _ in results:
        assert own_loss == pytest.approx(loss, rel=3e-7)
        assert own_measures == pytest.approx(measures, rel=3e-7)
        assert measure_difference(pick_routers(own_grads), pick_routers(grads)) < 3e-7
        assert measure_difference(own_grads, grads, 1e-3) < 1e-6


@pytest.mark.check
def test_weights_of_targets_leave_the_losses_of_routers_as_they_are() -> None:
    recipe = make_recipe(*COEFS, "parallel.sp_size=2", config=make_config("qwen3_moe").to_dict())
    (plain, _), (scaled, _) = (run_on_ranks(2, run, recipe, 3, kind)[0] for kind in (MemoryRows, ScaledRows))
    assert scaled[0] == pytest.approx(plain[0], rel=1e-6)
    assert scaled[1] == pytest.approx(plain[1], rel=1e-6)
    assert measure_difference(scaled[2], plain[2], 1e-3) < 1e-6


def pick_routers(grads: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: grad for name, grad in grads.items() if ".gate." in name or ".router." in name}
