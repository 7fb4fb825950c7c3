"""torch's elastic launcher with failures as data: `python -m ulysses_cli.train.agent LAUNCHER_ARGS -m ...`

Starts and watches this machine's ranks. A signal is handed on to them: they save and end by themselves, however long
that takes; the launcher's own way would kill them after half a minute.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args

from ulysses_cli.plan.secrets import collect_secrets, mask_text
from ulysses_cli.train.masked_log import open_masked

FAILED, USAGE = 1, 2
PR_SET_PDEATHSIG = 1


def main(arguments: Sequence[str], failure_file: Path) -> int:
    known = collect_secrets({}, os.environ)
    os.dup2(open_masked(os.dup(2), known), 2)
    try:
        config, command, command_args = config_from_args(parse_args(list(arguments)))
    except SystemExit:
        said = "torch's launcher does not understand its arguments, those after --"
        failure_file.write_text(json.dumps([{"message": said, "exit_code_wanted": USAGE}]))
        return USAGE
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _hand_on)
    # When the command that started this dies, so does the run: after a checkpoint.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    try:
        elastic_launch(config=replace(config, signals_to_handle="SIGQUIT"), entrypoint=command)(*command_args)
    except ChildFailedError as error:
        failures = [
            {"rank": rank, "exit_code": failure.exitcode, "time": failure.timestamp}
            for rank, failure in error.failures.items()
        ]
        failure_file.write_text(json.dumps(failures))
        return FAILED
    except Exception as error:  # noqa: BLE001 - a rendezvous that fails has many names; the command shows one line
        failure_file.write_text(json.dumps([{"message": mask_text(f"{type(error).__name__}: {error}", known)}]))
        return FAILED
    return 0


def _hand_on(number: int, frame: FrameType | None) -> None:
    for task in Path("/proc/self/task").iterdir():
        for child in (task / "children").read_text().split():
            os.kill(int(child), number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], Path(os.environ["ULYSSES_FAILURE_FILE"])))
