"""Stands in for DeepSpeed's operator that moves optimizer states and weights between page-locked memory and files: it
counts each file's bytes, moves nothing and answers at once. Page-locked buffers are tensors without data, which the
trace counts as host memory.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from ulysses_cli.prove.trace.fake_device import replace_everywhere


class CountedHandle:
    """Has what DeepSpeed's swappers call of an aio_handle. All handles of a process share its files and buffers."""

    files: ClassVar[dict[str, int]] = {}
    locked: ClassVar[set[int]] = set()

    def __init__(self, *_: Any, **__: Any) -> None:
        self.num_pending = 0

    def new_cpu_locked_tensor(self, num_elements: int, like: Tensor) -> Tensor:
        buffer = torch.empty(num_elements, dtype=like.dtype, device="cpu")
        self.locked.add(_get_key(buffer))
        return buffer

    def free_cpu_locked_tensor(self, buffer: Tensor) -> bool:
        self.locked.discard(_get_key(buffer))
        return True

    def is_pinned(self, tensor: Tensor) -> bool:
        return _get_key(tensor) in self.locked

    def async_pwrite(self, buffer: Tensor, path: str, _: int) -> int:
        self.files[path] = buffer.numel() * buffer.element_size()
        self.num_pending += 1
        return 0

    def async_pread(self, buffer: Tensor, path: str, _: int) -> int:
        if buffer.numel() * buffer.element_size() > self.files[path]:
            raise AssertionError(f"more is read from {path} than was written there")
        self.num_pending += 1
        return 0

    def wait(self) -> int:
        num_done, self.num_pending = self.num_pending, 0
        return num_done


class CountedOperator:
    aio_handle = CountedHandle


class CountedBuilder:
    """The builder of that operator."""

    def load(self, verbose: bool = True) -> type[CountedOperator]:
        return CountedOperator

    def is_compatible(self, verbose: bool = True) -> bool:
        return True


def replace_swaps() -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder
    from deepspeed.runtime.swap_tensor.partitioned_param_swapper import AsyncPartitionedParameterSwapper as Swapper

    make_swapper = Swapper.__init__

    def make_on_host(self: Any, *args: Any, **kwargs: Any) -> None:
        """The tensor that stands for a weight in a file is in host memory, although a model is made around it."""
        with torch.device("cpu"):
            make_swapper(self, *args, **kwargs)

    Swapper.__init__ = make_on_host
    replace_everywhere(AsyncIOBuilder, CountedBuilder, "deepspeed")


def forget_files() -> None:
    CountedHandle.files.clear()
    CountedHandle.locked.clear()


def count_file_bytes() -> dict[str, int]:
    """By what the files hold."""
    of_weights = sum(size for path, size in CountedHandle.files.items() if path.endswith("_param.tensor.swp"))
    return {"states": sum(CountedHandle.files.values()) - of_weights, "weights": of_weights}


def _get_key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
