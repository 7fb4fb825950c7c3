"""What a rank says of its recurrent layers: which package is missing, what torch's code costs this run, and that
kernels of an installed package are used, except the one that cannot be cut."""

import re
import sys
from collections.abc import Callable
from functools import partial
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from support.hybrids import describe_hybrid, make_hybrid
from support.tiers import sample
from support.training import make_recipe
from syrupy.assertion import SnapshotAssertion
from test_recurrence_kernels import get_torch_code, run_here, run_packed
from torch import Tensor
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

from ulysses_cli.plan.models.shape import read_model_shape
from ulysses_cli.plan.planner.lever_choice import choose_levers
from ulysses_cli.plan.resolved import RunPlan, settle
from ulysses_cli.train.attention.documents import make_documents, walk_bounds
from ulysses_cli.train.attention.interface import register_attention
from ulysses_cli.train.choosing import Choice
from ulysses_cli.train.model import parts
from ulysses_cli.train.processes.groups import SequenceAxis
from ulysses_cli.train.recurrence import choice as choosing
from ulysses_cli.train.recurrence.choice import find_missing
from ulysses_cli.train.recurrence.interface import CONVOLUTION, FUSED, SCAN, list_functions, serve_recurrent_layers
from ulysses_cli.train.recurrence.rules import Kernel, apply_delta_rule

CPU = torch.device("cpu")
DELTA_RULE, KIMI_RULE = "torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention"
# function -> a family that calls it, its package, the package's name for it, what pip calls the package
KERNELS = {
    DELTA_RULE: ("qwen3_5_text", "fla", "chunk_gated_delta_rule", "flash-linear-attention"),
    KIMI_RULE: ("kimi_linear", "fla", "chunk_kda", "flash-linear-attention"),
    SCAN: ("bamba", "mamba_ssm", "mamba_chunk_scan_combined", "mamba_ssm"),
    CONVOLUTION: ("lfm2", "causal_conv1d", "causal_conv1d_fn", "causal_conv1d"),
}
Package = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


def wrap_with_package(torch_code: Callable[..., Any], package: str, function: Any, monkeypatch: Any) -> Any:
    """transformers' own wrapper, made where `package` has this function, or None of that name."""
    name = function.__name__ if callable(function) else function
    module = None
    if callable(function):
        module = ModuleType(package)
        setattr(module, name, function)
    monkeypatch.setitem(sys.modules, package, module)
    return use_kernel_func_from_hub_with_fallback(name, package)(torch_code)


def make_package_function(name: str, torch_code: Callable[..., Any], run: Package) -> Any:
    """With the parameters of fla-core 0.5.2, mamba-ssm 2.3.2 and causal-conv1d 1.6.1 that are used here."""

    def chunk_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=False, cu_seqlens=None, cu_seqlens_cpu=None, **kwargs):  # type: ignore[no-untyped-def]
        bounds = {} if cu_seqlens is None else {"cu_seqlens": cu_seqlens}
        options = {"g": g, "beta": beta, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, **bounds}
        return run(torch_code, (q, k, v), options)

    def scan(x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, seq_idx=None, dt_softplus=False):  # type: ignore[no-untyped-def]
        bounds = {} if seq_idx is None else {"seq_idx": seq_idx}
        options = {"chunk_size": chunk_size, "D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus, **bounds}
        return run(torch_code, (x, dt, A, B, C), options)

    def convolve(x, weight, bias=None, seq_idx=None, activation=None):  # type: ignore[no-untyped-def]
        return run(torch_code, (x, weight, bias), {"activation": activation})

    function = {SCAN: scan, CONVOLUTION: convolve}.get(name, chunk_rule)
    function.__name__ = KERNELS[name][2]
    return function


def make_plan(model_type: str, *overrides: str) -> RunPlan:
    config = describe_hybrid(model_type)
    recipe = make_recipe(*overrides, config=config)
    shape = read_model_shape(config, "test")
    return settle(recipe, shape, choose_levers(recipe, shape, None).levers)


def get_function(name: str) -> Callable[..., Any]:
    return get_torch_code(list_functions(make_hybrid(KERNELS[name][0], "eager"))[name])


def copy_code(torch_code: Any) -> Callable[..., Any]:
    """A package's function runs no code of transformers."""
    code = torch_code.__code__.replace(co_name="in_package")
    return FunctionType(code, torch_code.__globals__, "in_package", torch_code.__defaults__, torch_code.__closure__)


def choose(name: str, run: Package | None, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> Choice[Kernel]:
    """As rank 0 does on a GPU. Without `run` the package is missing."""
    model_type, package, function_name, _ = KERNELS[name]
    torch_code = get_function(name)
    function = make_package_function(name, copy_code(torch_code), run) if run else function_name
    wrapper = wrap_with_package(torch_code, package, function, monkeypatch)
    plan = make_plan(model_type, *overrides)
    return parts._choose_recurrence(name, wrapper, plan, CPU, find_missing(wrapper), run_here)


@pytest.mark.parametrize("name", KERNELS)
def test_a_missing_package_is_named_with_the_cost_of_all_layers_for_this_runs_rows(
    name: str, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    """A convolution is split by tokens; the heads of a rule are split by what times it."""
    monkeypatch.setattr(parts, "time_torch", lambda *_: 140.0 if name == CONVOLUTION else 70.0)
    longer = ("parallel.sp_size=2", "data.max_length=100000", "data.pad_to_multiple_of=2")
    choice = choose(name, None, monkeypatch, *longer)
    assert (choice.name, choice.reason) == ("torch", snapshot)


@pytest.mark.parametrize("name", sample(KERNELS, quick=[SCAN, CONVOLUTION], checked=[DELTA_RULE]))
def test_an_installed_kernel_is_used(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = "by document" if name == CONVOLUTION else "packed"
    assert choose(name, run_packed, monkeypatch) == Choice(expected, "equals torch's code on packed documents")


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "lfm2"])
def test_a_run_prints_each_choice_with_its_reason(
    model_type: str, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    """A rank of a run, where no package is installed."""
    monkeypatch.setattr(choosing, "TIMED_TOKENS", 128)
    model, plan, lines = make_hybrid(model_type, "eager"), make_plan(model_type, "parallel.zero_stage=1"), []
    groups: Any = SimpleNamespace(sp_axis=SequenceAxis(None, 1, 0))

    def choose_all(functions: Any, plan: RunPlan, groups: Any, device: torch.device) -> dict[str, Choice[Kernel]]:
        wrapped = {
            name: wrap_with_package(get_torch_code(functions[name]), *KERNELS[name][1:3], monkeypatch)
            for name in functions
        }
        return {
            name: parts._choose_recurrence(name, function, plan, CPU, find_missing(function))
            for name, function in wrapped.items()
        }

    parts.serve_layers(model, plan, groups, CPU, choose_all, lines.append)
    assert [re.sub(r"[\d.,]+ s ", "SECONDS ", line) for line in lines] == snapshot


@pytest.mark.check
@pytest.mark.parametrize("model_type", ["bamba", "nemotron_h", "granitemoehybrid", "falcon_h1", "zamba2"])
def test_a_fused_mamba_kernel_that_is_installed_is_not_called(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It computes convolution, scan, norm and projection of whole documents at once; a layer that trains on split rows
    takes its other path, with the same result as documents by themselves."""
    lengths = (14, 1, 9)
    ids = torch.randint(3, 64, (1, sum(lengths)), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    expected = torch.cat(
        [make_hybrid(model_type, "eager").eval()(part, use_cache=False).logits for part in ids.split(lengths, 1)], 1
    )
    model = make_hybrid(model_type, "eager").train()
    module, calls = sys.modules[type(model).__module__], list[tuple[Any, ...]]()

    def mamba_split_conv1d_scan_combined(*args: Any, **options: Any) -> Any:
        calls.append(args)
        raise NotImplementedError("the fused kernel")

    torch_code = get_torch_code(getattr(module, FUSED))
    fused = wrap_with_package(torch_code, "mamba_ssm", mamba_split_conv1d_scan_combined, monkeypatch)
    monkeypatch.setattr(module, FUSED, fused)
    with pytest.raises(NotImplementedError):  # a plain model that trains calls it
        model(ids, use_cache=False)
    calls.clear()
    model.set_attn_implementation(register_attention(SequenceAxis(None, 1, 0), "sdpa"))  # type: ignore[operator]
    serve_recurrent_layers(model, SequenceAxis(None, 1, 0))
    options = {"position_ids": positions, "use_cache": False, "documents": make_documents(lengths)}
    torch.testing.assert_close(model(ids, **options).logits, expected, rtol=1e-5, atol=1e-6)
    assert not calls
    with pytest.raises(NotImplementedError):  # outside our layers it is what it was
        getattr(module, FUSED)(ids)


# What flash-linear-attention's rule takes, as read from wheels: fla-core 0.4.0 and 0.4.1, then 0.4.2 to 0.5.2.
def take_no_host_bounds(seen: list[Any], q, k, v, g, beta, use_qk_l2norm_in_kernel=False, cu_seqlens=None, **kwargs):  # type: ignore[no-untyped-def]
    seen.append((cu_seqlens, None, kwargs))
    return v, None


def take_host_bounds(
    seen: list[Any], q, k, v, g, beta, use_qk_l2norm_in_kernel=False, cu_seqlens=None, cu_seqlens_cpu=None, **kwargs
):  # type: ignore[no-untyped-def]
    seen.append((cu_seqlens, cu_seqlens_cpu, kwargs))
    return v, None


@pytest.mark.parametrize("take", [take_no_host_bounds, take_host_bounds])
def test_a_delta_rule_gets_bounds_on_the_host_where_it_takes_them(take: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer gets the same tensors: flash-linear-attention keeps what it derives from them by their identity."""
    seen: list[tuple[Tensor, Tensor | None, dict[str, Any]]] = []
    rule = partial(take, seen)
    rule.__name__ = "chunk_gated_delta_rule"  # type: ignore[attr-defined]
    wrapper = wrap_with_package(get_function(DELTA_RULE), "fla", rule, monkeypatch)
    documents, lengths = make_documents((5, 7)), (5, 7)
    q, v, g = torch.randn(1, 12, 2, 4), torch.randn(1, 12, 2, 4), torch.randn(1, 12, 2)
    for _ in ("two", "layers"):
        apply_delta_rule(wrapper, q, q, v, g, g, documents, SequenceAxis(None, 1, 0), {}, "packed")
    (on_device, on_host, rest), second = seen
    assert not rest
    assert second[0] is on_device
    assert second[1] is on_host
    bounds = [0, *(end for _, end in walk_bounds(lengths))]
    for each in [on_device] if take is take_no_host_bounds else [on_device, on_host]:
        assert each.tolist() == bounds
        assert each.dtype == torch.int64
        assert each.device == CPU
    assert (on_host is None) == (take is take_no_host_bounds)
