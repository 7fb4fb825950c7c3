"""Models and operators on sizes alone, beside torch's own tensors without data: every byte that comes and goes."""

import gc
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.families import FAMILIES, OWN_VALUES, make_config
from support.sized_models import PHASES, run_on_sizes, run_on_torch, start_meter
from support.tiers import FULL, TIER, sample
from torch._subclasses.fake_tensor import FakeTensorMode

import ulysses_cli.train.attention.kernels.operators  # noqa: F401 - the trace asks for its operators
from ulysses_cli.plan.sizes import autograd
from ulysses_cli.plan.sizes import tensor as sizes
from ulysses_cli.plan.sizes.library import Unknown, make_torch
from ulysses_cli.plan.sizes.sources import ModelSources
from ulysses_cli.plan.sizes.tensor import BY_NAME, UnknownOperator
from ulysses_cli.prove.trace.storages import Storages

# Their layers free some tensors in another order than torch, at no peak: choices of experts and scans over chunks.
OTHER_ORDER = {
    "apertus", "bailing_hybrid", "bamba", "cohere", "cohere2", "cohere2_moe", "cohere_compass_text", "deepseek_v2",
    "deepseek_v3", "ernie4_5_moe", "falcon_h1", "glm4_moe_lite", "gpt_oss", "granitemoehybrid", "jais2", "kimi_linear",
    "minicpm3", "nemotron_h", "olmo", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "starcoder2",
    "youtu", "zamba2",
}  # fmt: skip
QUICK = ("llama", "deepseek_v3")
CHECKED = (*QUICK, "gemma2", "mixtral", "qwen3_next", "zamba2", "gemma4_text", "gpt_oss")


@pytest.mark.parametrize("family", sample(sorted(FAMILIES), QUICK, CHECKED))
def test_a_model_takes_the_bytes_that_torch_takes(family: str) -> None:
    config = json.loads(json.dumps(make_config(family, **OWN_VALUES.get(family, {})).to_dict(), default=str))
    config["model_type"] = family
    real, own = run_on_torch(config, 64, "bfloat16"), run_on_sizes(config, 64, "bfloat16")
    assert own.weights == real.weights
    slack = 16 if family == "apertus" else 0  # numbers that its activation makes on the host
    for phase in PHASES:
        assert abs(own.peaks[phase] - real.peaks[phase]) <= slack
        if family not in OTHER_ORDER:
            assert own.changes[phase] == real.changes[phase]


# Programs of a torch module, which are run by torch and by the stand-in.
PROGRAMS: dict[str, Callable[..., Any]] = {
    "a product and its parts": lambda torch, x, w: torch.cat(torch.split(x * w, [1, 3], -1), -1),
    "a norm": lambda torch, x, w: w * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, True) + 1e-6)).to(x.dtype),
    "a rotation": lambda torch, x, w: torch.cat((-x[..., 2:], x[..., :2]), dim=-1) * w + x * w.cos(),
    "a gate": lambda torch, x, w: torch.nn.functional.silu(x) * torch.sigmoid(x + w) / (1 + x.exp()),
    "weights of a sum": lambda torch, x, w: torch.softmax(x, -1, dtype=torch.float32).to(x.dtype) * w,
    "matrices": lambda torch, x, w: torch.matmul(x.transpose(1, 2), x) + (x @ x.mT).sum(),
    "a linear layer": lambda torch, x, w: torch.nn.functional.linear(x, x[0].detach()).sum(-1, keepdim=True) * w,
    "a view that needs a copy": lambda torch, x, w: x.transpose(1, 2).reshape(x.shape[0], -1).reshape(x.shape) * w,
    "choices": lambda torch, x, w: torch.topk(x, 2, -1)[0].sum(-1, keepdim=True) * w + x.gather(-1, x.topk(4, -1)[1]),
    "masks": lambda torch, x, w: torch.where(x > 0, x, w).masked_fill(x < 1, 0.0),
    "a part that is overwritten": lambda torch, x, w: _overwrite(x * w, x),
    "a sum in place": lambda torch, x, w: (x * w).add_(x).mul(2.0),
    "differences": lambda torch, x, w: (x - w) / (w * w + x) - torch.tanh(x) + torch.sqrt(x * x),
    "einsum": lambda torch, x, w: torch.einsum("bij,bkj->bik", x * w, x) - 1.0,
    "sums along a row": lambda torch, x, w: torch.cumsum(x, -1) * w.unsqueeze(0).expand(x.shape),
    "layer norm": lambda torch, x, w: torch.nn.functional.layer_norm(x, (4,), w, w),
    "places among bounds": lambda torch, x, w: x * torch.searchsorted(torch.arange(4), torch.arange(4), out_int32=True),
    "padding": lambda torch, x, w: torch.nn.functional.pad(x, (1, 2)).narrow(-1, 1, 4) + w,
}  # fmt: skip


QUICK_PROGRAMS = ("a norm", "matrices", "a part that is overwritten")


def _overwrite(whole: Any, x: Any) -> Any:
    whole[..., :2] = x[..., 2:]
    return whole


@pytest.mark.parametrize("name", sample(list(PROGRAMS), QUICK_PROGRAMS, list(PROGRAMS)[::2]))
@settings(max_examples=24 if TIER == FULL else 3)  # each runs torch without data, which is slow
@given(
    batch=st.integers(1, 3),
    tokens=st.integers(1, 5),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    trains=st.booleans(),
)
def test_an_operator_takes_the_bytes_that_torch_takes(
    name: str, batch: int, tokens: int, dtype: str, trains: bool
) -> None:
    shape, program = (batch, tokens, 4), PROGRAMS[name]
    assert _run_sized(program, shape, dtype, trains) == _run_real(program, shape, dtype, trains)


def _run_real(program: Callable[..., Any], shape: tuple[int, ...], dtype: str, trains: bool) -> tuple[list[int], int]:
    storages, kind = Storages(sees_kernels=False), getattr(torch, dtype)
    with FakeTensorMode(), storages, torch.device("meta"):
        x = torch.empty(shape, dtype=kind, requires_grad=True)
        w = torch.empty(shape[-1:], dtype=kind, requires_grad=trains)
        storages.phase = "run"
        out = program(torch, x, w)
        out.backward(torch.empty_like(out))
    events = [event.num_bytes for event in storages.events if event.phase == "run" and not event.is_host]
    return [change for change in events if change > 0], storages.device.peaks["run"]


def _run_sized(program: Callable[..., Any], shape: tuple[int, ...], dtype: str, trains: bool) -> tuple[list[int], int]:
    gc.collect()
    gc.disable()
    try:
        meter = start_meter()
        x = sizes.make(shape, BY_NAME[dtype]).requires_grad_()
        w = sizes.make(shape[-1:], BY_NAME[dtype]).requires_grad_(trains)
        meter.enter("run")
        out = program(make_torch()["torch"], x, w)
        autograd.backward([out], [sizes.make_like(out)])
        meter.enter("")
    finally:
        gc.enable()
    return [change for change, phase, _ in meter.events or () if phase == "run" and change > 0], meter.device.peaks[
        "run"
    ]


@pytest.mark.parametrize("name", ["nonzero", "unique", "not_there"])
def test_what_has_no_sizes_is_refused_by_name(name: str) -> None:
    start_meter()
    Unknown.running = True
    try:
        with pytest.raises(UnknownOperator, match=name):
            getattr(make_torch()["torch"], name)(sizes.make((3,), BY_NAME["float32"]))
    finally:
        Unknown.running = False


@pytest.mark.parametrize("name", ["open", "eval", "exec", "compile"])
def test_a_models_file_reaches_nothing_outside(name: str) -> None:
    space = {"__builtins__": ModelSources(lambda *_: None).builtins}
    with pytest.raises(NameError):
        exec(f"{name}('x')", space)
    for module in ("os", "subprocess", "socket", "pathlib"):
        exec(f"import {module} as found", space)
        assert type(space["found"]).__name__ == "Namespace"  # nothing of the real one
