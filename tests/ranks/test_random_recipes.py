"""Compares the ledger's formula with a trace of random recipes: ten fixed ones and ten of this week."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from support.random_recipes import (
    PEAK_BAR,
    PHASE_BAR,
    WORST_PEAK_BAR,
    ComparedPhases,
    compare,
    draw_recipe,
    draw_recipes,
)

NUM_RECIPES, FIXED_SEED = 10, 20261122


def get_week_seed() -> int:
    """Returns the calendar's year and week: each week draws another sample."""
    year, week, _ = datetime.now(UTC).isocalendar()
    return 100 * year + week


def describe(comparison: ComparedPhases) -> str:
    errors = {"peak": comparison.peak_error, **comparison.phase_errors}
    output = ", ".join(f"{name} {error:+.1%}" for name, error in errors.items())
    return f"{output}\nagain: {comparison.drawn.command}\n{comparison.drawn.describe()}"


@pytest.mark.full
@pytest.mark.parametrize("number", range(NUM_RECIPES))
def test_formula_and_trace_agree_on_random_recipes(number: int) -> None:
    result = compare(draw_recipe(FIXED_SEED, number))
    assert abs(result.peak_error) <= PEAK_BAR, describe(result)
    assert abs(result.worst_phase[1]) <= PHASE_BAR, describe(result)


@pytest.mark.full
def test_formula_and_trace_agree_on_recipes_of_this_week() -> None:
    results = [compare(drawn) for drawn in draw_recipes(get_week_seed(), NUM_RECIPES, is_wide=True)]
    off = [each for each in results if abs(each.peak_error) > WORST_PEAK_BAR or abs(each.worst_phase[1]) > PHASE_BAR]
    assert off == [], "\n".join(map(describe, off))
