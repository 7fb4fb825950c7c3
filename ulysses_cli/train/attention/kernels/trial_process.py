"""Tries a kernel of a foreign package in a process of its own, with a time limit: such a package may end its process,
hang, or leave the GPU's context in an error that every later call would meet. Imports nothing heavy itself.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import asdict
from typing import IO, TYPE_CHECKING, Any

from ulysses_cli.plan.attention import Need

if TYPE_CHECKING:
    from ulysses_cli.train.attention.kernels.trial import TrialRequest, TrialResult

LIMIT_SECONDS = 300.0  # FlashAttention 4 compiles its kernels at the first call
PR_SET_PDEATHSIG = 1
COMMAND = (sys.executable, "-m", "ulysses_cli.train.attention.kernels.trial_process")


def try_in_process(
    request: TrialRequest, limit_seconds: float = LIMIT_SECONDS, command: Sequence[str] = COMMAND
) -> TrialResult:
    from ulysses_cli.train.attention.kernels.trial import TrialResult

    answer = ask_child(asdict(request), {"obstacle", "seconds"}, limit_seconds, command)
    if isinstance(answer, str):
        return TrialResult(answer)
    return TrialResult(str(answer["obstacle"]), float(answer["seconds"]))


def ask_child(
    request: Mapping[str, Any], wanted: Set[str], limit_seconds: float, command: Sequence[str]
) -> dict[str, Any] | str:
    """Returns the `wanted` values that the child answers, or why there are none. However the child ends, this process
    goes on."""
    with tempfile.TemporaryFile("w+", errors="replace") as messages:
        child = subprocess.Popen(
            [*command, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=messages,
            text=True,
            errors="replace",
            start_new_session=True,  # its own children, such as compilers, end with it
        )
        try:
            answer, _ = child.communicate(json.dumps(request), limit_seconds)
        except subprocess.TimeoutExpired:
            return f"did not end its probe within {limit_seconds:.0f} s"
        finally:
            _end_group(child)
        return _read_answer(answer, child.returncode, messages, wanted)


def _read_answer(answer: str, exit_code: int, messages: IO[str], wanted: Set[str]) -> dict[str, Any] | str:
    lines = answer.strip().splitlines()
    if exit_code == 0 and lines:
        try:
            values = json.loads(lines[-1])
        except ValueError:  # cut short, or written by the package
            values = None
        return values if isinstance(values, dict) and wanted <= values.keys() else f"answered {lines[-1][:160]!r}"
    messages.seek(0)
    said = [line.strip() for line in messages if line.strip()]
    how = f"by signal {signal.Signals(-exit_code).name}" if exit_code < 0 else f"with exit code {exit_code}"
    return f"ended its process {how}{': ' + said[-1][:160] if said else ''}"


def _end_group(child: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):  # the whole group has ended already
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def answer_parent(parent: int, compute: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
    """Reads a request from stdin, writes what `compute` returns to stdout. Ends with its parent. What a package prints
    goes to stderr."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent has ended already
        return
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answer.write(json.dumps(compute(json.load(sys.stdin))) + "\n")
    answer.flush()
    os._exit(0)  # not by way of a foreign package's handlers


def _try(request: dict[str, Any]) -> Mapping[str, Any]:
    from ulysses_cli.train.attention.kernels.trial import TrialRequest, try_kernel

    need = Need(**request.pop("need"))
    lengths = tuple(request.pop("timed_lengths"))
    return asdict(try_kernel(TrialRequest(need=need, timed_lengths=lengths, **request)))


if __name__ == "__main__":
    answer_parent(int(sys.argv[1]), _try)
