"""Stores what TRL's own code returns for losses of preferences: values, gradients and metrics, from drawn logits in
float64; and what three of its trainers do with a small model: loss, metrics and the gradient of each weight. Tests
compare with them, so that they need no TRL.

TRL is no dependency. Give its folder, such as `pip download trl==1.16.0 --no-deps` and unzipping leave it:

    PYTHONPATH=FOLDER:$PYTHONPATH python benchmarks/preferences.py
"""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from copy import deepcopy
from functools import partial
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from paths import RESULTS
from support.small_run import CONFIG
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

NUM_PAIRS, NUM_TOKENS, VOCABULARY = 5, 12, 7
SETTINGS: list[dict[str, float]] = [{}, {"beta": 0.7, "discopop_tau": 0.3, "gamma": 0.9}]
SMOOTHED = {"robust": 0.1, "exo_pair": 0.001, "cpo": 0.2, "simpo": 0.2}
DPO = (
    "sigmoid", "robust", "hinge", "ipo", "sigmoid_norm", "apo_zero", "apo_down", "exo_pair", "nca_pair", "sppo_hard",
    "bco_pair", "discopop",
)  # fmt: skip
MIXTURES: list[tuple[list[str], dict[str, Any]]] = [
    (["sigmoid", "bco_pair", "sft"], {"loss_weights": [0.8, 0.2, 1.0]}),  # MPO, arXiv 2411.10442
    (["ipo", "apo_zero"], {"beta": 0.7}),
    (["sigmoid_norm", "robust", "sft"], {"loss_weights": [0.5, 0.3, 0.4], "label_smoothing": 0.1}),
]


class Batch:
    """Pairs of answers to prompts of 3 tokens, padded on the right; logits of the policy are sharper than those of the
    reference."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(11)
        shape = (2 * NUM_PAIRS, NUM_TOKENS)
        self.ids = torch.randint(0, VOCABULARY, shape, generator=generator)
        lengths = torch.randint(1, NUM_TOKENS - 3, shape[:1], generator=generator)
        at = torch.arange(NUM_TOKENS)
        self.is_text = (at < 3 + lengths[:, None]).long()
        self.is_answer = self.is_text * (at >= 3)
        logits = torch.randn(*shape, VOCABULARY, generator=generator, dtype=torch.float64)
        self.logits = 2 * logits
        self.reference = 2 * logits + torch.randn(*shape, VOCABULARY, generator=generator, dtype=torch.float64)
        self.answer_targets = self.is_answer[:, 1:].sum(1)

    def compute_log_probs(self, logits: Tensor, mask: Tensor) -> Tensor:
        """Of each token but the first; 0 outside the mask."""
        log_probs = logits[:, :-1].log_softmax(-1).gather(-1, self.ids[:, 1:, None])[..., 0]
        return log_probs * mask[:, 1:]

    def describe(self) -> dict[str, Any]:
        sums = self.compute_log_probs(self.logits, self.is_answer).sum(1)
        chosen_text = self.compute_log_probs(self.logits, self.is_text)[:NUM_PAIRS]
        return {
            "sums": sums.tolist(),
            "reference_sums": self.compute_log_probs(self.reference, self.is_answer).sum(1).tolist(),
            "targets": self.answer_targets.tolist(),
            "chosen_nll": (-sums[:NUM_PAIRS].sum() / self.answer_targets[:NUM_PAIRS].sum()).item(),
            "chosen_nll_with_prompt": (-chosen_text.sum() / self.is_text[:NUM_PAIRS, 1:].sum()).item(),
        }


def make_trainer(**values: Any) -> SimpleNamespace:
    """What TRL's methods read of a trainer."""
    accelerator = SimpleNamespace(device="cpu", gather=lambda value: value, gather_for_metrics=lambda value: value)
    return SimpleNamespace(
        model=SimpleNamespace(training=True), accelerator=accelerator, aux_loss_enabled=False, ld_alpha=None,
        precompute_ref_logps=True, f_divergence_type="reverse_kl", use_weighting=False, _total_train_tokens=0,
        _tp_size=1, _metrics={"train": defaultdict(list)}, is_encoder_decoder=False, padding_value=0, pad_token_id=0,
        alpha=0.0, cpo_alpha=1.0, calculate_KL=True, **values,
    )  # fmt: skip


def make_outputs(log_probs: Tensor) -> Any:
    zeros = torch.zeros_like(log_probs)
    names = ("entropy", "mean_logits")
    return SimpleNamespace(log_probs=log_probs, is_top1=zeros.bool(), **dict.fromkeys(names, zeros))


def read_metrics(trainer: Any) -> dict[str, float]:
    wanted = ("rewards/", "logps/", "kl")
    return {name: values[-1] for name, values in trainer._metrics["train"].items() if name.startswith(wanted)}


def spread(batch: Batch, sums: Tensor) -> Tensor:
    """Per-token values with these sums, as TRL's trainers read a model's output."""
    mask = batch.is_answer[:, 1:]
    return mask * (sums / batch.answer_targets)[:, None]


def run_dpo(batch: Batch, losses: list[str], settings: dict[str, Any]) -> dict[str, Any]:
    from trl import DPOConfig, DPOTrainer

    weights = settings.get("loss_weights")
    args = DPOConfig(output_dir="/tmp", use_cpu=True, bf16=False, loss_type=losses, loss_weights=weights)
    sums, reference = (
        batch.compute_log_probs(each, batch.is_answer).sum(1) for each in (batch.logits, batch.reference)
    )
    sums.requires_grad_()
    chosen, rejected = reference.chunk(2)
    trainer = make_trainer(
        loss_types=args.loss_type, loss_weights=args.loss_weights or [1.0] * len(losses),  # as its __init__ does
        beta=settings.get("beta", args.beta),
        label_smoothing=settings.get("label_smoothing", args.label_smoothing),
        args=SimpleNamespace(discopop_tau=settings.get("discopop_tau", args.discopop_tau)),
    )  # fmt: skip
    inputs = {
        "input_ids": batch.ids, "attention_mask": batch.is_text, "completion_mask": batch.is_answer,
        "ref_chosen_logps": chosen, "ref_rejected_logps": rejected,
    }  # fmt: skip
    loss = DPOTrainer._compute_loss(trainer, lambda **_: make_outputs(spread(batch, sums)), inputs, False)
    (grad,) = torch.autograd.grad(loss, sums)
    return {"loss": loss.item(), "grad": grad.tolist(), "metrics": read_metrics(trainer)}


def run_without_reference(batch: Batch, name: str, settings: dict[str, float]) -> dict[str, Any]:
    """The whole of cpo, simpo and orpo from logits; the gradient is that of the pairs' part alone, by sums."""
    from trl.experimental.cpo import CPOConfig, CPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    trainer_class, config = (ORPOTrainer, ORPOConfig) if name == "orpo" else (CPOTrainer, CPOConfig)
    args: Any = config(output_dir="/tmp", use_cpu=True, bf16=False)
    trainer = make_trainer(
        loss_type={"cpo": "sigmoid"}.get(name, name), beta=settings.get("beta", args.beta),
        label_smoothing=settings.get("label_smoothing", getattr(args, "label_smoothing", 0.0)),
        simpo_gamma=settings.get("gamma", getattr(args, "simpo_gamma", 0.0)),
    )  # fmt: skip
    for method in ("cpo_loss", "odds_ratio_loss", "concatenated_forward"):
        if hasattr(trainer_class, method):
            setattr(trainer, method, getattr(trainer_class, method).__get__(trainer))
    for method in ("concatenated_inputs", "get_batch_logps"):
        setattr(trainer, method, getattr(trainer_class, method))
    halves: dict[str, Any] = {}
    labels = batch.ids.masked_fill(batch.is_answer == 0, -100)
    for key, whole in (("input_ids", batch.ids), ("attention_mask", batch.is_text), ("labels", labels)):
        halves[f"chosen_{key}"], halves[f"rejected_{key}"] = whole.chunk(2)

    def run_model(*_: Any, **__: Any) -> Any:
        return SimpleNamespace(logits=batch.logits)

    loss, metrics = trainer_class.get_batch_loss_metrics(trainer, run_model, halves)
    sums = batch.compute_log_probs(batch.logits, batch.is_answer).sum(1).requires_grad_()
    scores = sums if name == "cpo" else sums / batch.answer_targets
    compute = trainer.odds_ratio_loss if name == "orpo" else trainer.cpo_loss
    part = compute(*scores.chunk(2))[0].mean() * (-1 if name == "orpo" else 1)
    (grad,) = torch.autograd.grad(part, sums)
    left_out = ("logits/", "nll_loss")
    kept = {key: float(value) for key, value in metrics.items() if not key.startswith(left_out)}
    return {"loss": float(loss), "grad": grad.tolist(), "metrics": kept}


def run_kto(batch: Batch, settings: dict[str, float]) -> dict[str, Any]:
    """The answers in one batch, wanted and unwanted mixed; those of other prompts are the same in another order."""
    from trl import KTOConfig, KTOTrainer

    args = KTOConfig(output_dir="/tmp", use_cpu=True, bf16=False)
    sums, reference = (
        batch.compute_log_probs(each, batch.is_answer).sum(1) for each in (batch.logits, batch.reference)
    )
    wanted = [True, False, False, True, True, False, True, True, False, True]
    mismatched, mismatched_reference = sums.flip(0) + 1, reference.flip(0)
    sums.requires_grad_()
    trainer = make_trainer(
        loss_type="kto", beta=settings.get("beta", args.beta),
        desirable_weight=settings.get("desirable_weight", args.desirable_weight),
        undesirable_weight=settings.get("undesirable_weight", args.undesirable_weight),
        _compute_kl_logps=lambda *_: mismatched,
    )  # fmt: skip
    inputs = {
        "input_ids": batch.ids, "attention_mask": batch.is_text, "completion_mask": batch.is_answer,
        "label": torch.tensor(wanted), "ref_logps": reference, "ref_KL_logps": mismatched_reference,
    }  # fmt: skip
    loss = KTOTrainer._compute_loss(trainer, lambda **_: make_outputs(spread(batch, sums)), inputs, False)
    (grad,) = torch.autograd.grad(loss, sums)
    return {
        "loss": loss.item(), "grad": grad.tolist(), "metrics": read_metrics(trainer), "is_chosen": wanted,
        "mismatched": (mismatched - mismatched_reference).tolist(),
    }  # fmt: skip


TRAINED = {"beta": 0.3, "desirable_weight": 1.2, "undesirable_weight": 0.7}
SIZES = ((14, 5, 8), (9, 7, 3), (20, 4, 4))  # of a prompt and two answers
POLICY_SEED, REFERENCE_SEED = 3, 5


def make_model(seed: int) -> Any:
    """In float64; transformers' own norms would round to float32."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(**deepcopy(CONFIG))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="sdpa")
    for module in model.modules():
        if isinstance(module, Qwen3RMSNorm):
            module.forward = partial(normalize, module)
    return model


def normalize(norm: Any, hidden: Tensor) -> Tensor:
    return norm.weight * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + norm.variance_epsilon)


def make_tokenizer() -> Any:
    words = {f"w{number}": number for number in range(CONFIG["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w1", pad_token="w2", unk_token="w0")


def run_trainer(name: str) -> dict[str, Any]:
    """One step of a trainer before its update. `rows`: of each document its tokens, the number of its prompt's, whether
    it is wanted and what the reference gives it; the other answers of kto follow their own."""
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    generator = torch.Generator().manual_seed(5)

    def write(number: int) -> str:
        return "".join(f"w{word} " for word in torch.randint(3, 64, (number,), generator=generator).tolist())

    written = [[write(size) for size in sizes] for sizes in SIZES]
    rows: list[Any] = [
        {"prompt": prompt, "chosen": chosen, "rejected": rejected} for prompt, chosen, rejected in written
    ]
    if name == "kto":
        rows = [
            {"prompt": prompt, "completion": answer, "label": at != 1} for at, (prompt, answer, _) in enumerate(written)
        ]
    kinds: Any = {"sigmoid": (DPOTrainer, DPOConfig), "kto": (KTOTrainer, KTOConfig), "cpo": (CPOTrainer, CPOConfig)}
    trainer_class, config = kinds[name]
    known = {key: value for key, value in TRAINED.items() if key == "beta" or name == "kto"}
    own = {"cpo_alpha": 1.0} if name == "cpo" else {}
    with tempfile.TemporaryDirectory() as folder:
        # cpo's cross-entropy is a mean over the tokens of a batch: one pair in each
        args = config(
            folder, use_cpu=True, bf16=False, per_device_train_batch_size=1 if name == "cpo" else len(rows),
            max_length=None, report_to="none", save_strategy="no", disable_tqdm=True, gradient_checkpointing=False,
            **known, **own,
        )  # fmt: skip
        sides = [make_model(POLICY_SEED), *([] if name == "cpo" else [make_model(REFERENCE_SEED)])]
        trainer = trainer_class(
            *sides, args=args, train_dataset=Dataset.from_list(rows), processing_class=make_tokenizer()
        )
        batches = list(trainer.get_train_dataloader())
        losses = torch.stack([trainer.compute_loss(sides[0].train(), batch).double() for batch in batches])
        losses.mean().backward()
    metrics = trainer._stored_metrics if name == "cpo" else trainer._metrics
    own_kept = () if name == "cpo" else ("logits/",)  # whose logits are those of prompts and of padding too
    kept = ("rewards/", "logps/", "kl", "nll_loss", "entropy", "mean_token_accuracy", *own_kept)
    documents = [document for batch in batches for document in list_documents(batch)]
    sums = [] if name == "cpo" else [sum_answer(sides[1], *document[:2]) for document in documents]
    return {
        "name": name,
        "documents": [[tokens, first, is_wanted] for tokens, first, is_wanted in documents],
        "reference": sums,
        "loss": losses.mean().item(),
        "metrics": {key: fmean(map(float, values)) for key, values in metrics["train"].items() if key.startswith(kept)},
        "gradients": {key: project(weight.grad) for key, weight in sides[0].named_parameters()},
    }


def list_documents(batch: Any) -> list[tuple[list[int], int, bool]]:
    """Chosen and rejected answers in turn, or answers and those to other prompts."""

    def read(prefix: str, mask: Tensor, parts: slice) -> list[tuple[list[int], int]]:
        ids, is_text = batch[f"{prefix}input_ids"][parts], batch[f"{prefix}attention_mask"][parts].bool()
        return [
            (tokens[text].tolist(), int(own[text].int().argmax()))
            for tokens, text, own in zip(ids, is_text, mask[parts], strict=True)
        ]

    if "chosen_labels" in batch:
        halves = [read(f"{side}_", batch[f"{side}_labels"] >= 0, slice(None)) for side in ("chosen", "rejected")]
    elif "KL_input_ids" in batch:
        halves = [read(prefix, batch[f"{prefix}completion_mask"], slice(None)) for prefix in ("", "KL_")]
    else:
        half, mask = len(batch["input_ids"]) // 2, batch["completion_mask"]
        halves = [read("", mask, slice(half)), read("", mask, slice(half, None))]
    wanted = batch["label"].tolist() if "label" in batch else [True] * len(halves[0])
    return [(*document, is_wanted) for *both, is_wanted in zip(*halves, wanted, strict=True) for document in both]


def sum_answer(model: Any, tokens: list[int], first: int) -> float:
    with torch.no_grad():
        log_probs = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    own = log_probs.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]
    return float(own[first - 1 :].sum())


def project(gradient: Tensor) -> list[float]:
    """Its norm and its products with two vectors that anyone can draw."""
    generator = torch.Generator().manual_seed(7)
    drawn = torch.randn(2, gradient.numel(), generator=generator, dtype=torch.float64)
    return [gradient.norm().item(), *(drawn @ gradient.double().flatten()).tolist()]


def main() -> None:
    import trl

    batch = Batch()
    cases: list[dict[str, Any]] = []
    for name in (*DPO, "cpo", "simpo", "orpo", "kto"):
        known = {"simpo": ("beta", "gamma"), "discopop": ("beta", "discopop_tau")}
        for number, drawn in enumerate(SETTINGS):
            settings = {key: value for key, value in drawn.items() if key in known.get(name, ("beta",))}
            if name in SMOOTHED and (number or name == "exo_pair"):
                settings["label_smoothing"] = SMOOTHED[name]
            if name == "kto":
                settings |= {"desirable_weight": 1.3, "undesirable_weight": 0.6} if number else {}
                case = run_kto(batch, settings)
            else:
                is_dpo = name in DPO
                case = run_dpo(batch, [name], settings) if is_dpo else run_without_reference(batch, name, settings)
            cases.append({"losses": [name], "settings": settings, **case})
    for losses, settings in MIXTURES:
        cases.append({"losses": losses, "settings": settings, **run_dpo(batch, losses, settings)})
    for case in cases:
        print(f"{case['losses']} {case['settings']}: {case['loss']:.6f}")
    trainers = [run_trainer(name) for name in ("sigmoid", "kto", "cpo")]
    for each in trainers:
        print(f"the trainer of {each['name']}: {each['loss']:.6f}, {each['metrics']}")
    result = {"trl": trl.__version__, "batch": batch.describe(), "cases": cases, "trainers": trainers}
    (RESULTS / "preferences-trl.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
