"""Makes the agent's command line and environment, starts it, waits, and returns how the run ended. Passes the lines
of the run's metrics to a function of this process meanwhile.

Imports nothing heavy: the agent and the ranks are child processes."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ulysses_cli.plan.files import open_own
from ulysses_cli.plan.problem import DONE, get_signal_code
from ulysses_cli.plan.resolved import hash_plan
from ulysses_cli.run.folder import NewLock
from ulysses_cli.run.host import FOLDER, ask_driver, choose_path, find_write_problem, get_builds_folder, narrow_umask
from ulysses_cli.run.key import KEY, Seal
from ulysses_cli.run.nodes import Nodes, Rendezvous
from ulysses_cli.run.records import ASKED_FILE, SPARE, STOP_FILE, MachineLogs, find_first_failure, read_early_stop

POLL_SECONDS = 0.2
READ_BYTES = 1 << 16


class StepListener:
    """Reads lines from a FIFO that rank 0 writes to, in the thread that waits for the agent. `receive` takes a split
    and a line; if it returns True or raises, the run stops with a checkpoint, and `error` holds what it raised."""

    def __init__(self, handle: int, environ: Mapping[str, str], receive: Callable[[str, dict[str, Any]], object]):
        self.handle, self.environ, self.receive = handle, dict(environ), receive
        self.error: BaseException | None = None
        self.waiting, self.asker = b"", ""

    def follow(self, agent: subprocess.Popen[bytes], stop: Callable[[], None]) -> int:
        """Returns the agent's exit code."""
        has_stopped = False
        while agent.poll() is None:
            if self._pass_on(POLL_SECONDS) and not has_stopped:
                has_stopped = True
                Path(self.environ[ASKED_FILE]).write_text(f"the program's {self.asker}", encoding="utf-8")
                stop()
        self._pass_on(0)
        return agent.wait()

    def _pass_on(self, seconds: float) -> bool:
        """Passes on what arrives in time. Returns whether the run shall stop."""
        wants_stop = False
        while select.select([self.handle], [], [], seconds)[0]:
            seconds = 0
            *lines, self.waiting = (self.waiting + os.read(self.handle, READ_BYTES)).split(b"\n")
            for line in lines:
                wants_stop |= self._call(line)
        return wants_stop

    def _call(self, written: bytes) -> bool:
        if self.error is not None:
            return False
        split = ""
        try:
            line = json.loads(written)
        except ValueError:  # a rank was killed while it wrote; the run goes on, and its own files are whole
            return False
        try:
            split = line.pop("split")
            wants_stop = self.receive(split, line) is True
        except BaseException as error:  # noqa: BLE001 - raised again once the run has saved and ended
            self.error, wants_stop = error, True
        if wants_stop:
            self.asker = self.asker or ("on_step" if split == "train" else "on_eval")
        return wants_stop


@contextmanager
def open_listener(receive: Callable[[str, dict[str, Any]], object]) -> Iterator[StepListener]:
    """Opens the FIFO for reading and writing: it then has no end before its last writer is gone, however often ranks
    start again."""
    with TemporaryDirectory(prefix="ulysses-lines-") as folder:
        path = Path(folder) / "lines"
        os.mkfifo(path, 0o600)
        handle = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        try:
            environ = {"ULYSSES_LINES": str(path), ASKED_FILE: str(path.with_name("asked"))}
            yield StepListener(handle, environ, receive)
        finally:
            os.close(handle)


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
SAME_SIGNAL_SECONDS = 0.5  # some programs signal a process and then its group
AGENT_SECONDS = 5  # after a second signal, the agent is killed when it has not ended by then
STDERR = 2
LOOPBACK = "lo"
PEER_SHUTDOWN_SECONDS = "10"  # after one rank has failed, the others hang in a collective


def make_agent_args(nodes: Nodes, max_restarts: int, rendezvous: Rendezvous, extra: Sequence[str] = ()) -> list[str]:
    """Arguments of torch's elastic agent. Several machines may start in any order: they meet at the master's
    address."""
    args = [f"--nnodes={nodes.count}", f"--nproc-per-node={nodes.processes_here}", f"--max-restarts={max_restarts}"]
    store = "file" if rendezvous.folder else "tcp"
    args += ["--rdzv-backend=ulysses", f"--rdzv-endpoint={rendezvous.endpoint}"]
    seconds = f"join_seconds={rendezvous.join_seconds},lost_seconds={rendezvous.lost_seconds}"
    args += [f"--rdzv-conf=store_type={store},node_rank={nodes.rank},{seconds}"]
    args += [f"--rdzv-id={Seal(rendezvous.key).name_run()}", f"--local-addr={rendezvous.address}"]
    return [*args, *extra]


def count_rank_slots(device: str) -> int:
    """Ranks that this machine can run: one per GPU, or per core."""
    if device == "cpu":
        return max(4, len(os.sched_getaffinity(0)))
    return ask_driver(os.environ).num_gpus


def make_environment(
    environ: Mapping[str, str], device: str, processes_here: int, rendezvous: Rendezvous | None = None
) -> dict[str, str]:
    """The environment of the ranks, set before torch is imported. Variables that the user has set are kept;
    PATH may begin with one more folder."""
    ours = {
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": PEER_SHUTDOWN_SECONDS,
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // processes_here)),
        # restarted ranks must not use the addresses of the ended ones, which a shared store still holds
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        FOLDER: str(get_builds_folder(environ)),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    if rendezvous is not None and rendezvous.folder is not None:
        ours["ULYSSES_MEETING"] = str(rendezvous.folder)
    # ranks of one machine use its loopback interface only: the address of the host's name may be a question to a server
    interface = rendezvous.interface if rendezvous is not None else LOOPBACK
    if interface:
        ours |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
    if device == "cpu":
        ours["DS_ACCELERATOR"] = "cpu"
        return _join(ours, environ, rendezvous)
    ours |= {
        "NCCL_LAUNCH_ORDER_IMPLICIT": "1",  # two communicators at once start in the order of the program, on every rank
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",  # FlashAttention-4 compiles its kernels once, not in every run
    }
    if not find_write_problem(environ):  # not in /tmp, which ends with a container; torch's keys name GPU and versions
        ours["TORCHINDUCTOR_CACHE_DIR"] = str(get_builds_folder(environ) / "compiled")
    # the former is the older name of the same setting
    if not {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} & environ.keys() and ask_driver(environ).maps_memory:
        ours["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    return _join(ours, environ, rendezvous)


def _join(ours: Mapping[str, str], environ: Mapping[str, str], rendezvous: Rendezvous | None) -> dict[str, str]:
    key = {KEY: rendezvous.key} if rendezvous is not None else {}
    return {**ours, **environ, "PATH": choose_path(environ)} | key


def find_terminal() -> int:
    """Returns the file that the display is written to: this process's stderr. A notebook's stderr may have no file of
    its own."""
    try:
        return sys.stderr.fileno()
    except (OSError, ValueError):
        return STDERR


@dataclass(frozen=True)
class Outcome:
    """How a run ended. `failure`: the record of the first rank that failed, or {}. `stopped_by`: why it stopped with a
    checkpoint before its last step, or ''."""

    exit_code: int
    failure: dict[str, Any]
    stopped_by: str = ""


def launch(
    agent_args: Sequence[str],
    plan: str,
    rank_args: Sequence[str],
    environ: Mapping[str, str],
    logs: MachineLogs,
    lock: NewLock,
    wait: Callable[[subprocess.Popen[bytes], Callable[[], None]], int] = lambda agent, _: agent.wait(),
) -> Outcome:
    """Starts the agent and waits. Ranks read `plan` from a file beside their logs, which is there as long as they are.
    They write their display to this process's stderr and all other output to logs. `wait` takes the agent and a
    function that asks it to stop with a checkpoint, returns the agent's exit code."""
    with _open_spare() as spare:
        return _launch(agent_args, plan, rank_args, environ, replace(logs, spare=spare), lock, wait)


@contextmanager
def _open_spare() -> Iterator[Path | None]:
    """A folder beside the run's disk; None where this machine has no place for one."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="ulysses-", ignore_cleanup_errors=True)
    except OSError:
        yield None
        return
    with folder:
        yield Path(folder.name)


@contextmanager
def _written(file: Path, plan: str) -> Iterator[None]:
    """Only this user may read it: it holds the recipe's secrets, for as long as the ranks live."""
    try:
        with open(file, "w", encoding="utf-8", opener=lambda path, flags: open_own(path, flags, 0o600)) as stream:
            stream.write(plan)
        yield
    finally:
        file.unlink(missing_ok=True)


def _launch(
    agent_args: Sequence[str],
    plan: str,
    rank_args: Sequence[str],
    environ: Mapping[str, str],
    logs: MachineLogs,
    lock: NewLock,
    wait: Callable[[subprocess.Popen[bytes], Callable[[], None]], int],
) -> Outcome:
    mask = narrow_umask(logs.folder.parent)  # the run's files get no wider permissions than its folder
    logs.folder.mkdir(parents=True, exist_ok=True, mode=0o777 & ~mask)
    began = logs.clear()
    own_args = ["--plan", str(logs.plan_file), f"--plan-hash={hash_plan(plan)}"]
    ranks = ["-m", "ulysses_cli.train", *own_args, *rank_args]
    command = [sys.executable, "-m", "ulysses_cli.train.agent", *agent_args, *ranks]
    ours = {"ULYSSES_FAILURE_FILE": str(logs.failure_file), "ULYSSES_LAUNCH": str(time.time_ns())}
    ours |= {STOP_FILE: str(logs.stop_file), "ULYSSES_LOCK": str(lock.file), "ULYSSES_STARTED_BY": str(os.getpid())}
    ours |= {SPARE: str(logs.spare)} if logs.spare is not None else {}
    with (
        _written(logs.plan_file, plan),
        open(logs.agent_log, "ab", opener=lambda path, flags: open_own(path, flags, 0o666 & ~mask)) as log,
    ):
        agent = subprocess.Popen(
            command,
            stdout=find_terminal(),
            stderr=log,
            stdin=subprocess.DEVNULL,
            env={**environ, **ours},
            pass_fds=(lock.handle,),
            umask=mask,
            start_new_session=True,  # so that Ctrl-C in the terminal reaches this process only, which forwards it once
        )
        signals = StopSignals(agent)
        handlers = {number: signal.signal(number, signals.handle) for number in (*STOP_SIGNALS, signal.SIGALRM)}
        try:
            code = wait(agent, partial(signals.handle, signal.SIGTERM, None))
        finally:
            signal.alarm(0)
            for number, handler in handlers.items():
                signal.signal(number, handler)
    if code == 0:
        return Outcome(DONE, {}, read_early_stop(logs.stop_file))
    if signals.first is None:
        failure = find_first_failure(logs, code, began)
    else:  # the agent was told to end, perhaps by this process's SIGKILL
        failure = find_first_failure(logs, abs(code), began)
        if not failure.get("is_cause"):
            return Outcome(get_signal_code(signals.first), failure)
    return Outcome(int(failure.get("exit_code_wanted", 1)), failure)


class StopSignals:
    """Forwards signals to the agent: the first one asks for a checkpoint, a second one ends the run at once."""

    def __init__(self, agent: subprocess.Popen[bytes], clock: Callable[[], float] = time.monotonic) -> None:
        self.agent, self.clock = agent, clock
        self.first: signal.Signals | None = None
        self.first_time = 0.0

    def handle(self, number: int, frame: Any) -> None:
        if number == signal.SIGALRM:  # the agent has not ended its ranks; they end with it
            self.agent.kill()
        elif self.first is None:
            self.first, self.first_time = signal.Signals(number), self.clock()
            self.agent.send_signal(signal.SIGTERM)
        elif number == signal.SIGINT or self.clock() - self.first_time > SAME_SIGNAL_SECONDS:
            self.agent.send_signal(signal.SIGINT)
            signal.alarm(AGENT_SECONDS)
