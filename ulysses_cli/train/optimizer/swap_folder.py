"""The folder on a local disk for offloaded optimizer states or weights: private to a run, empty at its start, removed
at its end.

What a killed run has left is removed when the run starts again. No torch.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import resource
import shutil
from contextlib import suppress
from pathlib import Path

from ulysses_cli.plan.files.regular_files import remove_own
from ulysses_cli.plan.nouns import format_count
from ulysses_cli.plan.units import format_bytes

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
