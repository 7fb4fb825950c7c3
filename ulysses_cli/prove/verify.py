"""`verify`: trains a small model with the recipe's kinds of layers on ranks and with plain torch, and compares all
numbers. Gives each tolerance with its reason.  The reference is plain torch and transformers on one process,
document by document, with eager attention. It shares the making of the model config and the choice of a step's rows
with a real run: no engine, kernel, loss or sharding."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from ulysses_cli.data.prepare import prepare_data
from ulysses_cli.data.steps import NO_ROW, StepPlan, make_batching, plan_step
from ulysses_cli.data.store import open_rows
from ulysses_cli.data.tokenizing.tokenizer import make_bytes_tokenizer
from ulysses_cli.plan.layout import Layout
from ulysses_cli.plan.models.shape import ModelShape, read_model_shape
from ulysses_cli.plan.recipe.recipe import Recipe, Train
from ulysses_cli.plan.recipe.sections import Dataset, Preference
from ulysses_cli.plan.resolved import choose_layout, find_ring_size, make_layout, rank_experts, resolve
from ulysses_cli.plan.units import format_count
from ulysses_cli.prove.ranks import MAX_CPU_RANKS, RankFailureError, run_on_ranks
from ulysses_cli.prove.recorded_run import RecordedSteps, record_steps
from ulysses_cli.prove.results import Findings, Report, Row
from ulysses_cli.prove.rows import Document, cut_row, describe_document, list_answers, make_documents, make_judged
from ulysses_cli.prove.shrink import (
    LEARNING_RATE,
    NUM_BYTES,
    compute_max_length,
    has_states,
    make_proof_recipe,
    pick_layers,
)
from ulysses_cli.train.model.build import read_settings
from ulysses_cli.train.model.loading import load_model_config, stretch_positions
from ulysses_cli.train.model.loss_model import load_token_loss
from ulysses_cli.train.model.routers import list_router_layers, list_router_weights
from ulysses_cli.train.preferences import AnswerPairs, compute_kl, compute_kto_losses, compute_pair_losses
from ulysses_cli.train.processes.host import count_free_bytes


@dataclass(frozen=True)
class ReferenceSteps:
    """The results of each step. `eval_loss` and `eval_tokens`: before the first step."""

    losses: list[float]
    norms: list[float]
    grads: list[dict[str, Tensor]]
    weights: dict[str, Tensor]
    eval_loss: float
    eval_tokens: int


def make_plain_model(recipe: Recipe, shape: ModelShape) -> Any:
    """The model with the weights that a run starts from: drawn in float32 with the recipe's seed."""
    config = load_model_config(recipe)
    stretch_positions(config, recipe, resolve(recipe, shape))
    torch.manual_seed(recipe.run.seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    if recipe.lora is not None:
        from peft import LoraConfig, get_peft_model

        lora, targets, ranks = recipe.lora, recipe.lora.target_modules, rank_experts(recipe.lora, shape)
        if lora.quantize_base is not None:
            model = _quantize(model, lora.quantize_base)
        torch.manual_seed(recipe.run.seed)
        settings = LoraConfig(
            r=lora.r,
            lora_alpha=lora.alpha,
            target_modules=targets if isinstance(targets, str) else list(targets),
            target_parameters=list(ranks) or None,
            rank_pattern=ranks,
            use_rslora=lora.use_rslora,
            use_dora=lora.use_dora,
            modules_to_save=list(lora.modules_to_save) or None,
            task_type="CAUSAL_LM",
            exclude_modules=list_router_layers(model) or None,
        )
        get_peft_model(model, settings)
    return model.train()


def _quantize(model: Any, kind: str) -> Any:
    """The model as transformers and bitsandbytes read it from files."""
    options: dict[str, Any] = {"load_in_8bit": True, "llm_int8_threshold": 0.0}
    if kind == "nf4":
        options = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        settings = {"dtype": torch.float32, "attn_implementation": "eager", "device_map": {"": "cpu"}}
        read = AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=BitsAndBytesConfig(**options, bnb_4bit_compute_dtype=torch.float32), **settings
        )
    for module in read.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # else an evaluation packs weights so that no backward reads them
    return read


def compute_losses(model: Any, document: Document) -> tuple[Tensor, Tensor]:
    """The logits [N] of a document's targets and their cross-entropies, both in float64."""
    logits = model(torch.from_numpy(document.tokens)[None], use_cache=False).logits[0].double()
    targets = torch.from_numpy(document.shift())
    is_target = targets >= 0
    return logits[is_target], functional.cross_entropy(logits[is_target], targets[is_target], reduction="none")


def count_targets(documents: Sequence[Document]) -> int:
    return sum(int((document.shift() >= 0).sum()) for document in documents)


class PlainTokens:
    """The mean loss of a step's targets."""

    def __init__(self, train: Train) -> None:
        self.train, self.token_loss = train, load_token_loss(train.token_loss)

    def count(self, documents: Sequence[Document]) -> int:
        return count_targets(documents)

    def begin(self, model: Any, documents: Sequence[Document]) -> None:
        """Called before the first step, without gradients."""

    def compute(self, model: Any, documents: Sequence[Document]) -> Iterator[Tensor]:
        """Terms of the loss of a micro-step, from all ranks' documents."""
        for document in documents:
            logits, losses = compute_losses(model, document)
            trained = losses.sum() if self.token_loss is None else self.token_loss(losses).sum()
            yield trained + self.train.z_loss_weight * logits.logsumexp(-1).square().sum()

    def measure(self, model: Any, documents: Sequence[Document]) -> float:
        """What an evaluation adds up."""
        return sum(compute_losses(model, document)[1].sum().item() for document in documents)


class PlainAnswers:
    """The mean loss of a step's pairs, or of its answers that have a label, against the model before step 1. A loss's
    formula is the run's own: tests hold it to TRL's."""

    def __init__(self, preference: Preference) -> None:
        self.settings, self.preference = read_settings(preference), preference
        self.reference: dict[Document, Tensor] = {}

    def count(self, documents: Sequence[Document]) -> int:
        return len(documents) // 2

    def begin(self, model: Any, documents: Sequence[Document]) -> None:
        if self.preference.has_reference:
            self.reference |= {document: -compute_losses(model, document)[1].sum() for document in documents}

    def compute(self, model: Any, documents: Sequence[Document]) -> Iterator[Tensor]:
        if not documents:
            return
        sums = torch.stack([-compute_losses(model, document)[1].sum() for document in documents])
        reference = torch.stack([self.reference.get(document, sums.new_zeros(())) for document in documents])
        if self.preference.is_unpaired:
            ratios, is_wanted = sums - reference, torch.tensor([document.is_wanted for document in documents[0::2]])
            kl = compute_kl(ratios[1::2].sum(), torch.tensor(len(is_wanted)))
            yield compute_kto_losses(ratios[0::2], is_wanted, kl, self.settings).sum()
            return
        counts = torch.tensor([count_targets([document]) for document in documents])
        halves = (part[at::2] for part in (sums, counts, reference) for at in (0, 1))
        yield compute_pair_losses(AnswerPairs(*halves), self.settings).sum()

    def measure(self, model: Any, documents: Sequence[Document]) -> float:
        return sum(term.item() for term in self.compute(model, documents))


def train_plainly(
    recipe: Recipe, shape: ModelShape, steps: Sequence[Sequence[Sequence[Document]]], held_out: Sequence[Document]
) -> ReferenceSteps:
    """`steps`: of each step the documents of its micro-steps, over all ranks. Gradients are clipped by their norm; the
    optimizer is AdamW."""
    model, train = make_plain_model(recipe, shape), recipe.train
    goal = PlainTokens(train) if recipe.preference is None else PlainAnswers(recipe.preference)
    model.eval()
    with torch.no_grad():
        goal.begin(model, [*held_out, *(document for step in steps for part in step for document in part)])
        eval_loss = goal.measure(model, held_out) / max(1, goal.count(held_out))
    model.train()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    decayed = {name for name, p in trained.items() if p.dim() >= 2 and not name.endswith("bias")}  # experts' have two
    groups = [
        {"params": [p for name, p in trained.items() if name in decayed], "weight_decay": train.weight_decay},
        {"params": [p for name, p in trained.items() if name not in decayed], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=train.learning_rate,
        betas=(train.adam_beta1, train.adam_beta2),
        eps=train.adam_epsilon,
    )
    losses, grads, norms = [], [], []
    for step in steps:
        optimizer.zero_grad()
        count, total = max(1, sum(map(goal.count, step))), 0.0
        for term in (term / count for documents in step for term in goal.compute(model, documents)):
            term.backward()
            total += term.item()
        for weight in list_router_weights(model) if train.freeze_router else ():
            weight.grad = None  # the optimizer passes it over
        step_grads = {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in trained.items()}
        losses.append(total)
        grads.append({name: grad.clone() for name, grad in step_grads.items()})
        limit = train.max_grad_norm or float("inf")
        norms.append(torch.nn.utils.clip_grad_norm_(list(trained.values()), limit).item())
        optimizer.step()
    weights = {name: p.detach().clone() for name, p in trained.items()}
    return ReferenceSteps(losses, norms, grads, weights, eval_loss, count_targets(held_out))


NUM_STEPS, NUM_EVAL_ROWS = 2, 3
CPU_RANK_BYTES = 1 << 30
TIME_LIMIT_SECONDS = 900.0  # the first run may build DeepSpeed's CPU Adam
LOSS_TOLERANCE, GRADIENT_TOLERANCE, WEIGHT_TOLERANCE = 1e-5, 1e-4, 1e-3
# Gradients of a state's decay are sums of terms that nearly cancel, and transformers' rules compute in float32: on one
# rank too, a packed row and its documents alone differ by 2e-4.
STATE_GRADIENT_TOLERANCE = 1e-3
MOVED_AT_LEAST = 1e-6  # of a loss: a changed token must change the losses of tokens that attend to it
EXPERT_NOISE = 1e-5
ORDER = "float32 adds in another order on ranks; real faults change it by 1e-2 or more"
REASONS = {
    "loss": ORDER,
    "gradient norm": ORDER,
    "gradients": f"per tensor, norm of the difference by the norm of the gradient; {ORDER}",
    "weights": "largest difference by the learning rate; Adam divides a gradient's rounding error by its size",
    "evaluation loss": ORDER,
    "evaluation tokens": "each target is counted once; an evaluation that is not sharded would count it on every rank",
}


@dataclass(frozen=True)
class LayoutCase:
    """One layout to verify."""

    sp_size: int
    ring_size: int
    dp_size: int

    @property
    def name(self) -> str:
        ring = f" (ring {self.ring_size})" if self.ring_size > 1 else ""
        return f"sp {self.sp_size}{ring}" + (f" x dp {self.dp_size}" if self.dp_size > 1 else "")

    @property
    def layout(self) -> Layout:
        return Layout(1, self.dp_size, self.sp_size, self.ring_size)


def choose_device() -> tuple[int, str]:
    """Returns how many ranks a proof can use here, and their device."""
    gpus = torch.cuda.device_count()
    if gpus > 1:
        return gpus, "cuda"
    return max(1, min(MAX_CPU_RANKS, count_free_bytes() // CPU_RANK_BYTES)), "cpu"


def list_cases(recipe: Recipe, shape: ModelShape, slots: int, *, is_all: bool) -> tuple[list[LayoutCase], list[str]]:
    """sp 1, and the recipe's sp size or every legal one. The notes name sizes that this machine cannot run."""
    legal = (1,) if shape.inexact else shape.sp_sizes
    own_size, own_ring, notes = recipe.parallel.sp_size, choose_layout(recipe, shape).ring_size, []
    if is_all:
        wanted = sorted({*legal, own_size})
        sizes = [size for size in wanted if size <= slots]
        too_large = [str(size) for size in wanted if size > slots]
        if too_large:
            notes.append(f"sp {', '.join(too_large)}: not run, this machine can run {format_count(slots, 'rank')}")
    elif own_size <= slots:
        sizes = sorted({1, own_size})
    else:
        sizes = sorted({1, max(size for size in {*legal, own_size // own_ring} if size <= slots)})
        notes.append(
            f"sp {own_size}: not run, this machine can run {format_count(slots, 'rank')}; sp {sizes[-1]} is run instead"
        )
    dp = min(2, make_layout(recipe).dp_size)
    rings = [own_ring if size == own_size else find_ring_size(shape, size) for size in sizes]
    cases = [LayoutCase(size, ring, dp if size * dp <= slots else 1) for size, ring in zip(sizes, rings, strict=True)]
    return cases, notes


def verify(recipe: Recipe, config: Mapping[str, Any], subject: str, report: Report, *, is_all: bool) -> Findings:
    """For a recipe that passed its checks."""
    findings = Findings("verify", subject)
    shape = read_model_shape(config, subject)
    slots, device = choose_device()
    cases, notes = list_cases(recipe, shape, slots, is_all=is_all)
    picked = pick_layers(shape)
    findings.notes += notes
    findings.notes.append(
        f"model: layers {', '.join(map(str, picked))} of {shape.num_layers}, {format_count(shape.num_heads, 'head')}, "
        f"{format_count(shape.num_kv_heads, 'key/value head')}, random weights; {NUM_STEPS} steps on "
        f"{'GPUs' if device == 'cuda' else 'CPU ranks'}, compared with plain transformers on one process"
    )
    for number, case in enumerate(cases):
        proof, changes = make_proof_recipe(recipe, config, shape, case.layout, device)
        if number == len(cases) - 1:
            findings.notes += changes
        ranks = format_count(case.sp_size * case.dp_size, "rank")
        report(f"{case.name}: {NUM_STEPS} steps with plain torch, then on {ranks}")
        findings.rows += prove_case(case, proof, device)
    return findings


def prove_case(case: LayoutCase, proof: Recipe, device: str) -> list[Row]:
    """Runs one layout on ranks and compares it with the reference."""
    shape = read_model_shape(proof.model.config or {}, "the small model")
    with tempfile.TemporaryDirectory(prefix="ulysses-verify-") as folder:
        task = make_task(proof, shape, Path(folder))
        try:
            recorded = run_on_ranks(
                case.sp_size * case.dp_size, trace_on_rank, task, device=device, time_limit=TIME_LIMIT_SECONDS
            )
        except RankFailureError as failure:
            return [Row(case.name, "run", "FAIL", {}, str(failure))]
        return judge(case.name, recorded, make_reference(task), shape)


@dataclass(frozen=True)
class VerifyTask:
    """What both sides train: the small recipe on the same prepared rows. The reference uses the documents directly."""

    proof: Recipe
    shape: ModelShape
    prepared: Path
    documents: list[Document]

    @property
    def end(self) -> int:
        """Where a step has several rows, the last step lacks one: the padding row in its place must have no weight."""
        per_step = make_batching(self.proof, self.shape, resolve(self.proof, self.shape)).rows_per_step
        return NUM_STEPS * per_step - (1 if per_step > 1 else 0)


def make_task(proof: Recipe, shape: ModelShape, folder: Path) -> VerifyTask:
    """Writes documents to files and prepares them as `train` does."""
    data, tokens, resolved = proof.data, compute_max_length(proof.parallel.sp_size), resolve(proof, shape)
    counts = {"train": NUM_STEPS * make_batching(proof, shape, resolved).rows_per_step, "eval": NUM_EVAL_ROWS}
    documents = list[Document]()
    for seed, (name, num_rows) in enumerate(counts.items(), 5):
        if proof.preference is not None:
            rows = make_judged(tokens, num_rows, seed, has_partners=not proof.preference.is_unpaired)
            made = list_answers(rows, make_bytes_tokenizer().eos_token_id)
        else:
            is_packed, has_long = data.packing != "off", data.excess_length_strategy != "raise"
            made = make_documents(tokens, num_rows, NUM_BYTES, seed, is_packed=is_packed, has_long=has_long)
            rows = list(map(describe_document, made))
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        documents += made
    sources_here = {
        "datasets": (data.datasets[0].model_copy(update=describe_source(folder / "train.jsonl")),),
        "eval_datasets": (data.datasets[0].model_copy(update=describe_source(folder / "eval.jsonl")),),
        "store_dir": str(folder / "store"),
    }
    proof = proof.model_copy(update={"data": data.model_copy(update=sources_here)})
    can_share = proof.preference is not None and resolved.shares_prompts
    prepared = prepare_data(proof, proof.parallel.sp_size, lambda _: None, can_share=can_share)
    return VerifyTask(proof, shape, prepared.path, documents)


def describe_source(file: Path) -> dict[str, Any]:
    plain = Dataset()
    return {**{name: getattr(plain, name) for name in Dataset.model_fields}, "path": str(file), "type": "tokens"}


def trace_on_rank(device: torch.device, task: VerifyTask) -> RecordedSteps:
    return record_steps(task.proof, task.shape, task.prepared, NUM_STEPS, task.end, device)


def make_reference(task: VerifyTask) -> ReferenceSteps:
    batching = make_batching(task.proof, task.shape, resolve(task.proof, task.shape))
    rows, held_out = open_rows(task.prepared, "train"), open_rows(task.prepared, "eval")
    plans = [plan_step(rows, batching, step * batching.rows_per_step, task.end) for step in range(NUM_STEPS)]
    steps = [
        [[part for row in numbers for part in cut_row(rows, row, task.documents)] for numbers in list_micro_steps(plan)]
        for plan in plans
    ]
    evaluated = [part for row in range(len(held_out)) for part in cut_row(held_out, row, task.documents)]
    return train_plainly(task.proof, task.shape, steps, evaluated)


def list_micro_steps(plan: StepPlan) -> list[list[int]]:
    """The rows of each micro-step over all ranks."""
    shares = [[member for share in plan.shares for member in share[at]] for at in range(plan.num_micro_steps)]
    return [[plan.rows[member] for member in members if member != NO_ROW] for members in shares]


def judge(group: str, recorded: RecordedSteps, expected: ReferenceSteps, shape: ModelShape) -> list[Row]:
    """Every comparison as one row."""
    worst_gradient, gradient_name = find_worst_gradient(recorded.grads, expected.grads)
    worst_weight, weight_name = find_worst_weight(recorded.weights, expected.weights)
    gradient_limit = STATE_GRADIENT_TOLERANCE if has_states(shape.layers) else GRADIENT_TOLERANCE
    compared = [
        ("loss", _compute_difference(recorded.losses, expected.losses), LOSS_TOLERANCE, ""),
        ("gradient norm", _compute_difference(recorded.norms, expected.norms), GRADIENT_TOLERANCE, ""),
        ("gradients", worst_gradient, gradient_limit, gradient_name),
        ("weights", worst_weight, WEIGHT_TOLERANCE, weight_name),
        ("evaluation loss", _compute_difference([recorded.eval_loss], [expected.eval_loss]), LOSS_TOLERANCE, ""),
        ("evaluation tokens", float(abs(recorded.eval_tokens - expected.eval_tokens)), 0.0, ""),
    ]
    rows = [_compare(group, name, value, limit, REASONS[name], where) for name, value, limit, where in compared]
    limit = EXPERT_NOISE if shape.num_experts else 0.0
    reason = (
        "experts get other numbers of tokens, so that float32 rounds differently"
        if limit
        else "the same arithmetic on the same numbers: results must be bitwise identical"
    )
    for probe in recorded.probes:
        row = _compare(group, f"leak: {probe.name}", probe.outside, limit, reason, "")
        if not probe.inside > MOVED_AT_LEAST:
            row = Row(group, row.name, "FAIL", row.values, "tokens that attend to the change do not notice it")
        rows.append(row)
    return rows


def _compare(group: str, name: str, value: float, limit: float, reason: str, where: str) -> Row:
    is_fine = math.isfinite(value) and value <= limit
    text = f"{reason}; worst: {where}" if where and not is_fine else reason
    return Row(group, name, "PASS" if is_fine else "FAIL", {"difference": value, "tolerance": limit}, text)


def _compute_difference(ours: list[float], expected: list[float]) -> float:
    """The largest relative difference; NaN where one cannot be computed."""
    if len(ours) != len(expected):
        return math.nan
    shares = [abs(a - b) / max(abs(b), 1e-12) for a, b in zip(ours, expected, strict=True)]
    return max(shares) if all(map(math.isfinite, shares)) else math.nan


def find_worst_gradient(ours: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> tuple[float, str]:
    """The worst tensor of any step. Tensors with almost no gradient are compared with a thousandth of the mean norm."""
    worst, name = 0.0, ""
    if len(ours) != len(expected):
        return math.nan, f"{len(ours)} updates instead of {len(expected)}"
    for own, reference in zip(ours, expected, strict=True):
        if own.keys() != reference.keys():
            return math.nan, f"other tensors are trained: {', '.join(sorted(own.keys() ^ reference.keys())[:3])}"
        whole = math.sqrt(sum(grad.double().square().sum().item() for grad in reference.values()))
        floor = 1e-3 * whole / math.sqrt(max(1, len(reference)))
        for key, grad in reference.items():
            difference = (own[key].double() - grad.double()).norm().item()
            share = difference / max(grad.double().norm().item(), floor, 1e-30)
            if not share <= worst:
                worst, name = share, key
    return worst, name


def find_worst_weight(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """The tensor with the largest difference, in steps of the learning rate; NaN where it is missing."""
    worst, name = 0.0, ""
    for key, weight in expected.items():
        steps = ((ours[key].double() - weight.double()).abs().max() / LEARNING_RATE).item() if key in ours else math.nan
        if not steps <= worst:
            worst, name = steps, key
    return worst, name
