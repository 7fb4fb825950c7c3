"""The two all-to-all exchanges around attention: slices with all heads, the whole row with some heads, and back."""

from __future__ import annotations

import json

from canvas import MARGIN, ROOT, WIDTH, Theme, draw_box, draw_heading, run_tool, wrap_svg, write

RECIPE = "qwen3-4b-64k-4gpu"
CARD_WIDTH, CARD_HEIGHT, CARD_GAP, CARDS_TOP = 176, 104, 10, 146
CELL_WIDTH, CELL_HEIGHT, CELL_GAP = 29, 15, 2
GRID_TOP = 29  # below the card's edge
CARGOES = (("queries, keys,", "and values"), ("attention's", "output"))
LETTERS = "ABCDEFGH"
SPREAD = 3.2  # between lines that end at one edge


def draw_exchange(theme: Theme) -> str:
    facts = _read_facts()
    number, heads = facts["num_processes"], facts["heads"]
    tokens, all_heads = facts["tokens"], heads["num_heads"]
    columns = [MARGIN + index * (WIDTH - 2 * MARGIN - CARD_WIDTH) / 2 for index in range(3)]
    whole, part = f"{tokens['row']:,}", f"{tokens['local']:,}"
    heading = "Two all-to-all exchanges around attention"
    parts = draw_heading(
        theme, heading, f"One row of {whole} tokens on {number} GPUs: {facts['model']['name']}, recipe {RECIPE}"
    )
    slices = ("a slice of the row", f"{part} tokens, all {all_heads} heads")
    texts = [
        ("Before attention", *slices),
        ("Attention", "the whole row", f"{whole} tokens, {heads['local_heads']} heads"),
        ("After attention", *slices),
    ]
    for x, (name, what, sizes) in zip(columns, texts, strict=True):
        parts += [
            write(theme, x, 98, name, 15, bold=True),
            write(theme, x, 117, what, 13),
            write(theme, x, 135, sizes, 12, "muted"),
        ]
    for left, right, cargo in zip(columns, columns[1:], CARGOES, strict=False):
        middle = (left + CARD_WIDTH + right) / 2
        parts += [
            write(theme, middle, 98, "all-to-all →", 13, bold=True, anchor="middle"),
            *(
                write(theme, middle, 114 + 14 * line, text, 11, "muted", anchor="middle")
                for line, text in enumerate(cargo)
            ),
        ]
    parts += [_draw_card(theme, x, rank, number) for x in columns for rank in range(number)]
    parts += _draw_lines(theme, columns[0], columns[1], number, is_back=False)
    parts += _draw_lines(theme, columns[1], columns[2], number, is_back=True)
    for column, x in enumerate(columns):
        for slice_ in range(number):
            for group in range(number):
                parts += _draw_block(theme, x, group if column == 1 else slice_, slice_, group, number)
    bottom = _get_card_top(number) + 14
    notes = (
        "Each grid is the whole row: tokens run to the right, heads run down. Filled blocks are what a GPU holds.",
        f"A letter names a slice. Attention runs on {heads['local_heads']} of {all_heads} query heads and"
        f" {heads['local_kv_heads']} of {heads['num_kv_heads']} key/value heads per GPU, over all tokens.",
    )
    parts += [write(theme, MARGIN, bottom + 18 * line, text, 12, "muted") for line, text in enumerate(notes)]
    description = (
        f"Three columns of {number} GPUs. On the left, before attention, each GPU holds one slice of a row: {part} of"
        f" {whole} tokens, with all {all_heads} heads. An all-to-all of queries, keys and values sends each GPU the"
        f" blocks of its heads from every slice. In the middle, in attention, each GPU holds the whole row of {whole}"
        f" tokens with {heads['local_heads']} of the {all_heads} heads. A second all-to-all sends attention's output"
        " back. On the right, after attention, each GPU holds its slice with all heads again."
    )
    return wrap_svg(theme, bottom + 34, heading, description, parts)


def _read_facts() -> dict:
    answer = run_tool("validate-config", str(ROOT / "recipes" / f"{RECIPE}.yaml"), "--format", "json")
    return json.loads(answer)["plans"][0]


def _get_card_top(rank: int) -> float:
    return CARDS_TOP + rank * (CARD_HEIGHT + CARD_GAP)


def _get_grid(x: float, number: int) -> tuple[float, float]:
    """Left and right edge of the grid of a card at x."""
    width = number * (CELL_WIDTH + CELL_GAP) - CELL_GAP
    return x + (CARD_WIDTH - width) / 2, x + (CARD_WIDTH + width) / 2


def _get_cell_top(rank: int, group: int) -> float:
    return _get_card_top(rank) + GRID_TOP + group * (CELL_HEIGHT + CELL_GAP)


def _draw_card(theme: Theme, x: float, rank: int, number: int) -> str:
    top, (left, right) = _get_card_top(rank), _get_grid(x, number)
    parts = [
        draw_box(x, top, CARD_WIDTH, CARD_HEIGHT, "none", theme["grid"], rx=8),
        write(theme, left, top + 20, f"GPU {rank}", 12, bold=True),
    ]
    if x == MARGIN:
        parts += [
            write(theme, right, top + 20, "tokens →", 10.5, "muted", anchor="end"),
            write(theme, left - 9, top + GRID_TOP + 33, "← heads", 10.5, "muted", anchor="middle", turn=-90),
        ]
    for slice_ in range(number):
        for group in range(number):
            cell = left + slice_ * (CELL_WIDTH + CELL_GAP)
            parts.append(
                draw_box(cell, _get_cell_top(rank, group), CELL_WIDTH, CELL_HEIGHT, theme["grid"], rx=2, opacity=0.45)
            )
    return "".join(parts)


def _draw_block(theme: Theme, x: float, rank: int, slice_: int, group: int, number: int) -> list[str]:
    cell, top = _get_grid(x, number)[0] + slice_ * (CELL_WIDTH + CELL_GAP), _get_cell_top(rank, group)
    return [
        draw_box(cell, top, CELL_WIDTH, CELL_HEIGHT, theme.series[slice_], rx=2),
        write(
            theme, cell + CELL_WIDTH / 2, top + 11.3, LETTERS[slice_], 10.5, theme.on_series, bold=True, anchor="middle"
        ),
    ]


def _draw_lines(theme: Theme, left: float, right: float, number: int, *, is_back: bool) -> list[str]:
    """One line a block. It joins the block's heads on the GPU of its slice to those heads on the GPU that has them."""
    start, end = _get_grid(left, number)[1] + 4, _get_grid(right, number)[0] - 16
    lines = []
    for slice_ in range(number):
        for group in range(number):
            at_slice = _get_cell_top(slice_, group) + CELL_HEIGHT / 2
            at_heads = _get_cell_top(group, group) + CELL_HEIGHT / 2 + (slice_ - (number - 1) / 2) * SPREAD
            first, last = (at_heads, at_slice) if is_back else (at_slice, at_heads)
            bend = (end - start) * 0.5
            lines.append(
                f'<path d="M{start:g} {first:g}C{start + bend:g} {first:g} {end - bend:g} {last:g} {end:g} {last:g}" '
                f'fill="none" stroke="{theme.series[slice_]}" stroke-width="1.5" opacity="0.85"/>'
            )
            lines.append(f'<path d="M{end + 5:g} {last:g}l-6 -2.6v5.2z" fill="{theme.series[slice_]}"/>')
    return lines
