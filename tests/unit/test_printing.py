"""Tests that text from elsewhere is printed without secrets, moves no cursor and does not look like another line."""

import io
import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.paths import TINY_RECIPE
from typer.testing import CliRunner

from ulysses_cli.cli import app
from ulysses_cli.plan.problem import Problem, Where
from ulysses_cli.readers.problems import MAX_SHOWN, shorten
from ulysses_cli.report import printing
from ulysses_cli.report.data_report import format_bad, format_sample
from ulysses_cli.report.live import ProgressLine, make_display
from ulysses_cli.report.recipe import format_failure

EVIL = "a\x1b[2J\x1b]0;title\x07\r\nforged: line\u202e\x9b31m\u2028b"
CLEAN = r"a\x1b[2J\x1b]0;title\x07\r\nforged: line\u202e\x9b31m\u2028b"
SECRET = "correct-horse-battery"


def is_harmless(text: str) -> bool:
    return not any(ord(letter) < 32 or 127 <= ord(letter) < 160 for letter in text.replace("\n", "").replace("\t", ""))


def test_the_cleaner() -> None:
    assert printing.clean_text(EVIL) == CLEAN
    assert printing.clean_text("é 漢字 \u3000 \u00a0 👩\u200d💻") == "é 漢字 \u3000 \u00a0 👩\u200d💻"
    assert printing.clean_text("\udc80") == r"\udc80"


@given(st.text(max_size=40))
def test_cleaned_text_moves_no_cursor(text: str) -> None:
    assert is_harmless(printing.clean_text(text))
    assert "\n" not in printing.clean_text(text)
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    printing.write_to(stream, text)
    printing.write_to(stream, printing.clean_text(text))


def test_problems_and_tables(capsys: pytest.CaptureFixture[str]) -> None:
    problem = Problem(EVIL, f"{EVIL} is odd", EVIL, Where(EVIL, 3, 1), details=(EVIL,))
    printing.print_problems([problem])
    output = capsys.readouterr().err
    assert output == f"{CLEAN}:3:1: {CLEAN}: {CLEAN} is odd\n  {CLEAN}\n\nhint: {CLEAN}\n\n1 problem\n"
    printing.print_data(printing.format_table(("name",), [(EVIL,)]))
    assert capsys.readouterr().out == f"name\n{CLEAN}\n"


def test_problems_that_are_not_shown_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    found = [Problem("", f"row {number} is bad") for number in range(MAX_SHOWN)]
    printing.print_problems(shorten(found, MAX_SHOWN + 10))
    output = capsys.readouterr().err
    assert "and 10 more" in output
    assert output.endswith(f"{MAX_SHOWN + 10} problems\n")


def test_json_stays_json_and_is_harmless(capsys: pytest.CaptureFixture[str]) -> None:
    printing.print_json({EVIL: [EVIL, "é漢"]})
    output = capsys.readouterr().out
    assert json.loads(output) == {EVIL: [EVIL, "é漢"]}
    assert is_harmless(output)
    assert "\u202e" not in output
    assert "é漢" in output


def test_the_report_of_data() -> None:
    source = {"num_bad": 1, "name": EVIL, "has_lines": True, "bad": [[EVIL, 3, EVIL]]}
    assert format_bad([source]) == f"1 bad row of {CLEAN} left out\n  {CLEAN}:3: {CLEAN}"
    runs = [{"is_target": True, "text": "x\nforged", "num_left_out": 0, "end": "", "num_skipped": 0}]
    sample = {"where": EVIL, "from_token": 0, "num_targets": 1, "num_tokens": 1, "runs": runs}
    lines = format_sample(sample).split("\n")
    assert lines[0].startswith(f"sample {CLEAN}, from")
    assert lines[1:] == ["  | [[x", "  | forged]]"]


def test_displays_and_ends(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    display = make_display(stream, 3)
    for event in ({"event": "warning", "message": EVIL}, {"event": "phase", "name": EVIL}, {"event": EVIL, EVIL: EVIL}):
        display.emit(event)
    display.close()
    assert is_harmless(stream.getvalue())
    assert len(stream.getvalue().splitlines()) == 3
    counts = {"bytes": 1, "total_bytes": 1, "tokens": 1, "is_done": True}
    ProgressLine().show({"event": "progress", "source": "", "name": EVIL, **counts})
    assert capsys.readouterr().err.startswith(f"tokenizing {CLEAN}  [")
    output = format_failure({"rank": 0, "message": "first\nrank 1 failed: forged"}, Path("logs"))
    assert output.startswith("rank 0 failed: first\n  rank 1 failed: forged\n\n")


def test_values_of_the_environment_are_masked_wherever_they_are_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MY_DB_PASS", SECRET)
    printing.print_data(f"a {SECRET}")
    printing.print_message(f"a {SECRET}")
    printing.print_json({"a": SECRET})
    printing.print_problems([Problem("a", SECRET, SECRET, Where(SECRET))])
    message = capsys.readouterr()
    assert SECRET not in message.out + message.err
    recipe = tmp_path / f"x-{SECRET}.yaml"
    shutil.copy(TINY_RECIPE, recipe)
    for words in ([], ["--format", "json"]):
        done = CliRunner().invoke(app, ["validate-config", str(recipe), *words])
        assert (done.exit_code, SECRET in done.output) == (0, False)
        assert "x-***" in done.output
