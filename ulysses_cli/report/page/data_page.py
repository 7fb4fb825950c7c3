"""Makes the report of prepared data as one HTML page: the content of data_report.py, with charts. Computes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ulysses_cli.plan.nouns import format_count
from ulysses_cli.report.data_report import (
    describe_sample,
    format_attention,
    format_bad,
    format_balance,
    format_lost,
    format_quantiles,
    format_turns,
    list_parts,
    sum_histogram,
    tabulate_mixture,
    tabulate_sources,
    tabulate_split,
)
from ulysses_cli.report.page.charts import Mark, Series, draw_bars, draw_lines
from ulysses_cli.report.page.page import (
    Chart,
    Facts,
    Figures,
    Note,
    PageSection,
    Preformatted,
    Table,
    make_page,
    tabulate_lines,
)
from ulysses_cli.report.quantities import format_binary, format_share

Report = Mapping[str, Any]


def make_data_page(report: Report) -> str:
    mixture = tabulate_mixture(report)
    sections = [
        PageSection("Training rows", _describe_rows(report)),
        PageSection("Document lengths", [_draw_lengths(report)]),
        PageSection("Other row lengths", [_draw_choices(report)]),
        PageSection("Sources", [Table(*tabulate_sources(report)), *_list_bad(report)]),
        *([PageSection("Tokens of an epoch by source and length", [Table(*mixture)])] if mixture[1] else ()),
        *(
            PageSection(f"Documents kept, cut and left out: {split}", [Table((split, "count", "tokens"), rows)])
            for split in ("train", "eval")
            if report["splits"][split]["num_rows"] and (rows := tabulate_split(report, split))
        ),
        PageSection(
            "Samples and their targets",
            [Preformatted(f"{describe_sample(each)}\n\n", parts=list_parts(each)) for each in report["samples"]],
        ),
    ]
    return make_page("Prepared data", sections, report["path"])


def _describe_rows(report: Report) -> Sequence[Figures | Facts | Note]:
    train, layout = report["splits"]["train"], report["layout"]
    per_step = format_count(layout["rows_per_step"], "row")
    figures = Figures(
        [
            ("tokens per epoch", f"{train['num_tokens']:,}", format_count(train["num_rows"], "row")),
            ("targets", format_share(train["num_targets"] / train["num_tokens"]), "of the tokens"),
            ("rows full", format_share(train["efficiency"]), f"packing {report['packing']}"),
            (
                "steps per epoch",
                f"{layout['steps_per_epoch']:,}",
                f"{per_step} each",
            ),
        ]
    )

    facts = Facts(
        [
            ("row", f"{report['max_length']:,} tokens; {format_attention(report)}"),
            ("padding", f"{format_share(layout['padding_share'])} to a multiple of {layout['pad_to_multiple_of']:,}"),
            ("balance", format_balance(layout)),
        ]
    )
    return [figures, facts, *(Note(note, is_warning=True) for note in report["notes"])]


def _draw_lengths(report: Report) -> Chart:
    totals = sum_histogram(report)
    labels = [f"to {format_binary(to)}" for to in totals]
    counts = list(totals.values())
    data = Table(("length", "documents"), [(label, f"{n:,}") for label, n in zip(labels, counts, strict=True)])
    return Chart(
        draw_bars("Documents by length in tokens", labels, counts, "documents"), format_quantiles(report), data
    )


def _draw_choices(report: Report) -> Chart:
    entries = report["facts"]["lengths"]
    lengths = [entry["max_length"] for entry in entries]
    series = [
        Series("truncated", lengths, [entry["truncated_share"] for entry in entries]),
        Series("rows full", lengths, [entry["efficiency"] for entry in entries]),
    ]
    x_label, y_label = "max_length (tokens)", "of the tokens (share)"
    marks = [Mark(report["max_length"], "this recipe", "x")]
    title = "Tokens lost by truncation, rows full after splitting"
    svg = draw_lines(title, series, x_label, y_label, x_log=True, marks=marks)
    return Chart(svg, "", tabulate_lines(series, x_label, y_label))


def _list_bad(report: Report) -> list[Preformatted]:
    texts = {"bad rows": format_bad(report["sources"]), "not shown": format_lost(report["sources"])}
    texts["turns of the assistant"] = format_turns(report["sources"])
    return [Preformatted(text, title) for title, text in texts.items() if text]
