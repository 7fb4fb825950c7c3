"""Compares every call into FlashAttention 2, 3 and 4, torch's flash kernel and cuDNN with the real signatures. Those of
FlashAttention and torch were read from their releases as text, those of the installed torch from itself. Nothing here
has run on a GPU: names, order and meaning of arguments are proven, values are not.
"""

import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from support.foreign_calls import (
    FUNCTIONS,
    OPERATORS,
    bind_to_schema,
    get_installed_schema,
    load_schemas,
    load_signatures,
    make_module,
)
from support.paths import ROOT
from support.refusals import explain
from support.tiers import sample_every
from syrupy.assertion import SnapshotAssertion

from ulysses_cli.train.attention.documents import make_documents
from ulysses_cli.train.attention.kernels import flash, native
from ulysses_cli.train.attention.kernels.native import Rule

TORCH = load_schemas()
RELEASES = [(kernel, version) for kernel, versions in load_signatures().items() for version in versions]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LENGTHS, SCALE = (5, 3), 0.3
DOCUMENTS = make_documents(LENGTHS)
RULES = {
    "full": Rule(SCALE),
    "window": Rule(SCALE, 4),
    "softcap": Rule(SCALE, None, 2.0),
    "round": Rule(SCALE, is_causal=False),
}
NO_WINDOW = {"flash_attention_2": (-1, -1), "flash_attention_3": (-1, -1), "flash_attention_4": (None, None)}


def make_tensors() -> dict[str, torch.Tensor]:
    q, k = torch.randn(8, 4, 16), torch.randn(8, 2, 16)
    return {"dout": q.clone(), "q": q, "k": k, "v": k.clone(), "out": q.clone(), "lse": torch.zeros(4, 8)}


def answer(name: str, bound: Any) -> Any:
    """What the release returns, with tensors of the right shapes."""
    q = bound["q"]
    if name.endswith(("forward", "fwd")):
        return q.clone(), torch.zeros(q.size(1), q.size(0)), None, None
    return tuple(torch.zeros_like(bound[each]) for each in "qkv")


def check_rule(kernel: str, bound: dict[str, Any], rule: Rule) -> None:
    assert bound["softmax_scale"] == rule.scale
    assert bound.get("causal", bound.get("is_causal")) is rule.is_causal
    assert bound["cu_seqlens_q"] is DOCUMENTS.cu_seqlens
    assert bound["cu_seqlens_k"] is DOCUMENTS.cu_seqlens
    assert bound["max_seqlen_q"] == bound["max_seqlen_k"] == max(LENGTHS)
    sides = bound.get("window_size") or (bound["window_size_left"], bound["window_size_right"])
    assert sides == (NO_WINDOW[kernel] if rule.window_tokens is None else (3, 0))
    if kernel != "flash_attention_4":
        assert bound["softcap"] == (rule.softcap or 0.0)
        assert bound.get("dropout_p", 0.0) == 0.0


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize(("kernel", "version"), sample_every(3, RELEASES))
def test_each_release_takes_the_calls(kernel: str, version: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = RULES[kind]
    if kernel == "flash_attention_4" and rule.softcap is not None:
        pytest.skip("is not given a softcap: plan/attention.py")
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(flash, "_load", lambda *_: make_module(kernel, version, calls, answer))
    tensors = make_tensors()
    out, lse = flash.VERSIONS[kernel].forward(*(tensors[name] for name in "qkv"), DOCUMENTS, rule)
    assert (out.shape, lse.shape) == (tensors["q"].shape, tensors["lse"].shape)
    grads = flash.VERSIONS[kernel].backward(*tensors.values(), DOCUMENTS, rule)
    assert [grad.shape for grad in grads] == [tensors[name].shape for name in "qkv"]
    forward, backward = calls
    for bound in calls:
        check_rule(kernel, bound, rule)
        for name in "qkv":
            assert bound[name] is tensors[name]
    if kernel == "flash_attention_4":
        assert forward["return_lse"] is True
    names = {"dout": "dout", "out": "out", "lse": "softmax_lse" if kernel != "flash_attention_4" else "lse"}
    for ours, theirs in names.items():
        assert backward[theirs] is tensors[ours]
    if kernel != "flash_attention_4":  # gradients are written into these
        assert [backward[name].shape for name in ("dq", "dk", "dv")] == [tensors[name].shape for name in "qkv"]
        assert backward["deterministic"] is False


def test_a_release_without_an_argument_is_refused(monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion) -> None:
    """A future release that drops the softcap must not compute without it."""
    version = next(iter(load_signatures()["flash_attention_3"]))
    module = make_module("flash_attention_3", version, [], answer)

    def forward(q: Any, k: Any, v: Any, softmax_scale: Any, causal: bool, window_size: Any) -> None:
        raise AssertionError("was called")

    module._flash_attn_forward = forward
    monkeypatch.setattr(flash, "_load", lambda *_: module)
    tensors = make_tensors()
    assert (
        explain(flash.forward_3, *(tensors[name] for name in "qkv"), DOCUMENTS, RULES["softcap"], error=TypeError)
        == snapshot
    )


def test_the_stand_in_refuses_a_wrong_call() -> None:
    """The proof must be able to fail."""
    for kernel, version in RELEASES:
        module = make_module(kernel, version, [], answer)
        for name in FUNCTIONS[kernel]:
            with pytest.raises(TypeError):
                getattr(module, name)(no_such_argument=1)


class Aten:
    """torch's operators, each replaced by one that only binds its arguments to the schema."""

    def __init__(self, version: str, results: Any) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.version, self.results = version, results

    def __getattr__(self, name: str) -> Any:
        schema = torch._C.parse_schema(TORCH[self.version][name])

        def call(*args: Any, **options: Any) -> Any:
            self.calls.append((name, bind_to_schema(schema, args, options)))
            return self.results(name, len(schema.returns))

        return call


@pytest.mark.parametrize("version", TORCH)
@pytest.mark.parametrize("kind", ["full", "window"])
def test_torchs_flash_kernel_takes_the_calls(kind: str, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rule, tensors = RULES[kind], make_tensors()
    aten = Aten(version, lambda name, num: [torch.zeros(1)] * num)
    monkeypatch.setattr(native, "aten", aten)
    native.forward_varlen(*(tensors[name] for name in "qkv"), DOCUMENTS, rule)
    native.backward_varlen(*tensors.values(), DOCUMENTS, rule)
    (_, forward), (_, backward) = aten.calls
    for bound in (forward, backward):
        assert (bound["cum_seq_q"], bound["cum_seq_k"]) == (DOCUMENTS.cu_seqlens, DOCUMENTS.cu_seqlens)
        assert (bound["max_q"], bound["max_k"]) == (5, 5)
        assert (bound["dropout_p"], bound["is_causal"], bound["scale"]) == (0.0, True, SCALE)
        window = (bound.get("window_size_left"), bound.get("window_size_right"))
        assert window == ((3, 0) if rule.window_tokens else (None, None))
    assert forward["return_debug_mask"] is False
    for name, theirs in {"dout": "grad_out", "q": "query", "k": "key", "v": "value", "lse": "logsumexp"}.items():
        assert backward[theirs] is tensors[name]


@pytest.mark.parametrize("version", TORCH)
def test_cudnn_takes_the_calls(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = make_tensors()

    def make_results(name: str, num: int) -> Any:
        heads = [torch.zeros(1, 4, 5, 16), torch.zeros(1, 2, 5, 16), torch.zeros(1, 2, 5, 16)]
        return heads if name.endswith("backward") else [torch.zeros(1, 4, 5, 16), torch.zeros(1, 4, 5, 1)] * num

    aten = Aten(version, make_results)
    monkeypatch.setattr(native, "aten", aten)
    one = make_documents((5,))
    dout, q, k, v, out = (tensors[name][:5] for name in ("dout", "q", "k", "v", "out"))
    native.forward_cudnn(q, k, v, one, Rule(SCALE))
    native.backward_cudnn(dout, q, k, v, out, tensors["lse"][:, :5], one, Rule(SCALE))
    (_, forward), (_, backward) = aten.calls
    for bound in (forward, backward):
        assert (bound["attn_bias"], bound["dropout_p"], bound["is_causal"], bound["scale"]) == (None, 0.0, True, SCALE)
    assert (forward["compute_log_sumexp"], forward["return_debug_mask"]) == (True, False)
    assert (backward["max_q"], backward["max_k"]) == (5, 5)
    assert (backward["cum_seq_q"], backward["cum_seq_k"]) == (None, None)
    assert backward["logsumexp"].shape == (1, 4, 5, 1)


@pytest.mark.parametrize("start", ["raise RuntimeError('built for another torch')", "import os; os._exit(3)"])
def test_presence_runs_no_code_of_a_package(start: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A rank asks for it in its own process."""
    inner = tmp_path / "broken_kernels" / "cute"
    inner.mkdir(parents=True)
    for folder in (inner.parent, inner):
        (folder / "__init__.py").write_text(start)
    (inner / "interface.py").write_text(start)
    monkeypatch.syspath_prepend(str(tmp_path))
    names = [
        "broken_kernels", "broken_kernels.cute", "broken_kernels.cute.interface", "broken_kernels.other", "nobody.x",
    ]  # fmt: skip
    assert [flash.has_module(name) for name in names] == [True, True, True, False, False]


@pytest.mark.parametrize("version", TORCH)
def test_torchs_fused_norm_and_its_sum_in_a_product_have_these_schemas(version: str) -> None:
    """train/elementwise/operators.py and train/memory/tiling.py call them so."""
    schemas = {name: torch._C.parse_schema(text) for name, text in TORCH[version].items()}
    some = SimpleNamespace()
    bound = bind_to_schema(schemas["_fused_rms_norm"], (some, (8,), some, 1e-5), {})
    assert list(bound) == ["input", "normalized_shape", "weight", "eps"]
    backward = (some, some, (8,), some, some, [True, True])
    bound = bind_to_schema(schemas["_fused_rms_norm_backward"], backward, {})
    assert list(bound) == ["grad_out", "input", "normalized_shape", "rstd", "weight", "output_mask"]
    for name, args, options in (
        ("addmm.dtype_out", (some, some, some), {"out_dtype": torch.float32, "out": some}),
        ("mm.dtype", (some, some), {"out_dtype": torch.float32}),
    ):
        bind_to_schema(schemas[name], args, options)


def test_the_stored_schemas_are_those_of_installed_releases() -> None:
    """The text of a release says what its library registers; the range of versions that pyproject.toml allows begins
    with the first stored one."""
    version = torch.__version__.partition("+")[0]
    assert version in TORCH, f"add torch {version}: support/foreign_calls.py says how"
    for name in OPERATORS:
        stored, installed = torch._C.parse_schema(TORCH[version][name]), get_installed_schema(name)
        ours, theirs = (
            [(each.name, str(each.type), each.kwarg_only) for each in schema.arguments]
            for schema in (stored, installed)
        )
        assert ours == theirs, name
    lowest = next(each for each in map(Requirement, PROJECT["dependencies"]) if each.name == "torch").specifier
    stored_versions = [each for each in TORCH if each != "installed"]
    assert all(lowest.contains(each) for each in stored_versions)
    assert any(f"{lowest}" == f">={each.rpartition('.')[0]}" for each in stored_versions)
