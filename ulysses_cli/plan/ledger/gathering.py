"""Which weights ZeRO-3 has gathered at which time: a replay of DeepSpeed's partitioned parameter coordinator.

Its rules, from runtime/zero/partitioned_param_coordinator.py: fetch what a module needs; then prefetch up to
prefetch_bucket more at every module, until max_live are there; keep what is used again within max_reuse_distance. A
gather of several weights holds its flat buffer until the last of them was asked for, beside the copies made from it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby

from ulysses_cli.plan.ledger.job import Engine, Job
from ulysses_cli.plan.ledger.layer import is_tiled
from ulysses_cli.plan.ledger.weights import EMBEDDING, HEAD, LAYERS, Adapters, Module, list_weights
from ulysses_cli.plan.model_shape import ModelShape

NEVER = 1 << 62


@dataclass(frozen=True)
class Gathered:
    """Elements at hand, by part of the step, without the persistent ones, which always are. `loss` is the time between
    the head's forward and its backward; `embedding` is its backward, the end of the step."""

    forward: int = 0
    head: int = 0
    loss: int = 0
    backward: int = 0
    embedding: int = 0
    persistent: int = 0


def compute_gathered(job: Job) -> Gathered:
    """Nothing is gathered on one rank, unless the weights live on the host, and nothing below stage 3."""
    if job.zero_stage < 3 or (job.world_size == 1 and job.levers.offload_param == "none"):
        return Gathered()
    recomputes = job.levers.gradient_checkpointing is not False
    return _replay(job.shape, job.adapters, job.engine, recomputes, is_tiled(job))


@lru_cache(maxsize=64)
def _replay(
    shape: ModelShape, adapters: Adapters | None, engine: Engine, recomputes: bool, tiles_mlp: bool = False
) -> Gathered:
    modules = list_weights(shape, adapters).modules
    order = _list_order(tuple(_join_mlps(modules)) if tiles_mlp else modules, recomputes)
    replay = _Coordinator([module for module, _ in order], engine)
    most = {"forward": 0, "head": 0, "backward": 0, "embedding": 0}
    loss = 0
    for step, (module, part) in enumerate(order):
        peak = replay.fetch(step)
        # Inside layers, the copies of a gather come and go before the module computes.
        most[part] = max(most[part], replay.held if module.part == LAYERS else peak)
        replay.release(step)
        if part == "head" and order[step + 1] == order[step]:  # the head, forward, before the head, backward
            loss = replay.held
    persistent = sum(n for n in list_weights(shape, adapters).persistent_sizes if n <= engine.persistence_threshold)
    return Gathered(**most, loss=loss, persistent=persistent)


def _join_mlps(modules: tuple[Module, ...]) -> Iterator[Module]:
    """A tiled MLP is gathered at once (a ZeRO-3 leaf module)."""
    for (in_mlp, _), group in groupby(modules, key=lambda module: (module.in_mlp, module.layer)):
        found = list(group)
        if in_mlp:
            yield replace(found[0], weights=tuple(weight for module in found for weight in module.weights))
        else:
            yield from found


def _list_order(modules: tuple[Module, ...], recomputes: bool) -> list[tuple[Module, str]]:
    """Forward, then backward; with recomputation each layer's forward comes once more before its backward."""
    order = [(module, "head" if module.part == HEAD else "forward") for module in modules]
    layers: dict[int, list[Module]] = {}
    for module in modules:
        layers.setdefault(module.layer, []).append(module)
    order += [(module, "head") for module in reversed(modules) if module.part == HEAD]
    for index in sorted((index for index in layers if index >= 0), reverse=True):
        if recomputes:
            order += [(module, "backward") for module in layers[index]]
        order += [(module, "backward") for module in reversed(layers[index])]
    order += [(module, "embedding") for module in modules if module.part == EMBEDDING]
    return order


class _Coordinator:
    """The coordinator's state in its steady state: the trace of modules is known."""

    def __init__(self, order: list[Module], engine: Engine) -> None:
        self.order, self.engine = order, engine
        self.sizes = {name: size for module in order for name, size in module.weights}
        self.uses: dict[str, list[int]] = {}
        self.before = [0]  # elements of all modules before each step
        for step, module in enumerate(order):
            for name, _ in module.weights:
                self.uses.setdefault(name, []).append(step)
            self.before.append(self.before[-1] + sum(size for _, size in module.weights))
        self.queue = deque((name, step) for step, module in enumerate(order) for name, _ in module.weights)
        self.fetched_for: dict[str, int] = {}
        self.at_hand = {name for name, size in self.sizes.items() if size <= engine.persistence_threshold}
        self.in_flight: dict[str, int] = {}  # weight -> the gather that brings it
        self.gathers: dict[int, list[str]] = {}  # gather -> its weights that nobody asked for yet
        self.flat: dict[int, int] = {}
        self.copied: set[int] = set()
        self.num_live = self.held = 0  # DeepSpeed's own count; elements in memory

    def fetch(self, step: int) -> int:
        """What a module's hook does -> the most elements in memory while it does it."""
        names = [name for name, _ in self.order[step].weights]
        self._gather([name for name in names if name not in self.at_hand and name not in self.in_flight])
        peak = self.held
        for name in names:
            if name in self.in_flight:
                peak = max(peak, self._wait(name))
        missing = {name for name in names if self.fetched_for.get(name, -1) < step}
        while self.queue and missing:
            name, used = self.queue.popleft()
            self.fetched_for[name] = used
            missing.discard(name)
        self._prefetch()
        return max(peak, self.held)

    def _prefetch(self) -> None:
        room, wanted, size = min(self.engine.max_live - self.num_live, self.engine.prefetch_bucket), [], 0
        while self.queue and size < room:
            name, used = self.queue.popleft()
            self.fetched_for[name] = max(self.fetched_for.get(name, -1), used)
            if name not in self.at_hand and name not in self.in_flight and name not in wanted:
                wanted.append(name)
                size += self.sizes[name]
        self._gather(wanted)

    def _gather(self, names: list[str]) -> None:
        if not names:
            return
        number, size = len(self.flat), sum(self.sizes[name] for name in names)
        self.flat[number], self.gathers[number] = size, list(names)
        self.in_flight |= dict.fromkeys(names, number)
        self.num_live += size
        self.held += size

    def _wait(self, name: str) -> int:
        """The first weight of a gather that is asked for brings copies of all; the last one lets the buffer go."""
        number = self.in_flight.pop(name)
        if number not in self.copied:
            self.copied.add(number)
            self.at_hand.update(self.gathers[number])
            self.held += self.flat[number]
        peak = self.held
        self.gathers[number].remove(name)
        if not self.gathers[number]:
            self.held -= self.flat[number]
        return peak

    def release(self, step: int) -> None:
        after = step + 1
        for name, size in self.order[step].weights:
            if size <= self.engine.persistence_threshold or name not in self.at_hand or name in self.in_flight:
                continue
            if self.fetched_for.get(name, -1) > after:
                continue
            uses = self.uses[name]
            at = bisect_left(uses, after)
            following = uses[at] if at < len(uses) else NEVER
            is_near = following < NEVER and self.before[following] - self.before[after] < self.engine.max_reuse_distance
            if not is_near:
                self.at_hand.discard(name)
                self.held -= size
                self.num_live -= size
