"""Layout -> the launcher's command line and environment, on one machine or many; starts it and reads what became of it.

Imports nothing heavy: the launcher and the ranks are child processes.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ulysses_cli.host import network
from ulysses_cli.host.children import narrow_umask
from ulysses_cli.host.operator_builds import list_dead_locks
from ulysses_cli.plan.problem import Problem, RecipeError
from ulysses_cli.plan.recipe.changes import list_differences
from ulysses_cli.plan.secrets import collect_secrets, mask_secrets
from ulysses_cli.run_folder import run_key
from ulysses_cli.run_folder.failure_record import choose_first
from ulysses_cli.run_folder.manifest import read_model_step
from ulysses_cli.run_folder.seal import KEY, Seal

DEFAULT_PORT = 29400
INTERRUPTED = {signal.SIGINT: 130, signal.SIGTERM: 143}
SAME_SIGNAL_SECONDS = 0.5  # some senders signal a process and then its group
AGENT_SECONDS = 5  # the launcher has this long to end its ranks at once
MAX_DIFFERENCES = 12
PEER_SHUTDOWN_SECONDS = "10"  # after one rank has failed, the others wait in a collective that never ends


@dataclass(frozen=True)
class Nodes:
    """The machines of a run, and which of them this is."""

    count: int = 1
    rank: int = 0
    master_addr: str | None = None
    master_port: int = DEFAULT_PORT
    processes_here: int = 1


def find_nodes(
    world_size: int,
    environ: Mapping[str, str],
    *,
    nnodes: int | None = None,
    node_rank: int | None = None,
    master_addr: str | None = None,
    master_port: int | None = None,
) -> Nodes:
    """Options win over NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT and NPROC_PER_NODE, which win over SLURM's."""
    in_srun = "SLURM_STEP_NODELIST" in environ and "SLURM_NODEID" in environ
    slurm = environ if in_srun else {}
    count = nnodes or _read_count(environ, "NNODES") or _read_count(slurm, "SLURM_STEP_NUM_NODES") or 1
    rank = node_rank if node_rank is not None else _read_rank(environ, "NODE_RANK")
    rank = rank if rank is not None else _read_rank(slurm, "SLURM_NODEID")
    address = master_addr or environ.get("MASTER_ADDR") or _first_host(slurm.get("SLURM_STEP_NODELIST", ""))
    if count == 1:
        if node_rank:
            raise _refuse(f"node rank {node_rank} is outside 1 machine", "add --nnodes, or leave --node-rank out")
        here = _read_count(environ, "NPROC_PER_NODE") or world_size
        if here != world_size:
            raise _refuse(
                f"NPROC_PER_NODE is {here}, but the recipe has {world_size} processes", "change one of the two"
            )
        return Nodes(processes_here=world_size)
    if rank is None or not address:
        missing = "--node-rank" if rank is None else "--master-addr"
        raise _refuse(f"{count} machines need {missing}", "give it here or in NODE_RANK and MASTER_ADDR")
    if not 0 <= rank < count:
        raise _refuse(f"node rank {rank} is outside {count} machines", f"use 0 to {count - 1}")
    here = _read_count(environ, "NPROC_PER_NODE") or world_size // count
    if here * count != world_size:
        raise _refuse(
            f"{count} machines with {here} processes each are {here * count}, but the recipe has {world_size}",
            "machines are alike: the number of processes is a multiple of theirs",
        )
    port = master_port or _read_count(environ, "MASTER_PORT") or DEFAULT_PORT
    return Nodes(count, rank, address, port, here)


def _refuse(message: str, hint: str) -> RecipeError:
    return RecipeError([Problem("", message, hint)])


def _read_rank(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    if text and not text.isdecimal():
        raise _refuse(f"{name} is {text}", "it is a whole number")
    return int(text) if text else None


def _read_count(environ: Mapping[str, str], name: str) -> int | None:
    return _read_rank(environ, name) or None


def _first_host(nodes: str) -> str:
    """The first name of SLURM's compressed list: gpu[07-09,12],login1 -> gpu07."""
    found = re.match(r"([^\[,]+)(?:\[(\d+))?", nodes)
    return (found[1] + (found[2] or "")) if found else ""


@dataclass(frozen=True)
class Meeting:
    """Where the processes of a run find each other, and the key by which they know each other."""

    key: str = field(repr=False)
    address: str  # of this machine, at which its processes listen
    interface: str
    endpoint: str  # of the launchers: a file, or host:port
    folder: Path | None = None  # of one machine's ranks


@contextmanager
def open_meeting(nodes: Nodes, run_dir: Path, environ: Mapping[str, str]) -> Iterator[Meeting]:
    """One machine's processes meet in a new folder that is the user's alone; those of several at the master's port."""
    given = run_key.read_given_key(environ)
    if nodes.master_addr is None or nodes.count == 1:
        with tempfile.TemporaryDirectory(prefix="ulysses-meeting-", ignore_cleanup_errors=True) as folder:
            key = given or secrets.token_hex(run_key.NUM_BYTES)
            yield Meeting(key, "localhost", "lo", str(Path(folder) / "launcher"), Path(folder))
        return
    way = network.find_way(nodes.master_addr)
    key = given or run_key.share_key(run_dir)
    try:
        yield Meeting(key, way.address, way.interface, f"{nodes.master_addr}:{nodes.master_port}")
    finally:
        if given is None and nodes.rank == 0:
            run_key.drop_key(run_dir, key)


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


@dataclass(frozen=True)
class RunLock:
    """Held shared by every process of a run on one machine; a run begins by holding it alone."""

    file: Path
    handle: int


def lock_run(run_dir: Path, node_rank: int, recipe: Mapping[str, Any] | None = None) -> RunLock:
    """`recipe`: what a second run is told of this one."""
    file = run_dir / f"lock-{node_rank}"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o666 & ~narrow_umask(run_dir))
    except OSError as error:
        problem = Problem("run.output_dir", f"{run_dir} cannot be written: {error.strerror}", "choose another folder")
        raise RecipeError([problem]) from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        facts = {"process": os.getpid(), "host": socket.gethostname(), "started": time.time(), "recipe": recipe}
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(mask_secrets(facts, known=collect_secrets(recipe, os.environ))).encode(), 0)
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise RecipeError([_describe_live_run(run_dir, _read_json(file), recipe)]) from None
    return RunLock(file, handle)


def _describe_live_run(run_dir: Path, facts: Any, recipe: Mapping[str, Any] | None) -> Problem:
    """Who holds the folder, and what of the recipe that would begin there differs from theirs."""
    message = f"{run_dir} belongs to a run that goes on right now"
    hint = "wait for it, or choose another run.output_dir"
    if not isinstance(facts, dict) or not isinstance(facts.get("started"), float):
        return Problem("run.output_dir", message, hint)
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(facts["started"]))
    message += f" (process {facts.get('process')} on {facts.get('host')}, since {since})"
    if isinstance(facts.get("recipe"), dict) and recipe is not None:
        differs = list_differences(facts["recipe"], mask_secrets(recipe, known=collect_secrets(recipe, os.environ)))
        message += "; this recipe differs from its in:" if differs else "; its recipe is the same"
        message = "\n  ".join([message, *differs[:MAX_DIFFERENCES]])
        if len(differs) > MAX_DIFFERENCES:
            message += f"\n  and {len(differs) - MAX_DIFFERENCES} more"
    return Problem("run.output_dir", message, hint)


RESULTS = ("checkpoints", "model")
RECORDS = ("metrics.jsonl", "eval.jsonl", "run.json")
REPLACED = "replaced"


def check_run_dir(run_dir: Path, inputs: Sequence[str], *, overwrite: bool) -> None:
    """A run that starts anew finds no older one's results in its folder, and deletes nothing unless told to."""
    for name in RESULTS:
        folder = run_dir / name
        inside = [path for path in inputs if Path(os.path.expanduser(path)).resolve().is_relative_to(folder.resolve())]
        if inside:
            raise _refuse(f"{inside[0]} lies in {folder}, where this run writes", "choose another run.output_dir")
        if not overwrite and folder.is_dir() and any(folder.iterdir()):
            problem = Problem(
                "run.output_dir",
                f"{folder} holds the results of an earlier run",
                "go on with --resume auto, choose another run.output_dir, or replace them with --overwrite",
            )
            raise RecipeError([problem])


def set_results_aside(run_dir: Path) -> Path | None:
    """What an earlier run left is kept until the new one has a model: a run that fails at its first step has then
    destroyed nothing. -> where it is kept, None when there was nothing."""
    shutil.rmtree(run_dir / "rehearsal", ignore_errors=True)
    there = [run_dir / name for name in (*RESULTS, *RECORDS) if (run_dir / name).exists()]
    if not any(path.is_dir() and any(path.iterdir()) for path in there):
        return None
    aside = next(path for at in itertools.count(1) if not (path := run_dir / REPLACED / str(at)).exists())
    aside.mkdir(parents=True)
    for path in there:
        path.rename(aside / path.name)
    return aside


def restore_results(run_dir: Path, aside: Path) -> bool:
    """After a run that failed: put an earlier run's results back, unless the new one has left some of its own."""
    if any((run_dir / name).is_dir() and any((run_dir / name).iterdir()) for name in RESULTS):
        return False
    for path in aside.iterdir():
        mine = run_dir / path.name
        shutil.rmtree(mine) if mine.is_dir() else mine.unlink(missing_ok=True)
        path.rename(mine)
    aside.rmdir()
    return True


def drop_replaced_results(run_dir: Path) -> None:
    """The new run's model stands."""
    shutil.rmtree(run_dir / REPLACED, ignore_errors=True)


def clear_build_locks(environ: Mapping[str, str]) -> None:
    """A process that was killed while it built one of DeepSpeed's operators leaves a lock that all others wait for."""
    for lock in list_dead_locks(environ):
        lock.unlink(missing_ok=True)


def find_newest_checkpoint(run_dir: Path) -> Path | None:
    """By name: what is in it, the ranks judge."""
    found = [path for path in run_dir.glob("checkpoints/step-*") if path.name.removeprefix("step-").isdecimal()]
    return max(found, key=lambda path: int(path.name.removeprefix("step-")), default=None)


def is_model_of_newest(run_dir: Path) -> bool:
    """The run's last checkpoint has become its model."""
    newest = find_newest_checkpoint(run_dir)
    return newest is not None and read_model_step(run_dir / "model") == int(newest.name.removeprefix("step-"))


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
    lock: RunLock,
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


def find_first_failure(logs: Path) -> dict[str, Any]:
    """What the first failing rank wrote; or, when it was killed and wrote nothing, what the launcher saw of it. A rank
    that lost its peer writes before the launcher sees the peer's death, which is the cause."""
    told = [found for file in logs.glob("rank-*.error.json") if (found := _read_json(file))]
    interrupted = [
        found for found in told if found.get("is_interruption")
    ]  # most often by the launcher, after a failure
    told = [found for found in told if not found.get("is_interruption")]
    seen = _read_json(logs / "failure.json") or [{}]
    killed = [found for found in seen if found.get("exit_code") == -signal.SIGKILL]
    causes = [found for found in (*told, *seen) if found.get("is_cause")]
    if killed and not causes:
        return dict(killed[0])
    if told or interrupted:
        return choose_first(causes or told or interrupted)
    return dict(min(seen, key=lambda found: found.get("time", 0)))


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
