"""Tests the cases that compare operators past 2^31 elements with halves: on few rows, and on a CPU what fits it."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from support.large_rows import CASES, PAST, LargeCase, compare, differentiate

from ulysses_cli.plan.hardware import GIB
from ulysses_cli.plan.rows.indexing import OPERATORS

NEEDED_BYTES = 12 * GIB  # the largest case takes 10.6 GiB
CPU = torch.device("cpu")


def test_every_operator_that_may_pass_2_to_the_31_has_a_case() -> None:
    assert {name.partition(":")[0] for name in CASES} == {
        operator.name for operator in OPERATORS if operator.verdict != "refused"
    }


@pytest.mark.check
@pytest.mark.parametrize("name", CASES)
def test_halves_of_few_rows_agree(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    indexing = importlib.import_module("ulysses_cli.plan.rows.indexing")
    monkeypatch.setattr(indexing, "WRAP_BYTES", 1 << 16)
    monkeypatch.setattr(indexing, "PIECE_BYTES", 1 << 16)
    with _joining_alone(name, tmp_path):
        assert compare(CASES[name], CPU, (400 if name == "dropout" else 40)) <= (0.02 if name == "dropout" else 0.01)


@contextmanager
def _joining_alone(name: str, folder: Path) -> Iterator[None]:
    """A world of one rank for the case that needs one."""
    if name == "all_to_all":
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    try:
        yield
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


@pytest.mark.parametrize("side", ["reads", "writes"])
def test_a_wrapped_index_of_a_backward_is_seen(side: str) -> None:
    """One that reads the output's gradient, or writes the input's, at other rows."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, rows: torch.Tensor) -> torch.Tensor:
            return rows * 2

        @staticmethod
        def backward(_: Any, dout: torch.Tensor) -> torch.Tensor:
            drows = dout * 2
            source, target = (slice(0, 10), slice(30, 40)) if side == "reads" else (slice(30, 40), slice(0, 10))
            if len(drows) == 40:
                drows[target] = drows[source].clone()
            return drows

    assert compare(LargeCase(lambda _: differentiate(Twice.apply), 64), CPU, 40) > 0.1


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.cpu_dtype])
def test_past_2_to_the_31_as_in_halves_on_a_cpu(name: str, tmp_path: Path) -> None:
    """Our own code and torch's for a CPU; kernels of a GPU are tested in tests/gpu."""
    if psutil.virtual_memory().available < NEEDED_BYTES:
        pytest.skip(f"needs {NEEDED_BYTES / GIB:.0f} GiB of free memory")
    case = CASES[name]
    with _joining_alone(name, tmp_path):
        assert compare(case, CPU, PAST, case.cpu_dtype) <= 0.02
