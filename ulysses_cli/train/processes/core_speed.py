"""How fast one core of this machine runs what launches kernels: Python, torch's dispatch and autograd."""

from __future__ import annotations

import time

import torch
from torch import nn

NUM_CALLS, NUM_REPEATS = 4, 100


class Yardstick:
    """A fixed piece of work, of about a millisecond: a small module is called with a hook, computes next to nothing and
    runs its backward."""

    def __init__(self) -> None:
        self.module, self.rows = nn.Linear(4, 4), torch.ones(2, 4)
        self.module.register_forward_pre_hook(self._note)
        self.notes: dict[str, tuple[int, bool]] = {}

    def measure(self) -> float:
        """Milliseconds of CPU time of this thread."""
        began = time.thread_time()
        with torch.enable_grad():
            for number in range(NUM_CALLS):
                self.notes = {f"{number}": (number, isinstance(self.rows, nn.Parameter))}
                self.module(self.rows).sum().backward()
                self.module.zero_grad(set_to_none=True)
        return 1e3 * (time.thread_time() - began)

    def _note(self, module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        for name, parameter in module.named_parameters():
            self.notes[name] = (parameter.numel(), hasattr(parameter, "ds_id"))


def measure_core_milliseconds() -> float:
    """The least of some repetitions: other work on the machine only adds to it."""
    yardstick = Yardstick()
    return min(yardstick.measure() for _ in range(NUM_REPEATS))
