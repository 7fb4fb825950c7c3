"""Reads and writes optimizer states and weights in the files of DeepSpeed's swappers: a checkpoint loads only one
tensor at a time into memory.

Between steps the states exist only in these files. Uses the swapper's attributes; imports nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ulysses_cli.train.tensor_file import LazyTensor

FLOAT_BYTES = 4


@dataclass(frozen=True, eq=False)
class SwappedFlat:
    """One sub-group of ZeRO-3. `optimizer` is ZeRO's; the sub-group's tensors are empty between steps."""

    optimizer: Any
    master: Tensor

    @property
    def numel(self) -> int:
        return int(self._info.numel())

    def read(self, kind: str, start: int, numel: int) -> Tensor | LazyTensor:
        file = self._find_file(kind)
        return LazyTensor(
            numel, lambda: torch.from_numpy(np.fromfile(file, np.float32, numel, offset=FLOAT_BYTES * start))
        )

    def write(self, kind: str, start: int, values: Tensor) -> None:
        with open(self._find_file(kind), "r+b") as stream:
            stream.seek(FLOAT_BYTES * start)
            stream.write(memoryview(values.float().cpu().contiguous().numpy()))

    def set_step_count(self, count: int) -> None:
        self._make_moments()
        self.optimizer.optimizer.state[self.master]["step"] = count

    @property
    def _info(self) -> Any:
        return self.optimizer.optimizer_swapper.swap_params_info[self.master.ds_id]

    def _find_file(self, kind: str) -> Path:
        self._make_moments()
        name = f"{'' if kind == 'master' else kind + '-'}{self.master.ds_id}.tensor.swp"
        return next(file for file in map(Path, self._info.get_swap_paths()) if file.name == name)

    def _make_moments(self) -> None:
        """Makes moments as the first step does: in memory, then written out by the swapper."""
        if self._info.has_state_tensors:
            return
        swapper = self.optimizer.optimizer_swapper
        swapper.swap_in_optimizer_state(parameter=self.master)
        zeros = {name: torch.zeros_like(self.master.data) for name in ("exp_avg", "exp_avg_sq")}
        self.optimizer.optimizer.state[self.master] = {"step": 0, **zeros}
        swapper.swap_out_optimizer_state(parameter=self.master)
        self.master.grad = None


def is_on_disk(parameter: nn.Parameter) -> bool:
    """Whether this rank's share of the weight is offloaded to the disk."""
    return bool(parameter.ds_tensor.final_location == "nvme")


def write_weight(parameter: nn.Parameter, values: Tensor) -> None:
    """The weight must not be in memory: that copy would be taken for the newer one."""
    if parameter.ds_tensor.status.name != "NOT_AVAILABLE":
        raise AssertionError("a weight is written to its file while it is in memory")
    with open(parameter.nvme_swapper.get_path(parameter, must_exist=True), "r+b") as stream:
        stream.write(memoryview(values.cpu().to(parameter.dtype).contiguous().view(torch.uint8).numpy()))


def is_swapped(optimizer: Any, master: Tensor) -> bool:
    """Whether the sub-group is on the disk. Small ones stay in memory."""
    swapper = getattr(optimizer, "optimizer_swapper", None)
    return swapper is not None and getattr(master, "ds_id", None) in swapper.swap_params_info


def read_each_once(parameters: Iterable[nn.Parameter]) -> None:
    """DeepSpeed reads the next weights ahead. It lists one that is soon used twice, as a recomputation and its backward
    use a frozen one, twice, and fails when it finds no second buffer for it (partitioned_param_coordinator.py:
    __prefetch_nvme_param_partitions)."""
    swappers = {id(swapper): swapper for each in parameters if (swapper := getattr(each, "nvme_swapper", None))}
    for swapper in swappers.values():
        swapper.swap_in = partial(_read_each_once, swapper.swap_in)


def _read_each_once(read: Callable[..., None], weights: Sequence[nn.Parameter], *args: Any, **kwargs: Any) -> None:
    read(list(dict.fromkeys(weights)), *args, **kwargs)
