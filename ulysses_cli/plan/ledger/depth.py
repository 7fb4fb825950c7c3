"""A model's whole depth from a few of its layers: which of them run and stand for all those that are alike, since what
tensors take from one layer to the next does not depend on how many there are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from typing import Any, NamedTuple

from ulysses_cli.plan.ledger.hooks import HookMark, ModuleWeights, WeightSize
from ulysses_cli.plan.sizes.nn import ModuleList, Parameter, SizedModule
from ulysses_cli.plan.sizes.tensor import Tensor

SplitPath = tuple[str, int | None, str]
PLACES = ("layer_idx", "layer_id", "layer_number")  # of a layer in the model
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
                    found.setdefault(name, sizes[source]._replace(path=name))
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
    return [size._replace(number=places[size.path]) for size in weights]


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


def choose_depth(
    stack: Stack,
    num_offloaded: int = 0,
    first_trained: int = 0,
    *,
    is_sample: bool = False,
    ends_at_first: bool = False,
) -> Depth:
    """Of layers of each kind behind each kind, the first runs, and the last of all. The first and the last of a kind
    stand for no other, but in a sample: they begin and end what all layers of the kind read. `ends_at_first`: no
    gradient goes to what is before the layers, so that a sample too has the first one apart. Where some are offloaded,
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
            return kinds[max(0, number - 1)], kinds[number], ends_at_first and not number
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
