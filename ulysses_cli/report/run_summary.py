"""Summarizes a run in a few numbers, for programs (JSON), for the terminal and for the top of its page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ulysses_cli.plan.hardware import compute_price
from ulysses_cli.plan.models.model_choice import (
    SCORE,
    choose_best,
    describe_measure,
    describe_stall,
    has_stalled,
    invert_score,
)
from ulysses_cli.plan.nouns import format_count
from ulysses_cli.plan.step_parts import PARTS
from ulysses_cli.plan.units import format_usd
from ulysses_cli.report.printing import clean_text
from ulysses_cli.report.quantities import format_quantity, is_number
from ulysses_cli.report.run_files import Line, RecordedRun


def list_values(lines: Sequence[Line], name: str) -> list[float]:
    """The finite values of a key, without the lines that lack it."""
    return [line[name] for line in lines if is_number(line.get(name))]


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
    """The step with the lowest evaluation loss where the run keeps it, and why the run ended early."""
    settings = run.get_part("recipe").get("run")
    settings = settings if isinstance(settings, dict) else {}
    losses = {
        line["step"]: float(line["loss"]) if is_number(line.get("loss")) else math.inf
        for line in run.evals
        if "loss" in line and line["step"]  # not the base model's
    }
    measure = settings.get("keep_best")
    if measure == SCORE:
        losses = {line["step"]: invert_score(line["score"]) for line in run.quality if is_number(line.get("score"))}
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


def list_figures(summary: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(name, value, remark) of the most important numbers, without those that are not known."""
    loss, evals, figures = summary["loss"], summary["eval_loss"], []
    planned = f"of {summary['num_steps']:,}" if summary["num_steps"] else ""
    if summary["last_step"] is not None:
        figures.append(("step", f"{summary['last_step']:,}", planned))
    for name, losses in (("train loss", loss), ("eval loss", evals)):
        if losses:
            begin = " before step 1" if losses["first_step"] == 0 else ""
            lowest = f"from {losses['first']:.4g}{begin}, lowest {losses['min']:.4g} at step {losses['min_step']:,}"
            figures.append((name, f"{losses['last']:.4g}", lowest))
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
    for name, key in (("peak GPU memory", "peak_memory_bytes"), ("peak host memory", "host_peak_memory_bytes")):
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
