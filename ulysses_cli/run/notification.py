"""Tells the user how a run ended: a program that the recipe names, and an address that gets JSON. Neither can fail
the run; what goes wrong is returned."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ulysses_cli.plan.problem import Problem
from ulysses_cli.plan.recipe.loader import Loaded
from ulysses_cli.plan.rules.training import find_address_fault
from ulysses_cli.plan.secrets import collect_secrets, find_variable, mask_text

REFUSED = range(300, 500)  # asking again does not help
MAX_COMPLAINT_BYTES = 1 << 16


@dataclass(frozen=True)
class Patience:
    """Seconds: for the program; for one attempt at the address, from the look-up of the name to the end of the answer's
    head; before each further attempt."""

    command: float = 60
    address: float = 10
    pauses: tuple[float, ...] = (1.0, 4.0)


@dataclass(frozen=True)
class RunEnd:
    """How a run ended: done (all steps, and the model is written), stopped (early, with a checkpoint) or failed."""

    event: Literal["done", "stopped", "failed"]
    run_name: str
    run_dir: str
    message: str
    exit_code: int

    @property
    def text(self) -> str:
        """One line. Chat services show what stands under `text`."""
        return f"{self.run_name}: {self.event}" + (f": {self.message}" if self.message else "")

    def write_json(self) -> str:
        return json.dumps({**asdict(self), "text": self.text})


def find_unset_webhook(loaded: Loaded, environ: Mapping[str, str]) -> list[Problem]:
    """The problem of a run.notify_webhook that names a variable without an address."""
    key = "run.notify_webhook"
    for name in find_variable(loaded.recipe.run.notify_webhook or ""):
        if fault := find_address_fault(environ.get(name, "")):
            what = f"holds no web address: {fault}" if environ.get(name) else "is not set"
            return [Problem(key, f"{name} {what}", f"set {name}, or leave the setting out", loaded.locate(key))]
    return []


def notify(end: RunEnd, command: str | None, webhook: str | None, patience: Patience = Patience()) -> list[str]:
    """Returns what went wrong, without the address, which may be a secret."""
    complaints = [_run(end, command, patience.command)] if command else []
    for name in find_variable(webhook or ""):
        webhook = os.environ.get(name, "")
    complaints += [_post(end, webhook, patience)] if webhook is not None else []
    known = collect_secrets({"webhook": webhook}, os.environ)
    return [mask_text(complaint, known) for complaint in complaints if complaint]


def _run(end: RunEnd, command: str, seconds: float) -> str:
    """Runs a program, without a shell. It gets the facts as JSON on stdin and in ULYSSES_EVENT, ULYSSES_RUN_NAME,
    ULYSSES_RUN_DIR, ULYSSES_MESSAGE and ULYSSES_EXIT_CODE. It speaks to files: a process that it leaves behind would
    hold a pipe open. That process may go on; those of a program that takes too long are ended with it."""
    facts = {f"ULYSSES_{name.upper()}": str(value).replace("\0", "") for name, value in asdict(end).items()}
    try:
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as said:
            given.write(end.write_json().encode())
            given.seek(0)
            program = subprocess.Popen(
                shlex.split(command), stdin=given, stdout=subprocess.DEVNULL, stderr=said,
                env={**os.environ, **facts}, start_new_session=True,
            )  # fmt: skip
            try:
                code = program.wait(seconds)
            except BaseException as error:
                with suppress(ProcessLookupError):
                    os.killpg(program.pid, signal.SIGKILL)
                program.wait()
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                return f"run.notify_command did not end within {seconds} s"
            said.seek(max(0, said.seek(0, os.SEEK_END) - MAX_COMPLAINT_BYTES))
            lines = said.read().decode(errors="replace").strip().splitlines()
    except (OSError, ValueError) as error:
        return f"run.notify_command cannot be run: {error}"
    last = (lines or [""])[-1][:200]
    return f"run.notify_command ended with exit code {code}" + (f": {last}" if last else "") if code else ""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """A redirect would be followed without the facts, which would then be told to nobody."""


def _post(end: RunEnd, address: str, patience: Patience) -> str:
    """Sends the facts; failures that may pass are tried again. What is no HTTP error is named by its kind alone: its
    text may hold a part of the address."""
    complaint = ""
    for pause in (*patience.pauses, None):
        complaint, is_final = _try_post(end, address, patience.address)
        if not complaint or is_final or pause is None:
            break
        time.sleep(pause)
    return f"run.notify_webhook was not reached: {complaint}" if complaint else ""


def _try_post(end: RunEnd, address: str, seconds: float) -> tuple[str, bool]:
    """Returns what went wrong, and whether asking again is of no use. The look-up of a name heeds no time limit and
    bytes that come one by one renew a socket's, so a thread does it, which is left behind when the time is over."""
    ends: list[tuple[str, bool]] = []

    def send() -> None:
        try:
            request = urllib.request.Request(
                address, data=end.write_json().encode(), headers={"Content-Type": "application/json"}, method="POST"
            )
            opener = urllib.request.build_opener(_NoRedirect)
            with opener.open(request, timeout=seconds):
                ends.append(("", True))
        except urllib.error.HTTPError as error:
            moved = "; it redirects: write the address that it leads to" if error.code < 400 else ""
            ends.append((f"HTTP Error {error.code}: {str(error.reason)[:100]}{moved}", error.code in REFUSED))
        except OSError as error:
            ends.append((str(error), False))
        except Exception as error:  # noqa: BLE001 - no address fails a run that is done
            ends.append((type(error).__name__, True))

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    thread.join(seconds)
    return ends[0] if ends else (f"no answer within {seconds} s", False)
