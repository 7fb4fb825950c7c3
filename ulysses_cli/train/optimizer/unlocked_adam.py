"""Calls DeepSpeed's CPU Adam without Python's lock, so that other threads go on launching kernels during an update.

DeepSpeed's binding keeps the lock for the whole call, which takes 0.1 s and more. The same function of the same library
is called through ctypes, which gives the lock up. Uses the compiled operator; compiles nothing.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

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
