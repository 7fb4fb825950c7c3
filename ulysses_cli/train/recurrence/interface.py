"""transformers' recurrent and convolution layers, cut at their modeling module's functions: no forward is copied.

A function that is replaced looks for `documents` and `sequence_axis` among its keyword arguments, which the model's
forward hands on to every layer. Without them it does what it did before: nothing about a run is global.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from ulysses_cli.train.recurrence.convolution import convolve
from ulysses_cli.train.recurrence.rules import apply_delta_rule, apply_scan

CONVOLUTION, FUSED, SCAN = "causal_conv1d_fn", "mamba2_split_conv1d_scan_combined", "mamba2_chunk_scan"
DELTA_RULES = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")
# What layers pass on that concerns no recurrence.
PASSED_ON = frozenset(
    {"position_ids", "cache_position", "position_embeddings", "use_cache", "output_attentions", "output_hidden_states"}
    | {"return_dict", "num_items_in_batch", "output_router_logits", "labels", "seq_idx", "cu_seqlens", "cu_seq_lens_q"}
)


class UnknownLayersError(ValueError):
    """The modeling module's functions are not those that this version knows."""


def serve_recurrent_layers(model: torch.nn.Module) -> list[str]:
    """Replace the functions of the modules that define the model's layers -> their names. A second call changes
    nothing."""
    modules = {sys.modules[type(layer).__module__] for layer in model.modules()}
    replaced = []
    for module in modules:
        for name, make in REPLACEMENTS.items():
            function = getattr(module, name, None)
            if function is None:
                continue
            replaced.append(f"{module.__name__}.{name}")
            if not hasattr(function, "on_whole_rows"):
                setattr(module, name, make(function))
    return sorted(replaced)


def find_unserved_layers(model: torch.nn.Module) -> list[str]:
    """Names of layers with a convolution or a state whose modeling module has no function to replace."""
    unserved = []
    for name, layer in model.named_modules():
        has_state = any(hasattr(layer, each) for each in ("A_log", "conv1d")) or type(layer).__name__.endswith(
            "ShortConv"
        )
        module = sys.modules[type(layer).__module__]
        if has_state and not any(hasattr(getattr(module, each, None), "on_whole_rows") for each in REPLACEMENTS):
            unserved.append(name)
    return unserved


def _split(options: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    documents, axis = options.pop("documents", None), options.pop("sequence_axis", None)
    return documents, axis, {name: value for name, value in options.items() if name not in PASSED_ON}


def _make_convolution(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(original)
    def convolution(
        hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **options: Any
    ) -> Tensor:
        documents, axis, rest = _split(options)
        if documents is None:
            return original(hidden_states, weight, bias, activation=activation, **options)
        return convolve(original, hidden_states, weight, bias, documents, axis, activation=activation, **rest)

    return _mark(convolution, original)


def _make_delta_rule(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **options: Any) -> Any:
        documents, axis, rest = _split(options)
        if documents is None:
            return original(query, key, value, g=g, beta=beta, **options)
        _refuse_states(rest, "initial_state", "output_final_state")
        return apply_delta_rule(original, query, key, value, g, beta, documents, axis, **rest), None

    return _mark(rule, original)


def _make_scan(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def scan(hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **options: Any) -> Any:
        documents, axis, rest = _split(options)
        if documents is None:
            return original(hidden_states, dt, A, B, C, **options)
        _refuse_states(rest, "initial_states", "return_final_states")
        skip, dt_bias = rest.pop("D", None), rest.pop("dt_bias", None)
        if rest.get("z") is not None:
            raise UnknownLayersError("a scan with a gate of its own is not known to be exact on split rows")
        return apply_scan(
            original, hidden_states, dt, A, B, C, documents, axis, skip=skip, dt_bias=dt_bias, **rest
        )  # fmt: skip

    return _mark(scan, original)


def _make_fused(original: Callable[..., Any]) -> Callable[..., Any]:
    """Convolution, scan, norm and projection in one kernel cannot be cut: the layer then takes its unfused path."""

    @wraps(original)
    def fused(*args: Any, **options: Any) -> Any:
        return None if options.get("documents") is not None else original(*args, **options)

    return _mark(fused, original)


def _mark(function: Any, original: Any) -> Any:
    function.on_whole_rows = original
    return function


def _refuse_states(options: dict[str, Any], *names: str) -> None:
    for name in names:
        if options.pop(name, None) not in (None, False):
            raise UnknownLayersError(f"{name}: states of a cache do not go with split rows")


REPLACEMENTS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    CONVOLUTION: _make_convolution,
    FUSED: _make_fused,
    SCAN: _make_scan,
    **dict.fromkeys(DELTA_RULES, _make_delta_rule),
}
