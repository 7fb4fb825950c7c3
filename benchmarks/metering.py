"""Counts what one forward and backward costs with a dispatch mode: FLOPs, calls, and the bytes alive by phase."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import paths  # noqa: F401
import torch
from support.byte_counter import ByteCounter
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry, register_flop_formula

LARGE_BYTES = 2**16  # smaller tensors are bookkeeping


class Meter(ByteCounter):
    """Counts each storage in the phase that makes it: layers, attention or loss. Host memory does not count. With
    `is_computing` False, operators that have FLOPs return zeros of the right shape: counts stay the same, values are
    wrong, and hours are saved."""

    def __init__(self, *, is_computing: bool) -> None:
        super().__init__(min_bytes=LARGE_BYTES)
        self.phase, self.is_counting, self.is_computing = "layers", True, is_computing
        self.flops: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.given: set[int] = set()  # results and gradients that attention and the loss hand to the layers
        self.phases: list[str] = []  # by number of a storage
        self.kept: set[int] = set()
        self._open = list_open_ops()
        self._follows_collective = False

    def mark_host(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Marks the function's result as host memory, also when no operator made it."""

        def call(*args: Any) -> Tensor:
            with self.in_phase("host"):
                tensor = function(*args)
                self.track(tensor)
                return tensor

        return call

    @contextlib.contextmanager
    def in_phase(self, phase: str) -> Iterator[None]:
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def enter_loss(self, hidden: Tensor) -> Tensor:
        """Notes what is alive between the layers' forward and their backward: that is what they saved."""
        self.kept = self.list_alive() - {self.get_number(hidden)}
        self.phase = "loss"
        return _Gate.apply(self, "layers", hidden)

    def give(self, *tensors: Tensor) -> None:
        """Counts tensors that leave a phase as their caller's."""
        self.given |= {self.get_number(tensor) for tensor in tensors}

    def record(self, number: int, num_bytes: int) -> None:
        if num_bytes > 0:
            self.phases.append(self.phase)
        super().record(number, num_bytes)

    def run(self, op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if self._follows_collective:  # gloo's own thread frees its buffers a moment after
            time.sleep(0.01)
        self._follows_collective = op.namespace == "c10d"
        if op.name() in self._open:  # its FLOP formula counts; its inner operators only show their bytes
            with self.paused(), self:
                result = self._open[op.name()](*args, **kwargs)
        elif op._overloadpacket in flop_registry and not self.is_computing:
            result = _make_zeros(op, args, kwargs)
        else:
            result = op(*args, **kwargs)
        self.calls[op._overloadpacket.__name__] += 1
        if self.is_counting and op._overloadpacket in flop_registry:
            self.flops[self.phase] += flop_registry[op._overloadpacket](*args, **kwargs, out_val=result)
        return result

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        before, self.is_counting = self.is_counting, False
        try:
            yield
        finally:
            self.is_counting = before

    def compute_peaks(self) -> dict[str, int]:
        """Returns bytes on the device at the peak, split by phase, and the most that attention and the loss held at
        once."""
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
    """Passes tensors and gradients on, and switches the phase when gradients pass."""

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
    """Registers an attention of transformers that reports attention's forward and backward to the meter."""
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


def list_open_ops() -> dict[str, Callable[..., Any]]:
    """Returns, by name, the custom operators whose inner operators are counted too, with what each runs."""
    from deepspeed.sequence import layer

    from ulysses_cli.train.attention.kernels import operators

    ops = (operators.attend, operators.attend_backward, layer._dim_zero_all_to_all_op)
    return {op._qualname: op._init_fn for op in ops}


def register_cpu_flops() -> None:
    """Registers FLOP formulas, since torch counts its CPU flash attention and in-place added products as nothing.
    Causal pairs are counted, as for our operators."""
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
