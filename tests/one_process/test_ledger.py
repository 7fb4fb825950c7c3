"""Compares the ledger's activation terms with counted steps of transformers' models with our attention, levers and
loss. ranks/test_trace.py compares what DeepSpeed adds with a trace."""

from typing import Any

import pytest
from support.counted_steps import compare_step, list_cases
from support.tiers import mark_by

QUICK = {("tied, query norms", "no recompute", 4)}
CHECKED = {
    ("grouped keys", "full recompute", 1), ("norms behind", "tiled loss", 2), ("experts", "tiled loss", 4),
    ("fused projections", "tiles, chunks", 2),
}  # fmt: skip


def mark_cases() -> list[Any]:
    return [pytest.param(*case, marks=mark_by(case in QUICK, case in CHECKED)) for case in list_cases()]


@pytest.mark.parametrize(("model", "levers", "sp_size"), mark_cases())
def test_the_ledger_predicts_what_a_step_allocates(model: str, levers: str, sp_size: int) -> None:
    counted, predicted = compare_step(model, levers, sp_size)
    assert predicted == pytest.approx(counted, rel=0.03)


BRANCHES = [
    ("all keys", "long row, tiles", 1), ("all keys", "long row, tiles, full", 2), ("grouped keys", "no recompute", 2),
    ("all keys", "long row, tiles, chunks", 2), ("grouped keys", "long row, large tiles", 4),
    ("experts with sinks", "tiles", 1),
]  # fmt: skip


@pytest.mark.parametrize("case", [pytest.param(case, marks=mark_by(case == BRANCHES[-1], False)) for case in BRANCHES])
def test_the_ledger_predicts_a_step_of_answers_that_share_their_prompt(case: tuple[str, str, int]) -> None:
    counted, predicted = compare_step(*case, has_branch=True)
    assert predicted == pytest.approx(counted, rel=0.03)
