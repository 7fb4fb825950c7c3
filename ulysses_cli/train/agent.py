"""torch's elastic launcher with failures as data and a sealed rendezvous: `python -m ulysses_cli.train.agent ...`

Starts and watches this machine's ranks. A signal is handed on to them: they save and end by themselves, however long
that takes; the launcher's own way would kill them after half a minute. torch is imported once signals are heard.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from ulysses_cli.plan.exit_codes import FAILED, USAGE
from ulysses_cli.plan.secrets import collect_secrets, mask_text
from ulysses_cli.train.guard.interruption import ORPHAN_SECONDS, ORPHANED, Listener
from ulysses_cli.train.guard.masked_log import open_masked

NOW = signal.SIGINT  # the command's word for: do not wait for a checkpoint


class RankSignals:
    """What this process hears, for its ranks: those that are there, and those that it is just starting."""

    def __init__(self, strangers: Collection[int]) -> None:
        self.strangers = frozenset(strangers)  # children that are no ranks
        self.told: set[int] = set()
        self.is_stopping = False
        self.deadline = float("inf")

    def hear(self, number: int) -> None:
        if number == NOW:
            self.end(128 + NOW)
        if number == ORPHANED:
            self.deadline = time.monotonic() + ORPHAN_SECONDS
        self.is_stopping = True
        self.look()

    def look(self) -> None:
        if not self.is_stopping:
            return
        ranks = self.find_ranks()
        if not ranks and not self.told:  # still waiting for other machines
            self.end(128 + signal.SIGTERM)
        for rank in ranks - self.told:
            self.told.add(rank)
            _send(rank, signal.SIGTERM)
        if time.monotonic() > self.deadline:
            self.end(FAILED)

    def find_ranks(self) -> set[int]:
        return list_children() - self.strangers

    def end(self, code: int) -> None:
        for rank in self.find_ranks():
            _send(rank, signal.SIGKILL)
        os._exit(code)


def list_children() -> set[int]:
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            found |= {int(child) for child in (task / "children").read_text().split()}
        except OSError:
            continue  # a thread that has just ended
    return found


def _send(process: int, number: int) -> None:
    try:
        os.kill(process, number)
    except ProcessLookupError:
        return


def main(arguments: Sequence[str], failure_file: Path) -> int:
    known = collect_secrets({}, os.environ)
    os.dup2(open_masked(os.dup(2), known), 2)
    signals = RankSignals(list_children())
    Listener(signals.hear, signals.look).start()
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    from ulysses_cli.train.processes import rendezvous

    wrong, failures = rendezvous.register(), []
    try:
        config, command, command_args = config_from_args(parse_args(list(arguments)))
    except SystemExit:
        said = "torch's launcher does not understand its arguments, those after --"
        failure_file.write_text(json.dumps([{"message": said, "exit_code_wanted": USAGE}]))
        return USAGE
    try:
        elastic_launch(config=replace(config, signals_to_handle="SIGQUIT"), entrypoint=command)(*command_args)
    except ChildFailedError as error:
        failures = [
            {"rank": rank, "exit_code": failure.exitcode, "time": failure.timestamp}
            for rank, failure in error.failures.items()
        ]
    except rendezvous.MeetingError as error:
        wrong.append(error)
    except Exception as error:  # noqa: BLE001 - a rendezvous that fails has many names; the command shows one line
        failures = [{"message": mask_text(f"{type(error).__name__}: {error}", known)}]
    if wrong:  # why ranks were ended, or have stopped by themselves
        told = {"message": mask_text(str(wrong[0]), known), "hint": wrong[0].hint, "is_cause": True}
        failures = [{**told, "time": time.time()}]
    if not failures:
        return 0
    failure_file.write_text(json.dumps(failures))
    return FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], Path(os.environ["ULYSSES_FAILURE_FILE"])))
