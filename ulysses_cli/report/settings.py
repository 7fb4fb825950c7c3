"""Formats the settings of a recipe for people: as a table of all, or as a list with descriptions."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from ulysses_cli.plan.recipe.schema import Setting, format_value
from ulysses_cli.report.printing import format_table

WIDTH = 96


def tabulate_settings(settings: Sequence[Setting]) -> str:
    rows = [
        (
            setting.key,
            _write_default(setting),
            setting.unit,
            _write_takes(setting),
            setting.doc + _write_aliases(setting),
        )
        for setting in settings
    ]
    return format_table(("key", "default", "unit", "takes", "meaning"), rows)


def describe_settings(settings: Sequence[Setting]) -> str:
    return "\n\n".join(_describe(setting) for setting in settings)


def _describe(setting: Setting) -> str:
    unit = f" ({setting.unit})" if setting.unit else ""
    default = _write_default(setting)
    facts = [setting.doc, f"takes {_write_takes(setting)}{unit}"]
    facts += [default if setting.is_required else f"default: {default}"] if default else []
    facts += [f"also: {', '.join(setting.aliases)}"] if setting.aliases else []
    lines = [line for fact in facts for line in textwrap.wrap(fact, WIDTH, break_long_words=False)]
    return "\n  ".join([setting.key, *lines])


def _write_takes(setting: Setting) -> str:
    return "a section" if setting.accepts.section else setting.accepts.describe()


def _write_default(setting: Setting) -> str:
    if setting.is_required:
        return "required"
    return "" if setting.accepts.section else format_value(setting.default)


def _write_aliases(setting: Setting) -> str:
    return f" (also: {', '.join(setting.aliases)})" if setting.aliases else ""
