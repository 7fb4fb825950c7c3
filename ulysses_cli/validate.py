"""Takes a recipe file and overrides, returns its problems or its resolved plan. Every command calls this first.

Loads the recipe, finds the model's shape, checks the rules and resolves the plan. Holds no rule and prints nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ulysses_cli import hub
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.problem import Problem, RecipeError, Where
from ulysses_cli.plan.recipe.loader import Loaded, load_recipe, parse_recipe
from ulysses_cli.plan.recipe.schema import is_key
from ulysses_cli.plan.resolved import Resolved, resolve
from ulysses_cli.plan.rules.check import check_recipe

RECIPE_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class Validated:
    """Either problems, or a valid recipe with its model's shape and its resolved plan."""

    file: str
    problems: tuple[Problem, ...]
    loaded: Loaded | None = None
    shape: ModelShape | None = None
    source: str = ""
    resolved: Resolved | None = None

    def list_problems(self, *, is_alone: bool) -> list[Problem]:
        """With several recipes, a problem of the command line names the recipe that it belongs to."""
        return [
            problem
            if is_alone or problem.where.line
            else replace(
                problem, where=Where(f"{self.file}, {problem.where}" if str(problem.where) != self.file else self.file)
            )
            for problem in self.problems
        ]


def validate_recipe(
    file: str,
    overrides: Sequence[str] = (),
    num_processes: int | None = None,
    *,
    online: bool = False,
    text: str | None = None,
    starts_anew: bool = False,
) -> Validated:
    """Collects all mistakes at once: rules also check a recipe in which some values could not be read. `text` replaces
    the content of the file; `file` is then only the name in problems. A run that `starts_anew` overwrites an earlier
    one, so that the earlier run's recipe may differ."""
    problems: list[Problem] = []
    try:
        loaded = load_recipe(file, overrides) if text is None else parse_recipe(text, file, overrides)
    except RecipeError as error:
        if not isinstance(error.readable, Loaded):
            return Validated(file, error.problems)
        loaded, problems = error.readable, list(error.problems)
    known_keys = {problem.key for problem in problems}
    source: hub.ModelSource | None = None
    try:
        found = hub.find_model_shape(loaded.recipe, online=online)
        hub.check_type(found.shape, loaded.recipe)
        source = found
    except RecipeError as error:
        problems += [replace(problem, where=loaded.locate(problem.key)) for problem in error.problems]
    tokenizer = hub.find_tokenizer(loaded.recipe)
    broken_rules = check_recipe(loaded, source.shape if source else None, num_processes, tokenizer)
    if tokenizer is None and not online:
        broken_rules += _check_tokenizer_name(loaded)
    if starts_anew or known_keys:  # with values that could not be read, it is not compared with an earlier run's
        known_keys |= {"run.output_dir"}
    problems += [problem for problem in broken_rules if not _follows(problem, known_keys)]
    if problems or source is None:
        return Validated(file, tuple(sorted(problems, key=lambda problem: problem.where)), loaded)
    return Validated(file, (), loaded, source.shape, source.source, resolve(loaded.recipe, source.shape, loaded.places))


def _check_tokenizer_name(loaded: Loaded) -> list[Problem]:
    """A name without an owner is more often a folder that is missing than a model of the hub."""
    name, key = loaded.recipe.model.tokenizer, "model.tokenizer"
    if name is None or "/" in name:
        return []
    message = f"{name} is not on this machine: no folder, and not in the Hugging Face cache"
    hint = "name a folder, owner/name or bytes; with --online it is left to the hub"
    return [Problem(key, message, hint, loaded.locate(key))]


def _follows(problem: Problem, known_keys: set[str]) -> bool:
    """Whether a rule's problem follows from another one: it is about a value that already has a problem, or names
    one."""
    words = set(re.findall(r"[\w.]+[\w]", f"{problem.message} {problem.hint}"))
    return problem.key in known_keys or any(key in words for key in known_keys)


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits the command line into recipe files and `section.key=value` overrides, in any order. A key without `=value`
    is joined with the next word, which may have been meant as its value: loading then reports what is missing."""
    files: list[str] = []
    overrides: list[str] = []
    lacks_value = False
    for word in words:
        if os.path.exists(word):
            files.append(word)
            lacks_value = False
        elif "=" in word.lstrip("=") or is_key(word):
            overrides.append(word)
            lacks_value = "=" not in word
        elif lacks_value and not word.endswith(RECIPE_SUFFIXES):
            overrides[-1] = f"{overrides[-1]} {word.lstrip('=')}".rstrip()
            lacks_value = word == "="
        else:
            files.append(word)
    return files, overrides


def several_recipes(files: Sequence[str]) -> Problem:
    names = ", ".join(file or "an empty argument" for file in files)
    return Problem("", f"{len(files)} recipes: {names}", "name one; settings are KEY=VALUE, without spaces")


def no_recipe(words: Sequence[str]) -> Problem:
    return Problem("", f"no recipe among {' '.join(words)}", "name a recipe file; `ulysses recipes list` shows some")
