"""Reads and writes the optimizer's flat weights and moments, in each kind of optimizer, in memory or in the files of
DeepSpeed's swappers, whose folder is private to a run, empty at its start and removed at its end.

Values are always float32 here, so that checkpoints do not depend on the optimizer's own format. A checkpoint loads
only one tensor at a time. Uses the attributes of DeepSpeed's optimizers; imports nothing of it."""

from __future__ import annotations

import hashlib
import mmap
import os
import resource
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from ulysses_cli.plan.files import remove_own
from ulysses_cli.plan.units import format_bytes, format_count
from ulysses_cli.train.optimizer.adamw_8bit import BLOCK, CHUNK, decode, encode
from ulysses_cli.train.optimizer.shards import get_masters
from ulysses_cli.train.tensor_file import LazyTensor

RUN_FILE = "run.txt"
PREFIX = "ulysses-"
CAP_IPC_LOCK = 14  # capabilities(7): may lock any amount of memory
BLOCK_BYTES = 4096


def name_folder(nvme_path: str, run_dir: Path) -> Path:
    """The same name on every rank and at every start of a run."""
    digest = hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:12]
    return Path(os.path.expanduser(nvme_path)).resolve() / f"{PREFIX}{digest}"


def open_folder(folder: Path, run_dir: Path, disk_bytes: int, locked_bytes: int) -> str:
    """One rank of each machine makes the folder, before any rank writes to it. Returns what is wrong, or ''. Bytes are
    one rank's."""
    if int(os.environ.get("LOCAL_RANK", "0")):
        return ""
    try:
        remove_own(folder)
        folder.mkdir(mode=0o700)
        (folder / RUN_FILE).write_text(f"{run_dir.resolve()}\n", encoding="utf-8")
        problem = _find_direct_problem(folder / "probe") or _find_shortage(folder, disk_bytes)
    except OSError as error:
        problem = f"memory.nvme_path: {folder}: {error.strerror or error}"
    problem = problem or _find_lock_problem(locked_bytes)
    if problem:
        remove_own(folder)
    return problem


def remove_rank_files(folder: Path | None) -> None:
    """Removes this rank's files, and the folder with the last rank's. None: there is no folder."""
    if folder is None or folder.is_symlink():
        return
    for kind in folder.glob("zero_stage_3/*"):
        remove_own(kind / f"rank{os.environ.get('RANK', '0')}")
    with suppress(OSError):  # other ranks' files are still there
        for kind in folder.glob("zero_stage_3/*"):
            kind.rmdir()
        remove_own(folder)


def _find_direct_problem(probe: Path) -> str:
    """DeepSpeed bypasses the page cache, which not every file system supports."""
    page = mmap.mmap(-1, BLOCK_BYTES)
    try:
        handle = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
        try:
            os.write(handle, page)
        finally:
            os.close(handle)
        return ""
    except OSError as error:
        return (
            f"memory.nvme_path: {probe.parent.parent} takes no direct writes ({error.strerror or error}): name a "
            "folder on a local disk, not on a network or in memory"
        )
    finally:
        page.close()
        probe.unlink(missing_ok=True)


def _find_shortage(folder: Path, disk_bytes: int) -> str:
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    needed, free = num_ranks * disk_bytes, shutil.disk_usage(folder).free
    if needed <= free:
        return ""
    others = sorted(str(other) for other in folder.parent.glob(f"{PREFIX}*") if other != folder)
    leftovers = f"; runs that were killed may have left {', '.join(others[:5])} (each names its run in {RUN_FILE})"
    return (
        f"memory.nvme_path: {folder.parent} has {format_bytes(free)} free, the share of "
        f"{format_count(num_ranks, 'rank')} there takes {format_bytes(needed)}: "
        "make room, use more GPUs, or cpu in place of nvme"
        f"{leftovers if others else ''}"
    )


def _find_lock_problem(needed: int) -> str:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY or needed <= limit or _may_lock_all():
        return ""
    return (
        f"offload to nvme needs buffers of {needed / 2**20:,.0f} MiB of locked memory, and this process "
        f"may lock {limit / 2**20:,.0f} MiB: raise it (`ulimit -l unlimited`, in a container --ulimit memlock=-1), or "
        "use more GPUs, or cpu in place of nvme"
    )


def _may_lock_all() -> bool:
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return False
    mask = next((int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")), 0)
    return bool(mask >> CAP_IPC_LOCK & 1)


FLOAT_BYTES = 4
MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS = ("master", *MOMENTS)


@dataclass(frozen=True, eq=False)
class SwappedFlat:
    """One sub-group of ZeRO-3. `optimizer` is ZeRO's; the sub-group's tensors are empty between steps."""

    optimizer: Any
    master: Tensor
    moments: tuple[str, ...] = MOMENTS

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


class Flat(Protocol):
    """One flat tensor of the optimizer: its weights (`master`) and its moments."""

    @property
    def moments(self) -> tuple[str, ...]: ...

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
    def moments(self) -> tuple[str, ...]:
        """Muon has one of matrices."""
        return MOMENTS[:1] if self.master in getattr(self.optimizer, "matrices", ()) else MOMENTS

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
        for name in self.moments:
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
            for moment in flat.moments:
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
