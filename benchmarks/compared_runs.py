"""Runs that are struck by faults, each compared with an uninterrupted one to the last bit; used by faults.py."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from support.faults import Runs, wait_until
from support.forked import Command

NUM_STEPS = 24
TIME_LIMIT = 300
Ends = list[tuple[str, str]]  # (fault, how the run ended)


class ComparedRuns(Runs):
    """Runs of a fixed length, each compared with an uninterrupted one."""

    def start(
        self, run: str, *words: str, plan: Mapping[str, Any] | None = None, peer: Command | None = None
    ) -> Command:
        return super().start(run, f"train.max_steps={NUM_STEPS}", *words, plan=plan, peer=peer)

    def is_equal(self, run: str, num_torn: int, whole: str = "whole") -> bool:
        ours, reference = self.read_losses(run), self.read_losses(whole)
        is_same = ours.items() <= reference.items() and len(reference) - len(ours) <= num_torn
        return is_same and self.read_model(run) == self.read_model(whole)


def wait_for_steps(runs: ComparedRuns, run: str, process: Command, count: int) -> None:
    wait_until(process, lambda: runs.count_steps(run) >= count)


class HungRunError(Exception):
    """A command that did not end in TIME_LIMIT seconds."""


def end(process: Command) -> tuple[int, str]:
    """Waits for a command's end. One that does not end is killed, with all its ranks."""
    try:
        _, output = process.communicate(timeout=TIME_LIMIT)
    except subprocess.TimeoutExpired as error:
        process.kill()
        for rank in process.list_ranks():
            with suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)
        raise HungRunError(process.read_stderr()) from error
    return process.wait(1), output


def settle(runs: ComparedRuns, run: str, killed: list[str], *words: str) -> Ends:
    code, output = end(runs.start(run, *words, "--resume", "auto"))
    return judge(runs, run, killed, code, output)


def judge(runs: ComparedRuns, run: str, killed: list[str], code: int, output: str) -> Ends:
    """Judges whether a run that has ended equals the uninterrupted one."""
    is_refused = code in (1, 2) and "Traceback" not in output
    num_torn = killed.count("torn metrics")  # these steps are not done again
    how = "survived" if code == 0 and runs.is_equal(run, num_torn) else "refused" if is_refused else "lost"
    if how != "survived":
        print(f"{run}: exit code {code}\n{output[-1500:]}", flush=True)
    return [(fault, how) for fault in killed]


def lose(fault: str, output: str, how: str = "lost") -> Ends:
    print(f"{fault}\n{output[-1500:]}", flush=True)
    return [(fault, how)]
