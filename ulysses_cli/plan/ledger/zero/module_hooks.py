"""The order in which a training step runs the hooks of a model's modules: forward, backward, and each recomputed layer.

tests/ranks/test_gathering.py compares it with DeepSpeed's own hooks. Runs no model.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from ulysses_cli.plan.ledger.adapters.modules import EMBEDDING, Module
from ulysses_cli.plan.ledger.weights import FIRST_PROJECTIONS, SCALED_LAYER, find_first_trained, is_adapter

LAYER_DEPTH = 2


class HookEvent(NamedTuple):
    """A hook of module number `module`, before (`enters`) or after its forward or its backward."""

    module: int
    enters: bool
    is_backward: bool = False
    is_recomputing: bool = False


class ModuleOrder:
    """Lists the hook events of a step. Modules come in forward order, each before the modules inside it."""

    def __init__(self, modules: tuple[Module, ...]) -> None:
        self.modules = modules
        self.inside: list[list[int]] = [[] for _ in modules]
        path: list[int] = []
        for number, module in enumerate(modules):
            del path[module.depth :]
            if path:
                self.inside[path[-1]].append(number)
            path.append(number)
        self.first_trained = find_first_trained(modules)
        before = itertools.takewhile(lambda module: _get_first_name(module) not in FIRST_PROJECTIONS, modules)
        own = [module for module in before if module.part != EMBEDDING or module.name == "embed_tokens"]
        self.begins_frozen = not any(module.is_trained and module.weights for module in own)
        beside = [n for n, module in enumerate(modules) if module.is_beside and module.layer == self.first_trained]
        has_trained = any(_trains(modules[n]) for n in beside)
        # a frozen MLP beside attention reads frozen results: it has no backward, and no recomputation needs it
        self.left_out = frozenset(beside) if self.begins_frozen and not has_trained else frozenset()

    def walk_step(self, *, recomputes: bool) -> Iterator[HookEvent]:
        yield from self.walk_forward(0)
        yield from self._walk_backward(0, recomputes=recomputes)

    def walk_forward(
        self, number: int, *, stays_in: frozenset[int] = frozenset(), again: bool = False
    ) -> Iterator[HookEvent]:
        """Modules in `stays_in` are entered and not left, because a recomputation ends inside the last of them."""
        yield HookEvent(number, enters=True, is_recomputing=again)
        for child in self.inside[number]:
            yield from self.walk_forward(child, stays_in=stays_in, again=again)
        if number not in stays_in:
            yield HookEvent(number, enters=False, is_recomputing=again)

    def _walk_backward(self, number: int, *, recomputes: bool) -> Iterator[HookEvent]:
        module = self.modules[number]
        if module.name == "rotary_emb" or number in self.left_out or self._has_no_gradient(module):
            return
        if recomputes and module.layer >= 0 and module.depth == LAYER_DEPTH:
            yield from self._walk_recomputed(number)
            return
        yield HookEvent(number, enters=True, is_backward=True)
        for child in reversed(self.inside[number]):
            yield from self._walk_backward(child, recomputes=recomputes)
        if module.is_left:
            yield HookEvent(number, enters=False, is_backward=True)

    def _walk_recomputed(self, layer: int) -> Iterator[HookEvent]:
        """Modules whose result is the layer's result are entered before the first saved tensor is missing."""
        chain = [layer]
        if self.modules[layer].name != SCALED_LAYER:
            while inside := [child for child in self.inside[chain[-1]] if child not in self.left_out]:
                chain.append(inside[-1])
        for number in chain:
            yield HookEvent(number, enters=True, is_backward=True)
        for child in self.inside[layer]:
            if child in self.left_out:
                continue
            yield from self.walk_forward(child, stays_in=frozenset(chain), again=True)
        yield from self._leave(chain)

    def _leave(self, chain: list[int]) -> Iterator[HookEvent]:
        """The backward of modules that are entered already, innermost first."""
        for depth, number in reversed(list(enumerate(chain))):
            entered = chain[depth + 1] if depth + 1 < len(chain) else None
            for child in reversed(self.inside[number]):
                if child != entered:
                    yield from self._walk_backward(child, recomputes=False)
            if self.modules[number].is_left:
                yield HookEvent(number, enters=False, is_backward=True)

    def _has_no_gradient(self, module: Module) -> bool:
        """No result of a frozen embedding needs a gradient, or of a frozen layer or matrix that reads only frozen
        results."""
        if 0 <= module.layer < self.first_trained:
            return True
        projects = module.layer == self.first_trained and _get_first_name(module) in FIRST_PROJECTIONS
        is_first = module.part == EMBEDDING or (projects and self.begins_frozen)
        return is_first and not module.is_trained


def _trains(module: Module) -> bool:
    """Also an MLP that is gathered as a whole, with adapters among its frozen weights."""
    return (module.is_trained and bool(module.weights)) or any(is_adapter(name) for name, _ in module.weights)


def _get_first_name(module: Module) -> str:
    return module.name.partition(".")[0]
