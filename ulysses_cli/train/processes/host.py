"""What this host has for a run: its memory and what this process may still take of it, in a container, a job or
outside them; packages, and compilers for operators. Runs before any process group exists. No torch before it is
needed."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

CGROUP = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
UNLIMITED = 1 << 60


class Controller(NamedTuple):
    """Files of a memory controller: where its groups are, their limit, their use, and the name of the idle cache."""

    folder: str
    limit: str
    use: str
    idle_cache: str


CONTROLLERS = (  # of cgroup versions 2 and 1 (kernel: admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst)
    Controller("", "memory.max", "memory.current", "inactive_file"),
    Controller("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def count_host_bytes() -> int:
    """The machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def read_memory_limit() -> int:
    """The smallest limit of this process's groups (a container's, or a job's of a scheduler); very large where there is
    none."""
    return min((limit for _, _, limit in _walk_limits()), default=UNLIMITED)


def count_free_bytes() -> int:
    """What a new process may still take: the system's file cache counts as free, and a container has no more than is
    left of its limit."""
    free = _read_table(Path("/proc/meminfo")).get("MemAvailable:", 0) * 1024
    left = [free or count_host_bytes()]
    for group, controller, limit in _walk_limits():
        idle_cache = _read_table(group / "memory.stat").get(controller.idle_cache, 0)
        left.append(limit - (_read_number(group / controller.use) or 0) + idle_cache)
    return max(0, min(left))


def count_usable_bytes(num_running: int = 0) -> int:
    """What a run on this machine may hold in all. `num_running`: its processes that have started, this one among them.
    What they hold belongs to the run; each is taken to hold as much as this one."""
    held = _read_table(Path("/proc/self/status")).get("RssAnon:", 0) * 1024
    return min(count_host_bytes(), read_memory_limit(), count_free_bytes() + num_running * held)


def _walk_limits() -> Iterator[tuple[Path, Controller, int]]:
    """Each group that this process is in and that has a limit. In a container the root of the tree is its own group."""
    for controller in CONTROLLERS:
        root = CGROUP / controller.folder
        path = _find_own_group(controller)
        for group in dict.fromkeys(root / part for part in (path, *path.parents)):
            if (limit := _read_number(group / controller.limit)) is not None:
                yield group, controller, limit


def _find_own_group(controller: Controller) -> PurePosixPath:
    """Its path below the controller's folder. A line is number:controllers:path; version 2 names no controllers."""
    try:
        lines = [line.split(":", 2) for line in OWN_GROUPS.read_text().splitlines()]
    except OSError:
        lines = []
    paths = (path for _, names, path in lines if controller.folder in names.split(","))
    return PurePosixPath(next(paths, "/").lstrip("/"))


def _read_number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # there is none, or it is `max`
        return None


def _read_table(file: Path) -> dict[str, int]:
    """Reads lines of a name and a number."""
    try:
        rows = [line.split() for line in file.read_text().splitlines()]
        return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}
    except OSError:
        return {}


def find_missing_package(optim: str, quantize_base: str | None = None) -> str:
    """'' when the packages that the optimizer and a quantized base need are installed; else what is wrong and what to
    do."""
    if optim != "adamw_8bit" and quantize_base is None:
        return ""
    try:
        importlib.import_module("bitsandbytes")
    except ImportError as error:
        reason = "is not installed" if getattr(error, "name", "") == "bitsandbytes" else f"cannot be imported: {error}"
    except Exception as error:  # noqa: BLE001 - a broken build may raise anything
        reason = f"cannot be imported: {error}"
    else:
        return ""
    key, other = "train.optim: adamw_8bit", "use train.optim: adamw"
    if quantize_base is not None:
        key, other = f"lora.quantize_base: {quantize_base}", "leave quantize_base out"
    return f"{key} needs the package bitsandbytes, which {reason}: pip install 'ulysses-cli[bitsandbytes]', or {other}"


COMMON_CPU, COMMON_WIDTH = "x86-64-v3", "-D__AVX256__"  # the compiler's name of it, and DeepSpeed's


def settle_cpu_flags(environ: Mapping[str, str] = os.environ) -> None:
    """Where the folder of built operators is for all CPUs with AVX2, has DeepSpeed build them so. It would compile for
    the CPU of this machine, on which alone such an operator may run."""
    if environ.get("TORCH_EXTENSIONS_DIR", "").endswith(f"-{COMMON_CPU}"):
        builder = importlib.import_module("deepspeed.ops.op_builder.builder").OpBuilder
        builder.cpu_arch = lambda _: f"-march={COMMON_CPU}"
        builder.simd_width = lambda _: COMMON_WIDTH


def build_cpu_adam() -> None:
    """For an image."""
    settle_cpu_flags()
    importlib.import_module("deepspeed.ops.op_builder").CPUAdamBuilder().load()


def find_missing_compiler(environ: Mapping[str, str] = os.environ) -> str:
    """'' when DeepSpeed's CPU Adam is built here or can be; else what is wrong. Otherwise the run would find out when
    the optimizer is made, after all weights are loaded."""
    builder = importlib.import_module("deepspeed.ops.op_builder").CPUAdamBuilder()
    folder = environ.get("TORCH_EXTENSIONS_DIR")
    if _is_installed(builder.absolute_name()) or (folder and any(Path(folder).rglob("cpu_adam*.so"))):
        return ""
    lacking = [] if any(map(shutil.which, (environ.get("CXX", "c++"), "g++"))) else ["a C++ compiler"]
    lacking += [] if shutil.which("ninja") else ["ninja"]
    if not lacking:
        return ""
    return (
        "memory.offload_optimizer needs DeepSpeed's CPU Adam, which is compiled at its first use: "
        f"{' and '.join(lacking)} not found on this machine: install it (apt-get install g++, pip install ninja), or "
        "set memory.offload_optimizer=none"
    )


def _is_installed(name: str) -> bool:
    """Whether an operator was built when DeepSpeed was installed."""
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False


def find_missing_operator() -> str:
    """Builds DeepSpeed's operator for disks where it is not built yet. Other ranks wait for the one that builds."""
    builder = importlib.import_module("deepspeed.ops.op_builder").AsyncIOBuilder()
    try:
        builder.load(verbose=False)
    except Exception as error:  # noqa: BLE001 - compilers, linkers and the system raise any of them
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        if not builder.is_compatible(verbose=False):
            reason = "libaio and its headers are not found"
        return (
            f"offload to nvme needs DeepSpeed's operator async_io, which cannot be built: {reason}: "
            "install libaio-dev (apt) or libaio-devel (dnf) and a C++ compiler, or use cpu in place of nvme"
        )
    return ""
