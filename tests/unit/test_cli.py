"""Tests the commands as a user meets them: exit codes, data on stdout, messages on stderr, no traces, a quick start."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import run, run_process
from support.paths import RECIPES, ROOT, TINY_RECIPE
from support.tiers import sample_every
from syrupy.assertion import SnapshotAssertion
from typer.testing import CliRunner

from ulysses_cli.cli import COMMANDS, app
from ulysses_cli.commands.options import EXIT_CODES
from ulysses_cli.plan.problem import DONE, FAILED, STOPPED, USAGE, get_signal_code
from ulysses_cli.run import downloads, launcher

TINY = str(TINY_RECIPE)
LIGHT = ["--help", "--version", f"validate-config {TINY}", "recipes list", f"estimate-memory {TINY}"]
LIGHT += ["plan --model Qwen/Qwen3-8B --max-length 64Ki --gpus h100-80gb:8"]


def test_a_valid_recipe_is_shown_on_a_screen() -> None:
    """What it shows is in commands.txt."""
    shown, whole = (run("validate-config", TINY, *more) for more in ((), ("--all",)))
    assert (shown.returncode, shown.stderr) == (0, "")
    assert len(shown.stdout.splitlines()) < 50
    defaults = json.loads(run("validate-config", TINY, "--format", "json").stdout)["plans"][0]["defaults"]
    assert f"\ndefaults    {len(defaults)} settings " in shown.stdout
    assert ["  train.adam_beta2: 0.999" in done.stdout for done in (shown, whole)] == [False, True]


def test_without_arguments_the_four_commands_of_a_first_hour_are_shown(tmp_path: Path) -> None:
    done = run()
    assert (done.returncode, done.stderr) == (0, "")
    commands = re.findall(r"^  ulysses (.*?)  ", done.stdout, flags=re.MULTILINE)
    assert [words.split()[0] for words in commands] == ["doctor", "recipes", "train", "init"]
    assert run(*commands[1].split(), cwd=tmp_path).returncode == 0
    assert run("validate-config", commands[2].removeprefix("train "), cwd=tmp_path).returncode == 0
    for words in commands:
        assert "Usage:" in run(*words.split()[: 2 if words.startswith("recipes") else 1], "--help").stdout


def test_a_closed_pipe_is_no_failure_and_a_full_disk_is_one() -> None:
    command = f"{sys.executable} -m ulysses_cli validate-config {TINY}"
    for more, code in ((" | true; exit ${PIPESTATUS[0]}", 0), (" > /dev/full", 1)):
        done = subprocess.run(["bash", "-c", command + more], capture_output=True, text=True, check=False)
        assert (done.returncode, bool(done.stderr)) == (code, bool(code)), done.stderr
        assert "Traceback" not in done.stderr


def test_characters_that_a_terminal_cannot_show(tmp_path: Path) -> None:
    (tmp_path / "r\u00e9.yaml").write_text("a: 1\n")
    done = run_process("validate-config", str(tmp_path / "r\u00e9.yaml"), PYTHONIOENCODING="ascii")
    assert done.returncode == 2
    assert "r\\xe9.yaml:1:1: a: unknown key" in done.stderr


def test_recipes_are_listed_shown_and_copied(tmp_path: Path) -> None:
    assert "tiny-cpu" in run("recipes", "list").stdout
    assert run("recipes", "show", "tiny-cpu").stdout == Path(TINY).read_text()
    assert run("recipes", "copy", "tiny-cpu", cwd=RECIPES).returncode == 2  # it exists already
    target = tmp_path / "new" / "my.yaml"
    target.parent.mkdir()
    assert run("recipes", "copy", "tiny-cpu", str(target)).returncode == 0
    assert target.read_text() == f"# yaml-language-server: $schema=ulysses.schema.json\n{Path(TINY).read_text()}"
    assert (target.parent / "ulysses.schema.json").read_text() == run("config-schema", "--format", "json").stdout
    assert run("validate-config", str(target)).stdout == run("validate-config", f"--config={target}").stdout != ""
    assert run("recipes", "copy", "tiny-cpu", str(target), "--force").returncode == 0


@pytest.mark.parametrize("words", ["--config {} run.seed=3", "run.seed=3 --config={}", "{} run.seed=3"])
def test_a_recipe_may_be_named_by_an_option(words: str) -> None:
    for command in ("validate-config", "estimate-memory"):
        shown = run(command, "--format", "json", *words.format(TINY).split())
        assert shown.returncode == 0, shown.stderr
        assert shown.stdout == run(command, "--format", "json", TINY, "run.seed=3").stdout
    assert "--config" in run("validate-config", "--config").stderr
    assert "--config" in run("config-schema", "--config", "train").stderr


@pytest.mark.parametrize("words", sample_every(4, LIGHT))
def test_the_light_half_imports_nothing_heavy(words: str) -> None:
    code = (
        "import sys; from ulysses_cli.cli import run\n"
        f"sys.argv = ['ulysses', *{words.split()!r}]\n"
        "try: run()\nexcept SystemExit as end: assert not end.code, end.code\n"
        "heavy = {'torch', 'transformers', 'deepspeed', 'numpy', 'datasets', 'peft'} & sys.modules.keys()\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_early_end_says_what_to_do(
    number: int, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    monkeypatch.setattr(downloads, "bring_inputs", lambda *_: os.kill(os.getpid(), number))
    result = CliRunner().invoke(app, ["train", TINY])
    assert (result.exit_code, result.stdout, result.stderr) == (128 + number, "", snapshot)


@pytest.mark.parametrize("closed", sample_every(3, ["1 2", "1", "2"]))
def test_a_closed_stream_changes_no_exit_code(closed: str, tmp_path: Path) -> None:
    for words, code in (([TINY], 0), ([TINY, "train.max_stps=3"], 2)):
        command = shlex.join([sys.executable, "-m", "ulysses_cli", "validate-config", *words])
        done = subprocess.run(
            ["sh", "-c", " ".join([command, *(f"{each}>&-" for each in closed.split())])],
            capture_output=True, text=True, check=False, cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_the_command_is_loaded_leaves_no_trace() -> None:
    code = (
        "import builtins, sys; from ulysses_cli.__main__ import main\n"
        "def stop(*_): raise KeyboardInterrupt\n"
        "builtins.__import__ = stop\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("columns", [80, 100])
@pytest.mark.parametrize("words", [["--help"], ["recipes", "--help"], ["launch", "--help"]])
def test_every_line_of_help_is_whole(words: list[str], columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0
    commands = result.stdout.partition("Commands:\n")[2].partition("\n\n")[0].splitlines()
    assert len(commands) == (len(COMMANDS) + 2 if len(words) == 1 else 3)
    assert all(re.fullmatch(r"  [a-z0-9-]+ +[A-Z].*\.", line) and "..." not in line for line in commands)
    assert all(len(line) <= 80 for line in result.stdout.splitlines())


def test_exit_codes_are_in_help_and_faq() -> None:
    rows = [line.split(maxsplit=1) for line in EXIT_CODES.replace("130, 143", "130,143").splitlines()[1:]]
    assert [codes for codes, _ in rows] == ["0", "1", "2", "75", "130,143"]
    assert (DONE, FAILED, USAGE, STOPPED) == (0, 1, 2, 75)
    assert {get_signal_code(number) for number in launcher.STOP_SIGNALS} == {130, 143}
    help_text, faq = CliRunner().invoke(app, ["--help"]).stdout, (ROOT / "docs" / "faq.md").read_text()
    for line in EXIT_CODES.splitlines():
        assert line in help_text
        assert line in faq
