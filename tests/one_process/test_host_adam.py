"""Tests that a resumed run does not depend on the powers of betas that DeepSpeed's Adam for the host remembers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ulysses_cli.train.optimizer.states import reset_beta_powers

BETAS = (0.85, 0.97)
NUM_STEPS = 12


def make(weight: torch.Tensor, forgets: bool) -> tuple[Any, torch.nn.Parameter]:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    parameter = torch.nn.Parameter(weight.clone())
    optimizer = DeepSpeedCPUAdam([parameter], lr=0.01, betas=BETAS, eps=1e-8, weight_decay=0.1, adamw_mode=True)
    if forgets:
        optimizer.register_step_pre_hook(reset_beta_powers)
    return optimizer, parameter


def step_again(optimizer: Any, parameter: torch.nn.Parameter, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        parameter.grad = torch.randn_like(parameter)
        optimizer.step()


def resume(forgets: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the weights of an uninterrupted run, and of one that stopped after each step and resumed in a new
    process."""
    torch.manual_seed(99)
    start = torch.randn(4096)
    whole, expected = make(start, forgets)
    step_again(whole, expected, range(NUM_STEPS))
    _, parameter = make(start, forgets)
    state: dict[str, Any] = {}
    for step in range(NUM_STEPS):
        optimizer, parameter = make(parameter.data, forgets)
        optimizer.state[parameter] = state
        step_again(optimizer, parameter, range(step, step + 1))
        state = optimizer.state[parameter]
    return expected.data, parameter.data


@pytest.mark.full
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one() -> None:
    expected, ours = resume(forgets=True)
    assert torch.equal(ours, expected)
    expected, reference = resume(forgets=False)
    assert not torch.equal(reference, expected), "DeepSpeed keeps no powers any more: reset_beta_powers has no purpose"
    assert torch.allclose(reference, expected)


@pytest.mark.full
def test_weights_are_those_of_adamw_to_rounding() -> None:
    torch.manual_seed(99)
    start = torch.randn(4096)
    optimizer, parameter = make(start, forgets=True)
    expected = torch.nn.Parameter(start.clone())
    reference = torch.optim.AdamW([expected], lr=0.01, betas=BETAS, eps=1e-8, weight_decay=0.1)
    step_again(optimizer, parameter, range(NUM_STEPS))
    step_again(reference, expected, range(NUM_STEPS))
    assert torch.allclose(parameter, expected, rtol=1e-5, atol=1e-6)
