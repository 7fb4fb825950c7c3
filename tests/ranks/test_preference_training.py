"""Pairs of answers on ranks: losses and gradients in float64 against plain torch, one answer at a time; references that
are bitwise those of step 1; a run that resumes."""

import json
import math
import shutil
from copy import deepcopy
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
import yaml
from support.faults import Runs
from support.paths import ROOT
from support.rank_pool import RankError, run_on_ranks
from support.run_harness import RunHarness
from support.small_run import CONFIG, make_settings
from support.templates import LAST_ROUND
from support.tiers import mark_by
from support.training import MemoryRows, ScaledRows, make_recipe, measure_difference
from torch import Tensor
from torch.distributions import Categorical
from torch.nn.functional import cross_entropy, logsigmoid
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from ulysses_cli.data.prepare import prepare_data
from ulysses_cli.data.steps import NO_ROW, Batching, MicroBatch, plan_step, read_micro_batch
from ulysses_cli.data.store import WANTED, open_rows
from ulysses_cli.plan.models.shape import read_model_shape
from ulysses_cli.plan.recipe.loader import parse_recipe
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.plan.resolved import choose_layout
from ulysses_cli.plan.rows.ring import Ring
from ulysses_cli.train.attention.interface import register_attention, serve_rotary
from ulysses_cli.train.engine import Engine
from ulysses_cli.train.loop import train as run_loop
from ulysses_cli.train.loss import HeadRule, NextToken, Objective, PlainLoss
from ulysses_cli.train.memory.tiled_loss import make_tiled_loss
from ulysses_cli.train.model.loss_model import LossModel
from ulysses_cli.train.preferences import PreferenceObjective, PreferenceSettings, UnpairedObjective
from ulysses_cli.train.processes.groups import make_groups
from ulysses_cli.train.reference import ComputedReferences, ReferencedRows, ReferenceFile

# Pairs of documents, chosen and rejected: (length, first target). In the first row, one rank of two has no target; in
# the third the shorter answer comes first.
ROWS = [[(40, 36), (20, 16)], [(9, 4), (12, 4), (30, 20), (11, 6)], [(25, 22), (33, 22)]]
SHARED = [[0, 15], [0, 3, 0, 0], [0, 21]]  # tokens of a rejected answer that are the chosen one's; one pair shares none
SEVERAL = [[0, 15], [0, 3, 7, 0], [0, 0]]
BETA = 0.3
PAIRED = ("ipo", "sigmoid", "kto", "simpo")


def normalize(self: Any, hidden: Tensor) -> Tensor:
    """transformers' own rounds to float32."""
    return self.weight * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + self.variance_epsilon)


def make_model(attention: str, settings: dict[str, Any] = CONFIG) -> Any:
    torch.manual_seed(3)
    config = AutoConfig.for_model(**deepcopy(settings))
    return AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation=attention)


class JudgedRows(MemoryRows):
    """Every second document is another prompt's answer; of the others every second one is wanted."""

    def read(self, row: int, start: int, stop: int) -> Any:
        part = super().read(row, start, stop)
        documents = np.repeat(np.arange(len(ROWS[row])), self.get_lengths(row))
        documents = np.pad(documents, (0, max(0, stop - len(documents))))[start:stop]
        return replace(part, classes=np.where((documents + 2 * row) % 4 == 0, WANTED, 0))


class TrainerRows(MemoryRows):
    """What a trainer of TRL took in one step (benchmarks/preferences.py): pairs in two rows, answers of kto in one."""

    def __init__(self, case: dict[str, Any]) -> None:
        documents = case["documents"]
        rows = [documents] if case["name"] == "kto" else [documents[:4], documents[4:]]
        super().__init__([[(len(tokens), first) for tokens, first, _ in row] for row in rows])
        for row, made in zip(rows, self.documents, strict=True):
            for (tokens, first, _), (ids, labels) in zip(row, made, strict=True):
                ids[:] = tokens
                labels[first - 1 : -1] = tokens[first:]
        self.shared = [
            [first - 1 if at % 2 else 0 for at, (_, first, _) in enumerate(row)] for row in rows
        ]  # of one prompt
        self.wanted = [[is_wanted for *_, is_wanted in row] for row in rows]

    def read(self, row: int, start: int, stop: int) -> Any:
        wanted = np.repeat(self.wanted[row], self.get_lengths(row))
        wanted = np.pad(wanted, (0, max(0, stop - len(wanted))))[start:stop]
        return replace(super().read(row, start, stop), classes=np.where(wanted, WANTED, 0))


class WeightedRows(MemoryRows):
    """Documents with a weight each; the last of each row has one of its own for each token, some of them 0: these are
    no targets."""

    def __init__(self, rows: list[list[tuple[int, int]]], shared: list[list[int]] | None = None) -> None:
        super().__init__(rows, shared=shared)
        generator = np.random.default_rng(6)
        self.weights = [[np.full(len(t), generator.random() / 9, np.float32) for t, _ in row] for row in self.documents]
        for documents, weights in zip(self.documents, self.weights, strict=True):
            weights[-1][:] = np.maximum(generator.random(len(weights[-1])) - 0.3, 0)
            documents[-1][1][weights[-1] == 0] = -100

    def weigh_targets(self, row: int) -> float:
        documents = zip(self.documents[row], self.weights[row], strict=True)
        return sum(float(weights[labels >= 0].sum(dtype=np.float64)) for (_, labels), weights in documents)

    def read(self, row: int, start: int, stop: int) -> Any:
        weights = [each[at:] for each, at in zip(self.weights[row], self.shared[row], strict=True)]
        padded = np.pad(np.concatenate(weights), (0, max(0, stop - sum(map(len, weights)))))
        return replace(super().read(row, start, stop), weights=padded[start:stop])


def draw_references() -> list[list[float]]:
    generator = np.random.default_rng(4)
    return [(-generator.uniform(5, 60, len(row))).tolist() for row in ROWS]


def read_targets(model: Any, ids: np.ndarray, labels: np.ndarray) -> tuple[Tensor, Tensor]:
    """Of each target of a document, by a forward of its own: the log-probability; and the entropy of its distribution,
    the mean logit, whether it is the likeliest token."""
    targets = torch.from_numpy(labels)
    logits = model(torch.from_numpy(ids)[None], use_cache=False).logits[0][targets >= 0]
    targets = targets[targets >= 0]
    log_probs = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    logits = logits.detach()
    entropy = Categorical(logits=logits).entropy()
    return log_probs, torch.stack([entropy, logits.mean(-1), logits.argmax(-1) == targets], -1)


def differentiate(model: Any, loss: Tensor) -> dict[str, Tensor]:
    loss.backward()
    return {key: parameter.grad for key, parameter in model.named_parameters()}


def compute_plainly(name: str, rows: MemoryRows) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Means over all pairs."""
    model = make_model("sdpa")
    losses, measures, tokens = [], [], list[list[Tensor]]([[], []])
    for documents, references in zip(rows.documents, draw_references(), strict=True):
        scores, sums = [], []
        for (ids, labels), reference in zip(documents, references, strict=True):
            log_probs, measured = read_targets(model, ids, labels)
            sums.append(log_probs.sum())
            tokens[len(scores) % 2].append(measured)
            score = sums[-1] if name == "simpo" else sums[-1] - reference
            scores.append(score / (1 if name == "sigmoid" else len(log_probs)))
        for at in range(0, len(documents), 2):
            margin = scores[at] - scores[at + 1]
            if name == "ipo":
                losses.append((margin - 1 / (2 * BETA)) ** 2)
            elif name == "simpo":
                losses.append(-logsigmoid(BETA * margin - 0.5) - scores[at])
            else:
                losses.append(-logsigmoid(BETA * margin))
            logged = scores if name == "simpo" else sums
            measures.append([logged[at].item(), logged[at + 1].item()])
    loss = torch.stack(losses).mean()
    chosen, rejected = torch.tensor(measures, dtype=torch.float64).mean(0).tolist()
    means = {"loss": loss.item(), "logps/chosen": chosen, "logps/rejected": rejected, **describe_plainly(*tokens)}
    return means, differentiate(model, loss)


def describe_plainly(chosen: list[Tensor], rejected: list[Tensor]) -> dict[str, float]:
    """As TRL's DPOTrainer describes it: means over tokens, whatever the answers' lengths."""
    (_, chosen_logits, accuracy), (_, rejected_logits, _) = (torch.cat(side).mean(0) for side in (chosen, rejected))
    entropy = torch.cat(chosen + rejected).mean(0)[0]
    return {
        **{"entropy": entropy.item(), "mean_token_accuracy": accuracy.item()},
        **{"logits/chosen": chosen_logits.item(), "logits/rejected": rejected_logits.item()},
    }


def compute_targets_plainly(rows: MemoryRows | WeightedRows) -> tuple[dict[str, float], dict[str, Tensor]]:
    """The mean cross-entropy of all targets; with weights the mean of which torch's own cross_entropy speaks."""
    model, losses, weights = make_model("sdpa"), [], []
    for row, documents in enumerate(rows.documents):
        for at, (tokens, labels) in enumerate(documents):
            losses.append(-read_targets(model, tokens, labels)[0])
            given = rows.weights[row][at] if isinstance(rows, WeightedRows) else np.ones(len(tokens))
            weights.append(torch.from_numpy(given[labels >= 0]).double())
    loss = torch.cat(losses) @ torch.cat(weights) / torch.cat(weights).sum()
    return {"loss": loss.item()}, differentiate(model, loss)


def compute_kto_plainly(rows: MemoryRows, micro_steps: list[list[int]]) -> tuple[dict[str, float], dict[str, Tensor]]:
    """The mean over all answers. `micro_steps`: the rows of each, over all ranks, which share what is held against."""
    model, losses, wanted_rewards, held, tokens = make_model("sdpa"), [], [], [], list[list[Tensor]]([[], []])
    for members in micro_steps:
        ratios: list[list[Tensor]] = [[], []]
        wanted: list[bool] = []
        for row in members:
            for at, (ids, labels) in enumerate(rows.documents[row]):
                log_probs, measured = read_targets(model, ids, labels)
                ratios[at % 2].append(log_probs.sum() - draw_references()[row][at])
                if at % 2 == 0:
                    wanted.append((at + 2 * row) % 4 == 0)
                    tokens[0 if wanted[-1] else 1].append(measured)
        kl = torch.stack(ratios[1]).mean().detach().clamp(min=0) if members else torch.zeros(())
        for ratio, is_wanted in zip(ratios[0], wanted, strict=True):
            losses.append(1.2 * (1 - torch.sigmoid(BETA * (ratio - kl))) if is_wanted
                          else 0.7 * (1 - torch.sigmoid(BETA * (kl - ratio))))  # fmt: skip
            wanted_rewards += [BETA * ratio.item()] if is_wanted else []
            held.append(kl.item())
    loss = torch.stack(losses).mean()
    means = {"loss": loss.item(), "kl": float(np.mean(held)), "rewards/chosen": float(np.mean(wanted_rewards))}
    return {**means, **describe_plainly(*tokens)}, differentiate(model, loss)


def compute_reference(
    name: str, shared: list[list[int]] | None, micro_steps: list[list[int]]
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """By plain torch on one process."""
    with patch.object(Qwen3RMSNorm, "forward", normalize):
        if name == "weights":
            return compute_targets_plainly(WeightedRows(ROWS, shared))
        rows = MemoryRows(ROWS, shared=shared)
        if name == "next token":
            return compute_targets_plainly(rows)
        return compute_kto_plainly(rows, micro_steps) if name == "kto" else compute_plainly(name, rows)


def compute_on_rank(
    recipe: Recipe,
    name: str,
    tile: int | None,
    shared: list[list[int]] | None = SHARED,
    fault: str = "",
    prepared: Path | None = None,
    trainer: dict[str, Any] | None = None,
) -> tuple[dict[str, Any], dict[str, Tensor], list[list[int]]]:
    shape = read_model_shape(recipe.model.config or {}, "test")
    layout = choose_layout(recipe, shape)
    groups = make_groups(layout, timedelta(seconds=60))
    rows: Any
    if prepared is not None:
        rows = open_rows(prepared, "train")
    elif name == "weights":
        rows = WeightedRows(ROWS, shared)
    elif trainer is not None:
        rows = ReferencedRows(TrainerRows(trainer))
        rows.values[:] = trainer["reference"] or 0.0
    else:
        rows = ReferencedRows(JudgedRows(ROWS, shared=shared))
        rows.values[:] = np.concatenate(draw_references())
    train = recipe.train
    sizes = (layout.dp_size, train.per_device_train_batch_size, train.gradient_accumulation_steps, layout.sp_size)
    batching = Batching(*sizes, recipe.run.seed, ring=Ring(layout.ring_size, shape.window_counts))
    with patch.object(Qwen3RMSNorm, "forward", normalize):
        attention = register_attention(groups.ulysses_axis, "sdpa", 1, ring=groups.ring_axis)
        model = make_model(attention, recipe.model.config or {})
        serve_rotary(model, groups.sp_axis)
        head = model.get_output_embeddings()
        loss: Any = PlainLoss(head, HeadRule()) if tile is None else make_tiled_loss(head, HeadRule(), tile)
        settings = PreferenceSettings(loss=(name,), beta=BETA, desirable_weight=1.2, undesirable_weight=0.7)
        objective: Objective
        if name in ("next token", "weights"):
            objective = NextToken()
        elif name == "kto":
            objective = UnpairedObjective(settings, groups.sp_axis, dist.group.WORLD)
        else:
            objective = PreferenceObjective(settings, groups.sp_axis)
        module = LossModel(model, loss, objective)
        wrapped = SimpleNamespace(module=module)
        engine = Engine(wrapped, groups, torch.device("cpu"), lambda _: 0.0, lambda: None, lambda _: None)
        plan = plan_step(rows, batching, 0, len(rows))
        totals = torch.zeros(1 + len(objective.names), dtype=torch.float64)
        for micro_step in range(plan.num_micro_steps):
            axis = groups.sp_axis
            batch = read_micro_batch(rows, plan, groups.dp_index, micro_step, axis.rank, axis.size)
            sums = module(**engine._load(plant(batch, fault)))
            (sums[0] / objective.count(plan)).backward()
            totals += sums.detach()
    dist.all_reduce(totals)
    grads = {key: parameter.grad for key, parameter in model.named_parameters()}
    for grad in grads.values():
        dist.all_reduce(grad)
    loss, *means = (totals / objective.count(plan)).tolist()
    members = [
        [plan.rows[member] for share in plan.shares for member in share[micro_step] if member != NO_ROW]
        for micro_step in range(plan.num_micro_steps)
    ]
    return {"loss": loss, **objective.describe(means)}, grads, members


def plant(batch: MicroBatch, fault: str) -> MicroBatch:
    if fault == "rejected reads chosen":
        return replace(batch, shared=tuple(at + 2 if at else 0 for at in batch.shared))
    if fault == "rejected reads no prompt":
        return replace(batch, shared=())
    if fault == "positions are late":
        return replace(batch, positions=batch.positions + (batch.members >= 0) * batch.members % 2)
    if fault == "the prompt is counted":
        following, is_same = np.roll(batch.input_ids, -1, 1), np.diff(batch.members, append=-1) == 0
        is_prompt = is_same & (batch.members >= 0) & (batch.labels < 0)
        return replace(batch, labels=np.where(is_prompt, following, batch.labels))
    return batch


# layout (sp x dp), micro-steps, words, rows at a time, the loss's tile
CASES = {
    "two documents": ("2x1", 3, (), None),
    "1x1": ("1x1", 3, (), 4),
    "2x1": ("2x1", 3, (), None),
    "1x2 and no row": ("1x2", 2, (), 4),
    "2x2": ("2x2", 2, (), 4),
    "4x1": ("4x1", 3, (), 4),
    "ring 2": ("2x1", 3, ("parallel.ring_size=2",), 4),
    "ring 2 of 4": ("4x1", 3, ("parallel.ring_size=2",), None),
    "two rows at a time": ("2x1", 2, ("train.per_device_train_batch_size=2",), 4),
}


def check_case(case: str, name: str, shared: list[list[int]]) -> None:
    layout, micro_steps, words, tile = CASES[case]
    sp_size, dp_size = map(int, layout.split("x"))
    words = (*words, f"parallel.sp_size={sp_size}", f"parallel.dp_shard_size={dp_size}")
    recipe = make_recipe(*words, f"train.gradient_accumulation_steps={micro_steps}")
    given = shared if case != "two documents" else None
    found = run_on_ranks(sp_size * dp_size, compute_on_rank, recipe, name, tile, given)
    means, grads = compute_reference(name, given, found[0][2])
    for rank, (ours, our_grads, _) in enumerate(found):
        for key, value in means.items():
            assert ours[key] == pytest.approx(value, rel=1e-12), (rank, key)
        assert measure_difference(our_grads, grads) < 1e-12, rank


QUICK = {
    ("next token", "2x1"),
    ("weights", "2x1"),
    ("weights", "1x2 and no row"),
    *((name, "2x1") for name in PAIRED[:3]),
}
CHECKED = {("next token", "4x1"), ("simpo", "2x1"), *((name, "ring 2 of 4") for name in ("weights", *PAIRED))}


@pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(name, case, marks=mark_by((name, case) in QUICK, (name, case) in CHECKED))
        for name in ("next token", "weights", *PAIRED)
        for case in CASES
    ],
)
def test_losses_and_gradients_on_ranks_are_those_of_plain_torch(name: str, case: str) -> None:
    """Of pairs: ipo divides by targets and logps are sums, so that prompts that were counted would show. Of plain
    targets, with and without weights: of one prompt two answers, of another three that branch off at two places, and
    two documents that share nothing."""
    check_case(case, name, SHARED if name in PAIRED else SEVERAL)


STORED: dict[str, Any] = json.loads((ROOT / "benchmarks/results/preferences-trl.json").read_text())


def project(gradient: Tensor) -> Tensor:
    """Its norm and its products with two drawn vectors."""
    drawn = torch.randn(2, gradient.numel(), generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return torch.cat([gradient.norm()[None], drawn @ gradient.flatten()])


@pytest.mark.parametrize("ring_size", [1, pytest.param(2, marks=pytest.mark.check)])
@pytest.mark.parametrize("case", STORED["trainers"], ids=lambda case: case["name"])
def test_a_step_is_that_of_trls_own_trainer(case: dict[str, Any], ring_size: int) -> None:
    """DPOTrainer, KTOTrainer and CPOTrainer on one process, with two copies of each prompt; here on two ranks with one.
    TRL takes log-probabilities in float32."""
    num_rows = 1 if case["name"] == "kto" else 2
    words = ("parallel.sp_size=2", f"parallel.ring_size={ring_size}", f"train.gradient_accumulation_steps={num_rows}")
    for ours, gradients, _ in run_on_ranks(
        2, compute_on_rank, make_recipe(*words), case["name"], 4, None, "", None, case
    ):
        assert ours["loss"] == pytest.approx(case["loss"], rel=1e-6)
        for name, value in case["metrics"].items():
            assert ours[name] == pytest.approx(value, rel=1e-6, abs=2e-6), name
        assert gradients.keys() == case["gradients"].keys()
        for name, expected in case["gradients"].items():
            assert (project(gradients[name]) - torch.tensor(expected)).abs().max() < 1e-6 * expected[0] + 1e-9, name


def train_on_rows(recipe: Recipe, kind: type[MemoryRows]) -> tuple[list[float], dict[str, Tensor]]:
    harness = RunHarness(recipe, kind(ROWS), 3)
    run_loop(harness.train_state)
    return harness.losses, harness.read_weights()


@pytest.mark.check
def test_one_weight_for_all_targets_changes_nothing() -> None:
    recipe = make_recipe("parallel.sp_size=2", "memory.tiled_loss=true")
    plain, scaled = (run_on_ranks(2, train_on_rows, recipe, kind) for kind in (MemoryRows, ScaledRows))
    for (losses, weights), (scaled_losses, scaled_weights) in zip(plain, scaled, strict=True):
        assert losses == scaled_losses
        assert all(torch.equal(weights[name], scaled_weights[name]) for name in weights)


SPLITS = {"assistant_only_loss": True, "on_rewritten_turns": "split", "added_tokens": ["<|im_start|>", "<|im_end|>"]}


def prepare_split_chats(folder: Path, *, can_share: bool) -> Path:
    """Each turn has a thought, which the template shows in the last round alone."""
    chats = []
    for chat in range(4):
        turns = [(f"Q{chat}.{at}?", f"A{at}." * (1 + at % 2), f"t{at}") for at in range(1 + chat)]
        messages = list[dict[str, str]]()
        for asked, said, thought in turns:
            messages.append({"role": "user", "content": asked})
            messages.append({"role": "assistant", "content": said, "reasoning_content": thought})
        chats.append(messages)
    rows = [{"messages": chat, "weight": 1 + at} for at, chat in enumerate(chats)]
    (folder / "d.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "t.jinja").write_text(LAST_ROUND)
    data = {"datasets": [str(folder / "d.jsonl")], "chat_template": str(folder / "t.jinja"), **SPLITS}
    data["max_length"] = 256
    settings = {"model": {"config": CONFIG, "tokenizer": "bytes"}, "data": {**data, "store_dir": str(folder / "store")}}
    recipe = parse_recipe(yaml.safe_dump(settings), "r.yaml").recipe
    return prepare_data(recipe, 8, lambda _: None, can_share=can_share).path


@pytest.mark.parametrize(
    ("sp_size", "words"),
    [
        (2, ()),
        pytest.param(2, ("parallel.ring_size=2",), marks=pytest.mark.check),
        pytest.param(4, ("parallel.ring_size=2",), marks=pytest.mark.full),
    ],
)
def test_a_split_chat_on_one_copy_has_the_gradients_of_its_texts_alone(
    tmp_path: Path, sp_size: int, words: tuple[str, ...]
) -> None:
    """Rows of the store; the reference has a forward for each text of the store without shared tokens."""
    config = {**CONFIG, "vocab_size": 300}
    alone, shared = (prepare_split_chats(tmp_path, can_share=can_share) for can_share in (False, True))
    rows, lone = open_rows(shared, "train"), open_rows(alone, "train")
    assert any(any(rows.get_shared(row)) for row in range(len(rows)))
    layout = (f"parallel.sp_size={sp_size}", f"train.gradient_accumulation_steps={len(rows)}", "data.max_length=256")
    recipe = make_recipe(*layout, *words, config=config)
    found = run_on_ranks(sp_size, compute_on_rank, recipe, "next token", 4, None, "", shared)
    with patch.object(Qwen3RMSNorm, "forward", normalize):
        model, losses, weights = make_model("sdpa", config), [], []
        for row in range(len(lone)):
            start = 0
            for length in lone.get_lengths(row):
                part = lone.read(row, start, start + length)
                logits = model(torch.from_numpy(part.input_ids)[None], use_cache=False).logits[0]
                losses.append(cross_entropy(logits, torch.from_numpy(part.labels), reduction="none"))
                weights.append(torch.from_numpy(part.weights) * torch.from_numpy(part.labels >= 0))
                start += length
        loss = torch.cat(losses) @ torch.cat(weights).double() / torch.cat(weights).double().sum()
        grads = differentiate(model, loss)
    for ours, our_grads, _ in found:
        assert ours["loss"] == pytest.approx(loss.item(), rel=1e-12)
        assert measure_difference(our_grads, grads) < 1e-12


@pytest.mark.check
@pytest.mark.parametrize("fault", ["rejected reads chosen", "rejected reads no prompt", "positions are late", ""])
def test_faults_of_shared_prompts_are_found(fault: str) -> None:
    recipe = make_recipe("parallel.sp_size=2", "train.gradient_accumulation_steps=3")
    found = run_on_ranks(2, compute_on_rank, recipe, "sigmoid", None, SHARED, fault)
    _, grads = compute_reference("sigmoid", SHARED, [])
    for _, our_grads, _ in found:
        assert (measure_difference(our_grads, grads) > 1e-6) == bool(fault)


@pytest.mark.check
@pytest.mark.parametrize("name", ["ipo", "kto"])
def test_a_counted_prompt_is_found(name: str) -> None:
    """In gradients and in what is logged. Under sigmoid it may cancel: both answers have it."""
    recipe = make_recipe("parallel.sp_size=2", "train.gradient_accumulation_steps=3")
    found = run_on_ranks(2, compute_on_rank, recipe, name, None, None, "the prompt is counted")
    means, grads = compute_reference(name, None, found[0][2])
    for ours, our_grads, _ in found:
        assert measure_difference(our_grads, grads) > 1e-3
        logged = "rewards/chosen" if name == "kto" else "logps/chosen"
        assert abs(ours[logged] / means[logged] - 1) > 0.1


def start_run(recipe: Recipe, folder: str, *, is_fresh: bool) -> RunHarness:
    harness = RunHarness(recipe, MemoryRows(ROWS, shared=SHARED), 4, folder)
    state = harness.train_state
    references = ComputedReferences(
        None, state.batching, state, [ReferenceFile(Path(folder) / "reference/train.npz", {}, {})]
    )
    references.fill(state, lambda _: None, is_fresh=is_fresh)
    state.post_step_hooks = (*state.post_step_hooks, references.check)
    return harness


def train_and_resume(recipe: Recipe, folder: str) -> tuple[Any, Any, list[dict[str, float]]]:
    whole = start_run(recipe, folder, is_fresh=True)
    whole.train_until(2)
    whole.saves.save(whole.train_state)
    whole.train_until(4)
    again = start_run(recipe, folder, is_fresh=False)
    again.resume(folder, 2)
    run_loop(again.train_state)
    return (
        (whole.losses[2:], whole.read_weights()),
        (again.losses, again.read_weights()),
        [result.measures for result in whole.results],
    )


LEARNING = ("parallel.sp_size=2", "train.learning_rate=0.01", "preference.beta=0.5")


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("memory.tiled_loss=true", "memory.tiled_mlp=true"), id="tiles"),
        pytest.param(("lora.r=4", "parallel.zero_stage=2", "preference.loss=[sigmoid, bco_pair, sft]"),
                     id="adapters, a mixture", marks=pytest.mark.check),
        pytest.param(("train.gradient_accumulation_steps=2", "memory.offload_optimizer=cpu"), id="offload",
                     marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_a_run_learns_from_its_own_reference_and_resumes_bitwise(tmp_path: Path, words: tuple[str, ...]) -> None:
    recipe = make_recipe(*LEARNING, *words)
    for whole, again, measures in run_on_ranks(2, train_and_resume, recipe, str(tmp_path)):
        assert measures[0]["rewards/margins"] == measures[0]["rewards/chosen"] == 0
        assert measures[-1]["rewards/margins"] > 0
        assert whole[0] == again[0]
        assert all(torch.equal(whole[1][name], again[1][name]) for name in whole[1])


def start_with_other_values(recipe: Recipe, folder: str, case: str) -> None:
    """`late`: the values change after they were compared. Else the run's folder holds those of another model, and the
    run begins, or goes on."""
    harness = start_run(recipe, folder, is_fresh=True)
    state, rows = harness.train_state, harness.train_state.rows
    own = rows.values.copy()
    if case == "late":
        rows.values *= 1 + 1e-7
        run_loop(state)
    rows.values *= 1.1
    file = ReferenceFile(Path(folder) / "reference/train.npz", {}, {})
    if state.groups.is_first:
        file.save(rows)
    dist.barrier()
    references = ComputedReferences(None, state.batching, state, [file])
    references.fill(state, lambda _: None, is_fresh=case == "begins")
    assert np.array_equal(state.rows.values, own)


@pytest.mark.check
def test_a_run_that_begins_computes_again_what_another_model_has_left(tmp_path: Path) -> None:
    run_on_ranks(2, start_with_other_values, make_recipe(*LEARNING), str(tmp_path), "begins")


def spoil(file: Path, how: str) -> None:
    """How a file of references may be damaged, or forged by someone who knows its key."""
    with np.load(file) as stored:
        content = dict(stored)
    if how == "cut":
        file.write_bytes(file.read_bytes()[:-40])
    elif how == "a link":
        shutil.move(file, file.with_name("elsewhere"))
        file.symlink_to(file.with_name("elsewhere"))
    elif how == "expands":
        np.savez_compressed(file, **{**content, "values": np.zeros(1 << 27)})
    elif how == "a pickle":
        np.savez(file, **{**content, "values": np.array([Path("x")] * len(content["values"]), object)})
    elif how == "other shapes":
        np.savez(file, **{**content, "values": np.ones((len(content["values"]), 2))})
    elif how == "NaN":
        np.savez(file, **{**content, "values": content["values"] * np.nan})


def start_with_a_spoilt_file(recipe: Recipe, folder: str) -> None:
    own = start_run(recipe, folder, is_fresh=True).train_state.rows.values.copy()
    file = Path(folder) / "reference/train.npz"
    for how in ("cut", "a link", "expands", "a pickle", "other shapes", "NaN"):
        dist.barrier()
        if not dist.get_rank():
            spoil(file, how)
        dist.barrier()
        assert np.array_equal(start_run(recipe, folder, is_fresh=False).train_state.rows.values, own), how
    assert file.with_name("elsewhere").is_file()


@pytest.mark.check
def test_a_spoilt_file_of_references_is_computed_again(tmp_path: Path) -> None:
    run_on_ranks(2, start_with_a_spoilt_file, make_recipe(*LEARNING), str(tmp_path))


@pytest.mark.check
@pytest.mark.parametrize(("case", "message"), [("late", "at step 1,"), ("goes on", "other weights")])
def test_another_reference_stops_the_run(tmp_path: Path, case: str, message: str) -> None:
    with pytest.raises(RankError, match=message):
        run_on_ranks(2, start_with_other_values, make_recipe(*LEARNING), str(tmp_path), case)


@pytest.mark.check
def test_the_command_learns_a_preference_and_resumes_without_its_references(tmp_path: Path) -> None:
    """Answers say yes where they are chosen. References are the same when their folder is lost: a resumed run has
    loaded the same model first."""
    rows = [{"prompt": f"{n} or {n % 7}? ", "chosen": f"yes, {n}", "rejected": f"{n}? no"} for n in range(40)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = make_settings(
        parallel={"sp_size": 2},
        data={"datasets": [{"path": "pairs.jsonl"}], "eval_split": 0.2, "max_length": 192},
        train={"max_steps": 6, "learning_rate": 0.01, "adam_epsilon": 1e-8},
        run={
            **{"eval_steps": 3, "save_steps": 3, "save_total_limit": None},
            **{"keep_best": "rewards/accuracies", "export_best": True},
        },
    )
    runs = Runs(tmp_path, {**recipe, "preference": {"loss": "sigmoid"}})
    err = runs.finish("run")
    assert "reference, row 1 of" in err
    assert "one copy" in err
    metrics, evaluations = (runs.read_lines("run", name) for name in ("metrics", "eval"))
    assert metrics[0]["loss"] == evaluations[0]["loss"] == pytest.approx(math.log(2))
    assert metrics[0]["rewards/chosen"] == metrics[0]["rewards/rejected"] == evaluations[0]["rewards/margins"] == 0
    assert evaluations[-1]["rewards/accuracies"] > 0.9
    assert evaluations[-1]["loss"] < evaluations[1]["loss"] < evaluations[0]["loss"]
    exported = tmp_path / "run" / "model" / "ulysses.json"
    assert [line["rewards/accuracies"] for line in evaluations[1:]] == [1, 1]
    assert json.loads(exported.read_text())["step"] == 3, "the earlier of equal accuracies; the loss is lowest at 6"
    for lost in ("checkpoints/step-6", "model", "reference"):
        shutil.rmtree(tmp_path / "run" / lost)
    runs.finish("run", "--resume", "auto")
    assert [line["loss"] for line in runs.read_lines("run")] == [line["loss"] for line in metrics]
    assert runs.read_lines("run", "eval") == evaluations
    assert json.loads(exported.read_text())["step"] == 3
    shutil.rmtree(tmp_path / "run" / "model")  # a kill after the last save: no step is left, but the evaluation
    (tmp_path / "run" / "eval.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in evaluations[:-1]))
    runs.finish("run", "--resume", "auto")
    assert runs.read_lines("run", "eval") == evaluations


@pytest.mark.full
def test_the_command_learns_from_answers_with_labels(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"{n} or {n % 7}? ", "completion": "yes" if n % 2 else "no", "label": bool(n % 2)} for n in range(40)
    ]
    (tmp_path / "judged.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = make_settings(
        parallel={"dp_shard_size": 2},
        data={"datasets": [{"path": "judged.jsonl"}], "eval_split": 0.2, "max_length": 192},
        train={"max_steps": 6, "learning_rate": 0.01, "adam_epsilon": 1e-8},
    )
    runs = Runs(tmp_path, {**recipe, "preference": {"loss": "kto"}})
    runs.finish("run")
    metrics, evaluations = (runs.read_lines("run", name) for name in ("metrics", "eval"))
    assert (metrics[0]["loss"], metrics[0]["kl"], metrics[0]["rewards/margins"]) == (0.5, 0, 0)
    assert evaluations[-1]["rewards/chosen"] > evaluations[-1]["rewards/rejected"]
    assert evaluations[-1]["loss"] < 0.5
