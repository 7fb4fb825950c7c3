"""Tests that everything imports where only a GPU image's packages are, in its versions: on that machine nothing can be
installed."""

import ast
import sys
from collections.abc import Iterator

from support.house import FILES, PACKAGE, ROOT, parse

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
