"""Tests the report of prepared data, as text, page and JSON: its numbers add up and agree with the data."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.json_page import find_undocumented
from support.paths import TINY_RECIPE
from support.served import ServedPopen
from syrupy.assertion import SnapshotAssertion

from ulysses_cli.data.facts import compare_length, count_lengths
from ulysses_cli.data.prepare import prepare_data
from ulysses_cli.plan.recipe.loader import parse_recipe
from ulysses_cli.report.data_report import format_report, make_data_page, wrap_line
from ulysses_cli.report.live import format_progress
from ulysses_cli.report.quantities import format_binary, format_share

RECIPE = """\
model:
  config: {model_type: llama}
  tokenizer: bytes
data:
  datasets:
    - path: FOLDER/a.jsonl
    - path: FOLDER/c.jsonl
      weight: 1.5
  eval_split: 0.1
  max_length: 96
  store_dir: FOLDER/store
  excess_length_strategy: truncate
  assistant_only_loss: true
  on_bad_row: skip
  skip_untrainable: true
parallel: {dp_shard_size: 2}
"""


def make_report(folder: Path) -> dict[str, Any]:
    texts = [json.dumps({"text": "word <b> " * (n + 1)}) for n in range(30)]
    (folder / "a.jsonl").write_text("\n".join([*texts[:7], "{", "", *texts[7:]]) + "\n")
    turns = [{"role": "user", "content": "q" * 9}, {"role": "assistant", "content": "a"}]
    chats = [{"messages": turns[: 1 + (n > 0)]} for n in range(8)]
    (folder / "c.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    recipe = parse_recipe(RECIPE.replace("FOLDER", str(folder))).recipe
    return prepare_data(recipe, 32, lambda _: None).report


def test_every_token_is_accounted_for(tmp_path: Path) -> None:
    report = make_report(tmp_path)
    assert sum(source["num_tokens"] for source in report["sources"]) == sum(
        counts["tokens"] for split in report["splits"].values() for counts in split["sources"]
    )
    for split in report["splits"].values():
        kept = sum(counts["kept_tokens"] for counts in split["sources"])
        assert kept == split["num_tokens"] + split["untrainable_row_tokens"]
    text, chat = report["splits"]["train"]["sources"]
    lost = text["truncated_tokens"] + text["dropped_tokens"] + text["untrainable_tokens"]
    assert text["tokens"] == text["kept_tokens"] + lost
    assert text["truncated_documents"] > 0
    assert chat["copies"] == chat["documents"] + round(chat["documents"] / 2)
    assert (report["sources"][0]["num_bad"], report["sources"][0]["num_blank"]) == (1, 1)
    bins = report["facts"]["histogram"]
    assert [sum(entry["documents"] for entry in one) for one in bins] == [30, 8]
    assert [sum(entry["tokens"] for entry in one) for one in bins] == [s["num_tokens"] for s in report["sources"]]


def test_text_and_page_say_the_same(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    report = make_report(tmp_path)
    text, page = format_report(report), make_data_page(report)
    assert re.sub(" {3,}", "  ", re.sub(r"rows/\w{32}", "rows/HASH", text)) == snapshot
    assert all(words in page for words in ("truncated, lost", "left out", "copies by", "1 bad row", "1 blank line"))
    assert "[[a&lt;|end|&gt;]]" in page
    assert page.count("<svg") == 2
    assert not re.search(r"(src|href)=", page)


def test_tokens_of_an_epoch_are_tabled_by_source_and_length(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """By hand: 4 documents of 3,000 bytes, of which one is held to be too short, and one of 20,000."""
    (tmp_path / "short.jsonl").write_text("".join(json.dumps({"text": "a" * n}) + "\n" for n in (9, 2999, 2999, 2999)))
    (tmp_path / "long.jsonl").write_text(json.dumps({"text": "b" * 19_999}) + "\n")
    text = RECIPE.replace("FOLDER/a.jsonl", "FOLDER/short.jsonl\n      min_tokens: 100\n      share: 0.3")
    text = text.replace("FOLDER/c.jsonl\n      weight: 1.5", "FOLDER/long.jsonl\n      share: 0.7")
    text = text.replace("max_length: 96", "max_length: 32Ki").replace("eval_split: 0.1", "eval_split: 0")
    text = text.replace("  assistant_only_loss: true\n", "").replace("FOLDER", str(tmp_path))
    report = prepare_data(parse_recipe(text).recipe, 32, lambda _: None).report
    assert [entry["documents"] for entry in report["splits"]["train"]["sources"]] == [4, 1]
    shown = format_report(report)
    lines = [line.split() for line in shown.split("\n\n")[2].splitlines()]
    copies = [0.3 * 29_000 / 9_000, 0.7 * 29_000 / 20_000]
    assert [line[3] for line in lines[-2:]] == [f"{each:.3g}" for each in copies]
    assert [line[4:] for line in lines[-2:]] == [["9,000", "0"], ["0", "20,000"]]
    assert [lines[0], [line for line in shown.splitlines() if "left out" in line or " copies of " in line]] == snapshot
    assert "<h2>Tokens of an epoch " in make_data_page(report)


def test_lengths_are_counted_and_compared() -> None:
    lengths = np.asarray([1, 2, 3, 4, 5, 100])
    counts = {(entry["from"], entry["to"]): entry["documents"] for entry in count_lengths(lengths)}
    assert {place: count for place, count in counts.items() if count} == {
        (0, 1): 1, (1, 2): 1, (2, 4): 2, (4, 8): 1, (64, 128): 1,
    }  # fmt: skip
    choice = compare_length(lengths, 50)
    assert (choice["long_documents"], choice["truncated_share"]) == (1, 50 / 115)
    assert choice["efficiency"] == 115 / 150
    alone = compare_length(lengths, 50, packs=False)
    assert alone["efficiency"] < choice["efficiency"], "one document per row leaves rows emptier"


def test_sizes_shares_lines_and_progress() -> None:
    """A share is never rounded to 0 or 100 percent."""
    assert [format_binary(2**power) for power in (4, 10, 17, 20)] == ["16", "1Ki", "128Ki", "1Mi"]
    shares = [format_share(share) for share in (0, 1e-6, 0.5, 0.99999, 1)]
    assert shares == ["0.0%", "<0.1%", "50.0%", ">99.9%", "100.0%"]
    line = "many words " * 30
    assert "".join(wrap_line(line)) == line
    assert max(map(len, wrap_line(line))) <= 100
    event = {"name": "a", "bytes": 25_000_000, "total_bytes": 100_000_000, "tokens": 7}
    assert format_progress(event, 5.0) == "tokenizing a  [######..................]  25%  7 tokens  5.0 MB/s  15 s left"


def run(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The preparing child writes to the command's own streams."""
    command = [sys.executable, "-m", "ulysses_cli", "prepare", *words]
    process = ServedPopen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd)
    out, err = process.communicate(timeout=120)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@pytest.mark.check
def test_the_command(tmp_path: Path) -> None:
    recipe = str(TINY_RECIPE)
    page = tmp_path / "deep" / "page.html"
    done = run(recipe, f"data.store_dir={tmp_path}", "--html", str(page))
    assert done.returncode == 0, done.stderr
    assert "414 rows" in done.stdout
    assert page.read_text().startswith("<!doctype html>")
    again = run(recipe, f"data.store_dir={tmp_path}", "--format", "json")
    assert json.loads(again.stdout)["splits"]["train"]["num_rows"] == 414
    assert "tokenizing" not in again.stderr
    assert not find_undocumented("ulysses prepare", json.loads(again.stdout))


@pytest.mark.check
def test_a_bad_row_ends_the_command(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    (tmp_path / "bad.jsonl").write_text("{\n")
    sources = f"data.datasets=[{{path: {tmp_path / 'bad.jsonl'}}}]"
    done = run(str(TINY_RECIPE), sources, "data.eval_split=0", "run.eval_steps=null", f"data.store_dir={tmp_path}")
    assert (done.returncode, done.stderr) == (1, snapshot)
