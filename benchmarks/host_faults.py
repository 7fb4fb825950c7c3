"""Faults that strike one of several machines, which are network namespaces with a rank each; used by faults.py --hosts.

After each fault every command must end, and the run that all machines resume must equal one that no fault struck, on
one machine. Where the fault passes by itself, the run must go on to the same end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from compared_runs import TIME_LIMIT, ComparedRuns, Ends, lose, wait_for_steps
from support import kill_points, networks
from support.forked import Command, is_alive, read_parent

MASTER = ("--master-addr=10.231.7.1", "--master-port=29431")
STEP_TIMEOUT, BEGUN, SHORT_SECONDS, END_SECONDS = 15, 4, 5.0, 15.0
ENDLESS = "The command did not end."
Deed = Callable[["HostRuns", Sequence[Command], int], None]
Results = list[tuple[int, str]]  # exit code and stderr of each machine's command


class HostRuns(ComparedRuns):
    """Runs with one rank on each of several machines."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        super().__init__(folder)
        self.names = names

    def start(self, run: str, *words: str, **options: Any) -> Command:
        return super().start(run, f"parallel.dp_shard_size={len(self.names) // 2}", *words, **options)

    def start_all(self, run: str, *words: str, changes: dict[int, str] | None = None) -> list[Command]:
        commands: list[Command] = []
        for number, name in enumerate(self.names):
            self.environ |= {networks.NETWORK: name}
            own = [f"--nnodes={len(self.names)}", f"--node-rank={number}", *MASTER, f"run.step_timeout={STEP_TIMEOUT}"]
            own += [changes[number]] if changes and number in changes else []
            commands.append(self.start(run, *words, *own, peer=commands[0] if commands else None))
        del self.environ[networks.NETWORK]
        return commands

    def end_all(self, commands: Sequence[Command]) -> Results:
        """Waits for all. A command that does not end is killed, and has exit code -9."""
        limit, results = time.monotonic() + TIME_LIMIT, []
        for command in commands:
            try:
                output = command.communicate(max(1.0, limit - time.monotonic()))[1]
            except subprocess.TimeoutExpired:
                command.kill()
                output = command.communicate(60.0)[1] + f"\n{ENDLESS}"
            results.append((int(command.returncode or 0), output))
        return results


def strike(runs: HostRuns, fault: str, host: int, deed: Deed, *words: str, goes_on: bool) -> Ends:
    fault, run = f"{fault}, machine {host}", f"{fault}-{host}".replace(" ", "-")
    commands = runs.start_all(run, *words)
    wait_for_steps(runs, run, commands[0], BEGUN)
    deed(runs, commands, host)
    results = runs.end_all(commands)
    networks.ip("-n", runs.names[host], "link", "set", "eth0", "up")
    alive = wait_for_ranks(commands[0])
    has_hung = bool(alive) or any(ENDLESS in output for _, output in results)
    if has_hung or any("Traceback" in output for _, output in results):
        return lose(
            fault, f"alive: {alive}\n" + "\n".join(output for _, output in results), "hung" if has_hung else "lost"
        )
    if not goes_on:
        results = runs.end_all(runs.start_all(run, *words, "--resume", "auto"))
    if any(code for code, _ in results) or not runs.is_equal(run, 0):
        return lose(fault, "\n".join(f"{code}\n{output[-700:]}" for code, output in results))
    return [(fault, "survived")]


def wait_for_ranks(command: Command) -> list[int]:
    """Returns the ranks of all machines that are still alive some seconds after their commands ended."""
    limit = time.monotonic() + END_SECONDS
    while alive := [rank for rank in command.list_ranks() if is_alive(rank)]:
        if time.monotonic() > limit:
            return alive
        time.sleep(0.1)
    return []


def kill_command(runs: HostRuns, commands: Sequence[Command], host: int) -> None:
    commands[host].kill()


def kill_agent(runs: HostRuns, commands: Sequence[Command], host: int) -> None:
    process = kill_points.find_rank(commands[0].pids, host)
    while (parent := read_parent(process)) != commands[host].pid:
        assert parent > 1, "the agent is gone already"
        process = parent
    os.kill(process, signal.SIGKILL)


def kill_rank(runs: HostRuns, commands: Sequence[Command], host: int) -> None:
    commands[0].signal_rank(host)


def stop_rank(runs: HostRuns, commands: Sequence[Command], host: int) -> None:
    commands[0].signal_rank(host, signal.SIGSTOP)


def terminate_command(runs: HostRuns, commands: Sequence[Command], host: int) -> None:
    commands[host].send_signal(signal.SIGTERM)


def cut_off(runs: HostRuns, commands: Sequence[Command], host: int) -> None:
    networks.ip("-n", runs.names[host], "link", "set", "eth0", "down")


def cut_off_shortly(runs: HostRuns, commands: Sequence[Command], host: int) -> None:
    cut_off(runs, commands, host)
    time.sleep(SHORT_SECONDS)
    networks.ip("-n", runs.names[host], "link", "set", "eth0", "up")


def refuse_recipe(runs: HostRuns, host: int) -> Ends:
    """One machine has another recipe. All must refuse it and say in which setting it differs."""
    fault, run = f"another recipe, machine {host}", f"another-recipe-{host}"
    results = runs.end_all(runs.start_all(run, changes={host: "train.learning_rate=0.5"}))
    is_refused = all(code in (1, 2) and "train.learning_rate" in output for code, output in results)
    if not is_refused or any("Traceback" in output for _, output in results):
        return lose(fault, "\n".join(output for _, output in results))
    return [(fault, "refused")]


DEEDS: dict[str, tuple[Deed, tuple[str, ...], bool]] = {
    "SIGKILL of the command": (kill_command, (), False),
    "SIGKILL of the agent": (kill_agent, (), False),
    "SIGKILL of the rank": (kill_rank, (), False),
    "SIGKILL of the rank, max_restarts": (kill_rank, ("run.max_restarts=2",), True),
    "SIGTERM of the command": (terminate_command, (), False),
    "hang of the rank": (stop_rank, (), False),
    "cut off": (cut_off, (), False),
    "cut off and back after 5 s": (cut_off_shortly, (), True),
}


def list_pieces(num_hosts: int) -> dict[str, Callable[[HostRuns], Ends]]:
    """Each fault strikes the master and the last machine."""
    pieces: dict[str, Callable[[HostRuns], Ends]] = {}
    for host in (0, num_hosts - 1):
        for fault, (deed, words, goes_on) in DEEDS.items():
            pieces[f"{fault}, machine {host}"] = lambda runs, of=(fault, host, deed, *words), goes_on=goes_on: strike(  # type: ignore[misc]
                runs, *of, goes_on=goes_on
            )
        pieces[f"another recipe, machine {host}"] = lambda runs, host=host: refuse_recipe(runs, host)  # type: ignore[misc]
    return pieces
