"""Tests that `ulysses verify` passes a ring, alone and with Ulysses inside, and detects each fault planted in it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.paths import ROOT, TINY_RECIPE
from support.rank_pool import run_on_ranks
from support.tiers import mark_by
from support.training import make_recipe
from test_exact_training import make_sinks_config
from test_verify import CONFIG, patch, trace_with
from test_verify import FAULTS as FAULTS_OF_ALL
from torch import Tensor

from ulysses_cli.plan.layout import Layout
from ulysses_cli.plan.models.shape import read_model_shape
from ulysses_cli.prove.results import Row

ALONE, INSIDE = (1, 2), (2, 2)  # ranks that share heads, ranks of the ring


def prove_ring(
    layout: tuple[int, int], fault: str, folder: Path, *words: str, config: dict[str, Any] = CONFIG
) -> list[Row]:
    from ulysses_cli.prove.shrink import make_proof_recipe
    from ulysses_cli.prove.verify import judge, make_reference, make_task

    ulysses_size, ring_size = layout
    size = ulysses_size * ring_size
    recipe = make_recipe(f"parallel.sp_size={size}", "train.gradient_accumulation_steps=2", *words, config=config)
    whole = read_model_shape(config, "test")
    proof = make_proof_recipe(recipe, config, whole, Layout(sp_size=size, ring_size=ring_size), "cpu")[0]
    shape = read_model_shape(proof.model.config or {}, "test")
    task = make_task(proof, shape, folder)
    return judge(f"sp {size}", run_on_ranks(size, trace_with, FAULTS[fault], task)[0], make_reference(task), shape)


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


FAULTS: dict[str, Callable[[], list[Any]]] = {
    **{name: FAULTS_OF_ALL[name] for name in ("none", "mean", "boundary", "leak", "window")},
    "own log-sum-exp": plant_own_log_sum_exp,
    "lost key gradient": plant_lost_key_gradient,
    "plain order": plant_plain_order,
}
FOUND_BY = {
    "mean": "gradients", "boundary": "loss", "leak": "leak: the first document", "window": "evaluation loss",
    "own log-sum-exp": "gradients", "lost key gradient": "gradients", "plain order": "loss",
}  # fmt: skip


@pytest.mark.parametrize(
    "layout", [pytest.param(each, marks=mark_by(False, each == ALONE)) for each in (ALONE, INSIDE)]
)
def test_a_ring_passes(layout: tuple[int, int], tmp_path: Path) -> None:
    rows = prove_ring(layout, "none", tmp_path)
    assert {row.verdict for row in rows} == {"PASS"}, rows
    assert {"loss", "gradients", "weights", "leak: late tokens", "leak: the token before a window of 40"} <= {
        row.name for row in rows
    }


@pytest.mark.full
def test_experts_with_biases_and_sinks_pass(tmp_path: Path) -> None:
    """A bias of experts has two dimensions and does not decay."""
    rows = prove_ring(ALONE, "none", tmp_path, "train.weight_decay=1.0", config=make_sinks_config())
    assert {row.verdict for row in rows} == {"PASS"}, rows


@pytest.mark.parametrize(
    ("layout", "fault"),
    [
        pytest.param(layout, fault, marks=mark_by(False, (layout, fault) == (ALONE, "lost key gradient")))
        for layout in (ALONE, INSIDE)
        for fault in FOUND_BY
    ],
)
def test_a_fault_planted_in_a_ring_fails(layout: tuple[int, int], fault: str, tmp_path: Path) -> None:
    failed = {row.name for row in prove_ring(layout, fault, tmp_path) if row.verdict == "FAIL"}
    assert FOUND_BY[fault] in failed, failed


def prove(*words: str) -> set[str]:
    """Runs `ulysses verify`. Returns the groups of its rows, all of which passed."""
    command = [sys.executable, "-m", "ulysses_cli", "verify", *words, "--format", "json"]
    environ = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["passed"]
    assert {row["verdict"] for row in answer["rows"]} == {"PASS"}, answer["rows"]
    return {row["group"] for row in answer["rows"]}


@pytest.mark.full
def test_the_command_proves_a_ring() -> None:
    words = ("parallel.sp_size=4", "parallel.ring_size=2")
    assert prove(str(TINY_RECIPE), *words) == {"sp 1", "sp 4 (ring 2)"}


# The recipe of a ring, and those of families with recurrences, convolutions and layers of two head sizes.
PROVEN = {
    "qwen2.5-7b-128k-8gpu": {"sp 1", "sp 8 (ring 2)"},
    "qwen3.5-9b-256k-8gpu": {"sp 1", "sp 8"},
    "gemma-4-31b-128k-2x8gpu": {"sp 1 x dp 2", "sp 8"},
    "nemotron-3-nano-256k-2x8gpu": {"sp 1 x dp 2", "sp 8"},
    "lfm2-1.2b-32k-24gb": {"sp 1"},
}


@pytest.mark.full
@pytest.mark.parametrize("name", PROVEN)
def test_the_command_proves_a_recipe(name: str) -> None:
    assert prove(str(ROOT / "recipes" / f"{name}.yaml")) == PROVEN[name]
