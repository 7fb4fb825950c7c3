"""A model's whole depth from a few of its layers: layers that are alike run once and stand for all, since what
tensors take from one layer to the next does not depend on how many there are. An engine without tensors then walks
the whole depth, and says what it holds at each mark of each layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import count, groupby
from typing import Any, NamedTuple

from ulysses_cli.plan.ledger.hooks import (
    GATHERED,
    GRADIENTS,
    TRANSIENTS,
    HookMark,
    ModuleWeights,
    WeightSize,
)
from ulysses_cli.plan.ledger.stage3 import ShardedEngine
from ulysses_cli.plan.ledger.stage_1_and_2 import WholeEngine
from ulysses_cli.plan.sizes.nn import ModuleList, Parameter, SizedModule
from ulysses_cli.plan.sizes.tensor import ByteMeter, Running, Storage, Tag, Tensor

Event = tuple[int, str, Tag]
SplitPath = tuple[str, int | None, str]
PLACES = ("layer_idx", "layer_id", "layer_number")  # of a layer in the model
LOAD, SECOND_PASS = "load", " again"
COPYING = 3  # layers until copies to the host come and go evenly


def read_public(layer: SizedModule) -> dict[str, Any]:
    return {name: value for name, value in vars(layer).items() if not name.startswith("_")}


class Skipped(SizedModule):
    """In place of a layer that is like another one, which runs before: what others read of it, and no work."""

    does_work = False

    def __init__(self, layer: SizedModule, like: SizedModule) -> None:
        super().__init__()
        vars(self).update(read_public(layer))
        self.num_beside: int | None = None  # what the layer returns besides, where it returns a tuple
        like.register_forward_hook(self._count_beside)

    def _count_beside(self, _: Any, __: Any, out: Any) -> None:
        self.num_beside = len(out) - 1 if isinstance(out, tuple) else None

    def __call__(self, hidden: Any, *_: Any, **__: Any) -> Any:
        return hidden if self.num_beside is None else (hidden, *[None] * self.num_beside)


@dataclass(frozen=True)
class Depth:
    """`live`: numbers of the layers that run; what is noted of them has their places in this list instead, so that runs
    that offload another number of layers are the same. `like`: for each layer of the model, the place of the one that
    runs for it."""

    live: tuple[int, ...]
    like: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        """Whether all layers run."""
        return len(self.live) == len(self.like)

    def shorten(self, most: int) -> Depth:
        """With no more than so many layers for each that runs."""
        like: list[int] = []
        for place in self.like:
            if like.count(place) < most:
                like.append(place)
        return replace(self, like=tuple(like))

    def skip(self, layers: ModuleList) -> None:
        """Replaces layers that do not run."""
        for number, (layer, place) in enumerate(zip(list(layers), self.like, strict=True)):
            if number not in self.live:
                layers._modules[str(number)] = Skipped(layer, layers[self.live[place]])

    def count_skipped(self, layers: Sequence[SizedModule]) -> int:
        """Bytes of constants that layers would have which do not run."""
        constants = [count_constants(layers[number]) for number in self.live]
        return sum(constants[place] for place in self.like) - sum(constants)

    def rename(self, path: str) -> str:
        """A path with the place of a layer that runs in place of its number."""
        number = find_number(path)
        return path if number is None else replace_number(path, self.live.index(number))

    def list_windows(self, phase: str, windows: Sequence[Window]) -> Iterator[tuple[Window, Turn]]:
        """Of the whole model: a window, and the turn in which it comes."""
        of_layer = {window.layer: window for window in windows if window.layer is not None}
        num_others, is_first = 0, True
        for window in windows:
            if window.layer is None or self.is_whole:
                yield window, Turn(window.layer, num_others)
                num_others += 1
            elif is_first:
                is_first = False
                layers = range(len(self.like))
                for layer in reversed(layers) if phase == "backward" else layers:
                    if self.like[layer] in of_layer:  # the backward ends above layers that are frozen
                        yield of_layer[self.like[layer]], Turn(layer)

    def expand(
        self, modules: Sequence[ModuleWeights], weights: Sequence[WeightSize]
    ) -> tuple[list[ModuleWeights], list[WeightSize]]:
        """Those of all layers, in the model's order."""
        sizes = {size.path: size for size in weights}
        of_layer: dict[int | None, list[ModuleWeights]] = {}
        for module in modules:
            of_layer.setdefault(find_number(module.path), []).append(module)
        grown, found = list[ModuleWeights](), dict[str, WeightSize]()
        for module in modules:
            layer = find_number(module.path)
            if layer is not None and module is not of_layer[0][0]:
                continue
            copies: list[tuple[ModuleWeights, int | None, int]] = [(module, None, 0)]
            if layer is not None:
                copies = [(each, own, at) for at, own in enumerate(self.like) for each in of_layer[own]]
            for each, own, at in copies:
                names = [_move(name, own, at) for name in each.weights]
                leaf = None if each.leaf is None else _move(each.leaf, own, at)
                grown.append(ModuleWeights(_move(each.path, own, at), names, leaf))
                for name, source in zip(names, each.weights, strict=True):
                    found.setdefault(name, replace(sizes[source], path=name))
        return grown, _number(list(found.values()), sizes.values())


def _move(path: str, own: int | None, number: int) -> str:
    return replace_number(path, number) if own is not None and find_number(path) == own else path


def split_path(path: str, own: int) -> SplitPath:
    """A path in the window of a layer as what stands before and behind the layer's number, and how far that number is
    from the window's."""
    number = find_number(path)
    if number is None:
        return path, None, ""
    before, _, behind = path.partition(f".{number}")
    return f"{before}.", number - own, behind


def join_path(parts: SplitPath, number: int) -> str:
    before, offset, behind = parts
    return before if offset is None else f"{before}{number + offset}{behind}"


def replace_number(path: str, number: int) -> str:
    own = find_number(path)
    return path if own is None else join_path(split_path(path, own), number)


def _number(weights: list[WeightSize], sizes: Iterable[WeightSize]) -> list[WeightSize]:
    """As they are made: layer by layer, each in the order of the one that it is like."""
    firsts: dict[bool, int] = {}
    for size in sizes:
        if find_number(size.path) is not None:
            firsts[size.is_late] = min(size.number, firsts.get(size.is_late, size.number))

    def rank(size: WeightSize) -> tuple[int, int, int]:
        layer = find_number(size.path)
        return (size.number, 0, 0) if layer is None else (firsts[size.is_late], layer, size.number)

    places = {size.path: place for place, size in enumerate(sorted(weights, key=rank))}
    return [replace(size, number=places[size.path]) for size in weights]


@cache
def find_number(path: str) -> int | None:
    """Of the layer that a path leads into."""
    return next((int(part) for part in path.split(".") if part.isdigit()), None)


def find_layers(model: SizedModule) -> ModuleList | None:
    """The model's own list of layers: the longest of those that are nearest to its root."""
    lists = [(path, module) for path, module in model.named_modules() if isinstance(module, ModuleList)]
    found = min(lists, key=lambda each: (each[0].count("."), -len(each[1])), default=None)
    return None if found is None else found[1]


def describe_layer(layer: SizedModule) -> Hashable:
    """What makes two layers alike: the same modules with the same sizes and settings."""
    return tuple(
        (
            path,
            type(module),
            tuple((name, p.shape, p.requires_grad) for name, p in module._parameters.items() if p is not None),
            tuple(
                (name, value)
                for name, value in vars(module).items()
                if isinstance(value, bool | int | float | str) and name not in PLACES
            ),
        )
        for path, module in layer.named_modules()
    )


def count_constants(layer: SizedModule) -> int:
    """Bytes of a layer's tensors that are no weights, such as the scales of a quantized one."""
    found = {
        id(value.storage): value.storage.num_bytes
        for module in layer.modules()
        for value in (*vars(module).values(), *module._buffers.values())
        if isinstance(value, Tensor) and not isinstance(value, Parameter)
    }
    return sum(found.values())


@dataclass(frozen=True)
class Stack:
    """A model's layers: a number for each kind. `is_apart`: no two layers share weights. `seen`: the class of each, and
    what others read of it."""

    kinds: tuple[int, ...]
    is_apart: bool
    seen: tuple[tuple[type[SizedModule], Mapping[str, Any]], ...] = ()

    def tell_apart(self, num_saved: int) -> Stack:
        """With kinds of their own for the last layers, where these save all."""
        first, most = len(self.kinds) - num_saved, max(self.kinds, default=0) + 1
        kinds = tuple(kind if number < first else kind + most for number, kind in enumerate(self.kinds))
        return replace(self, kinds=kinds)

    @contextmanager
    def make_few(self, live: Collection[int]) -> Iterator[None]:
        """While a model is made, layers that do not run get no modules."""
        numbers, classes = count(), {kind for kind, _ in self.seen}
        own = {kind: kind.__init__ for kind in classes}

        def start(layer: SizedModule, *args: Any, **named: Any) -> None:
            number = next(numbers)
            if number in live or number >= len(self.seen):
                own[type(layer)](layer, *args, **named)
            else:
                SizedModule.__init__(layer)
                vars(layer).update(self.seen[number][1])

        for kind in classes:
            kind.__init__ = start  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            for kind in classes:
                kind.__init__ = own[kind]  # type: ignore[method-assign]


def describe_stack(layers: Sequence[SizedModule]) -> Stack:
    owners = Counter(id(weight) for layer in layers for weight in {id(p): p for p in layer.parameters()}.values())
    numbers: dict[Hashable, int] = {}
    kinds = tuple(numbers.setdefault(describe_layer(layer), len(numbers)) for layer in layers)
    seen = tuple((type(layer), read_public(layer)) for layer in layers)
    return Stack(kinds, max(owners.values(), default=1) == 1, seen)


def choose_depth(stack: Stack, num_offloaded: int = 0, first_trained: int = 0, *, is_sample: bool = False) -> Depth:
    """Of layers of each kind behind each kind, the first runs, and the last of all. The first and the last of a kind
    stand for no other, but in a sample: they begin and end what all layers of the kind read. Where some are offloaded,
    copies leave two layers later and come back one layer earlier. Layers below the first that is trained save nothing.
    Layers that share weights are never alike: one of them gets the sum of their gradients."""
    kinds, every = stack.kinds, tuple(range(len(stack.kinds)))
    if not stack.is_apart:
        return Depth(every, every)
    last, firsts = len(kinds) - 1, dict[Hashable, int]()
    ends = {kind: number for number, kind in enumerate(kinds)}.values()
    starts = {kind: number for number, kind in reversed([*enumerate(kinds)])}.values()
    reach = 2 if num_offloaded else 1

    def list_before(number: int) -> tuple[int, ...]:
        return kinds[max(0, number - reach) : number]

    def describe(number: int) -> Hashable:
        if is_sample:
            return kinds[max(0, number - 1)], kinds[number]
        place = 0
        if num_offloaded:
            kept = number - num_offloaded
            place = min(number, COPYING) if kept < 0 else COPYING + 1 + min(kept, 2)
        return (
            kinds[number],
            list_before(number),
            number == last,
            number in starts,
            number in ends,
            number < first_trained,
            place,
        )

    firsts_of = [firsts.setdefault(describe(number), number) for number in every]
    live = sorted(set(firsts_of))
    for at, number in enumerate(live.copy()):
        if tuple(kinds[other] for other in live[max(0, at - reach) : at]) != list_before(number):
            live += range(max(0, number - reach), number)
    live = sorted(set(live))
    # a layer that only runs before another one has the wrong layers before it
    return Depth(tuple(live), tuple(live.index(first) for first in firsts_of))


class Turn(NamedTuple):
    """Of a layer of the whole model, or the first or second of what comes before and after layers."""

    layer: int | None
    number: int = 0


class Window(NamedTuple):
    """What happens while one layer runs, or none, from an event on up to another one. `work`: what the engine does in
    it, as a number that equal work of all runs has."""

    layer: int | None
    marks: list[HookMark]
    first: int
    end: int
    work: int


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
        tags: Counter[Tag] = Counter()
        for size, _, tag in self.events[first:end]:
            if tag != GATHERED:
                tags[tag] += size
        return tags


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
        self.pins: dict[str, list[Storage | None]] = {}
        self.parts: dict[int, list[tuple[HookMark, SplitPath, SplitPath]]] = {}
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
        return [
            HookMark(at, phase, work, join_path(path, layer), is_forward, join_path(weight, layer))
            for (at, phase, work, _, is_forward, _), path, weight in self.parts[window.first]
        ]

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
        elif mark.work == "save":
            engine.save()
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
