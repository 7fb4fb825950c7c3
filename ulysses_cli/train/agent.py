"""torch's elastic agent with failures as data and a sealed rendezvous: `python -m ulysses_cli.train.agent ...`

Starts and watches this machine's ranks. Signals are forwarded to them: they save and end by themselves, however long
that takes; torch's own agent would kill them after half a minute. torch is imported after the listener has started.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from ulysses_cli.plan.problem import FAILED, USAGE, get_signal_code
from ulysses_cli.plan.secrets import collect_secrets, mask_text
from ulysses_cli.run.records import write_failures
from ulysses_cli.train.processes.interruption import ORPHAN_SECONDS, ORPHANED, SignalListener
from ulysses_cli.train.processes.masked_log import open_masked

NOW = signal.SIGINT  # the command sends it to end ranks without a checkpoint


class RankSignals:
    """Forwards signals to the ranks that run and to those that are just being started."""

    def __init__(self, other_children: Collection[int]) -> None:
        self.other_children = frozenset(other_children)  # children that are no ranks
        self.signalled: set[int] = set()
        self.is_stopping = False
        self.deadline = float("inf")

    def receive(self, number: int) -> None:
        if number == NOW:
            self.end(get_signal_code(NOW))
        if number == ORPHANED:
            self.deadline = time.monotonic() + ORPHAN_SECONDS
        self.is_stopping = True
        self.check()

    def check(self) -> None:
        if not self.is_stopping:
            return
        ranks = self.find_ranks()
        if not ranks and not self.signalled:  # still waiting for other machines
            self.end(get_signal_code(signal.SIGTERM))
        for rank in ranks - self.signalled:
            self.signalled.add(rank)
            _send(rank, signal.SIGTERM)
        if time.monotonic() > self.deadline:
            self.end(FAILED)

    def find_ranks(self) -> set[int]:
        return list_children() - self.other_children

    def end(self, code: int) -> None:
        for rank in self.find_ranks():
            _send(rank, signal.SIGKILL)
        os._exit(code)


class LostMachine:
    """Ends the agent and its ranks when another machine is lost: torch and ranks that load would wait for it.
    `find_lost` takes whether ranks run and returns which machine is lost, or ''."""

    def __init__(self, signals: RankSignals, find_lost: Callable[[bool], str], failure_file: Path) -> None:
        self.signals, self.find_lost, self.failure_file = signals, find_lost, failure_file

    def check(self) -> None:
        message = self.find_lost(any(is_running(rank) for rank in self.signals.find_ranks()))
        if not message:
            return
        hint = "look at its log; a machine that is lost or cut off ends the run on all others"
        failure = {"message": message, "hint": hint, "is_cause": True, "time": time.time()}
        write_failures(self.failure_file, [failure])
        self.signals.end(FAILED)


def is_running(process: int) -> bool:
    """False for a process that has ended and that nobody has waited for."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def list_children() -> set[int]:
    children: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            children |= {int(child) for child in (task / "children").read_text().split()}
        except OSError:
            continue  # a thread that has just ended
    return children


def say(line: str) -> None:
    """This process's stdout is the user's terminal."""
    os.write(1, f"{line}\n".encode())


def _send(process: int, number: int) -> None:
    try:
        os.kill(process, number)
    except ProcessLookupError:
        return


def main(arguments: Sequence[str], failure_file: Path) -> int:
    secrets = collect_secrets({}, os.environ)
    os.dup2(open_masked(os.dup(2), secrets), 2)
    signals = RankSignals(list_children())
    checks = [signals.check]

    def check() -> None:
        for each in checks:
            each()

    SignalListener(signals.receive, check).start()
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    from ulysses_cli.train.processes import rendezvous
    from ulysses_cli.train.processes.store import MeetingError

    meeting, failures = rendezvous.register(say), []
    checks.append(LostMachine(signals, meeting.find_lost, failure_file).check)
    try:
        config, command, command_args = config_from_args(parse_args(list(arguments)))
    except SystemExit:
        message = "torch's agent does not understand its arguments, those after --"
        write_failures(failure_file, [{"message": message, "exit_code_wanted": USAGE}])
        return USAGE
    try:
        elastic_launch(config=replace(config, signals_to_handle="SIGQUIT"), entrypoint=command)(*command_args)
    except ChildFailedError as error:
        failures = [
            {"rank": rank, "exit_code": failure.exitcode, "time": failure.timestamp}
            for rank, failure in error.failures.items()
        ]
        meeting.tell_failure()
    except MeetingError as error:
        meeting.errors.append(error)
    except Exception as error:  # noqa: BLE001 - a rendezvous that fails has many names; the command shows one line
        failures = [{"message": mask_text(f"{type(error).__name__}: {error}", secrets)}]
    for problem in meeting.errors[:1]:  # why ranks were ended, or have stopped by themselves
        cause = {"message": mask_text(str(problem), secrets), "hint": problem.hint, "is_cause": True}
        failures = [{**cause, "time": time.time()}]
    if not failures:
        return 0
    write_failures(failure_file, failures)
    return FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], Path(os.environ["ULYSSES_FAILURE_FILE"])))
