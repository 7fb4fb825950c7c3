"""Formats what verify, bench, doctor and evaluate found: tables for the terminal, pages with charts, curves and a heat
map. The format of findings is that of prove/results.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ulysses_cli.plan.units import format_bytes, format_count, format_usd
from ulysses_cli.report.page import charts, page
from ulysses_cli.report.page.charts import draw_heat_map
from ulysses_cli.report.page.page import Block, Chart, Facts, Figures, Note, PageSection, Table
from ulysses_cli.report.printing import format_table
from ulysses_cli.report.quantities import NO_VALUE, format_binary, format_number, format_quantity, format_seconds

Findings = Mapping[str, Any]
Row = Mapping[str, Any]
CURVES = {
    "tokens_per_second": "tokens per second",
    "tflops": "TFLOPS per rank",
    "peak_memory_bytes": "GPU memory (bytes)",
    "host_peak_memory_bytes": "host memory of a rank (bytes)",
    "communication_share": "communication (share)",
    "exchange_share": "all-to-all (share)",
    "step_seconds": "a step (seconds)",
}
# Values without a column: one is part of a row's name, others are many numbers, for programs.
NO_COLUMN = {"max_length", "part_seconds", "predicted_part_seconds"}
PREDICTED = {
    "step_seconds": "predicted_step_seconds",
    "peak_memory_bytes": "predicted_memory_bytes",
    "host_peak_memory_bytes": "predicted_host_memory_bytes",
}


def format_findings(findings: Findings) -> str:
    """A table per group, then notes, fixes and the verdict."""
    parts = []
    for group, rows in collect_groups(findings["rows"]):
        header, cells = make_cells(rows)
        parts.append(f"{group}\n{format_table(header, cells)}")
    if findings["notes"]:
        parts.append("\n".join(f"note: {note}" for note in findings["notes"]))
    if findings["fixes"]:
        lines = [f"{number}. {fix['what']}\n   {fix['how']}" for number, fix in enumerate(findings["fixes"], 1)]
        parts.append("to fix, in this order:\n" + "\n".join(lines))
    return "\n\n".join([*parts, format_verdict(findings)])


def format_verdict(findings: Findings) -> str:
    verdicts = [row["verdict"] for row in findings["rows"]]
    seconds = format_seconds(findings["seconds"])
    failed = verdicts.count("FAIL")
    kinds = [kind for kind in ("PASS", "WARN", "SKIP", "OOM", "FAIL") if kind in verdicts]
    counted = ", ".join(f"{verdicts.count(kind)} {kind}" for kind in kinds)
    result = "PASS" if findings["passed"] else f"FAIL: {format_count(failed, 'finding')}"
    return f"{result} ({counted or 'measured'}; {seconds})"


def collect_groups(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """The rows by group. Groups are in the order of their first rows."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["group"], []).append(row)
    return list(groups.items())


def make_cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """The header and the cells of a table with one column per value that some row has."""
    names = list(dict.fromkeys(name for row in rows for name in row["values"] if name not in NO_COLUMN))
    has_verdict, has_text = any(row["verdict"] for row in rows), any(row["text"] for row in rows)
    header = ([""] if has_verdict else []) + ["what", *(name_column(name) for name in names)]
    cells = []
    for row in rows:
        line = [row["verdict"]] if has_verdict else []
        line += [row["name"], *(format_value(name, row["values"].get(name)) for name in names)]
        cells.append(line + ([row["text"]] if has_text else []))
    return header + ([""] if has_text else []), cells


def name_column(name: str) -> str:
    for unit in ("_bytes", "_seconds"):
        name = name.removesuffix(unit)
    return name.replace("_", " ")


def format_value(name: str, value: Any) -> str:
    if value is None:
        return NO_VALUE
    if not isinstance(value, int | float) or isinstance(value, bool):
        return str(value)
    if name in ("difference", "tolerance"):
        return f"{value:.1e}" if value else "0"
    for unit in ("bytes", "seconds"):
        if name.endswith(f"_{unit}"):
            return format_quantity(value, unit)
    if name.endswith(("_share", "_error")) or name == "mfu":
        return format_quantity(value, "share")
    return format_number(value)


def make_findings_page(findings: Findings) -> str:
    """The findings as one HTML page, with a chart for each quantity that was measured at several row lengths."""
    verdict = "PASS" if findings["passed"] else "FAIL"
    sections = [PageSection("Result", [Figures([(findings["command"], verdict, format_verdict(findings))])])]
    curves = _draw_curves(findings["rows"])
    if curves:
        sections.append(PageSection("By row length", curves))
    sections += [PageSection(group, [Table(*make_cells(rows))]) for group, rows in collect_groups(findings["rows"])]
    if findings["fixes"]:
        pairs = [(fix["what"], fix["how"]) for fix in findings["fixes"]]
        sections.append(PageSection("To fix, in this order", [Facts(pairs)]))
    notes: list[Block] = [Note(note) for note in findings["notes"]]
    facts = [(name_column(name), _format_fact(name, value)) for name, value in findings["machine"].items()]
    sections.append(PageSection("How it was measured", [*notes, Facts(facts)]))
    return page.make_page(f"{findings['command']}: {findings['subject']}", sections)


def _format_fact(name: str, value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {part}" for key, part in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return format_quantity(value, "bytes") if name.endswith("_bytes") else str(value)


def _draw_curves(rows: Sequence[Row]) -> list[Block]:
    """A chart for each quantity that was measured at several row lengths, with its prediction where there is one."""
    blocks: list[Block] = []
    measured = [row for row in rows if row["values"].get("max_length") and row["verdict"] in ("", "PASS")]
    for key, label in CURVES.items():
        series = [
            charts.Series(name, *zip(*points, strict=True))
            for group, group_rows in collect_groups(measured)
            for name, source in ((group, key), (f"{group}, predicted", PREDICTED.get(key, "")))
            if (points := _list_points(group_rows, source))
        ]
        if any(len(curve.xs) > 1 for curve in series):
            x_label = "tokens of a row (tokens)"
            svg = charts.draw_lines(label, series, x_label, label, x_log=True)
            blocks.append(Chart(svg, label, page.tabulate_lines(series, x_label, label)))
    return blocks


def _list_points(rows: Sequence[Row], key: str) -> list[tuple[float, float]]:
    measured = [row["values"] for row in rows if row["values"].get(key) is not None]
    return sorted((float(values["max_length"]), float(values[key])) for values in measured)


MAX_LISTED = 5
RETRIEVAL_TITLE = "retrieval beside the whole context, the same questions"
RETRIEVAL_NOTE = (
    "Recall: the share of the evidence that is shown whole. Score of the rest: over the questions that are "
    "not answered right with no context. Tokens, seconds and USD are the means per question."
)
WAYS = {"none": "no context", "whole": "whole context", "oracle": "evidence alone"}
LOSS_TITLE = "loss by position, in nats per token"
GROUPS_TITLE = "score by what the files say of a question"
COMPARED_TITLE = "against the other model, question by question"
CHANGE_TITLE = "loss minus that of the other model, document by document"
TOO_LONG_TITLE = "too long: not cut, and not scored"
RULES = {
    "ruler": "RULER's rule: the mean of its 13 tasks exceeds 85.6 %",
    "own": "the model's own: the mean exceeds 85 % of that at the shortest length",
}


def format_quality(findings: Findings) -> str:
    """The table of scores, the mean, effective lengths, the comparison, and what was left out."""
    parts = [format_table(*_make_score_table(findings))] if findings["scores"] else []
    if findings.get("groups"):
        parts.append(f"{GROUPS_TITLE}\n" + format_table(*_make_group_table(findings["groups"])))
    if findings.get("losses"):
        parts.append(f"{LOSS_TITLE}\n" + format_table(*_make_loss_table(findings["losses"])))
    if findings.get("retrieval"):
        parts.append(f"{RETRIEVAL_TITLE}\n" + format_table(*_make_retrieval_table(findings["retrieval"])))
    if findings.get("lm_eval"):
        parts.append("lm-eval's tasks\n" + format_table(*_make_harness_table(findings)))
    parts.append("\n".join(_list_facts(findings)))
    if findings.get("differences"):
        parts.append(f"{COMPARED_TITLE}\n" + format_table(*_make_difference_table(findings)))
    if findings.get("loss_differences"):
        parts.append(f"{CHANGE_TITLE}\n" + format_table(*_make_loss_table(findings["loss_differences"], sign="+")))
    notes = _list_notes(findings)
    if notes:
        parts.append("\n".join(f"note: {note}" for note in notes))
    return "\n\n".join(parts)


def format_predictions(predictions: Sequence[Mapping[str, Any]], name: str, notes: Sequence[str] = ()) -> str:
    header = ["length", "cache per rank", "with activations", "weights per rank", "all weights"]
    header += ["operations of a prefill per rank", "prefill", "later token", "questions", "all of them, at most"]
    header += ["has room"] if any(each["room"] != "unknown" for each in predictions) else []
    header += ["cost, at most"] if any(each["usd"] is not None for each in predictions) else []
    cells = [
        [
            format_binary(each["length"]),
            format_bytes(each["cache_bytes"]),
            NO_VALUE if each["prefill_bytes"] is None else format_bytes(each["prefill_bytes"]),
            format_bytes(each["weight_bytes"]) + (", on the host" if each["weights_are_on"] == "host" else ""),
            format_bytes(each["gathered_weight_bytes"]),
            f"{each['prefill_flops'] / 1e12:,.1f} TFLOP",
            *(
                "unknown" if each[key] is None else format_seconds(each[key])
                for key in ("prefill_seconds", "token_seconds")
            ),
            format_number(each["questions"]),
            "unknown" if each["questions_seconds"] is None else format_seconds(each["questions_seconds"]),
            *([each["room"]] if "has room" in header else []),
            *([NO_VALUE if each["usd"] is None else format_usd(each["usd"])] if "cost, at most" in header else []),
        ]
        for each in predictions
    ]
    return "\n".join([name, format_table(header, cells), *(f"note: {note}" for note in notes)])


def _format_percent(value: float | None) -> str:
    return NO_VALUE if value is None else f"{100 * value:.1f} %"


def _make_score_table(findings: Findings) -> tuple[list[str], list[list[str]]]:
    has_names = any(row.get("names") is not None for row in findings["scores"])
    header = ["task", "length", "n", "score", "95 % interval", "teacher-forced", "empty"]
    header += ["right tool"] if has_names else []
    cells = [
        [
            row["task"], format_binary(row["length"]), str(row["n"]), _format_percent(row["score"]),
            _format_ends(row), _format_percent(row["teacher_forced"]),
            str(row["empty"] or ""), *([_format_percent(row.get("names"))] if has_names else []),
        ]
        for row in findings["scores"]
    ]  # fmt: skip
    return header, cells


def _format_ends(row: Mapping[str, Any]) -> str:
    return f"{100 * row['low']:.0f}-{100 * row['high']:.0f}"


def _make_group_table(groups: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Of what files say of their questions, such as the difficulty."""
    header = ["task", "by", "group", "n", "score", "95 % interval"]
    cells = [
        [row["task"], row["by"], row["group"], str(row["n"]), _format_percent(row["score"]), _format_ends(row)]
        for row in groups
    ]
    return header, cells


def _make_difference_table(findings: Findings) -> tuple[list[str], list[list[str]]]:
    """By task and length; the last row is that of all questions."""
    header = ["task", "length", "n", "the other model", "this model", "difference", "95 % interval"]
    whole = findings.get("difference")
    rows = [(row["task"], format_binary(row["length"]), row) for row in findings["differences"]]
    rows += [("all", "all", whole)] if whole else []
    cells = [
        [
            task, length, str(row["n"]), _format_percent(row.get("before")), _format_percent(row.get("after")),
            f"{100 * row['difference']:+.1f}",
            f"{100 * row['low']:+.0f} to {100 * row['high']:+.0f}",
        ]
        for task, length, row in rows
    ]  # fmt: skip
    return header, cells


def _make_retrieval_table(retrieval: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    header = [
        "task", "length", "context", "n", "score", "95 % interval", "to the whole", "95 % interval", "recall",
        "score of the rest", "tokens", "seconds", "USD",
    ]  # fmt: skip
    cells = [
        [
            row["task"], format_binary(row["length"]) if row["length"] else "all", _name_way(row), str(row["n"]),
            _format_percent(row["score"]), f"{100 * row['low']:.0f} to {100 * row['high']:.0f} %",
            *_format_change(row), _format_percent(row["recall"]), _format_percent(row["without"]),
            f"{row['prompt_tokens']:,.0f}", f"{row['seconds']:.2f}",
            NO_VALUE if row["usd"] is None else f"{row['usd']:.5f}",
        ]
        for row in retrieval["rows"]
    ]  # fmt: skip
    return header, cells


def _make_harness_table(findings: Findings) -> tuple[list[str], list[list[str]]]:
    """With the other model's values beside, where there is one."""
    old = {(row["task"], row["metric"], row["filter"]): row for row in findings.get("against", {}).get("lm_eval", ())}
    header = ["task", "metric", "filter", "n", "value", "standard error", *(["other model"] if old else [])]
    cells = []
    for row in findings["lm_eval"]:
        other = old.get((row["task"], row["metric"], row["filter"]))
        cells.append(
            [
                row["task"], row["metric"], row["filter"], NO_VALUE if row["n"] is None else str(row["n"]),
                format_number(row["value"]), NO_VALUE if row["stderr"] is None else format_number(row["stderr"]),
                *([NO_VALUE if other is None else format_number(other["value"])] if old else []),
            ]
        )  # fmt: skip
    return header, cells


def _format_change(row: Mapping[str, Any]) -> tuple[str, str]:
    if row["difference"] is None:
        return NO_VALUE, NO_VALUE
    ends = (row["difference_low"], row["difference_high"])
    return f"{100 * row['difference']:+.1f}", " to ".join(f"{100 * end:+.0f}" for end in ends)


def _name_way(row: Mapping[str, Any]) -> str:
    if row["chunk_tokens"] is None:
        return WAYS[row["way"]]
    return f"BM25, {format_binary(row['chunk_tokens'])} of {format_binary(row['budget_tokens'])}"


def _make_loss_table(rows: Sequence[Mapping[str, Any]], sign: str = "") -> tuple[list[str], list[list[str]]]:
    header = ["length", "positions", "documents", "loss" if not sign else "difference", "95 % interval"]
    cells = [
        [
            format_binary(row["length"]), _name_positions(row), str(row["n"]), f"{row['loss']:{sign}.4f}",
            NO_VALUE if row["low"] is None else f"{row['low']:{sign}.4f} to {row['high']:{sign}.4f}",
        ]
        for row in rows
    ]  # fmt: skip
    return header, cells


def _name_positions(row: Mapping[str, Any]) -> str:
    return "all" if _is_whole(row) else f"{format_binary(row['from'])} to {format_binary(row['to'])}"


def _is_whole(row: Mapping[str, Any]) -> bool:
    return bool((row["from"], row["to"]) == (0, row["length"]))


def _draw_losses(title: str, rows: Sequence[Mapping[str, Any]], y_label: str) -> list[Block]:
    """A curve for each length, over the ends of the buckets, where there are several."""
    curves: dict[int, list[tuple[float, float]]] = {}
    for row in rows:
        if not _is_whole(row):
            curves.setdefault(row["length"], []).append((float(row["to"]), row["loss"]))
    series = [
        charts.Series(f"{format_binary(length)} tokens", [x for x, _ in own], [y for _, y in own])
        for length, own in curves.items()
    ]
    if not series:
        return []
    svg = charts.draw_lines(title, series, "position", y_label, x_log=True)
    note = "Each point is the mean over documents, at the end of its bucket of positions."
    return [Chart(svg, note, page.tabulate_lines(series, "position", y_label))]


def _list_facts(findings: Findings) -> list[str]:
    lines = [
        f"mean of {format_count(row['tasks'], 'task')} at {format_binary(row['length'])}: "
        f"{_format_percent(row['score'])} ({_format_ends(row)})"
        for row in findings["mean"]
    ]
    if len(findings["mean"]) > 1:
        lines.append(f"mean over lengths, longer ones weigh more: {_format_percent(findings['weighted_mean'])}")
    lines += _list_effective_lengths(findings)
    cost = f", {format_usd(findings['usd'])}" if findings.get("usd") else ""
    place = f"on {format_count(findings.get('num_ranks', 0), 'rank')}"
    if served := findings.get("endpoint"):
        place = f"at {served['address']}, {format_count(served['num_requests'], 'request')} at once"
    lines.append(f"{format_seconds(findings['seconds'])} {place}{cost}")
    return lines


def _list_effective_lengths(findings: Mapping[str, Any]) -> list[str]:
    found = (findings.get("effective_length") or {}).items()
    shown = [(RULES[rule], format_binary(length) if length else "none of these lengths") for rule, length in found]
    return [f"effective length {length} ({rule})" for rule, length in shown]


def _list_notes(findings: Findings) -> list[str]:
    notes = list(findings.get("notes", ()))
    known = (findings.get("retrieval") or {}).get("answered_without_context")
    if known:
        named = ", ".join(known[:MAX_LISTED]) + (
            f" and {len(known) - MAX_LISTED} more" if len(known) > MAX_LISTED else ""
        )
        notes.append(f"{format_count(len(known), 'question')} answered right with no context: {named}")
    too_long = findings.get("too_long") or []
    if too_long:
        named = ", ".join(
            _name_question(each) + (f" ({each['tokens']:,} tokens)" if each["tokens"] else "")
            for each in too_long[:MAX_LISTED]
        )
        more = f" and {len(too_long) - MAX_LISTED} more, in quality.json" if len(too_long) > MAX_LISTED else ""
        notes.append(f"{format_count(len(too_long), 'question')} too long, not cut and not scored: {named}{more}")
    if findings["scores"] and not findings["has_all_ruler_tasks"]:
        notes.append("fewer than RULER's 13 tasks: the mean is not compared with RULER's 85.6 %")
    return notes


def _name_question(question: Mapping[str, Any]) -> str:
    """With the name that its file gives it."""
    own = question.get("file_id")
    return str(question["id"]) if own is None else f"{question['id']}, {own}"


def make_quality_page(findings: Findings) -> str:
    sections = [PageSection("Scores", make_quality_blocks(findings))]
    if compared := _make_comparison(findings):
        sections.append(PageSection("Compared", compared))
    return page.make_page(f"Answers of {findings['subject']}", sections)


def _make_comparison(findings: Findings) -> list[Block]:
    compared: list[Block] = []
    other = findings.get("against") or {}
    if findings.get("differences"):
        compared += _draw_means([("this model", findings["mean"]), (_name_other(other), other.get("mean") or ())])
        compared += _draw_map(other, f"The other model, {_name_other(other)}: score by length and depth")
        compared.append(Table(*_make_difference_table(findings), caption=COMPARED_TITLE))
        compared.append(Facts([("the other model", line) for line in _list_effective_lengths(other)]))
    if changes := findings.get("loss_differences"):
        compared += _draw_losses(CHANGE_TITLE.capitalize(), changes, "nats per token")
        compared.append(Table(*_make_loss_table(changes, sign="+"), caption=CHANGE_TITLE))
    return compared


def make_evaluation_blocks(evaluations: Sequence[Findings]) -> list[Block]:
    """For a run's report: what was found on its model and on its checkpoints, one after another."""
    blocks: list[Block] = []
    for findings in evaluations:
        blocks.append(Facts([("model", str(findings["subject"]))]))
        blocks += make_quality_blocks(findings)
        blocks += _make_comparison(findings)
    return blocks


def _name_other(other: Mapping[str, Any]) -> str:
    return str(other.get("subject") or "the other model")


def _draw_means(means: Sequence[tuple[str, Sequence[Mapping[str, Any]]]]) -> list[Block]:
    """Mean scores by length, a line for each model; nothing where there is one length."""
    lines = [(name, rows) for name, rows in means if len(rows) > 1]
    series = [charts.Series(name, [float(row["length"]) for row in rows], [row["score"] for row in rows])
              for name, rows in lines]  # fmt: skip
    if not series:
        return []
    svg = charts.draw_lines("Score by length", series, "tokens", "score", x_log=True)
    return [Chart(svg, "", page.tabulate_lines(series, "tokens", "score"))]


def _draw_map(findings: Mapping[str, Any], title: str) -> list[Block]:
    if not findings.get("heat_map"):
        return []
    cells = {(row["length"], row["depth"]): row["score"] for row in findings["heat_map"]}
    rows = [
        [format_binary(each["length"]), f"{100 * each['depth']:.0f} %", str(each["n"]), _format_percent(each["score"])]
        for each in findings["heat_map"]
    ]
    note = "Depth: where the evidence begins, as a share of the prompt's tokens."
    return [Chart(draw_heat_map(title, cells, format_binary), note, Table(["length", "depth", "n", "score"], rows))]


def make_quality_blocks(findings: Findings) -> list[Block]:
    """The blocks of a page's section, here and in a run's report."""
    blocks: list[Block] = _draw_means([("mean", findings["mean"])])
    blocks += _draw_map(findings, "Score by length and depth of the evidence")
    if findings["scores"]:
        blocks.append(Table(*_make_score_table(findings)))
    if groups := findings.get("groups"):
        blocks.append(Table(*_make_group_table(groups), caption=GROUPS_TITLE))
    if retrieval := findings.get("retrieval"):
        blocks.append(Table(*_make_retrieval_table(retrieval), caption=RETRIEVAL_TITLE))
        blocks.append(Note(RETRIEVAL_NOTE))
    if findings.get("lm_eval"):
        blocks.append(Table(*_make_harness_table(findings), caption="lm-eval's tasks"))
    if losses := findings.get("losses"):
        blocks += _draw_losses("Loss by position", losses, "nats per token")
        blocks.append(Table(*_make_loss_table(losses), caption=LOSS_TITLE))
    if too_long := findings.get("too_long"):
        listed = [[_name_question(each), f"{each['tokens']:,}"] for each in too_long]
        blocks.append(Table(["question", "tokens with its answer"], listed, caption=TOO_LONG_TITLE))
    blocks.append(Facts([("result", line) for line in _list_facts(findings)]))
    blocks += [Note(note) for note in _list_notes(findings)]
    return blocks
