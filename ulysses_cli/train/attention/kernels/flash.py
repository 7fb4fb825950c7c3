"""FlashAttention 2, 3 and 4 by their raw forward and backward, from an installed package or the hub's kernel.

Never required. Signatures differ between releases, so arguments are chosen by inspecting them; choice.py's probe checks
the results. All are called without autograd: some of their own operators would differentiate packed rows wrongly.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ulysses_cli.train.attention.documents import Documents
from ulysses_cli.train.attention.kernels.native import Rule, list_bounds

Forward = Callable[[Tensor, Tensor, Tensor, Documents, Rule], tuple[Tensor, Tensor]]
Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]


class Version(NamedTuple):
    """`find_missing` checks the package alone: the hub's kernel is downloaded only when the recipe names it."""

    forward: Forward
    backward: Backward
    find_missing: Callable[[], str]


@torch.no_grad()
def forward_2(q: Tensor, k: Tensor, v: Tensor, documents: Documents, rule: Rule) -> tuple[Tensor, Tensor]:
    call = _load("flash_attn.flash_attn_interface", "kernels-community/flash-attn2", 4)._flash_attn_varlen_forward
    left, right = _get_sides(rule, unlimited=-1)
    out, lse, *_ = call(
        q, k, v, *list_bounds(documents), 0.0, rule.scale, rule.is_causal,
        window_size_left=left, window_size_right=right, softcap=rule.softcap or 0.0,
    )  # fmt: skip
    return out, lse


@torch.no_grad()
def backward_2(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, documents: Documents, rule: Rule
) -> tuple[Tensor, Tensor, Tensor]:
    call = _load("flash_attn.flash_attn_interface", "kernels-community/flash-attn2", 4)._flash_attn_varlen_backward
    dq, dk, dv = (torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in (q, k, v))
    left, right = _get_sides(rule, unlimited=-1)
    call(
        dout, q, k, v, out, lse, dq, dk, dv, *list_bounds(documents), 0.0, rule.scale, rule.is_causal,
        window_size_left=left, window_size_right=right, softcap=rule.softcap or 0.0,
        alibi_slopes=None, deterministic=torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    return dq, dk, dv


@torch.no_grad()
def forward_3(q: Tensor, k: Tensor, v: Tensor, documents: Documents, rule: Rule) -> tuple[Tensor, Tensor]:
    call = _load("flash_attn_interface", "kernels-community/flash-attn3", 1)._flash_attn_forward
    out, lse, *_ = _call_by_name(
        call,
        {"q": q, "k": k, "v": v, "softmax_scale": rule.scale, "causal": rule.is_causal, "softcap": rule.softcap or 0.0},
        documents,
        rule,
    )
    return out, lse


@torch.no_grad()
def backward_3(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, documents: Documents, rule: Rule
) -> tuple[Tensor, Tensor, Tensor]:
    call = _load("flash_attn_interface", "kernels-community/flash-attn3", 1)._flash_attn_backward
    dq, dk, dv = (torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in (q, k, v))
    arguments = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "softmax_lse": lse, "dq": dq, "dk": dk, "dv": dv}
    arguments |= {"softmax_scale": rule.scale, "softcap": rule.softcap or 0.0}
    arguments |= {"causal": rule.is_causal, "is_causal": rule.is_causal}
    arguments["deterministic"] = torch.are_deterministic_algorithms_enabled()
    _call_by_name(call, arguments, documents, rule)
    return dq, dk, dv


@torch.no_grad()
def forward_4(q: Tensor, k: Tensor, v: Tensor, documents: Documents, rule: Rule) -> tuple[Tensor, Tensor]:
    call = _load("flash_attn.cute.interface", "kernels-community/flash-attn4", 0)._flash_attn_fwd
    left, right = _get_sides(rule, unlimited=None)
    out, lse = call(
        q, k, v, **_name_bounds(documents),
        softmax_scale=rule.scale, causal=rule.is_causal, window_size_left=left, window_size_right=right,
        return_lse=True,
    )[:2]  # fmt: skip
    return out, lse


@torch.no_grad()
def backward_4(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, documents: Documents, rule: Rule
) -> tuple[Tensor, Tensor, Tensor]:
    call = _load("flash_attn.cute.interface", "kernels-community/flash-attn4", 0)._flash_attn_bwd
    left, right = _get_sides(rule, unlimited=None)
    dq, dk, dv = call(
        q, k, v, out, dout, lse, **_name_bounds(documents),
        softmax_scale=rule.scale, causal=rule.is_causal, window_size_left=left, window_size_right=right,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )[:3]  # fmt: skip
    return dq, dk, dv


def _find_missing(module: str) -> Callable[[], str]:
    return lambda: "is not installed" if not has_module(module) else ""


def has_module(module: str) -> bool:
    """Whether its file is there. Runs no code of the package, as `find_spec` of a dotted name does: that may raise
    anything, or end this process."""
    top, *inner = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or not inner:
        return spec is not None
    folders = [Path(folder).joinpath(*inner[:-1]) for folder in spec.submodule_search_locations or ()]
    return any(any(folder.glob(f"{inner[-1]}{end}")) for folder in folders for end in (".py", ".*.so", "/__init__.py"))


VERSIONS: dict[str, Version] = {
    "flash_attention_2": Version(forward_2, backward_2, _find_missing("flash_attn.flash_attn_interface")),
    "flash_attention_3": Version(forward_3, backward_3, _find_missing("flash_attn_interface")),
    "flash_attention_4": Version(forward_4, backward_4, _find_missing("flash_attn.cute.interface")),
}


@cache
def _load(module: str, hub_name: str, hub_version: int) -> Any:
    """The package's module, or the same module inside the hub's kernel, in the version that transformers takes."""
    if has_module(module):
        return importlib.import_module(module)
    if importlib.util.find_spec("kernels") is None:
        raise ImportError(f"neither {module} nor the `kernels` package that would load {hub_name} is installed")
    from kernels import get_kernel

    return getattr(get_kernel(hub_name, version=hub_version), module.rpartition(".")[2])


def _call_by_name(call: Callable[..., Any], arguments: dict[str, Any], documents: Documents, rule: Rule) -> Any:
    """Passes the arguments that the release of FlashAttention-3 has: their names and the form of a window differ."""
    names = inspect.signature(getattr(call, "_init_fn", call)).parameters
    left, right = _get_sides(rule, unlimited=-1)
    offered = {
        **arguments,
        **_name_bounds(documents),
        "window_size": (left, right),
        "window_size_left": left,
        "window_size_right": right,
    }
    for needed in ({"softmax_scale"}, {"causal", "is_causal"}, {"window_size", "window_size_left"}, {"softcap"}):
        if not needed & names.keys():
            raise TypeError(f"this release of FlashAttention-3 takes no {' or '.join(sorted(needed))}")
    required = {name for name, parameter in names.items() if parameter.default is parameter.empty}
    return call(**{**dict.fromkeys(required), **{name: value for name, value in offered.items() if name in names}})


def _name_bounds(documents: Documents) -> dict[str, Any]:
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    return dict(zip(names, list_bounds(documents), strict=True))


def _get_sides(rule: Rule, unlimited: int | None) -> tuple[int | None, int | None]:
    """Tokens before and after the query's own that it attends to."""
    return (unlimited, unlimited) if rule.window_tokens is None else (rule.window_tokens - 1, 0)
