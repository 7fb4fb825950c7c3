"""The import rules: which room may import which, and the order of the rooms within a room, lowest first."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ulysses_cli"
FILES = sorted(PACKAGE.rglob("*.py"))
MAX_MODULES = 20
# never torch, not even inside a function
LIGHT = ("plan", "readers", "evaluate", "run", "report", "commands")
HEAVY = {"torch", "transformers", "deepspeed", "datasets", "peft", "numpy", "safetensors", "accelerate"}

# Top-level rooms and files -> what else of the package they may import. `__main__.py` of a room is a child process of a
# command: it also speaks to people (report) and asks for what a command would hand it (hardware_table).
MAY_IMPORT: dict[str, set[str]] = {
    "plan": set(),
    "readers": {"plan"},
    "evaluate": {"plan", "readers"},
    "run": {"plan", "readers"},
    "data": {"plan", "readers"},
    "train": {"plan", "evaluate", "run", "data"},
    "prove": {"plan", "readers", "evaluate", "run", "data", "train"},
    "hub": {"plan"},
    "hardware_table": {"plan", "hub"},
    "shipped": {"plan"},
    "validate": {"plan", "hub"},
    "report": {"plan", "validate"},
    "commands": {"plan", "evaluate", "run", "report", "hub", "hardware_table", "shipped", "validate", ""},
    "cli": {"plan", "run", "commands", "report", ""},
    "api": {"plan", "run", "commands", "hardware_table", "validate"},
    "__main__": {"cli"},
    "": set(),
}
ENTRY_MAY_IMPORT = {"report", "hardware_table"}

# A room's own rooms and files, lowest first: each imports only what stands before it.
ORDER: dict[str, list[str]] = {
    "plan": [
        *("sizes", "problem", "layout", "files", "hardware", "secrets", "units", "models", "flops", "rows"),
        *("levers", "schedule", "recipe", "attention", "ds_config", "resolved", "ledger", "rules", "speed"),
        "planner",
    ],
    "readers": [
        *("problems", "blocks", "files", "columns", "pairs"),
    ],
    "evaluate": [
        *("sample", "documents", "files", "prompts", "summary", "retrieval", "scoring", "made_tasks", "suites"),
    ],
    "run": [
        *("data_survey", "environments", "host", "jobs", "key", "kubernetes", "lock", "nodes", "notification"),
        *("records", "checkpoints", "folder", "launcher", "resume", "whole_disk", "bucket", "remote_checkpoints"),
        *("downloads", "preflight"),
    ],
    "data": [
        *("steps", "transaction", "store", "packer", "facts", "sources", "tokenizing", "prepare", "__main__"),
    ],
    "train": [
        *("loss", "processes", "preferences", "agent", "tensor_file", "optimizer", "elementwise", "clock"),
        *("memory", "attention", "recurrence", "engine", "generation", "loop", "reference", "sequence_parallel"),
        *("metrics", "record", "checkpoint", "evaluation", "model", "export", "inputs", "failure", "start"),
        "__main__",
    ],
    "prove": [
        *("ranks", "results", "rows", "trace", "device_checks", "doctor", "machines", "quality", "recorded_run"),
        *("shrink", "verify", "speed", "bench", "__main__"),
    ],
    "report": [
        *("printing", "quantities", "live", "planner", "run_summary", "page", "ledger", "data_report", "proofs"),
        *("models", "recipe"),
    ],
}


@cache
def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def name_module(file: Path) -> str:
    """Returns a module's name below the package, such as `train/attention/heads`; a room's __init__ is the room."""
    return file.relative_to(PACKAGE).with_suffix("").as_posix().removesuffix("__init__").rstrip("/")


MODULES = {name_module(file): file for file in FILES}


@cache
def walk_imports(file: Path) -> tuple[str, ...]:
    """Returns every module that a file imports anywhere in it, by its dotted name; `from room import module` is that
    module."""
    return tuple(_walk_imports(file))


def _walk_imports(file: Path) -> Iterator[str]:
    for node in ast.walk(parse(file)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports name their package"
            module = node.module or ""
            path = module.partition("ulysses_cli")[2].strip(".").replace(".", "/")
            inner = [alias.name for alias in node.names if f"{path}/{alias.name}".lstrip("/") in MODULES]
            if module.startswith("ulysses_cli") and inner:
                yield from (f"{module}.{name}" for name in inner)
            else:
                yield module


def list_own_imports(file: Path) -> list[str]:
    """Returns the modules of this package that a file imports."""
    return [
        name.partition("ulysses_cli")[2].strip(".").replace(".", "/")
        for name in walk_imports(file)
        if name.split(".")[0] == "ulysses_cli"
    ]


def get_top(module: str) -> str:
    return module.split("/")[0]


def get_place(module: str) -> str:
    """Returns the room or file below a top-level room that a module belongs to."""
    parts = module.split("/")
    return parts[1] if len(parts) > 1 else ""


def list_upward_arrows() -> list[str]:
    arrows = []
    for module, file in MODULES.items():
        order = ORDER.get(get_top(module))
        if order is None or not get_place(module):
            continue
        for target in list_own_imports(file):
            if get_top(target) != get_top(module) or get_place(target) == get_place(module):
                continue
            if order.index(get_place(target)) > order.index(get_place(module)):
                arrows.append(f"{module} -> {target}")
    return arrows


def list_circles() -> list[list[str]]:
    """Returns groups of modules that import each other, directly or through others, at any place of a file."""
    arrows: dict[str, set[str]] = defaultdict(set)
    for module, file in MODULES.items():
        arrows[module] = {target for target in list_own_imports(file) if target in MODULES and target != module}
    reached = {module: _reach(arrows, module) for module in MODULES}
    circles, done = [], set()
    for module in MODULES:
        if module in done:
            continue
        back = {other for other in reached[module] if module in reached[other]}
        if back:
            circles.append(sorted({module, *back}))
            done |= back
    return circles


def _reach(arrows: dict[str, set[str]], start: str) -> set[str]:
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        for target in arrows[waiting.pop()]:
            if target not in reached:
                reached.add(target)
                waiting.append(target)
    return reached


def count_modules() -> dict[str, int]:
    """Counts the modules of each folder, without those of its subfolders."""
    counts: dict[str, int] = defaultdict(int)
    for file in FILES:
        if file.name != "__init__.py":
            counts[file.parent.relative_to(ROOT).as_posix()] += 1
    return dict(counts)
