"""Tests that what rank 0 alone tries ends on all ranks alike, also when it fails."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from support.rank_pool import run_on_ranks

from ulysses_cli.plan.layout import Layout
from ulysses_cli.train.assembly import recurrent_layers
from ulysses_cli.train.assembly.loading import BuildError
from ulysses_cli.train.processes.groups import make_groups


def choose_in_vain(error: Exception) -> str:
    groups, plan = make_groups(Layout(sp_size=2), timedelta(seconds=60)), mock.Mock()
    functions: dict[str, Any] = {"causal_conv1d_fn": len}
    with mock.patch.object(recurrent_layers, "_choose_kernel", side_effect=error) as chosen:
        try:
            recurrent_layers.choose_recurrences(functions, plan, groups, torch.device("cuda"))
        except Exception as caught:  # noqa: BLE001 - its kind is what is tested
            assert chosen.called == (dist.get_rank() == 0)
            return f"{type(caught).__name__}: {caught}"
    return "no error"


def test_a_recurrence_that_rank_0_cannot_choose_ends_all_ranks() -> None:
    refused = run_on_ranks(2, choose_in_vain, ValueError("no kernel"), time_limit=60)
    assert refused == [f"{BuildError.__name__}: no kernel"] * 2
    assert run_on_ranks(2, choose_in_vain, OSError("a broken driver"), time_limit=60) == [
        "OSError: a broken driver",
        "RuntimeError: rank 0: a broken driver",
    ]
