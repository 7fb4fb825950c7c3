"""DeepSpeed's ZeRO-3 on sizes: weights are fetched, prefetched and released, gradients travel in buckets, and each
rank steps its share (runtime/zero: partitioned_param_coordinator, stage3). It knows modules and weights by their
paths."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod

from ulysses_cli.plan.ledger.hooks import (  # fmt: skip
    BUCKET,
    FLUSHED,
    GATHERED,
    GRADIENTS,
    MADE,
    MASTER,
    MOMENTS,
    PARAMETERS,
    SECOND,
    STEPPED,
    ModuleWeights,
    WeightSize,
    is_hidden_matrix,
    tagged,
)
from ulysses_cli.plan.sizes.tensor import FLOAT32, DType, Running, Storage

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


class Status(Enum):
    AWAY = "away"
    COMING = "coming"
    HERE = "here"


class Weight:
    """A weight and where it is. `second`: its share inside a replica; `fetched_for`: the last step of the recorded
    order that was fetched ahead; `grad`: where its gradient is, and in which type."""

    def __init__(self, size: WeightSize) -> None:
        self.path = size.path
        self.number = size.number
        self.dtype = size.dtype
        self.is_trained = size.is_trained
        self.numel, self.is_matrix = prod(size.shape), len(size.shape) >= 2
        self.shape, self.is_hidden = size.shape, is_hidden_matrix(size.path, len(size.shape))
        self.status, self.is_persistent, self.fetched_for = Status.AWAY, False, NEVER
        self.users: set[str] = set()
        self.second: Storage | None = None
        self.storage: Storage | None = None
        self.grad: tuple[Storage, DType] | None = None


class Gather:
    """A collective under way. Several weights come in one buffer and are copied out of it."""

    def __init__(self, weights: Iterable[Weight], buffer: Storage | None) -> None:
        self.weights, self.buffer, self.is_done = tuple(weights), buffer, False

    def wait(self) -> None:
        if self.is_done:
            return
        for weight in self.weights:
            if self.buffer is not None:
                weight.storage = Storage(weight.numel * weight.dtype.itemsize, GATHERED)
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
    return 2 * size + 8 * -(-size // 256) if optimizer == "adamw_8bit" else 8 * size


class ShardedEngine:
    """What one rank holds. Its methods are called where a model's hooks would call them."""

    def __init__(
        self, modules: Sequence[ModuleWeights], weights: Sequence[WeightSize], settings: ShardSettings
    ) -> None:
        self.settings = settings
        self.weights = {size.path: Weight(size) for size in weights}
        self.trained = [weight for weight in self.weights.values() if weight.is_trained]
        self.own = {each.path: [self.weights[name] for name in each.weights] for each in modules}
        of_leaf: dict[str, list[Weight]] = {}
        for each in modules:
            if each.leaf is not None:
                of_leaf.setdefault(each.leaf, []).extend(self.own[each.path])
        self.leaves = set(of_leaf)
        self.fetched = {path: _last_first(of_leaf.get(path, own)) for path, own in self.own.items()}
        self.recomputed: dict[str, set[Weight]] = {path: set() for path in self.own}
        self.coming: dict[Weight, Gather] = {}
        self.in_backward: dict[str, bool] = {}
        self.order: list[str] = []
        self.recorded: list[tuple[Weight, int]] = []
        self.queue: deque[tuple[Weight, int]] = deque()
        self.reuse = self.reuse_of_leaves = Reuse(())
        self.is_recording = self.is_complete = self.runs_backward = False
        self.step = self.num_live = self.num_backwards = 0
        self.filled: list[Weight] = []
        self.num_filled = 0
        self.leaving: dict[Weight, Storage] = {}  # gradients on their way to a disk
        self.states: list[Storage] = []

    def count_share(self, weight: Weight, ranks: int | None = None) -> int:
        return -(-weight.numel // (ranks or self.settings.world_size))

    # --- what exists from the start

    def start(self) -> None:
        """Shares, master weights, gradients and the bucket; then weights that are always whole."""
        settings, weights, meter = self.settings, list(self.weights.values()), Running.meter
        size = weights[0].dtype.itemsize
        for weight in weights:
            weight.is_persistent = weight.numel <= settings.persistence_threshold
        with tagged(*MADE):
            meter.add_temporary(self._count_making() * size)
        for weight in weights:
            self._make_second(weight)
        if not settings.weights_on_host:
            self.states.append(Storage(sum(map(self.count_share, weights)) * size, PARAMETERS))
        self.groups = list(self._list_groups())
        on_disk = [group for group in self.groups if 4 * sum(map(self.count_share, group)) >= SMALLEST_FILE]
        self.swapped = {weight for group in on_disk for weight in group if settings.states_on_disk}
        if not settings.states_on_host:
            for group in self.groups:
                num_bytes = 4 * sum(map(self.count_share, group))
                cast = Storage(num_bytes, STEPPED) if size < 4 else None
                self.states.append(Storage(num_bytes, MASTER))
                del cast
        self.bucket = Storage(settings.reduce_bucket * settings.sent.itemsize, BUCKET)
        if not settings.states_on_host:
            self.states.append(Storage(sum(map(self.count_share, self.trained)) * settings.kept.itemsize, GRADIENTS))
        self.moments: list[Storage] = []
        for weight in self.trained:  # for its gradient's hook
            on_host = self.count_share(weight) * size if settings.weights_on_host else 0
            meter.add_temporary(self.count_share(weight) * settings.world_size * size + on_host)

    def _count_making(self) -> int:
        """The most elements while weights are made: each is whole before it is divided, and those of a module are
        gathered to be drawn. The matrix of a tied head is made too."""
        settings, made, held = self.settings, 0, 0
        on_host, ranks = settings.weights_on_host, settings.world_size
        owners = Counter(weight for weights in self.own.values() for weight in weights)
        for weight in sorted(self.weights.values(), key=lambda weight: weight.number):
            held += 0 if on_host else (self.count_share(weight) + self._count_second(weight)) * owners[weight]
            made = max(made, held + weight.numel)
        if ranks == 1 and not on_host:
            return made
        drawn = max(self._list_drawn(), key=lambda weights: sum(weight.numel for weight in weights))
        arriving = sum(self.count_share(w, settings.replica_size) for w in drawn) if on_host and ranks > 1 else 0
        return max(made, held + sum(weight.numel for weight in drawn) + arriving)

    def _list_drawn(self) -> Iterable[list[Weight]]:
        """What transformers gathers at once: a module's weights and those of modules right below it."""
        drawn: dict[str, list[Weight]] = {}
        for path, weights in self.own.items():
            module = path.replace(".base_layer", "")
            for place in (module, module.rpartition(".")[0]):
                drawn.setdefault(place, []).extend(weights)
        return drawn.values()

    def _list_groups(self) -> Iterable[list[Weight]]:
        """Weights that muon steps, others that decay and those that do not, each cut where a group is full."""
        has_muon = self.settings.optimizer == "muon"
        kinds = {weight: (has_muon and weight.is_hidden, weight.is_matrix) for weight in self.trained}
        for kind in ((True, True), (False, True), (False, False)):
            own = [weight for weight in self.trained if kinds[weight] == kind]
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
        kept = [w for w in self.weights.values() if w.is_persistent and w.status is Status.AWAY]
        on_host, ranks = self.settings.weights_on_host, self.settings.world_size
        shares = [Storage(self.count_share(w) * w.dtype.itemsize, GATHERED) for w in kept if on_host and ranks > 1]
        for weight in kept:
            if ranks > 1 or on_host:
                weight.storage = Storage(self.count_share(weight) * ranks * weight.dtype.itemsize, GATHERED)
            weight.status = Status.HERE
        del shares

    # --- weights that come and go

    def begin_step(self) -> None:
        self.forget_coming()
        if not self.is_complete:
            if self.is_recording:
                self.recorded = [
                    (weight, step)
                    for step, module in enumerate(self.order)
                    for weight in sorted(self.fetched[module], key=lambda weight: weight.number)
                ]
                self.reuse = Reuse(self.own[path] for path in self.order)
                if self.leaves:
                    inside = self._list_inside()
                    self.reuse_of_leaves = Reuse(inside[path] for path in self.order)
                else:
                    self.reuse_of_leaves = self.reuse
                self.is_complete, self.is_recording = True, False
            else:
                self.is_recording = True
        self.queue = deque(self.recorded)
        for weight in self.weights.values():
            weight.fetched_for = NEVER
        self.step = self.num_live = 0

    def forget_coming(self) -> None:
        for weight, gather in list(self.coming.items()):
            gather.wait()
            self._release_weight(weight)
        self.coming.clear()

    def _list_inside(self) -> dict[str, list[Weight]]:
        """By module, the weights of all that is inside."""
        inside: dict[str, dict[Weight, None]] = {path: {} for path in self.own}
        for path, own in self.own.items():
            parts = path.split(".") if path else []
            for length in range(len(parts) + 1):
                inside[".".join(parts[:length])].update(dict.fromkeys(own))
        return {path: list(weights) for path, weights in inside.items()}

    def read(self, module: str, weight: Weight) -> None:
        """A weight that is read outside of its own module belongs to the module that reads it, from then on."""
        if weight.status is Status.AWAY:
            self.own[module].append(weight)
            self.fetched[module] = _last_first([*self.fetched[module], weight])
            self._gather([weight])

    def fetch(self, module: str, *, is_forward: bool) -> None:
        if self.is_recording:
            self.order.append(module)
        if not is_forward:
            self.in_backward[module] = True
        weights = self.fetched[module]
        self._gather(weights)
        recomputes = is_forward and self.runs_backward and self.in_backward
        for weight in weights:
            weight.users.add(module)
            if recomputes and not weight.is_trained:
                owner = next(reversed(self.in_backward))
                self.recomputed[owner].add(weight)
                weight.users.add(owner)
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
        if not away:
            return
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
                weight.storage = Storage(size, GATHERED) if settings.weights_on_host else None
            return Gather(weights, None)
        shares = [self.count_share(weight, ranks) * weight.dtype.itemsize for weight in weights]
        buffer = Storage(sum(shares) * ranks, GATHERED)
        if settings.weights_on_host:
            Running.meter.add_temporary(sum(shares))
        if len(weights) == 1:
            weights[0].storage = buffer
            return Gather(weights, None)
        return Gather(weights, buffer)

    def release(self, module: str, *, is_forward: bool) -> None:
        weights = set(self.fetched[module])
        reuse = self.reuse_of_leaves if module in self.leaves else self.reuse
        gone = {weight for weight in weights if not self.is_complete or self._is_far(weight, reuse)}
        if not is_forward:
            recomputed, self.recomputed[module] = self.recomputed[module], set()
            gone.update(weight for weight in recomputed if not weight.is_persistent)
            weights |= recomputed
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
        self._make_second(weight)
        weight.storage, weight.status = None, Status.AWAY

    def _count_second(self, weight: Weight) -> int:
        settings = self.settings
        is_made = settings.replica_size < settings.world_size
        return self.count_share(weight) * settings.world_size // settings.replica_size if is_made else 0

    def _make_second(self, weight: Weight) -> None:
        size = self._count_second(weight) * weight.dtype.itemsize
        if size and weight.second is None:
            weight.second = Storage(size, SECOND, on_host=self.settings.weights_on_host)

    def end_evaluation(self) -> None:
        self.forget_coming()
        for weight in self.weights.values():
            if weight.status is Status.HERE and not weight.is_persistent:
                self.partition(weight)

    # --- gradients

    def begin_backward(self) -> None:
        self.runs_backward = True
        self.num_backwards += 1

    def end_backward(self) -> None:
        self.runs_backward = False
        self._flush()
        while self.in_backward:
            module, _ = self.in_backward.popitem()
            recomputed, self.recomputed[module] = self.recomputed[module], set()
            for weight in {*self.fetched[module], *recomputed}:
                weight.users.discard(module)
                if not weight.is_persistent:
                    self._release_weight(weight)

    def reduce(self, weight: Weight) -> bool:
        """Puts a gradient into the bucket, which is sent when it is full. Returns whether it stays where it was."""
        most = self.settings.reduce_bucket
        if self.filled and self.num_filled + weight.numel > most:
            self._flush()
        stays = self.num_filled + weight.numel > most
        weight.grad = None if stays else (self.bucket, self.settings.sent)
        self.filled.append(weight)
        self.num_filled += weight.numel
        return stays

    @property
    def adds(self) -> bool:
        """Whether gradients are added to those of a micro-step before."""
        return (self.num_backwards - 1) % self.settings.micro_steps > 0

    def _flush(self) -> None:
        if not self.filled:
            return
        settings = self.settings
        weights = sorted(self.filled, key=lambda weight: weight.number)
        parts = self._scatter(weights)  # which stay until all are copied
        is_last, returns = self.num_backwards % settings.micro_steps == 0, settings.states_on_disk or self.adds
        for weight in weights:
            share = self.count_share(weight)
            if settings.states_on_host and share * settings.rank < weight.numel:
                # the share on the host, copied back (train/optimizer/host_gradients.py; of a disk, partition_grads)
                copied = Storage(share * settings.kept.itemsize if returns else 0, FLUSHED)
                Running.meter.add_temporary((8 if is_last else 0) * min(share, NORM_ELEMENTS))
                if is_last and weight in self.swapped:
                    self.leaving[weight] = copied if settings.kept is FLOAT32 else Storage(4 * share, FLUSHED)
                del copied
            weight.grad = None
        # what is too small for a file, or fills no whole number of blocks, stays until the optimizer's step
        self.leaving = {
            weight: held
            for weight, held in self.leaving.items()
            if held.num_bytes % FILE_BLOCK or held.num_bytes < SMALLEST_FILE
        }
        del parts
        self.filled, self.num_filled = [], 0

    def _scatter(self, weights: list[Weight]) -> list[Storage]:
        settings, ranks, sent = self.settings, self.settings.world_size, self.settings.sent
        grads = [
            grad[0] if grad[1] is sent else Storage(weight.numel * sent.itemsize, FLUSHED)
            for weight in weights
            if (grad := weight.grad) is not None
        ]
        flat = grads[0]
        if len(weights) > 1 or weights[0].numel % ranks:
            flat = Storage(sum(map(self.count_share, weights)) * ranks * sent.itemsize, FLUSHED)
        parts = [flat] * len(weights)
        if sent is not settings.kept:
            parts = [Storage(self.count_share(weight) * settings.kept.itemsize, FLUSHED) for weight in weights]
        return parts

    # --- the optimizer

    def run_optimizer(self) -> None:
        settings, meter = self.settings, Running.meter
        for weight in self.weights.values():
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

    def save(self) -> None:
        """Weights are gathered one by one, and copied."""
        if self.settings.world_size > 1:
            largest = max(self.weights.values(), key=lambda weight: weight.numel)
            with tagged(*GATHERED):
                Running.meter.add_temporary(2 * largest.numel * largest.dtype.itemsize)

    def _step_group(self, number: int, group: list[Weight]) -> None:
        """Joins the gradients, casts them, and makes the moments where they do not exist yet."""
        size = sum(map(self.count_share, group))
        joined = Storage(size * self.settings.kept.itemsize, STEPPED) if len(group) > 1 else None
        cast = Storage(4 * size, STEPPED) if self.settings.kept is not FLOAT32 else joined
        del joined
        is_muon = self.settings.optimizer == "muon" and group[0].is_hidden
        if number == len(self.moments):
            num_bytes = 4 * size if is_muon else count_moment_bytes(size, self.settings.optimizer)
            self.moments.append(Storage(num_bytes, MOMENTS))
        if is_muon:
            for first in range(0, len(group), self.settings.world_size):
                self._orthogonalize(group[first : first + self.settings.world_size])
        del cast

    def _orthogonalize(self, matrices: list[Weight]) -> None:
        """A round of muon, on the rank that gets the largest matrix (train/optimizer/muon.py)."""
        size, ranks = matrices[0].dtype.itemsize, self.settings.world_size
        own, sent = max(matrices, key=lambda weight: weight.numel), sum(map(self.count_share, matrices))
        casts = Storage(sent * size if size < 4 else 0, STEPPED)
        parts = Storage(sent * size, STEPPED)
        del casts
        whole = Storage(self.count_share(own) * ranks * size, STEPPED)
        square = min(own.shape) ** 2
        with tagged(*STEPPED):
            Running.meter.add_temporary(max(2 * own.numel + 2 * square, own.numel + 3 * square) * size)
        del parts, whole
