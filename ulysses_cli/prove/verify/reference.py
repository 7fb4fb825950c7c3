"""The reference of `verify`: training with plain torch and transformers on one process, document by document, with
eager attention.

It shares the making of the model config and the choice of a step's rows with a real run: no engine, kernel, loss or
sharding.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.plan.resolved import resolve
from ulysses_cli.prove.rows import Labelled
from ulysses_cli.train.assembly.model_config import load_model_config, stretch_positions
from ulysses_cli.train.assembly.token_loss import load_token_loss
from ulysses_cli.train.loss import TokenLoss


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

        lora, targets = recipe.lora, recipe.lora.target_modules
        if lora.quantize_base is not None:
            model = _quantize(model, lora.quantize_base)
        torch.manual_seed(recipe.run.seed)
        settings = LoraConfig(
            r=lora.r,
            lora_alpha=lora.alpha,
            target_modules=targets if isinstance(targets, str) else list(targets),
            use_rslora=lora.use_rslora,
            use_dora=lora.use_dora,
            modules_to_save=list(lora.modules_to_save) or None,
            task_type="CAUSAL_LM",
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


def compute_document(
    model: Any, document: Labelled, z_loss_weight: float, token_loss: TokenLoss | None = None
) -> tuple[Tensor, Tensor]:
    """Returns (sum of losses with the z-loss, sum of cross-entropies without it), both in float64."""
    tokens, labels = document
    logits = model(torch.from_numpy(tokens)[None], use_cache=False).logits[0].double()
    targets = torch.from_numpy(labels)
    losses = functional.cross_entropy(logits, targets, ignore_index=-100, reduction="none")
    squares = torch.where(targets >= 0, logits.logsumexp(-1).square(), 0.0)
    trained = losses[targets >= 0].sum() if token_loss is None else token_loss(losses[targets >= 0]).sum()
    return trained + z_loss_weight * squares.sum(), losses.sum()


def train_plainly(
    recipe: Recipe, shape: ModelShape, steps: Sequence[Sequence[Labelled]], held_out: Sequence[Labelled]
) -> ReferenceSteps:
    """The loss of a step is the mean over all its targets; gradients are clipped by their norm; the optimizer is
    AdamW."""
    model, train = make_plain_model(recipe, shape), recipe.train
    token_loss = load_token_loss(train.token_loss)
    model.eval()
    with torch.no_grad():
        eval_sum = sum(compute_document(model, document, 0.0)[1].item() for document in held_out)
    eval_tokens = sum(int((labels >= 0).sum()) for _, labels in held_out)
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
    for documents in steps:
        optimizer.zero_grad()
        count = sum(int((labels >= 0).sum()) for _, labels in documents)
        total = 0.0
        for document in documents:
            loss = compute_document(model, document, train.z_loss_weight, token_loss)[0] / max(1, count)
            loss.backward()
            total += loss.item()
        step_grads = {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in trained.items()}
        losses.append(total)
        grads.append({name: grad.clone() for name, grad in step_grads.items()})
        limit = train.max_grad_norm or float("inf")
        norms.append(torch.nn.utils.clip_grad_norm_(list(trained.values()), limit).item())
        optimizer.step()
    weights = {name: p.detach().clone() for name, p in trained.items()}
    return ReferenceSteps(losses, norms, grads, weights, eval_sum / max(1, eval_tokens), eval_tokens)
