"""DeepSpeed's ZeRO-3 on sizes: hooks around modules fetch, prefetch and release weights, gradients travel in buckets,
and each rank steps its share (runtime/zero: parameter_offload, partitioned_param_coordinator, stage3)."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import Any

from ulysses_cli.plan.ledger.sized.lines import (
    AGAIN,
    BUCKET,
    FLUSHED,
    FORWARD,
    GATHERED,
    GRADIENTS,
    MASTER,
    MOMENTS,
    PARAMETERS,
    SECOND,
    STEPPED,
    tagged,
)  # fmt: skip
from ulysses_cli.plan.sizes import autograd
from ulysses_cli.plan.sizes.autograd import Function, Node, begin, finish
from ulysses_cli.plan.sizes.dtypes import FLOAT32, DType
from ulysses_cli.plan.sizes.nn import Parameter, SizedModule
from ulysses_cli.plan.sizes.tensor import Running, Storage, Tensor, make
from ulysses_cli.plan.sizes.views import raw_reshape

NEVER = -(10**10)
NORM_ELEMENTS = 250_000_000  # a gradient's norm on the host is taken of so many at once
SMALLEST_FILE, FILE_BLOCK = 1 << 20, 1024  # swap_tensor/utils.py: MIN_AIO_BYTES, AIO_ALIGNED_BYTES


@dataclass(frozen=True)
class ShardSettings:
    """`sent`: the type in which gradients travel; `kept`: in which the `micro_steps` of a step are summed."""

    world_size: int
    replica_size: int
    rank: int
    weights_on_host: bool
    states_on_host: bool
    states_on_disk: bool
    optimizer: str
    reduce_bucket: int
    prefetch_bucket: int
    max_live: int
    max_reuse_distance: int
    persistence_threshold: int
    sub_group: int
    micro_steps: int
    sent: DType
    kept: DType


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


class Status(Enum):
    AWAY = "away"
    COMING = "coming"
    HERE = "here"


class Weight:
    """A parameter and where it is. `second`: its share inside a replica; `fetched_for`: the last step of the recorded
    order that was fetched ahead."""

    def __init__(self, parameter: Parameter, number: int) -> None:
        self.parameter, self.number = parameter, number
        self.shape, self.dtype, self.numel = parameter.shape, parameter.dtype, parameter.numel()
        self.status, self.is_persistent, self.fetched_for = Status.HERE, False, NEVER
        self.users: set[SizedModule] = set()
        self.second: Tensor | None = None

    @property
    def is_trained(self) -> bool:
        return self.parameter.requires_grad


class Gather:
    """A collective under way. Several weights come in one buffer and are copied out of it."""

    def __init__(self, weights: Iterable[Weight], buffer: Storage | None) -> None:
        self.weights, self.buffer, self.is_done = tuple(weights), buffer, False

    def wait(self) -> None:
        if self.is_done:
            return
        for weight in self.weights:
            if self.buffer is not None:
                weight.parameter.storage = Storage(weight.numel * weight.dtype.itemsize, GATHERED)
            weight.status = Status.HERE
        self.is_done = True


class Reuse:
    """How many elements of weights pass from a step of the recorded order on until a weight is used again."""

    def __init__(self, order: Iterable[list[Weight]]) -> None:
        self.uses: dict[Weight, list[int]] = {}
        self.before = [0]
        for step, weights in enumerate(order):
            for weight in weights:
                self.uses.setdefault(weight, []).append(step)
            self.before.append(self.before[-1] + sum(weight.numel for weight in weights))

    def find(self, weight: Weight, step: int) -> int | None:
        uses = self.uses.get(weight, [])
        at = bisect_left(uses, step)
        return self.before[uses[at]] - self.before[step] if at < len(uses) else None


def _last_first(weights: Iterable[Weight]) -> list[Weight]:
    return sorted(set(weights), key=lambda weight: -weight.number)


def count_moment_bytes(size: int, optimizer: str) -> int:
    return 8 * size if optimizer == "adamw" else 2 * size + 8 * -(-size // 256)


def decays(name: str, parameter: Parameter) -> bool:
    """train/assembly/optimizer.py"""
    return len(parameter.shape) >= 2 and not name.endswith("bias")


def watch(t: Tensor, run: Callable[[Node, list[Any]], Any]) -> Tensor:
    """A view whose backward calls `run`."""
    node = begin(run, t)
    return finish(node, t.detach())


class ShardedEngine:
    """`leaves`: modules that are gathered whole, with all that is inside. `made`: parameters in the order in which the
    engine was told of them; it is told of others at its start."""

    def __init__(
        self,
        root: SizedModule,
        settings: ShardSettings,
        leaves: Collection[SizedModule] = (),
        made: Iterable[Parameter] = (),
    ) -> None:
        self.root, self.settings, self.leaves = root, settings, set(leaves)
        self.places = {module: path for path, module in root.named_modules()}
        modules = list(self.places)
        self.inside = {inner for leaf in self.leaves for inner in leaf.modules() if inner is not leaf}
        numbers = {id(parameter): number for number, parameter in enumerate(made)}
        numbered: dict[int, Weight] = {}
        for parameter in root.parameters():
            number = numbers.setdefault(id(parameter), len(numbers))
            numbered[id(parameter)] = Weight(parameter, number)
        self.numbered, self.weights = numbered, list(numbered.values())
        self.trained = [weight for weight in self.weights if weight.is_trained]
        self.own = {
            module: [numbered[id(p)] for p in module._parameters.values() if p is not None] for module in modules
        }
        self.of_leaf = {leaf: [numbered[id(p)] for p in leaf.parameters()] for leaf in self.leaves}
        self.in_leaves = {weight for weights in self.of_leaf.values() for weight in weights}
        self.fetched = {module: _last_first(self.of_leaf.get(module, self.own[module])) for module in modules}
        self.recomputed: dict[SizedModule, set[Weight]] = {module: set() for module in modules}
        self.remaining, self.waiting = dict.fromkeys(modules, 0), dict.fromkeys(modules, 0)
        self.coming: dict[Weight, Gather] = {}
        self.in_backward: dict[SizedModule, bool] = {}
        self.running: list[SizedModule] = []
        self.order: list[SizedModule] = []
        self.recorded: list[tuple[Weight, int]] = []
        self.queue: deque[tuple[Weight, int]] = deque()
        self.reuse = self.reuse_of_leaves = Reuse(())
        self.is_recording = self.is_complete = self.runs_backward = False
        self.step = self.num_live = self.num_backwards = 0
        self.filled: list[Weight] = []
        self.num_filled = 0
        self.leaving: dict[Weight, Tensor] = {}  # gradients on their way to a disk
        self.states: list[Storage] = []
        self.nothing = Storage(0)

    def count_share(self, weight: Weight, ranks: int | None = None) -> int:
        return -(-weight.numel // (ranks or self.settings.world_size))

    # --- what exists from the start

    def start(self) -> None:
        """Shares, master weights, gradients and the bucket; then weights that are always whole."""
        settings, size = self.settings, self.weights[0].dtype.itemsize
        for weight in self.weights:
            weight.is_persistent = weight.numel <= settings.persistence_threshold
            weight.parameter.storage, weight.status = self.nothing, Status.AWAY
            if weight.is_trained:
                weight.parameter.register_post_accumulate_grad_hook(lambda _, weight=weight: self._take(weight))
        Running.meter.add_temporary(self._count_making() * size)
        if not settings.weights_on_host:
            self.states.append(Storage(sum(map(self.count_share, self.weights)) * size, PARAMETERS))
        self.groups = list(self._list_groups())
        on_disk = [group for group in self.groups if 4 * sum(map(self.count_share, group)) >= SMALLEST_FILE]
        self.swapped = {weight for group in on_disk for weight in group if settings.states_on_disk}
        if not settings.states_on_host:
            for group in self.groups:
                num_bytes = 4 * sum(map(self.count_share, group))
                cast = Storage(num_bytes, STEPPED) if size < 4 else None
                self.states.append(Storage(num_bytes, MASTER))
                del cast
        with tagged(*BUCKET):
            self.bucket = make((settings.reduce_bucket,), settings.sent)
        if not settings.states_on_host:
            self.states.append(Storage(sum(map(self.count_share, self.trained)) * settings.kept.itemsize, GRADIENTS))
        self.moments: list[Storage] = []
        self._gather_persistent()

    def _count_making(self) -> int:
        """The most elements while weights are made: each is whole before it is divided, and transformers gathers those
        of a module to draw them. The matrix of a tied head is made too."""
        settings, made, held = self.settings, 0, 0
        on_host, ranks = settings.weights_on_host, settings.world_size
        owners = Counter(weight for weights in self.own.values() for weight in weights)
        for weight in sorted(self.weights, key=lambda weight: weight.number):
            held += 0 if on_host else self.count_share(weight) * owners[weight]
            made = max(made, held + weight.numel)
        if ranks == 1 and not on_host:
            return made
        drawn = max(self.own.values(), key=lambda weights: sum(weight.numel for weight in weights))
        arriving = sum(self.count_share(w, settings.replica_size) for w in drawn) if on_host and ranks > 1 else 0
        return max(made, held + sum(weight.numel for weight in drawn) + arriving)

    def _list_groups(self) -> Iterable[list[Weight]]:
        """Weights that decay and others, each cut where a group is full."""
        for decays in (True, False):
            own = [weight for weight in self.trained if (len(weight.shape) >= 2) == decays]
            is_cut = sum(map(self.count_share, own)) > self.settings.sub_group
            group: list[Weight] = []
            for weight in own:
                group.append(weight)
                if is_cut and sum(map(self.count_share, group)) >= self.settings.sub_group:
                    yield group
                    group = []
            if group:
                yield group

    def _gather_persistent(self) -> None:
        kept = [w for w in self.weights if w.is_persistent and w.status is Status.AWAY]
        on_host, ranks = self.settings.weights_on_host, self.settings.world_size
        shares = [Storage(self.count_share(w) * w.dtype.itemsize, GATHERED) for w in kept if on_host and ranks > 1]
        for weight in kept:
            if ranks > 1 or on_host:
                weight.parameter.storage = Storage(self.count_share(weight) * ranks * weight.dtype.itemsize, GATHERED)
            weight.status = Status.HERE
        del shares

    # --- hooks

    def call(self, module: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """In place of a module's forward."""
        if module not in self.own:
            return module.forward(*args, **named)
        with tagged(AGAIN if self.runs_backward else FORWARD, self.places[module]):
            return module.forward(*args, **named) if module in self.inside else self._call(module, args, named)

    def _call(self, module: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if module is self.root:
            self._begin_step()
        if self.is_recording:
            self.order.append(module)
        self._fetch(module, is_forward=True)
        self.remaining[module] = 0
        args = tuple(self._watch_input(module, each) if isinstance(each, Tensor) else each for each in args)
        if module in self.leaves and Running.grad:
            args = tuple(_LeafHook(self, module).watch(each) if isinstance(each, Tensor) else each for each in args)
        self.running.append(module)
        out = module.forward(*args, **named)
        del args
        self.running.pop()
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
                if self.is_recording:
                    self.order.append(module)
                self._fetch(module, is_forward=False)
                self.waiting[module] -= 1
            return grads

        return watch(t, run)

    def _list_inside(self, module: SizedModule) -> list[Weight]:
        return [*dict.fromkeys(weight for inner in module.modules() for weight in self.own[inner])]

    def read(self, parameter: Parameter) -> None:
        """A weight that is read outside of its own module belongs to the module that reads it, from then on."""
        weight = self.numbered.get(id(parameter))
        if weight is None or weight.status is not Status.AWAY or self.running[:1] != [self.root] or self.runs_backward:
            return
        module = self.running[-1]
        self.own[module].append(weight)
        self.fetched[module] = _last_first([*self.fetched[module], weight])
        self._gather([weight])

    # --- weights that come and go

    def _begin_step(self) -> None:
        self.forget_coming()
        if not self.is_complete:
            if self.is_recording:
                self.recorded = [
                    (weight, step)
                    for step, module in enumerate(self.order)
                    for weight in sorted(self.fetched[module], key=lambda weight: weight.number)
                ]
                self.reuse = Reuse(self.own[module] for module in self.order)
                of_leaves = (self._list_inside(module) for module in self.order)
                self.reuse_of_leaves = Reuse(of_leaves) if self.leaves else self.reuse
                self.is_complete, self.is_recording = True, False
            else:
                self.is_recording = True
        self.queue = deque(self.recorded)
        for weight in self.weights:
            weight.fetched_for = NEVER
        self.step = self.num_live = 0

    def forget_coming(self) -> None:
        for weight, gather in list(self.coming.items()):
            gather.wait()
            self._release_weight(weight)
        self.coming.clear()

    def _fetch(self, module: SizedModule, *, is_forward: bool) -> None:
        if not is_forward:
            self.in_backward[module] = True
        weights = self.fetched[module]
        self._gather(weights)
        recomputes = is_forward and self.runs_backward and self.in_backward
        for weight in weights:
            weight.users.add(module)
            if recomputes and not weight.is_trained:
                self.recomputed[next(reversed(self.in_backward))].add(weight)
            if weight in self.coming:
                self.coming.pop(weight).wait()
        if self.is_complete:
            missing = sum(weight.fetched_for < self.step for weight in weights)
            seen: set[Weight] = set()
            while self.queue and len(seen) < missing:
                weight, weight.fetched_for = self.queue.popleft()
                seen.add(weight)
            if self.settings.prefetch_bucket > 0:
                self._prefetch()
        self.step += 1

    def _prefetch(self) -> None:
        most = min(self.settings.max_live - self.num_live, self.settings.prefetch_bucket)
        wanted: dict[Weight, None] = {}
        size = 0
        while self.queue and size < most:
            weight, step = self.queue.popleft()
            is_new = weight.status is Status.AWAY and weight not in wanted
            weight.fetched_for = max(weight.fetched_for, step)
            if is_new:
                wanted[weight] = None
                size += weight.numel
        if size:
            self._gather(wanted)

    def _gather(self, weights: Iterable[Weight]) -> None:
        away = [weight for weight in weights if weight.status is Status.AWAY]
        self.num_live += sum(weight.numel for weight in away)
        for in_replica in (True, False):
            group = [weight for weight in away if (weight.second is not None) == in_replica]
            if group:
                gather = self._start(sorted(group, key=lambda weight: weight.number), in_replica=in_replica)
                self.coming.update(dict.fromkeys(group, gather))

    def _start(self, weights: list[Weight], *, in_replica: bool) -> Gather:
        settings = self.settings
        ranks = settings.replica_size if in_replica else settings.world_size
        for weight in weights:
            weight.status = Status.COMING
        if settings.world_size == 1:
            for weight in weights:
                size = weight.numel * weight.dtype.itemsize
                weight.parameter.storage = Storage(size, GATHERED) if settings.weights_on_host else self.nothing
            return Gather(weights, None)
        shares = [self.count_share(weight, ranks) * weight.dtype.itemsize for weight in weights]
        buffer = Storage(sum(shares) * ranks, GATHERED)
        if settings.weights_on_host:
            Running.meter.add_temporary(sum(shares))
        if len(weights) == 1:
            weights[0].parameter.storage = buffer
            return Gather(weights, None)
        return Gather(weights, buffer)

    def _release(self, module: SizedModule, *, is_forward: bool) -> None:
        weights = set(self.fetched[module])
        reuse = self.reuse_of_leaves if module in self.leaves else self.reuse
        gone = {weight for weight in weights if not self.is_complete or self._is_far(weight, reuse)}
        if not is_forward:
            again, self.recomputed[module] = self.recomputed[module], set()
            gone.update(weight for weight in again if not weight.is_persistent)
            weights |= again
            self.in_backward.pop(module, None)
        for weight in weights:
            weight.users.discard(module)
            if weight in gone:
                self._release_weight(weight)

    def _is_far(self, weight: Weight, reuse: Reuse) -> bool:
        if weight.is_persistent or weight.fetched_for > self.step:
            return False
        distance = reuse.find(weight, self.step)
        return distance is None or distance >= self.settings.max_reuse_distance

    def _release_weight(self, weight: Weight) -> None:
        if weight.status is Status.HERE and not weight.users:
            self.partition(weight)
            self.num_live -= weight.numel

    def partition(self, weight: Weight) -> None:
        settings = self.settings
        if settings.replica_size < settings.world_size and weight.second is None:
            size = self.count_share(weight) * settings.world_size // settings.replica_size
            with tagged(*SECOND):
                weight.second = make((size,), weight.dtype, on_host=settings.weights_on_host)
        weight.parameter.storage, weight.status = self.nothing, Status.AWAY

    def end_evaluation(self) -> None:
        self.forget_coming()
        for weight in self.weights:
            if weight.status is Status.HERE and not weight.is_persistent:
                self.partition(weight)

    # --- gradients

    def run_backward(self, loss: Tensor) -> None:
        self.runs_backward = True
        self.num_backwards += 1
        autograd.backward([loss], [make((), FLOAT32)])
        self.runs_backward = False
        self._flush()
        while self.in_backward:
            module, _ = self.in_backward.popitem()
            again, self.recomputed[module] = self.recomputed[module], set()
            for weight in {*self.fetched[module], *again}:
                weight.users.discard(module)
                if not weight.is_persistent:
                    self._release_weight(weight)

    def _take(self, weight: Weight) -> None:
        if weight not in self.in_leaves:
            self.reduce(weight)

    def reduce(self, weight: Weight) -> None:
        """Puts a gradient into the bucket, which is sent when it is full."""
        most = self.settings.reduce_bucket
        if self.filled and self.num_filled + weight.numel > most:
            self._flush()
        if self.num_filled + weight.numel <= most:
            weight.parameter.grad = Tensor(weight.shape, self.settings.sent, self.bucket.storage)
        self.filled.append(weight)
        self.num_filled += weight.numel

    def _flush(self) -> None:
        if not self.filled:
            return
        settings = self.settings
        weights = sorted(self.filled, key=lambda weight: weight.number)
        parts = self._scatter(weights)
        for weight, part in zip(weights, parts, strict=True):
            if settings.states_on_host and self.count_share(weight) * settings.rank < weight.numel:
                copied = make(part.shape, settings.kept)  # the share on the host, copied back
                is_last = self.num_backwards % settings.micro_steps == 0
                Running.meter.add_temporary(is_last * 8 * min(part.numel(), NORM_ELEMENTS))
                if is_last and weight in self.swapped:
                    self.leaving[weight] = copied if settings.kept is FLOAT32 else make(part.shape, FLOAT32)
                del copied
            weight.parameter.grad = None
        # what is too small for a file, or fills no whole number of blocks, stays until the optimizer's step
        self.leaving = {w: t for w, t in self.leaving.items() if t.nbytes % FILE_BLOCK or t.nbytes < SMALLEST_FILE}
        self.filled, self.num_filled = [], 0

    def _scatter(self, weights: list[Weight]) -> list[Tensor]:
        settings, ranks = self.settings, self.settings.world_size
        grads: list[Any] = [weight.parameter.grad for weight in weights]
        grads = [grad if grad.dtype is settings.sent else make(grad.shape, settings.sent) for grad in grads]
        if len(weights) == 1 and weights[0].numel % ranks == 0:
            flat = grads[0].storage
        else:
            flat = Storage(sum(map(self.count_share, weights)) * ranks * settings.sent.itemsize, FLUSHED)
        parts = [Tensor((self.count_share(weight),), settings.sent, flat) for weight in weights]
        del flat
        return parts if settings.sent is settings.kept else [make(part.shape, settings.kept) for part in parts]

    # --- the optimizer

    def run_optimizer(self) -> None:
        settings, meter = self.settings, Running.meter
        for weight in self.weights:
            if weight in self.coming:
                self.coming.pop(weight).wait()
            weight.users.clear()
            self._release_weight(weight)
        if not settings.states_on_host:
            for weight in self.trained:  # its share of the norm
                meter.add_temporary(8 * self.count_share(weight))
            for number, group in enumerate(self.groups):
                self._step_group(number, group)
        self.leaving.clear()
        self._gather_persistent()
        for weight in self.trained:
            weight.second = None

    def _step_group(self, number: int, group: list[Weight]) -> None:
        """Joins the gradients, casts them, and makes the moments where they do not exist yet."""
        size = sum(map(self.count_share, group))
        joined = Storage(size * self.settings.kept.itemsize, STEPPED) if len(group) > 1 else None
        cast = Storage(4 * size, STEPPED) if self.settings.kept is not FLOAT32 else joined
        del joined
        if number == len(self.moments):
            self.moments.append(Storage(count_moment_bytes(size, self.settings.optimizer), MOMENTS))
        del cast


class _LeafHook:
    """Of a module that is gathered whole: its gradients are reduced when that of an input is there."""

    def __init__(self, engine: ShardedEngine, module: SizedModule) -> None:
        self.engine, self.module, self.is_done = engine, module, False

    def watch(self, t: Tensor) -> Tensor:
        return watch(t, self._run) if t.requires_grad else t

    def _run(self, _: Node, grads: list[Any]) -> Any:
        if not self.is_done:
            self.is_done = True
            for weight in self.engine.of_leaf[self.module]:
                if weight.is_trained:
                    if weight.parameter.grad is None:
                        weight.parameter.grad = make(weight.shape, weight.dtype)
                    self.engine.reduce(weight)
        return grads
