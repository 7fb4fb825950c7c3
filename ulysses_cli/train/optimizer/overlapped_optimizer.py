"""Steps groups of weights on the host while the backward still computes gradients of others (ZeRO-3), and calls
DeepSpeed's CPU Adam without Python's lock meanwhile.

A group steps before the norm of all gradients is known, with copies of its weights and moments. A step that the norm
would change is undone and made again in DeepSpeed's own order, so that values never depend on this module."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any

import torch
from torch import Tensor

from ulysses_cli.train.optimizer.host_gradients import HostGradients, holds, keeps_gradients
from ulysses_cli.train.optimizer.states import KINDS, Flat, list_flats

# int ds_adam_step(int, size_t, float x 5, bool, at::Tensor& x 4), as compilers for Linux name it
SYMBOL = "_Z12ds_adam_stepimfffffbRN2at6TensorES1_S1_S1_"
TENSOR = ctypes.POINTER(ctypes.c_void_p)  # an at::Tensor holds one pointer, which is Tensor._cdata
ARGUMENTS = (ctypes.c_int, ctypes.c_size_t, *[ctypes.c_float] * 5, ctypes.c_bool, *[TENSOR] * 4)
PROBE_NUMEL = 300  # whole vectors of a CPU's registers, and some elements more


class UnlockedAdam:
    """DeepSpeed's module of the operator with another `adam_update`."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.function = getattr(ctypes.CDLL(module.__file__), SYMBOL)
        self.function.argtypes, self.function.restype = ARGUMENTS, ctypes.c_int

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def adam_update(self, optimizer: int, step: int, *values: Any) -> int:
        numbers, tensors = values[:-4], values[-4:]
        if any(tensor.dtype != torch.float32 or tensor.device.type != "cpu" for tensor in tensors):
            raise AssertionError("Adam on the host takes float32 tensors on the host")
        references = [ctypes.byref(ctypes.c_void_p(tensor._cdata)) for tensor in tensors]
        return int(self.function(optimizer, step, *numbers, *references))


def unlock(optimizer: Any) -> bool:
    """Returns whether `optimizer`, DeepSpeed's for the host, now gives up the lock. Its library may lack the function;
    then, or where the two calls give different numbers, the optimizer stays as it is."""
    module = getattr(optimizer, "ds_opt_adam", None)
    if module is None:
        return False
    try:
        unlocked = UnlockedAdam(module)
    except (AttributeError, OSError):
        return False
    if not all(map(torch.equal, _probe(optimizer, module), _probe(optimizer, unlocked))):
        return False
    optimizer.ds_opt_adam = unlocked
    return True


def _probe(optimizer: Any, module: Any) -> list[Tensor]:
    """Weight, gradient and moments after one step."""
    numbers = torch.linspace(-1, 1, PROBE_NUMEL)
    tensors = [numbers.clone(), numbers.flip(0), numbers * 0.5, numbers.square()]
    module.create_adam(optimizer.opt_id, 0.1, 0.9, 0.99, 1e-8, 0.1, optimizer.adam_w_mode, False)
    module.adam_update(optimizer.opt_id, 3, 0.1, 0.9, 0.99, 1e-8, 0.1, True, *tensors)
    return tensors


Ready = Callable[[], None]


class OverlappedOptimizer:
    """One rank's. `executor` runs one step at a time. No method is a collective: ranks may differ in what is early.
    `most`: that many groups, from the last, whose gradients come first. The first group's come when the backward is
    over."""

    def __init__(self, gradients: HostGradients, device: torch.device, executor: Executor, most: int) -> None:
        self.gradients, self.device, self.executor = gradients, device, executor
        self.zero = zero = gradients.zero
        self.flats: list[Flat] = list_flats(zero)
        on_host = [group for group in range(1, len(self.flats)) if zero.subgroup_to_device[group] == "cpu"]
        self.copies = {group: [torch.empty(self.flats[group].numel) for _ in KINDS] for group in on_host[-most:]}
        self.num_expected = Counter(self._find_group(p) for group in zero.fp16_groups for p in group if holds(zero, p))
        self.num_arrived: Counter[int] = Counter()
        self.started: dict[int, Future[None]] = {}
        self.stepped: set[int] = set()
        self.is_worthwhile = True  # after a step that was clipped the next one often is; its early steps would be lost
        self.num_kept = self.num_read = 0
        self.own_step, self.own_group_step = zero.step, zero._optimizer_step
        zero.step, zero._optimizer_step = self.step, self.step_group
        zero.unscale_and_clip_grads, zero.partition_grads = self.scale, self.receive

    def receive(self, parameters: Sequence[Any], gradients: Sequence[Tensor]) -> None:
        """In place of partition_grads, which brings gradients of some weights to the host."""
        arrived = [self._find_group(parameter) for parameter in parameters if holds(self.zero, parameter)]
        self.gradients.receive(parameters, gradients)
        if not self.zero.is_gradient_accumulation_boundary() or not self.is_worthwhile:
            return
        wait = self._mark_copies()
        for group in arrived:
            self.num_arrived[group] += 1
            if self.num_arrived[group] == self.num_expected[group] and group in self.copies:
                self.started[group] = self.executor.submit(self._step_overlapped, group, wait)

    def step(self, closure: Any = None) -> Any:
        """In place of DeepSpeed's step. What has not begun yet is left to it."""
        for group, future in self.started.items():
            if not future.cancel():
                future.result()
                self.stepped.add(group)
        result = self.own_step(closure)
        for group in tuple(self.stepped):  # DeepSpeed stepped nothing: a gradient is not finite
            self._undo(group)
        self.started.clear()
        self.num_arrived.clear()
        return result

    def scale(self, group: int, norm: Tensor) -> None:
        """In place of unscale_and_clip_grads, by which DeepSpeed begins a group's step. Keeps an early step whose
        gradients stay as they are."""
        self.is_worthwhile = keeps_gradients(norm, self.zero.loss_scale, self.zero.clip_grad)
        is_final = self.num_arrived[group] == self.num_expected[group]  # no gradient came after the early step
        if group in self.stepped and not (self.is_worthwhile and is_final):
            self._undo(group)
        if group not in self.stepped:
            self.gradients.scale(group, norm)

    def step_group(self, group: int) -> None:
        """In place of _optimizer_step."""
        if group in self.stepped:
            self.stepped.remove(group)
            self.num_kept += 1
        else:
            self.own_group_step(group)

    def read_share(self) -> float:
        """Of the groups that may step early, how many were kept since this was last called."""
        num_kept, self.num_read = self.num_kept - self.num_read, self.num_kept
        return num_kept / len(self.copies) if self.copies else 0.0

    def _step_overlapped(self, group: int, wait: Ready) -> None:
        """Runs in the executor."""
        wait()
        for copy, own in zip(self.copies[group], self._get_tensors(group), strict=True):
            copy.copy_(own)
        self.gradients.cast(group)
        self.own_group_step(group)

    def _undo(self, group: int) -> None:
        self.stepped.remove(group)
        for copy, own in zip(self.copies[group], self._get_tensors(group), strict=True):
            own.copy_(copy)
        state = self.zero.optimizer.state[self.zero.fp32_partitioned_groups_flat[group]]
        self.flats[group].set_step_count(int(state["step"]) - 1)

    def _get_tensors(self, group: int) -> list[Tensor]:
        flat = self.flats[group]
        views = [flat.read(kind, 0, flat.numel) for kind in KINDS]
        return [view for view in views if isinstance(view, Tensor)]

    def _mark_copies(self) -> Ready:
        """Gradients are copied to the host on the current stream."""
        if self.device.type != "cuda":
            return lambda: None
        event = torch.cuda.Event()
        event.record()
        return event.synchronize

    def _find_group(self, parameter: Any) -> int:
        group, _, _ = self.zero.grad_position[self.zero.get_param_id(parameter)]
        return int(group)
