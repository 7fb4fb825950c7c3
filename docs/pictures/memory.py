"""Memory of the 128K recipe by phase, and memory against length by layout: the tool's predictions."""

from __future__ import annotations

import html
import json
import math
import re
import tempfile
from functools import cache
from pathlib import Path

from canvas import (
    MARGIN,
    ROOT,
    WIDTH,
    Theme,
    draw_box,
    draw_heading,
    place_chart,
    read_description,
    run_tool,
    wrap_svg,
    write,
)

from ulysses_cli.plan.hardware import GIB
from ulysses_cli.report.page.drawing import make_axis
from ulysses_cli.report.quantities import format_quantity

RECIPE = "llama-3.1-8b-128k-8gpu"
GROUPS = {  # lines of the ledger, from the bottom of a bar up
    "CUDA, NCCL, other": (),  # what no other group names
    "weights": ("parameters", "parameters_persistent", "parameters_gathered"),
    "gradients": ("gradients", "reduce_bucket"),
    "optimizer states": ("optimizer_master", "optimizer_adam", "engine_transients"),
    "tensors of layers": (
        *("saved_layer_inputs", "attention", "mlp", "input_layernorm", "post_attention_layernorm", "residual"),
        *("embed_tokens", "rotary_emb", "norm"),
    ),
    "logits and loss": ("logits",),
}
PLOT_LEFT, PLOT_RIGHT, PLOT_TOP, PLOT_BOTTOM = 78, 556, 96, 376
BAR_WIDTH = 48
LEGEND_LEFT = 588
CHART_WIDTH, CHART_TOP = 590, 52
NOTES = (
    "sp: GPUs that share each row. dp: groups of such GPUs, each with rows of its own. Every lever: all settings that",
    "save memory are on. A curve falls where a run of that length would turn such a setting on.",
)
TITLE = re.compile(r'<text[^>]*class="title"[^>]*>[^<]*</text>')


def draw_memory_by_phase(theme: Theme) -> str:
    facts = json.loads(_run_estimate("--format", "json"))["results"][0]
    stacks = {phase.replace("_", " "): _sum_groups(lines) for phase, lines in facts["phases"].items()}
    totals = {phase: math.fsum(groups.values()) for phase, groups in stacks.items()}
    room, peak = facts["gpu_capacity_bytes"], facts["peak_phase"].replace("_", " ")
    axis = make_axis([room, *totals.values()], PLOT_BOTTOM, PLOT_TOP, "bytes", from_zero=True, padding=0.04)
    limit = round(axis.place(room), 1)
    heading = f"Memory by phase, {facts['row_tokens']:,} tokens per row"
    below = _describe_source(facts)
    parts = draw_heading(theme, heading, below)
    for value, text in axis.ticks:
        height, colour = axis.place(value), theme["muted" if value == 0 else "grid"]
        if abs(height - limit) > 4:  # else the two lines touch
            parts.append(f'<path d="M{PLOT_LEFT} {height:.1f}H{PLOT_RIGHT}" stroke="{colour}"/>')
        parts.append(write(theme, PLOT_LEFT - 8, round(height + 4, 1), text, 12, "muted", anchor="end"))
    parts.append(
        f'<path d="M{PLOT_LEFT} {limit}H{PLOT_RIGHT}" stroke="{theme["ink"]}" stroke-width="1.25" '
        'stroke-dasharray="4 3"/>'
    )
    parts.append(write(theme, PLOT_RIGHT, limit - 7, f"one GPU has {_format(room)}", 12, anchor="end"))
    band = (PLOT_RIGHT - PLOT_LEFT) / len(stacks)
    for index, (phase, groups) in enumerate(stacks.items()):
        middle = PLOT_LEFT + (index + 0.5) * band
        base = 0.0
        for colour, size in zip(theme.series, groups.values(), strict=False):
            top, bottom = axis.place(base + size), axis.place(base)
            if round(bottom - top, 1):
                parts.append(
                    draw_box(
                        *(round(value, 1) for value in (middle - BAR_WIDTH / 2, top, BAR_WIDTH, bottom - top)),
                        colour,
                        theme["surface"],
                    )
                )
            base += size
        total = _format(totals[phase])
        parts.append(write(theme, middle, round(axis.place(base) - 7, 1), total, 12, bold=True, anchor="middle"))
        for line, word in enumerate(phase.split()):
            parts.append(write(theme, middle, PLOT_BOTTOM + 19 + 15 * line, word, 12.5, anchor="middle"))
    parts += _draw_legend(theme, stacks[peak], f"at the peak, in {peak} (GiB)")
    phases = "; ".join(
        f"{phase} {_format(totals[phase])}, most of it {max(groups, key=lambda name: groups[name])}"
        for phase, groups in stacks.items()
    )
    description = f"{below}. Stacked bars of the memory of one GPU by phase: {phases}. One GPU has {_format(room)}."
    return wrap_svg(theme, PLOT_BOTTOM + 54, heading, description, parts)


def draw_memory_against_length(theme: Theme) -> str:
    sweep = json.loads(_run_estimate("--sweep", "--format", "json"))["sweeps"][0]
    page = _make_sweep_page()
    chart = page[page.index("<svg ") : page.index("</svg>") + len("</svg>")]
    lengths = sweep["lengths"]
    longest = {
        name: max(length for length, is_fit in zip(lengths, fits, strict=True) if is_fit)
        for name, fits in sweep["fits"].items()
    }
    heading = "Memory against length"
    below = _describe_source(json.loads(_run_estimate("--format", "json"))["results"][0])
    parts = [
        *draw_heading(theme, heading, below),
        place_chart(theme, TITLE.sub("", chart), MARGIN - 4, CHART_TOP, CHART_WIDTH),
        write(theme, LEGEND_LEFT + 42, 98, "longest row that fits", 12, bold=True),
    ]
    y = 126
    for colour, (name, length) in zip(theme.series, longest.items(), strict=False):
        more = " or more" if length == lengths[-1] else ""
        parts.append(write(theme, LEGEND_LEFT + 42, y, name, 12.5, colour))
        parts.append(write(theme, LEGEND_LEFT + 42, y + 21, f"{length:,}", 18, bold=True))
        parts.append(write(theme, LEGEND_LEFT + 42, y + 37, f"tokens{more}", 11.5, "muted"))
        y += 59
    for line, text in enumerate(NOTES):
        parts.append(write(theme, MARGIN, PLOT_BOTTOM + 60 + 18 * line, text, 12, "muted"))
    fits = "; ".join(f"{name}: {length:,}" for name, length in longest.items())
    description = (
        f"{below}. {html.unescape(read_description(chart))} The longest row that fits, in tokens, of powers of two up"
        f" to {lengths[-1]:,}: {fits}. {' '.join(NOTES)}"
    )
    return wrap_svg(theme, PLOT_BOTTOM + 98, heading, description, parts)


def _sum_groups(lines: dict[str, int]) -> dict[str, int]:
    rest = next(iter(GROUPS))
    groups = dict.fromkeys(GROUPS, 0)
    names = {line: group for group, members in GROUPS.items() for line in members}
    for line, size in lines.items():
        groups[names.get(line, rest)] += size
    return groups


def _draw_legend(theme: Theme, groups: dict[str, int], caption: str) -> list[str]:
    """From the top of a bar down, with the sizes of the fullest one."""
    right, y = WIDTH - MARGIN, PLOT_TOP + 30
    parts = [
        write(theme, LEGEND_LEFT, y, caption, 12, "muted"),
    ]
    for index, (name, size) in reversed(list(enumerate(groups.items()))):
        y += 27
        parts += [
            draw_box(LEGEND_LEFT, y - 10, 12, 12, theme.series[index], rx=2),
            write(theme, LEGEND_LEFT + 20, y, name, 12.5),
            write(theme, right, y, f"{size / GIB:.2f}", 12.5, bold=True, anchor="end"),
        ]
    parts.append(f'<path d="M{LEGEND_LEFT} {y + 12}H{right}" stroke="{theme["grid"]}"/>')
    total = f"{sum(groups.values()) / GIB:.2f}"
    return [
        *parts,
        write(theme, LEGEND_LEFT + 20, y + 31, "together", 12.5),
        write(theme, right, y + 31, total, 12.5, bold=True, anchor="end"),
    ]


def _describe_source(facts: dict) -> str:
    return f"Recipe {RECIPE} on {facts['num_processes']} x {facts['gpu_name']}, predicted by ulysses estimate-memory"


@cache
def _run_estimate(*options: str) -> str:
    return run_tool("estimate-memory", str(ROOT / "recipes" / f"{RECIPE}.yaml"), *options)


@cache
def _make_sweep_page() -> str:
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "sweep.html")
        _run_estimate("--sweep", "--html", str(page))
        return page.read_text()


def _format(size: float) -> str:
    return format_quantity(size, "bytes")
