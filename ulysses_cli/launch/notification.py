"""Tells the user how a run ended: a program that the recipe names, and an address that gets JSON. Neither can fail the
run; what goes wrong is returned."""

from __future__ import annotations

import http.client
import json
import os
import shlex
import subprocess
import time
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass
from typing import Literal

from ulysses_cli.plan.secrets import collect_secrets, mask_text

COMMAND_SECONDS = 60
ADDRESS_SECONDS = 10
PAUSES = (1.0, 4.0)  # seconds before each further attempt
REFUSED = range(400, 500)  # asking again does not help


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


def notify(end: RunEnd, command: str | None, webhook: str | None) -> list[str]:
    """Returns what went wrong, without the address, which may be a secret."""
    complaints = [_run(end, command)] if command else []
    complaints += [_post(end, webhook)] if webhook else []
    known = collect_secrets({"webhook": webhook}, os.environ)
    return [mask_text(complaint, known) for complaint in complaints if complaint]


def _run(end: RunEnd, command: str) -> str:
    """Runs a program, without a shell. It gets the facts as JSON on stdin and in ULYSSES_EVENT, ULYSSES_RUN_NAME,
    ULYSSES_RUN_DIR, ULYSSES_MESSAGE and ULYSSES_EXIT_CODE."""
    facts = {f"ULYSSES_{name.upper()}": str(value) for name, value in asdict(end).items()}
    try:
        done = subprocess.run(
            shlex.split(command),
            input=end.write_json(),
            capture_output=True,
            text=True,
            errors="replace",
            env={**os.environ, **facts},
            timeout=COMMAND_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"run.notify_command did not end within {COMMAND_SECONDS} s"
    except (OSError, ValueError) as error:
        return f"run.notify_command cannot be run: {error}"
    if done.returncode == 0:
        return ""
    last = (done.stderr.strip().splitlines() or [""])[-1][:200]
    return f"run.notify_command ended with exit code {done.returncode}" + (f": {last}" if last else "")


def _post(end: RunEnd, address: str) -> str:
    """Sends the facts; failures that may pass are tried again. An answer that is not HTTP and an address that is none
    are named by their kind alone: their text may hold a part of the address."""
    request = urllib.request.Request(
        address, data=end.write_json().encode(), headers={"Content-Type": "application/json"}, method="POST"
    )
    for pause in (*PAUSES, None):
        try:
            with urllib.request.urlopen(request, timeout=ADDRESS_SECONDS):
                return ""
        except http.client.HTTPException as error:
            return f"run.notify_webhook was not reached: {type(error).__name__}"
        except (OSError, ValueError) as error:
            is_refused = isinstance(error, urllib.error.HTTPError) and error.code in REFUSED
            if pause is None or is_refused or isinstance(error, ValueError):
                return f"run.notify_webhook was not reached: {error}"
            time.sleep(pause)
    return ""
