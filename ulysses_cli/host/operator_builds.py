"""Names the folder in which torch builds DeepSpeed's operators at their first use, checks that this user may write
there, says while a build is waited for, and removes the locks that killed builders left. No torch.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

FOLDER = "TORCH_EXTENSIONS_DIR"  # torch's own variable
BUILD_SECONDS = 600  # no operator takes this long to build
WATCH_SECONDS = 2.0
SIGN_SECONDS = 30.0  # commands give a sign of the builds on their machine each WATCH_SECONDS
FIRST_WORD_SECONDS, NEXT_WORD_SECONDS = 10.0, 30.0
PORTABLE = "ULYSSES_PORTABLE_OPERATORS"  # set: operators are built for all CPUs with AVX2, as an image needs them
COMMON_CPU = "x86-64-v3"  # the compiler's name of those; train/processes/requirements.py reads it in the folder's name
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


@contextmanager
def watch_builds(environ: Mapping[str, str], say: Callable[[str], object]) -> Iterator[None]:
    """Removes the locks of dead builders before the block begins: its ranks would wait for them, and fail once they are
    removed, since whoever waits for a lock takes the operator for built. Says, while the block runs, which operators
    are being built, by this run or by another process."""
    is_over = threading.Event()
    watcher = BuildWatch(environ, say)

    def watch() -> None:
        while not is_over.wait(WATCH_SECONDS):
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

    def __init__(self, environ: Mapping[str, str], say: Callable[[str], object]) -> None:
        self.environ, self.say = environ, say
        self.begun: dict[Path, float] = {}
        self.next_word: dict[Path, float] = {}
        self.signs: dict[Path, tuple[float, float]] = {}  # a lock's time, and since when it has been that

    def settle(self) -> None:
        """Returns when each lock is held here, or gave a sign while this looked, or is removed."""
        unknown = set(self.list_unheld())
        if unknown:
            names = ", ".join(sorted(lock.parent.name for lock in unknown))
            self.say(f"DeepSpeed's {names}: a build was begun, and its builder is looked for ({SIGN_SECONDS:.0f} s)")
        first = {lock: self._read_sign(lock) for lock in unknown}
        while unknown:
            time.sleep(WATCH_SECONDS)
            self.look(time.monotonic())
            unknown = {
                lock for lock in unknown.intersection(self.list_unheld()) if self._read_sign(lock) == first[lock]
            }

    def look(self, now: float) -> None:
        for lock in self.list_unheld():
            sign = self._read_sign(lock)
            if self.signs.get(lock, (None,))[0] != sign:
                self.signs[lock] = sign, now
            if now - self.signs[lock][1] > SIGN_SECONDS or _is_older(lock, BUILD_SECONDS):
                lock.unlink(missing_ok=True)
                self.say(f"removed the lock of DeepSpeed's operator {lock.parent.name}: its builder is gone")
        going_on = set(list_locks(self.environ))
        self.begun = {lock: began for lock, began in self.begun.items() if lock in going_on}
        for lock in sorted(going_on):
            if lock not in self.begun:
                self.begun[lock], self.next_word[lock] = now, now + FIRST_WORD_SECONDS
            elif now >= self.next_word[lock]:
                self.next_word[lock] = now + NEXT_WORD_SECONDS
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
