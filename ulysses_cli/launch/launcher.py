"""The launcher's command line and environment; starts it, and says how the run ended.

Imports nothing heavy: the launcher and the ranks are child processes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ulysses_cli.host.children import narrow_umask
from ulysses_cli.host.operator_builds import list_dead_locks
from ulysses_cli.launch.failures import find_first_failure
from ulysses_cli.launch.meeting import Meeting
from ulysses_cli.launch.nodes import Nodes
from ulysses_cli.launch.start_lock import NewLock
from ulysses_cli.run_folder.seal import KEY, Seal

INTERRUPTED = {signal.SIGINT: 130, signal.SIGTERM: 143}
SAME_SIGNAL_SECONDS = 0.5  # some senders signal a process and then its group
AGENT_SECONDS = 5  # the launcher has this long to end its ranks at once
PEER_SHUTDOWN_SECONDS = "10"  # after one rank has failed, the others wait in a collective that never ends


def make_launcher_args(nodes: Nodes, max_restarts: int, meeting: Meeting, extra: Sequence[str] = ()) -> list[str]:
    """For torch's elastic launcher. Of several machines any may start first: they meet at the master's address."""
    args = [f"--nnodes={nodes.count}", f"--nproc-per-node={nodes.processes_here}", f"--max-restarts={max_restarts}"]
    store = "file" if meeting.folder else "tcp"
    args += ["--rdzv-backend=ulysses", f"--rdzv-endpoint={meeting.endpoint}"]
    args += [f"--rdzv-conf=store_type={store},node_rank={nodes.rank}"]
    args += [f"--rdzv-id={Seal(meeting.key).name_run()}", f"--local-addr={meeting.address}"]
    return [*args, *extra]


def count_places(device: str) -> int:
    """Ranks that this machine can really run: one per GPU, or per core."""
    if device == "cpu":
        return max(4, len(os.sched_getaffinity(0)))
    return sum(file.name.removeprefix("nvidia").isdecimal() for file in Path("/dev").glob("nvidia*"))


def make_environment(
    environ: Mapping[str, str], device: str, processes_here: int, meeting: Meeting | None = None
) -> dict[str, str]:
    """What ranks must find before torch is imported. What the user has set stays."""
    ours = {
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": PEER_SHUTDOWN_SECONDS,
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // processes_here)),
        # ranks that are started again must not meet at the addresses of the dead, which a shared store still holds
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    if meeting is not None and meeting.folder is not None:
        ours["ULYSSES_MEETING"] = str(meeting.folder)
    if meeting is not None and meeting.interface:  # ranks of one machine talk over its loopback alone
        ours |= {"GLOO_SOCKET_IFNAME": meeting.interface, "NCCL_SOCKET_IFNAME": f"={meeting.interface}"}
    if device == "cpu":
        ours["DS_ACCELERATOR"] = "cpu"
    else:
        if "PYTORCH_CUDA_ALLOC_CONF" not in environ:  # the older name of the same setting
            ours["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    return {**ours, **environ} | ({KEY: meeting.key} if meeting is not None else {})


def clear_build_locks(environ: Mapping[str, str]) -> None:
    """A process that was killed while it built one of DeepSpeed's operators leaves a lock that all others wait for."""
    for lock in list_dead_locks(environ):
        lock.unlink(missing_ok=True)


@dataclass(frozen=True)
class Outcome:
    """How a run ended. `failure`: what the first failing rank said, or {}."""

    exit_code: int
    failure: dict[str, Any]


def launch(
    launcher_args: Sequence[str],
    rank_args: Sequence[str],
    environ: Mapping[str, str],
    logs: Path,
    lock: NewLock,
) -> Outcome:
    """Start the launcher and wait. Ranks write the display to this process's stderr and everything else to logs."""
    mask = narrow_umask(logs.parent)  # what the run writes is no more open than its folder
    logs.mkdir(parents=True, exist_ok=True, mode=0o777 & ~mask)
    clear_build_locks(environ)
    failure_file = logs / "failure.json"
    for stale in [failure_file, *logs.glob("rank-*.error*.json")]:
        stale.unlink(missing_ok=True)
    command = [sys.executable, "-m", "ulysses_cli.train.agent", *launcher_args, "-m", "ulysses_cli.train", *rank_args]
    ours = {"ULYSSES_FAILURE_FILE": str(failure_file), "ULYSSES_LAUNCH": str(time.time_ns())}
    ours |= {"ULYSSES_LOCK": str(lock.file), "ULYSSES_STARTED_BY": str(os.getpid())}
    with open(logs / "launcher.log", "ab", opener=lambda path, flags: os.open(path, flags, 0o666 & ~mask)) as log:
        agent = subprocess.Popen(
            command,
            stdout=sys.stderr.fileno(),
            stderr=log,
            stdin=subprocess.DEVNULL,
            env={**environ, **ours},
            pass_fds=(lock.handle,),
            umask=mask,
            start_new_session=True,  # a Ctrl-C in the terminal reaches this process alone, which hands it on once
        )
        signals = StopSignals(agent)
        kept = {number: signal.signal(number, signals.hear) for number in (*INTERRUPTED, signal.SIGALRM)}
        try:
            code = agent.wait()
        finally:
            signal.alarm(0)
            for number, handler in kept.items():
                signal.signal(number, handler)
    if code == 0:
        return Outcome(0, {})
    failure = find_first_failure(logs)
    if signals.first is not None and not failure.get("is_cause"):
        return Outcome(INTERRUPTED[signals.first], failure)
    return Outcome(int(failure.get("exit_code_wanted", 1)), failure)


class StopSignals:
    """The command's ear: a first signal asks for a checkpoint, a second one ends all at once."""

    def __init__(self, agent: subprocess.Popen[bytes], clock: Callable[[], float] = time.monotonic) -> None:
        self.agent, self.clock = agent, clock
        self.first: signal.Signals | None = None
        self.at = 0.0

    def hear(self, number: int, frame: Any) -> None:
        if number == signal.SIGALRM:  # the launcher does not even end its ranks; they end with it
            self.agent.kill()
        elif self.first is None:
            self.first, self.at = signal.Signals(number), self.clock()
            self.agent.send_signal(signal.SIGTERM)
        elif number == signal.SIGINT or self.clock() - self.at > SAME_SIGNAL_SECONDS:
            self.agent.send_signal(signal.SIGINT)
            signal.alarm(AGENT_SECONDS)
