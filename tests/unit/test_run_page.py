"""Tests a run's page and summary, and `ulysses report` as a user meets it."""

import json
import math
import re
import statistics
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support import commands
from support.json_page import find_undocumented
from support.run_directory import BUCKETS, FACTS, SECRET, write_run

from ulysses_cli.commands.children.evaluating import keep_in_run
from ulysses_cli.evaluate.summary import summarize
from ulysses_cli.plan.secrets import MASK, mask_secrets, mask_text
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


def test_a_run_on_a_cpu_speaks_of_processes(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    assert "per GPU" in run_summary.format_summary(make(folder)[0])
    facts = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**facts, "machine": {"device": "CPU, x86_64"}}))
    text = run_summary.format_summary(make(folder)[0])
    assert "per process" in text
    assert "GPU" not in text


def test_the_page_shows_every_section_and_no_secret(tmp_path: Path) -> None:
    _, page = make(write_run(tmp_path / "run"))
    for text in ("Qwen/Qwen3-8B: run", "Loss", "64K-128K", "Learning rate", "Gradient norm", "Tokens per second"):
        assert text in page
    for text in ("Parts of a step", "attention takes most: 50%", "predicted 96.0 GiB", "USD 116", "flash_attention_3"):
        assert text in page
    assert "sp_size: 8" in page
    assert "layout sp size" in page
    assert re.findall(r"<th[^>]*>\s*</th>", page) == []
    for secret in (SECRET, "correct horse", "123456", "deadbeefcafe"):
        assert secret not in page
    assert page.count(MASK) >= 4
    assert page.count("<svg ") == 11
    assert page.count("<summary>numbers</summary>") == 11
    _, page = make(write_run(tmp_path / "short", 100))  # one evaluation
    assert "Bars, nats per supervised token, 7 labels. nats per supervised token: highest" in page
    assert all(name in page for name in BUCKETS)


def test_the_score_of_questions_between_steps_is_a_curve(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    before = make(folder)[1]
    scores = {4: (0.25, 0.125), 8: (0.75, 0.5)}
    lines = [
        {
            "step": step,
            "mean": [{"length": length, "score": score} for length, score in zip((4096, 32768), own, strict=True)],
        }
        for step, own in scores.items()
    ]
    write_lines(folder, *lines, {"step": 12, "mean": "torn"}, name="quality.jsonl")
    page = make(folder)[1]
    title = "Score of the questions of run.eval_suite"
    assert title not in before
    assert page.count("<svg ") == before.count("<svg ") + 1
    _, _, drawn = page.partition(title)
    for text in ("4,096 tokens", "32,768 tokens", "0.25", "0.75", "0.125", "0.5"):
        assert text in drawn


SHORT = {"step": 9, "texts": 2, "tokens": 300, "loss": 2.25, "difference": 0.05, "models": [
    {"model": "base", "loss": 2.2, "loss_low": 2.1, "loss_high": 2.3},
    {"model": "trained", "loss": 2.25, "loss_low": None, "loss_high": None,
     "difference": 0.05, "difference_low": 0.01, "difference_high": 0.09},
]}  # fmt: skip


def test_what_short_texts_lose_is_a_figure_and_a_table(tmp_path: Path) -> None:
    lines = [{**SHORT, "step": step, "texts": step} for step in (2, 4, 3)]  # a resume has repeated step 3
    write_lines(tmp_path / "run", *lines, name="short_check.jsonl")
    summary, page = make(write_lines(tmp_path / "run", {"step": 4, "loss": 1.0}))
    assert summary["short_check"] == lines[-1]
    assert not find_undocumented("ulysses report", {"short_check": summary["short_check"]})
    figure = (
        "short texts",
        "+0.0500",
        "nats per token against the base, 95 % interval +0.0100 to +0.0900; below 0 is better",
    )
    assert figure in run_summary.list_figures(summary)
    caption, rows = run_summary.tabulate_short_check(lines[-1])
    assert caption.startswith("3 short texts that were not trained on, after step 3")
    assert rows == [
        ("base", "2.2000", "2.1000 to 2.3000", "", ""), ("trained", "2.2500", "", "+0.0500", "+0.0100 to +0.0900")
    ]  # fmt: skip
    for text in (caption, "2.1000 to 2.3000", "+0.0500"):
        assert text in page


@pytest.mark.parametrize("models", [None, [], [3], [{"model": [EVIL], "loss": "x", "difference": None}]])
def test_odd_short_checks_do_not_stop_the_page(tmp_path: Path, models: Any) -> None:
    write_lines(tmp_path / "run", {"step": 1, "models": models}, name="short_check.jsonl")
    summary, page = make(write_lines(tmp_path / "run", {"step": 1, "loss": 1.0}))
    assert "short texts" not in [name for name, *_ in run_summary.list_figures(summary)]
    assert EVIL not in page


def test_pairs_of_answers_have_charts_of_their_rewards(tmp_path: Path) -> None:
    rewards = {"rewards/chosen": 0.5, "rewards/rejected": -0.25, "rewards/margins": 0.75}
    lines = [{"step": step, "loss": 0.5, "rewards/accuracies": 0.25 * step, **rewards} for step in (1, 2, 3)]
    write_lines(tmp_path, *lines)
    write_lines(tmp_path, {"step": 2, "loss": 0.6, "rewards/accuracies": 0.625, **rewards}, name="eval.jsonl")
    summary, page = make(tmp_path)
    assert summary["accuracy"] == 0.625
    for title in ("Pairs whose chosen answer", "Margin between the rewards", "Rewards of chosen and rejected"):
        assert title in page
    assert "62.5%" in page
    assert "mean over pairs" in page
    assert "nats per supervised token" not in page
    write_lines(tmp_path, {"step": 1, "loss": 2.0})
    write_lines(tmp_path, name="eval.jsonl")
    summary, page = make(tmp_path)
    assert summary["accuracy"] is None
    assert "Margin between the rewards" not in page


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


def test_a_half_written_last_line_is_reported_and_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 5)
    with open(folder / "metrics.jsonl", "a") as stream:
        stream.write('{"step": 6, "loss": 1.')
    summary, page = make(folder)
    assert summary["last_step"] == 5
    assert "is cut off" in page


def test_losses_that_are_no_numbers_are_counted_and_marked(tmp_path: Path) -> None:
    lines = [{"step": step, "loss": loss} for step, loss in enumerate([3.0, math.nan, None, math.inf, 2.0])]
    overflown = {"step": 6, "loss": 2.0, "grad_norm": None, "applied": False}
    summary, page = make(write_lines(tmp_path / "run", *lines, {"step": 5}, overflown))
    assert summary["num_bad_steps"] == 4
    assert re.search(r"steps not applied +4 ", run_summary.format_summary(summary))
    assert summary["loss"]["last"] == 2.0
    assert "4 steps with a loss or a gradient that is NaN or infinite" in page
    assert "<title>not a number</title>" in page


def test_a_loss_that_diverged_is_said_with_its_steps(tmp_path: Path) -> None:
    marks: dict[int, dict[str, Any]] = {3: {"diverged": True}, 5: {"diverged": False}, 1_200: {"diverged": True}}
    lines = [{"step": step, "loss": 3.0, **marks.get(step, {})} for step in (1, 2, 3, 4, 5, 1_200)]
    folder = write_lines(tmp_path / "run", *lines)
    summary, page = make(folder)
    assert all(note in page for note in summary["notes"] if "diverged" in note)
    assert has_diverged(folder / "metrics.jsonl")
    assert not has_diverged(write_lines(tmp_path / "other", *lines[:5]) / "metrics.jsonl")


def test_a_run_without_metrics_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps(FACTS))
    summary, page = make(folder)
    assert summary["loss"] is None
    assert "No optimizer step is recorded" in page
    assert "<svg " not in page
    assert "sp_size: 8" in page


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", '{"layout": 3, "recipe": [], "prediction": null, "levers": {"a": 1}}']
)
def test_a_damaged_run_json_does_not_stop_the_page(tmp_path: Path, text: str) -> None:
    folder = write_run(tmp_path / "run", 3)
    (folder / "run.json").write_text(text)
    summary, page = make(folder)
    assert summary["last_step"] == 3
    assert "Loss" in page


def test_one_evaluation_of_chats_is_bars_by_class_and_by_turn(tmp_path: Path) -> None:
    parts = {
        "by_class": {"thoughts": {"loss": 1.25, "tokens": 4}, "calls": {"loss": 0.5, "tokens": 2}},
        "by_turn": {"1": {"loss": 2.0, "tokens": 4}, "over 64": {"loss": 0.25, "tokens": 9}},
    }
    folder = write_run(tmp_path / "run", 3)
    write_lines(folder, {"step": 3, "loss": 2.0, **parts}, name="eval.jsonl")
    _, page = make(folder)
    assert "Evaluation loss by what the assistant writes" in page
    assert "Evaluation loss by turn of the assistant" in page
    assert all(word in page for word in ("thoughts", "calls", "over 64", "1.25", "0.25"))


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


@pytest.mark.parametrize(
    ("key", "value", "is_masked"),
    [
        ("hf_token", "abc", True), ("HF_TOKEN", "abc", True), ("wandb_api_key", "abc", True),
        ("apiKey", 12345, True), ("password", 12345, True), ("client_secret", ["a", "b"], True),
        ("tokenizer", "Qwen/Qwen3-8B", False), ("tokenizers", "0.22.1", False), ("num_key_value_heads", 8, False),
        ("max_tokens", 4096, False), ("pad_token_id", 0, False), ("path", "Qwen/Qwen3-8B", False),
        ("path", f"x{SECRET}"[1:], True), ("path", "https://me:pass@host/x", True),
        ("path", "https://host/x?token=abc&v=1", True), ("header", "Authorization: Bearer abc", True),
        ("url", "https://host/x?v=1", False), ("enabled_token", True, False),
    ],
)  # fmt: skip
def test_secrets_are_masked_and_names_are_not(key: str, value: Any, is_masked: bool) -> None:
    masked = mask_secrets({"a": [{key: value}]})["a"][0][key]
    assert (MASK in str(masked)) is is_masked
    if not is_masked:
        assert masked == value
    else:
        assert not {"abc", "12345", "pass", SECRET} & set(str(masked).replace("@", " ").replace("=", " ").split())


def test_values_below_a_secret_key_are_masked() -> None:
    assert mask_secrets({"secrets": {"a": {"b": "x"}}, SECRET: 1}) == {"secrets": {"a": {"b": MASK}}, MASK: 1}
    assert mask_text(f"saved with {SECRET}.") == f"saved with {MASK}"


def make_findings(subject: str, score: float) -> dict[str, Any]:
    common = {"task": "vt", "depths": [0.25], "score": score, "is_greedy": None, "answer": "so", "seconds": 1.0}
    results = [{**common, "length": length} for length in (4096, 8192)]
    facts = {"subject": subject, "seconds": 3.0, "num_ranks": 2, "notes": [EVIL]}
    return {**summarize(results), **facts, "results": results}


def test_the_report_shows_evaluations_of_the_runs_model_and_checkpoints(tmp_path: Path) -> None:
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
    assert page.index("run/model") < page.index("run/checkpoints/step-2")
    assert "75.0 %" in page
    assert "50.0 %" not in page
    assert "Score by length and depth" in page
    assert EVIL not in page
    assert "evaluations/torn.json is damaged, and is not shown." in page


def run(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return commands.run("report", *words, cwd=cwd)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "qwen")


def test_a_page_and_a_summary(folder: Path) -> None:
    done = run(str(folder))
    page = folder / "report.html"
    assert (done.returncode, done.stderr) == (0, f"wrote {page}\n")
    assert page.read_text().startswith("<!doctype html>")
    assert "most time goes to  attention" in done.stdout
    assert [file.name for file in folder.iterdir() if file.name.startswith(".")] == []


def test_the_summary_as_json_writes_a_page_only_on_request(folder: Path, tmp_path: Path) -> None:
    (folder / "report.html").unlink(missing_ok=True)
    done = run(str(folder), "--format", "json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["last_step"] == 1000
    assert not find_undocumented("ulysses report", json.loads(done.stdout))
    assert not (folder / "report.html").exists()
    target = tmp_path / "new" / "page.html"
    done = run(str(folder), "--format", "json", "--output", str(target))
    assert json.loads(done.stdout)["model"] == "Qwen/Qwen3-8B"
    assert SECRET not in target.read_text() + done.stdout
