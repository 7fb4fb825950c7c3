"""Attention on [tokens, heads, head_dim] with document bounds: the table of kernels, and sinks for all of them.

`attend` and `attend_backward` are torch operators, so that tracing has their shapes and FLOP counters count them.
plan/attention.py lists what each kernel supports.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, library
from torch.nn.functional import pad
from torch.utils.flop_counter import register_flop_formula

from ulysses_cli.plan.rows.ring import count_pairs
from ulysses_cli.train.attention.documents import Documents
from ulysses_cli.train.attention.kernels import flash, native
from ulysses_cli.train.attention.kernels.native import Rule, add_sinks
from ulysses_cli.train.choosing import call_operator
from ulysses_cli.train.clock import part_of_step


class Kernel(NamedTuple):
    """`find_missing`: why this machine lacks it, or ''. `needs_autograd`: autograd computes its backward. `is_foreign`:
    of another package than torch."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    find_missing: Callable[[], str] = lambda: ""
    needs_autograd: bool = False
    is_foreign: bool = False


KERNELS: dict[str, Kernel] = {
    "sdpa": Kernel(native.forward_sdpa, native.backward_sdpa),
    "torch_varlen": Kernel(native.forward_varlen, native.backward_varlen),
    "cudnn": Kernel(native.forward_cudnn, native.backward_cudnn),
    "flex_attention": Kernel(native.forward_flex, native.backward_flex, needs_autograd=True),
    **{
        name: Kernel(back_end.forward, back_end.backward, back_end.find_missing, is_foreign=True)
        for name, back_end in flash.VERSIONS.items()
    },
}


@library.custom_op("ulysses::attend", mutates_args=())
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    cu_seqlens: Tensor,
    lengths: Sequence[int],
    key_cu_seqlens: Tensor,
    key_lengths: Sequence[int],
    kernel: str,
    scale: float,
    window_tokens: int | None,
    softcap: float | None,
    is_causal: bool = True,
) -> tuple[Tensor, Tensor]:
    """Attention inside documents, whose queries are the last of their keys or stand behind all of them. Returns out
    [tokens, heads, V] and log-sum-exp [heads, tokens]. A sink is a logit of its head with weight but no value: it only
    raises the log-sum-exp, so any kernel that returns that supports sinks."""
    documents = Documents(tuple(lengths), cu_seqlens, tuple(key_lengths), key_cu_seqlens)
    rule = Rule(scale, window_tokens, softcap, is_causal)
    with torch.autocast(q.device.type, enabled=False), part_of_step("attention"):
        out, lse = KERNELS[kernel].forward(*_widen(q, k, v), documents, rule)
        out, lse = out[..., : v.size(2)].contiguous(), lse.contiguous()
        return (out, lse) if sinks is None else add_sinks(out, lse, sinks)


@attend.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, cu_seqlens: Tensor, lengths: Sequence[int],
    key_cu_seqlens: Tensor, key_lengths: Sequence[int],
    kernel: str, scale: float, window_tokens: int | None, softcap: float | None, is_causal: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    precision = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*q.shape[:2], v.size(2))), q.new_empty((q.size(1), q.size(0)), dtype=precision)


@library.custom_op("ulysses::attend_backward", mutates_args=())
def attend_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    lengths: Sequence[int],
    key_cu_seqlens: Tensor,
    key_lengths: Sequence[int],
    kernel: str,
    scale: float,
    window_tokens: int | None,
    softcap: float | None,
    is_causal: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v. With the raised log-sum-exp, a kernel's own backward is that of attention with sinks:
    it computes the weights as exp(logit - lse) and their mean from dout and out, and both already include the sink.
    So do those of the other keys, when these are one block of several."""
    documents = Documents(tuple(lengths), cu_seqlens, tuple(key_lengths), key_cu_seqlens)
    rule = Rule(scale, window_tokens, softcap, is_causal)
    with torch.autocast(q.device.type, enabled=False), part_of_step("attention"):
        dq, dk, dv = _call_backward(kernel, dout, q, k, v, out, lse, documents, rule)
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


@attend_backward.register_fake
def _(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_seqlens: Tensor,
    lengths: Sequence[int], key_cu_seqlens: Tensor, key_lengths: Sequence[int],
    kernel: str, scale: float, window_tokens: int | None, softcap: float | None, is_causal: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def run_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Calls the operator. A kernel whose backward is autograd's runs outside of it: inside, autograd records
    nothing."""
    cu_seqlens, lengths, key_cu_seqlens, key_lengths, kernel, *rule = options
    if not KERNELS[kernel].needs_autograd:
        grads: tuple[Tensor, Tensor, Tensor] = call_operator(attend_backward, dout, q, k, v, out, lse, *options)
        return grads
    with torch.autocast(q.device.type, enabled=False), part_of_step("attention"):
        documents = Documents(tuple(lengths), cu_seqlens, tuple(key_lengths), key_cu_seqlens)
        return _call_backward(kernel, dout, q, k, v, out, lse, documents, Rule(*rule))


def _call_backward(
    kernel: str, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *row: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Where values are narrower than keys, the gradient of what was filled up is dropped; it is zero."""
    wide = _widen(dout, q, k, v, out)
    dq, dk, dv = KERNELS[kernel].backward(*wide, lse, *row)
    return dq[..., : q.size(2)], dk[..., : k.size(2)], dv[..., : v.size(2)]


def _widen(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Fills up heads with zeros to one width, which kernels expect: zeros add nothing to a logit, and a zero of a value
    makes a zero of the output."""
    width = max(tensor.size(2) for tensor in tensors)
    return tuple(tensor if tensor.size(2) == width else pad(tensor, (0, width - tensor.size(2))) for tensor in tensors)


def compute_sink_gradient(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Returns the gradient of the sinks, [heads]. A sink's weight is exp(sink - lse); raising the sink takes that share
    from the token's output. Works on one head at a time, so that no float32 copy of whole rows exists."""
    dsinks = torch.empty(sinks.shape, dtype=lse.dtype, device=sinks.device)
    for head in range(sinks.size(0)):
        products = (dout[:, head].to(lse.dtype) * out[:, head].to(lse.dtype)).sum(-1)
        dsinks[head] = -(torch.exp(sinks[head].to(lse.dtype) - lse[head]) * products).sum()
    return dsinks.to(sinks.dtype)


def list_options(documents: Documents, kernel: str, rule: Rule) -> tuple[Any, ...]:
    """The arguments of both operators after their tensors."""
    bounds = documents.cu_seqlens, documents.lengths, documents.key_cu_seqlens, documents.key_lengths
    return *bounds, kernel, rule.scale, rule.window_tokens, rule.softcap, rule.is_causal


@register_flop_formula(torch.ops.ulysses.attend)
def _count_forward_flops(q: Sequence[int], *args: Any, **kwargs: Any) -> int:
    value, (lengths, _, key_lengths, _, *rule) = args[1], args[4:]
    return 2 * q[1] * (q[2] + value[2]) * _count_pairs(lengths, key_lengths, Rule(*rule))


@register_flop_formula(torch.ops.ulysses.attend_backward)
def _count_backward_flops(dout: Sequence[int], *args: Any, **kwargs: Any) -> int:
    query, (lengths, _, key_lengths, _, *rule) = args[0], args[6:]
    return 2 * dout[1] * (3 * query[2] + 2 * dout[2]) * _count_pairs(lengths, key_lengths, Rule(*rule))


def _count_pairs(lengths: Sequence[int], key_lengths: Sequence[int], rule: Rule) -> int:
    """(query, key) pairs, where the queries of a document are the last of its keys, or behind them."""
    if not rule.is_causal:
        return sum(queries * keys for queries, keys in zip(lengths, key_lengths, strict=True))
    window_tokens = rule.window_tokens
    return sum(
        count_pairs(keys, window_tokens) - count_pairs(keys - queries, window_tokens)
        for queries, keys in zip(lengths, key_lengths, strict=True)
    )
