"""Tests the cases that compare operators past 2^31 elements with halves: on few rows, and on a CPU what fits it."""

from __future__ import annotations

import importlib
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from support.large_rows import CASES, PAST, LargeCase, compare

from ulysses_cli.plan.hardware import GIB
from ulysses_cli.plan.rows.census import OPERATORS

NEEDED_BYTES = 12 * GIB  # the largest case takes 10.6 GiB
CPU = torch.device("cpu")


def test_every_operator_that_may_pass_2_to_the_31_has_a_case() -> None:
    assert CASES.keys() == {operator.name for operator in OPERATORS if operator.verdict != "refused"}


@pytest.mark.check
@pytest.mark.parametrize("name", CASES)
def test_halves_of_few_rows_agree(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    indexing = importlib.import_module("ulysses_cli.plan.rows.indexing")
    monkeypatch.setattr(indexing, "WRAP_BYTES", 1 << 16)
    monkeypatch.setattr(indexing, "PIECE_BYTES", 1 << 16)
    if name == "all_to_all":
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        rows = 400 if name == "dropout" else 40
        assert compare(CASES[name], CPU, rows) <= (0.02 if name == "dropout" else 0.01)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def test_a_wrapped_index_is_seen() -> None:
    """A kernel whose index wraps reads and writes other rows."""

    def wrap(rows: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        out = rows * 2
        out[30:] = out[: max(0, len(rows) - 30)]
        return [out], []

    assert compare(LargeCase(lambda _: wrap, 64), CPU, 40) > 0.1


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.cpu_dtype])
def test_past_2_to_the_31_as_in_halves_on_a_cpu(name: str) -> None:
    """Our own code and torch's for a CPU; kernels of a GPU are tested in tests/gpu."""
    if psutil.virtual_memory().available < NEEDED_BYTES:
        pytest.skip(f"needs {NEEDED_BYTES / GIB:.0f} GiB of free memory")
    case = CASES[name]
    assert case.cpu_dtype is not None
    assert compare(case, CPU, PAST, case.cpu_dtype) <= 0.02
