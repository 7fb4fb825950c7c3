"""Kills real runs on two CPU ranks by faults drawn from a fixed list of seeds; counts injected, survived, refused,
lost, hung.

A chain is one run that is killed, resumed with --resume auto, killed again, and at last left to finish. Its faults are
survived when its losses and its model equal those of an uninterrupted run to the last bit. A fault is refused when the
command ends with a message and exit code 1 or 2. A run that does not end, or leaves ranks behind, is hung, and with it
all faults of its piece count as one. Anything else is lost. The results file holds what is done: a second
call continues with the rest (--minutes bounds one call, --anew starts over). --hosts strikes one of several machines.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
from paths import RESULTS  # isort: skip - first, since it names the folder of `support`
import host_faults
from compared_runs import (
    NUM_STEPS,
    TIME_LIMIT,
    ComparedRuns,
    Ends,
    HungRunError,
    end,
    judge,
    lose,
    settle,
    wait_for_steps,
)
from support import forked, kill_points, networks
from support.faults import damage_newest, list_processes, wait_until
from support.forked import Command, is_alive

from ulysses_cli.prove import ranks

NUM_KILLS, CHAIN = 30, 5
DAMAGES = ("truncated file", "flipped byte", "missing shard", "missing manifest", "torn metrics")
COLUMNS = ("injected", "survived", "refused", "lost", "hung")
WALKED_STEP = 8
WALKED = [
    *("run.rehearsal=true", "data.eval_split=0.02", f"run.eval_steps={WALKED_STEP}"),
    *(f"run.sample_steps={WALKED_STEP + 2}", "run.sample_prompts=[a]", "run.sample_max_new_tokens=8"),
]
STOP_SECONDS = 60  # in which SIGTERM ends a run
WHO = {"all": "all ranks", "one": "one rank", "agent": "the agent", "command": "the command"}
WALKS = [("command", signal.SIGTERM), *((who, signal.SIGKILL) for who in WHO)]


def kill(runs: ComparedRuns, seeds: list[int]) -> Ends:
    """Kills a chain at each seed's event. Every other chain saves while steps go on."""
    run, words = f"chain-{seeds[0]}", ["run.async_save=true"] if seeds[0] // CHAIN % 2 else []
    killed = []
    for seed in seeds:
        plan = kill_points.draw(seed)
        process = runs.start(run, *words, "--resume", "auto", plan=plan)
        end(process)
        if process.has_fired:
            who = "all ranks" if len(plan["ranks"]) == 2 else "one rank"
            killed.append(f"SIGKILL of {who}, {plan['moment']}{', async' if words else ''}")
    return settle(runs, run, killed, *words)


def walk(runs: ComparedRuns, who: str, number: signal.Signals) -> Ends:
    """Kills one run at every event of its life in turn and resumes it each time. Both ranks must be about to do the
    same thing, SIGTERM must end the run in STOP_SECONDS, no process may outlive the command, and a run resumed at its
    end must have nothing left to do."""
    run, ends = f"walk-{who}-{number.name}", []
    for event, plan in kill_points.list_phases(NUM_STEPS, WALKED_STEP, WALKED_STEP + 2).items():
        process = runs.start(run, *WALKED, "--resume", "auto", plan={**plan, "who": who, "signal": int(number)})
        begun, processes = wait_for_strike(process)
        code, output = end(process)
        is_late = number == signal.SIGTERM and time.monotonic() - begun > STOP_SECONDS
        alive = wait_for_processes(processes)
        fault = f"{number.name} of {WHO[who]}, {event}"
        if not process.has_fired or alive or is_late or "Traceback" in output or not agree(process):
            how = "hung" if alive or is_late else "lost"
            return [*ends, *lose(fault, f"{code}, alive: {alive}, late: {is_late}\n{output}", how)]
        ends.append((fault, "survived"))
    code, output = end(runs.start(run, *WALKED, "--resume", "auto"))
    if code or not runs.is_equal(run, 0, "walk"):
        return [(fault, "lost") for fault, _ in ends]
    code, output = end(runs.start(run, *WALKED, "--resume", "auto"))
    how = "survived" if code == 0 and "already finished" in output else "lost"
    return [*ends, (f"resumed after the end, {number.name} of {WHO[who]}", how)]


def agree(process: Command) -> bool:
    """Returns whether both ranks entered the same collectives, as far as both came."""
    logs = kill_points.read_collectives(process.pids)
    return all(one == other for one, other in zip(*logs, strict=False))


def wait_for_strike(process: Command) -> tuple[float, set[int]]:
    """Waits until the plan's event has come, or the command has ended without it. Returns the time, and the ranks and
    their agent at that moment."""
    limit = time.monotonic() + TIME_LIMIT
    while not process.has_fired and process.poll() is None and time.monotonic() < limit:
        time.sleep(0.005)
    return time.monotonic(), list_processes(process)


def wait_for_processes(processes: Collection[int]) -> list[int]:
    """Returns those that are still alive 15 seconds after their command ended."""
    limit = time.monotonic() + 15
    while alive := [process for process in processes if is_alive(process)]:
        if time.monotonic() > limit:
            return alive
        time.sleep(0.1)
    return []


def damage(runs: ComparedRuns, kind: str) -> Ends:
    """Stops a run, damages what it left and resumes it."""
    run = kind.replace(" ", "-")
    process = runs.start(run)
    wait_for_steps(runs, run, process, 4)
    process.send_signal(signal.SIGTERM)
    code, output = end(process)
    if code or "stopped: by a signal" not in output:
        return lose("SIGTERM", output)
    damage_newest(runs.folder / run, kind, random.Random(kind))
    result = settle(runs, run, [kind])
    return [("SIGTERM", result[0][1]), *result]


def hang(runs: ComparedRuns, name: str) -> Ends:
    """Stops one rank without ending it. The run must name it and end all ranks, and resume from its checkpoint."""
    run, seconds = f"hanging-{name}", 6
    process = runs.start(run, f"run.step_timeout={seconds}")
    wait_for_steps(runs, run, process, 2)
    number, words = {
        "stopped": (signal.SIGSTOP, "rank 1 does not answer, the others wait for it in "),
        "asleep": (signal.SIGUSR2, "rank 1 hangs in micro-step "),
    }[name]
    process.signal_rank(1, number)
    code, output = end(process)
    if code != 1 or f"takes longer than run.step_timeout ({seconds} s): {words}" not in output:
        return lose(f"hang, {name}", output)
    return settle(runs, run, [f"hang, {name}"])


def restart(runs: ComparedRuns) -> Ends:
    """Kills a rank where run.max_restarts lets the run restart by itself."""
    process = runs.start("restarted", "run.max_restarts=2")
    wait_for_steps(runs, "restarted", process, 3)
    process.signal_rank(1)
    return judge(runs, "restarted", ["SIGKILL of one rank, max_restarts"], *end(process))


def restart_machines(runs: ComparedRuns) -> Ends:
    """Kills a rank on one of two machines, each with its own agent. All ranks on both machines must restart."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    words = ["run.max_restarts=2", "--nnodes", "2", "--master-addr", "localhost", "--master-port", str(port)]
    first = runs.start("machines", *words, "--node-rank", "0")
    second = runs.start("machines", *words, "--node-rank", "1", peer=first)
    wait_for_steps(runs, "machines", first, 3)
    first.signal_rank(1)
    code, output = end(second)
    if code:
        return lose("SIGKILL of one rank, two machines", output)
    return judge(runs, "machines", ["SIGKILL of one rank, two machines"], *end(first))


def start_twice(runs: ComparedRuns) -> Ends:
    """Starts a second run in a folder, which must be refused and harm nothing. A dead run must keep no lock."""
    first = runs.start("twice")
    wait_for_steps(runs, "twice", first, 2)
    code, output = end(runs.start("twice", "--resume", "auto"))
    ends = [("two runs in one folder", "refused")]
    if code != 2 or "is in use by a run that is still going on" not in output:
        ends = lose(*ends[0][:1], output)
    for rank in range(2):
        first.signal_rank(rank)
    first.kill()
    end(first)
    wait_until_free(runs.folder / "twice" / "lock-0")
    return ends + settle(runs, "twice", ["SIGKILL of all ranks and the command"])


def wait_until_free(lock: Path) -> None:
    """Waits until the agent has also noticed that its command is dead."""
    limit = time.monotonic() + 60
    with open(lock) as stream:
        while time.monotonic() < limit:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                time.sleep(0.1)


@contextmanager
def small_disk(place: Path, *options: str) -> Iterator[bool]:
    """A tmpfs, where this process may mount one."""
    place.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(place)]
    if subprocess.run(command, capture_output=True).returncode:
        print("  no disk can be mounted here: this fault is left out", flush=True)
        yield False
        return
    try:
        yield True
    finally:
        subprocess.run(["umount", "-l", str(place)], check=False)


def fill(file: Path) -> None:
    """Fills a folder's disk to the last byte."""
    handle = os.open(file, os.O_WRONLY | os.O_CREAT)
    for size in (1 << 16, 1 << 12, 1):
        try:
            while os.write(handle, b"\0" * size) == size:
                pass
        except OSError:
            continue
    os.close(handle)


def fill_disk(runs: ComparedRuns, on_save_error: str) -> Ends:
    """Fills the disk that holds the run, its logs and its metrics, and later frees space again."""
    fault, run = f"full disk, on_save_error: {on_save_error}", f"small-{on_save_error}/run"
    words = ["run.save_total_limit=1", f"run.on_save_error={on_save_error}"]
    with small_disk(runs.folder / run.split("/")[0], "size=3m") as is_there:
        if not is_there:
            return []
        process = runs.start(run, *words)
        wait_for_steps(runs, run, process, 3)
        ballast = runs.folder / run.split("/")[0] / "ballast"
        fill(ballast)
        if on_save_error == "continue":  # space is freed after a save has failed, and before the last save
            wait_until(process, lambda: "No space left on device" in process.read_stderr())
            ballast.unlink()
        code, output = end(process)
        ballast.unlink(missing_ok=True)
        if "No space left on device" not in output or code != (on_save_error == "stop"):
            return lose(fault, output)
        if on_save_error == "stop":
            return settle(runs, run, [fault], *words)
        return judge(runs, run, [fault], code, output)


def forbid(runs: ComparedRuns) -> Ends:
    """Makes the checkpoints' disk unwritable."""
    process = runs.start("read-only")
    wait_for_steps(runs, "read-only", process, 3)
    with small_disk(runs.folder / "read-only" / "checkpoints", "ro") as is_there:
        if not is_there:
            end(process)
            return []
        code, output = end(process)
    if code != 1 or "was not written: " not in output:  # read-only, or with its folder unmounted
        return lose("read-only disk", output)
    return settle(runs, "read-only", ["read-only disk"])


def list_pieces() -> dict[str, Callable[[ComparedRuns], Ends]]:
    chains = [list(range(at, min(at + CHAIN, NUM_KILLS))) for at in range(0, NUM_KILLS, CHAIN)]
    pieces: dict[str, Callable[[ComparedRuns], Ends]] = {
        f"seeds {seeds[0]} to {seeds[-1]}": lambda runs, seeds=seeds: kill(runs, seeds)  # type: ignore[misc]
        for seeds in chains
    }
    for who, number in WALKS:
        pieces[f"walk, {number.name} of {WHO[who]}"] = lambda runs, who=who, number=number: walk(runs, who, number)  # type: ignore[misc]
    pieces |= {kind: lambda runs, kind=kind: damage(runs, kind) for kind in DAMAGES}  # type: ignore[misc]
    pieces |= {f"hang, {name}": lambda runs, name=name: hang(runs, name) for name in ("stopped", "asleep")}  # type: ignore[misc]
    pieces |= {
        "restart": restart,
        "restart, two machines": restart_machines,
        "two runs": start_twice,
        "read-only disk": forbid,
    }
    for choice in ("stop", "continue"):
        pieces[f"full disk, {choice}"] = lambda runs, choice=choice: fill_disk(runs, choice)  # type: ignore[misc]
    return pieces


def summarize(done: dict[str, Any], num_pieces: int) -> dict[str, Any]:
    counts: dict[str, Counter[str]] = {}
    for piece in done.values():
        for fault, how in piece["ends"]:
            counts.setdefault(fault, Counter()).update({"injected": 1, how: 1})
    total = sum(counts.values(), Counter())
    return {
        "is_finished": len(done) == num_pieces,
        "all": {name: total[name] for name in COLUMNS},
        "faults": {fault: {name: count[name] for name in COLUMNS} for fault, count in sorted(counts.items())},
        "steps": NUM_STEPS,
        "seconds": round(sum(piece["seconds"] for piece in done.values())),
        "pieces": done,
    }


def read_done(file: Path, pieces: dict[str, Any]) -> dict[str, Any]:
    """Returns the parts that an unfinished call has done."""
    try:
        before = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return {} if before["is_finished"] else {name: one for name, one in before["pieces"].items() if name in pieces}


@contextmanager
def open_runs(num_hosts: int) -> Iterator[ComparedRuns]:
    """Yields a folder with the uninterrupted runs that others are compared with. They ran on one machine."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, ExitStack() as stack:
        if num_hosts == 1:
            runs = ComparedRuns(Path(folder))
        elif why := networks.find_obstacle():
            sys.exit(f"network namespaces are not permitted here: {why}")
        else:
            runs = host_faults.HostRuns(Path(folder), stack.enter_context(networks.open_networks(num_hosts)))
        for run, words in (("whole", []), ("walk", WALKED))[: 3 - num_hosts]:
            code, output = end(runs.start(run, *words))
            assert code == 0, output
        yield runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="no piece is begun after this time")
    parser.add_argument("--anew", action="store_true", help="forget what an earlier call has done")
    parser.add_argument("--only", nargs="+", help="pieces whose name holds one of these; results are not written")
    parser.add_argument("--hosts", type=int, default=1, choices=(1, 2, 4), help="machines, as network namespaces")
    options = parser.parse_args()
    pieces: dict[str, Any] = list_pieces() if options.hosts == 1 else host_faults.list_pieces(options.hosts)
    file = RESULTS / ("faults-cpu.json" if options.hosts == 1 else f"faults-{options.hosts}-hosts-cpu.json")
    limit = time.monotonic() + 60 * options.minutes
    done = {} if options.anew or options.only else read_done(file, pieces)
    ranks.PRELOADED.extend(forked.PRELOADED)
    with open_runs(options.hosts) as runs:
        for name, piece in pieces.items():
            is_wanted = not options.only or any(word in name for word in options.only)
            if name in done or not is_wanted or time.monotonic() > limit:
                continue
            started = time.monotonic()
            try:
                ends = piece(runs)
            except HungRunError as hung:
                ends = lose(name, str(hung), "hung")
            done[name] = {"seconds": round(time.monotonic() - started, 1), "ends": ends}
            for fault, how in ends:
                print(f"  {fault}: {how}", flush=True)
            if not options.only:
                file.write_text(json.dumps(summarize(done, len(pieces)), indent=1) + "\n")
    result = summarize(done, len(pieces))
    print(f"\n{'':<44}" + "".join(f"{name:>10}" for name in COLUMNS))
    for fault, count in [*result["faults"].items(), ("all", result["all"])]:
        print(f"{fault:<44}" + "".join(f"{count[name]:>10}" for name in COLUMNS))
    print(f"{len(done)} of {len(pieces)} pieces in {result['seconds']} s")
    sys.exit(1 if result["all"]["lost"] or result["all"]["hung"] else 0)


if __name__ == "__main__":
    main()
