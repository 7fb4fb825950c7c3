"""What a few layers' run says of the whole depth: an engine without tensors walks all layers, and says what it holds at
each mark of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from ulysses_cli.plan.ledger.depth import Depth, SplitPath, Turn, Window, find_number, join_path, split_path
from ulysses_cli.plan.ledger.hooks import GATHERED, GRADIENTS, TRANSIENTS, HookMark
from ulysses_cli.plan.ledger.stage3 import ShardedEngine
from ulysses_cli.plan.ledger.stage_1_and_2 import WholeEngine
from ulysses_cli.plan.sizes.tensor import ByteMeter, Running, Storage, Tag

Event = tuple[int, str, Tag]
LOAD, SECOND_PASS = "load", " again"
Step = tuple[str, SplitPath | str, bool, SplitPath | str]
WORKS: dict[tuple[Step, ...], int] = {}


def number_work(layer: int | None, marks: Sequence[HookMark]) -> int:
    def place(path: str) -> SplitPath | str:
        return path if layer is None else split_path(path, layer)

    steps = tuple((mark.work, place(mark.path), mark.is_forward, place(mark.weight)) for mark in marks)
    return WORKS.setdefault(steps, len(WORKS))


class Recorded:
    """What tensors take, by event, of the run of a few layers; and its windows by phase."""

    def __init__(self, held: Mapping[Tag, int], events: Sequence[Event], marks: Sequence[HookMark]) -> None:
        self.events = events
        self.held = Counter({tag: size for tag, size in held.items() if tag != GATHERED})
        now = sum(self.held.values())
        self.levels = [now]
        for size, _, tag in events:
            now += size if tag != GATHERED else 0
            self.levels.append(now)
        self.phases: dict[str, list[Window]] = {}
        marks = _part_passes(marks)
        joined = [window for phase, own in groupby(marks, key=lambda mark: mark.phase) for window in _join(list(own))]
        ends = [own[0].at for _, own in joined[1:]] + [len(events)]
        for (layer, own), end in zip(joined, ends, strict=True):
            while end > own[-1].at and events[end - 1][1] != own[0].phase.removesuffix(SECOND_PASS):
                end -= 1  # what comes between phases belongs to none
            window = Window(layer, own, own[0].at, end, number_work(layer, own))
            self.phases.setdefault(own[0].phase, []).append(window)
        self.work: dict[Depth, Hashable] = {}
        self.tags: dict[tuple[int, int], Counter[Tag]] = {}
        self.late, self.changes = set[tuple[int, int]](), Counter[tuple[str, int]]()
        for phase, windows in self.phases.items():
            step = "step" if phase in ("forward", "backward") else phase
            for window in windows:
                if window.layer is not None:
                    others = {find_number(mark.path) for mark in window.marks}
                    self.late |= {(window.layer, other) for other in others if other is not None}
                    self.changes[step, window.layer] += self.levels[window.end] - self.levels[window.first]

    def list_saved(self) -> Counter[int]:
        """What each layer that ran leaves for the backward."""
        saved: Counter[int] = Counter()
        for window in self.phases["forward"]:
            if window.layer is not None:
                saved[window.layer] += self.levels[window.end] - self.levels[window.first]
        return saved

    def list_work(self, depth: Depth) -> Hashable:
        """What an engine does in a run of all layers."""
        if depth not in self.work:
            self.work[depth] = tuple(
                (phase, tuple((turn, window.work) for window, turn in depth.list_windows(phase, windows)))
                for phase, windows in self.phases.items()
            )
        return self.work[depth]

    def find_fullest(self, first: int, end: int) -> int:
        """The event before which tensors take most."""
        return self.levels.index(max(self.levels[first : end + 1]), first, end + 1)

    def is_even(self, depth: Depth) -> bool:
        """Whether each layer that stands for others gives back all that it takes, and work that is done late, in the
        turn of another layer, is that of a layer beside it."""
        stands = {place for place, number in Counter(depth.like).items() if number > 1}
        if any(depth.live[other] - depth.live[own] != other - own for own, other in self.late):
            return False
        return not any(size for (_, own), size in self.changes.items() if own in stands)

    def count_tags(self, first: int, end: int) -> Counter[Tag]:
        """Kept, since one window stands for many layers: not to be changed."""
        if (first, end) not in self.tags:
            tags = self.tags[first, end] = Counter[Tag]()
            for size, _, tag in self.events[first:end]:
                if tag != GATHERED:
                    tags[tag] += size
        return self.tags[first, end]


def _part_passes(marks: Sequence[HookMark]) -> list[HookMark]:
    """The proof of the head runs the decoder a second time, which is a phase of its own here."""
    parted, seen = list[HookMark](), set[str]()
    has_layers, suffix = False, ""
    for mark in marks:
        if mark.phase == LOAD and not suffix:
            number = find_number(mark.path)
            has_layers |= number is not None
            if number is None and mark.work == "fetch":
                suffix = SECOND_PASS if has_layers and mark.path in seen else ""
                seen.add(mark.path)
        parted.append(mark._replace(phase=LOAD + suffix) if mark.phase == LOAD else mark)
    return parted


def _join(marks: list[HookMark]) -> list[tuple[int | None, list[HookMark]]]:
    """Marks of a phase by layer. Those between layers, and late ones of a layer, belong to the layer before."""
    runs = [(layer, list(own)) for layer, own in groupby(marks, key=lambda mark: find_number(mark.path))]
    last = max((number for number, (layer, _) in enumerate(runs) if layer is not None), default=-1)
    joined: list[tuple[int | None, list[HookMark]]] = []
    seen: set[int] = set()
    for number, (layer, own) in enumerate(runs):
        is_late = layer in seen or (layer is None and number < last)
        if joined and is_late and (layer is not None or joined[-1][0] is not None):
            joined[-1][1].extend(own)
        else:
            joined.append((layer, own))
        if layer is not None:
            seen.add(layer)
    return joined


STEPPING, FIRST = "optimizer_step", Turn(None)


class LayersDiffer(Exception):
    """A layer lacks a module of the one that runs for it, or for the one beside it."""


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


class EngineBytes(NamedTuple):
    """What an engine holds at most in its work at a mark of a turn, or `after` it until the next mark. `is_added`: a
    gradient is gone before the work, added to one that was there. `work`: that of the turn's window. `first`: the first
    of neighbouring layers of the same work, the last of which the turn is, where it holds as much. `starts`: before the
    first work."""

    turn: Turn
    mark: int
    after: bool
    num_bytes: int
    tags: Mapping[Tag, int]
    is_added: bool = False
    work: int = -1
    first: int | None = None
    starts: bool = False


class EngineWalk:
    """Plays a load, a step, an evaluation and the step that all later ones are like. `holdings`: by phase, what the
    engine holds at each mark. It is the same for all runs whose windows have the same work."""

    def __init__(
        self,
        windows: Mapping[str, Sequence[Window]],
        depth: Depth,
        engine: ShardedEngine | WholeEngine,
        micro_steps: int,
    ) -> None:
        """The engine's storages are counted by the meter that runs, which is an EngineMeter."""
        assert isinstance(Running.meter, EngineMeter)
        self.windows = windows
        self.depth = depth
        self.engine = engine
        self.meter = Running.meter
        self.works = {
            "begin": engine.begin_step,
            "begin backward": engine.begin_backward,
            "end backward": engine.end_backward,
            "step": engine.run_optimizer,
            "end evaluation": engine.end_evaluation,
            "save": engine.save,
        }
        self.pins: dict[str, list[Storage | None]] = {}
        self.parts: dict[int, list[tuple[HookMark, SplitPath, SplitPath]]] = {}
        self.marks: dict[tuple[int, int], list[HookMark]] = {}
        self.found: dict[str, list[EngineBytes]] = {STEPPING: []}
        self.meter.measure_anew()
        engine.start()
        self.found[LOAD] = [EngineBytes(FIRST, 0, False, self.meter.device.peak, self.meter.fullest, starts=True)]
        self._play(LOAD)
        self._play(LOAD + SECOND_PASS)
        self._step(micro_steps, finds=False)
        if "evaluation" in windows:
            self._play("evaluation")
        self._step(micro_steps)
        self._play("save")
        self.holdings = {phase: _join_equal(found) for phase, found in self.found.items()}

    def _step(self, micro_steps: int, *, finds: bool = True) -> None:
        for _ in range(micro_steps):
            self._play("forward", finds=finds)
            self._play("backward", finds=finds)
            if finds:
                now = EngineBytes(FIRST, 0, False, self.meter.device.now, dict(self.meter.tags))
                self.found[STEPPING].append(now)
        self._play(STEPPING, finds=finds)

    def _play(self, phase: str, *, finds: bool = True) -> None:
        found, meter = self.found.setdefault(phase, []), self.meter
        windows = self.windows.get(phase, ())
        for window, turn in self.depth.list_windows(phase, windows):
            for at, mark in enumerate(self._list_marks(window, turn.layer)):
                if finds:
                    meter.measure_anew()
                try:
                    is_added = self._do(mark)
                except KeyError as error:
                    raise LayersDiffer(mark.path) from error
                if finds:
                    work = window.work
                    found.append(EngineBytes(turn, at, False, meter.device.peak, meter.fullest, is_added, work))
                    found.append(EngineBytes(turn, at, True, meter.device.now, dict(meter.tags), work=work))

    def _list_marks(self, window: Window, layer: int | None) -> Iterable[HookMark]:
        """A window's marks, with the paths of the layer for which it stands."""
        own = window.layer
        if own is None or layer is None:
            return window.marks
        if window.first not in self.parts:
            self.parts[window.first] = [
                (mark, split_path(mark.path, own), split_path(mark.weight, own)) for mark in window.marks
            ]
        if (window.first, layer) not in self.marks:  # the same in each of the steps
            self.marks[window.first, layer] = [
                HookMark(at, phase, work, join_path(path, layer), is_forward, join_path(weight, layer))
                for (at, phase, work, _, is_forward, _), path, weight in self.parts[window.first]
            ]
        return self.marks[window.first, layer]

    def _do(self, mark: HookMark) -> bool:
        """Returns whether a gradient was added to one that was there, and is gone before the engine does its work."""
        engine = self.engine
        if mark.work == "reduce":
            weight = engine.weights[mark.path]
            was_there = weight.grad is not None
            if engine.reduce(weight) and not was_there:
                peak, fullest = self.meter.device.peak, self.meter.fullest
                weight.grad = Storage(weight.numel * weight.dtype.itemsize, GRADIENTS), weight.dtype
                self.meter.device.peak, self.meter.fullest = peak, fullest  # so far it was a tensor of the backward
            return was_there
        if mark.work in self.works:
            self.works[mark.work]()
        elif isinstance(engine, ShardedEngine):
            self._do_sharded(engine, mark)
        return False

    def _do_sharded(self, engine: ShardedEngine, mark: HookMark) -> None:
        if mark.work == "fetch":
            engine.fetch(mark.path, is_forward=mark.is_forward)
        elif mark.work == "release":
            engine.release(mark.path, is_forward=mark.is_forward)
        elif mark.work == "read":
            engine.read(mark.path, engine.weights[mark.weight])
        elif mark.work == "pin":
            self.pins.setdefault(mark.path, []).append(engine.weights[mark.path].storage)
        elif mark.work == "unpin":
            self.pins[mark.path].pop(0)


def _join_equal(found: Sequence[EngineBytes]) -> list[EngineBytes]:
    """One in place of those of neighbouring layers that do the same and hold as much."""
    kept, runs = list[EngineBytes](), dict[tuple[int, int, bool], list[EngineBytes]]()
    for holding in found:
        if holding.turn.layer is None:
            kept.append(holding)
        else:
            runs.setdefault((holding.work, holding.mark, holding.after), []).append(holding)
    for of_layers in runs.values():
        of_layers.sort(key=lambda each: each.turn)
        for _, equal in groupby(of_layers, key=lambda each: (each.num_bytes, each.is_added)):
            same = list(equal)
            kept.append(same[-1]._replace(first=same[0].turn.layer))
    return kept
