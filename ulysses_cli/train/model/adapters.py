"""LoRA adapters of a recipe and their frozen base. Makes peft's config, adds peft's layers, loads adapters to start
from; puts bitsandbytes' layers in 4 or 8 bits in place of every linear layer but the head. Names and files are
peft's.

Parts that are trained whole (lora.modules_to_save) stay the model's own modules: no second copy is kept as in peft.
Each rank holds the whole base. A weight is quantized on the rank's device as soon as it is read."""

from __future__ import annotations

import copy
import logging
import os
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.plan.resolved import rank_experts
from ulysses_cli.plan.units import format_count
from ulysses_cli.train.model.loading import BuildError, first_line, gather_whole
from ulysses_cli.train.model.routers import list_router_layers
from ulysses_cli.train.optimizer.shards import get_shape
from ulysses_cli.train.tensor_file import WORDS, is_finite


def make_adapter_config(recipe: Recipe, shape: ModelShape) -> Any:
    from peft import LoraConfig

    lora = recipe.lora
    if lora is None:
        raise AssertionError("no lora section")
    targets: Any = lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules)
    ranks = rank_experts(lora, shape)
    return LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets,
        target_parameters=list(ranks) or None,
        rank_pattern=ranks,
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
        modules_to_save=list(lora.modules_to_save) or None,
        task_type="CAUSAL_LM",
        base_model_name_or_path=recipe.model.name_or_path,
    )


def add_adapters(recipe: Recipe, shape: ModelShape, model: Any) -> Any:
    """peft adds adapters to the model in place and freezes the base; the model keeps its own class."""
    from peft import get_peft_model

    settings = make_adapter_config(recipe, shape)
    torch.manual_seed(recipe.run.seed)
    warnings.filterwarnings("ignore", "The following rank_pattern keys")  # peft looks at linear layers alone
    try:
        adapted = get_peft_model(model, choose_layers(settings, model), autocast_adapter_dtype=False)
    except ValueError as error:
        raise BuildError(f"the adapters cannot be added: {first_line(error)}") from error
    found = adapted.base_model.targeted_parameter_names
    for name in settings.target_parameters or ():
        if not any(each.endswith(f".{name}") for each in found):  # peft says nothing as long as it finds one of them
            raise BuildError(f"lora.experts: this model has no {name}")
    adapted.peft_config["default"].modules_to_save = settings.modules_to_save
    train_whole_parts(model, settings.modules_to_save or ())
    for parameter in adapted.parameters():
        if parameter.requires_grad:  # beside a quantized layer peft makes them in float32
            parameter.data = parameter.data.to(getattr(torch, recipe.model.dtype))
    if recipe.lora is not None and recipe.lora.adapter_name_or_path is not None:
        load_adapters(adapted, settings, os.path.expanduser(recipe.lora.adapter_name_or_path))
    return adapted


def choose_layers(settings: Any, model: Any) -> Any:
    """The same settings without the parts that are trained whole, which peft would copy, and without routers: peft's
    all-linear takes those in that are linear layers."""
    adapters_alone = copy.deepcopy(settings)
    adapters_alone.modules_to_save = None
    adapters_alone.exclude_modules = list_router_layers(model) or None
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
            "target_modules, experts and modules_to_save"
        )
    for name, parameter in trained.items():
        weight = weights[files[name]]
        if tuple(get_shape(parameter)) != tuple(weight.shape):
            raise BuildError(
                f"{key}: {files[name]} in {path} has the shape {tuple(weight.shape)}, and here "
                f"{tuple(get_shape(parameter))}: another base model, or another lora.expert_r"
            )
        if not is_finite(weight):
            raise BuildError(f"{key}: {files[name]} in {path} holds {WORDS}")
        with gather_whole(parameter), torch.no_grad():
            parameter.copy_(weight)


# Columns with a value beyond a threshold would be computed in 16 bits for all tokens of a call: a token's result would
# depend on which others share the call, and so on sp_size and tiles.
NO_THRESHOLD = 0.0


def make_quantization_config(kind: str, dtype: torch.dtype) -> Any:
    """transformers' settings, with which it quantizes weights while it reads them."""
    from transformers import BitsAndBytesConfig

    if kind == "int8":
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=NO_THRESHOLD)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def quantize_layers(model: Any, kind: str, device: torch.device) -> None:
    """Replaces the linear layers of a model that is whole in memory, as transformers does while it reads files."""
    make: Callable[[nn.Linear, torch.device], nn.Linear] = _make_int8 if kind == "int8" else _make_nf4
    head = model.get_output_embeddings()
    for name, layer in list(model.named_modules()):
        if type(layer) is nn.Linear and layer is not head:
            made = make(layer, device)
            made.bias = layer.bias
            model.set_submodule(name, made.requires_grad_(False))
    model.to(device)
    setattr(model, "is_loaded_in_8bit" if kind == "int8" else "is_loaded_in_4bit", True)


def _make_nf4(layer: nn.Linear, device: torch.device) -> Any:
    from bitsandbytes.functional import quantize_4bit
    from bitsandbytes.nn import Linear4bit, Params4bit

    options: dict[str, Any] = {"compress_statistics": True, "quant_type": "nf4"}
    weight = layer.weight.detach().to(device)
    with torch.device("meta"):
        made = Linear4bit(layer.in_features, layer.out_features, bias=False, compute_dtype=weight.dtype, **options)
    codes, made.quant_state = quantize_4bit(weight, **options)
    made.weight = Params4bit(
        codes, requires_grad=False, quant_state=made.quant_state, module=made, bnb_quantized=True, **options
    )
    return made


def _make_int8(layer: nn.Linear, device: torch.device) -> Any:
    from bitsandbytes.functional import int8_vectorwise_quant
    from bitsandbytes.nn import Int8Params, Linear8bitLt

    with torch.device("meta"):
        made = Linear8bitLt(
            layer.in_features, layer.out_features, bias=False, has_fp16_weights=False, threshold=NO_THRESHOLD
        )
    codes, scales, _ = int8_vectorwise_quant(layer.weight.detach().to(device, torch.float16))
    made.weight = Int8Params(codes, requires_grad=False, CB=codes, SCB=scales)
    return made


def settle_layers(model: Any) -> None:
    """Keeps products in 8 bits from holding their inputs, and an evaluation on a CPU from packing 4-bit weights for its
    own kernel: a backward cannot read them then."""
    forget_inputs()
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def forget_inputs() -> None:
    """In this whole process. MatMul8bitLt keeps its input for a trained weight's gradient, also where the weight is
    frozen, and not by save_for_backward: neither recomputation nor offload sees it, so that all layers' inputs would
    stay. It also logs a line for each product of bfloat16 inputs."""
    from bitsandbytes.autograd import _functions

    plain = _functions.MatMul8bitLt
    if hasattr(plain, "forgets_inputs"):
        return

    class FrozenMatMul8bitLt(plain):  # type: ignore[misc, valid-type]
        forgets_inputs = True

        @staticmethod
        def forward(ctx: Any, *args: Any) -> Tensor:
            output: Tensor = plain.forward(ctx, *args)
            if not ctx.needs_input_grad[1]:
                ctx.tensors = (None, None, None)
            return output

    _functions.MatMul8bitLt = FrozenMatMul8bitLt
    logging.getLogger(_functions.__name__).setLevel(logging.ERROR)


def find_nonfinite_scale(model: Any) -> str:
    """The first quantized weight with a scale that is NaN or infinite, or ''. Codes hide what they were made from."""
    for name, parameter in model.named_parameters():
        state = getattr(parameter, "quant_state", None)
        scales = [getattr(parameter, "SCB", None)]
        if state is not None:
            scales = [state.offset, state.state2.absmax]
        if not all(is_finite(scale) for scale in scales if scale is not None):
            return str(name)
    return ""
