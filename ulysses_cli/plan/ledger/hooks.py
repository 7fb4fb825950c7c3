"""DeepSpeed's hooks around modules (runtime/zero/parameter_offload.py), and the names of the lines that a run on
sizes holds. Hooks run where a model computes on sizes, and note what an engine has to do at each place; depth.py
puts engine and tensors together afterwards."""

from __future__ import annotations

import re
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from math import prod
from typing import Any, Literal, NamedTuple

from ulysses_cli.plan.sizes import autograd
from ulysses_cli.plan.sizes.autograd import GRADIENT, Function, Node, begin, finish
from ulysses_cli.plan.sizes.nn import Parameter, SizedModule
from ulysses_cli.plan.sizes.tensor import FLOAT32, DType, Running, Storage, Tag, Tensor, make
from ulysses_cli.plan.sizes.views import raw_reshape

# Kinds of work. What an engine holds has its line's name in place of a module's path.
ENGINE, FORWARD, RECOMPUTED = "engine", "forward", "again"
PARAMETERS, GATHERED, SECOND = (
    (ENGINE, line) for line in ("parameters", "parameters_gathered", "parameters_second_shard")
)
GRADIENTS, BUCKET, FLUSHED = ((ENGINE, line) for line in ("gradients", "reduce_bucket", "reduce_flush"))
MASTER, MOMENTS, STEPPED = ((ENGINE, line) for line in ("optimizer_master", "optimizer_adam", "optimizer_transients"))
INPUTS, TRANSIENTS, MADE = ((ENGINE, line) for line in ("inputs", "engine_transients", "weights_made"))
ATTENTION = "attention"
ALIKE = {
    **dict.fromkeys(("self_attn", "attention", "attn", "linear_attn"), ATTENTION),
    **dict.fromkeys(("mlp", "block_sparse_moe", "feed_forward"), "mlp"),
}
RESIDUAL, LOGITS, SAVED_INPUTS = "residual", "logits", "saved_layer_inputs"
AFTER_NUMBER = re.compile(r"\.\d+(?:\.(\w+))?")


@contextmanager
def tagged(kind: str, path: str) -> Iterator[None]:
    """What is made inside belongs to this work."""
    meter = Running.meter
    before, meter.tag = meter.tag, (kind, path)
    try:
        yield
    finally:
        meter.tag = before


@cache
def find_part(path: str) -> str:
    """The part of a model that a path leads to: of a layer, the module right below it."""
    in_layer = AFTER_NUMBER.search(path)
    if in_layer:
        return ALIKE.get(in_layer[1], in_layer[1]) if in_layer[1] else RESIDUAL
    last = path.rpartition(".")[2]
    return LOGITS if last in ("", "model", "lm_head", "loss") else last


def name_line(tag: Tag, phase: str) -> str:
    """What a forward makes has its part's name in all phases: in the backward it is what was saved."""
    kind, path = tag
    if kind == ENGINE:
        return path
    part = find_part(path)
    if part == LOGITS:
        return part
    if kind in (RECOMPUTED, GRADIENT):
        return f"recomputed_{part}" if kind == RECOMPUTED else f"gradients_of_{part}"
    return SAVED_INPUTS if part == RESIDUAL and phase != "evaluation" else part


def name_moment(tag: Tag) -> str:
    kind, path = tag
    if kind == ENGINE:
        return path.replace("_", " ")
    passes = {RECOMPUTED: "backward of {}, recomputed", GRADIENT: "backward of {}"}
    return passes.get(kind, "{}").format(path.removeprefix("model.") or "the loss")


def join_lines(alive: Mapping[Tag, int], phase: str) -> dict[str, int]:
    lines: Counter[str] = Counter()
    for tag, num_bytes in alive.items():
        lines[name_line(tag, phase)] += num_bytes
    return {name: num_bytes for name, num_bytes in lines.items() if num_bytes}


Work = Literal[
    "begin", "fetch", "release", "read", "pin", "unpin", "reduce", "begin backward", "end backward", "step",
    "end evaluation", "save",
]  # fmt: skip


class HookMark(NamedTuple):
    """Work of the engine before the event of that number. `path`: of the module or weight; `weight`: one that the
    module reads though it is another's. Modules are entered in a forward, also in one that is computed again."""

    at: int
    phase: str
    work: Work
    path: str
    is_forward: bool = False
    weight: str = ""


@dataclass(eq=False)
class ModuleWeights:
    """A module's own weights by name. `leaf`: that of the module around it, or its own, which is gathered whole."""

    path: str
    weights: list[str] = field(default_factory=list)
    leaf: str | None = None


class WeightSize(NamedTuple):
    """`number`: weights are numbered as they are made. `is_late`: the engine is told of it at its start."""

    path: str
    number: int
    shape: tuple[int, ...]
    dtype: DType
    is_trained: bool
    is_late: bool


def is_hidden_matrix(name: str, num_dims: int) -> bool:
    """Whether muon steps this weight: a layer's matrix. Embeddings, heads and vectors have AdamW."""
    return num_dims == 2 and ".layers." in name


class Hooks:
    """`leaves`: modules that are gathered whole, with all that is inside. `made`: parameters in the order in which the
    engine was told of them; it is told of others at its start. Without `gathers`, weights are there always."""

    def __init__(
        self, root: SizedModule, leaves: Collection[SizedModule], made: Iterable[Parameter], *, gathers: bool, kept: int
    ) -> None:
        self.root, self.gathers, self.leaves = root, gathers, set(leaves) if gathers else set()
        self.places = {module: path for path, module in root.named_modules()}
        self.inside = {inner for leaf in self.leaves for inner in leaf.modules() if inner is not leaf}
        self.leaves -= self.inside  # the engine looks into no leaf
        self.names: dict[int, str] = {}
        self.parameters = dict(root.named_parameters())
        for name, parameter in self.parameters.items():
            self.names[id(parameter)] = name
        self.own = {module: [p for p in module._parameters.values() if p is not None] for module in self.places}
        self.of_leaf = {leaf: list(leaf.parameters()) for leaf in self.leaves}
        self.in_leaves = {id(parameter) for own in self.of_leaf.values() for parameter in own}
        self.fetched = {module: self.of_leaf.get(module, own) for module, own in self.own.items()}
        self.numbers = {id(parameter): number for number, parameter in enumerate(made)}
        self.remaining, self.waiting = dict.fromkeys(self.places, 0), dict.fromkeys(self.places, 0)
        self.users: dict[int, set[SizedModule]] = {id(parameter): set() for parameter in self.parameters.values()}
        self.meter, self.running = Running.meter, list[SizedModule]()
        self.runs_backward = False
        self.pins: list[Any] = []
        self.marks: list[HookMark] = []
        self.nothing = Storage(0)
        for parameter in self.parameters.values():
            parameter.storage = self.nothing  # the engine's
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._take)
        self.away = {id(p) for p in self.parameters.values() if gathers and p.numel() > kept}
        self.gathered = set(self.away)

    def list_modules(self, rename: Callable[[str], str]) -> Iterator[ModuleWeights]:
        leaf_of = {inner: rename(self.places[leaf]) for leaf in self.leaves for inner in leaf.modules()}
        for module, path in self.places.items():
            own = [rename(self.names[id(p)]) for p in module._parameters.values() if p is not None]
            yield ModuleWeights(rename(path), own, leaf_of.get(module))

    def list_weights(self, rename: Callable[[str], str]) -> Iterator[WeightSize]:
        num_made = len(self.numbers)
        for name, parameter in self.parameters.items():
            number = self.numbers.setdefault(id(parameter), len(self.numbers))
            is_late, path = number >= num_made, rename(name)
            yield WeightSize(path, number, parameter.shape, parameter.dtype, parameter.requires_grad, is_late)

    def mark(self, work: Work, path: str = "", *, is_forward: bool = False, weight: str = "") -> None:
        if self.meter.events is not None:  # not after the run, when the last tensors go
            self.marks.append(HookMark(len(self.meter.events), self.meter.phase, work, path, is_forward, weight))

    # --- around modules

    def call(self, module: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """In place of a module's forward."""
        if module not in self.places:
            return module.forward(*args, **named)
        with tagged(RECOMPUTED if self.runs_backward else FORWARD, self.places[module]):
            if module in self.inside:
                return module.forward(*args, **named)
            if self.gathers:
                return self._call(module, args, named)
            self.mark("begin" if module is self.root else "fetch", self.places[module], is_forward=True)
            return module.forward(*args, **named)

    def _call(self, module: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if module is self.root:
            self.mark("begin")
        self._fetch(module, is_forward=True)
        self.remaining[module] = 0
        args = tuple(self._watch_input(module, each) if isinstance(each, Tensor) else each for each in args)
        leaf_hook = _LeafHook(self, module) if module in self.leaves and Running.grad else None
        if leaf_hook is not None:
            args = tuple(leaf_hook.watch(each) if isinstance(each, Tensor) else each for each in args)
        self.running.append(module)
        out = module.forward(*args, **named)
        del args
        self.running.pop()
        if leaf_hook is not None:
            out = leaf_hook.keep(out)
        self._release(module, is_forward=True)
        if isinstance(out, tuple):
            return tuple(self._watch_output(module, each) if isinstance(each, Tensor) else each for each in out)
        if isinstance(out, Tensor):
            return self._watch_output(module, out)
        hidden = getattr(out, "last_hidden_state", None)
        if hidden is not None:
            out.last_hidden_state = self._watch_output(module, hidden)
        return out

    def _watch_input(self, module: SizedModule, t: Tensor) -> Tensor:
        """When the gradients of all inputs are there, weights are released."""
        if not (Running.grad and t.requires_grad):
            return t
        self.remaining[module] += 1

        def run(_: Node, grads: list[Any]) -> Any:
            self.remaining[module] -= 1
            if not self.remaining[module]:
                self._release(module, is_forward=False)
            return grads

        return watch(t, run)

    def _watch_output(self, module: SizedModule, t: Tensor) -> Tensor:
        """Before the backward of a module its weights are fetched."""
        if not (Running.grad and t.requires_grad):
            return t
        self.waiting[module] += 1

        def run(_: Node, grads: list[Any]) -> Any:
            if self.waiting[module] > 0:
                self._fetch(module, is_forward=False)
                self.waiting[module] -= 1
            return grads

        return watch(t, run)

    def read(self, parameter: Parameter) -> None:
        """A weight that is read outside of its own module belongs to the module that reads it, from then on."""
        if id(parameter) not in self.away or self.running[:1] != [self.root] or self.runs_backward:
            return
        module = self.running[-1]
        self.fetched[module] = [*self.fetched[module], parameter]
        self.mark("read", self.places[module], weight=self.names[id(parameter)])
        self._bring(parameter)

    # --- weights here take no memory of tensors, but where one outlives its module's turn

    def _fetch(self, module: SizedModule, *, is_forward: bool) -> None:
        self.mark("fetch", self.places[module], is_forward=is_forward)
        for parameter in self.fetched[module]:
            self._bring(parameter)
            self.users[id(parameter)].add(module)

    def _bring(self, parameter: Parameter) -> None:
        if id(parameter) in self.away:
            parameter.storage = Storage(parameter.nbytes, GATHERED)
            self.away.discard(id(parameter))

    def _release(self, module: SizedModule, *, is_forward: bool) -> None:
        path, gone = self.places[module], []
        for parameter in self.fetched[module]:
            own = id(parameter)
            self.users[own].discard(module)
            if own in self.gathered and own not in self.away and not self.users[own]:
                gone.append((self.names[own], weakref.ref(parameter.storage)))
                parameter.storage = self.nothing
                self.away.add(own)
        for name, storage in gone:
            held = storage()
            if held is not None:  # by a view that is saved for the backward
                self.mark("pin", name)
                self.pins.append(weakref.ref(held, partial(self._unpin, name)))
        self.mark("release", path, is_forward=is_forward)

    def _unpin(self, name: str, _: Any) -> None:
        self.mark("unpin", name)

    # --- gradients

    def run_backward(self, loss: Tensor) -> None:
        self.mark("begin backward")
        self.runs_backward = True
        autograd.backward([loss], [make((), FLOAT32)])
        self.runs_backward = False
        self.mark("end backward")

    def _take(self, parameter: Parameter) -> None:
        if id(parameter) not in self.in_leaves:
            self.reduce(parameter)

    def reduce(self, parameter: Parameter) -> None:
        self.mark("reduce", self.names[id(parameter)])
        parameter.grad = None


def watch(t: Tensor, run: Callable[[Node, list[Any]], Any]) -> Tensor:
    """A view whose backward calls `run`."""
    node = begin(run, t)
    return finish(node, t.detach())


class _LeafHook:
    """Of a module that is gathered whole: its gradients are reduced when that of an input is there. Until then torch's
    hook keeps the gradients of what the module returned (torch/utils/hooks.py: BackwardHook)."""

    def __init__(self, hooks: Hooks, module: SizedModule) -> None:
        self.hooks, self.module, self.is_done = hooks, module, False
        self.kept: list[Any] = []

    def watch(self, t: Tensor) -> Tensor:
        return watch(t, self._run) if t.requires_grad else t

    def keep(self, out: Any) -> Any:
        if isinstance(out, tuple):
            return tuple(map(self.keep, out))
        return watch(out, self._keep) if isinstance(out, Tensor) and out.requires_grad else out

    def _keep(self, _: Node, grads: list[Any]) -> Any:
        if not self.is_done:
            self.kept += grads
        return grads

    def _run(self, _: Node, grads: list[Any]) -> Any:
        self.kept = []
        if not self.is_done:
            self.is_done = True
            for parameter in self.hooks.of_leaf[self.module]:
                if parameter.requires_grad:
                    if parameter.grad is None:
                        parameter.grad = make(parameter.shape, parameter.dtype)
                    self.hooks.reduce(parameter)
        return grads


class LinearOfShards(Function):
    """LinearFunctionForZeroStage3: saves input, weight and bias, whatever needs a gradient."""

    @staticmethod
    def forward(t: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return make((*t.shape[:-1], weight.shape[0]), t.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        t, weight, *bias = ctx.saved_tensors
        needs = ctx.needs_input_grad
        for_input = make((*grad.shape[:-1], weight.shape[1]), grad.dtype) if needs[0] else None
        for_weight = for_bias = None
        if needs[1]:
            rows = [raw_reshape(each, (prod(each.shape[:-1]), each.shape[-1])) for each in (grad, t)]
            for_weight = make(weight.shape, grad.dtype)
            del rows
        if bias and bias[0] is not None and needs[2]:
            for_bias = make(bias[0].shape, grad.dtype)
        return for_input, for_weight, for_bias


def multiply_sharded(t: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """zero3_linear_wrap"""
    product: Tensor = LinearOfShards.apply(t, weight, bias)
    return product
