"""Formats the report of prepared data as text and as one HTML page with charts: every document that was read, and how
many of its tokens are trained on. Computes nothing that data/ has not counted."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from ulysses_cli.plan.units import format_count
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
from ulysses_cli.report.printing import clean_text, format_table
from ulysses_cli.report.quantities import format_binary, format_share

BAR_CELLS = 40
LINE_CHARS = 100
SHOWN_BAD = 20
LOST = {"thought": "thoughts", "calls": "tool calls", "text": "the text"}
TURNS = {
    "masked by a field": "not trained, as a field of the message says",
    "masked by choice": "not trained, as data.train_on_turns says",
    "rewritten": "of which the template shows less inside of the chat than when the model writes them",
    "other prompt": "behind another prompt than the model gets; data.on_rewritten_turns: split shows them as it does",
    "masked as rewritten": "not trained, as the template shows less of them than the model writes",
    "masked behind another prompt": "not trained, as they stand behind another prompt than the model gets",
    "endless": "of which the template shows no end that is a token: the model does not learn to stop there",
    "unread variables": "chats with variables that the template never reads",
    "unread text": "chats with a column `text`, which is not read",
}
Report = Mapping[str, Any]


def format_report(report: Report) -> str:
    """The report as paragraphs for a terminal."""
    parts = [
        _format_head(report),
        _format_sources(report),
        _format_mixture(report),
        *(_format_split(report, split) for split in ("train", "eval") if report["splits"][split]["num_rows"]),
        _format_histogram(report),
        _format_lengths(report),
        *map(format_sample, report["samples"]),
        format_bad(report["sources"]),
        format_lost(report["sources"]),
        format_turns(report),
        _format_notes(report["notes"]),
    ]
    return "\n\n".join(part for part in parts if part)


def _format_head(report: Report) -> str:
    layout, train = report["layout"], report["splits"]["train"]
    padding = f"{format_share(layout['padding_share'])} of the tokens is padding"
    steps = f"{format_count(layout['steps_per_epoch'], 'step')} of {format_count(layout['rows_per_step'], 'row')}"
    supervised = format_share(train["num_targets"] / train["num_tokens"])
    lines = [
        ("prepared", report["path"]),
        ("rows", f"of {report['max_length']:,} tokens, packing {report['packing']}; {format_attention(report)}"),
        ("", f"{format_share(train['efficiency'])} full; {padding} to a multiple of {layout['pad_to_multiple_of']:,}"),
        ("epoch", f"{format_count(train['num_rows'], 'row')} in {steps}, {train['num_tokens']:,} tokens"),
        ("targets", f"{format_count(train['num_targets'], 'token')}, {supervised}"),
        ("balance", format_balance(layout)),
    ]
    return "\n".join(f"{name:<9} {value}" for name, value in lines)


def format_attention(report: Report) -> str:
    return f"attention {'looks across documents' if report['attend_across_documents'] else 'keeps documents apart'}"


def format_balance(layout: Mapping[str, Any]) -> str:
    """A sentence on how evenly the predicted work is shared between groups."""
    if layout["num_groups"] == 1:
        return "one group works on every row"
    if layout["work_above_mean"] is None:
        return f"not one full step for {format_count(layout['num_groups'], 'group')}"
    above, waiting = format_share(layout["work_above_mean"]), format_share(layout["waiting_share"])
    steps = format_count(layout["sampled_steps"], "step")
    busiest = f"the busiest of {format_count(layout['num_groups'], 'group')} {above} above the mean"
    return f"predicted over {steps}: {busiest}, {waiting} of the time spent waiting"


def tabulate_sources(report: Report) -> tuple[Sequence[str], list[tuple[str, ...]]]:
    """The table of sources: its header and its rows."""
    rows: list[tuple[str, ...]] = [
        (
            source["key"].removeprefix("data."),
            source["name"],
            source["kind"],
            f"{source['num_documents']:,}",
            f"{source['num_tokens']:,}",
            format_share(source["num_targets"] / max(1, source["num_tokens"])),
            f"{source['weight']:g}",
            _format_left_out(source),
        )
        for source in report["sources"]
    ]
    return ("source", "name", "type", "documents", "tokens", "supervised", "weight", "not read"), rows


def _format_sources(report: Report) -> str:
    return format_table(*tabulate_sources(report))


def tabulate_mixture(report: Report) -> tuple[Sequence[str], list[tuple[str, ...]]]:
    """Tokens of an epoch by source and by the length of their documents: the table's header and its rows."""
    found = report["splits"]["train"].get("bands", {"up_to": [0], "tokens": []})  # none in an earlier version's rows
    bounds, bands = found["up_to"], found["tokens"]
    names = [*(f"to {format_binary(bound)}" for bound in bounds), f"above {format_binary(bounds[-1])}"]
    tokens, shown = [sum(counts) for counts in bands], [at for at in range(len(names)) if any(c[at] for c in bands)]
    rows = [
        (
            source["key"].removeprefix("data."),
            f"{own:,}",
            format_share(own / max(1, sum(tokens))),
            f"{source['weight']:.3g}",
            *(f"{counts[at]:,}" for at in shown),
        )
        for source, counts, own in zip(report["sources"], bands, tokens, strict=False)
    ]
    return ("an epoch", "tokens", "share", "copies", *(names[at] for at in shown)), rows


def _format_mixture(report: Report) -> str:
    head, rows = tabulate_mixture(report)
    return format_table(head, rows) if rows else ""


def _format_left_out(source: Mapping[str, Any]) -> str:
    parts = [format_count(source["num_bad"], "bad row")] if source["num_bad"] else []
    parts += [format_count(source["num_blank"], "blank line")] if source["num_blank"] else []
    parts += [format_count(entry["count"], reason) for reason, entry in source.get("left_out", {}).items()]
    return ", ".join(parts) or "-"


def list_outcomes(counts: Mapping[str, int]) -> list[tuple[str, int, int | None]]:
    """(outcome, documents or pieces, tokens) of one split. None: the tokens are not counted."""
    return [
        ("documents", counts["documents"], counts["tokens"]),
        ("of other lengths, left out", counts.get("other_length_documents", 0), counts.get("other_length_tokens", 0)),
        ("left out by weight or share", counts["left_out_documents"], counts["left_out_tokens"]),
        ("copies by weight or share", counts["copies"] if counts["copies"] != counts["documents"] else 0, None),
        ("split", counts["split_documents"], None),
        ("cuts inside a turn", counts["torn_turns"], None),
        ("truncated, lost", counts["truncated_documents"], counts["truncated_tokens"]),
        ("dropped as too long", counts["dropped_documents"], counts["dropped_tokens"]),
        ("without a target, left out", counts["untrainable_pieces"], counts["untrainable_tokens"]),
        ("pieces kept", counts["kept_pieces"], counts["kept_tokens"]),
    ]


def tabulate_split(report: Report, split: str) -> list[tuple[str, str, str]]:
    """(outcome, count, tokens) of one split's documents, summed over the sources."""
    facts = report["splits"][split]
    counts = {name: sum(source[name] for source in facts["sources"]) for name in facts["sources"][0]}
    rows = [
        (name, f"{count:,}", "" if tokens is None else f"{tokens:,}")
        for name, count, tokens in list_outcomes(counts)
        if count or name in ("documents", "pieces kept")
    ]
    if facts["cut_by_rows"]:
        rows.append(("cuts where a row ends", f"{facts['cut_by_rows']:,}", ""))
    if facts["untrainable_rows"]:
        count, tokens = facts["untrainable_rows"], facts["untrainable_row_tokens"]
        rows.append(("rows without a target, left out", f"{count:,}", f"{tokens:,}"))
    return [*rows, ("rows", f"{facts['num_rows']:,}", f"{facts['num_tokens']:,}")]


def _format_split(report: Report, split: str) -> str:
    return format_table((split, "count", "tokens"), tabulate_split(report, split))


def sum_histogram(report: Report) -> dict[int, int]:
    """The number of training documents by the power of two that bounds their length."""
    totals: dict[int, int] = {}
    for source, bins in zip(report["sources"], report["facts"]["histogram"], strict=True):
        if source["key"].startswith("data.datasets"):
            for entry in bins:
                totals[entry["to"]] = totals.get(entry["to"], 0) + entry["documents"]
    return {to: totals[to] for to in sorted(totals)}


def _format_histogram(report: Report) -> str:
    totals = sum_histogram(report)
    most = max(totals.values(), default=1)
    rows = [(f"to {to:,}", f"{totals[to]:,}", "#" * round(BAR_CELLS * totals[to] / most)) for to in totals]
    return format_table(("length", "documents", format_quantiles(report)), rows)


def format_quantiles(report: Report) -> str:
    quantiles = report["facts"]["quantiles"]
    return f"half of the documents have at most {quantiles['0.5']:,} tokens, the longest has {quantiles['1']:,}"


def _format_lengths(report: Report) -> str:
    rows = [
        (
            f"{entry['max_length']:,}{' (this recipe)' if entry['max_length'] == report['max_length'] else ''}",
            f"{entry['long_documents']:,}",
            format_share(entry["truncated_share"]),
            format_share(entry["efficiency"]),
        )
        for entry in report["facts"]["lengths"]
    ]
    return format_table(("max_length", "longer documents", "lost if truncated", "rows full if split"), rows)


def format_sample(sample: Mapping[str, Any]) -> str:
    """The text of a sample, with its targets in double brackets. What is left out is counted where it is."""
    shown = "".join(text for text, _ in list_parts(sample))
    lines = [f"  | {part}" for line in shown.split("\n") for part in wrap_line(line)]
    return "\n".join([describe_sample(sample), *lines])


def list_parts(sample: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The text of a sample with what each part is: target, answer (said by the assistant, no target) or context."""
    parts = []
    for run in sample["runs"]:
        text = run["text"] + (_format_gap(run["num_left_out"]) + run["end"] if run["num_left_out"] else "")
        if run["is_target"]:
            parts.append((f"[[{text}]]", "target"))
        else:
            parts.append((f"(({text}))", "answer") if run.get("is_answer") else (text, "context"))
        if run["num_skipped"]:
            parts.append((f"\n{_format_gap(run['num_skipped'])}\n", "context"))
    return parts


def describe_sample(sample: Mapping[str, Any]) -> str:
    head = f"sample {clean_text(sample['where'])}, from token {sample['from_token']:,}: {sample['num_targets']:,} of "
    head += f"{format_count(sample['num_tokens'], 'token')} are supervised, shown in [[ ]]"
    if any(run.get("is_answer") and not run["is_target"] for run in sample["runs"]):
        head += "; (( )) is said by the assistant and not supervised"
    return head


def format_row(report: Report) -> str:
    """All that was made of one row."""
    return "\n\n".join(map(format_sample, report["samples"]))


def _format_gap(num_tokens: int) -> str:
    return f" ... {format_count(num_tokens, 'token')} left out ... "


def wrap_line(line: str) -> list[str]:
    """Wraps a line at spaces, or anywhere if it has none. Keeps every character."""
    parts = textwrap.wrap(line, LINE_CHARS, drop_whitespace=False, replace_whitespace=False, expand_tabs=False)
    return parts or [""]


def format_bad(sources: Sequence[Mapping[str, Any]]) -> str:
    """The number of bad rows of each source, and the first of them."""
    lines = []
    for source in sources:
        if source["num_bad"]:
            lines.append(f"{format_count(source['num_bad'], 'bad row')} of {clean_text(source['name'])} left out")
            at = ":" if source["has_lines"] else ", row "
            shown = source["bad"][:SHOWN_BAD]
            lines += [clean_text(f"  {file}{at}{line}: {message}") for file, line, message in shown]
            if source["num_bad"] > SHOWN_BAD:
                lines.append(f"  and {source['num_bad'] - SHOWN_BAD:,} more")
    return "\n".join(lines)


def format_lost(sources: Sequence[Mapping[str, Any]]) -> str:
    """What chat templates do not show of each source, where the recipe allows it, with an example."""
    lines = []
    for source in sources:
        lost = source["lost"]
        if lost["num_turns"]:
            of, counts = clean_text(source["name"]), lost["kinds"]
            lines.append(f"not shown by the chat template, so not trained on, of {of}:")
            lines += [
                f"  {noun} of {format_count(counts[kind], 'turn')}" for kind, noun in LOST.items() if kind in counts
            ]
            file, line, turn, _, words = lost["example"]
            place = f"{file}{':' if source['has_lines'] else ', row '}{line}"
            lines.append(
                clean_text(f"  in {format_count(lost['num_chats'], 'chat')}, such as {place}, turn {turn}: {words}")
            )
    return "\n".join(lines)


def format_turns(report: Report) -> str:
    """What became of the assistant's turns in the chats of each source."""
    lines, shares_prompts = [], report.get("shares_prompts", False)  # none in an earlier version's
    for index, source in enumerate(report["sources"]):
        turns = source["turns"]
        if not turns.get("turns"):
            continue
        said = f"{format_count(turns['turns'], 'turn')} of the assistant in {clean_text(source['name'])}"
        lines.append(f"{said}, {turns['thoughts']:,} with a thought, {turns['calls']:,} with calls")
        if "trained" in turns:
            lines.append(f"  {format_count(turns['trained'], 'turn')} trained")
        lines += [f"  {turns[name]:,} {words}" for name, words in TURNS.items() if turns.get(name)]
        if turns.get("texts", 0) > turns.get("chats", 0):
            held = sum(split["sources"][index]["tokens"] for split in report["splits"].values())
            shared = source["num_tokens"] - held if shares_prompts else 0
            growth = (turns["shown tokens"] - shared) / turns["whole tokens"]
            chats = f"{format_count(turns['chats'], 'chat')} in {turns['texts']:,} texts, {growth:.1f} x the tokens"
            lines.append(
                f"  {chats}, since rows hold what a chat's texts begin with once"
                if shares_prompts
                else f"  {chats}; a template that keeps thoughts, by a switch in data.chat_template_kwargs, avoids that"
            )
    return "\n".join(lines)


def _format_notes(notes: Sequence[str]) -> str:
    return "\n".join(clean_text(f"note: {note}") for note in notes)


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
    texts["turns of the assistant"] = format_turns(report)
    return [Preformatted(text, title) for title, text in texts.items() if text]
