"""Starts `python -m MODULE` without the cost of its imports, by forking a process that has them already.

The children are processes like any other, with their own pid, session, signals, environment and files; only the
interpreter's start is left out. `ForkedPopen` replaces subprocess.Popen, also in the children, so that a command's
agent and the agent's ranks are forked too. A process that forks so must not have threads. A test, which may have
threads, starts a `Command`.
"""

import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from support import kill_points, networks
from ulysses_cli.prove.ranks import start_process

PRELOADED = (
    *("torch", "deepspeed", "peft", "transformers.models.qwen3.modeling_qwen3", "torch.distributed.run"),
    *("ulysses_cli.train.agent", "ulysses_cli.train.start", "ulysses_cli.train.failure"),
    *(
        "ulysses_cli.commands.children.training", "ulysses_cli.data.prepare", "ulysses_cli.report.live",
        "ulysses_cli.plan.rules.check", "ulysses_cli.validate", "support.warm",
    ),
)  # fmt: skip
on_start: list[Callable[[str, Mapping[str, str]], None]] = []  # called in each child: (module, environment)


class ForkedPopen(subprocess.Popen):  # type: ignore[type-arg]
    """Forks `[sys.executable, "-m", MODULE, ...]` and `[sys.executable, FILE, ...]`, and runs any other command as
    usual."""

    def _execute_child(  # type: ignore[override]
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any, env: Any, *rest: Any
    ) -> None:
        *_, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = rest[:9]
        umask, start_new_session = rest[13:15]
        words = [os.fspath(word) for word in args] if not isinstance(args, str) else []
        words = [word for word in words if word != "-u"]
        if words[:1] != [sys.executable] or not (words[1] == "-m" or words[1].endswith(".py")):
            super()._execute_child(  # type: ignore[misc]
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest
            )
            return
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                if start_new_session:
                    os.setsid()
                if umask >= 0:
                    os.umask(umask)
                take_files((p2cread, c2pwrite, errwrite), set(pass_fds))
                sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - multiprocessing has closed it
                be_new(cwd, env)
                run(words[1:])
            finally:
                os._exit(1)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]


def take_files(given: Sequence[int], kept: set[int]) -> None:
    """Points the files that exec would close to the null device: objects of the parent may still close their numbers
    without harm."""
    taken = [os.dup(own if own != -1 else at) for at, own in enumerate(given)]
    for at, own in enumerate(taken):
        os.dup2(own, at)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in {*kept, nowhere} and os.path.exists(f"/proc/self/fd/{name}"):
            os.dup2(nowhere, int(name), inheritable=False)


def be_new(cwd: Any, env: Mapping[str, str] | None) -> None:
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if cwd is not None:
        os.chdir(cwd)
    if env is not None:
        for name in os.environ.keys() - env.keys():
            del os.environ[name]
        os.environ.update(env)


def run(words: Sequence[str]) -> NoReturn:
    """Does what an interpreter does with `-m MODULE`, `-c CODE` or `FILE`, and their words."""
    code: Any = 0
    kind, *rest = words
    sys.argv = rest if kind == "-m" else ["-c", *rest[1:]] if kind == "-c" else [*words]
    try:
        if kind == "-m":
            for call in on_start:
                call(rest[0], dict(os.environ))
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif kind == "-c":
            exec(rest[0], {"__name__": "__main__"})
        else:
            sys.path.insert(0, str(Path(kind).resolve().parent))
            runpy.run_path(kind, run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - as an interpreter would
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def preload() -> None:
    """Makes this process fork from here on. DS_ACCELERATOR and OMP_NUM_THREADS must be set before."""
    subprocess.Popen = ForkedPopen  # type: ignore[misc]
    for name in PRELOADED:
        __import__(name)
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    subprocess_handler.Popen = ForkedPopen
    # torch notes its caller, for which it searches every loaded module: seconds of each run
    dynamic_rendezvous.get_method_name = lambda depth=2: ""


def is_alive(process: int) -> bool:
    """Returns whether any thread of a process lives: the first may be gone while others still hold its files."""
    try:
        states = [
            file.read_text().rpartition(")")[2].split()[0] for file in Path(f"/proc/{process}/task").glob("*/stat")
        ]
    except OSError:
        return False
    return any(state not in "ZX" for state in states)


def read_parent(process: int) -> int:
    """Returns 0 where the process has ended."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


class Command:
    """`python -m ulysses_cli WORDS`, forked from the server that tests' ranks come from. It behaves like a Popen. Its
    output goes to files, so that it may be of any length."""

    def __init__(self, words: Sequence[str], cwd: Path, env: Mapping[str, str]) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.pids = Path(env.get(kill_points.PIDS) or self.folder.name) / "pids"  # two machines of one run share them
        env = {**env, kill_points.PIDS: str(self.pids)}
        self.files = [Path(self.folder.name) / name for name in ("out", "err")]
        self.process = start_process(_be_command, (list(words), str(cwd), dict(env), list(map(str, self.files))))
        self.pid = self.process.pid or 0

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.process.is_alive():
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def signal_rank(self, rank: int, number: int = signal.SIGKILL) -> None:
        os.kill(kill_points.find_rank(self.pids, rank), number)

    def list_ranks(self) -> list[int]:
        return [int(file.read_text()) for file in self.pids.glob("[0-9]*")]

    @property
    def has_fired(self) -> bool:
        """Returns whether the plan's event has come."""
        return (self.pids / "fired").exists()

    def read_stderr(self) -> str:
        """Returns the text of stderr so far."""
        return _read(self.files[1])

    def wait(self, timeout: float) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired("ulysses", timeout, *map(_read, self.files))
        return self.process.exitcode

    def communicate(self, timeout: float) -> tuple[str, str]:
        self.wait(timeout)
        return _read(self.files[0]), _read(self.files[1])


def _read(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""


def _be_command(words: Sequence[str], cwd: str, env: Mapping[str, str], files: Sequence[str]) -> None:
    for number, file in enumerate(files, 1):
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(handle, number)
        os.close(handle)
    sys.stdout, sys.stderr = (open(number, "w", encoding="utf-8", closefd=False) for number in (1, 2))  # noqa: SIM115
    be_new(cwd, env)
    if network := env.get(networks.NETWORK):
        networks.enter(network)
        if host := env.get(networks.HOST):
            networks.take_host_name(host, Path(files[0]).with_name("hosts"), env.get(networks.KNOWN, ""))
    preload()
    on_start.append(kill_points.arm)
    run(["-m", "ulysses_cli", *words])
