"""Each function of formulas.py as a torch operator, in the way that was chosen: torch's own fused kernel, the compiled
formula, or the formula in blocks. Tracing has their shapes, and compiled code treats them as one operation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any, Literal

import torch
from torch import Tensor, library

from ulysses_cli.plan.rows.indexing import RMS_NORM, split_rows
from ulysses_cli.train.elementwise import formulas
from ulysses_cli.train.processes.compiling import compile_for_all_threads

# transformers: its own code stays as it is.
Way = Literal["torch", "compiled", "blocks", "transformers"]


@library.custom_op("ulysses::normalize", mutates_args=())
def normalize(hidden: Tensor, weight: Tensor, eps: float, kind: str, way: str) -> tuple[Tensor, Tensor]:
    """Returns the output and one float32 number for each row, which the backward needs."""
    parts = split_rows(math.prod(hidden.shape[:-1]), hidden.nbytes, *RMS_NORM)
    if len(parts) == 1:
        return _normalize(hidden, weight, eps, kind, way)
    rows, out = hidden.flatten(0, -2), torch.empty_like(hidden)
    rstd = hidden.new_empty((*hidden.shape[:-1], 1), dtype=torch.float32)
    for part in parts:
        results = _normalize(rows[part], weight, eps, kind, way)
        for whole, result in zip((out, rstd), results, strict=True):
            whole.flatten(0, -2)[part] = result
    return out, rstd


def _normalize(hidden: Tensor, weight: Tensor, eps: float, kind: str, way: str) -> tuple[Tensor, Tensor]:
    if way == "torch":
        assert kind != "offset", "torch's kernel scales by the weight alone"
        return torch.ops.aten._fused_rms_norm(hidden, weight.shape, weight, eps)
    if way == "compiled":
        return compile_once(formulas.normalize, hidden.size(-1), kind)(hidden, weight, eps, kind)
    return formulas.normalize_in_blocks(hidden, weight, eps, kind)


@normalize.register_fake
def _(hidden: Tensor, weight: Tensor, eps: float, kind: str, way: str) -> tuple[Tensor, Tensor]:
    return torch.empty_like(hidden), hidden.new_empty((*hidden.shape[:-1], 1), dtype=torch.float32)


@library.custom_op("ulysses::normalize_backward", mutates_args=())
def normalize_backward(
    dout: Tensor, hidden: Tensor, weight: Tensor, rstd: Tensor, kind: str, way: str
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of the input and of the weight."""
    parts = split_rows(math.prod(hidden.shape[:-1]), hidden.nbytes, *RMS_NORM)
    if len(parts) == 1:
        dhidden, dweight = _normalize_backward(dout, hidden, weight, rstd, kind, way)
        return dhidden, dweight.to(weight.dtype)
    dhidden, dweight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
    grads, rows, inverse = (tensor.flatten(0, -2) for tensor in (dout, hidden, rstd))
    for part in parts:
        dhidden.flatten(0, -2)[part], share = _normalize_backward(
            grads[part], rows[part], weight, inverse[part], kind, way
        )
        dweight += share
    return dhidden, dweight.to(weight.dtype)


def _normalize_backward(
    dout: Tensor, hidden: Tensor, weight: Tensor, rstd: Tensor, kind: str, way: str
) -> tuple[Tensor, Tensor]:
    """The weight's gradient is in float32, but for torch's own kernel, which rounds it."""
    if way == "torch":
        return torch.ops.aten._fused_rms_norm_backward(
            dout.contiguous(), hidden, weight.shape, rstd, weight, [True, True]
        )
    compute = formulas.normalize_backward_in_blocks
    if way == "compiled":
        compute = compile_once(formulas.normalize_backward, hidden.size(-1), kind)
    return compute(dout, hidden, weight, rstd, kind)


@normalize_backward.register_fake
def _(dout: Tensor, hidden: Tensor, weight: Tensor, rstd: Tensor, kind: str, way: str) -> tuple[Tensor, Tensor]:
    return torch.empty_like(hidden), torch.empty_like(weight)


@library.custom_op("ulysses::rotate", mutates_args=())
def rotate(hidden: Tensor, cos: Tensor, sin: Tensor, way: str) -> Tensor:
    return _pick(way, formulas.rotate, formulas.rotate_in_blocks, hidden, cos)(hidden, cos, sin)


@rotate.register_fake
def _(hidden: Tensor, cos: Tensor, sin: Tensor, way: str) -> Tensor:
    return torch.empty_like(hidden)


@library.custom_op("ulysses::rotate_backward", mutates_args=())
def rotate_backward(dout: Tensor, cos: Tensor, sin: Tensor, way: str) -> Tensor:
    return _pick(way, formulas.rotate_backward, formulas.rotate_backward_in_blocks, dout, cos)(dout, cos, sin)


@rotate_backward.register_fake
def _(dout: Tensor, cos: Tensor, sin: Tensor, way: str) -> Tensor:
    return torch.empty_like(dout)


@library.custom_op("ulysses::gate", mutates_args=())
def gate(gates: Tensor, values: Tensor, way: str) -> Tensor:
    return _pick(way, formulas.gate, formulas.gate, gates)(gates, values)


@gate.register_fake
def _(gates: Tensor, values: Tensor, way: str) -> Tensor:
    return torch.empty_like(gates)


@library.custom_op("ulysses::gate_backward", mutates_args=())
def gate_backward(dout: Tensor, gates: Tensor, values: Tensor, way: str) -> tuple[Tensor, Tensor]:
    return _pick(way, formulas.gate_backward, formulas.gate_backward, gates)(dout, gates, values)


@gate_backward.register_fake
def _(dout: Tensor, gates: Tensor, values: Tensor, way: str) -> tuple[Tensor, Tensor]:
    return torch.empty_like(gates), torch.empty_like(values)


def _pick(way: str, formula: Callable[..., Any], on_cpu: Callable[..., Any], *tensors: Tensor) -> Callable[..., Any]:
    return compile_once(formula, *(tensor.size(-1) for tensor in tensors)) if way == "compiled" else on_cpu


@cache
def compile_once(function: Callable[..., Any], *kind: Any) -> Callable[..., Any]:
    """One compiled function for each width, so that only the number of tokens is a variable of the kernel. torch keeps
    what it has compiled by code and name: two widths of one function would make the width a variable, and many kinds of
    inputs would be refused. A width alone has many: with gradients or without, one head or several, one token or many,
    rows past what 32 bits count."""
    code, name = function.__code__, "_".join(map(str, (function.__name__, *kind)))
    own = FunctionType(code.replace(co_name=name), function.__globals__, name, function.__defaults__)
    return compile_for_all_threads(own, fullgraph=True)
