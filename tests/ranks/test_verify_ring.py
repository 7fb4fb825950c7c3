"""Tests that `ulysses verify` passes a ring, alone and with Ulysses inside, and detects each fault planted in it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiers import mark_by
from test_exact_training import make_sinks_config
from test_verify import ALWAYS_PROVEN, Plant, check_passes, list_failed, patch, prove_with
from test_verify import FAULTS as FAULTS_OF_ALL
from torch import Tensor

from ulysses_cli.plan.layout import Layout

ALONE, INSIDE = Layout(sp_size=2, ring_size=2), Layout(sp_size=4, ring_size=2)


def plant_own_log_sum_exp() -> list[Any]:
    """The backward of a run of queries uses a log-sum-exp that lacks the first half of its keys."""
    from ulysses_cli.train.attention.kernels import operators

    def make(real: Any) -> Any:
        def run(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *row: Any) -> Any:
            halved = torch.cat([torch.zeros_like(k[: k.size(0) // 2]), k[k.size(0) // 2 :]])
            _, own_lse = operators.attend(q, halved, v, None, *row)
            return real(dout, q, k, v, out, own_lse, *row)

        return run

    return [patch("ulysses_cli.train.attention.ring.run_backward", make)]


def plant_lost_key_gradient() -> list[Any]:
    """What other ranks of the ring have found for a rank's keys and values does not return to it."""

    def lose_gathered(real: Any) -> Any:
        return lambda dkeys, dvalues, plan, ring, dtype: real(
            *((grad * 0 if ring.rank else grad) for grad in (dkeys, dvalues)), plan, ring, dtype
        )

    def lose_sent(real: Any) -> Any:
        return lambda self, joined, after: real(self, joined * 0, after)

    return [
        patch("ulysses_cli.train.attention.ring.return_gradients", lose_gathered),
        patch("ulysses_cli.train.attention.ring.ReturningGradients.send", lose_sent),
    ]


def plant_plain_order() -> list[Any]:
    """Each rank reads the next tokens of the row, and not the chunks that it was dealt."""

    def make(real: Any) -> Any:
        def load(self: Any, batch: Any) -> Any:
            axis, local = self.groups.sp_axis, batch.input_ids.shape[1]
            positions = torch.arange(axis.rank * local, (axis.rank + 1) * local)
            return real(self, batch) | {"positions": positions[None].expand(batch.input_ids.shape)}

        return load

    return [patch("ulysses_cli.train.engine.Engine._load", make)]


FAULTS: dict[str, tuple[Plant, str]] = {
    **{name: FAULTS_OF_ALL[name] for name in ("mean", "boundary", "leak", "window")},
    "own log-sum-exp": (plant_own_log_sum_exp, "gradients"),
    "lost key gradient": (plant_lost_key_gradient, "gradients"),
    "plain order": (plant_plain_order, "loss"),
}


@pytest.mark.parametrize(
    "layout", [pytest.param(each, marks=mark_by(False, each == ALONE)) for each in (ALONE, INSIDE)]
)
def test_a_ring_passes(layout: Layout, tmp_path: Path) -> None:
    rows = prove_with(list, tmp_path, layout=layout)
    check_passes(rows)
    assert {row.name for row in rows} >= ALWAYS_PROVEN


@pytest.mark.full
def test_experts_with_biases_and_sinks_pass(tmp_path: Path) -> None:
    """A bias of experts has two dimensions and does not decay."""
    check_passes(prove_with(list, tmp_path, "train.weight_decay=1.0", config=make_sinks_config(), layout=ALONE))


@pytest.mark.parametrize(
    ("layout", "fault"),
    [
        pytest.param(layout, fault, marks=mark_by(False, (layout, fault) == (ALONE, "lost key gradient")))
        for layout in (ALONE, INSIDE)
        for fault in FAULTS
    ],
)
def test_a_fault_planted_in_a_ring_fails(layout: Layout, fault: str, tmp_path: Path) -> None:
    plant, found_by = FAULTS[fault]
    assert found_by in list_failed(prove_with(plant, tmp_path, layout=layout))
