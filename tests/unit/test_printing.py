"""Tests that text from elsewhere is printed without secrets, moves no cursor and does not look like another line."""

import io
import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.paths import TINY_RECIPE
from syrupy.assertion import SnapshotAssertion
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


def test_problems_and_tables(capsys: pytest.CaptureFixture[str], snapshot: SnapshotAssertion) -> None:
    """Problems that are not shown are counted."""
    printing.print_problems([Problem(EVIL, f"{EVIL} is odd", EVIL, Where(EVIL, 3, 1), details=(EVIL,))])
    printing.print_data(printing.format_table(("name",), [(EVIL,)]))
    odd = capsys.readouterr()
    printing.print_problems(shorten([Problem("", "a bad row")] * MAX_SHOWN, MAX_SHOWN + 10))
    many = capsys.readouterr().err.splitlines()[-3:]
    assert [text.replace(CLEAN, "CLEAN") for text in (odd.err, odd.out, *many)] == snapshot


def test_json_stays_json_and_is_harmless(capsys: pytest.CaptureFixture[str]) -> None:
    printing.print_json({EVIL: [EVIL, "é漢"]})
    output = capsys.readouterr().out
    assert json.loads(output) == {EVIL: [EVIL, "é漢"]}
    assert is_harmless(output)
    assert "\u202e" not in output
    assert "é漢" in output


def test_the_report_of_data(snapshot: SnapshotAssertion) -> None:
    source = {"num_bad": 1, "name": EVIL, "has_lines": True, "bad": [[EVIL, 3, EVIL]]}
    runs = [{"is_target": True, "text": "x\nforged", "num_left_out": 0, "end": "", "num_skipped": 0}]
    sample = {"where": EVIL, "from_token": 0, "num_targets": 1, "num_tokens": 1, "runs": runs}
    assert [text.replace(CLEAN, "CLEAN") for text in (format_bad([source]), format_sample(sample))] == snapshot


def test_displays_and_ends(capsys: pytest.CaptureFixture[str], snapshot: SnapshotAssertion) -> None:
    stream = io.StringIO()
    display = make_display(stream, 3)
    for event in ({"event": "warning", "message": EVIL}, {"event": "phase", "name": EVIL}, {"event": EVIL, EVIL: EVIL}):
        display.emit(event)
    display.close()
    counts = {"bytes": 1, "total_bytes": 1, "tokens": 1, "is_done": True}
    ProgressLine().show({"event": "progress", "source": "", "name": EVIL, **counts})
    failure = format_failure({"rank": 0, "message": "first\nrank 1 failed: forged"}, Path("logs"))
    assert is_harmless(shown := stream.getvalue() + capsys.readouterr().err.partition("  [")[0])
    assert [text.replace(CLEAN, "CLEAN") for text in (shown, failure)] == snapshot


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
