"""Tests that `verify` passes models with convolutions and recurrences, and detects each fault planted in what splits
them over ranks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.hybrids import describe_hybrid
from support.tiers import mark_by
from test_verify import Plant, check_passes, list_failed, patch, prove_with

# Delta rules compute in float32: with wider weights, even one rank's gradients differ from plain torch by up to 2e-2.
RANGES = dict.fromkeys(("qwen3_5_text", "zamba2"), 0.05)


def describe(model_type: str) -> dict[str, Any]:
    return describe_hybrid(model_type, vocab_size=260, initializer_range=RANGES.get(model_type, 0.2))


def plant_dropped_halo() -> list[Any]:
    """A slice begins as if nothing came before it."""

    def make(real: Any) -> Any:
        return lambda slices, num_tokens, num_kept, axis: real(slices, num_tokens, [0] * len(num_kept), axis)

    return [patch("ulysses_cli.train.recurrence.convolution.gather_halo", make)]


def plant_kept_state() -> list[Any]:
    """The state of a document is where the next one begins."""
    from ulysses_cli.train.attention.documents import make_documents

    def make(real: Any) -> Any:
        def run(rule: Any, shared: Any, own: Any, parameters: Any, documents: Any, bounds: Any) -> Any:
            return real(rule, shared, own, parameters, make_documents([documents.num_tokens]), bounds)

        return run

    return [patch("ulysses_cli.train.recurrence.rules._run_documents", make)]


def plant_wrong_group() -> list[Any]:
    """Each rank gets the B and C, or the queries and keys, of the other one's heads."""

    def make(real: Any) -> Any:
        def plan(*args: Any) -> Any:
            right = real(*args)
            chunks = tuple(replace(chunk, keys=chunk.keys[::-1]) for chunk in right.chunks)
            wrong = replace(right, chunks=chunks)
            object.__setattr__(wrong, "list_runs", lambda chunk, rank: right.list_runs(right.chunks[0], rank))
            return wrong

        return plan

    return [patch("ulysses_cli.train.recurrence.rules.plan_heads", make)]


def plant_lost_decay_gradient() -> list[Any]:
    """The gradient of A_log lacks the share of rank 1's heads in a scan, and of rank 1's tokens in a delta rule."""

    def make_rule(real: Any) -> Any:
        def apply(original: Any, query: Any, key: Any, value: Any, g: Any, beta: Any, documents: Any, axis: Any, *more: Any) -> Any:  # fmt: skip  # noqa: E501
            if axis.rank == 1 and g.requires_grad:
                g = g * 1.0
                g.register_hook(torch.zeros_like)
            return real(original, query, key, value, g, beta, documents, axis, *more)

        return apply

    def make(real: Any) -> Any:
        def scan(original: Any, hidden: Any, dt: Any, b: Any, c: Any, of_heads: Any, documents: Any, axis: Any, *more: Any) -> Any:  # fmt: skip  # noqa: E501
            if axis.rank == 1 and of_heads["A"].requires_grad:
                decay = of_heads["A"] * 1.0
                decay.register_hook(torch.zeros_like)
                of_heads = {**of_heads, "A": decay}
            return real(original, hidden, dt, b, c, of_heads, documents, axis, *more)

        return scan

    interface = "ulysses_cli.train.recurrence.interface"
    return [patch(f"{interface}.apply_scan", make), patch(f"{interface}.apply_delta_rule", make_rule)]


FAULTS: dict[str, tuple[Plant, str]] = {
    "halo": (plant_dropped_halo, "loss"),
    "state": (plant_kept_state, "leak: the first document"),
    "group": (plant_wrong_group, "loss"),
    "decay": (plant_lost_decay_gradient, "gradients"),
}
CHECKED = {("qwen3_5_text", "state")}  # by `make check`


@pytest.mark.parametrize(
    "model_type",
    [pytest.param(name, marks=pytest.mark.full) for name in ("lfm2", "bamba", "qwen3_5_text", "kimi_linear", "zamba2")],
)
def test_without_a_fault_everything_passes(model_type: str, tmp_path: Path) -> None:
    rows = prove_with(list, tmp_path, proof_config=describe(model_type))
    check_passes(rows)
    assert "leak: the first document" in {row.name for row in rows}


@pytest.mark.parametrize(
    ("model_type", "fault"),
    [
        pytest.param(name, fault, marks=mark_by(False, (name, fault) in CHECKED))
        for name in ("bamba", "qwen3_5_text", "kimi_linear", "lfm2")
        for fault in (FAULTS if name != "lfm2" else ("halo",))
    ],
)
def test_a_planted_fault_fails(model_type: str, fault: str, tmp_path: Path) -> None:
    plant, found_by = FAULTS[fault]
    assert found_by in list_failed(prove_with(plant, tmp_path, proof_config=describe(model_type)))
