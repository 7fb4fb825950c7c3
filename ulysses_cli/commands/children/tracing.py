"""Runs a trace in a child process and caches its result under a hash of all that it depends on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from subprocess import PIPE
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ulysses_cli.plan.levers import Levers
    from ulysses_cli.plan.recipe.recipe import Recipe

DEPENDS_ON = ("torch", "transformers", "deepspeed", "peft", "bitsandbytes")
ROOMS = ("train", "prove", "plan")
SHOWN_CHARS = 2000


def trace_recipe(recipe: Recipe, config: Mapping[str, Any], levers: Levers) -> dict[str, Any]:
    """For a recipe that passed its checks. Takes minutes, or no time where the result is in the cache. Raises
    RecipeError where the trace fails."""
    from ulysses_cli.host import children
    from ulysses_cli.plan.problem import Problem, RecipeError
    from ulysses_cli.plan.resolved import make_layout

    request = {
        "recipe": recipe.model_dump(mode="json"),
        "config": dict(config),
        "levers": vars(levers),
        "world_size": make_layout(recipe).world_size,
    }
    file = _get_folder() / f"{compute_key(request)}.json"
    try:
        return {**json.loads(file.read_text(encoding="utf-8")), "from_cache": True}
    except (OSError, ValueError):
        pass
    with children.start_module("ulysses_cli.prove.trace", [], stdin=PIPE, stdout=PIPE) as child:
        answer, _ = child.communicate(json.dumps(request))
    if child.returncode:
        reason = answer.strip()[-SHOWN_CHARS:] or f"it ended with code {child.returncode}"
        raise RecipeError([Problem("--trace", f"the traced step failed: {reason}", "see its output above")])
    result: dict[str, Any] = json.loads(answer)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps(result), encoding="utf-8")
        part.replace(file)
    except OSError:
        pass  # without a cache the next trace only takes longer
    return {**result, "from_cache": False}


def compute_key(request: Mapping[str, Any]) -> str:
    """A hash of the request, of the code that is traced and of the packages that it uses. Paths of data and of the run
    do not count."""
    recipe = {name: value for name, value in request["recipe"].items() if name != "run"}
    recipe["data"] = {name: value for name, value in recipe["data"].items() if name not in ("datasets", "store_dir")}
    digest = hashlib.sha256(json.dumps({**request, "recipe": recipe}, sort_keys=True, default=str).encode())
    for package in DEPENDS_ON:
        try:
            digest.update(f"{package} {version(package)}".encode())
        except PackageNotFoundError:
            digest.update(package.encode())
    root = Path(__file__).parents[2]
    for room in ROOMS:
        for file in sorted((root / room).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:32]


def _get_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "ulysses" / "traces"
