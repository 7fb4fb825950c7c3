"""Serves transformers' norms, rotary embedding and gated MLPs by the operators of this room. A part is served when it
computes what the formula does on small random tensors; any other part, and any other model, keeps transformers' code.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ulysses_cli.train.elementwise import formulas
from ulysses_cli.train.elementwise.formulas import NormKind
from ulysses_cli.train.elementwise.operators import Gate, Implementation, Normalize, Rotate

Part = Literal[NormKind, "rotary", "gate", "loss"]  # norms by their formula
Implementations = Mapping[Part, Implementation]
DTYPES = (torch.bfloat16, torch.float32)
ROTARY = "apply_rotary_pos_emb"
WIDTH, EPS = 64, 1e-2
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Served:
    """How many parts of a model run by the operators."""

    norms: int = 0
    rotations: int = 0
    gates: int = 0


def serve_elementwise(model: nn.Module, implementations: Implementations) -> Served:
    """Replaces forwards of the model's parts in place."""
    norms = rotations = gates = 0
    for module in list(model.modules()):
        if (kind := recognise_norm(module)) and implementations[kind] != "transformers":
            _FusedNorm(module, kind, implementations[kind])
            norms += 1
        elif implementations["gate"] != "transformers" and is_gated_mlp(module):
            _FusedMlp(module, implementations["gate"])
            gates += 1
        elif implementations["rotary"] != "transformers" and _serve_rotation(module):
            _choose_rotation(module, implementations["rotary"])
            rotations += 1
    return Served(norms, rotations, gates)


def find_norm_widths(model: nn.Module) -> dict[NormKind, set[int]]:
    """The formulas of the model's norms that can be served, each with the widths of its norms."""
    widths: dict[NormKind, set[int]] = {}
    for module in model.modules():
        if kind := recognise_norm(module):
            weight: Any = module.weight
            widths.setdefault(kind, set()).add(getattr(weight, "ds_shape", weight.shape)[-1])  # ZeRO-3 may hold a part
    return widths


def recognise_norm(module: nn.Module) -> NormKind | None:
    weight, eps = module._parameters.get("weight"), _find_eps(module)
    if weight is None or eps is None or weight.dtype not in DTYPES:
        return None
    has_more = len(list(module.parameters())) > 1 or next(module.buffers(), None) is not None
    if has_more or next(module.children(), None) is not None or "forward" in vars(module):
        return None
    norm_class: Any = type(module)
    with _disable_current_modes():  # a traced step has tensors without values
        return recognise_norm_class(norm_class)


@cache
def recognise_norm_class(norm_class: Any) -> NormKind | None:
    """Runs a small norm of the class on random numbers, and returns the formula that it computes, or None."""
    if len(inspect.signature(norm_class.forward).parameters) != 2:
        return None
    generator = torch.Generator().manual_seed(0)
    try:
        norm: Any = norm_class(WIDTH, eps=EPS)
        norm.weight.data = 0.5 + torch.rand(WIDTH, generator=generator)
        hidden = 0.1 * torch.randn(5, WIDTH, generator=generator)
        errors = {kind: _compare_norm(norm, hidden, kind) for kind in get_args(NormKind)}
        if _find_eps(norm) != EPS or min(errors.values()) > TOLERANCE:
            return None
        hidden, norm.weight.data = hidden.bfloat16(), norm.weight.data.bfloat16()
        able = [kind for kind, error in errors.items() if error <= TOLERANCE]
        return min(able, key=lambda kind: _compare_norm(norm, hidden, kind))
    except Exception:  # noqa: BLE001 - a class that cannot be made or run so is no plain norm
        return None


def _compare_norm(norm: Any, hidden: Tensor, kind: str) -> float:
    with torch.no_grad():
        difference = norm(hidden).float() - formulas.normalize(hidden, norm.weight, EPS, kind)[0].float()
    return difference.abs().max().item()


def _find_eps(module: nn.Module) -> float | None:
    eps = next((getattr(module, name) for name in ("variance_epsilon", "eps") if hasattr(module, name)), None)
    return eps if isinstance(eps, float) else None


class _FusedNorm:
    """A norm whose forward is replaced. `is_fused` tells memory levers that it keeps no float32 rows."""

    def __init__(self, norm: Any, kind: NormKind, implementation: Implementation) -> None:
        self.norm = norm
        self.kind = kind
        self.eps = _find_eps(norm)
        self.implementation = implementation
        self.original: Callable[[Tensor], Tensor] = norm.forward
        norm.forward, norm.is_fused = self._run, True

    def _run(self, hidden: Tensor) -> Tensor:
        weight = self.norm.weight
        if hidden.dtype != weight.dtype or hidden.size(-1) != weight.size(-1):
            return self.original(hidden)
        return Normalize.apply(hidden, weight, self.norm, self.eps, self.kind, self.implementation)


def is_gated_mlp(module: Any) -> bool:
    """Whether its result is down(silu(gate) * up), found by running it with stand-ins for its linear layers."""
    if not all(isinstance(getattr(module, name, None), nn.Module) for name in ("gate_proj", "up_proj", "down_proj")):
        return False
    with _disable_current_modes():
        generator = torch.Generator().manual_seed(0)
        gates, values, hidden = (torch.randn(3, WIDTH, generator=generator) for _ in range(3))
    results = {"gate_proj": lambda _: gates, "up_proj": lambda _: values, "down_proj": lambda wide: wide}
    layers = {name: getattr(module, name) for name in results}
    before = {name: vars(layer).get("forward") for name, layer in layers.items()}
    try:
        for name, layer in layers.items():
            layer.forward = results[name]
        with _disable_current_modes(), torch.no_grad():
            found = module.forward(hidden)
            expected = formulas.gate(gates, values)
            return isinstance(found, Tensor) and torch.allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)
    except Exception:  # noqa: BLE001 - a module that needs more than its input is another kind
        return False
    finally:
        for name, layer in layers.items():
            del layer.forward
            if before[name] is not None:
                layer.forward = before[name]


class _FusedMlp:
    def __init__(self, block: Any, implementation: Implementation) -> None:
        self.block, self.implementation = block, implementation
        block.forward = self._run

    def _run(self, hidden: Tensor) -> Tensor:
        gates, values = self.block.gate_proj(hidden), self.block.up_proj(hidden)
        return self.block.down_proj(Gate.apply(gates, values, self.implementation))


_rotary_implementation: ContextVar[Implementation] = ContextVar("rotary_way", default="transformers")


def _choose_rotation(layer: Any, implementation: Implementation) -> None:
    """While the attention layer runs, rotations go the chosen way. A mark on its cosines would not do: ZeRO-3's hooks
    copy what modules return."""
    original: Callable[..., Any] = layer.forward

    @wraps(original)
    def run(*args: Any, **options: Any) -> Any:
        token = _rotary_implementation.set(implementation)
        try:
            return original(*args, **options)
        finally:
            _rotary_implementation.reset(token)

    layer.forward = run


def _serve_rotation(layer: nn.Module) -> bool:
    """Replaces the function that the layer's code calls to rotate queries and keys, for all layers of that code. Inside
    a layer that is not served it does what it did."""
    forward = inspect.unwrap(type(layer).forward)
    names: dict[str, Any] = getattr(forward, "__globals__", {})
    original = names.get(ROTARY)
    if original is None or ROTARY not in forward.__code__.co_names:
        return False
    with _disable_current_modes():
        if not _computes_rotation(getattr(original, "__wrapped__", original)):
            return False
    if not hasattr(original, "is_served"):
        names[ROTARY] = _make_rotation(original)
    return True


@cache
def _computes_rotation(function: Callable[..., Any]) -> bool:
    """Whether it rotates pairs half of the rotated width apart, all elements or the first of them."""
    generator = torch.Generator().manual_seed(0)
    for width in (WIDTH, WIDTH // 2):
        query, key = (torch.randn(1, heads, 5, WIDTH, generator=generator) for heads in (4, 2))
        cos, sin = (torch.randn(1, 5, width, generator=generator) for _ in range(2))
        try:
            found = function(query, key, cos, sin)
        except Exception:  # noqa: BLE001 - another signature, or no partial rotation
            if width == WIDTH:
                return False
            continue
        expected = [formulas.rotate(each, cos[:, None], sin[:, None]) for each in (query, key)]
        for ours, right in zip(found, expected, strict=True):
            if ours.shape != right.shape or not torch.allclose(ours, right, rtol=TOLERANCE, atol=TOLERANCE):
                return False
    return True


def _rounds_its_result(function: Callable[..., Any]) -> bool:
    """Whether it takes float32 angles for bfloat16 rows (OLMo), and returns bfloat16."""
    rows, angles = torch.zeros(1, 1, 1, WIDTH, dtype=torch.bfloat16), torch.zeros(1, 1, WIDTH)
    return all(result.dtype == rows.dtype for result in function(rows, rows, angles, angles))


def _make_rotation(original: Callable[..., Any]) -> Callable[..., Any]:
    with _disable_current_modes():
        takes_precise = _rounds_its_result(getattr(original, "__wrapped__", original))

    @wraps(original)
    def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **options: Any) -> Any:
        implementation = _rotary_implementation.get()
        dim = args[0] if args else options.get("unsqueeze_dim", 1)
        is_plain = len(args) <= 1 and not options.keys() - {"unsqueeze_dim"} and not cos.requires_grad
        is_precise = takes_precise and cos.dtype == torch.float32 and implementation == "compiled"
        if implementation == "transformers" or not is_plain or (q.dtype != cos.dtype and not is_precise):
            return original(q, k, cos, sin, *args, **options)
        cos, sin = cos.unsqueeze(dim), sin.unsqueeze(dim)
        return Rotate.apply(q, cos, sin, implementation), Rotate.apply(k, cos, sin, implementation)

    apply.is_served = True  # type: ignore[attr-defined]
    return apply
