"""Tests the rules of the house that no linter knows. Who may import whom is import-linter's (pyproject.toml)."""

import ast
import re
import sys
from pathlib import Path

from support.house import FILES, MODULES, PACKAGE, ROOT, parse

STDLIB_ONLY = ("plan/rows/packing", "plan/layout", "plan/problem")


def test_some_modules_need_python_alone() -> None:
    own = {f"ulysses_cli.{module.replace('/', '.')}" for module in STDLIB_ONLY}
    for module in STDLIB_ONLY:
        for node in ast.walk(parse(MODULES[module])):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert all(name in own or name.split(".")[0] in sys.stdlib_module_names for name in names), (module, names)


def test_only_report_prints_and_only_the_edge_reads_the_environment() -> None:
    for file in FILES:
        check_names(file)


def check_names(file: Path) -> None:
    names = {
        f"{node.value.id}.{node.attr}"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        else node.id
        for node in ast.walk(parse(file))
        if isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name))
    }
    room = file.relative_to(PACKAGE).parts[0]
    if room != "report":
        assert not names & {"print", "sys.stdout"}, file
    if room == "plan":
        assert not names & {"os.environ", "os.getenv"}, file


def test_new_group_has_one_caller() -> None:
    callers = [f.name for f in FILES if re.search(r"\bnew_(sub)?group", f.read_text())]
    assert set(callers) <= {"groups.py"}


def test_compile_has_one_caller() -> None:
    """Threads of a rank have settings of their own, which it sets (train/processes/compiling.py)."""
    callers = [file.name for file in FILES if re.search(r"torch\.compile\(", file.read_text())]
    assert callers == ["compiling.py"]


def test_every_recipe_field_has_a_doc_a_unit_and_a_bound() -> None:
    from ulysses_cli.plan.recipe.schema import walk_settings

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
