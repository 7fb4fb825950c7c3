"""bitsandbytes' quantized layers on the fake device: plain parameters in place of tensor subclasses, and products that
make the tensors which bitsandbytes makes inside an operator on a GPU (bitsandbytes/backends/cuda/ops.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

NF4_BLOCK = 64  # weights that share a scale


def replace_parts() -> None:
    """In this whole process: use it in a child process."""
    import bitsandbytes
    from bitsandbytes.autograd import _functions

    for name in ("Params4bit", "Int8Params"):
        setattr(bitsandbytes.nn, name, make_parameter)
        setattr(bitsandbytes.nn.modules, name, make_parameter)
    _functions.torch = TorchWithProducts()


def make_parameter(data: Tensor, requires_grad: bool = False, **attributes: Any) -> torch.nn.Parameter:
    """A tensor without data cannot become an object of a subclass."""
    parameter = torch.nn.Parameter(data, requires_grad=False)
    for name, value in {"quant_state": None, "CB": None, "SCB": None, **attributes}.items():
        setattr(parameter, name, value)
    return parameter


def make_anew(model: torch.nn.Module, device: torch.device) -> None:
    """Makes what is not quantized on the device. Shared parameters stay shared."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None or tensor.device == device:
                    continue
                if id(tensor) not in made:
                    new = torch.empty_like(tensor, device=device)
                    made[id(tensor)] = torch.nn.Parameter(new) if isinstance(tensor, torch.nn.Parameter) else new
                tensors[name] = made[id(tensor)]


def multiply_nf4(
    hidden: Tensor, codes: Tensor, shape: list[int], *_: Any, bias: Tensor | None = None, **__: Any
) -> Tensor:
    """For many tokens: the scales and the weight are restored, then multiplied."""
    scales = hidden.new_empty(-(-shape[0] * shape[1] // NF4_BLOCK), dtype=torch.float32) + 0.0
    result = torch.nn.functional.linear(hidden, hidden.new_empty(shape), bias)
    del scales
    return result


def multiply_int8(
    hidden: Tensor, codes: Tensor, *_: Any, bias: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """The product's sums are 32-bit whole numbers; they are scaled to float16, then cast."""
    sums = hidden.new_empty((*hidden.shape[:-1], codes.shape[0]), dtype=torch.int32)
    return sums.to(torch.float16).to(dtype or torch.float16)


class Operator:
    def __init__(self, default: Callable[..., Tensor]) -> None:
        self.default = default


class Operators:
    gemm_4bit = Operator(multiply_nf4)
    int8_scaled_mm = Operator(multiply_int8)


class Namespaces:
    bitsandbytes = Operators()


class TorchWithProducts:
    """torch as bitsandbytes' products use it."""

    ops = Namespaces()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)
