"""The frozen base of adapters in 4 or 8 bits: bitsandbytes' own layers in place of every linear layer but the head.

Each rank holds the whole base. A weight is quantized on the rank's device as soon as it is read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ulysses_cli.train.finiteness import is_finite

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
    """Keeps an evaluation on a CPU from packing 4-bit weights for its own kernel: a backward cannot read them then."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


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
