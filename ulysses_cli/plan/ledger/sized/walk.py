"""An engine at the whole depth of a model, joined with what tensors take: the peak of each phase, and its lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ulysses_cli.plan.ledger.memory_snapshot import MemorySnapshot
from ulysses_cli.plan.ledger.sized.depth import Depth, Recorded, Window
from ulysses_cli.plan.ledger.sized.hooks import HookMark
from ulysses_cli.plan.ledger.sized.lines import AGAIN, FORWARD, GRADIENTS, TRANSIENTS, join_lines, name_moment
from ulysses_cli.plan.ledger.sized.lower_stages import WholeEngine
from ulysses_cli.plan.ledger.sized.sharding import ShardedEngine
from ulysses_cli.plan.sizes.autograd import GRADIENT
from ulysses_cli.plan.sizes.meter import ByteMeter, Tag
from ulysses_cli.plan.sizes.tensor import Storage

LOAD, STEP = "load", ("forward", "backward")


class EngineMeter(ByteMeter):
    """Of an engine alone: what it holds by tag, now and when it held most."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: Counter[Tag] = Counter()
        self.fullest: Mapping[Tag, int] = {}
        self.tag = TRANSIENTS

    def add(self, num_bytes: int, tag: Tag, *, on_host: bool) -> None:
        place = self.host if on_host else self.device
        place.now += num_bytes
        if not on_host:
            self.tags[tag] += num_bytes
            if place.now > place.peak:
                place.peak, self.fullest = place.now, dict(self.tags)

    def measure_anew(self) -> None:
        self.device.peak, self.fullest = self.device.now, dict(self.tags)


class Moment(NamedTuple):
    """`base`: what tensors take at the begin of a window, from event `first` to event `at` of which more come. `layer`:
    the window's, and the one that it stands for. `mark`: work of the engine, where that is the moment."""

    num_bytes: int
    base: Mapping[Tag, int]
    first: int
    at: int
    engine: Mapping[Tag, int]
    layer: tuple[int | None, int | None] = (None, None)
    mark: HookMark | None = None


NOTHING = Moment(-1, {}, 0, 0, {})


class Walk:
    """Plays a load, a step, an evaluation and the step that all later ones are like."""

    def __init__(
        self, recorded: Recorded, depth: Depth, engine: ShardedEngine | WholeEngine, meter: EngineMeter
    ) -> None:
        self.recorded, self.depth, self.engine, self.meter = recorded, depth, engine, meter
        self.fullest: dict[str, Moment] = {}
        self.pins: dict[str, list[Storage | None]] = {}
        self.changes: dict[tuple[int, int], Counter[Tag]] = {}

    def run(self, micro_steps: int) -> None:
        held, device = self.recorded.held, self.meter.device
        self.meter.measure_anew()
        self.engine.start()
        start = Moment(sum(held.values()) + device.peak, held, 0, 0, self.meter.fullest)
        self.fullest = {LOAD: start}
        self._play(LOAD, held)
        self._step(micro_steps)
        self.fullest = {LOAD: self.fullest[LOAD]}
        if "evaluation" in self.recorded.phases:
            self._play("evaluation", self._begin("evaluation"))
        self._step(micro_steps)

    def _step(self, micro_steps: int) -> None:
        for _ in range(micro_steps):
            level = self._begin("forward")
            for phase in STEP:
                level = self._play(phase, level)
            self._note("optimizer_step", level)
        self._play("optimizer_step", level)

    def _note(self, phase: str, level: Counter[Tag]) -> None:
        """The moment at which a phase begins."""
        total, at = sum(level.values()) + self.meter.device.now, self.recorded.phases[phase][0].first
        if total > self.fullest.get(phase, NOTHING).num_bytes:
            self.fullest[phase] = Moment(total, level, at, at, dict(self.meter.tags))

    def _begin(self, phase: str) -> Counter[Tag]:
        return self.recorded.held + self.recorded.count_tags(0, self.recorded.phases[phase][0].first)

    def _play(self, phase: str, level: Counter[Tag]) -> Counter[Tag]:
        """`level`: what tensors take at its begin. Returns what they take at its end."""
        best, meter = self.fullest.get(phase, NOTHING), self.meter
        levels, now, level = self.recorded.levels, sum(level.values()), Counter(level)
        for window, number in self._list_windows(phase):
            base, layer = now - levels[window.first], (window.layer, number)
            ends = [mark.at for mark in window.marks[1:]] + [window.end]
            for mark, end in zip(window.marks, ends, strict=True):
                following = min(mark.at + 1, end)
                moved = mark._replace(path=self._move(mark.path, layer), weight=self._move(mark.weight, layer))
                is_added = self._do(moved)
                at = following if is_added else mark.at
                total = base + levels[at] + meter.device.peak
                if total > best.num_bytes:
                    best = Moment(total, Counter(level), window.first, at, meter.fullest, layer, mark)
                most = max(levels[following : end + 1])
                total = base + most + meter.device.now
                if total > best.num_bytes:
                    at = levels.index(most, following, end + 1)
                    best = Moment(total, Counter(level), window.first, at, dict(meter.tags), layer)
            span = window.first, window.end
            if span not in self.changes:
                self.changes[span] = self.recorded.count_tags(*span)
            for tag, size in self.changes[span].items():
                level[tag] += size
            now = base + levels[window.end]
        self.fullest[phase] = best
        return level

    def _move(self, path: str, layer: tuple[int | None, int | None]) -> str:
        own, number = layer
        if own is None or number is None or own == number or not path:
            return path
        return self.depth.shift(path, own, number)

    def _list_windows(self, phase: str) -> Iterator[tuple[Window, int | None]]:
        """Windows of the whole model, and the number of the layer in each."""
        windows = self.recorded.phases.get(phase, ())
        of_layer = {window.layer: window for window in windows if window.layer is not None}
        is_first = True
        for window in windows:
            if window.layer is None or self.depth.is_whole:
                yield window, None
            elif is_first:
                is_first = False
                numbers = range(len(self.depth.like))
                for number in reversed(numbers) if phase == "backward" else numbers:
                    own = of_layer.get(self.depth.like[number])
                    if own is not None:  # the backward ends above layers that are frozen
                        yield own, number

    def _do(self, mark: HookMark) -> bool:
        """Returns whether a gradient was added to one that was there, and is gone before the engine does its work."""
        engine = self.engine
        self.meter.measure_anew()
        if mark.work == "reduce":
            weight = engine.weights[mark.path]
            was_there = weight.grad is not None
            if engine.reduce(weight) and not was_there:
                peak, fullest = self.meter.device.peak, self.meter.fullest
                weight.grad = Storage(weight.numel * weight.dtype.itemsize, GRADIENTS), weight.dtype
                self.meter.device.peak, self.meter.fullest = peak, fullest  # so far it was a tensor of the backward
            return was_there
        if mark.work == "begin":
            engine.begin_step()
        elif mark.work == "begin backward":
            engine.begin_backward()
        elif mark.work == "end backward":
            engine.end_backward()
        elif mark.work == "step":
            engine.run_optimizer()
        elif mark.work == "end evaluation":
            engine.end_evaluation()
        elif isinstance(engine, ShardedEngine):
            self._do_sharded(engine, mark)
        return False

    def _do_sharded(self, engine: ShardedEngine, mark: HookMark) -> None:
        path = mark.path
        if mark.work == "fetch":
            engine.fetch(path, is_forward=mark.is_forward)
        elif mark.work == "release":
            engine.release(path, is_forward=mark.is_forward)
        elif mark.work == "read":
            engine.read(path, engine.weights[mark.weight])
        elif mark.work == "pin":
            self.pins.setdefault(path, []).append(engine.weights[path].storage)
        elif mark.work == "unpin":
            self.pins[path].pop(0)

    def describe(self) -> dict[str, MemorySnapshot]:
        return {phase: self._describe(phase, moment) for phase, moment in self.fullest.items()}

    def _describe(self, phase: str, moment: Moment) -> MemorySnapshot:
        tags = Counter(moment.base)
        for found in (self.recorded.count_tags(moment.first, moment.at), moment.engine):
            for tag, size in found.items():
                tags[tag] += size
        tag, before = self._find_last(moment)
        kind, path = tag
        name = name_moment((kind, self._move(path, moment.layer)))
        name = name if before == phase else f"before the {phase.replace('_', ' ')}"
        return MemorySnapshot(phase, name, join_lines(tags, phase))

    def _find_last(self, moment: Moment) -> tuple[Tag, str]:
        """What the fullest moment comes with, and in which phase: a tensor, or work of the engine."""
        mark = moment.mark
        if mark is not None:
            passes = AGAIN if mark.is_forward else GRADIENT
            return (passes if mark.phase == "backward" else FORWARD, mark.path), mark.phase
        if not moment.at:
            return ("", ""), ""
        _, phase, tag = self.recorded.events[moment.at - 1]
        return tag, phase
