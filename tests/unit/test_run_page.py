"""Tests a run's page and summary, and `ulysses report` as a user meets it."""

import json
import math
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support import commands
from support.json_page import find_undocumented
from support.page_words import list_words
from support.run_directory import FACTS, SECRET, write_run
from syrupy.assertion import SnapshotAssertion

from ulysses_cli.commands.children.evaluating import keep_in_run
from ulysses_cli.evaluate.summary import summarize
from ulysses_cli.plan.secrets import MASK
from ulysses_cli.report import run_summary
from ulysses_cli.report.page import run_page
from ulysses_cli.report.proofs import make_evaluation_blocks
from ulysses_cli.run.records import has_diverged

EVIL = "<script>alert('x')</script>"


def make(folder: Path) -> tuple[dict[str, Any], str]:
    run = run_summary.load_run(folder)
    summary = run_summary.summarize_run(run)
    json.dumps(summary, allow_nan=False)
    return summary, run_page.make_run_page(run, summary)


def list_sections(page: str) -> list[str]:
    return list_words(page, "Summary", "Automatic choices")


def write_lines(folder: Path, *lines: Any, name: str = "metrics.jsonl") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_the_summary_against_the_files_themselves(tmp_path: Path) -> None:
    summary, _ = make(write_run(tmp_path / "run"))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines]
    assert summary["loss"] == {
        "first_step": 1, "first": losses[0], "last": losses[-1], "min": min(losses),
        "min_step": 1 + losses.index(min(losses)),
    }  # fmt: skip
    assert summary["tokens"] == 1000 * 1_048_576
    assert summary["median_tokens_per_second"] == statistics.median(line["tokens_per_second"] for line in lines)
    assert summary["peak_memory_bytes"] == max(line["peak_memory_bytes"] for line in lines)
    hours = sum(line["step_seconds"] for line in lines) / 3600
    assert summary["steps_cost_usd"] == pytest.approx(8 * 2.5 * hours)
    assert (summary["dominant_part"], summary["dominant_share"]) == ("attention", pytest.approx(0.5))
    assert summary["predicted_peak_memory_bytes"] == 96 * 2**30
    assert summary["notes"] == []


def test_a_run_on_a_cpu_speaks_of_processes(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    folder = write_run(tmp_path / "run")
    assert run_summary.format_summary(make(folder)[0]).splitlines() == snapshot(name="GPU")
    facts = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**facts, "machine": {"device": "CPU, x86_64"}}))
    assert run_summary.format_summary(make(folder)[0]).splitlines() == snapshot(name="CPU")


def test_the_page_shows_every_section_and_no_secret(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    _, page = make(write_run(tmp_path / "run"))
    assert list_words(page) == snapshot(name="1000 steps")
    assert "sp_size: 8" in page
    assert re.findall(r"<th[^>]*>\s*</th>", page) == []
    for secret in (SECRET, "correct horse", "123456", "deadbeefcafe"):
        assert secret not in page
    assert page.count(MASK) >= 4
    assert page.count("<svg ") == page.count("<summary>numbers</summary>") == 11
    _, page = make(write_run(tmp_path / "short", 100))  # one evaluation
    assert list_words(page, "Loss", "Speed") == snapshot(name="100 steps")


SHORT = {"tokens": 300, "loss": 2.25, "difference": 0.05, "models": [
    {"model": "base", "loss": 2.2, "loss_low": 2.1, "loss_high": 2.3},
    {"model": "trained", "loss": 2.25, "loss_low": None, "loss_high": None,
     "difference": 0.05, "difference_low": 0.01, "difference_high": 0.09},
]}  # fmt: skip
REWARDS = {"rewards/chosen": 0.5, "rewards/rejected": -0.25, "rewards/margins": 0.75}
RUNS: dict[str, dict[str, list[dict[str, Any]]]] = {
    "scores of questions": {"quality": [
        {"step": 4, "mean": [{"length": 4096, "score": 0.25}, {"length": 32768, "score": 0.125}]},
        {"step": 8, "mean": [{"length": 4096, "score": 0.75}, {"length": 32768, "score": 0.5}]},
        {"step": 12, "mean": "torn"},
    ]},
    "short texts": {"short_check": [{**SHORT, "step": step, "texts": step} for step in (2, 4, 3)]},  # a resume at 3
    "pairs of answers": {
        "metrics": [{"step": step, "loss": 0.5, "rewards/accuracies": 0.25 * step, **REWARDS} for step in (1, 2, 3)],
        "eval": [{"step": 2, "loss": 0.6, "rewards/accuracies": 0.625, **REWARDS}],
    },
    "one evaluation of chats": {"eval": [{"step": 3, "loss": 2.0,
        "by_class": {"thoughts": {"loss": 1.25, "tokens": 4}, "calls": {"loss": 0.5, "tokens": 2}},
        "by_turn": {"1": {"loss": 2.0, "tokens": 4}, "over 64": {"loss": 0.25, "tokens": 9}}}]},
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_a_page_shows_what_files_of_a_run_hold(tmp_path: Path, name: str, snapshot: SnapshotAssertion) -> None:
    for file, lines in ({"metrics": [{"step": 4, "loss": 1.0}]} | RUNS[name]).items():
        write_lines(tmp_path / "run", *lines, name=f"{file}.jsonl")
    summary, page = make(tmp_path / "run")
    assert not find_undocumented("ulysses report", summary)
    assert list_sections(page) == snapshot


def test_odd_short_checks_do_not_stop_the_page(tmp_path: Path) -> None:
    folder = write_lines(tmp_path / "run", {"step": 1, "loss": 1.0})
    for models in (None, [], [3], [{"model": [EVIL], "loss": "x", "difference": None}]):
        write_lines(folder, {"step": 1, "models": models}, name="short_check.jsonl")
        summary, page = make(folder)
        assert "short texts" not in [name for name, *_ in run_summary.list_figures(summary)]
        assert EVIL not in page


def test_planted_markup_stays_text(tmp_path: Path) -> None:
    facts = dict.fromkeys(("recipe_hash", "started", "recipe_file"), EVIL)
    facts |= {name: {EVIL: EVIL, "name": EVIL, "kernel": EVIL} for name in ("recipe", "layout", "model", "attention")}
    facts |= {name: {EVIL: {"value": EVIL, "reason": EVIL}} for name in ("levers", "data", "machine", "versions")}
    folder = write_run(tmp_path / EVIL.replace("/", ""), 3, **facts)
    line = {"step": 1, "loss": 2.0, "step_parts": {EVIL: 1.0}}
    write_lines(folder, line)
    write_lines(folder, {"step": 1, "loss": 2.0, "by_position": {EVIL: {"loss": 1.0}}}, name="eval.jsonl")
    _, page = make(folder)
    assert "<script" not in page
    assert page.count("&lt;script&gt;") > 15


def test_odd_metrics_are_said_on_the_page(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """Half a last line, losses that are no numbers, steps that were not applied, no metrics at all."""
    torn = write_run(tmp_path / "torn", 5)
    with open(torn / "metrics.jsonl", "a") as stream:
        stream.write('{"step": 6, "loss": 1.')
    lines = [{"step": step, "loss": loss} for step, loss in enumerate([3.0, math.nan, None, math.inf, 2.0])]
    overflown = {"step": 6, "loss": 2.0, "grad_norm": None, "applied": False}
    nan = write_lines(tmp_path / "nan", *lines, {"step": 5}, overflown)
    begun = tmp_path / "begun"
    begun.mkdir()
    (begun / "run.json").write_text(json.dumps(FACTS))
    made = {folder.name: make(folder) for folder in (torn, nan, begun)}
    assert {name: list_sections(page) for name, (_, page) in made.items()} == snapshot(name="pages")
    assert run_summary.format_summary(made["nan"][0]).splitlines() == snapshot(name="summary")
    assert "<title>not a number</title>" in made["nan"][1]
    assert [made["torn"][0]["last_step"], made["nan"][0]["num_bad_steps"], made["nan"][0]["loss"]["last"]] == [5, 4, 2]
    assert made["begun"][0]["loss"] is None
    assert "<svg " not in made["begun"][1]


def test_a_loss_that_diverged_is_said_with_its_steps(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    marks: dict[int, dict[str, Any]] = {3: {"diverged": True}, 5: {"diverged": False}, 1_200: {"diverged": True}}
    lines = [{"step": step, "loss": 3.0, **marks.get(step, {})} for step in (1, 2, 3, 4, 5, 1_200)]
    folder = write_lines(tmp_path / "run", *lines)
    assert list_sections(make(folder)[1]) == snapshot
    assert has_diverged(folder / "metrics.jsonl")
    assert not has_diverged(write_lines(tmp_path / "other", *lines[:5]) / "metrics.jsonl")


def test_a_damaged_run_json_does_not_stop_the_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 3)
    for text in ("", "{", "[1]", '{"layout": 3, "recipe": [], "prediction": null, "levers": {"a": 1}}'):
        (folder / "run.json").write_text(text)
        summary, page = make(folder)
        assert summary["last_step"] == 3
        assert "Loss" in page


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**400), 10**400) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
KEYS = [*FACTS, "step", "loss", "grad_norm", "tokens", "step_seconds", "step_parts", "by_position", "peak_memory_bytes"]


INNER = ["peak_memory_bytes", "step_seconds", "world_size", "name", "value", "reason", "device_memory_bytes"]
buckets = st.dictionaries(st.text(max_size=3), st.floats() | st.fixed_dictionaries({"loss": st.floats()}))


@pytest.mark.check
@given(
    st.dictionaries(st.sampled_from(KEYS), plain | st.dictionaries(st.sampled_from(INNER), plain)),
    st.lists(st.dictionaries(st.sampled_from(KEYS), plain | st.floats(0, 9) | buckets, max_size=9), max_size=6),
)
@example({"recipe_hash": math.inf}, [{"peak_memory_bytes": 10**400}, {"loss": 5e-324, "grad_norm": 1e299}])
@example({"price_per_gpu_hour": 10**299, "layout": {"world_size": 10**299}}, [{"step_seconds": 1.0}])
@example({}, [{"step_parts": {"": 1.0}}])
def test_no_content_breaks_the_page(
    tmp_path_factory: pytest.TempPathFactory, facts: dict[str, Any], lines: list[dict[str, Any]]
) -> None:
    folder = tmp_path_factory.mktemp("run")
    (folder / "run.json").write_text(json.dumps(facts))
    lines = [{"step": place, **line} for place, line in enumerate(lines)]
    write_lines(folder, *lines)
    write_lines(folder, *lines, name="eval.jsonl")
    summary, page = make(folder)
    (run_summary.format_summary(summary) + page).encode()


def make_findings(subject: str, score: float) -> dict[str, Any]:
    common = {"task": "vt", "depths": [0.25], "score": score, "is_greedy": None, "answer": "so", "seconds": 1.0}
    results = [{**common, "length": length} for length in (4096, 8192)]
    facts = {"subject": subject, "seconds": 3.0, "num_ranks": 2, "notes": [EVIL]}
    return {**summarize(results), **facts, "results": results}


def test_the_report_shows_evaluations_of_the_runs_model_and_checkpoints(
    tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    folder = write_run(tmp_path / "run", 3)
    (folder / "model").mkdir()
    (folder / "checkpoints" / "step-2").mkdir(parents=True)
    assert keep_in_run(str(tmp_path), ["vt"], make_findings("elsewhere", 1.0)) is None
    first = keep_in_run(str(folder / "model"), ["vt", "lm-eval:a/b"], make_findings("run/model", 0.5))
    second = keep_in_run(str(folder / "checkpoints" / "step-2"), ["vt"], make_findings("run/checkpoints/step-2", 0.0))
    assert [file and file.name for file in (first, second)] == ["model-vt-lm-eval-a-b.json", "step-2-vt.json"]
    assert "results" not in json.loads((folder / "evaluations" / "step-2-vt.json").read_text())
    keep_in_run(str(folder / "model"), ["vt", "lm-eval:a/b"], make_findings("run/model", 0.75))
    (folder / "evaluations" / "torn.json").write_text('{"subject"')
    run = run_summary.load_run(folder)
    page = run_page.make_run_page(run, run_summary.summarize_run(run), make_evaluation_blocks(run.evaluations))
    assert list_words(page, "Evaluations", "Speed") == snapshot
    assert EVIL not in page


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "qwen")


def test_a_page_and_a_summary(folder: Path) -> None:
    done = commands.run("report", str(folder))
    page = folder / "report.html"
    assert (done.returncode, done.stderr) == (0, f"wrote {page}\n")
    assert page.read_text().startswith("<!doctype html>")
    assert run_summary.format_summary(make(folder)[0]) in done.stdout
    assert [file.name for file in folder.iterdir() if file.name.startswith(".")] == []


def test_the_summary_as_json_writes_a_page_only_on_request(folder: Path, tmp_path: Path) -> None:
    (folder / "report.html").unlink(missing_ok=True)
    done = commands.succeed("report", str(folder), "--format", "json")
    assert json.loads(done.stdout)["last_step"] == 1000
    assert not find_undocumented("ulysses report", json.loads(done.stdout))
    assert not (folder / "report.html").exists()
    target = tmp_path / "new" / "page.html"
    done = commands.succeed("report", str(folder), "--format", "json", "--output", str(target))
    assert json.loads(done.stdout)["model"] == "Qwen/Qwen3-8B"
    assert SECRET not in target.read_text() + done.stdout
