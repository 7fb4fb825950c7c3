"""An engine at the whole depth of a model, without tensors: what it holds at each mark of each layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from ulysses_cli.plan.ledger.sized.depth import AGAIN_PASS, LOAD, Depth, SplitPath, Turn, Window, join_path, split_path
from ulysses_cli.plan.ledger.sized.hooks import HookMark
from ulysses_cli.plan.ledger.sized.lines import GRADIENTS, TRANSIENTS
from ulysses_cli.plan.ledger.sized.lower_stages import WholeEngine
from ulysses_cli.plan.ledger.sized.sharding import ShardedEngine
from ulysses_cli.plan.sizes.meter import ByteMeter, Tag
from ulysses_cli.plan.sizes.tensor import Running, Storage

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
    of neighbouring layers of the same work, the last of which the turn is, where it holds as much."""

    turn: Turn
    mark: int
    after: bool
    num_bytes: int
    tags: Mapping[Tag, int]
    is_added: bool = False
    work: int = -1
    first: int | None = None


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
        self.windows, self.depth, self.engine, self.meter = windows, depth, engine, Running.meter
        self.pins: dict[str, list[Storage | None]] = {}
        self.parts: dict[int, list[tuple[HookMark, SplitPath, SplitPath]]] = {}
        self.found: dict[str, list[EngineBytes]] = {STEPPING: []}
        self.meter.measure_anew()
        engine.start()
        self.found[LOAD] = [EngineBytes(FIRST, 0, False, self.meter.device.peak, self.meter.fullest)]
        self._play(LOAD)
        self._play(LOAD + AGAIN_PASS)
        self._step(micro_steps, finds=False)
        if "evaluation" in windows:
            self._play("evaluation")
        self._step(micro_steps)
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
        return [
            HookMark(at, phase, work, join_path(path, layer), is_forward, join_path(weight, layer))
            for (at, phase, work, _, is_forward, _), path, weight in self.parts[window.first]
        ]

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
