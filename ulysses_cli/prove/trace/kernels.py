"""Stands in for kernels of packages on the fake device: functions that make the tensors which the kernels make on a
GPU, in their order, for recurrences, convolutions and bitsandbytes' quantized layers. Computes no value.

Sources: flash-linear-attention 0.5.2, mamba-ssm 2.3.2, causal-conv1d 1.6.1, bitsandbytes/backends/cuda/ops.py."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ulysses_cli.train.recurrence.interface import CONVOLUTION, DELTA_RULES, SCAN, list_recurrent_layers

DELTA_CHUNK = 64  # fla/ops/gated_delta_rule/chunk.py: chunk_size
DELTA_BLOCK, KEY_BLOCK = 16, 32  # fla/ops/kda/chunk_intra.py: BC, BK
WIDEST_TILE = 128  # fla/ops/common/chunk_o.py: CONST_TILING
PASSED_BLOCK, DT_ROWS = 64, 32  # mamba_ssm/ops/triton: ssd_state_passing.py, ssd_chunk_scan.py: BLOCK_SIZE_min

# Shapes. T tokens of whole rows, H heads of keys, V heads of values, K and D values of a head; G groups, N values of a
# state, C channels.


def replace_kernels(model: nn.Module) -> None:
    """In this whole process: use it in a child process. Call it before the layers are served. A function that
    transformers does not wrap has no kernel (LFM3's convolution is too wide for one) and runs as it is."""
    for module in {sys.modules[type(layer).__module__] for _, layer in list_recurrent_layers(model)}:
        for name, stand_in in STAND_INS.items():
            original = getattr(module, name, None)
            if hasattr(original, "__wrapped__") and not hasattr(original, "is_served"):
                setattr(module, name, stand_in)


def convolve(hidden: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None) -> Tensor:
    result: Tensor = _Convolution.apply(hidden, weight, bias)
    return result


class _Convolution(torch.autograd.Function):
    """causal_conv1d_interface.py: CausalConv1dFn. Takes [1, C, T]; the activation is part of the kernel."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        hidden = hidden if 1 in hidden.stride()[1:] else hidden.contiguous()
        ctx.save_for_backward(hidden, weight, bias)
        return torch.empty_like(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        grad = grad if 1 in grad.stride()[1:] else grad.contiguous()
        dweight = torch.empty_like(weight, dtype=torch.float32).to(weight.dtype)
        return torch.empty_like(hidden), dweight, None if bias is None else torch.empty_like(bias)


def apply_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    result: Tensor = _DeltaRule.apply(q, k, v, g, beta, use_qk_l2norm_in_kernel)
    return result, None


class _DeltaRule(torch.autograd.Function):
    """fla/ops/gated_delta_rule/chunk.py: ChunkGatedDeltaRuleFunction. Takes q and k [1, T, H, K], v [1, T, V, D], g and
    beta [1, T, V]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, normalizes: bool) -> Tensor:
        q, k, v, g, beta = (part.contiguous() for part in (q, k, v, g, beta))  # utils.py: input_guard
        q_scale = k_scale = None
        if normalizes:  # modules/l2norm.py: l2norm_fwd
            q, q_scale = torch.empty_like(q), _make_like(q, q.shape[:3], torch.float32)
            k, k_scale = torch.empty_like(k), _make_like(k, k.shape[:3], torch.float32)
        g = torch.empty_like(g, dtype=torch.float32)  # chunk_local_cumsum
        solved = _make_like(k, (*v.shape[:3], DELTA_CHUNK))  # chunk_fwd.py: A
        inside = _make_delta_parts(k, v)
        result = torch.empty_like(v)  # chunk_fwd_o
        del inside
        ctx.normalizes = normalizes
        ctx.save_for_backward(q, q_scale, k, k_scale, v, g, beta, solved)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, _, k, _, v, g, beta, _ = ctx.saved_tensors
        grad = grad.contiguous()
        inside = _make_delta_parts(k, v)
        dv = torch.empty_like(grad)  # chunk_bwd_dv_local
        dstates, dv = _make_states(k, v), torch.empty_like(dv)  # chunk_gated_delta_rule_bwd_dhu
        of_heads = (*v.shape[:3], k.size(3))
        dq, dk = _make_like(q, of_heads), _make_like(k, of_heads)  # chunk_bwd_dqkwg
        num_parts = -(-k.size(3) // WIDEST_TILE)
        dg, dw = _make_like(g, (num_parts, *g.shape), torch.float32), _make_like(k, of_heads)
        dq, dk, dg = _sum_groups(dq, q), _sum_groups(dk, k), dg.sum(0)
        dk_again, dv = _make_like(k, of_heads), torch.empty_like(v)  # prepare_wy_repr_bwd
        dg_again, dbeta = torch.empty_like(g), torch.empty_like(beta)
        dk_again = _sum_groups(dk_again, k)
        dg = torch.empty_like(dg)  # chunk_local_cumsum
        del inside, dstates, dw, dk_again, dg_again
        if ctx.normalizes:  # l2norm_bwd
            dq = torch.empty_like(q)
            dk = torch.empty_like(k)
        return dq, dk, dv, dg, dbeta, None


def _make_delta_parts(k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """w and u (wy_fast.py: recompute_w_u_fwd), the states of chunks and new values (chunk_delta_h.py:
    chunk_gated_delta_rule_fwd_h)."""
    w, u = _make_like(k, (*v.shape[:3], k.size(3))), torch.empty_like(v)
    return w, u, _make_states(k, v), torch.empty_like(u)


def _make_states(k: Tensor, v: Tensor) -> Tensor:
    batch, tokens, heads, dim = v.shape
    return _make_like(k, (batch, -(-tokens // DELTA_CHUNK), heads, k.size(3), dim))


def _sum_groups(of_heads: Tensor, like: Tensor) -> Tensor:
    """Gradients of keys that several heads of values share."""
    if of_heads.size(2) == like.size(2):
        return of_heads
    return of_heads.unflatten(2, (like.size(2), -1)).sum(3)


def apply_kimi_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    result: Tensor = _KimiDeltaRule.apply(query, key, value, g, beta, use_qk_l2norm_in_kernel)
    return result, None


class _KimiDeltaRule(torch.autograd.Function):
    """fla/ops/kda/chunk.py: ChunkKDAFunction. Takes q, k and v [1, T, H, K], g [1, T, H, K] and beta [1, T, H]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, normalizes: bool) -> Tensor:
        q, k, v, g, beta = (part.contiguous() for part in (q, k, v, g, beta))
        q_scale = k_scale = None
        if normalizes:
            q, q_scale = torch.empty_like(q), _make_like(q, q.shape[:3], torch.float32)
            k, k_scale = torch.empty_like(k), _make_like(k, k.shape[:3], torch.float32)
        total = torch.empty_like(g, dtype=torch.float32)  # chunk_local_cumsum
        products, solved = _make_like(k, (*k.shape[:3], DELTA_CHUNK)), _make_like(k, (*k.shape[:3], DELTA_CHUNK))
        diagonal = _make_like(k, (*k.shape[:3], DELTA_BLOCK), torch.float32)  # chunk_intra.py: Akkd
        parts = torch.empty_like(k), torch.empty_like(v), torch.empty_like(k)  # wy_fast.py: w, u, kg
        del diagonal
        inside = _make_states(k, v), torch.empty_like(v)
        result = torch.empty_like(v)  # gla/chunk.py: chunk_gla_fwd_o_gk
        del parts, inside
        ctx.normalizes = normalizes
        ctx.save_for_backward(q, q_scale, k, k_scale, v, total, g, beta, products, solved)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """chunk_bwd.py: chunk_kda_bwd."""
        q, _, k, _, v, total, g, beta, products, solved = ctx.saved_tensors
        grad = grad.contiguous()
        inside, decayed = _make_delta_parts(k, v), (torch.empty_like(q), torch.empty_like(k))
        dproducts, dv = torch.empty_like(products, dtype=torch.float32), torch.empty_like(grad)
        dstates, dv = _make_states(k, v), torch.empty_like(dv)
        dq, dk = torch.empty_like(q, dtype=torch.float32), torch.empty_like(k, dtype=torch.float32)
        dv, dg = torch.empty_like(v), torch.empty_like(total)
        dbeta = torch.empty_like(beta, dtype=torch.float32)
        dsolved = torch.empty_like(solved, dtype=torch.float32)
        dq_summed, dk_summed = torch.empty_like(dq), torch.empty_like(dk)  # chunk_intra.py: chunk_kda_bwd_intra
        num_parts = -(-k.size(3) // KEY_BLOCK)
        dbeta_parts, dg_summed = _make_like(beta, (num_parts, *beta.shape), torch.float32), torch.empty_like(dg)
        dbeta = dbeta_parts.sum(0)
        dq = dq_summed
        dk = dk_summed
        dg = dg_summed
        del dq_summed, dk_summed, dbeta_parts, dg_summed
        dg = torch.empty_like(dg)  # chunk_local_cumsum
        del inside, decayed, dproducts, dstates, dsolved
        if ctx.normalizes:
            dq = torch.empty_like(q)
            dk = torch.empty_like(k)
        return dq.to(q.dtype), dk.to(k.dtype), dv, dg.to(g.dtype), dbeta.to(beta.dtype), None


def apply_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    seq_idx: Tensor | None = None,
) -> Tensor:
    result: Tensor = _Scan.apply(x, dt, A, B, C, D, dt_bias, seq_idx, chunk_size)
    return result


class _Scan(torch.autograd.Function):
    """mamba_ssm/ops/triton/ssd_combined.py: MambaChunkScanCombinedFn. Takes x [1, T, V, D], dt [1, T, V], B and C
    [1, T, G, N], A, D and dt_bias [V]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None,
        dt_bias: Tensor | None,
        seq_idx: Tensor | None,
        chunk_size: int,
    ) -> Tensor:
        decay, steps = _make_steps(x, chunk_size), _make_steps(x, chunk_size)  # _chunk_cumsum_fwd
        states = _make_scan_states(x, B, chunk_size, torch.float32)  # _chunk_state_fwd
        states = _make_scan_states(x, B, chunk_size, C.dtype)  # _state_passing_fwd
        products = _make_products(B, chunk_size)  # _bmm_chunk_fwd
        result = torch.empty_like(x, memory_format=torch.contiguous_format)  # _chunk_scan_fwd
        del states, products, steps
        ctx.chunk_size = chunk_size
        ctx.save_for_backward(result, x, dt, decay, A, B, C, D, dt_bias, seq_idx)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _, x, dt, _, A, B, C, D, dt_bias, _ = ctx.saved_tensors
        size = ctx.chunk_size
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        dB_given, dC_given = (torch.empty_like(part, memory_format=torch.contiguous_format) for part in (B, C))
        ddt_given, dt_in = torch.empty_like(dt), dt.clone()
        decay, steps = _make_steps(x, size), _make_steps(x, size)
        products = _make_products(B, size)
        states = _make_scan_states(x, B, size, torch.float32)
        states = _make_scan_states(x, B, size, torch.float32)  # _state_passing_fwd
        dstates = _make_scan_states(x, B, size, torch.float32)  # _chunk_scan_bwd_dstates
        passed = (_make_scan_states(x, B, size, x.dtype), _make_scan_states(x, B, size, x.dtype))
        blocks = -(-states[0, 0, 0].numel() // PASSED_BLOCK)
        ddecay_of_chunk = _make_like(x, (*states.shape[:3], blocks), torch.float32).sum(-1)  # _state_passing_bwd
        dstates, states = passed
        del passed
        dx, ddt = torch.empty_like(x, memory_format=torch.contiguous_format), _make_steps(x, size)
        ddecay_next = _make_steps(x, size)
        dB = _make_like(B, (*B.shape[:2], 1, *B.shape[2:]), torch.float32).sum(2)  # _chunk_state_bwd_db
        ddecay_before = _make_steps(x, size)
        dC = _make_like(C, (*C.shape[:2], 1, *C.shape[2:]), torch.float32).sum(2)  # _chunk_scan_bwd_dC
        dproducts = _make_products(B, size).unsqueeze(2).sum(2)  # _chunk_scan_bwd_dcb
        ddecay_before = ddecay_before.flip([-1]).cumsum(-1).flip([-1])
        rows = (*steps.shape[:3], -(-size // DT_ROWS), size)
        ddecay = _make_like(x, rows, torch.float32).sum(3)  # _chunk_scan_bwd_ddAcs_stable
        of_heads = [None if part is None else torch.empty_like(part) for part in (A, D, dt_bias)]
        del products, dproducts, states, dstates, dB, dC, steps, decay, dt_in, ddt, ddecay
        del ddecay_next, ddecay_before, ddecay_of_chunk
        return dx, ddt_given, of_heads[0], dB_given, dC_given, *of_heads[1:], None, None


def _make_steps(x: Tensor, chunk_size: int) -> Tensor:
    """[1, V, chunks, tokens of a chunk], float32."""
    return _make_like(x, (x.size(0), x.size(2), -(-x.size(1) // chunk_size), chunk_size), torch.float32)


def _make_scan_states(x: Tensor, B: Tensor, chunk_size: int, dtype: torch.dtype) -> Tensor:
    """A state for each chunk and head, [1, chunks, V, D, N]."""
    return _make_like(x, (x.size(0), -(-x.size(1) // chunk_size), *x.shape[2:], B.size(3)), dtype)


def _make_products(B: Tensor, chunk_size: int) -> Tensor:
    """C times B for all pairs of tokens in a chunk, float32 [1, chunks, G, tokens of a chunk, tokens of a chunk]."""
    chunks = -(-B.size(1) // chunk_size)
    return _make_like(B, (B.size(0), chunks, B.size(2), chunk_size, chunk_size), torch.float32)


def _make_like(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(shape, dtype=dtype or tensor.dtype, device=tensor.device)


STAND_INS = {
    CONVOLUTION: convolve,
    DELTA_RULES[0]: apply_delta_rule,
    DELTA_RULES[1]: apply_kimi_delta_rule,
    SCAN: apply_scan,
}


NF4_BLOCK = 64  # weights that share a scale


def replace_quantized_parts() -> None:
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
