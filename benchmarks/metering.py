"""What one forward and backward costs, seen by a dispatch mode: FLOPs, calls, and which bytes are alive when."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry, register_flop_formula

LARGE_BYTES = 2**16  # smaller tensors are bookkeeping


class Meter(TorchDispatchMode):
    """Every storage is born in a phase: layers, attention, loss; or in host memory, where it does not count.

    `is_computing` False: what has FLOPs gives zeros of the right shape instead. Counts stay; values and hours go.
    """

    def __init__(self, *, is_computing: bool) -> None:
        super().__init__()
        self.phase, self.is_counting, self.is_computing = "layers", True, is_computing
        self.flops: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.events: list[tuple[int, int]] = []  # (storage, its bytes, or less than 0 when it dies)
        self.given: set[int] = set()  # results and gradients that attention and the loss hand to the layers
        self.phases: dict[int, str] = {}
        self.kept: set[int] = set()
        self._numbers: dict[int, int] = {}
        self._ignored: set[int] = set()
        self._open = _list_open_ops()
        self._follows_collective = False

    def ignore(self, *tensors: Tensor) -> None:
        """Weights and inputs: there before and after."""
        self._ignored |= {tensor.untyped_storage()._cdata for tensor in tensors}

    def mark_host(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """What it gives is host memory, also when no operator made it."""

        def call(*args: Any) -> Tensor:
            with self.in_phase("host"):
                found = function(*args)
                self.track(found)
                return found

        return call

    @contextlib.contextmanager
    def in_phase(self, phase: str) -> Iterator[None]:
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def enter_loss(self, hidden: Tensor) -> Tensor:
        """What is alive now, between the layers' forward and their backward, is what they kept."""
        self.kept = set(self._numbers.values())
        self.kept.discard(self._numbers.get(hidden.untyped_storage()._cdata, -1))
        self.phase = "loss"
        return _Gate.apply(self, "layers", hidden)

    def track(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._numbers or key in self._ignored or size < LARGE_BYTES:
            return
        number = len(self.phases)
        self.phases[number] = self.phase
        self._numbers[key] = number
        self.events.append((number, size))
        weakref.finalize(storage, self._forget, key, number, size)

    def give(self, *tensors: Tensor) -> None:
        """What leaves a phase belongs to its caller."""
        for tensor in tensors:
            self.given.add(self._numbers.get(tensor.untyped_storage()._cdata, -1))

    def _forget(self, key: int, number: int, size: int) -> None:
        self._numbers.pop(key, None)
        self.events.append((number, -size))

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._follows_collective:  # gloo's own thread lets go of its buffers a moment after
            time.sleep(0.01)
        self._follows_collective = op.namespace == "c10d"
        if op.name() in self._open:  # its formula counts, its inner operators only show their bytes
            with self.paused(), self:
                found = self._open[op.name()](*args, **kwargs)
        elif op._overloadpacket in flop_registry and not self.is_computing:
            found = _make_zeros(op, args, kwargs)
        else:
            found = op(*args, **kwargs)
        name = op._overloadpacket.__name__
        self.calls[name] += 1
        if self.is_counting and op._overloadpacket in flop_registry:
            self.flops[self.phase] += flop_registry[op._overloadpacket](*args, **kwargs, out_val=found)
        for leaf in tree_leaves(found):
            if isinstance(leaf, Tensor):
                self.track(leaf)
        return found

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        before, self.is_counting = self.is_counting, False
        try:
            yield
        finally:
            self.is_counting = before

    def compute_peaks(self) -> dict[str, int]:
        """Bytes on the device at the fullest moment, split; and the most that attention and the loss held at once."""
        alive: Counter[str] = Counter()
        best: Counter[str] = Counter()
        most: Counter[str] = Counter()
        for number, size in self.events:
            phase = self.phases[number]
            if phase == "host":
                continue
            is_inner = number not in self.kept and number not in self.given
            part = "kept" if number in self.kept else "loss tiles" if phase == "loss" and is_inner else "working"
            alive[part] += size
            if phase == "attention" and is_inner:
                alive["attention"] += size
            if not alive["loss tiles"]:
                most["layers"] = max(most["layers"], _sum_parts(alive))
            for key in ("attention", "kept", "loss tiles"):
                most[key] = max(most[key], alive[key])
            if _sum_parts(alive) > _sum_parts(best):
                best = alive.copy()
        return {
            "peak": _sum_parts(best),
            "peak in layers": most["layers"],
            "of which kept": best["kept"],
            "working": best["working"],
            "in the loss": best["loss tiles"],
            "kept on device": most["kept"],
            "loss tiles": most["loss tiles"],
            "attention's own": most["attention"],
        }


def _make_zeros(op: Any, args: Any, kwargs: Any) -> Any:
    if op._schema.is_mutable:  # in place
        return args[0]

    def strip(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")

    def fill(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype).zero_()

    return tree_map(fill, op(*tree_map(strip, args), **tree_map(strip, kwargs)))


def _sum_parts(alive: Counter[str]) -> int:
    return alive["kept"] + alive["working"] + alive["loss tiles"]


class _Gate(torch.autograd.Function):
    """Does nothing but switch the phase when gradients pass."""

    @staticmethod
    def forward(ctx: Any, meter: Meter, phase: str, *tensors: Tensor) -> Any:
        ctx.meter, ctx.phase = meter, phase
        views = tuple(tensor.view_as(tensor) for tensor in tensors)
        return views if len(views) > 1 else views[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        ctx.meter.give(*grads)
        ctx.meter.phase = ctx.phase
        return None, None, *grads


def add_gates(name: str, meter: Meter) -> str:
    """An attention implementation of transformers under which the meter is told of attention's forward and backward."""
    from transformers import AttentionInterface

    inner = AttentionInterface()[name]

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        query, key, value = _Gate.apply(meter, "layers", query, key, value)
        with meter.in_phase("attention"):
            out, weights = inner(module, query, key, value, mask, **kwargs)
        meter.give(out)
        return _Gate.apply(meter, "attention", out), weights

    AttentionInterface.register(f"metered_{name}", attend)
    return f"metered_{name}"


def _list_open_ops() -> dict[str, Callable[..., Any]]:
    from deepspeed.sequence import layer as theirs

    from ulysses_cli.train.attention.kernels import operators

    ops = (operators.attend, operators.attend_backward, theirs._dim_zero_all_to_all_op)
    return {op._qualname: op._init_fn for op in ops}


def register_cpu_flops() -> None:
    """torch counts its CPU flash attention and products that are added in place as nothing. Causal pairs are counted,
    as for our operators."""
    aten = torch.ops.aten
    if aten._scaled_dot_product_flash_attention_for_cpu in flop_registry:
        return

    def count(factor: int) -> Callable[..., int]:
        def formula(first: Any, *args: Any, **kwargs: Any) -> int:
            batch, heads, tokens, dim = first
            return factor * batch * heads * dim * (tokens * (tokens + 1) // 2)

        return formula

    register_flop_formula(aten.addmm_)(lambda total, a, b, **_: 2 * a[0] * a[1] * b[1])
    register_flop_formula(aten._scaled_dot_product_flash_attention_for_cpu)(count(4))
    register_flop_formula(aten._scaled_dot_product_flash_attention_for_cpu_backward)(count(10))
