"""The choice of kernels for recurrences and convolutions, with kernels of a package that is right, leaks or fails."""

import re
import sys
import weakref
from collections.abc import Callable
from functools import partial, wraps
from itertools import pairwise
from typing import Any

import pytest
import torch
from support.families import make_config
from support.hybrids import make_hybrid
from support.tiers import sample_every
from syrupy.assertion import SnapshotAssertion
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModelForCausalLM
from transformers.models.bamba import modeling_bamba
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.qwen3_next import modeling_qwen3_next

from ulysses_cli.plan.models.layers import DeltaNetMixer, KimiDeltaMixer, Mamba2Mixer
from ulysses_cli.prove.trace import kernels
from ulysses_cli.train import choosing as chooser
from ulysses_cli.train.attention.documents import make_documents
from ulysses_cli.train.choosing import Choice, Outcome, try_in_child
from ulysses_cli.train.clock import Clock
from ulysses_cli.train.memory.checkpointing import DeviceStorage, SavedResults
from ulysses_cli.train.model.parts import PACKAGES, PackagePresence, find_differences
from ulysses_cli.train.processes.groups import SequenceAxis, make_sequence_axis
from ulysses_cli.train.recurrence.choice import (
    PackedProbe,
    choose_recurrence_kernel,
    describe_cost,
    find_missing,
    time_torch,
    try_kernel,
)
from ulysses_cli.train.recurrence.interface import CONVOLUTION, serve_recurrent_layers
from ulysses_cli.train.recurrence.rules import Kernel, apply_delta_rule

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


DELTA_RULE = "torch_chunk_gated_delta_rule"


def run_here(try_out: Callable[[], Outcome]) -> Outcome:
    """In this process, which has the package."""
    return try_out()


def choose(rule: str, package: Callable[..., Any], dtype: torch.dtype = torch.float32) -> Choice[Kernel]:
    """As if a package brought this kernel: transformers wraps its torch code with a call of it."""
    function, mixer = RULES[rule]
    torch_code = get_torch_code(function)

    @wraps(torch_code)
    def wrapper(*args: Any, **options: Any) -> Any:
        return package(torch_code, args, options)

    probe = PackedProbe(rule, wrapper, mixer, CPU)
    return choose_recurrence_kernel(probe, dtype, lambda: describe_cost(12.34, 262_144), run_here)


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


def make_rounding(large: float) -> Callable[..., Any]:
    """A right kernel whose result is the sum of two that nearly cancel, both rounded to the dtype of its tensors."""

    def run(torch_code: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        result = run_packed(torch_code, args, options)
        out = result[0] if isinstance(result, tuple) else result
        rounded = (out.float() + large).to(args[0].dtype) - large
        return (rounded, None) if isinstance(result, tuple) else rounded

    return run


def run_late(torch_code: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Begins the second document one token late."""
    if "cu_seqlens" in options:
        late = options["cu_seqlens"].clone()
        late[1] += 1
        options["cu_seqlens"] = late
    elif "seq_idx" in options:
        late = options["seq_idx"].clone()
        late[:, find_bounds(dict(options))[1]] = 0
        options["seq_idx"] = late
    return run_packed(torch_code, args, options)


def run_failing(*_: Any) -> Any:
    raise RuntimeError("no image of this kernel for this device")


@pytest.mark.parametrize("rule", RULES)
def test_a_right_kernel_takes_whole_rows_and_one_that_leaks_single_documents(
    rule: str, snapshot: SnapshotAssertion
) -> None:
    assert list(vars(choose(rule, run_packed)).values()) == snapshot
    leaking = choose(rule, run_leaking)
    assert leaking.name == "by document"
    assert "packed differs" in leaking.reason


@pytest.mark.parametrize("rule", sample_every(3, RULES))
def test_a_kernel_may_round_as_gpus_do(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vector near zero is compared with half of the mean norm, since its rounding does not shrink with it."""
    rounding = make_rounding({"mamba2": 32.0}.get(rule, 1.0))  # eight times a usual value
    assert choose(rule, rounding, torch.bfloat16).name == "packed"
    assert choose(rule, run_late, torch.bfloat16).name == "by document"
    assert choose(rule, run_wrong, torch.bfloat16).name == "torch"
    monkeypatch.setattr(chooser, "LEAST_NORM", 0.1)
    assert "packed differs" in choose(rule, rounding, torch.bfloat16).reason


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
def test_a_leak_smaller_than_rounding_is_found(rule: str, is_backward: bool, snapshot: SnapshotAssertion) -> None:
    choice = choose(rule, make_small_leak(is_backward=is_backward), torch.bfloat16)
    assert choice.name == "by document"
    assert re.sub(r"\d+", "N", choice.reason) == snapshot
    assert choose(rule, run_packed, torch.bfloat16).name == "packed"


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

    probe = PackedProbe(DELTA_RULE, package, mixer, CPU)
    assert try_kernel(probe, "packed", torch.float32).obstacle == ""
    assert time_torch(probe, 1, torch.float32, 1) > 0


def test_wrong_and_failing_kernels_leave_torch_with_its_cost(snapshot: SnapshotAssertion) -> None:
    wrong = choose("delta net", run_wrong)
    assert wrong.name == "torch"
    assert "by document differs" in wrong.reason
    failing = choose("mamba2", run_failing)
    assert (failing.name, failing.reason) == ("torch", snapshot)


def make_presence(machine: str, missing: str = "", **versions: str) -> PackagePresence:
    known = dict.fromkeys(PACKAGES, "1.0") | {name.replace("_", "-"): version for name, version in versions.items()}
    return PackagePresence(machine, known, {"rule": missing, "scan": ""})


def test_a_kernel_that_ranks_do_not_have_alike_is_passed_over(snapshot: SnapshotAssertion) -> None:
    """A rank without the package would run torch's code, which drops documents' bounds, where others run a kernel."""
    a, b, lacks = make_presence("a"), make_presence("b"), make_presence("c", "fla is not installed")
    assert find_differences([a, b]) == {}
    cases = ([a, b, lacks], [lacks, b], [lacks] * 2, [a, make_presence("b", triton="3.4")])
    assert [find_differences(each) for each in cases] == snapshot


def make_original_probe(name: str, function: Any) -> PackedProbe:
    """Of transformers' own function, where another test has served a model of this family."""
    original = function.__wrapped__ if hasattr(function, "is_served") else function
    return PackedProbe(name, original, RULES["delta net"][1], CPU)


def test_a_package_that_ends_its_process_ends_no_run(snapshot: SnapshotAssertion) -> None:
    command = [sys.executable, "-c", "import sys; sys.stderr.write('CUDA error: an illegal access'); sys.exit(3)"]
    probe = make_original_probe(DELTA_RULE, RULES["delta net"][0])
    choice = choose_recurrence_kernel(probe, torch.float32, run_trial=partial(try_in_child, command=command))
    assert (choice.name, choice.reason) == ("torch", snapshot)


@pytest.mark.full
def test_a_child_tries_the_kernel_that_this_process_asks_for() -> None:
    """Without a package transformers' function is torch's code: exact by document, and without bounds of documents."""
    choice = choose_recurrence_kernel(make_original_probe(DELTA_RULE, RULES["delta net"][0]), torch.float32)
    assert choice.name == "by document"
    assert "packed failed its probe" in choice.reason
    convolution = make_original_probe(CONVOLUTION, modeling_bamba.causal_conv1d_fn)
    assert choose_recurrence_kernel(convolution, torch.float32).name == "by document"


@pytest.mark.parametrize("rule", RULES)
def test_a_wrapper_that_drops_bounds_in_silence_is_seen_through(rule: str, snapshot: SnapshotAssertion) -> None:
    """As in releases of transformers before 5.18. A package that is installed is not missing."""
    torch_code = get_torch_code(RULES[rule][0])
    assert find_missing(wraps(torch_code)(lambda *tensors, cu_seqlens: torch_code(*tensors))) == snapshot
    for package in (lambda hidden, *_, **__: hidden.shape, lambda hidden, *_, **__: hidden):
        assert find_missing(wraps(torch_code)(package)) == ""


@pytest.mark.parametrize("shift", [0, 1])
def test_a_convolution_that_shifts_tokens_is_passed_over(shift: int) -> None:
    torch_code = get_torch_code(modeling_bamba.causal_conv1d_fn)

    @wraps(torch_code)
    def package(hidden: Tensor, *args: Any, **options: Any) -> Any:
        return torch_code(hidden.roll(shift, 2), *args, **options)

    probe = PackedProbe(CONVOLUTION, package, RULES["mamba2"][1], CPU)
    obstacle = try_kernel(probe, "by document", torch.float32).obstacle
    assert obstacle.startswith("differs ") == bool(shift)


@pytest.mark.parametrize("rule", ["delta net", "mamba2", CONVOLUTION])
def test_a_traced_kernel_returns_what_the_real_one_does(rule: str) -> None:
    """Results and gradients are shaped as those of transformers' own code."""
    function, mixer = RULES.get(rule, (modeling_bamba.causal_conv1d_fn, RULES["mamba2"][1]))
    stand_in = {"delta net": kernels.apply_delta_rule, "mamba2": kernels.apply_scan}.get(rule, kernels.convolve)
    torch_code, way = get_torch_code(function), "by document" if rule == CONVOLUTION else "packed"
    wrapper = wraps(torch_code)(lambda *args, **options: stand_in(*args, **options))
    traced = PackedProbe(rule, wrapper, mixer, CPU).run(way, torch.float32)
    expected = PackedProbe(rule, torch_code, mixer, CPU).run("torch", torch.float32)
    assert [(part.shape, part.dtype) for part in traced] == [(part.shape, part.dtype) for part in expected]


@pytest.mark.parametrize(("model_type", "has_kernel"), [("lfm2", True), ("lfm3", False)])
def test_a_trace_runs_a_convolution_without_a_kernel_as_it_is(
    model_type: str, has_kernel: bool, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    model = make_hybrid(model_type, "eager")
    module = sys.modules[type(model).__module__]
    own = getattr(module, CONVOLUTION)
    while hasattr(own, "is_served"):  # by another test
        own = own.__wrapped__
    monkeypatch.setattr(module, CONVOLUTION, own)
    kernels.replace_kernels(model)
    assert getattr(module, CONVOLUTION) is (kernels.convolve if has_kernel else own)
    assert has_kernel or find_missing(own) == snapshot


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


@pytest.mark.parametrize("family", ["qwen3_5_text", "bamba", "lfm2"])
def test_recurrences_are_counted_in_both_passes(family: str) -> None:
    torch.manual_seed(0)
    kinds = {"layer_types": ["linear_attention", "linear_attention"]} if family == "qwen3_5_text" else {}
    model = AutoModelForCausalLM.from_config(make_config(family, **kinds), attn_implementation="eager")
    model.model.layers = model.model.layers[:1]  # the recurrent one
    serve_recurrent_layers(model, make_sequence_axis(None))
    clock = Clock(torch.device("cpu"))
    clock.start()
    loss = model(torch.arange(1, 13)[None], documents=make_documents((8, 4)), use_cache=False).logits.sum()
    num_forward = sum(part == "recurrence" for _, part in clock.marks)
    loss.backward()
    parts = [part for _, part in clock.marks]
    assert clock.stop()["recurrence"] > 0
    assert 0 < num_forward < parts.count("recurrence")
    assert parts[-1] == "projections"  # what the backward computes after the first convolution
