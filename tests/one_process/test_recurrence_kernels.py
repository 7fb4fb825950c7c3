"""The choice of kernels for recurrences and convolutions, with kernels of a package that is right, leaks or fails."""

import sys
import weakref
from collections.abc import Callable
from functools import partial, wraps
from itertools import pairwise
from typing import Any

import pytest
import torch
from support.hybrids import make_hybrid
from support.tiers import sample_every
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers.models.bamba import modeling_bamba
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.qwen3_next import modeling_qwen3_next

from ulysses_cli.plan.models.layers import DeltaNetMixer, KimiDeltaMixer, Mamba2Mixer
from ulysses_cli.prove.trace import kernels
from ulysses_cli.train.attention.documents import make_documents
from ulysses_cli.train.memory.checkpointing import DeviceStorage, SavedResults
from ulysses_cli.train.model.parts import PACKAGES, RecurrencePresence, find_differences
from ulysses_cli.train.processes.groups import SequenceAxis
from ulysses_cli.train.recurrence.interface import CONVOLUTION
from ulysses_cli.train.recurrence.kernels import (
    RecurrenceChoice,
    choose_recurrence_kernel,
    describe_cost,
    find_missing,
    find_obstacle,
)
from ulysses_cli.train.recurrence.probes import ConvolutionProbe, RuleProbe, time_convolution, time_rule
from ulysses_cli.train.recurrence.rules import apply_delta_rule
from ulysses_cli.train.recurrence.trial_process import find_obstacle_in_process

CPU = torch.device("cpu")
RULES: dict[str, Any] = {
    "delta net": (modeling_qwen3_next.torch_chunk_gated_delta_rule, DeltaNetMixer(2, 4, 8, 8, 4)),
    "kimi delta": (modeling_kimi_linear.chunk_kimi_delta_attention, KimiDeltaMixer(4, 8, 4)),
    "mamba2": (modeling_bamba.mamba2_chunk_scan, Mamba2Mixer(4, 8, 2, 8, 4, 16)),
}


def get_torch_code(function: Any) -> Callable[..., Any]:
    """Beneath transformers' wrapper, and ours where another test has served a model of this family."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function  # type: ignore[no-any-return]


def choose(rule: str, package: Callable[..., Any], dtype: torch.dtype = torch.float32) -> RecurrenceChoice:
    """As if a package brought this kernel: transformers wraps its torch code with a call of it."""
    function, mixer = RULES[rule]
    torch_code = get_torch_code(function)

    @wraps(torch_code)
    def wrapper(*args: Any, **options: Any) -> Any:
        return package(torch_code, args, options)

    try_kernel = partial(find_obstacle, RuleProbe(wrapper, mixer, CPU), dtype=dtype)
    return choose_recurrence_kernel(try_kernel, explain_cost=lambda: describe_cost(12.34, 262_144))


def find_bounds(options: dict[str, Any]) -> list[int]:
    """Takes the documents' bounds out of the options of a packed call."""
    options.pop("cu_seqlens_cpu", None)
    if "cu_seqlens" in options:
        return [int(bound) for bound in options.pop("cu_seqlens")]
    if "seq_idx" in options:
        number = options.pop("seq_idx")[0]
        changes = (number[1:] != number[:-1]).nonzero().flatten() + 1
        return [0, *(int(change) for change in changes), len(number)]
    return []


def run_packed(torch_code: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """A right kernel: a document's state begins at its bound."""
    bounds = find_bounds(options)
    if not bounds:
        return torch_code(*args, **options)
    results = []
    for begin, end in pairwise(bounds):

        def cut(value: Any, begin: int = begin, end: int = end) -> Any:
            return value[:, begin:end] if isinstance(value, Tensor) and value.dim() > 2 else value

        result = torch_code(*map(cut, args), **{name: cut(value) for name, value in options.items()})
        results.append(result[0] if isinstance(result, tuple) else result)
    out = torch.cat(results, 1)
    return (out, None) if isinstance(result, tuple) else out


def run_leaking(torch_code: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Ignores the bounds."""
    find_bounds(options)
    return torch_code(*args, **options)


def run_wrong(torch_code: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    result = run_leaking(torch_code, args, options)
    return (result[0] * 1.5, None) if isinstance(result, tuple) else result * 1.5


def run_failing(*_: Any) -> Any:
    raise RuntimeError("no image of this kernel for this device")


@pytest.mark.check
@pytest.mark.parametrize("rule", RULES)
def test_a_right_kernel_takes_whole_rows(rule: str) -> None:
    assert choose(rule, run_packed) == RecurrenceChoice("packed", "equals torch's code on packed documents")


@pytest.mark.parametrize("rule", RULES)
def test_a_kernel_that_leaks_takes_one_document_at_a_time(rule: str) -> None:
    choice = choose(rule, run_leaking)
    assert choice.kernel == "by document"
    assert "packed differs from torch's code by" in choice.reason


def make_small_leak(*, is_backward: bool) -> Callable[..., Any]:
    """A kernel that adds a two-hundredth of the token before a document to its first token, or of that token's gradient
    to the one before: less than bfloat16's rounding is allowed to be."""

    def run(torch_code: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        bounds = find_bounds(dict(options))
        result = run_packed(torch_code, args, options)
        if not bounds:
            return result
        out = result[0] if isinstance(result, tuple) else result
        before = out[:, bounds[-2] - 1] * 0.005
        leaked = out.clone()
        leaked[:, bounds[-2]] += before - before.detach() if is_backward else before
        return (leaked, None) if isinstance(result, tuple) else leaked

    return run


@pytest.mark.parametrize("rule", sample_every(4, RULES))
@pytest.mark.parametrize("is_backward", [pytest.param(False, marks=pytest.mark.check), True])
def test_a_leak_smaller_than_rounding_is_found(rule: str, is_backward: bool) -> None:
    choice = choose(rule, make_small_leak(is_backward=is_backward), torch.bfloat16)
    assert choice.kernel == "by document"
    what = "gradient" if is_backward else "result"
    assert f"packed leaks: the {what} of one document changes with document" in choice.reason
    assert choose(rule, run_packed, torch.bfloat16).kernel == "packed"


def refuse_key_groups(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    """A delta rule of releases in which layers repeat keys to the heads of values."""
    if key.size(2) != value.size(2):
        raise RuntimeError(f"{key.size(2)} heads of keys do not match {value.size(2)} of values")
    return get_torch_code(RULES["delta net"][0])(query, key, value, **options)


def test_a_rule_that_takes_repeated_keys_gets_them() -> None:
    """What no layer hands over would end a run at its start."""
    mixer = RULES["delta net"][1]

    @wraps(refuse_key_groups)
    def package(*args: Any, **options: Any) -> Any:
        return run_packed(refuse_key_groups, args, options)

    assert find_obstacle(RuleProbe(package, mixer, CPU), "packed", torch.float32) == ""
    assert time_rule(package, mixer, 1, CPU, torch.float32, 1) > 0


@pytest.mark.check
def test_torch_code_is_timed_with_the_heads_of_a_rank() -> None:
    """Twice the forwards and twice the heads take longer."""
    function, _ = RULES["delta net"]
    mixer = DeltaNetMixer(8, 16, 16, 16, 4)
    times = [
        time_rule(get_torch_code(function), mixer, num_ranks, CPU, torch.float32, num_forwards)
        for num_ranks, num_forwards in ((16, 1), (1, 3))
    ]
    assert 0 < times[0] < times[1]
    convolution = get_torch_code(modeling_bamba.causal_conv1d_fn)
    assert time_convolution(convolution, mixer, CPU, torch.float32, 1) > 0


def test_wrong_and_failing_kernels_leave_torch_with_its_cost() -> None:
    wrong = choose("delta net", run_wrong)
    assert wrong.kernel == "torch"
    assert "by document differs from torch's code by" in wrong.reason
    failing = choose("mamba2", run_failing)
    assert failing.kernel == "torch"
    assert "packed failed its probe: no image of this kernel for this device" in failing.reason
    assert "at least 12.3 s in a step for each million tokens of a row" in failing.reason
    assert "3.23 s for each row of 262,144 tokens of this run" in failing.reason
    assert "pip install 'ulysses-cli[recurrent]'" in failing.reason


def make_presence(machine: str, missing: str = "", **versions: str) -> RecurrencePresence:
    known = dict.fromkeys(PACKAGES, "1.0") | {name.replace("_", "-"): version for name, version in versions.items()}
    return RecurrencePresence(machine, known, {"rule": missing, "scan": ""})


def test_a_kernel_that_ranks_do_not_have_alike_is_passed_over() -> None:
    """A rank without the package would run torch's code, which drops documents' bounds, where others run a kernel."""
    assert find_differences([make_presence("a"), make_presence("b")]) == {}
    assert find_differences([make_presence("a"), make_presence("b"), make_presence("c", "fla is not installed")]) == {
        "rule": "fla is not installed on c (rank 2)"
    }
    alone = find_differences([make_presence("a", "fla is not installed"), make_presence("b")])
    assert alone == {"rule": "fla is not installed on a (rank 0)"}
    assert find_differences([make_presence("a", "no package")] * 2) == {"rule": "no package"}
    differing = find_differences([make_presence("a"), make_presence("b", triton="3.4")])
    assert differing == dict.fromkeys(("rule", "scan"), "triton has several versions: 3.4 on b (rank 1) and 1.0 on a")


def test_a_package_that_ends_its_process_ends_no_run() -> None:
    function, mixer = RULES["delta net"]
    ends = [sys.executable, "-c", "import sys; sys.stderr.write('CUDA error: an illegal access'); sys.exit(3)"]
    name = "torch_chunk_gated_delta_rule"
    obstacle = find_obstacle_in_process(name, function, mixer, "packed", CPU, torch.float32, ends)
    assert obstacle == "ended its process with exit code 3: CUDA error: an illegal access"


@pytest.mark.full
def test_a_child_tries_the_kernel_that_this_process_asks_for() -> None:
    """Without a package transformers' function is torch's code: exact by document, and without bounds of documents."""
    function, mixer = RULES["delta net"]
    name = "torch_chunk_gated_delta_rule"
    assert find_obstacle_in_process(name, function, mixer, "by document", CPU, torch.float32) == ""
    packed = find_obstacle_in_process(name, function, mixer, "packed", CPU, torch.float32)
    assert "failed its probe" in packed
    convolution = modeling_bamba.causal_conv1d_fn
    assert find_obstacle_in_process(CONVOLUTION, convolution, mixer, "by document", CPU, torch.float32) == ""


def test_a_missing_package_is_named() -> None:
    function = RULES["delta net"][0]
    original = function.__wrapped__ if hasattr(function, "is_served") else function
    assert "flash-linear-attention" in find_missing(original)
    assert find_missing(get_torch_code(function)) == "transformers has no kernel for it"


@pytest.mark.parametrize("rule", RULES)
def test_a_wrapper_that_drops_bounds_in_silence_is_seen_through(rule: str) -> None:
    """As in releases of transformers before 5.18."""
    torch_code = get_torch_code(RULES[rule][0])
    dropping = wraps(torch_code)(lambda *tensors, cu_seqlens: torch_code(*tensors))
    assert find_missing(dropping) == "transformers found no package for it"


@pytest.mark.parametrize("rule", RULES)
def test_an_installed_package_is_not_missing(rule: str) -> None:
    torch_code = get_torch_code(RULES[rule][0])

    def run_package(hidden: Tensor, *_: Any, **__: Any) -> Any:
        return hidden.shape

    assert find_missing(wraps(torch_code)(run_package)) == ""
    assert find_missing(wraps(torch_code)(lambda hidden, *_, **__: hidden)) == ""


@pytest.mark.parametrize("shift", [0, 1])
def test_a_convolution_that_shifts_tokens_is_passed_over(shift: int) -> None:
    torch_code = get_torch_code(modeling_bamba.causal_conv1d_fn)

    @wraps(torch_code)
    def package(hidden: Tensor, *args: Any, **options: Any) -> Any:
        return torch_code(hidden.roll(shift, 2), *args, **options)

    obstacle = find_obstacle(ConvolutionProbe(package, 4, "silu", CPU), "by document", torch.float32)
    assert obstacle.startswith("differs from torch's code by") == bool(shift)


@pytest.mark.parametrize("rule", ["delta net", "mamba2"])
def test_a_traced_kernel_returns_what_the_real_one_does(rule: str) -> None:
    """Results and gradients are shaped as those of transformers' own code."""
    function, mixer = RULES[rule]
    stand_in = {"delta net": kernels.apply_delta_rule, "mamba2": kernels.apply_scan}[rule]
    torch_code = get_torch_code(function)
    wrapper = wraps(torch_code)(lambda *args, **options: stand_in(*args, **options))
    traced = RuleProbe(wrapper, mixer, CPU).run("packed", torch.float32)
    expected = RuleProbe(torch_code, mixer, CPU).run("torch", torch.float32)
    assert [(part.shape, part.dtype) for part in traced] == [(part.shape, part.dtype) for part in expected]


def test_a_traced_convolution_returns_what_the_real_one_does() -> None:
    traced = ConvolutionProbe(kernels.convolve, 4, "silu", CPU).run("by document", torch.float32)
    torch_code = get_torch_code(modeling_bamba.causal_conv1d_fn)
    expected = ConvolutionProbe(torch_code, 4, "silu", CPU).run("torch", torch.float32)
    assert [(part.shape, part.dtype) for part in traced] == [(part.shape, part.dtype) for part in expected]


@pytest.mark.parametrize(("model_type", "has_kernel"), [("lfm2", True), ("lfm3", False)])
def test_a_trace_runs_a_convolution_without_a_kernel_as_it_is(
    model_type: str, has_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_hybrid(model_type, "eager")
    module = sys.modules[type(model).__module__]
    own = getattr(module, CONVOLUTION)
    while hasattr(own, "is_served"):  # by another test
        own = own.__wrapped__
    monkeypatch.setattr(module, CONVOLUTION, own)
    kernels.replace_kernels(model)
    assert getattr(module, CONVOLUTION) is (kernels.convolve if has_kernel else own)
    assert (find_missing(own) == "transformers has no kernel for it") != has_kernel


def test_a_layer_that_saves_its_result_keeps_none_of_what_it_was_computed_from() -> None:
    """What the recomputation makes again must be gone after the forward, as without saved results."""
    leaf, kept = torch.randn(1, 12, 2, 4, requires_grad=True), []

    def run(leaf: Tensor) -> Tensor:
        query, key, value = (leaf * number for number in (1, 2, 3))
        kept.extend(weakref.ref(part.untyped_storage()) for part in (query, key, value))
        g, beta = -leaf[..., 0].exp(), leaf[..., 1].sigmoid()
        rule, place = RULES["delta net"][0], (make_documents([5, 7], CPU), SequenceAxis(None, 1, 0))
        return apply_delta_rule(get_torch_code(rule), query, key, value, g, beta, *place, {})

    with saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing):
        result = SavedResults(DeviceStorage()).call(run, leaf)
    assert result.requires_grad
    assert [part() for part in kept] == [None] * 3
