"""Tests of DeepSpeed's Adam for the host: a resumed run does not depend on the powers of betas that it remembers, and
an image's build of it runs on any CPU with AVX2."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ulysses_cli.run.host import COMMON_CPU, PORTABLE, get_builds_folder, has_common_instructions, read_cpu_kind
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
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one_and_adamws_weights() -> None:
    expected, ours = resume(forgets=True)
    assert torch.equal(ours, expected)
    torch.manual_seed(99)
    adamw = torch.nn.Parameter(torch.randn(4096))
    optimizer = torch.optim.AdamW([adamw], lr=0.01, betas=BETAS, eps=1e-8, weight_decay=0.1)
    step_again(optimizer, adamw, range(NUM_STEPS))
    assert torch.allclose(expected, adamw, rtol=1e-5, atol=1e-6)
    expected, reference = resume(forgets=False)
    assert not torch.equal(reference, expected), "DeepSpeed keeps no powers any more: reset_beta_powers has no purpose"
    assert torch.allclose(reference, expected)


BUILD = """
import torch
from ulysses_cli.prove.doctor import ADAM_TOLERANCE, step_cpu_adam
from ulysses_cli.train.processes.host import build_cpu_adam
build_cpu_adam()
assert step_cpu_adam(torch.device("cpu"))[0] <= ADAM_TOLERANCE
"""


@pytest.mark.full
def test_an_images_build_is_for_all_cpus_with_avx2(tmp_path: Path) -> None:
    """As docker/Dockerfile builds it: with the compiler's flags for those, and none for this machine's CPU."""
    if not has_common_instructions(read_cpu_kind()):
        pytest.skip("this CPU has no AVX2")
    environ = {**os.environ, PORTABLE: "1", "TORCH_EXTENSIONS_DIR": str(tmp_path), "DS_ACCELERATOR": "cpu"}
    folder = get_builds_folder(environ)
    environ["TORCH_EXTENSIONS_DIR"] = str(folder)
    done = subprocess.run([sys.executable, "-c", BUILD], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (written,) = folder.rglob("build.ninja")
    flags = written.read_text().split()
    assert f"-march={COMMON_CPU}" in flags
    assert "-D__AVX256__" in flags
    assert "-march=native" not in flags
