"""Makes the parts of docs/ that are generated from the code, which `make docs` writes, and the map of the code, which
`make map` prints.

A page keeps what is written by hand. A generated part stands between two comment lines that name it. Pictures and their
texts come from docs/pictures/README.md.
"""

import ast
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from support import real_run_page
from support.combinations import RUN, TRAINED, explain, list_refused
from support.house import ENTRY_MAY_IMPORT, MAY_IMPORT, MODULES, ORDER, PACKAGE, ROOT, parse
from ulysses_cli.hub import summarize_table
from ulysses_cli.plan.attention import BACK_ENDS
from ulysses_cli.plan.models.families import FAMILIES, REFUSED_FAMILIES
from ulysses_cli.plan.recipe.schema import Setting, format_value, walk_settings
from ulysses_cli.report.models import format_gate, format_ring, format_size, format_sizes

DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.glob("*.md"))]
LINE_CHARS = 220  # of a docstring in the code map, if it is longer than a sentence
PICTURE = re.compile(r'<picture>\n.*srcset="[^"]*?([\w-]+)-dark\.\w+">\n.*\n</picture>')
COMMAND = "make docs"


def make_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def make_settings() -> str:
    """Returns one table for each section of a recipe."""
    sections: dict[str, list[Setting]] = defaultdict(list)
    titles = {}
    for setting in walk_settings():
        if setting.accepts.inner:
            titles[setting.key] = setting.doc
        if not setting.accepts.section:
            sections[setting.key.rpartition(".")[0] or setting.key].append(setting)
    parts = []
    for section, settings in sections.items():
        rows = [
            (
                f"`{setting.key.rpartition('.')[2]}`",
                "required" if setting.is_required else f"`{format_value(setting.default)}`",
                setting.accepts.describe() + (f" ({setting.unit})" if setting.unit else ""),
                setting.doc + (f"; also `{'`, `'.join(setting.aliases)}`" if setting.aliases else ""),
            )
            for setting in settings
        ]
        doc = titles.get(section.removesuffix("[]"), "")
        head = f"### {section}\n\n" + (f"{doc[0].upper()}{doc[1:]}.\n\n" if doc else "")
        parts.append(head + make_table(("setting", "default", "takes", "meaning"), rows))
    return "\n\n".join(parts)


def make_code_map() -> str:
    """Returns every module with the first sentence of its docstring, room by room, in the order of imports."""
    folders: dict[Path, list[Path]] = defaultdict(list)
    for file in MODULES.values():
        folders[file.parent].append(file)
    parts = []
    for folder in sorted(folders, key=_rank_folder):
        files = sorted((file for file in folders[folder] if file.name != "__init__.py"), key=_rank_file)
        rows = [(f"`{file.name}`", _find_first_sentences(file)) for file in files]
        title = folder.relative_to(ROOT).as_posix()
        doc = " ".join((ast.get_docstring(parse(folder / "__init__.py")) or "").split("\n\n")[0].split())
        parts.append(f"### {title}/\n\n{doc}\n" + ("\n" + make_table(("file", "what it does"), rows) if rows else ""))
    return "\n\n".join(part.strip() for part in parts)


def make_imports() -> str:
    """Returns which room may import which, and the order within a room: as `make lint` holds it."""
    rows = [
        (f"`{room}`", ", ".join(f"`{name}`" for name in sorted(others)) or "nothing")
        for room, others in MAY_IMPORT.items()
    ]
    entry = ", ".join(f"`{name}`" for name in sorted(ENTRY_MAY_IMPORT))
    order = [(f"`{room}`", " → ".join(f"`{name}`" for name in names)) for room, names in ORDER.items()]
    return (
        make_table(("room or file", "imports of the package, besides itself"), rows)
        + f"\n\nThe `__main__.py` of a room is a child process of a command. It may also import {entry}.\n\n"
        + make_table(("room", "its parts, lowest first: each imports only parts to its left"), order)
    )


def make_families() -> str:
    """Returns the families that are served, with the kinds of layers of one model of each in the table."""
    names: dict[str, list[str]] = defaultdict(list)
    for summary in summarize_table():
        names[summary.model_type].append(f"`{summary.name}`")
    rows = [(f"`{family}`", ", ".join(names[family]) or "none in the table") for family in sorted(FAMILIES)]
    return make_table(("`model_type`", "models whose shape is known without a download"), rows)


def make_models() -> str:
    """Returns what `ulysses models` says of each model in the table."""
    rows = [
        (
            f"`{summary.name}`", f"`{summary.model_type}`", format_size(summary), "; ".join(summary.layers),
            "; ".join(summary.heads), format_sizes(summary), format_ring(summary), f"{summary.max_positions:,}",
            format_gate(summary),
        )
        for summary in summarize_table()
    ]  # fmt: skip
    header = (
        "model", "`model_type`", "parameters", "layers", "heads", "sp sizes by heads", "ring", "positions",
        "licence gate",
    )  # fmt: skip
    return make_table(header, rows)


def make_refused_families() -> str:
    rows = [(f"`{family}`", why) for family, why in REFUSED_FAMILIES.items()]
    return make_table(("`model_type`", "why a row cannot be split over ranks"), rows)


def make_back_ends() -> str:
    rows = [
        (
            f"`{name}`",
            back_end.doc,
            ", ".join(back_end.devices),
            back_end.describe_capabilities().removeprefix("compute capability "),
            f"up to {back_end.max_head_dim:,}, multiples of {back_end.head_dim_multiple}",
            *("yes" if able else "no" for able in (back_end.has_window, back_end.has_softcap, back_end.has_sinks)),
        )
        for name, back_end in BACK_ENDS.items()
    ]
    head = ("name", "what it is", "device", "compute capability", "head_dim", "windows", "softcap", "sinks")
    return make_table(head, rows)


def make_combinations() -> str:
    """Returns a table of features that a recipe may combine, and what rules say of those that it may not."""
    refused = list_refused()
    numbers = {why: number for number, why in enumerate(refused, 1)}
    rows = [
        (one, *(f"**no** {numbers[why]}" if (why := explain(one, other)) else "yes" for other in RUN))
        for one in TRAINED
    ]
    reasons = [
        f"{numbers[why]}. {'; '.join(f'**{one}** with {_join(others)}' for one, others in pairs.items())}: {why}"
        for why, pairs in refused.items()
    ]
    return make_table(("", *RUN), rows) + "\n\n" + "\n".join(reasons)


def _join(words: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


PARTS: dict[str, dict[str, Callable[[], str]]] = {
    "recipes.md": {"settings": make_settings},
    "models.md": {"families": make_families, "models": make_models, "refused": make_refused_families},
    "attention.md": {"back ends": make_back_ends},
    "compared.md": {"combinations": make_combinations},
    "real-run.md": {name: partial(make, make_table) for name, make in real_run_page.PARTS.items()},
}


def fill(page: Path, text: str) -> str:
    """Returns a page with its generated parts made anew, and its pictures as in docs/pictures/README.md."""
    for name, make in PARTS.get(page.name, {}).items():
        pattern = rf"(<!-- generated: {name} -->\n).*?(<!-- end of {name} -->)"
        content = make()
        text, count = re.subn(pattern, lambda m, part=content: f"{m[1]}\n{part}\n\n{m[2]}", text, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"{page.name}: one part `{name}` is expected, {count} are there")
    pictures, folder = _read_pictures(), os.path.relpath(DOCS / "pictures", page.parent)
    return PICTURE.sub(lambda m: re.sub(r'(src|srcset)="', rf'\1="{folder}/', pictures[m[1]]), text)


def _read_pictures() -> dict[str, str]:
    """Returns each picture of the index by its name: the lines that show it in light and dark, with a text for both."""
    return {match[1]: match[0] for match in PICTURE.finditer((DOCS / "pictures" / "README.md").read_text())}


def _find_first_sentences(file: Path) -> str:
    """Returns what a docstring's first paragraph says in a few lines: one sentence, and more of them where all fit."""
    paragraph = " ".join((ast.get_docstring(parse(file)) or "").split("\n\n")[0].split())
    sentences = re.split(r"(?<=[a-z0-9`)\]][.!?])\s+(?=[A-Z`]|torch's|transformers)", paragraph)
    return paragraph if len(paragraph) <= LINE_CHARS else sentences[0]


def _rank_folder(folder: Path) -> tuple[object, ...]:
    parts = folder.relative_to(PACKAGE).parts
    top = list(MAY_IMPORT).index(parts[0]) if parts else len(MAY_IMPORT)
    order = ORDER.get(parts[0], []) if parts else []
    second = order.index(parts[1]) if len(parts) > 1 and parts[1] in order else -1
    return (top, second, parts)


def _rank_file(file: Path) -> tuple[object, ...]:
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    order = ORDER.get(parts[0], [])
    return (order.index(parts[1]) if len(parts) == 2 and parts[1] in order else -1, file.name)


if __name__ == "__main__":
    if "--map" in sys.argv:
        print(make_imports(), make_code_map(), sep="\n\n")
    for page in [] if "--map" in sys.argv else PAGES:
        page.write_text(fill(page, page.read_text()))
