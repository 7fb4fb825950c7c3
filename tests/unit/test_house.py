"""Tests the rules of the house that no linter knows. Who may import whom is import-linter's (pyproject.toml)."""

import ast
import re
import sys
from collections.abc import Iterator
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
    assert {f.name for f in FILES if re.search(r"\bnew_(sub)?group", f.read_text())} <= {"groups.py"}


def test_compile_has_one_caller() -> None:
    """Threads of a rank have settings of their own, which it sets (train/choosing.py)."""
    assert [file.name for file in FILES if re.search(r"torch\.compile\(", file.read_text())] == ["choosing.py"]


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


LIST = ROOT / "tests" / "support" / "gpu_image.txt"
PACKAGES = dict(line.partition("==")[::2] for line in LIST.read_text().splitlines() if line[:1] not in ("", "#"))
NAMES = {name.replace("-", "_") for name in PACKAGES} | {"yaml"}
OWN = {"ulysses_cli", "support", "__future__", *(file.stem for file in (ROOT / "benchmarks").glob("*.py"))}
OWN |= {file.stem for file in (ROOT / "tests" / "gpu").glob("*.py")}
OPTIONAL = {"prove/quality/harness.py": {"lm_eval"}}  # imported where `evaluate --tasks` runs, after a check


def list_first_imports(body: list[ast.stmt]) -> Iterator[str]:
    """Packages that are imported when a module is, and not where a function runs."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield from list_first_imports(node.orelse)
        elif isinstance(node, (ast.If, ast.With, ast.ClassDef, ast.For, ast.While)):
            yield from list_first_imports([*node.body, *getattr(node, "orelse", [])])
        elif isinstance(node, ast.Try):  # a missing package is foreseen where handlers are
            yield from list_first_imports([*node.orelse, *node.finalbody])


def test_no_module_imports_what_the_image_lacks() -> None:
    gpu = [*(ROOT / "tests" / "gpu").glob("*.py"), *(ROOT / "benchmarks").glob("gpu*.py")]
    missing = {}
    for file in [*FILES, *gpu]:
        name = str(file.relative_to(PACKAGE if file in FILES else ROOT))
        known = NAMES | OWN | set(sys.stdlib_module_names) | OPTIONAL.get(name, set())
        if found := set(list_first_imports(parse(file).body)) - known:
            missing[name] = found
    assert missing == {}


def test_the_start_of_a_rank_imports_few_modules() -> None:
    """It is the order of events: what a stage does stands in the stage's own module."""
    lines = MODULES["train/start"].read_text().splitlines()
    assert 0 < sum(line.startswith("from ulysses_cli") for line in lines) <= 18
