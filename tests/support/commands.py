"""Runs the command in this process: its words, its streams, its exit code. What it starts is served.py's.
`run_process` starts a process of its own, for tests of what a start costs."""

import io
import os
import subprocess
import sys
from contextlib import chdir, nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

import pytest

from support.paths import ROOT
from support.served import ServedPopen
from support.tiers import FULL, TIER
from ulysses_cli import cli
from ulysses_cli.plan.ledger import kept

COLOURLESS = {"NO_COLOR": "1"}


def run(*words: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    encoding = environment.get("PYTHONIOENCODING", "utf-8")
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding, "backslashreplace", write_through=True) for _ in range(2))
    code: object = 0
    with (
        chdir(cwd or Path.cwd()),
        mock.patch.dict(os.environ, {**COLOURLESS, **environment}),
        mock.patch.object(sys, "argv", ["ulysses", *words]),
        redirect_stdout(out),
        redirect_stderr(err),
        mock.patch.object(subprocess, "Popen", ServedPopen),
        mock.patch.object(kept, "keep_on_disk", return_value=nullcontext()),  # a test may have changed what runs
    ):
        try:
            cli.run()
        except SystemExit as end:
            code = end.code
    number = code if isinstance(code, int) else int(code is not None)
    texts = [stream.buffer.getvalue().decode(encoding) for stream in (out, err)]  # type: ignore[attr-defined]
    return subprocess.CompletedProcess(["ulysses", *words], number, *texts)


def succeed(*words: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the command, which must end with 0."""
    done = run(*words, cwd=cwd, **environment)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done


def run_process(*words: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ulysses_cli", *words]
    environ = {**os.environ, **COLOURLESS, **environment}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environ, timeout=60, check=False)


def load_elsewhere(check: str, text: str) -> str:
    """Has a project's own loader read a text, in an environment of its own."""
    python = ROOT / ".loaders" / "bin" / "python"
    if TIER < FULL or not python.exists():
        pytest.skip("the projects of tests/loaders.txt read it in make test-full alone")
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    words = [str(python), "-c", check]
    result = subprocess.run(words, input=text, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()[-1]
