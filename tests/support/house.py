"""The code's files, and the import rules as pyproject.toml writes them for import-linter."""

import ast
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ulysses_cli"
FILES = sorted(PACKAGE.rglob("*.py"))


@cache
def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def name_module(file: Path) -> str:
    """Returns a module's name below the package, such as `train/attention/heads`; a room's __init__ is the room."""
    return file.relative_to(PACKAGE).with_suffix("").as_posix().removesuffix("__init__").rstrip("/")


MODULES = {name_module(file): file for file in FILES}
_SETTINGS: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
_CONTRACTS: list[dict[str, Any]] = _SETTINGS["contracts"]
_LAYERS = {
    contract["containers"][0]: [part for line in reversed(contract["layers"]) for part in line.split(" | ")]
    for contract in _CONTRACTS
    if contract["type"] == "layers"
}


def _cut(module: str) -> str:
    return module.removeprefix("ulysses_cli.")


# A room's own rooms and files, lowest first: each imports only what stands before it.
ORDER = {_cut(room): parts for room, parts in _LAYERS.items() if room != "ulysses_cli"}
# Who may import a room, and which rooms a room may import. plan is the lowest: all may import it.
_IMPORTERS = {
    _cut(room): [_cut(name) for name in contract["allowed_importers"]]
    for contract in _CONTRACTS
    if contract["type"] == "protected"
    for room in contract["protected_modules"]
}
_ROOMS = _LAYERS["ulysses_cli"]
MAY_IMPORT = {
    room: {other for other in _ROOMS[: _ROOMS.index(room)] if room in _IMPORTERS.get(other, _ROOMS[1:])}
    for room in _ROOMS
}
ENTRY_MAY_IMPORT = {room for room in _ROOMS if "data.__main__" in _IMPORTERS.get(room, ())}
LIGHT, HEAVY = next(
    ([_cut(name) for name in contract["source_modules"]], set(contract["forbidden_modules"]))
    for contract in _CONTRACTS
    if contract.get("id") == "light"
)
