"""Compares formulas and runs on sizes with a trace of ten recipes that were drawn once."""

import pytest
from support.random_recipes import draw_recipe, make_drawn_job, measure_errors, predict_phases, run_phases, trace_phases

NUM_RECIPES, SEED = 10, 20261203


@pytest.mark.full
@pytest.mark.parametrize("number", range(NUM_RECIPES))
def test_formula_run_on_sizes_and_trace_agree(number: int) -> None:
    drawn = draw_recipe(SEED, number)
    traced = trace_phases(drawn)
    for phases, bar in ((predict_phases(make_drawn_job(drawn)), 0.05), (run_phases(drawn), 0.01)):
        assert abs(measure_errors(phases, traced)["peak"]) <= bar, f"{drawn.command}\n{drawn.describe()}"
