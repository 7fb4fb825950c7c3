"""Tests the house rules: imports, size of rooms, where printing is allowed, unique names."""

import ast
import re
import sys
from collections import defaultdict
from pathlib import Path

from support.house import (
    ENTRY_MAY_IMPORT,
    FILES,
    HEAVY,
    LIGHT,
    MAX_MODULES,
    MAY_IMPORT,
    MODULES,
    ORDER,
    PACKAGE,
    ROOT,
    count_modules,
    get_place,
    get_top,
    list_circles,
    list_own_imports,
    list_upward_arrows,
    parse,
    walk_imports,
)

FORBIDDEN_NAMES = {"utils", "helpers", "common", "misc", "manager", "base", "core"}
STDLIB_ONLY = {"plan/rows/packing", "plan/layout", "plan/problem"}
SPEAKS_TO_THE_WORLD = {"typer", "rich", "huggingface_hub", "requests", "urllib", "socket"}
# Inside train/, the stages of a rank and train/model see a Recipe. The rest takes plain arguments.
SEE_A_RECIPE = ("train/model", "train/inputs", "train/start", "train/__main__", "train/export/job")
IMPORT_DEEPSPEED = {
    "train/model/build",
    "train/model/loss_model",
    "train/model/loading",
    "train/model/parts",
    "train/generation/decoding",
    "prove/trace/fake_device",
    "prove/recorded_run",
}
MAX_LINES = 600


def test_modules_import_what_their_rooms_may() -> None:
    for module, file in MODULES.items():
        check_imports(module, file)


def check_imports(module: str, file: Path) -> None:
    top = get_top(module)
    is_entry = module.endswith("/__main__")
    for target in list_own_imports(file):
        other = get_top(target)
        allowed = MAY_IMPORT[top] | ({top} if get_place(module) or top in ORDER else set())
        assert other in allowed or other == top or (is_entry and other in ENTRY_MAY_IMPORT), f"{module} -> {target}"
        if module in STDLIB_ONLY:
            assert target in STDLIB_ONLY, f"{module} -> {target}"
        if target.startswith("plan/recipe/") and top == "train":
            assert module.startswith(SEE_A_RECIPE), f"{module} sees a Recipe"
    for name in walk_imports(file):
        first = name.split(".")[0]
        if top in LIGHT:
            assert first not in HEAVY, f"{module} imports {name}: heavy work is a child process"
        if top == "data":
            assert first not in ("torch", "deepspeed"), f"{module} imports {name}"
        if top == "plan":
            assert first not in SPEAKS_TO_THE_WORLD, f"{module} imports {name}"
        if module in STDLIB_ONLY:
            assert first in {*sys.stdlib_module_names, "ulysses_cli"}, f"{module} imports {name}"
        if first == "deepspeed":
            assert module in IMPORT_DEEPSPEED, f"{module} imports {name}"


def test_every_room_has_its_place_in_the_order() -> None:
    for top, order in ORDER.items():
        places = {get_place(module) for module in MODULES if get_top(module) == top} - {""}
        assert places == set(order), top
        assert len(order) == len(set(order)), top


def test_no_lower_room_imports_a_higher_one() -> None:
    assert list_upward_arrows() == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert list_circles() == []


def test_no_folder_holds_too_many_modules() -> None:
    assert {folder: count for folder, count in count_modules().items() if count > MAX_MODULES} == {}


def test_public_class_names_are_unique() -> None:
    owners: dict[str, list[str]] = defaultdict(list)
    for module, file in MODULES.items():
        for node in parse(file).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                owners[node.name].append(module)
    assert {name: places for name, places in owners.items() if len(places) > 1} == {}


def test_a_file_is_a_noun_with_a_purpose_and_a_size() -> None:
    for file in FILES:
        assert file.stem not in FORBIDDEN_NAMES, file
        doc = ast.get_docstring(parse(file))
        assert doc, file
        assert len(doc.splitlines()) <= 6, file
        assert len(file.read_text().splitlines()) <= MAX_LINES, file


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
    room = get_top(file.relative_to(PACKAGE).as_posix())
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
