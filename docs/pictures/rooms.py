"""The two halves of the code and their rooms, drawn from the rules that `make lint` holds (pyproject.toml).

Where a room stands is chosen here and checked: a picture in which an import leads upwards, or from the light half to
the heavy one, is an error.
"""

from __future__ import annotations

from canvas import MARGIN, MONO_ADVANCE, WIDTH, Theme, draw_box, draw_heading, wrap_svg, wrap_words, write
from support.house import HEAVY, LIGHT, MAY_IMPORT, PACKAGE

FILES = ("validate", "hub", "hardware_table", "shipped")
ENTRY = ("cli", "api", "__main__")
ROWS = {
    **{"commands": 0, "report": 1, "run": 2, "evaluate": 2, "readers": 3},
    **{"prove": 0, "train": 1, "data": 2},
}
BASE = "plan"
PURPOSES = {
    "plan": "what can be known without a GPU: pure functions, values in and values out",
    "commands": "one file per command: parse, call, report, exit code",
    "report": "text, JSON and HTML; the only room that prints",
    "run": "a run outside its ranks: its folder, starting processes and machines, this host",
    "evaluate": "tasks from a seed, scorers, statistics",
    "readers": "files of unknown origin as rows, in bounded time and memory",
    "data": "documents to rows of tokens, with transformers and datasets, without torch",
    "train": "one rank of a run, from start-up to teardown",
    "prove": "runs that prove a claim: parity, speed, a healthy machine",
}
TOP, GAP, PAD = 126, 12, 12
LIGHT_WIDTH, HEAVY_LEFT = 384, 452
TEXT_STEP, CHIP_STEP, IMPORT_STEP = 16, 23, 14
FILES_HEIGHT = 46


def draw_rooms(theme: Theme) -> str:
    heavy = sorted(set(MAY_IMPORT) - set(LIGHT) - set(FILES) - set(ENTRY))
    _check(heavy)
    heading = "The two halves and their rooms"
    parts = draw_heading(
        theme, heading, "A room imports only rooms below it, and the light half never imports the heavy one"
    )
    light_colour, heavy_colour = theme.series[0], theme.series[1]
    heavy_width = WIDTH - MARGIN - HEAVY_LEFT
    parts += [
        write(theme, MARGIN, 98, "Light", 15, light_colour, bold=True),
        write(theme, MARGIN, 116, "starts at once; imports none of the libraries on the right", 12, "muted"),
        write(theme, HEAVY_LEFT, 98, "Heavy", 15, heavy_colour, bold=True),
        write(theme, HEAVY_LEFT, 116, f"may import {', '.join(_sort_heavy()[:3])}, …", 12, "muted"),
    ]
    places = {name: (HEAVY_LEFT, heavy_width) if name in heavy else _place_light(name) for name in ROWS}
    needed = [max(_measure_room(name, places[name][1]) for name in ROWS if ROWS[name] == row) for row in range(4)]
    tops = [TOP + sum(needed[:row]) + row * GAP for row in range(len(needed))]
    for name, row in ROWS.items():
        tint = heavy_colour if name in heavy else light_colour
        is_tall = name in heavy and row == 2  # beside two rows of the light half
        height = needed[row] + (2 * GAP + needed[3] + FILES_HEIGHT if is_tall else 0)
        parts += _draw_room(theme, name, places[name][0], tops[row], places[name][1], height, tint)
    bottom = tops[-1] + needed[-1] + GAP
    parts += _draw_files(theme, bottom, light_colour)
    base, width = bottom + FILES_HEIGHT + GAP, WIDTH - 2 * MARGIN
    base_height = _measure_room(BASE, width)
    parts += _draw_room(theme, BASE, MARGIN, base, width, base_height, light_colour)
    parts += _draw_processes(theme, tops, [name for name in heavy if (PACKAGE / name / "__main__.py").exists()])
    return wrap_svg(theme, base + base_height + MARGIN, heading, _describe(heavy), parts)


def _place_light(name: str) -> tuple[float, float]:
    """Left edge and width of a room that shares its line with the other light rooms there."""
    names = [other for other, row in ROWS.items() if row == ROWS[name] and other in LIGHT]
    width = (LIGHT_WIDTH - GAP * (len(names) - 1)) / len(names)
    return MARGIN + names.index(name) * (width + GAP), width


def _check(heavy: list[str]) -> None:
    rows = {**ROWS, **dict.fromkeys(FILES, 4), BASE: 5, **dict.fromkeys(ENTRY, -1)}
    if set(rows) != set(MAY_IMPORT):
        raise ValueError(f"rooms without a place in the picture: {sorted(set(rows) ^ set(MAY_IMPORT))}")
    for name, imports in MAY_IMPORT.items():
        for other in imports - set(ENTRY):
            if rows[other] <= rows[name] and not (name in FILES and other in FILES):
                raise ValueError(f"{name} imports {other}, which the picture shows above it")
            if name not in (*heavy, *ENTRY) and other in heavy:  # the package loads a heavy one when it is used
                raise ValueError(f"{name} imports {other}, which is heavy")


def _sort_heavy() -> list[str]:
    """The best known first."""
    known = ("torch", "transformers", "deepspeed", "numpy")
    return sorted(HEAVY, key=lambda name: (known.index(name) if name in known else len(known), name))


def _list_folders(name: str) -> list[str]:
    return sorted(folder.name for folder in (PACKAGE / name).iterdir() if (folder / "__init__.py").exists())


def _list_imports(name: str) -> list[str]:
    return [other for other in MAY_IMPORT if other in MAY_IMPORT[name] and other not in ENTRY]


def _draw_room(theme: Theme, name: str, x: float, y: float, width: float, height: float, tint: str) -> list[str]:
    """A box with the room's name, purpose, folders and imports. Its height is `_measure_room`'s, or more."""
    parts = [
        draw_box(x, y, width, height, tint, tint, rx=8, fill_opacity=0.07, stroke_opacity=0.55),
        write(theme, x + PAD, y + 23, f"{name}/", 14, bold=True, mono=True),
    ]
    line = y + 42
    for text in _list_purpose(name, width):
        parts.append(write(theme, x + PAD, line, text, 12))
        line += TEXT_STEP
    line += 6
    for row in _list_folder_rows(name, width):
        left = x + PAD
        for folder in row:
            wide = _get_chip_width(folder)
            parts += [
                draw_box(left, line - 10, wide, 19, theme["surface"], tint, rx=4, stroke_opacity=0.5),
                write(theme, left + 6, line + 3.5, folder, 11, mono=True),
            ]
            left += wide + 5
        line += CHIP_STEP
    lines = _list_import_lines(name, width)
    for index, text in enumerate(lines):
        place = y + height - 11 - IMPORT_STEP * (len(lines) - 1 - index)
        parts.append(write(theme, x + PAD, place, text, 11, "muted"))
    return parts


def _measure_room(name: str, width: float) -> float:
    num_lines, num_rows = len(_list_purpose(name, width)), len(_list_folder_rows(name, width))
    body = num_lines * TEXT_STEP + num_rows * CHIP_STEP + (6 if num_rows else 0)
    return 30 + body + len(_list_import_lines(name, width)) * IMPORT_STEP + 16


def _list_purpose(name: str, width: float) -> list[str]:
    return wrap_words(PURPOSES[name], 12, width - 2 * PAD)


def _list_import_lines(name: str, width: float) -> list[str]:
    imports = _list_imports(name)
    return wrap_words(f"imports {', '.join(imports)}" if imports else "imports no other room", 11, width - 2 * PAD)


def _list_folder_rows(name: str, width: float) -> list[list[str]]:
    rows: list[list[str]] = []
    free = 0.0
    for folder in _list_folders(name):
        if _get_chip_width(folder) > free:
            rows.append([])
            free = width - 2 * PAD
        rows[-1].append(folder)
        free -= _get_chip_width(folder) + 5
    return rows


def _get_chip_width(folder: str) -> float:
    return len(folder) * 11 * MONO_ADVANCE + 12


def _draw_files(theme: Theme, y: float, tint: str) -> list[str]:
    parts = [draw_box(MARGIN, y, LIGHT_WIDTH, FILES_HEIGHT, tint, tint, rx=8, fill_opacity=0.07, stroke_opacity=0.55)]
    left = MARGIN + PAD
    for name in FILES:
        parts.append(write(theme, left, y + 20, name, 11.5, mono=True, bold=True))
        left += len(name) * 11.5 * 0.602 + 14
    below = sorted({other for name in FILES for other in _list_imports(name)} - set(FILES))
    parts.append(write(theme, MARGIN + PAD, y + 36, f"single files (.py); import {', '.join(below)}", 11, "muted"))
    return parts


def _draw_processes(theme: Theme, tops: list[float], names: list[str]) -> list[str]:
    """A command starts heavy work as a child process: a line, where an import would be none."""
    start, bus, end = MARGIN + LIGHT_WIDTH, MARGIN + LIGHT_WIDTH + 24, HEAVY_LEFT
    heights = [tops[ROWS[name]] + 24 for name in names]
    stroke = f'fill="none" stroke="{theme["muted"]}" stroke-width="1.5" stroke-dasharray="4 3"'
    parts = [
        f'<path d="M{start:g} {min(heights):g}H{bus:g}" {stroke}/>',
        f'<path d="M{bus:g} {min(heights):g}V{max(heights):g}" {stroke}/>',
    ]
    for height in heights:
        parts.append(f'<path d="M{bus:g} {height:g}H{end - 7:g}" {stroke}/>')
        parts.append(f'<path d="M{end - 1:g} {height:g}l-8 -4v8z" fill="{theme["muted"]}"/>')
    middle = (min(heights) + max(heights)) / 2
    parts.append(
        write(theme, bus - 7, middle, "commands start child processes", 11, "muted", anchor="middle", turn=-90)
    )
    return parts


def _describe(heavy: list[str]) -> str:
    light = [name for name in MAY_IMPORT if name not in heavy and name not in ENTRY]
    halves = (
        f"The light half, which imports none of {', '.join(_sort_heavy())}: {', '.join(light)}. The heavy half, which "
        f"may: {', '.join(heavy)}; data needs no torch."
    )
    imports = " ".join(
        f"{name} imports {', '.join(_list_imports(name)) or 'no other room'}."
        for name in MAY_IMPORT
        if name not in ENTRY
    )
    return f"{halves} {imports} Commands start the heavy half as child processes."
