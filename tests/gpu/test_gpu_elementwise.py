"""Tests on a GPU that norms, rotary embedding and gated activations of one pass equal transformers' formula, and that
the run's choice among them says why."""

from typing import Any

import pytest
import torch

from ulysses_cli.train.elementwise.choice import (
    CANDIDATES,
    NORM_KINDS,
    TOLERANCE,
    Widths,
    _Trial,
    choose_implementations,
)

pytestmark = pytest.mark.gpu
ROWS = {"rotary": (32, 128), "gate": (14336,)}
CASES = [(part, way) for part, ways in CANDIDATES.items() for way in ways]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("part", "way"), CASES)
def test_a_way_is_exact(part: Any, way: Any, dtype: torch.dtype) -> None:
    trial = _Trial(part, torch.device("cuda"), dtype, ROWS.get(part, (4096,)))
    assert trial.compare(way) <= TOLERANCE[dtype]


def test_the_choice_is_measured() -> None:
    widths = Widths(4096, 32, 128, 14336, dict.fromkeys(NORM_KINDS, (4096, 128)))
    choice = choose_implementations(torch.device("cuda"), torch.bfloat16, widths, 32768)
    assert choice.implementations.keys() == CANDIDATES.keys()
    assert choice.reason.count("transformers ") >= len(CANDIDATES), "each part is measured against it"
