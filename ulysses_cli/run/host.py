"""This host as a command meets it, without torch: starts child processes of this package, lists the GPUs by NVIDIA's
driver, and names the folder in which torch builds DeepSpeed's operators, with locks of killed builders removed.
Each child ends with its parent, in whatever way the parent ends, and gets enough open files. A child's output
besides its answer goes to a file or the terminal, never into a pipe that nobody reads."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import resource
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ulysses_cli.plan.problem import Problem, RecipeError, get_signal_code

INTERRUPT_SECONDS = 3  # for a child that a terminal has interrupted as well; then SIGTERM
PR_SET_PDEATHSIG = 1  # linux/prctl.h
CORE_FILES = "ULYSSES_CORE_FILES"  # 1: a crash may write a core file, up to the user's limit
OPEN_FILES, OPEN_FILES_PER_RANK = 128, 8  # pipes, sockets to the others in several groups, weight files, libraries


def start_module(module: str, words: Sequence[str], **options: Any) -> subprocess.Popen[str]:
    """Starts `python -m module words...` with text on its pipes. The child gets SIGTERM when this process ends. Raises
    RecipeError if too few files may be open."""
    if shortage := find_file_shortage(1):
        raise RecipeError([shortage])
    bind = partial(_end_with_parent, os.getpid(), ctypes.CDLL(None))
    command = [sys.executable, "-m", module, *words]
    return subprocess.Popen(command, text=True, encoding="utf-8", preexec_fn=bind, **options)


def _end_with_parent(parent: int, libc: ctypes.CDLL) -> None:
    """Runs between fork and exec: only system calls, since locks of other threads may be held forever."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # the parent has ended since the fork
        os._exit(get_signal_code(signal.SIGTERM))


@contextmanager
def ending(child: subprocess.Popen[str], interrupt_seconds: float = INTERRUPT_SECONDS) -> Iterator[None]:
    """Ends the child together with this block, in whatever way the block ends; the child removes its partial output."""

    def stop(number: int, _: object) -> None:
        sys.exit(get_signal_code(number))

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:  # a terminal sends it to the child as well
        try:
            child.wait(interrupt_seconds)
        except subprocess.TimeoutExpired:
            child.terminate()
        raise
    except BaseException:
        child.terminate()
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def find_file_shortage(num_ranks: int) -> Problem | None:
    """Raises the limit of open files if needed and allowed; children inherit it. The problem if it is too low."""
    needed = OPEN_FILES + OPEN_FILES_PER_RANK * num_ranks
    soft, hard = (limit if limit != resource.RLIM_INFINITY else sys.maxsize for limit in _get_limits())
    if soft >= needed:
        return None
    if hard >= needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, _get_limits()[1]))
        return None
    where = "ulimit -n, LimitNOFILE of systemd, or --ulimit nofile of a container"
    return Problem("", f"a process may open {hard} files here, and {needed} are needed", f"raise it: {where}")


def _get_limits() -> tuple[int, int]:
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def refuse_core_files(environ: Mapping[str, str]) -> None:
    """For this process and its children: a crash must neither write memory (weights, documents, access tokens) to a
    file nor pass it to the system's collector. A limit of 1 byte prevents both; 0 would prevent only files."""
    if environ.get(CORE_FILES) not in (None, "", "0"):
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    if soft and hard:
        resource.setrlimit(resource.RLIMIT_CORE, (1, hard))


def narrow_umask(folder: Path) -> int:
    """The user's umask together with the permissions that the folder denies to others, so that a file copied out of it
    stays as private as it was inside. For processes that write there."""
    mask = os.umask(0o077)
    os.umask(mask)
    while not folder.is_dir():
        folder = folder.parent
    return mask | (~stat.S_IMODE(folder.stat().st_mode) & 0o077)


DRIVER = "libcuda.so.1"
QUERY = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
QUERY_SECONDS = 20
ASK_DRIVER = """
import ctypes, sys
NO_DEVICE, VIRTUAL_MEMORY = 100, 102  # cuda.h: an error, an attribute
driver, count, able = ctypes.CDLL(sys.argv[1]), ctypes.c_int(0), []
error = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
if error not in (0, NO_DEVICE):
    raise SystemExit(1)
for device in range(0 if error else count.value):
    value = ctypes.c_int(1)
    driver.cuDeviceGetAttribute(ctypes.byref(value), VIRTUAL_MEMORY, device)
    able.append(value.value)
print(len(able), int(all(able)))
"""


@dataclass(frozen=True)
class DriverFacts:
    """What NVIDIA's driver says to a process. `maps_memory`: torch can grow a piece of memory in place
    (expandable_segments), which some virtual machines refuse."""

    num_gpus: int
    maps_memory: bool = True


@dataclass(frozen=True)
class FoundGpu:
    """A GPU as the driver names it."""

    name: str
    memory_bytes: int


def ask_driver(environ: Mapping[str, str], driver: str = DRIVER, devices: Path = Path("/dev")) -> DriverFacts:
    """What a process with this environment sees. The driver makes its device files when it is first used, and a
    container may have none; they are counted where the driver is missing or fails. Another process asks it: one that
    has used it cannot fork any more."""
    files = DriverFacts(sum(file.name.removeprefix("nvidia").isdecimal() for file in devices.glob("nvidia*")))
    try:
        ctypes.CDLL(driver)
    except OSError:  # the usual machine without a GPU, at no cost
        return files
    command = [sys.executable, "-I", "-S", "-c", ASK_DRIVER, driver]
    try:
        done = subprocess.run(command, env=dict(environ), capture_output=True, text=True, timeout=QUERY_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return files
    words = done.stdout.split()
    return DriverFacts(int(words[0]), words[1] == "1") if done.returncode == 0 and len(words) == 2 else files


def list_gpus() -> list[FoundGpu]:
    """Returns no GPU where there is no driver."""
    try:
        done = subprocess.run(QUERY, capture_output=True, text=True, timeout=QUERY_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return read_gpus(done.stdout)


def read_gpus(table: str) -> list[FoundGpu]:
    """Reads nvidia-smi's lines, `name, MiB`."""
    rows = [line.rpartition(",") for line in table.splitlines() if line.strip()]
    return [FoundGpu(name.strip(), int(mib) << 20) for name, _, mib in rows if mib.strip().isdecimal()]


FOLDER = "TORCH_EXTENSIONS_DIR"  # torch's own variable
BUILD_SECONDS = 600  # no operator takes this long to build
PORTABLE = "ULYSSES_PORTABLE_OPERATORS"  # set: operators are built for all CPUs with AVX2, as an image needs them
COMMON_CPU = "x86-64-v3"  # the compiler's name of those; train/processes/host.py reads it in the folder's name
COMMON_FLAGS = {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"}
CPU_FACTS = ("vendor_id", "model name", "flags", "CPU implementer", "CPU part", "Features")  # x86, then Arm
HINT = f"name a folder of your own that you can write: {FOLDER}=FOLDER"


def get_builds_folder(environ: Mapping[str, str], has_gpu: bool | None = None) -> Path:
    """Returns the folder of this environment and this kind of CPU, below the one that the user named, if any. Operators
    are compiled against one installation of torch and DeepSpeed and for the CPU of the builder. In one folder for all,
    which is torch's way, two environments rebuild each other's operators, and a CPU that is older than the builder's
    ends its rank with an illegal instruction. `has_gpu`: of the machine that will use them; None: of this one."""
    sees_gpu = any(Path("/dev").glob("nvidia[0-9]*"))
    name = _name_environment(sees_gpu if has_gpu is None else has_gpu, bool(environ.get(PORTABLE)))
    if environ.get(FOLDER):
        named = Path(environ[FOLDER])
        return named if named.name == name else named / name  # a rank's variable holds the whole path already
    home = environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(home) / "ulysses" / "operators" / name


def choose_path(environ: Mapping[str, str]) -> str:
    """Returns a PATH on which this environment's own ninja is found first. torch takes the first one, and two versions
    of ninja hash a command differently: each would build again what the other has built."""
    path, own = environ.get("PATH", os.defpath), Path(sys.executable).parent / "ninja"
    if not own.is_file() or shutil.which("ninja", path=path) == str(own):
        return path
    return f"{own.parent}{os.pathsep}{path}"


@cache
def _name_environment(has_gpu: bool, is_portable: bool) -> str:
    packages = {name: (_get_version(name), _find_place(name)) for name in ("torch", "deepspeed")}
    cpu = read_cpu_kind()
    is_common = is_portable and has_common_instructions(cpu)
    kind = (COMMON_CPU,) if is_common else cpu
    facts = repr((packages, platform.python_version(), platform.machine(), has_gpu, kind))
    readable = "-".join(f"{name}{seen}" for name, (seen, _) in packages.items())
    name = f"{re.sub('[^A-Za-z0-9.-]', '_', readable)}-{hashlib.sha256(facts.encode()).hexdigest()[:12]}"
    return f"{name}-{COMMON_CPU}" if is_common else name


def _get_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _find_place(package: str) -> str:
    spec = find_spec(package)  # of a top-level package: nothing is imported
    return str(spec.origin) if spec else ""


def read_cpu_kind(file: Path = Path("/proc/cpuinfo")) -> tuple[str, ...]:
    """Returns what a compiler may assume of the first CPU: its model and the instructions that it has."""
    try:
        lines = file.read_text(errors="replace").split("\n\n")[0].splitlines()
    except OSError:
        return (platform.processor(),)
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    facts = {name.strip(): value for name, value in fields.items()}
    return tuple(" ".join(sorted(facts.get(name, "").split())) for name in CPU_FACTS)


def has_common_instructions(cpu: Iterable[str]) -> bool:
    return {word for fact in cpu for word in fact.split()} >= COMMON_FLAGS


def find_write_problem(environ: Mapping[str, str]) -> str:
    """What keeps an operator from being built, or ''."""
    folder = existing = get_builds_folder(environ)
    while not os.path.lexists(existing):
        existing = existing.parent
    if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
        return ""
    why = "cannot be written" if existing == folder else f"cannot be made in {existing}"
    return f"{folder}, where operators of DeepSpeed are built, {why}"


def list_dead_locks(environ: Mapping[str, str], seconds: float = BUILD_SECONDS) -> list[Path]:
    """Old locks that no process here holds open. A builder keeps its lock open, which is surer than the lock's age,
    since the clock may have jumped. The age is for builders on other machines, whose open files are not visible."""
    locks = [lock for lock in list_locks(environ) if _is_older(lock, seconds)]
    held = _list_open_files() if locks else set()
    return [lock for lock in locks if _identify(lock) not in held]


@dataclass(frozen=True)
class BuildTimes:
    """Seconds: between looks, each of which gives a sign of the builds on this machine; without a sign, until a builder
    counts as gone; until the first word of a build, and from each word to the next."""

    look: float = 2.0
    sign: float = 30.0
    first_word: float = 10.0
    next_word: float = 30.0


@contextmanager
def watch_builds(
    environ: Mapping[str, str], say: Callable[[str], object], times: BuildTimes = BuildTimes()
) -> Iterator[None]:
    """Removes the locks of dead builders before the block begins: its ranks would wait for them, and fail once they are
    removed, since whoever waits for a lock takes the operator for built. Says, while the block runs, which operators
    are being built, by this run or by another process."""
    is_over = threading.Event()
    watcher = BuildWatch(environ, say, times)

    def watch() -> None:
        while not is_over.wait(times.look):
            watcher.look(time.monotonic())

    watcher.settle()
    thread = threading.Thread(target=watch, name="builds of operators", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


class BuildWatch:
    """What was seen and said of the builds that go on. A lock's time is the sign of its builder: each command renews
    it for the builders on its own machine, which hold their locks open. Other machines and containers see the sign."""

    def __init__(
        self, environ: Mapping[str, str], say: Callable[[str], object], times: BuildTimes = BuildTimes()
    ) -> None:
        self.environ, self.say, self.times = environ, say, times
        self.begun: dict[Path, float] = {}
        self.next_word: dict[Path, float] = {}
        self.signs: dict[Path, tuple[float, float]] = {}  # a lock's time, and since when it has been that

    def settle(self) -> None:
        """Returns when each lock is held here, or gave a sign while this looked, or is removed."""
        unknown = set(self.list_unheld())
        if unknown:
            names = ", ".join(sorted(lock.parent.name for lock in unknown))
            self.say(f"DeepSpeed's {names}: a build was begun, and its builder is looked for ({self.times.sign:.0f} s)")
        first = {lock: self._read_sign(lock) for lock in unknown}
        while unknown:
            time.sleep(self.times.look)
            self.look(time.monotonic())
            unknown = {
                lock for lock in unknown.intersection(self.list_unheld()) if self._read_sign(lock) == first[lock]
            }

    def look(self, now: float) -> None:
        for lock in self.list_unheld():
            sign = self._read_sign(lock)
            if self.signs.get(lock, (None,))[0] != sign:
                self.signs[lock] = sign, now
            if now - self.signs[lock][1] > self.times.sign or _is_older(lock, BUILD_SECONDS):
                lock.unlink(missing_ok=True)
                self.say(f"removed the lock of DeepSpeed's operator {lock.parent.name}: its builder is gone")
        going_on = set(list_locks(self.environ))
        self.begun = {lock: began for lock, began in self.begun.items() if lock in going_on}
        for lock in sorted(going_on):
            if lock not in self.begun:
                self.begun[lock], self.next_word[lock] = now, now + self.times.first_word
            elif now >= self.next_word[lock]:
                self.next_word[lock] = now + self.times.next_word
                seconds = now - self.begun[lock]
                self.say(
                    f"DeepSpeed's operator {lock.parent.name} is being built, once per environment: {seconds:.0f} s"
                )

    def list_unheld(self) -> list[Path]:
        """Locks that no process here holds open. Renews the signs of the others."""
        locks = list_locks(self.environ)
        held = _list_open_files() if locks else set()
        for lock in locks:
            if _identify(lock) in held:
                with suppress(OSError):  # it was built, or is another user's
                    os.utime(lock)
        return [lock for lock in locks if _identify(lock) not in held and lock.exists()]

    def _read_sign(self, lock: Path) -> float:
        try:
            return lock.stat().st_mtime
        except OSError:
            return 0.0  # its builder is done


def list_locks(environ: Mapping[str, str]) -> list[Path]:
    """Returns the locks of builds, in torch's layout: a folder per operator, sometimes below one per version."""
    folder = get_builds_folder(environ)
    return sorted([*folder.glob("*/lock"), *folder.glob("*/*/lock")])


def _is_older(lock: Path, seconds: float) -> bool:
    try:
        return abs(time.time() - lock.stat().st_mtime) > seconds
    except OSError:
        return False  # its builder is done


def _identify(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _list_open_files() -> set[tuple[int, int] | None]:
    """Open files of all processes that this user may inspect."""
    return {_identify(handle) for folder in Path("/proc").glob("[0-9]*/fd") for handle in _list(folder)}


def _list(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []
