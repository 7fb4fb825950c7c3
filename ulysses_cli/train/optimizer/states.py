"""Reads and writes the optimizer's flat weights and moments, in each kind of optimizer.

Values are always float32 here, so that checkpoints do not depend on the optimizer's own format. shards.py maps
parameters to the flat tensors. Uses the attributes of DeepSpeed's optimizers; imports nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ulysses_cli.train.optimizer.quantization import BLOCK, CHUNK, decode, encode
from ulysses_cli.train.optimizer.shards import get_masters
from ulysses_cli.train.optimizer.swap_files import SwappedFlat, is_swapped
from ulysses_cli.train.tensor_file import LazyTensor

MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS = ("master", *MOMENTS)


class Flat(Protocol):
    """One flat tensor of the optimizer: its weights (`master`) and its moments."""

    @property
    def numel(self) -> int: ...

    def read(self, kind: str, start: int, numel: int) -> Tensor | LazyTensor: ...

    def write(self, kind: str, start: int, values: Tensor) -> None:
        """`start` is a multiple of CHUNK; `values` has CHUNK elements, or all that are left."""

    def set_step_count(self, count: int) -> None:
        """Sets the number of steps that these moments come from."""


@dataclass(frozen=True, eq=False)
class PlainFlat:
    """Weights and moments are float32 tensors: `read` returns views."""

    optimizer: Any
    master: Tensor

    @property
    def numel(self) -> int:
        return self.master.numel()

    def read(self, kind: str, start: int, numel: int) -> Tensor | LazyTensor:
        whole = self.master.data if kind == "master" else self._get_state()[kind]
        view: Tensor = whole.view(-1).narrow(0, start, numel)
        return view

    def write(self, kind: str, start: int, values: Tensor) -> None:
        view = self.read(kind, start, values.numel())
        assert isinstance(view, Tensor)
        view.copy_(values)

    def set_step_count(self, count: int) -> None:
        state = self._get_state()
        if torch.is_tensor(state["step"]):
            state["step"].fill_(count)
        else:
            state["step"] = count

    def _get_state(self) -> dict[str, Any]:
        """Makes moments, as zeros, before the first step."""
        state: dict[str, Any] = self.optimizer.state[self.master]
        for name in MOMENTS:
            if name not in state:
                state[name] = torch.zeros_like(self.master.data)
        if "step" not in state:
            state["step"] = 0 if type(self.optimizer).__name__ == "DeepSpeedCPUAdam" else torch.tensor(0.0)
            if torch.is_tensor(state["step"]) and self.optimizer.defaults.get("fused"):
                state["step"] = state["step"].to(self.master.device)
        return state


@dataclass(frozen=True, eq=False)
class QuantizedFlat(PlainFlat):
    """Moments are 8-bit codes: `read` decodes them when the values are needed."""

    def read(self, kind: str, start: int, numel: int) -> Tensor | LazyTensor:
        if kind == "master":
            return PlainFlat.read(self, kind, start, numel)
        state = self._get_state()
        codes, scales, table = (state[f"{kind}_{part}"] for part in ("codes", "scales", "table"))
        return LazyTensor(numel, lambda: decode(codes, scales, table, start, numel))

    def write(self, kind: str, start: int, values: Tensor) -> None:
        if kind == "master":
            PlainFlat.write(self, kind, start, values)
            return
        state = self._get_state()
        table = state[f"{kind}_table"]
        codes, scales = encode(values.to(table.device), table)
        state[f"{kind}_codes"][start : start + len(codes)] = codes
        state[f"{kind}_scales"][start // BLOCK : start // BLOCK + len(scales)] = scales

    def _get_state(self) -> dict[str, Any]:
        state: dict[str, Any] = self.optimizer.get_state(self.master)
        return state


def list_flats(optimizer: Any) -> list[Flat]:
    """The flat tensors in the engine's order. `optimizer` is ZeRO's, which wraps the one that updates weights."""
    inner = optimizer.optimizer
    in_memory = QuantizedFlat if hasattr(inner, "get_state") else PlainFlat
    return [
        SwappedFlat(optimizer, master) if is_swapped(optimizer, master) else in_memory(inner, master)
        for master in get_masters(optimizer)
    ]


def walk_chunks(flat: Flat) -> Iterator[tuple[int, int]]:
    """Yields (start, number of elements) of the parts in which a flat tensor is written."""
    for start in range(0, flat.numel, CHUNK):
        yield start, min(CHUNK, flat.numel - start)


def set_step_count(optimizer: Any, count: int) -> None:
    for flat in list_flats(optimizer):
        flat.set_step_count(count)


def reset_moments(optimizer: Any) -> None:
    """Sets moments and step count to what they are before the first step."""
    for flat in list_flats(optimizer):
        for start, numel in walk_chunks(flat):
            for moment in MOMENTS:
                flat.write(moment, start, torch.zeros(numel))
    set_step_count(optimizer, 0)


def reset_beta_powers(host_adam: Any, *_: Any) -> None:
    """DeepSpeed's CPU Adam keeps the powers of its betas from step to step, as products. Created again before each
    step, it computes them from the step's number: a resumed run is bitwise identical to one that was never stopped."""
    library = getattr(host_adam, "ds_opt_adam", None)
    if library is not None:
        group = host_adam.param_groups[0]
        library.create_adam(
            host_adam.opt_id, group["lr"], *group["betas"], group["eps"], group["weight_decay"], host_adam.adam_w_mode,
            False,
        )  # fmt: skip
