"""DeepSpeed's partitioned parameter coordinator in its steady state, when the order of modules is known: what is
fetched, fetched ahead and let go at each hook (runtime/zero/partitioned_param_coordinator.py). Elements only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

from ulysses_cli.plan.ledger.job import EngineSettings
from ulysses_cli.plan.ledger.weights import Module, is_adapter
from ulysses_cli.plan.ledger.zero.module_hooks import HookEvent

NEVER = 1 << 62


class Coordinator:
    """Follows the visits of one step in order. A step number is that of an entering visit."""

    def __init__(
        self,
        modules: tuple[Module, ...],
        visits: Sequence[HookEvent],
        engine: EngineSettings,
        *,
        joins_mlps: bool,
        splits: bool = True,
        saved: frozenset[str] = frozenset(),
    ) -> None:
        """`splits`: weights are shards on several ranks. One rank copies each from the host by itself, without a buffer
        (partition_parameters.py: _no_gather_coalesced). `saved`: weights whose memory autograd keeps from the forward
        to the backward, whatever DeepSpeed lets go."""
        self.modules, self.engine, self.joins_mlps, self.splits = modules, engine, joins_mlps, splits
        self.names = [[name for name, _ in module.weights] for module in modules]
        self.sizes = {name: size for module in modules for name, size in module.weights}
        frozen = {name for module in modules if not module.is_trained for name, _ in module.weights}
        self.frozen = {name for name in frozen if not is_adapter(name)}
        self.at_hand = {name for name, size in self.sizes.items() if size <= engine.persistence_threshold}
        self.persistent = frozenset(self.at_hand)
        self.order = [visit.module for visit in visits if visit.enters]
        self.queue: deque[tuple[str, int]] = deque(
            (name, step) for step, number in enumerate(self.order) for name, _ in modules[number].weights
        )
        self.near = Distances([self._list_own(number) for number in self.order])
        # DeepSpeed asks whether a whole MLP is used again with everything inside each module that follows.
        self.near_mlp = Distances([self._list_all(number) for number in self.order]) if joins_mlps else self.near
        self.step = 0
        self.fetched_for: dict[str, int] = {}
        self.in_flight: dict[str, int] = {}  # weight -> the gather that brings it
        self.gathers: list[list[str]] = []  # weights of each gather that nobody asked for yet
        self.flat: list[int] = []
        self.copied: set[int] = set()
        self.users: dict[str, set[int]] = {}  # weight -> modules that have entered and not left
        self.in_backward: dict[int, None] = {}  # modules that have, in order
        self.recomputed: dict[int, set[str]] = {}  # frozen weights that a module in its backward lets go
        self.saved, self.left = saved, set[str]()  # those that were let go and are still there
        self.num_live = self.held = 0  # DeepSpeed's own count; elements in memory

    def _list_own(self, number: int) -> list[tuple[str, int]]:
        module = self.modules[number]
        return [] if self.joins_mlps and module.in_mlp else list(module.weights)

    def _list_all(self, number: int) -> list[tuple[str, int]]:
        depth, found = self.modules[number].depth, list(self.modules[number].weights)
        for module in self.modules[number + 1 :]:
            if module.depth <= depth:
                break
            found += module.weights
        return found

    def follow(self, visit: HookEvent) -> int:
        """-> the most elements in memory meanwhile."""
        if visit.enters:
            return self._fetch(visit)
        self._release(visit)
        return self.held

    def _fetch(self, visit: HookEvent) -> int:
        names = self.names[visit.module]
        if visit.is_backward:
            self.in_backward[visit.module] = None
        if not names:
            self._prefetch()
            self.step += 1
            return self.held
        self._gather([name for name in names if name not in self.at_hand and name not in self.in_flight])
        peak = self.held
        for name in names:
            self.users.setdefault(name, set()).add(visit.module)
            if visit.is_recomputing and name in self.frozen:
                self.recomputed.setdefault(next(reversed(self.in_backward)), set()).add(name)
            if name in self.in_flight:
                peak = max(peak, self._wait(name))
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
        size = sum(self.sizes[name] for name in names)
        self.in_flight |= dict.fromkeys(names, len(self.gathers))
        self.gathers.append(list(names))
        self.flat.append(size if self.splits and len(names) > 1 else 0)  # one alone is its own buffer
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

    def count_when_all_came(self) -> int:
        """The most elements in memory if all that is on its way were waited for, gather by gather
        (_clean_inflight_param_registry)."""
        held = peak = self.held
        for number in dict.fromkeys(self.in_flight.values()):
            if number in self.copied:
                held -= self.flat[number]
            else:
                peak = max(peak, held + self.flat[number])
        return peak

    def _release(self, visit: HookEvent) -> None:
        module = self.modules[visit.module]
        if not module.weights and not visit.is_backward:
            return
        near = self.near_mlp if module.in_mlp else self.near
        gone = set()
        for name, _ in module.weights:
            self.users[name].discard(visit.module)
            is_near = near.count(name, self.step) < self.engine.max_reuse_distance
            if not is_near and self.fetched_for.get(name, -1) <= self.step:
                gone.add(name)
        if visit.is_backward:
            through = self.left.intersection(name for name, _ in module.weights)
            self.held -= sum(self.sizes[name] for name in through)
            self.left -= through
            gone |= self.recomputed.pop(visit.module, set())
            self.in_backward.pop(visit.module, None)
        for name in gone - self.persistent:
            if name in self.at_hand and name not in self.in_flight and not self.users.get(name):
                self.at_hand.discard(name)
                self.num_live -= self.sizes[name]
                if name in self.saved and not visit.is_backward:
                    self.left.add(name)
                else:
                    self.held -= self.sizes[name]


class Distances:
    """How many elements are passed until a weight is used again, for modules that are entered one after another."""

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
