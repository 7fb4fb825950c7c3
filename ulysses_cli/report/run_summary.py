"""Loads a run directory (run.json, metrics.jsonl, eval.jsonl, results of `ulysses evaluate`) and summarizes the run
in a few numbers, for programs (JSON), for the terminal and for the top of its page. Accepts files that a crash cut
off, and notes it. Masks secrets as it loads, so that no later code can show them."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ulysses_cli.plan.files import read_regular, write_whole
from ulysses_cli.plan.hardware import compute_price
from ulysses_cli.plan.problem import Problem, RecipeError
from ulysses_cli.plan.schedule import (
    LOSS_MEASURE,
    MEASURES,
    choose_best,
    describe_measure,
    describe_stall,
    has_stalled,
)
from ulysses_cli.plan.secrets import mask_secrets, mask_text
from ulysses_cli.plan.speed import PARTS
from ulysses_cli.plan.units import format_count, format_usd
from ulysses_cli.report.printing import clean_text
from ulysses_cli.report.quantities import format_quantity, is_number

Line = dict[str, Any]
EVALUATIONS = "evaluations"  # the folder where `ulysses evaluate` leaves what it found on a run's model
MAX_EVALUATION_BYTES = 64 << 20
NEEDED = {"subject", "scores", "mean", "heat_map", "effective_length", "seconds", "num_ranks", "has_all_ruler_tasks"}


@dataclass(frozen=True)
class RecordedRun:
    """`metrics` and `evals` are sorted by step. `spent_seconds` counts every attempt at a step that a resume
    repeated."""

    folder: Path
    facts: dict[str, Any]
    metrics: list[Line]
    evals: list[Line]
    samples: list[Line]
    quality: list[Line]
    short_checks: list[Line]
    told: list[Line]
    evaluations: list[Line]  # what `ulysses evaluate` found, by name
    spent_seconds: float
    notes: tuple[str, ...]

    def get_part(self, name: str) -> dict[str, Any]:
        """A section of run.json; empty if it is missing or not a mapping."""
        part = self.facts.get(name)
        return part if isinstance(part, dict) else {}


def load_run(folder: Path) -> RecordedRun:
    """Raises RecipeError if the folder is not a run directory."""
    files = [folder / name for name in ("run.json", "metrics.jsonl", "eval.jsonl")]
    hint = "name the directory that run.output_dir of the recipe names; it holds run.json and metrics.jsonl"
    if not folder.is_dir():
        what = "is a file, not a run directory" if folder.exists() else "does not exist"
        raise RecipeError([Problem("", f"{folder} {what}", hint)])
    if not any(file.is_file() for file in files):
        raise RecipeError(
            [Problem("", f"{folder} is not a run directory: it has none of run.json, metrics.jsonl", hint)]
        )
    notes: list[str] = []
    try:
        facts = _load_facts(files[0], notes)
        lines, evals = _load_lines(files[1], notes), _load_lines(files[2], notes)
        told = _load_notifications(folder / "told.jsonl")
        evaluations = _load_evaluations(folder / EVALUATIONS, notes)
        samples, quality, checks = (
            _load_lines(folder / f"{name}.jsonl", notes) for name in ("samples", "quality", "short_check")
        )
    except OSError as error:
        raise RecipeError([Problem("", f"{error.filename} cannot be read: {error.strerror}")]) from None
    spent = [line["step_seconds"] for line in lines if is_number(line.get("step_seconds")) and line["step_seconds"] > 0]
    metrics = _drop_redone(lines)
    if len(metrics) < len(lines):
        redone = format_count(len(lines) - len(metrics), "step")
        notes.append(f"The run resumed from an older checkpoint and repeated {redone}. The last attempt is shown.")
    if not metrics:
        notes.append("No optimizer step is recorded: metrics.jsonl is missing or empty. There is nothing to plot yet.")
    notes += _describe_rises(metrics)
    evals, samples, quality, checks = (_drop_redone(each) for each in (evals, samples, quality, checks))
    return RecordedRun(
        folder, facts, metrics, evals, samples, quality, checks, told, evaluations, float(sum(spent)), tuple(notes)
    )


def _load_facts(file: Path, notes: list[str]) -> dict[str, Any]:
    if not file.is_file():
        notes.append("run.json is missing: recipe, layout and versions are not known.")
        return {}
    try:
        facts = json.loads(file.read_text(encoding="utf-8", errors="replace"))
    except (ValueError, RecursionError):
        facts = None
    if not isinstance(facts, dict):
        notes.append("run.json is damaged: recipe, layout and versions are not known.")
        return {}
    masked: dict[str, Any] = mask_secrets(facts)
    return masked


def _load_lines(file: Path, notes: list[str]) -> list[Line]:
    """All lines that are objects with a step. A crash may have cut off the last line."""
    if not file.is_file():
        return []
    lines: list[Line] = []
    bad: list[int] = []
    number, text = 0, ""
    with open(file, encoding="utf-8", errors="replace") as stream:
        for number, text in enumerate(stream, 1):
            line = _parse_line(text)
            if line is not None:
                lines.append(line)
            elif text.strip():
                bad.append(number)
    if bad and bad[-1] == number and not text.endswith("\n"):
        notes.append(f"The last line of {file.name} is cut off, as a crash leaves it; it is not shown.")
        bad.pop()
    if bad:
        notes.append(f"{format_count(len(bad), 'line')} of {file.name} cannot be read, the first is line {bad[0]}.")
    return lines


def _describe_rises(metrics: list[Line]) -> list[str]:
    """Where the run has found its loss far above its past, and where it came back."""
    words = "The loss diverged: it is far above its past from step"
    marks = [(line["step"], bool(line["diverged"])) for line in metrics if "diverged" in line]
    starts = [step for step, is_high in marks if is_high]
    ends = [next((later for later, is_high in marks if later > step and not is_high), None) for step in starts]
    return [
        f"{words} {start:,} on." if end is None else f"{words} {start:,} to step {end:,}."
        for start, end in zip(starts, ends, strict=True)
    ]


def _load_notifications(file: Path) -> list[Line]:
    """What went to trackers, to the hub and to whom the recipe names. Lines have a time and no step."""
    if not file.is_file():
        return []
    lines: list[Line] = []
    for text in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict):
            lines.append({name: mask_text(str(line.get(name, ""))) for name in ("time", "kind", "name", "text")})
    return lines


def _load_evaluations(folder: Path, notes: list[str]) -> list[Line]:
    found = []
    for file in sorted(folder.glob("*.json")):
        try:
            findings = json.loads(read_regular(file, MAX_EVALUATION_BYTES).decode(errors="replace"))
        except (OSError, ValueError, RecursionError):  # a FIFO would hold the report without end
            findings = None
        if isinstance(findings, dict) and findings.keys() >= NEEDED:
            found.append(mask_secrets(findings))
        else:
            notes.append(f"{EVALUATIONS}/{file.name} is damaged, and is not shown.")
    return found


def _parse_line(text: str) -> Line | None:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or not is_number(line.get("step")):
        return None
    for name in ("step_parts", "by_position", "by_class", "by_turn"):
        if isinstance(line.get(name), dict):
            line[name] = {mask_text(part): value for part, value in line[name].items()}
    return line


def _drop_redone(lines: list[Line]) -> list[Line]:
    """If a step is recorded again, as after a resume, its new line replaces the old ones from that step on."""
    kept: list[Line] = []
    for line in lines:
        while kept and kept[-1]["step"] >= line["step"]:
            kept.pop()
        kept.append(line)
    return kept


def save_page(target: Path, page: str) -> Path:
    """Writes the page atomically, so that no reader sees a part of it. Returns its path."""
    if target.is_dir():
        target = target / "report.html"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, page)
    except OSError as error:
        hint = "name a place that can be written with --output"
        raise RecipeError([Problem("", f"{target} cannot be written: {error.strerror}", hint)]) from None
    return target


def list_values(lines: Sequence[Line], name: str) -> list[float]:
    """The finite values of a key, without the lines that lack it."""
    return [line[name] for line in lines if is_number(line.get(name))]


SHORT_CHECK_COLUMNS = ("model", "loss", "95 % interval", "difference", "95 % interval")


def tabulate_short_check(line: Mapping[str, Any]) -> tuple[str, list[tuple[str, ...]]]:
    """Of a line of short_check.jsonl: a caption, and a row of SHORT_CHECK_COLUMNS for each model."""
    number = format_count(line["texts"], "short text") if isinstance(line.get("texts"), int) else "short texts"
    caption = (
        f"{number} that were not trained on, after step {line['step']:,}: mean loss in nats per token. Differences are "
        "to the base, text by text."
    )
    rows = []
    for model in line["models"] if isinstance(line.get("models"), list) else ():
        cells = [mask_text(str(model.get("model", "")))] if isinstance(model, dict) else []
        for name, form in (("loss", ".4f"), ("difference", "+.4f")) if cells else ():
            values = [model.get(key) for key in (name, f"{name}_low", f"{name}_high")]
            mean, low, high = (format(value, form) if is_number(value) else "" for value in values)
            cells += [mean, f"{low} to {high}" if low and high else ""]
        rows += [tuple(cells)] if cells else []
    return caption, rows


def list_step_parts(run: RecordedRun) -> list[tuple[int, dict[str, float]]]:
    """(step, seconds by part) of the sampled steps. Leaves out values that are not durations."""
    samples = []
    for line in run.metrics:
        parts = line.get("step_parts")
        if isinstance(parts, dict):
            seconds = {name: float(value) for name, value in parts.items() if is_number(value) and value >= 0}
            if seconds:
                samples.append((line["step"], seconds))
    return samples


def sum_parts(samples: Sequence[dict[str, float]]) -> dict[str, float]:
    names = [*PARTS, *sorted({name for parts in samples for name in parts} - set(PARTS))]
    totals = {name: math.fsum(parts.get(name, 0.0) for parts in samples) for name in names}
    return {name: total for name, total in totals.items() if total > 0}


def summarize_run(run: RecordedRun) -> dict[str, Any]:
    """The summary as plain data. A value is None where the run has not recorded it."""
    metrics, layout, prediction = run.metrics, run.get_part("layout"), run.get_part("prediction")
    spent = sum_parts([parts for _, parts in list_step_parts(run)])
    dominant = max(spent, key=lambda name: spent[name]) if spent else None
    world_size = _get_number(layout, "world_size")
    price = _get_number(run.facts, "price_per_gpu_hour")
    cost = compute_price(run.spent_seconds, int(world_size), float(price)) if price is not None and world_size else None
    tokens = sum(list_values(metrics, "tokens"))
    return {
        "run_dir": str(run.folder),
        "recipe_hash": _get_text(run.facts, "recipe_hash"),
        "model": _get_text(run.get_part("model"), "name"),
        "started": _get_text(run.facts, "started"),
        "world_size": world_size,
        "is_on_cpu": (_get_text(run.get_part("machine"), "device") or "").startswith("CPU,"),
        "first_step": metrics[0]["step"] if metrics else None,
        "last_step": metrics[-1]["step"] if metrics else None,
        "num_steps": _get_number(run.facts, "num_steps"),
        "loss": _summarize_loss(metrics),
        "eval_loss": _summarize_loss(run.evals),
        **_summarize_pairs(run),
        "short_check": run.short_checks[-1] if run.short_checks else None,
        **_summarize_choice(run),
        "num_bad_steps": sum(_is_bad(line) for line in metrics),
        "tokens": tokens or None,
        "supervised_tokens": sum(list_values(metrics, "supervised_tokens")) or None,
        "median_tokens_per_second": _compute_median(metrics, "tokens_per_second"),
        "median_tokens_per_second_per_gpu": _compute_median(metrics, "tokens_per_second_per_gpu"),
        "median_step_seconds": _compute_median(metrics, "step_seconds"),
        "predicted_step_seconds": _get_number(prediction, "step_seconds"),
        "median_mfu": _compute_median(metrics, "mfu"),
        "median_communication_share": _compute_median(metrics, "communication_share"),
        "peak_memory_bytes": max(list_values(metrics, "peak_memory_bytes"), default=None),
        "predicted_peak_memory_bytes": _get_number(prediction, "peak_memory_bytes"),
        "host_peak_memory_bytes": max(list_values(metrics, "host_peak_memory_bytes"), default=None),
        "dominant_part": dominant,
        "dominant_share": spent[dominant] / sum(spent.values()) if dominant is not None else None,
        "steps_seconds": run.spent_seconds,
        "steps_cost_usd": cost if is_number(cost) else None,
        "notes": list(run.notes),
    }


def _is_bad(line: Mapping[str, Any]) -> bool:
    """Whether a step was not applied: its loss or its gradient was not finite."""
    return line.get("applied") is False or ("loss" in line and not is_number(line["loss"]))


def _summarize_choice(run: RecordedRun) -> dict[str, Any]:
    """The step with the best evaluation where the run keeps it, and why the run ended early."""
    settings = run.get_part("recipe").get("run")
    settings = settings if isinstance(settings, dict) else {}
    measure = settings.get("keep_best")
    known = MEASURES.get(measure or LOSS_MEASURE, MEASURES[LOSS_MEASURE])
    lines = {"eval.jsonl": run.evals, "quality.jsonl": run.quality}[known.file]
    losses = {  # not the base model's
        line["step"]: value for line in lines if line["step"] and (value := known.read(line)) is not None
    }
    best = choose_best(losses, losses) if measure else None
    patience, threshold = settings.get("early_stopping_patience"), settings.get("early_stopping_threshold")
    early_stop = ""
    if isinstance(patience, int) and is_number(threshold) and has_stalled(losses, patience, threshold):
        early_stop = describe_stall(measure, losses, threshold, "had")
    return {
        "best_step": best,
        "best_measure": describe_measure(measure, losses[best]) if best is not None else None,
        "best_use": "it is exported" if settings.get("export_best") else "its checkpoint is kept",
        "early_stop": early_stop,
    }


def _describe_short_check(line: Mapping[str, Any] | None) -> tuple[str, str, str] | None:
    """The figure of what short texts lose against the base, or gain."""
    rows = tabulate_short_check(line)[1] if line is not None else []
    if not rows or not rows[-1][3]:
        return None
    spread = f", 95 % interval {rows[-1][4]}" if rows[-1][4] else ""
    return "short texts", rows[-1][3], f"nats per token against the base{spread}; below 0 is better"


def list_figures(summary: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(name, value, remark) of the most important numbers, without those that are not known."""
    loss, evals, figures = summary["loss"], summary["eval_loss"], []
    planned = f"of {summary['num_steps']:,}" if summary["num_steps"] else ""
    if summary["last_step"] is not None:
        figures.append(("step", f"{summary['last_step']:,}", planned))
    if summary["num_bad_steps"]:
        figures.append(("steps not applied", f"{summary['num_bad_steps']:,}", "their loss or gradient was not finite"))
    for name, losses in (("train loss", loss), ("eval loss", evals)):
        if losses:
            begin = " before step 1" if losses["first_step"] == 0 else ""
            lowest = f"from {losses['first']:.4g}{begin}, lowest {losses['min']:.4g} at step {losses['min_step']:,}"
            figures.append((name, f"{losses['last']:.4g}", lowest))
    if figure := _describe_short_check(summary["short_check"]):
        figures.append(figure)
    if summary["accuracy"] is not None:
        remark = f"pairs whose chosen answer has the higher reward, {summary['accuracy_of']}"
        figures.append(("accuracy", f"{summary['accuracy']:.1%}", remark))
    if summary["best_step"] is not None:
        remark = f"{summary['best_measure']}; {summary['best_use']}"
        figures.append(("best model", f"step {summary['best_step']:,}", remark))
    if summary["early_stop"]:
        figures.append(("stopped early", f"step {summary['last_step']:,}", summary["early_stop"]))
    if summary["tokens"]:
        supervised = summary["supervised_tokens"]
        remark = f"{supervised / summary['tokens']:.0%} of them supervised" if supervised else ""
        figures.append(("tokens", format_quantity(summary["tokens"], "tokens"), remark))
    speed, per_gpu = summary["median_tokens_per_second"], summary["median_tokens_per_second_per_gpu"]
    rank = "process" if summary["is_on_cpu"] else "GPU"
    if speed is not None:
        remark = f"median; {format_quantity(per_gpu)} per {rank}" if per_gpu is not None else "median"
        figures.append(("tokens per second", format_quantity(speed), remark))
    if summary["median_mfu"] is not None:
        figures.append(("MFU", format_quantity(summary["median_mfu"], "share"), "median"))
    own = "peak memory of a process" if summary["is_on_cpu"] else "peak GPU memory"
    for name, key in ((own, "peak_memory_bytes"), ("peak host memory", "host_peak_memory_bytes")):
        if summary[key]:
            predicted = summary.get(f"predicted_{key}")
            remark = f"predicted {format_quantity(predicted, 'bytes')}" if predicted else ""
            figures.append((name, format_quantity(summary[key], "bytes"), remark))
    if summary["dominant_part"] is not None:
        share = f"{summary['dominant_share']:.0%} of a step"
        figures.append(("most time goes to", summary["dominant_part"].replace("_", " "), share))
    if summary["steps_seconds"]:
        figures.append(
            ("time in steps", format_quantity(summary["steps_seconds"], "seconds"), "without loading and saving")
        )
    if summary["steps_cost_usd"] is not None:
        remark = f"of the steps alone, {format_count(summary['world_size'], rank)}"
        if summary["tokens"]:
            each = 1e6 * summary["steps_cost_usd"] / summary["tokens"]
            remark += f"; {format_usd(each, digits=3)} per million tokens"
        figures.append(("cost", format_quantity(summary["steps_cost_usd"], "USD"), remark))
    return figures


def format_summary(summary: dict[str, Any]) -> str:
    rows = list_figures(summary)
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    lines = [f"{name:<{widths[0]}}  {value:<{widths[1]}}  {remark}".rstrip() for name, value, remark in rows]
    return "\n".join(clean_text(line) for line in [*lines, *(f"note: {note}" for note in summary["notes"])])


def _summarize_pairs(run: RecordedRun) -> dict[str, Any]:
    """Of pairs of answers, the last share that is told apart: of held-out pairs where there are any."""
    for name, lines in (("held-out pairs", run.evals), ("those of the last step", run.metrics)):
        if shares := list_values(lines, "rewards/accuracies"):
            return {"accuracy": shares[-1], "accuracy_of": name}
    return {"accuracy": None, "accuracy_of": None}


def _summarize_loss(lines: Sequence[Line]) -> dict[str, float] | None:
    losses = [(line["step"], line["loss"]) for line in lines if is_number(line.get("loss"))]
    if not losses:
        return None
    min_step, lowest = min(losses, key=lambda pair: pair[1])
    (first_step, first), last = losses[0], losses[-1][1]
    return {"first_step": first_step, "first": first, "last": last, "min": lowest, "min_step": min_step}


def _compute_median(lines: Sequence[Line], name: str) -> float | None:
    values = list_values(lines, name)
    return statistics.median(values) if values else None


def _get_number(part: dict[str, Any], name: str) -> Any:
    value = part.get(name)
    return value if is_number(value) else None


def _get_text(part: dict[str, Any], name: str) -> str | None:
    value = part.get(name)
    return value if isinstance(value, str) else None
