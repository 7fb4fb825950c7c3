"""Makes a run's report as one HTML page: loss, speed, time of a step, memory, automatic choices, setup.

Draws a chart only if the run has recorded its numbers. run_files has masked the secrets before.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ulysses_cli.plan.secrets import mask_text
from ulysses_cli.plan.units import format_count
from ulysses_cli.report.page import charts
from ulysses_cli.report.page.charts import Mark, Series
from ulysses_cli.report.page.page import (
    Block,
    Chart,
    Facts,
    Figures,
    Note,
    PageSection,
    Preformatted,
    Table,
    make_page,
    tabulate_bars,
    tabulate_lines,
)
from ulysses_cli.report.quantities import format_number, format_quantity, is_number
from ulysses_cli.report.run_summary import (
    SHORT_CHECK_COLUMNS,
    Line,
    RecordedRun,
    list_figures,
    list_step_parts,
    list_values,
    sum_parts,
    tabulate_short_check,
)

MIN_STEPS_TO_SMOOTH = 200
MAX_STACKS = 24
MAX_SAMPLED = 6
LOSS_PARTS = {
    "by_position": ("Evaluation loss by position in the document", "position"),
    "by_class": ("Evaluation loss by what the assistant writes", "class"),
    "by_turn": ("Evaluation loss by turn of the assistant", "turn"),
}
SPIKY = 20  # a maximum of so many times the median gets a logarithmic axis


def make_run_page(run: RecordedRun, summary: Mapping[str, Any], evaluations: Sequence[Block] = ()) -> str:
    """`summary` is the result of summarize_run, `evaluations` that of make_evaluation_blocks."""
    notes = [Note(note, is_warning=True) for note in run.notes]
    if summary["num_bad_steps"]:
        bad = format_count(summary["num_bad_steps"], "step")
        what = f"{bad} with a loss or a gradient that is NaN or infinite; crosses mark such losses."
        notes.append(Note(what, is_warning=True))
    head: list[Block] = [*notes, Figures(list_figures(dict(summary)))]
    sections = [
        ("Summary", head),
        ("Loss", _show_learning(run)),
        ("Short texts", _show_short_check(run)),
        ("Answers", _show_quality(run)),
        ("Evaluations", list(evaluations)),
        ("Samples", _show_samples(run)),
        ("Speed", _show_speed(run, summary)),
        ("Time of a step", _show_parts(run, summary)),
        ("Memory", _show_memory(run)),
        ("Automatic choices", _show_choices(run)),
        ("Reported and published", _show_notifications(run)),
        ("Setup", _show_origin(run)),
    ]
    folder = run.folder.resolve().name or str(run.folder)
    title = f"{summary['model']}: {mask_text(folder)}" if summary["model"] else mask_text(folder)
    return make_page(title, [PageSection(name, body) for name, body in sections if body], _write_subtitle(summary))


def _write_subtitle(summary: Mapping[str, Any]) -> str:
    parts = []
    if summary["last_step"] is not None:
        planned = f" of {summary['num_steps']:,}" if summary["num_steps"] else ""
        parts.append(f"step {summary['last_step']:,}{planned}")
    if summary["started"]:
        parts.append(f"started {summary['started']}")
    if summary["recipe_hash"]:
        parts.append(f"recipe {summary['recipe_hash']}")
    return ", ".join(parts)


def _plot(title: str, series: Sequence[Series], y_label: str, note: str = "", **more: Any) -> Chart:
    svg = charts.draw_lines(title, series, "step", y_label, **more)
    return Chart(svg, note, tabulate_lines(series, "step", y_label))


def _read_series(lines: Sequence[Line], name: str, key: str) -> Series:
    """The values of a key by step. A null is a value that JSON cannot hold, NaN or infinite; it is drawn as a cross."""
    present = [line for line in lines if key in line]
    ys = [line[key] if isinstance(line[key], int | float) else math.nan for line in present]
    return Series(name, [line["step"] for line in present], ys)


def _plot_key(title: str, run: RecordedRun, key: str, y_label: str, note: str = "", **more: Any) -> list[Block]:
    if not any(list_values(run.metrics, key)):
        return []  # not recorded, or always zero
    lines = [line for line in run.metrics if line.get(key) is not None]
    return [_plot(title, [_read_series(lines, "", key)], y_label, note, **more)]


def _show_learning(run: RecordedRun) -> list[Block]:
    blocks: list[Block] = []
    train, evals = _read_series(run.metrics, "train", "loss"), _read_series(run.evals, "eval", "loss")
    series = [train]
    if len(train.xs) >= MIN_STEPS_TO_SMOOTH:
        series.append(_smooth(train, max(5, len(train.xs) // 50)))
    if evals.xs:
        series.append(evals)
    has_pairs = any("rewards/margins" in line for line in (*run.metrics, *run.evals))
    if list_values(run.metrics, "loss") or evals.xs:
        blocks.append(_plot("Loss", series, "mean over pairs" if has_pairs else "nats per supervised token"))
    blocks += _show_preferences(run) if has_pairs else []
    for key, (title, noun) in LOSS_PARTS.items():
        blocks += _show_losses(run.evals, key, title, noun)
    blocks += _plot_key("Learning rate", run, "learning_rate", "learning rate")
    norms = [value for value in list_values(run.metrics, "grad_norm") if value > 0]
    blocks += _plot_key("Fullest expert", run, "expert_load", "times the mean load, in the most uneven layer")
    blocks += _plot_key("Experts without a token", run, "idle_experts", "of all experts in a step (share)")
    blocks += _plot_key(
        "Balance of experts", run, "router_aux_loss", "loss of routers (k where k experts are balanced)"
    )
    is_spiky = bool(norms) and max(norms) > SPIKY * statistics.median(norms)
    note = "logarithmic" if is_spiky else ""
    blocks += _plot_key("Gradient norm", run, "grad_norm", "before clipping", note, y_log=is_spiky)
    return blocks


def _show_preferences(run: RecordedRun) -> list[Block]:
    """Of pairs of answers: which are told apart, by how much, and whether both answers become less likely."""
    sources = (("train", run.metrics), ("eval", run.evals))
    blocks: list[Block] = []
    for title, label, names in (
        ("Pairs whose chosen answer has the higher reward", "share", ("accuracies",)),
        ("Margin between the rewards of both answers", "reward", ("margins",)),
        ("Rewards of chosen and rejected answers", "reward", ("chosen", "rejected")),
    ):
        series = [
            _read_series(lines, f"{split}, {name}" if len(names) > 1 else split, f"rewards/{name}")
            for split, lines in sources
            for name in names
            if list_values(lines, f"rewards/{name}")
        ]
        blocks += [_plot(title, series, label)] if series else []
    return blocks


def _smooth(series: Series, width: int) -> Series:
    """The mean of the last `width` numbers, from the first step that has that many."""
    window: list[float] = []
    xs: list[float] = []
    means: list[float | None] = []
    for x, y in zip(series.xs, series.ys, strict=True):
        if y is not None and is_number(y):
            window = [*window[-(width - 1) :], y]
            if len(window) == width:
                xs.append(x)
                means.append(math.fsum(window) / width)
    return Series(f"mean of {width}", xs, means)


def _show_losses(evals: Sequence[Line], key: str, title: str, noun: str) -> list[Block]:
    """The evaluation loss by position shows whether the model learns at the far positions of long rows, too; by class
    and by turn, what of chats it learns."""
    curves: dict[str, Series] = {}
    for line in evals:
        buckets = line.get(key)
        for name, bucket in buckets.items() if isinstance(buckets, dict) else ():
            loss = bucket.get("loss") if isinstance(bucket, dict) else None
            if is_number(loss):
                old = curves.get(name, Series(name, (), ()))
                curves[name] = Series(name, [*old.xs, line["step"]], [*old.ys, loss])
    if not curves:
        return []
    label = "nats per supervised token"
    if max(len(series.xs) for series in curves.values()) > 1:
        return [_plot(title, list(curves.values()), label)]
    last = [series.ys[-1] for series in curves.values()]
    svg = charts.draw_bars(title, list(curves), last, label)
    return [Chart(svg, "", tabulate_bars(list(curves), {"loss": last}, label, noun))]


def _show_short_check(run: RecordedRun) -> list[Block]:
    """What positions and training cost on texts that were not trained on."""
    if not run.short_checks:
        return []
    caption, rows = tabulate_short_check(run.short_checks[-1])
    return [Table(SHORT_CHECK_COLUMNS, rows, caption)]


def _show_quality(run: RecordedRun) -> list[Block]:
    """The mean score of the questions between steps, by length."""
    points: dict[int, list[tuple[float, float]]] = {}
    for line in run.quality:
        for row in line["mean"] if isinstance(line.get("mean"), list) else ():
            if isinstance(row, dict) and is_number(row.get("score")) and isinstance(row.get("length"), int):
                points.setdefault(row["length"], []).append((float(line["step"]), row["score"]))
    series = [
        Series(f"{length:,} tokens", [step for step, _ in own], [score for _, score in own])
        for length, own in sorted(points.items())
    ]
    return [_plot("Score of the questions of run.eval_suite", series, "score")] if series else []


def _show_samples(run: RecordedRun) -> list[Block]:
    """What the model said: of each prompt the first and the last continuations."""
    shown = run.samples if len(run.samples) <= MAX_SAMPLED else [run.samples[0], *run.samples[1 - MAX_SAMPLED :]]
    said: dict[str, list[tuple[str, str]]] = {}
    for line in shown:
        for sample in line["samples"] if isinstance(line.get("samples"), list) else ():
            if isinstance(sample, dict):
                prompt, text = (mask_text(str(sample.get(name, ""))) for name in ("prompt", "text"))
                said.setdefault(prompt, []).append((f"{line['step']:,}", text))
    return [Table(("after step", "continuation"), rows, prompt) for prompt, rows in said.items()]


def _show_speed(run: RecordedRun, summary: Mapping[str, Any]) -> list[Block]:
    predicted, per_step = summary["predicted_step_seconds"], list_values(run.metrics, "tokens")
    marks = []
    if predicted and per_step:
        marks.append(Mark(statistics.median(per_step) / predicted, "predicted"))
    blocks = _plot_key("Tokens per second", run, "tokens_per_second", "all processes together", marks=marks)
    marks = [Mark(predicted, "predicted")] if predicted else []
    blocks += _plot_key("Time of a step", run, "step_seconds", "time (seconds)", marks=marks)
    blocks += _plot_key("Model FLOPs utilisation", run, "mfu", "of the hardware's peak (share)")
    blocks += _plot_key("Communication", run, "communication_share", "of a step's time (share)")
    return blocks


def _show_parts(run: RecordedRun, summary: Mapping[str, Any]) -> list[Block]:
    samples = list_step_parts(run)
    if not samples:
        return []
    size = -(-len(samples) // MAX_STACKS)
    groups = [samples[at : at + size] for at in range(0, len(samples), size)]
    total = sum_parts([parts for _, parts in samples])
    if not total:
        return []
    means = [
        {name: value / len(group) for name, value in sum_parts([parts for _, parts in group]).items()}
        for group in groups
    ]
    labels = [f"{group[0][0]:,}" for group in groups]
    parts = {name.replace("_", " "): [mean.get(name, 0.0) for mean in means] for name in total}
    whole = sum(total.values())
    share = f"{summary['dominant_share']:.0%}"
    note = f"{summary['dominant_part'].replace('_', ' ')} takes most: {share} of a step"
    note += f". Each bar is the mean of up to {size} sampled steps; its label is the first of them." if size > 1 else ""
    svg = charts.draw_stack("Parts of a step", labels, parts, "time by step (seconds)")
    rows = [
        (name.replace("_", " "), format_quantity(value / len(samples), "seconds"), f"{value / whole:.1%}")
        for name, value in sorted(total.items(), key=lambda item: -item[1])
    ]
    table = Table(("part", "mean time", "share"), rows, f"over {format_count(len(samples), 'sampled step')}")
    blocks: list[Block] = [Chart(svg, note, tabulate_bars(labels, parts, "time (seconds)", "step")), table]
    return blocks


def _show_memory(run: RecordedRun) -> list[Block]:
    prediction, machine = run.get_part("prediction"), run.get_part("machine")
    marks = [
        Mark(part[key], f"{text} {format_quantity(part[key], 'bytes')}")
        for part, key, text in (
            (prediction, "peak_memory_bytes", "predicted"),
            (machine, "device_memory_bytes", "GPU"),
        )
        if is_number(part.get(key)) and part[key] > 0
    ]
    blocks = _plot_key("Peak GPU memory", run, "peak_memory_bytes", "of the fullest process (bytes)", marks=marks)
    return blocks + _plot_key("Peak host memory", run, "host_peak_memory_bytes", "of the fullest process (bytes)")


def _show_choices(run: RecordedRun) -> list[Block]:
    rows = [
        (str(name), _write_value(lever.get("value")), str(lever.get("reason") or ""))
        for name, lever in run.get_part("levers").items()
        if isinstance(lever, dict)
    ]
    attention = run.get_part("attention")
    if attention:
        rows.insert(0, ("attention kernel", _write_value(attention.get("name")), str(attention.get("reason") or "")))
    return [Table(("choice", "value", "reason"), rows)] if rows else []


def _show_notifications(run: RecordedRun) -> list[Block]:
    """Where numbers, messages and the model went, and when."""
    rows = [(line["time"], f"{line['kind']} {line['name']}", line["text"]) for line in run.told]
    return [Table(("time", "to", "what"), rows)] if rows else []


def _show_origin(run: RecordedRun) -> list[Block]:
    blocks: list[Block] = []
    groups = (
        ("layout", "layout"),
        ("model", "model"),
        ("data", "data"),
        ("machine", "machine"),
        ("versions", "version"),
    )
    pairs = [
        (f"{word} {str(name).replace('_', ' ')}" if word != "version" else str(name), _write_value(value))
        for part, word in groups
        for name, value in run.get_part(part).items()
    ]
    for name in ("recipe_file", "price_per_gpu_hour"):
        if run.facts.get(name) is not None:
            pairs.insert(0, (name.replace("_", " "), _write_value(run.facts[name])))
    if pairs:
        blocks.append(Facts(pairs))
    if run.get_part("recipe"):
        blocks.append(Preformatted(_write_recipe(run.get_part("recipe")), "the resolved recipe"))
    return blocks


def _write_value(value: Any) -> str:
    """Any value of run.json as text. A large count also has its short form."""
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_write_value(part)}" for name, part in value.items())
    if isinstance(value, list):
        return ", ".join(map(_write_value, value))
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    if isinstance(value, int) and is_number(value):
        return f"{value:,}" if abs(value) < 1_000_000 else f"{value:,} ({format_number(value)})"
    return str(value)


def _write_recipe(recipe: Mapping[str, Any]) -> str:
    import yaml

    return str(yaml.safe_dump(dict(recipe), sort_keys=False, allow_unicode=True, width=100))
