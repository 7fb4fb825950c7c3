"""DeepSpeed's ZeRO-1 and 2 on sizes: whole weights, gradients in two buckets whose parts are sent to the ranks that
own them, and the step of a share (runtime/zero/stage_1_and_2.py)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from ulysses_cli.plan.ledger.hooks import (
    BUCKET,
    FLUSHED,
    GRADIENTS,
    MASTER,
    MOMENTS,
    PARAMETERS,
    STEPPED,
    WeightSize,
)
from ulysses_cli.plan.ledger.stage3 import ShardSettings, Weight, count_moment_bytes
from ulysses_cli.plan.sizes.tensor import FLOAT32, Running, Storage

NORM_BYTES = 8  # a norm is taken in float64


class Group:
    """Weights in one flat buffer, of which each rank owns a share. `own`: elements of this rank's parts."""

    def __init__(self, weights: list[Weight], ranks: int, rank: int) -> None:
        self.weights, total = weights, 0
        self.starts: dict[Weight, int] = {}
        for weight in weights:
            self.starts[weight] = total
            total += weight.numel
        self.numel = -(-total // (2 * ranks)) * 2 * ranks
        self.is_view = len(weights) == 1 and total == self.numel
        self.share = self.numel // ranks
        parts = {weight: dict(self.list_parts(weight)) for weight in weights}
        self.own = {weight: parts[weight][rank] for weight in weights if rank in parts[weight]}

    def list_parts(self, weight: Weight) -> Iterable[tuple[int, int]]:
        """Of a weight: ranks, and how many elements are theirs."""
        start, end = self.starts[weight], self.starts[weight] + weight.numel
        while start < end:
            rank = start // self.share
            size = min(end, (rank + 1) * self.share) - start
            yield rank, size
            start += size


class WholeEngine:
    """In place of ShardedEngine. Weights are whole."""

    def __init__(self, weights: Sequence[WeightSize], settings: ShardSettings, stage: int) -> None:
        self.settings, self.stage = settings, stage
        self.weights = {size.path: Weight(size) for size in weights}
        for weight in self.weights.values():
            weight.storage = Storage(weight.numel * weight.dtype.itemsize, PARAMETERS)
        self.trained = [weight for weight in self.weights.values() if weight.is_trained]
        kinds = {weight: weight.is_matrix and not weight.path.endswith("bias") for weight in self.trained}
        groups = ([weight for weight in self.trained if kinds[weight] is kind] for kind in (True, False))
        self.groups = [Group(group, settings.world_size, settings.rank) for group in groups if group]
        self.group_of = {weight: group for group in self.groups for weight in group.weights}
        self.own = {weight: size for group in self.groups for weight, size in group.own.items()}
        self.dtype = self.trained[0].dtype
        self.is_compact = settings.kept is FLOAT32 and self.dtype is not FLOAT32
        self.number = self.num_filled = 0
        self.buckets: list[Storage] = []
        self.filled: list[Weight] = []
        self.flat: dict[Group, Storage] = {}  # sums in float32, from the first that is sent on
        self.copies: Storage | None = None  # of a backward's gradients in which this rank has a part
        self.kept: dict[Group, list[Storage]] = {}
        self.states: list[Storage] = []
        self.moments: list[Storage] = []

    @property
    def is_last(self) -> bool:
        return self.number == self.settings.micro_steps

    @property
    def reduces(self) -> bool:
        """ZeRO-1 keeps gradients whole until a step's last backward."""
        return self.stage == 2 or self.is_last

    def start(self) -> None:
        settings, size = self.settings, self.dtype.itemsize
        for group in self.groups:
            flat = group.weights[0].storage if group.is_view else Storage(group.numel * size, PARAMETERS)
            for weight in group.weights:
                weight.storage = flat
            own = Storage(group.share * size, MASTER)
            if not settings.states_on_host:
                self.states.append(own if self.dtype is FLOAT32 else Storage(4 * group.share, MASTER))
            del flat, own
        if settings.states_on_host:
            self.states.append(Storage(max(weight.numel for weight in self.trained) * size, GRADIENTS))
        else:
            zeros = [Storage(4 * group.share, STEPPED) for group in self.groups]
            del zeros

    def begin_step(self) -> None: ...

    def end_evaluation(self) -> None: ...

    def save(self) -> None: ...

    # --- gradients

    def begin_backward(self) -> None:
        self.number += 1

    def end_backward(self) -> None:
        if not self.reduces:
            return
        self._flush()
        if self.is_compact:
            if self.is_last and not self.settings.states_on_host:
                for group in self.groups:
                    self._get_flat(group)
        elif not self.settings.states_on_host:
            for group in self.groups:
                self._keep_own(group)
        self.buckets, self.copies = [], None
        for weight in self.trained:
            weight.grad = None

    def _keep_own(self, group: Group) -> None:
        """Adds to those of the micro-steps before. At the last, what fills up the share is there too."""
        for weight in group.own:
            if weight.grad is None:
                weight.grad = self._make(weight.numel), self.dtype
        self.kept.setdefault(group, [weight.grad[0] for weight in group.own if weight.grad is not None])
        padding = group.share - sum(group.own.values())
        if self.is_last and padding:
            self.kept[group].append(self._make(padding))

    def _make(self, numel: int) -> Storage:
        return Storage(numel * self.dtype.itemsize, GRADIENTS)

    def reduce(self, weight: Weight) -> bool:
        """Puts a gradient into the bucket, which is sent when it is full. One that is larger stays where it is, or for
        an optimizer on the host in a copy. Returns whether it stays where it was."""
        most = self.settings.reduce_bucket
        if not self.buckets:
            self.buckets = [Storage(most * self.dtype.itemsize, BUCKET) for _ in range(2)]
        if not self.reduces:
            return True
        if self.num_filled + weight.numel > most:
            self._flush()
        stays = weight.numel > most and not self.settings.states_on_host
        if weight.numel <= most:
            weight.grad = self.buckets[0], self.dtype
        elif not stays:
            weight.grad = self._make(weight.numel), self.dtype
        self.filled.append(weight)
        self.num_filled += weight.numel
        return stays

    def _flush(self) -> None:
        pieces, numel = [], 0
        for size, is_own in self._list_pieces():
            pieces.append((size, is_own))
            numel += size
            if numel > self.settings.reduce_bucket:
                self._send(pieces)
                pieces, numel = [], 0
        self._send(pieces)
        for weight in self.filled:
            if weight in self.own:
                self._copy_own(weight)
            elif self.stage == 2:
                weight.grad = None
        self.filled, self.num_filled = [], 0

    def _list_pieces(self) -> Iterable[tuple[int, bool]]:
        """Elements of neighbours that go to one rank. What is summed in float32 here is a piece for each weight."""
        parts = []
        for weight in self.filled:
            for rank, size in self.group_of[weight].list_parts(weight):
                is_own = self.is_compact and rank == self.settings.rank
                if is_own:
                    self._get_flat(self.group_of[weight])
                parts.append((rank, weight if is_own else None, size))
        for (_, weight), piece in groupby(parts, key=lambda part: part[:2]):
            yield sum(size for *_, size in piece), weight is not None

    def _send(self, pieces: list[tuple[int, bool]]) -> None:
        numel, sent = sum(size for size, _ in pieces), self.settings.sent
        joined = Storage(numel * self.dtype.itemsize, FLUSHED) if len(pieces) > 1 else None
        cast = Storage(numel * sent.itemsize, FLUSHED) if sent is not self.dtype else joined
        del joined
        if sent is not FLOAT32:
            for size, is_own in pieces:
                Running.meter.add_temporary(4 * size if is_own else 0)
        del cast

    def _get_flat(self, group: Group) -> None:
        if group not in self.flat:
            self.flat[group] = Storage(4 * group.share, GRADIENTS)

    def _copy_own(self, weight: Weight) -> None:
        """copy_grads_in_partition"""
        if self.settings.states_on_host:
            if self.is_last:
                Running.meter.add_temporary(NORM_BYTES * self.own[weight])
                if not self.is_compact and self.dtype is not FLOAT32:
                    Running.meter.add_temporary(4 * self.own[weight])
                weight.grad = None
        elif not self.is_compact:
            if self.copies is None:
                self.copies = Storage(sum(each.numel for each in self.own) * self.dtype.itemsize, GRADIENTS)
            weight.grad = self.copies, self.dtype

    # --- the optimizer

    def run_optimizer(self) -> None:
        self.number = 0
        if self.settings.states_on_host:
            self.flat.clear()
            return
        for size in self.own.values():
            Running.meter.add_temporary(NORM_BYTES * size)
        for number, group in enumerate(self.groups):
            grad = self.flat.pop(group) if self.is_compact else self._join(group)
            if number == len(self.moments):
                self.moments.append(Storage(count_moment_bytes(group.share, self.settings.optimizer), MOMENTS))
            del grad

    def _join(self, group: Group) -> Storage:
        """This rank's gradients in one tensor of float32."""
        parts = self.kept.pop(group)
        joined = Storage(group.share * self.dtype.itemsize, STEPPED) if len(parts) > 1 else parts[0]
        return joined if self.dtype is FLOAT32 else Storage(4 * group.share, STEPPED)
