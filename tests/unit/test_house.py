"""The house rules: who imports whom, where printing is allowed, names, and a README tree that tells the truth."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ulysses_cli"
FILES = sorted(PACKAGE.rglob("*.py"))
FORBIDDEN_NAMES = {"utils", "helpers", "common", "misc", "manager", "base", "core"}
STDLIB_ONLY = {"packing.py", "bins.py", "layout.py", "problem.py"}
HEAVY = {"torch", "transformers", "deepspeed", "datasets", "peft", "numpy", "safetensors", "accelerate"}
MAY_IMPORT = {
    "commands": {
        "commands",
        "report",
        "plan",
        "validate",
        "hub",
        "shipped",
        "launch",
        "children",
        "preflight",
        "hardware_table",
        "__version__",
    },
    "report": {"report", "plan", "validate"},
    "plan": {"plan"},
    "data": {"plan", "data"},
    "train": {"plan", "data", "train"},
    "prove": {"plan", "data", "train", "prove"},
}
MAX_LINES = 400


@cache
def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def walk_imports(file: Path) -> Iterator[tuple[str, bool]]:
    """(module, at module level) of every import in a file."""
    tree = parse(file)
    top = set(tree.body)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node in top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports name their package"
            yield node.module or "", node in top
            if node.module in ("ulysses_cli", "ulysses_cli.plan"):
                yield from ((f"{node.module}.{alias.name}", node in top) for alias in node.names)


def get_room(file: Path) -> str:
    parts = file.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else ""


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_imports(file: Path) -> None:
    room = get_room(file)
    for module, _ in walk_imports(file):
        first, _, rest = module.partition(".")
        if first == "ulysses_cli":
            target = rest.split(".")[0]
            assert target != "cli" or (file.name == "__main__.py" and not room), f"nothing imports cli: {file}"
            if room and target:
                # a child process speaks for itself, and hands on what lies outside its room
                is_entry = file.name == "__main__.py" and target in ("report", "hardware_table")
                assert target in MAY_IMPORT[room] or is_entry, f"{file} imports {module}"
            if file.name in STDLIB_ONLY:
                assert target == "plan", file
                assert module.split(".")[-1] in {"problem", "layout", "bins", "plan"}, file
        elif room in ("commands", "report"):
            assert first not in HEAVY, f"{file} imports {module}: heavy commands start child processes"
        elif room == "plan":
            assert first not in HEAVY | {"typer", "rich", "huggingface_hub", "requests", "urllib", "socket"}, file
        if file.name in STDLIB_ONLY:
            assert first in {*sys.stdlib_module_names, "ulysses_cli"}, f"{file} imports {module}"
        if module.startswith("ulysses_cli.plan.recipe") and room == "train":
            assert file.name in ("__main__.py", "build.py"), f"only build.py and __main__.py see a Recipe: {file}"
        if first == "deepspeed":
            assert file.name in ("build.py", "loading.py", "checkpoint.py", "fake_device.py", "observed.py"), file


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_a_file_is_a_noun_with_a_purpose_and_a_size(file: Path) -> None:
    assert file.stem not in FORBIDDEN_NAMES
    text = file.read_text()
    doc = ast.get_docstring(parse(file))
    assert doc, file
    assert len(doc.splitlines()) <= 6, file
    assert len(text.splitlines()) <= MAX_LINES, file


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_only_report_prints_and_only_the_edge_reads_the_environment(file: Path) -> None:
    names = {
        f"{node.value.id}.{node.attr}"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        else node.id
        for node in ast.walk(parse(file))
        if isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name))
    }
    if get_room(file) != "report":
        assert not names & {"print", "sys.stdout"}, file
    if get_room(file) == "plan":
        assert not names & {"os.environ", "os.getenv"}, file


def test_new_group_has_one_caller() -> None:
    callers = [f.name for f in FILES if re.search(r"\bnew_(sub)?group", f.read_text())]
    assert set(callers) <= {"groups.py"}


def read_tree(text: str) -> set[str]:
    """Files and folders that a README's tree names, as paths."""
    found, stack = set(), []
    for line in re.search(r"```tree\n(.*?)```", text, re.S).group(1).splitlines():  # type: ignore[union-attr]
        indent = (len(line) - len(line.lstrip())) // 2
        name = line.split()[0] if line.strip() else ""
        if not name:
            continue
        del stack[indent:]
        found.add("".join(stack) + name.rstrip("/"))
        if name.endswith("/"):
            stack.append(name)
    return found


def test_the_readme_tree_is_the_real_tree() -> None:
    named = read_tree((ROOT / "README.md").read_text())
    real = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    real = [path for path in real if path and (ROOT / path).exists()]
    for path in named:
        assert (ROOT / path).exists(), f"README names {path}, which is not there"
    for path in real:
        parents = [str(parent) for parent in Path(path).parents if str(parent) != "."]
        is_module = path.startswith("ulysses_cli/") and path.endswith(".py") and not path.endswith("__init__.py")
        if is_module:
            assert path in named, f"README's tree leaves out {path}"
        elif not path.startswith("."):
            assert path in named or any(parent in named for parent in parents), f"README's tree leaves out {path}"


def test_every_recipe_field_has_a_doc_a_unit_and_a_bound() -> None:
    from ulysses_cli.plan.schema import walk_settings

    for setting in walk_settings():
        accepts = setting.accepts
        assert setting.doc, setting.key
        assert "\n" not in setting.doc
        if accepts.section:
            continue
        bounds = accepts.bounds
        if set(accepts.scalars) & {int, float, str} or accepts.item is not None or accepts.value is not None:
            assert setting.unit, setting.key
            assert {"le", "lt", "max_length"} & bounds.keys(), setting.key
        else:
            assert accepts.literals or bool in accepts.scalars, setting.key


def test_no_doc_speaks_of_this_machine() -> None:
    for file in [*ROOT.glob("*.md"), *FILES, *(ROOT / "recipes").glob("*"), *(ROOT / "tests").rglob("*.py")]:
        text = file.read_text()
        assert not re.search(r"(?<![\w.])/(root|work|home)/", text.replace('r"(?<![\\w.])/(root|work|home)/"', "")), (
            file
        )
