"""The flat float32 weights and moments that the optimizer works on, and how each kind of optimizer keeps them.

Whatever it is, float32 numbers are read and written: a checkpoint does not depend on it. Where in a flat tensor a
parameter's share lies, shards.py knows. Knows DeepSpeed's optimizers by their attributes; imports nothing of it.
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
from ulysses_cli.train.tensor_file import Later

MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS = ("master", *MOMENTS)


class Flat(Protocol):
    """One flat tensor of the optimizer: its weights (`master`) and its moments."""

    @property
    def numel(self) -> int: ...

    def read(self, kind: str, start: int, numel: int) -> Tensor | Later: ...

    def write(self, kind: str, start: int, values: Tensor) -> None:
        """`start` is a multiple of CHUNK; `values` are as many as that, or all that are left."""

    def set_count(self, count: int) -> None:
        """How many steps these moments have seen."""


@dataclass(frozen=True, eq=False)
class PlainFlat:
    """Weights and moments are float32 tensors: what is read are views."""

    optimizer: Any
    master: Tensor

    @property
    def numel(self) -> int:
        return self.master.numel()

    def read(self, kind: str, start: int, numel: int) -> Tensor | Later:
        whole = self.master.data if kind == "master" else self._get_state()[kind]
        view: Tensor = whole.view(-1).narrow(0, start, numel)
        return view

    def write(self, kind: str, start: int, values: Tensor) -> None:
        view = self.read(kind, start, values.numel())
        assert isinstance(view, Tensor)
        view.copy_(values)

    def set_count(self, count: int) -> None:
        state = self._get_state()
        if torch.is_tensor(state["step"]):
            state["step"].fill_(count)
        else:
            state["step"] = count

    def _get_state(self) -> dict[str, Any]:
        """Made, as zeros, where no step has made them yet."""
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
class CodedFlat(PlainFlat):
    """Moments are codes of 8 bits: what is read is decoded when it is needed."""

    def read(self, kind: str, start: int, numel: int) -> Tensor | Later:
        if kind == "master":
            return PlainFlat.read(self, kind, start, numel)
        state = self._get_state()
        codes, scales, table = (state[f"{kind}_{part}"] for part in ("codes", "scales", "table"))
        return Later(numel, lambda: decode(codes, scales, table, start, numel))

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
    """In the order of the engine's flat tensors. `optimizer` is ZeRO's, around the one that steps."""
    inner = optimizer.optimizer
    in_memory = CodedFlat if hasattr(inner, "get_state") else PlainFlat
    return [
        SwappedFlat(optimizer, master) if is_swapped(optimizer, master) else in_memory(inner, master)
        for master in get_masters(optimizer)
    ]


def walk_chunks(flat: Flat) -> Iterator[tuple[int, int]]:
    """(start, number of elements) of the parts in which a flat tensor is written."""
    for start in range(0, flat.numel, CHUNK):
        yield start, min(CHUNK, flat.numel - start)


def set_step_count(optimizer: Any, count: int) -> None:
    for flat in list_flats(optimizer):
        flat.set_count(count)


def reset_moments(optimizer: Any) -> None:
    """As before the first step."""
    for flat in list_flats(optimizer):
        for start, numel in walk_chunks(flat):
            for moment in MOMENTS:
                flat.write(moment, start, torch.zeros(numel))
    set_step_count(optimizer, 0)


def forget_powers(host_adam: Any, *_: Any) -> None:
    """DeepSpeed's Adam for the host keeps the powers of its betas from step to step, as products. Made anew before each
    step, it computes them from the step's number: a run that goes on has the bits of one that was never stopped."""
    library = getattr(host_adam, "ds_opt_adam", None)
    if library is not None:
        group = host_adam.param_groups[0]
        library.create_adam(
            host_adam.opt_id, group["lr"], *group["betas"], group["eps"], group["weight_decay"], host_adam.adam_w_mode,
            False,
        )  # fmt: skip
