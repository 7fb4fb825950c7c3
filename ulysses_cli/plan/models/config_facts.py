"""config.json with transformers' own defaults for missing fields. A value that cannot be used raises a RecipeError that
names the model and the field.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ulysses_cli.plan.problem import Problem, RecipeError


@dataclass
class ConfigFacts:
    """`key`: the recipe's key that named the model."""

    values: Mapping[str, Any]
    name: str
    key: str
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def find(self, *names: str) -> Any:
        """The first of the fields that config.json has, else the first that has a default."""
        for source in (self.values, self.defaults):
            for name in names:
                if name in source:
                    return source[name]
        return None

    def find_number(self, *names: str) -> float | None:
        value = self.find(*names)
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)):
            return value
        raise self.complain(f"{self._choose_name(names)} is {value!r}, not a number")

    def find_count(self, *names: str) -> int | None:
        number = self.find_number(*names)
        if number is None:
            return None
        if number != int(number) or number < 0 or number > 2**40:
            raise self.complain(f"{self._choose_name(names)} is {number}, not a count")
        return int(number)

    def find_list(self, name: str) -> list[Any]:
        items = self.find(name)
        if items is None or isinstance(items, list | tuple):
            return list(items or ())
        raise self.complain(f"{name} is {items!r}, not a list")

    def find_mapping(self, name: str) -> Mapping[str, Any]:
        value = self.find(name)
        return value if isinstance(value, Mapping) else {}

    def get_count(self, *names: str) -> int:
        count = self.find_count(*names)
        if not count:
            name = self._choose_name(names)
            raise self.complain(f"{name} is missing" if count is None else f"{name} is {count}")
        return count

    def get_text(self, name: str) -> str:
        text = self.find(name)
        if not isinstance(text, str) or not text:
            raise self.complain(f"{name} is {'missing' if text is None else repr(text)}")
        return text

    def decide(self, flag: bool | str) -> bool:
        """A fact of the family, or the field that decides."""
        return bool(self.find(flag)) if isinstance(flag, str) else flag

    def complain(self, what: str) -> RecipeError:
        hint = "a model's config.json gives model_type, sizes and head counts"
        return RecipeError([Problem(self.key, f"the config of {self.name} cannot be used: {what}", hint)])

    def _choose_name(self, names: tuple[str, ...]) -> str:
        return next((name for name in names if name in self.values), names[0])
