"""Tests that processes of the package end with the process that started them, do not block on output, and know their
limits."""

import io
import json
import os
import resource
import select
import signal
import subprocess
import sys
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import make_checkpoint
from support.paths import ROOT
from support.recipes import load, make_plan
from syrupy.assertion import SnapshotAssertion
from typer.testing import CliRunner

from ulysses_cli.cli import app
from ulysses_cli.commands.prepare import prepare_recipe
from ulysses_cli.run import host

SECONDS = 20
PARENT = """
import subprocess, sys
from ulysses_cli.run import host as children
child = children.start_module("timeit", ["-n", "1", "import time; time.sleep(600)"], stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
child.wait()
"""
NOISY = """
import json, os, sys
(events,) = (int(word.partition("=")[2]) for word in sys.argv if word.startswith("--events="))
for _ in range(2000):
    print("x" * 1000, flush=True)
    os.write(2, b"y" * 1000)
with os.fdopen(events, "w") as stream:
    print(json.dumps({"phase": "at work"}), file=stream)
    print(json.dumps({"result": {"folder": "there", "checked": "all"}}), file=stream)
"""

DYING_READER = """
import os, signal, sys
from ulysses_cli.data.__main__ import _show
from ulysses_cli.report.live import ProgressLine
(place,) = (int(word.partition("=")[2]) for word in sys.argv if word.startswith("--place="))
for key in ("data.datasets.0", "data.datasets.1"):
    _show(ProgressLine(), place, {"event": "stage", "stage": "source", "source": key})
os.kill(os.getpid(), signal.SIGBUS)
"""


def test_a_child_ends_with_a_parent_that_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    handle = os.pidfd_open(int(parent.stdout.readline()))
    parent.kill()
    parent.communicate()
    assert select.select([handle], [], [], SECONDS)[0], "the child lives on"
    os.close(handle)


def start_instead(folder: Path, code: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Runs `code` in place of any module that a command starts. Returns the names of those modules."""
    (folder / "instead.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{ROOT}")
    start, asked = host.start_module, list[str]()

    def start_code(module: str, words: list[str], **options: Any) -> Any:
        asked.append(module)
        return start("instead", words, **options)

    monkeypatch.setattr(host, "start_module", start_code)
    return asked


@pytest.mark.usefixtures("alarm")
def test_an_export_with_much_output_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = start_instead(tmp_path, NOISY, monkeypatch)
    words = ["export", str(make_checkpoint(tmp_path, 3)), "--to", str(tmp_path / "to"), "--format", "json"]
    result = CliRunner().invoke(app, words)
    assert asked == ["ulysses_cli.train.export"]
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout) == {"folder": "there", "checked": "all"}
    assert "at work\nall\n" in result.stderr


def test_a_killed_export_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    start_instead(tmp_path, "import os\nprint('last words', flush=True)\nos.kill(os.getpid(), 9)", monkeypatch)
    result = CliRunner().invoke(app, ["export", str(make_checkpoint(tmp_path, 3)), "--to", str(tmp_path / "to")])
    assert (result.exit_code, result.stderr) == (1, snapshot)


def run_limited(soft: int, hard: int, num_ranks: int) -> str:
    """Runs in a process of its own, since a hard limit cannot be raised again."""
    code = "import resource; from ulysses_cli.run.host import find_file_shortage as find; "
    code += f"print(find({num_ranks})); print(resource.getrlimit(resource.RLIMIT_NOFILE))"

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    done = subprocess.run([sys.executable, "-c", code], preexec_fn=limit, capture_output=True, text=True, check=True)
    return done.stdout


def test_the_limit_of_open_files_is_raised_or_named(snapshot: SnapshotAssertion) -> None:
    assert run_limited(400, 500, 1) == "None\n(400, 500)\n"
    assert run_limited(20, 500, 2) == "None\n(144, 500)\n"
    assert run_limited(20, 40, 2) == snapshot


@pytest.mark.parametrize(
    ("mask", "mode", "expected"),
    [(0o022, 0o755, 0o644), (0o022, 0o700, 0o600), (0o002, 0o775, 0o664), (0o002, 0o750, 0o640), (0o077, 0o777, 0o600)],
)
def test_files_get_the_umask_and_no_more_than_their_folder_allows(
    tmp_path: Path, mask: int, mode: int, expected: int
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    folder.chmod(mode)
    before = os.umask(mask)
    try:
        os.umask(host.narrow_umask(folder / "model"))
        (folder / "file").write_text("")
    finally:
        os.umask(before)
    assert (folder / "file").stat().st_mode & 0o777 == expected


STOPPING = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
os.kill(os.getppid(), NUMBER)
time.sleep(0 if NUMBER == signal.SIGINT else 600)
"""


@pytest.mark.parametrize(
    ("program", "code"),
    [
        (STOPPING.replace("NUMBER", "signal.SIGINT"), None),
        (STOPPING.replace("NUMBER", "signal.SIGTERM"), 143),
        (DYING_READER, 128 + signal.SIGBUS),
    ],
    ids=["interrupted", "stopped", "killed"],
)
def test_a_preparation_that_ends_early_says_what_it_read_or_how_to_go_on(
    program: str, code: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    start_instead(tmp_path, program, monkeypatch)
    with redirect_stderr(io.StringIO()) as said:
        try:
            found = prepare_recipe(make_plan(load())).exit_code
        except (KeyboardInterrupt, SystemExit) as end:
            found = getattr(end, "code", None)
    assert (found, said.getvalue()) == (code, snapshot)


CRASHING = """
import os, resource, sys
from ulysses_cli.run import host as children
resource.setrlimit(resource.RLIMIT_CORE, (resource.getrlimit(resource.RLIMIT_CORE)[1],) * 2)
children.refuse_core_files(os.environ)
print(resource.getrlimit(resource.RLIMIT_CORE)[0], flush=True)
os.abort()
"""


@pytest.mark.parametrize(("setting", "is_refused"), [(None, True), ("0", True), ("1", False)])
def test_a_crash_writes_no_core_file_by_default(tmp_path: Path, setting: str | None, is_refused: bool) -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    environ |= {host.CORE_FILES: setting} if setting else {}
    command = [sys.executable, "-c", CRASHING]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    assert done.returncode == -signal.SIGABRT
    assert int(done.stdout) == (hard if not is_refused or not hard else 1)
    assert not is_refused or not list(tmp_path.iterdir())


def test_an_interrupt_of_the_command_alone_ends_its_child() -> None:
    """A terminal interrupts both; `kill -INT` and editors only the command. The child then gets SIGTERM."""
    child = host.start_module("http.server", ["0", "--bind", "127.0.0.1"], stderr=subprocess.DEVNULL)
    with pytest.raises(KeyboardInterrupt), host.ending(child, interrupt_seconds=0.2):
        raise KeyboardInterrupt
    assert child.wait(10) == -signal.SIGTERM
