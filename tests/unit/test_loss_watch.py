"""When a run says that its loss is far above its past: synthetic curves, with the times of both kinds known."""

import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from ulysses_cli.train.record import WINDOW, LossWatch


def watch(losses: list[float]) -> tuple[list[tuple[int, bool]], list[str]]:
    """The (step, state) at which the state changed, and what was said."""
    said: list[str] = []
    each = LossWatch(said.append)
    each.start(len(losses), ())
    lines = [{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)]
    for line in lines:
        each.mark(line)
    return [(int(line["step"]), bool(line["diverged"])) for line in lines if "diverged" in line], said


def make_run(noise: random.Random, num_steps: int, start: float, end: float, spread: float) -> list[float]:
    pace = num_steps / 5
    return [
        max(0.0, end + (start - end) * math.exp(-step / pace) + noise.gauss(0, spread)) for step in range(num_steps)
    ]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(1, 3000),
    st.sampled_from([(11.9, 2.2), (2.4, 1.9), (1.2, 0.05), (0.7, 0.7), (600.0, 4.0)]),
    st.sampled_from([0.02, 0.2, 0.5, 1.0]),
)
def test_an_ordinary_run_is_not_warned_of(seed: int, num_steps: int, ends: tuple[float, float], spread: float) -> None:
    """Up to a noise of one nat per step, as a batch of one short answer has, with spikes of a few steps."""
    noise = random.Random(seed)
    losses = make_run(noise, num_steps, *ends, spread)
    for block in range(num_steps // 200):
        at, length = 200 * block + noise.randrange(100), noise.randrange(1, WINDOW)
        losses[at : at + length] = [loss + 6 for loss in losses[at : at + length]]
    assert watch(losses) == ([], [])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 300), st.sampled_from([(3.9, 3.9), (7.0, 7.0), (12.0, 1967.0)]))
def test_a_rise_that_lasts_is_told_once_and_its_end_too(seed: int, before: int, rise: tuple[float, float]) -> None:
    noise, length = random.Random(seed), 100
    start = make_run(noise, 64 + before, 2.4, 1.9, 0.1)
    high = [rise[0] + (rise[1] - rise[0]) * step / length + noise.gauss(0, 0.1) for step in range(length)]
    (first, is_high), *others = watch([*start, *high])[0]
    assert is_high
    assert not others
    assert first == len(start) + WINDOW
    changes, _ = watch([*start, *high, *make_run(noise, 40, 1.9, 1.9, 0.1)])
    assert [state for _, state in changes] == [True, False]
    assert changes[1][0] == len(start) + length + 3


@pytest.mark.parametrize(
    "losses",
    [
        [11.3, 1967.0], [11.3, 11.2, 1967.0], [2.5, 400.0, 900.0, 1967.0], [2.5] * 5 + [8.0] * 3,
        [2.4, *[9.0] * 100],  # without warm-up the first loss alone is good
        [2.5 - step / 100 for step in range(100)] + [40.0, 300.0, 1967.0],
    ],
    ids=len,
)  # fmt: skip
def test_a_run_that_ends_far_above_its_past_ends_so(losses: list[float]) -> None:
    changes, said = watch(losses)
    assert changes[-1][1]
    assert len(said) == 1


def test_what_is_said_of_a_rise_and_of_its_end(snapshot: SnapshotAssertion) -> None:
    assert watch([2.0] * 64 + [8.0] * 100 + [2.0] * 40) == snapshot


def test_one_step_and_steps_without_a_number_say_nothing() -> None:
    assert watch([1967.0]) == ([], [])
    assert watch([2.5, *[math.nan] * 40, math.inf, 2.4, 2.4]) == ([], [])


def test_a_resumed_run_remembers_what_metrics_hold() -> None:
    said: list[str] = []
    each = LossWatch(said.append)
    lines: list[dict[str, Any]] = [{"step": step, "loss": 2.0} for step in range(1, 41)] + [{"step": 41, "loss": None}]
    each.start(100, lines)
    later: list[dict[str, Any]] = [{"step": step, "loss": 8.0} for step in range(42, 42 + WINDOW)]
    for line in later:
        each.mark(line)
    assert [line["step"] for line in later if "diverged" in line] == [41 + WINDOW]
    assert len(said) == 1
    again = LossWatch(said.append)
    again.start(100, [*lines, *later])
    again.mark({"step": 42 + WINDOW, "loss": 8.0})
    assert again.is_high
    assert len(said) == 1


def test_losses_of_pairs_are_no_nats_of_tokens() -> None:
    """The square of a margin moves by more from step to step than the loss of a token ever does."""
    said: list[str] = []
    each = LossWatch(said.append)
    each.start(60, ())
    for step in range(1, 61):
        line: dict[str, Any] = {"step": step, "loss": 25.0 if step < 30 else 40.0, "rewards/margins": 0.1}
        each.mark(line)
        assert "diverged" not in line
    assert not said
