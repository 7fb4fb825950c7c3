"""LoRA adapters of a recipe: makes peft's config and adds peft's layers to the model."""

from __future__ import annotations

from typing import Any

import torch

from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.train.assembly.loading import BuildError, first_line


def make_adapter_config(recipe: Recipe) -> Any:
    from peft import LoraConfig

    lora = recipe.lora
    if lora is None:
        raise AssertionError("no lora section")
    targets: Any = lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules)
    return LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets,
        use_rslora=lora.use_rslora,
        task_type="CAUSAL_LM",
        base_model_name_or_path=recipe.model.name_or_path,
    )


def add_adapters(recipe: Recipe, model: Any) -> Any:
    """peft adds adapters to the model in place and freezes the base; the model keeps its own class."""
    from peft import get_peft_model

    settings = make_adapter_config(recipe)
    torch.manual_seed(recipe.run.seed)
    try:
        adapted = get_peft_model(model, settings, autocast_adapter_dtype=False)
    except ValueError as error:
        raise BuildError(f"the adapters cannot be added: {first_line(error)}") from error
    for parameter in adapted.parameters():
        if parameter.requires_grad:  # beside a quantized layer peft makes them in float32
            parameter.data = parameter.data.to(getattr(torch, recipe.model.dtype))
    return adapted
