"""DeepSpeed's partitioned parameter coordinator, replayed (runtime/zero/partitioned_param_coordinator.py): the order
in which a step runs the hooks of a model's modules, and which weights are fetched, prefetched and released at
each. tests/ranks/test_trace.py compares the order with DeepSpeed's own hooks. Counts elements; runs no model."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ulysses_cli.plan.ledger.job import EngineSettings
from ulysses_cli.plan.ledger.modules import EMBEDDING, Module
from ulysses_cli.plan.ledger.weights import FIRST_PROJECTIONS, NORM_BEHIND, SCALED_LAYER, find_first_trained, is_adapter

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
        self, number: int, *, stays_in: frozenset[int] = frozenset(), recomputed: bool = False
    ) -> Iterator[HookEvent]:
        """Modules in `stays_in` are entered and not left, because a recomputation ends inside the last of them."""
        yield HookEvent(number, enters=True, is_recomputing=recomputed)
        for child in self.inside[number]:
            yield from self.walk_forward(child, stays_in=stays_in, recomputed=recomputed)
        if number not in stays_in:
            yield HookEvent(number, enters=False, is_recomputing=recomputed)

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
            yield from self.walk_forward(child, stays_in=frozenset(chain), recomputed=True)
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


NEVER = 1 << 62


@dataclass(frozen=True)
class WeightsOnDisk:
    """Weights whose shares are in files, and how many of them host memory has buffers for."""

    names: frozenset[str] = frozenset()
    num_buffers: int = 0


NOTHING_ON_DISK = WeightsOnDisk()


class Coordinator:
    """Follows the hook events of one step in order. Step numbers count the entering events, as in DeepSpeed."""

    def __init__(
        self,
        modules: tuple[Module, ...],
        events: Sequence[HookEvent],
        engine: EngineSettings,
        *,
        joins_mlps: bool,
        splits: bool = True,
        saved: frozenset[str] = frozenset(),
        disk: WeightsOnDisk = NOTHING_ON_DISK,
    ) -> None:
        """`splits`: weights are shards on several ranks. A single rank copies each from the host, without a buffer
        (partition_parameters.py: _no_gather_coalesced). `saved`: weights whose memory autograd keeps from the forward
        to the backward, even if DeepSpeed releases them. `disk`: weights whose shares are in files."""
        self.disk, self.read = disk, set[str]()  # whose shares are in host memory
        self.modules = modules
        self.engine = engine
        self.joins_mlps = joins_mlps
        self.splits = splits
        self.names = [[name for name, _ in module.gathered] for module in modules]
        self.sizes = {name: size for module in modules for name, size in module.gathered}
        frozen = {name for module in modules if not module.is_trained for name, _ in module.gathered}
        self.frozen = {name for name in frozen if not is_adapter(name)}
        self.available = {name for name, size in self.sizes.items() if size <= engine.persistence_threshold}
        self.persistent = frozenset(self.available)
        self.order = [event.module for event in events if event.enters]
        self.queue: deque[tuple[str, int]] = deque(
            (name, step) for step, number in enumerate(self.order) for name, _ in modules[number].gathered
        )
        self.near = Distances([self._list_own(number) for number in self.order])
        # DeepSpeed measures the reuse distance of a whole MLP over everything inside each module that follows.
        self.near_mlp = Distances([self._list_all(number) for number in self.order]) if joins_mlps else self.near
        self.step = 0
        self.fetched_for: dict[str, int] = {}
        self.in_flight: dict[str, int] = {}  # weight -> the gather that brings it
        self.gathers: list[list[str]] = []  # weights of each gather that no module has waited for yet
        self.flat: list[int] = []
        self.copied: set[int] = set()
        self.users: dict[str, set[int]] = {}  # weight -> modules that have entered and not left
        self.in_backward: dict[int, None] = {}  # modules that have entered their backward, in order
        self.recomputed: dict[int, set[str]] = {}  # frozen weights that a module in its backward holds and releases
        self.saved, self.still_saved = saved, set[str]()  # those that were released and are still in memory
        self.differentiated = {event.module for event in events if event.is_backward}
        self.was_released: set[str] = set()
        self.num_live = self.held = 0  # DeepSpeed's own count; elements in memory

    def _list_own(self, number: int) -> list[tuple[str, int]]:
        module = self.modules[number]
        return [] if self.joins_mlps and module.in_mlp else list(module.gathered)

    def _list_all(self, number: int) -> list[tuple[str, int]]:
        depth, weights = self.modules[number].depth, list(self.modules[number].gathered)
        for module in self.modules[number + 1 :]:
            if module.depth <= depth:
                break
            weights += module.gathered
        return weights

    def follow(self, event: HookEvent) -> int:
        """Applies one event; returns the most elements in memory during it."""
        if event.enters:
            return self._fetch(event)
        self._release(event)
        return self.held

    def _fetch(self, event: HookEvent) -> int:
        names = self.names[event.module]
        if event.is_backward:
            self.in_backward[event.module] = None
        if not names:
            self._prefetch()
            self.step += 1
            return self.held
        self._gather([name for name in names if name not in self.available and name not in self.in_flight])
        # DeepSpeed waits in the order of a set: all buffers may be there before the first is freed
        arrived = {self.in_flight[name] for name in names if name in self.in_flight} - self.copied
        peak = self.held + sum(self.flat[number] for number in arrived)
        for name in names:
            self.users.setdefault(name, set()).add(event.module)
            if event.is_recomputing and name in self.frozen:
                owner = next(reversed(self.in_backward))
                self.recomputed.setdefault(owner, set()).add(name)
                self.users[name].add(owner)
            if name in self.in_flight:
                self._wait(name)
        missing = {name for name in names if self.fetched_for.get(name, -1) < self.step}
        while self.queue and missing:
            name, used = self.queue.popleft()
            self.fetched_for[name] = used
            missing.discard(name)
        self._prefetch()
        self.step += 1
        return max(peak, self.held)

    def _prefetch(self) -> None:
        if self.num_live >= self.engine.max_live:
            return
        room, wanted, size = min(self.engine.max_live - self.num_live, self.engine.prefetch_bucket), [], 0
        while self.queue and size < room and not self._is_in_file(self.queue[0][0]):
            name, used = self.queue.popleft()
            self.fetched_for[name] = max(self.fetched_for.get(name, -1), used)
            if name not in self.available and name not in self.in_flight and name not in wanted:
                wanted.append(name)
                size += self.sizes[name]
        self._gather(wanted)
        if self.disk.names and self.engine.prefetch_bucket:
            self._read_ahead()

    def _is_in_file(self, name: str) -> bool:
        """Whether a weight's share must be read before it can be gathered. Prefetching ends at such a weight."""
        return name in self.disk.names and name not in self.read and name not in self.persistent

    def _read_ahead(self) -> None:
        """Reads shares of the next weights, up to twice as many elements as are in flight, and at least of one weight,
        while buffers are free (__prefetch_nvme_param_partitions)."""
        in_flight = sum(self.sizes[name] for name in self.in_flight)
        num_free, passed = self.disk.num_buffers - len(self.read), 0
        wanted: list[str] = []
        for name, _ in self.queue:
            if passed > 2 * in_flight or len(wanted) >= num_free:
                break
            if self._is_in_file(name):
                wanted.append(name)
            passed += self.sizes[name]
        self.read.update(wanted)

    def _gather(self, names: list[str]) -> None:
        if not names:
            return
        size = sum(self.sizes[name] for name in names)
        self.read.update(self.disk.names.intersection(names))
        self.in_flight |= dict.fromkeys(names, len(self.gathers))
        self.gathers.append(list(names))
        self.flat.append(size if self.splits and len(names) > 1 else 0)  # one alone is its own buffer
        self.num_live += size
        self.held += size

    def _wait(self, name: str) -> None:
        """Waiting for a gather's first weight copies all of its weights; waiting for its last one frees the buffer."""
        number = self.in_flight.pop(name)
        if number not in self.copied:
            self.copied.add(number)
            self.available.update(self.gathers[number])
            self.held += self.flat[number]
        self.gathers[number].remove(name)
        if not self.gathers[number]:
            self.held -= self.flat[number]

    def count_never_released(self) -> int:
        """Elements of the gathered weights that have not been released since the step began."""
        return sum(self.sizes[name] for name in self._list_gathered() - self.was_released)

    def count_left(self) -> int:
        """Elements of the weights that are still gathered when the backward is over. Those of modules whose backward
        never ended are released by then (release_backward_leftovers)."""
        released = {name for number in self.in_backward for name in self.names[number]}
        released.update(*(self.recomputed.get(number, ()) for number in self.in_backward))
        return sum(self.sizes[name] for name in self._list_gathered() - released)

    def _list_gathered(self) -> set[str]:
        return {*self.available, *self.in_flight} - self.persistent

    def _release(self, event: HookEvent) -> None:
        module = self.modules[event.module]
        if not module.gathered and not event.is_backward:
            return
        near = self.near_mlp if module.in_mlp else self.near
        released = set()
        for name, _ in module.gathered:
            self.users[name].discard(event.module)
            is_near = near.count(name, self.step) < self.engine.max_reuse_distance
            if not is_near and self.fetched_for.get(name, -1) <= self.step:
                released.add(name)
        kept: set[str] = set()
        if event.is_backward:
            used = self.still_saved.intersection(name for name, _ in module.weights)
            self.held -= sum(self.sizes[name] for name in used)
            self.still_saved -= used
            recomputed = self.recomputed.pop(event.module, set())
            released |= recomputed
            for name in recomputed:
                self.users[name].discard(event.module)
            # Behind a shared expert or a norm, whose backward is first, the product of frozen experts still needs its
            # views. Those of a tile are made and gone before.
            is_before = module.name.startswith(("down_proj", NORM_BEHIND)) and not self.joins_mlps
            kept = {name for name in recomputed if is_before and ".experts." in name}
            self.in_backward.pop(event.module, None)
        for name in released - self.persistent:
            if name in self.available and name not in self.in_flight and not self.users.get(name):
                self.available.discard(name)
                self.was_released.add(name)
                self.read.discard(name)
                self.num_live -= self.sizes[name]
                if name in kept or (not event.is_backward and (name in self.saved or self._saves_recomputed(event))):
                    self.still_saved.add(name)
                else:
                    self.held -= self.sizes[name]

    def _saves_recomputed(self, event: HookEvent) -> bool:
        """Whether a recomputation keeps the module's weights for its backward. It detaches each tensor that it saves
        again (torch: utils/checkpoint.py, _recomputation_hook), so that DeepSpeed's release of a weight frees nothing.
        Norms save no matrix, and MLPs in tiles nothing of theirs."""
        module = self.modules[event.module]
        is_known = event.is_recomputing and event.module in self.differentiated
        return is_known and "norm" not in module.name and not (self.joins_mlps and module.in_mlp)


class Distances:
    """Reuse distance: how many elements of weights are passed until a weight is used again, in order of entering."""

    def __init__(self, entered: list[list[tuple[str, int]]]) -> None:
        self.uses: dict[str, list[int]] = {}
        self.before = [0]  # elements of all modules before each step
        for step, weights in enumerate(entered):
            for name, _ in weights:
                self.uses.setdefault(name, []).append(step)
            self.before.append(self.before[-1] + sum(size for _, size in weights))

    def count(self, name: str, after: int) -> int:
        uses = self.uses.get(name, [])
        at = bisect_left(uses, after)
        return self.before[uses[at]] - self.before[after] if at < len(uses) else NEVER
