"""Tests that messages name options that exist: of the command that shows them, or of the one that they name."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from support.house import FILES, PACKAGE

from ulysses_cli.cli import app

OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*[a-z]\b")
NAMED = re.compile(r"ulysses ([a-z-]+)")
# what other programs are told, and processes of our own
OTHERS = re.compile(
    r"^pip |docker|container|torchrun|trackio|benchmarks/gpu|--query|vllm|--max-model-len|--hf-overrides|hf download"
    r"|COMMAND --help"
    r"|--repo-type|srun|mpirun|flux run|^--(?:help|version|config|plan|plan-hash|pretend|place|events|weights)\b"
)
OTHER_ROOMS = (
    "report/page/", "train/export/__main__", "run/launcher", "run/jobs", "run/kubernetes", "train/agent/", "__main__",
)  # fmt: skip
# a room's messages are shown by these commands alone
SHOWN_BY = {
    "commands/children/proving.py": ("bench", "verify", "doctor"),
    "prove/bench": ("bench",),
    "prove/verify": ("verify",),
    "prove/doctor": ("doctor",),
    "prove/quality/": ("evaluate",),
    "evaluate/": ("evaluate",),
    "plan/rules/merged_models.py": ("merge",),
    "train/export/job": ("export",),
    "train/export/sampling": ("sample",),
}
SHARED = ("plan/rules/", "plan/recipe/", "plan/files")  # many commands check a recipe
EVERYWHERE = {"--online", "--num-processes"}  # they answer an option that was given


def list_options() -> dict[str, set[str]]:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    found = {}
    for name, command in commands.items():
        parts = [command, *getattr(command, "commands", {}).values()]
        found[name] = {word for part in parts for each in part.params for word in (*each.opts, *each.secondary_opts)}
    return found


def walk_texts(file: Path) -> Iterator[str]:
    """Strings of the code, those with values in them as one; no docstrings."""
    tree = ast.parse(file.read_text())
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    skipped = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            skipped |= {id(part) for part in node.values}
            parts = (part.value if isinstance(part, ast.Constant) else "X" for part in node.values)
            yield "".join(map(str, parts))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield node.value


def list_showing(place: str, options: dict[str, set[str]]) -> tuple[str, ...]:
    """The commands that show this room's messages; () where any may."""
    for room, commands in SHOWN_BY.items():
        if place.startswith(room):
            return commands
    name = Path(place).stem.replace("_", "-")
    return (name,) if place.startswith("commands/") and name in options else ()


def find_problem(place: str, text: str, options: dict[str, set[str]]) -> str:
    every = set[str]().union(*options.values())
    named = [name for name in NAMED.findall(text) if name in options]
    showing = list_showing(place, options)
    for word in OPTION.findall(text):
        if named:
            known = any(word in options[name] for name in (*named, *showing))
        elif showing:
            known = all(word in options[name] for name in showing)
        else:
            known = word in every and (word in EVERYWHERE or not place.startswith(SHARED))
        if not known:
            return f"{place}: {word} in {text!r}"
    return ""


@pytest.mark.check
def test_messages_name_options_that_exist() -> None:
    options, problems, num_words = list_options(), [], 0
    for file in FILES:
        place = file.relative_to(PACKAGE).as_posix()
        if place.startswith(OTHER_ROOMS) or "__main__" in place:
            continue
        for text in walk_texts(file):
            if "--" in text and not OTHERS.search(text):
                num_words += len(OPTION.findall(text))
                problems += [problem] if (problem := find_problem(place, text, options)) else []
    assert num_words > 150
    assert problems == []


def test_a_wrong_hint_is_found() -> None:
    options = list_options()
    assert find_problem("prove/bench.py", "add --resume auto", options)
    assert find_problem("plan/rules/files.py", "--overwrite replaces it", options)
    assert find_problem("commands/bench.py", "leave out --steps-of-time", options)
    assert not find_problem("plan/rules/files.py", "`ulysses train` with --overwrite", options)
    assert not find_problem("commands/bench.py", "leave out --sp-size", options)
