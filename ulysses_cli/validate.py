"""A recipe file and overrides -> its problems, or its resolved plan. What every command does first.

Joins load, hub, check and resolve; holds no rule and prints nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ulysses_cli import hub
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.problem import Problem, RecipeError, Where
from ulysses_cli.plan.recipe.complaints import is_key
from ulysses_cli.plan.recipe.loader import Loaded, load_recipe, parse_recipe
from ulysses_cli.plan.resolved import Resolved, resolve
from ulysses_cli.plan.rules.check import check_recipe

RECIPE_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class Validated:
    """Either problems, or everything that is known about a valid recipe."""

    file: str
    problems: tuple[Problem, ...]
    loaded: Loaded | None = None
    shape: ModelShape | None = None
    source: str = ""
    resolved: Resolved | None = None

    def list_problems(self, *, is_alone: bool) -> list[Problem]:
        """With several recipes, one on the command line says whose it is."""
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
    """Every mistake at once: the rules look at what is left of a recipe without its unreadable values. `text` stands
    in for a file that nobody wrote; `file` is what problems call it. A run that `starts_anew` overwrites an older one,
    whatever its recipe was."""
    problems: list[Problem] = []
    try:
        loaded = load_recipe(file, overrides) if text is None else parse_recipe(text, file, overrides)
    except RecipeError as error:
        if not isinstance(error.readable, Loaded):
            return Validated(file, error.problems)
        loaded, problems = error.readable, list(error.problems)
    known = {problem.key for problem in problems}
    found: hub.ModelSource | None = None
    try:
        found = hub.find_model_shape(loaded.recipe, online=online)
    except RecipeError as error:
        problems += [replace(problem, where=loaded.locate(problem.key)) for problem in error.problems]
    broken = check_recipe(loaded, found.shape if found else None, num_processes, hub.find_tokenizer(loaded.recipe))
    known |= {"run.output_dir"} if starts_anew else set()
    problems += [problem for problem in broken if not _follows(problem, known)]
    if problems or found is None:
        return Validated(file, tuple(sorted(problems, key=lambda problem: problem.where)), loaded)
    return Validated(file, (), loaded, found.shape, found.source, resolve(loaded.recipe, found.shape, loaded.places))


def _follows(problem: Problem, known: set[str]) -> bool:
    """Whether a rule complains of a value that has a problem of its own, or speaks of what stands in for it."""
    words = set(re.findall(r"[\w.]+[\w]", f"{problem.message} {problem.hint}"))
    return problem.key in known or any(key in words for key in known)


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Recipe files and `section.key=value` overrides, in any order. A key without `=value` stays with the words that
    may have been meant as its value: loading says what is missing."""
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
    return Problem("", f"{len(files)} recipes: {', '.join(files)}", "name one; settings are KEY=VALUE, without spaces")


def no_recipe(words: Sequence[str]) -> Problem:
    return Problem("", f"no recipe among {' '.join(words)}", "name a recipe file; `ulysses recipes list` shows some")
