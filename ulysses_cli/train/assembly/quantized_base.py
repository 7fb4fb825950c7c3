"""The frozen base of adapters in 4 or 8 bits: bitsandbytes' own layers in place of every linear layer but the head.

Each rank holds the whole base. A weight is quantized on the rank's device as soon as it is read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

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
