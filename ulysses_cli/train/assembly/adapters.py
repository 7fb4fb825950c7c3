"""LoRA adapters of a recipe: makes peft's config, adds peft's layers to the model, and loads adapters to start from.

Parts that are trained whole beside the adapters (lora.modules_to_save) stay the model's own modules: nothing needs the
base's values once they are loaded, so that no second copy is kept as in peft. Names and files are peft's.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable
from typing import Any

import torch
from safetensors import SafetensorError

from ulysses_cli.plan.nouns import format_count
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.train.assembly.loading import BuildError, first_line, gather_whole
from ulysses_cli.train.finiteness import WORDS, is_finite
from ulysses_cli.train.optimizer.shards import get_shape


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
        use_dora=lora.use_dora,
        modules_to_save=list(lora.modules_to_save) or None,
        task_type="CAUSAL_LM",
        base_model_name_or_path=recipe.model.name_or_path,
    )


def add_adapters(recipe: Recipe, model: Any) -> Any:
    """peft adds adapters to the model in place and freezes the base; the model keeps its own class."""
    from peft import get_peft_model

    settings = make_adapter_config(recipe)
    torch.manual_seed(recipe.run.seed)
    try:
        adapted = get_peft_model(model, leave_whole_parts(settings), autocast_adapter_dtype=False)
    except ValueError as error:
        raise BuildError(f"the adapters cannot be added: {first_line(error)}") from error
    adapted.peft_config["default"].modules_to_save = settings.modules_to_save
    train_whole_parts(model, settings.modules_to_save or ())
    for parameter in adapted.parameters():
        if parameter.requires_grad:  # beside a quantized layer peft makes them in float32
            parameter.data = parameter.data.to(getattr(torch, recipe.model.dtype))
    if recipe.lora is not None and recipe.lora.adapter_name_or_path is not None:
        load_adapters(adapted, settings, os.path.expanduser(recipe.lora.adapter_name_or_path))
    return adapted


def leave_whole_parts(settings: Any) -> Any:
    """The same settings without the parts that are trained whole, which peft would copy."""
    adapters_alone = copy.deepcopy(settings)
    adapters_alone.modules_to_save = None
    return adapters_alone


def train_whole_parts(model: Any, names: Iterable[str]) -> None:
    """A name stands for every module whose name ends with it: peft's own rule when it loads them (tuners_utils.py)."""
    for name in names:
        parts = [module for path, module in model.named_modules() if path.endswith(name)]
        weights = [weight for part in parts for weight in part.parameters()]
        if not weights:
            raise BuildError(f"lora.modules_to_save: this model has no weights in a module whose name ends in {name}")
        for weight in weights:
            weight.requires_grad_(True)


def name_in_files(parameter: str) -> str:
    """peft's name in a file of a parameter of the adapted model. The file names DoRA's lengths without `.weight`."""
    return parameter.replace("lora_magnitude_vector.default.weight", "lora_magnitude_vector").replace(".default.", ".")


COMPARED = {
    "r": "r",
    "lora_alpha": "alpha",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
}  # peft's name -> the recipe's


def load_adapters(adapted: Any, settings: Any, path: str) -> None:
    """Collective over all ranks under ZeRO-3. Adapters that do not fit the recipe's are an error: other values of
    `settings` would train something else without a word."""
    from peft import PeftConfig, load_peft_weights

    key = "lora.adapter_name_or_path"
    try:
        saved = PeftConfig.from_pretrained(path)
        weights = load_peft_weights(path, device="cpu")
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise BuildError(f"{key}: {path} cannot be read: {first_line(error)}") from error
    for name, own in COMPARED.items():
        before, now = getattr(saved, name, None), getattr(settings, name)
        if before != now:
            raise BuildError(f"{key}: the adapters in {path} have {own} {before}, and lora.{own} is {now}")
    trained = {name: each for name, each in adapted.named_parameters() if each.requires_grad}
    files = {name: name_in_files(name) for name in trained}
    if unmatched := sorted(set(files.values()) ^ weights.keys()):
        where = "in the recipe alone" if unmatched[0] in files.values() else f"in {path} alone"
        raise BuildError(
            f"{key}: no partner for {format_count(len(unmatched), 'tensor')}; {unmatched[0]} is {where}: set "
            "target_modules and modules_to_save"
        )
    for name, parameter in trained.items():
        weight = weights[files[name]]
        if tuple(get_shape(parameter)) != tuple(weight.shape):
            raise BuildError(f"{key}: {files[name]} in {path} has the shape {tuple(weight.shape)}: another base model")
        if not is_finite(weight):
            raise BuildError(f"{key}: {files[name]} in {path} holds {WORDS}")
        with gather_whole(parameter), torch.no_grad():
            parameter.copy_(weight)
