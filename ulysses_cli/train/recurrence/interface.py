"""Serves transformers' convolution and recurrent layers on split rows, at the functions of their modeling modules: no
layer's forward is copied.

A hook hands each such layer a RecurrentCall among its keyword arguments, which the layer passes on to the functions
that are replaced here. A function that gets none does what it did before: nothing about a run is global.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, Protocol

import torch
import transformers
from torch import Tensor, nn

from ulysses_cli.train.attention.documents import Documents
from ulysses_cli.train.attention.interface import IGNORED_ARGUMENTS, UnservedError
from ulysses_cli.train.clock import part_of_step, watch_backward
from ulysses_cli.train.processes.groups import SequenceAxis
from ulysses_cli.train.recurrence.convolution import convolve
from ulysses_cli.train.recurrence.rules import Kernel, StateKeeper, apply_delta_rule, apply_scan, pick_function

CALL = "recurrent_call"
CONVOLUTION, FUSED, SCAN = "causal_conv1d_fn", "mamba2_split_conv1d_scan_combined", "mamba2_chunk_scan"
DELTA_RULES = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")
RECURRENCES = (*DELTA_RULES, SCAN)


class UnknownLayersError(ValueError):
    """Layers whose modeling module does not have the functions that this version replaces."""


class CachedStates(StateKeeper, Protocol):
    """Inputs of convolutions and states of recurrences that are kept, for generation."""

    def convolve(
        self, slices: Tensor, num_before: int, run: Callable[[Tensor], Tensor], run_split: Callable[[], Tensor]
    ) -> Tensor:
        """`run` looks back over `num_before` tokens. Collective over the axis."""


@dataclass(eq=False)
class RecurrentCall:
    """One call of a layer. `kernels`: how functions run, by their names. `reached`: names of the replaced functions
    that it has called so far. `documents` are those of rows; a call that generates has `generation`."""

    documents: Documents | None
    axis: SequenceAxis
    kernels: Mapping[str, Kernel] = field(default_factory=dict)
    reached: set[str] = field(default_factory=set)
    generation: CachedStates | None = None

    def get_documents(self) -> Documents:
        assert self.documents is not None, "a call without documents keeps its states"
        return self.documents

    def pick_kernel(self, name: str) -> Kernel:
        self.reached.add(name)
        return self.kernels.get(name, "by document")


def serve_recurrent_layers(model: nn.Module, axis: SequenceAxis, kernels: Mapping[str, Kernel] | None = None) -> int:
    """Makes the model's convolution and recurrent layers exact on rows that are split over `axis`. Returns their
    number. The model's forward then takes `documents`, as its attention does.

    `kernels`: how each function runs; transformers decides where it says nothing.
    """
    layers = dict(list_recurrent_layers(model))
    for module in {sys.modules[type(layer).__module__] for layer in layers.values()}:
        for name, make in REPLACEMENTS.items():
            function = getattr(module, name, None)
            if function is not None and not hasattr(function, "is_served"):
                setattr(module, name, make(function))
    unserved = find_unserved_layers(model)
    if unserved:
        raise UnknownLayersError(
            f"transformers {transformers.__version__} has these layers in a form that ulysses does not know, so they "
            f"cannot be exact on split rows: {'; '.join(unserved)}; another release of transformers may have them"
        )
    for name, layer in layers.items():
        layer.register_forward_pre_hook(_make_entry(name, axis, kernels or {}), with_kwargs=True)
        layer.register_forward_hook(_make_exit(name, _has_state(layer)), with_kwargs=True)
    return len(layers)


def list_recurrent_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Names and modules of layers with a causal convolution or a state."""
    for name, module in model.named_modules():
        if any(isinstance(child, nn.Conv1d) for child in module.children()):
            yield name, module


def list_functions(model: nn.Module) -> dict[str, Callable[..., Any]]:
    """transformers' functions that the model's layers call and that have kernels, by name."""
    functions = {}
    for module in {sys.modules[type(layer).__module__] for _, layer in list_recurrent_layers(model)}:
        for name in (CONVOLUTION, *RECURRENCES):
            function = getattr(module, name, None)
            if function is not None:
                functions[name] = function.__wrapped__ if hasattr(function, "is_served") else function
    return functions


def find_unserved_layers(model: nn.Module) -> list[str]:
    """Says for each kind of layer which functions its modeling module lacks, or that no documents can reach it."""
    unserved: dict[type[nn.Module], str] = {}
    for name, layer in list_recurrent_layers(model):
        module = sys.modules[type(layer).__module__]
        wanted = [(CONVOLUTION,)] + ([RECURRENCES] if _has_state(layer) else [])
        lacking = [names for names in wanted if not any(hasattr(getattr(module, n, None), "is_served") for n in names)]
        text = "has no " + ", ".join(" or ".join(names) for names in lacking) if lacking else ""
        if not lacking and not _takes_options(layer):
            text = "is not told of documents"
        if text:
            unserved.setdefault(type(layer), f"{name} ({type(layer).__name__}) {text}")
    return list(unserved.values())


def _takes_options(layer: nn.Module) -> bool:
    """Whether what a model's forward gets in addition reaches this layer: transformers names it in no signature."""
    kinds = {parameter.kind for parameter in inspect.signature(layer.forward).parameters.values()}
    return inspect.Parameter.VAR_KEYWORD in kinds


def _has_state(layer: nn.Module) -> bool:
    return any(name.rpartition(".")[2] == "A_log" for name, _ in layer.named_parameters())


def _make_entry(name: str, axis: SequenceAxis, kernels: Mapping[str, Kernel]) -> Callable[..., Any]:
    def enter(layer: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        documents, generation = options.get("documents"), options.get("generation")
        if documents is None and generation is None:
            raise ValueError(f"{name} got no documents: pass documents=make_documents(...) to the model's forward")
        if documents is not None and documents.shared:
            raise ValueError(f"{name} carries a state, and documents with one beginning would need copies of it")
        if options.get("attention_mask") is not None:
            raise ValueError(f"{name} got a mask; documents decide which tokens change a token's result")
        return args, {**options, CALL: RecurrentCall(documents, axis, kernels, generation=generation)}

    return enter


def _make_exit(name: str, has_state: bool) -> Callable[..., None]:
    def leave(layer: nn.Module, args: tuple[Any, ...], options: dict[str, Any], result: Any) -> None:
        reached = options[CALL].reached
        if CONVOLUTION not in reached or (has_state and not reached.intersection(RECURRENCES)):
            raise UnknownLayersError(
                f"{name} ({type(layer).__name__} of transformers {transformers.__version__}) called only "
                f"{', '.join(sorted(reached)) or 'none'} of the functions that make it exact on split rows"
            )

    return leave


def _read_options(name: str, options: dict[str, Any], known: tuple[str, ...]) -> dict[str, Any]:
    """The options of a function that its result depends on. One that is not known is an error."""
    unknown = {key for key, value in options.items() if value is not None and value is not False}
    unknown -= {*known, *IGNORED_ARGUMENTS, "documents", "generation"}
    if unknown:
        features = ", ".join(sorted(unknown))
        raise UnservedError(f"{name} is asked for {features}, which it is not known to compute exactly")
    return {key: options[key] for key in known if key in options}


def _make_convolution(name: str, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(original)
    def convolution(
        hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **options: Any
    ) -> Tensor:
        call: RecurrentCall | None = options.pop(CALL, None)
        if call is None:
            return original(hidden_states, weight, bias, activation=activation, **options)
        function = pick_function(original, call.pick_kernel(name))
        _read_options(name, options, ())

        def run_split() -> Tensor:
            documents = call.get_documents()
            with part_of_step("recurrence"):
                out = convolve(function, hidden_states, weight, bias, documents, call.axis, activation=activation)
            watch_backward("recurrence", out, hidden_states, "projections")
            return out

        if call.generation is None:
            return run_split()
        run = partial(function, weight=weight, bias=bias, activation=activation)
        return call.generation.convolve(hidden_states, weight.size(-1) - 1, run, run_split)

    return convolution


def _make_delta_rule(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **options: Any) -> Any:
        call: RecurrentCall | None = options.pop(CALL, None)
        if call is None:
            return original(query, key, value, g=g, beta=beta, **options)
        kernel = call.pick_kernel(name)
        rest = _read_options(name, options, ("use_qk_l2norm_in_kernel", "chunk_size"))
        tensors, place = (query, key, value, g, beta), (call.documents, call.axis)
        return apply_delta_rule(original, *tensors, *place, rest, kernel, call.generation), None

    return rule


def _make_scan(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def scan(hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **options: Any) -> Any:
        call: RecurrentCall | None = options.pop(CALL, None)
        if call is None:
            return original(hidden_states, dt, A, B, C, **options)
        kernel = call.pick_kernel(name)
        of_heads = {"A": A, "D": options.pop("D", None), "dt_bias": options.pop("dt_bias", None)}
        rest = _read_options(name, options, ("chunk_size", "dt_softplus", "dt_limit"))
        tensors, place = (hidden_states, dt, B, C), (call.documents, call.axis)
        return apply_scan(original, *tensors, of_heads, *place, rest, kernel, call.generation)

    return scan


def _make_fused(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Convolution, scan, norm and projection in one kernel cannot be cut: the layer takes its other path."""

    @wraps(original)
    def fused(*args: Any, **options: Any) -> Any:
        return None if options.pop(CALL, None) is not None else original(*args, **options)

    return fused


def _make(make: Callable[[str, Callable[..., Any]], Any], name: str) -> Callable[[Callable[..., Any]], Any]:
    def replace(original: Callable[..., Any]) -> Any:
        function = torch.compiler.disable(make(name, original))
        function.is_served = True
        return function

    return replace


REPLACEMENTS: dict[str, Callable[[Callable[..., Any]], Any]] = {
    CONVOLUTION: _make(_make_convolution, CONVOLUTION),
    FUSED: _make(_make_fused, FUSED),
    SCAN: _make(_make_scan, SCAN),
    **{name: _make(_make_delta_rule, name) for name in DELTA_RULES},
}
