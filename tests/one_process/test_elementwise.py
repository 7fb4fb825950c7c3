"""Tests norms, rotary embedding and gated activations of one pass against transformers' own code and autograd."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.families import ATTENTION_ONLY, make_config
from support.other_thread import backward_in_another_thread, run_in_thread
from support.tiers import sample
from syrupy.assertion import SnapshotAssertion
from torch import Tensor, library, nn
from torch._decomp import decomposition_table
from torch._inductor import metrics
from transformers import AutoModelForCausalLM
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as rotate_interleaved
from transformers.models.glm4_moe.modeling_glm4_moe import apply_rotary_pos_emb as rotate_partly
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from ulysses_cli.train.attention.kernels.operators import attend
from ulysses_cli.train.elementwise import choice as choosing
from ulysses_cli.train.elementwise import formulas, operators
from ulysses_cli.train.elementwise.choice import (
    CANDIDATES,
    NO_IMPLEMENTATIONS,
    Widths,
    _choose_part,
    choose_implementations,
)
from ulysses_cli.train.elementwise.interface import (
    _computes_rotation,
    find_norm_widths,
    recognise_norm,
    serve_elementwise,
)
from ulysses_cli.train.elementwise.operators import Normalize, Rotate
from ulysses_cli.train.memory.checkpointing import checkpoint_layers
from ulysses_cli.train.memory.tiling import tile_norms

ROWS = {"rotary": (4, 16)}  # of a trial
ALL_BLOCKS: Any = dict.fromkeys(CANDIDATES, "blocks")
NORMS: dict[str, type[nn.Module]] = {"rounded": LlamaRMSNorm, "precise": Olmo2RMSNorm, "offset": Gemma2RMSNorm}
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 0.008}  # of the largest value: bfloat16 keeps 8 bits
WITHOUT_PLAIN_NORMS = {
    "cohere", "cohere2", "cohere2_moe", "cohere_compass_text", "jais2", "nanochat", "olmo", "starcoder2",
}  # fmt: skip


def check_close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype
    error = (found.float() - expected.float()).abs().max() / expected.float().abs().max()
    assert error <= ROUNDING[dtype]


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture
def _fused_backward() -> Iterator[None]:
    """A CPU has torch's fused norm as a composite, and its backward as the decomposition that torch's compiler uses."""
    backward = torch.ops.aten._fused_rms_norm_backward.default
    with library._scoped_library("aten", "IMPL") as place:
        place.impl(backward, decomposition_table[backward], "CPU")
        yield


@pytest.mark.usefixtures("_fused_backward")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "way"),
    [(kind, way) for kind in NORMS for way in ("blocks", "torch") if way in ("blocks", *CANDIDATES[kind])],
)
def test_a_norm_equals_transformers_own(
    kind: str, way: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formulas, "BLOCK_ELEMENTS", 1000)
    norm: Any = NORMS[kind](48, eps=1e-3)
    norm.weight.data = (0.5 + draw(48).abs()).to(dtype)
    hidden, dout = (0.2 * draw(2, 37, 48, dtype=dtype)).requires_grad_(), draw(2, 37, 48, dtype=dtype, seed=1)
    exact: Any = NORMS[kind](48, eps=1e-3)  # in float32, from the same rounded numbers
    exact.weight.data = norm.weight.data.float()
    leaf = hidden.detach().float().requires_grad_()
    expected = exact(leaf)
    expected_grads = torch.autograd.grad(expected, (leaf, exact.weight), dout.float())
    out = Normalize.apply(hidden, norm.weight, norm, 1e-3, kind, way)
    grads = torch.autograd.grad(out, (hidden, norm.weight), dout)
    for ours, right in zip((out, *grads), (expected, *expected_grads), strict=True):
        check_close(ours, right, dtype)
    for ours, right in zip(formulas.normalize(hidden, norm.weight, 1e-3, kind), (expected,), strict=False):
        check_close(ours, right, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rotation", "width"), [(apply_rotary_pos_emb, 16), (rotate_partly, 8)])
@pytest.mark.parametrize("heads_dim", [1, 2], ids=["heads first", "tokens first"])
def test_rotation_equals_transformers_own(
    rotation: Any, width: int, dtype: torch.dtype, heads_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formulas, "BLOCK_ELEMENTS", 1000)
    query = draw(2, 37, 3, 16, dtype=dtype).transpose(1, 3 - heads_dim).requires_grad_()
    dout = draw(*query.shape, dtype=dtype, seed=1)
    cos, sin = draw(2, 37, width, dtype=dtype, seed=2), draw(2, 37, width, dtype=dtype, seed=3)
    expected = rotation(query.float(), query.float(), cos.float(), sin.float(), heads_dim)[0]
    (expected_grad,) = torch.autograd.grad(expected, query, dout.float())
    angles = cos.unsqueeze(heads_dim), sin.unsqueeze(heads_dim)
    out = Rotate.apply(query, *angles, "blocks")
    (grad,) = torch.autograd.grad(out, query, dout)
    assert out.stride() == query.stride()
    for rotated, turned in ((out, grad), (formulas.rotate(query, *angles), formulas.rotate_backward(dout, *angles))):
        check_close(rotated, expected, dtype)
        check_close(turned, expected_grad, dtype)


def test_another_rotation_is_not_taken_for_this_one() -> None:
    assert _computes_rotation(apply_rotary_pos_emb)
    assert _computes_rotation(rotate_partly)
    assert not _computes_rotation(rotate_interleaved)


def make_pair(model_type: str) -> tuple[Any, Any]:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(AutoModelForCausalLM.from_config(make_config(model_type)))
    return models[0], models[1]


SERVED = {"llama": (5, 2, 2), "qwen3": (9, 2, 2), "gemma2": (9, 2, 0), "olmo2": (9, 2, 2), "gpt_oss": (5, 0, 0),
          "phi3": (5, 2, 0), "mixtral": (5, 2, 0)}  # fmt: skip


@pytest.mark.parametrize("model_type", sample(SERVED, quick=["qwen3"]))
def test_a_served_model_keeps_its_values(model_type: str) -> None:
    plain, served = make_pair(model_type)
    counts = serve_elementwise(served, ALL_BLOCKS)
    assert (counts.norms, counts.rotations, counts.gates) == SERVED[model_type]
    ids = torch.arange(24)[None] % 60
    losses = [model(ids, labels=ids).loss for model in (plain, served)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-5)
    for loss in losses:
        loss.backward()
    for ours, right in zip(served.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, right.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("model_type", ATTENTION_ONLY)
def test_the_norms_of_families_are_recognised(model_type: str) -> None:
    model = make_pair(model_type)[0]
    found = [recognise_norm(part) for part in model.modules() if type(part).__name__.endswith("Norm")]
    assert any(found) == (model_type not in WITHOUT_PLAIN_NORMS)


def test_a_norm_of_two_dtypes_keeps_transformers_code() -> None:
    norm, plain = LlamaRMSNorm(48), LlamaRMSNorm(48)
    serve_elementwise(norm, ALL_BLOCKS)
    hidden = draw(3, 48, dtype=torch.bfloat16)
    assert torch.equal(norm(hidden), plain(hidden))
    assert not serve_elementwise(LlamaRMSNorm(48).double(), ALL_BLOCKS).norms
    assert not serve_elementwise(LlamaRMSNorm(48), NO_IMPLEMENTATIONS).norms


def test_a_fused_norm_saves_its_input_and_one_number_for_each_row() -> None:
    """It runs in no tiles, and a frozen weight gets no gradient."""
    norm = LlamaRMSNorm(48).bfloat16().requires_grad_(False)
    serve_elementwise(norm, ALL_BLOCKS)
    assert tile_norms(norm, lambda _: 4) == 0
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        norm(draw(7, 48, dtype=torch.bfloat16).requires_grad_()).sum().backward()
    assert norm.weight.grad is None
    assert [(tensor.dtype, tensor.numel()) for tensor in saved] == [(torch.bfloat16, 7 * 48), (torch.float32, 7)]


@pytest.mark.check
def test_the_operators_keep_torchs_rules() -> None:
    hidden, weight, rstd = draw(5, 16), draw(16).abs(), draw(5, 1).abs()
    library.opcheck(torch.ops.ulysses.normalize, (hidden, weight, 1e-5, "rounded", "blocks"))
    library.opcheck(torch.ops.ulysses.normalize_backward, (hidden, hidden, weight, rstd, "precise", "blocks"))
    library.opcheck(torch.ops.ulysses.rotate, (draw(1, 2, 5, 16), draw(1, 1, 5, 8), draw(1, 1, 5, 8), "blocks"))
    library.opcheck(torch.ops.ulysses.gate, (hidden, hidden, "blocks"))
    library.opcheck(torch.ops.ulysses.gate_backward, (hidden, hidden, hidden, "blocks"))


@pytest.mark.parametrize("width", [16, 8], ids=["all", "half"])
@pytest.mark.parametrize("function", [formulas.rotate, formulas.rotate_backward])
def test_the_compiler_takes_a_rotation_and_keeps_its_layout(function: Any, width: int) -> None:
    """Its tracer, whose graph torch runs here without making a kernel. Attention reads rows [tokens, heads, head_dim]
    in place, so heads must stay where they are in memory."""
    rows = draw(1, 64, 2, 16).transpose(1, 2)
    cos, sin = draw(1, 1, 64, width), draw(1, 1, 64, width)
    compiled = torch.compile(function, fullgraph=True, backend="eager")
    out = compiled(rows, cos, sin)
    torch.testing.assert_close(out, function(rows, cos, sin), rtol=0, atol=0)
    assert out.stride() == rows.stride()


@pytest.mark.full
def test_each_width_is_compiled_by_itself(compiled_graphs: list[list[Any]]) -> None:
    """torch makes what differs between two calls of one function a variable of its graph."""
    for width in range(8, 20):
        for tokens in (6, 7, 9):
            hidden, weight = draw(tokens, width), draw(width)
            ours = operators.normalize(hidden, weight, 1e-5, "rounded", "compiled")
            torch.testing.assert_close(ours, operators.normalize(hidden, weight, 1e-5, "rounded", "blocks"))
    num_variables = [sum(not isinstance(each, Tensor) for each in inputs) for inputs in compiled_graphs]
    assert num_variables == [0, 1] * 12, "of each width one graph for a number of tokens, and one for all others"


def list_rows() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Rows of one width, and angles, of more kinds than torch compiles by itself."""
    for heads in (1, 2, 3):
        for batch in (1, 2):
            for tokens in (1, 2, 7, 9):
                for grad in (False, True):
                    rows = draw(batch, tokens, heads, 16).transpose(1, 2).requires_grad_(grad)
                    yield rows, draw(batch, 1, tokens, 16), draw(batch, 1, tokens, 16)


@pytest.mark.parametrize(
    "operator", sample(["rotate", "rotate_backward", "gate", "gate_backward"], quick=(), checked=["rotate_backward"])
)
@pytest.mark.usefixtures("compiled_graphs")
def test_a_width_is_compiled_for_many_kinds_of_rows(operator: str) -> None:
    """torch ends with an error where it may not compile once more. A GPU's backward and its recomputations run in a
    thread of their own, for which torch keeps its own settings."""
    formula, arity = getattr(formulas, operator), 2 + ("rotate" in operator or "backward" in operator)
    compiled = operators.compile_once.__wrapped__(formula, 16)  # in this thread, as a forward does
    for rows, cos, sin in list_rows():
        args = (rows, cos, sin) if "rotate" in operator else (rows,) * arity
        torch.testing.assert_close(run_in_thread(compiled, *args), formula(*args))
        with torch.set_grad_enabled(rows.requires_grad):
            torch.testing.assert_close(compiled(*args), formula(*args))


@pytest.mark.usefixtures("compiled_graphs")
@pytest.mark.parametrize("mode", sample(["save_attention", "full"], quick=["save_attention"]))
def test_compiled_parts_are_recomputed_in_another_thread(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models of many lengths, one with levers and compiled parts whose backwards run in another thread."""
    plain, served = make_pair("llama")
    serve_elementwise(
        served, {**NO_IMPLEMENTATIONS, **dict.fromkeys(("rounded", "precise", "rotary", "gate"), "compiled")}
    )
    checkpoint_layers(served, mode)
    served.train()
    runs: list[int] = []
    forward = Rotate.forward

    def note(*args: Any) -> Tensor:
        runs.append(threading.get_ident())
        return forward(*args)

    monkeypatch.setattr(Rotate, "forward", staticmethod(note))
    for tokens in (1, 2, 5, 8):
        ids = torch.arange(tokens)[None]
        plain(ids, use_cache=False).logits.square().mean().backward()
        with backward_in_another_thread() as count:
            served(ids, use_cache=False).logits.square().mean().backward()
        assert count == [1]
    for (name, ours), right in zip(served.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, right.grad, rtol=1e-4, atol=1e-6, msg=name)
    assert len(set(runs)) > 1, "rotations run again in the backward's thread"


@pytest.mark.usefixtures("compiled_graphs")
def test_float32_angles_turn_bfloat16_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a family rotates so (OLMo 2), rounded once; the way in blocks leaves it to transformers' code."""
    plain, served = (model.bfloat16() for model in make_pair("olmo2"))
    serve_elementwise(served, {**NO_IMPLEMENTATIONS, "rotary": "compiled"})
    taken, apply = [], Rotate.forward
    monkeypatch.setattr(Rotate, "forward", staticmethod(lambda *args: taken.append(args[2].dtype) or apply(*args)))
    ids = torch.arange(24)[None]
    check_close(served(ids).logits, plain(ids).logits.float(), torch.bfloat16)
    assert taken == [torch.float32] * 4, "queries and keys of two layers"
    taken.clear()
    in_blocks = make_pair("olmo2")[0].bfloat16()
    serve_elementwise(in_blocks, {**NO_IMPLEMENTATIONS, "rotary": "blocks"})
    assert torch.equal(in_blocks(ids).logits, plain(ids).logits)
    assert not taken


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("part", CANDIDATES)
def test_a_compiled_formula_is_exact(part: Any, dtype: torch.dtype) -> None:
    """The kernels that torch's compiler makes for a CPU, forward and backward."""
    trial = choosing._Trial(part, torch.device("cpu"), dtype, ROWS.get(part, (48,)), 64)
    assert trial.compare("compiled") <= ROUNDING[dtype]


@pytest.mark.full
def test_compiled_formulas_are_one_kernel() -> None:
    """Beside the attention operator such a kernel breaks no graph."""
    hidden, weight = draw(64, 48), 0.5 + draw(48).abs()
    for rotate in (formulas.rotate, formulas.rotate_backward):
        rows, cos, sin = draw(1, 64, 2, 16).transpose(1, 2), draw(1, 1, 64, 16), draw(1, 1, 64, 16)
        operator = getattr(operators, rotate.__name__)
        metrics.reset()
        rotated = operator(rows, cos, sin, "compiled")
        assert metrics.generated_kernel_count == 1
        torch.testing.assert_close(rotated, rotate(rows, cos, sin))
        assert rotated.stride() == rows.stride()

    def both(hidden: Tensor) -> Tensor:
        bounds = torch.tensor([0, 64], dtype=torch.int32), [64]
        normalized, _ = torch.ops.ulysses.normalize(hidden, weight, 1e-5, "rounded", "blocks")
        heads = normalized.view(64, 3, 16)
        return attend(heads, heads, heads, None, *bounds, *bounds, "sdpa", 0.3, None, None)[0]

    torch.testing.assert_close(torch.compile(both, fullgraph=True)(hidden), both(hidden))


class FakeTrial:
    def __init__(self, errors: dict[str, float], seconds: dict[str, float]) -> None:
        self.errors, self.seconds, self.dtype = errors, seconds, torch.bfloat16

    def compare(self, way: str) -> float:
        if way == "transformers":
            return 0.0
        if way not in self.errors:
            raise RuntimeError("no compiler\nhere")
        return self.errors[way]

    def measure(self, way: str) -> float:
        return self.seconds[way]


@pytest.mark.parametrize(
    ("errors", "seconds", "expected"),
    [
        ({"torch": 0.01, "compiled": 0.01}, {"transformers": 3, "torch": 1, "compiled": 2}, "torch"),
        ({"torch": 0.01, "compiled": 0.01}, {"transformers": 1, "torch": 2, "compiled": 2}, "transformers"),
        ({"torch": 0.5, "compiled": 0.01}, {"transformers": 3, "torch": 1, "compiled": 2}, "compiled"),
        ({"torch": float("nan")}, {"transformers": 3, "torch": 1}, "transformers"),
    ],
)
def test_a_gpu_takes_the_fastest_way_that_is_exact(
    errors: Any, seconds: Any, expected: str, snapshot: SnapshotAssertion
) -> None:
    trial: Any = FakeTrial(errors, {way: value / 1e3 for way, value in seconds.items()})
    choice = _choose_part(("transformers", *CANDIDATES["rounded"]), [trial])
    assert choice.name == expected
    assert choice.reason == snapshot
    assert choice.is_lasting == ("compiled" in errors), "a difference comes again, a failure may not"


def test_a_trial_is_as_large_as_a_ranks_rows_up_to_what_no_cache_holds() -> None:
    """A kernel's start takes longer than the work on few rows. Norms of heads have narrow rows, and more of them."""
    drawn: dict[tuple[str, tuple[int, ...]], int] = {}

    def note(part: Any, _: Any, __: Any, row: tuple[int, ...], num_timed: int) -> FakeTrial:
        drawn[part, row] = num_timed
        return FakeTrial({}, {"transformers": 1.0})

    widths = Widths(4096, 32, 128, 14336, {"rounded": {4096, 128}})
    choose_implementations(torch.device("cuda"), torch.bfloat16, widths, 8192, make_trial=note)
    rows = {("rounded", (4096,)): 8192, ("rounded", (128,)): 8192 * 32, ("rotary", (32, 128)): 8192}
    assert drawn == {**rows, ("gate", (14336,)): choosing.TIMED_BYTES // (14336 * 2)}


def test_a_choice_is_kept_by_widths_and_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Trials compile, for up to half a minute in every process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GPU A")
    tried: list[str] = []

    def make(part: str, *_: Any) -> FakeTrial:
        tried.append(part)
        return FakeTrial({"torch": 0.01, "compiled": 0.01}, {"transformers": 3e-3, "torch": 2e-3, "compiled": 1e-3})

    def count_tried(hidden: int = 64, num_tokens: int = 64) -> int:
        tried.clear()
        widths = Widths(hidden, 4, 16, 128, {"rounded": {hidden}})
        gpu, how = torch.device("cuda"), {"uses_cache": True, "make_trial": make}
        choice = choose_implementations(gpu, torch.bfloat16, widths, num_tokens, **how)  # type: ignore[arg-type]
        compiled = dict.fromkeys(("rounded", "rotary", "gate"), "compiled")
        assert choice.implementations == {**NO_IMPLEMENTATIONS, **compiled}
        return len(tried)

    assert [count_tried(), count_tried(), count_tried(hidden=128)] == [3, 0, 3]
    assert [count_tried(num_tokens=number) for number in (96, 1 << 21, 1 << 22)] == [3, 3, 0], "as many rows are timed"
    for file in tmp_path.rglob("*.json"):
        file.write_text('{"name": "{}", "reason": ""}')
    assert count_tried() == 3, "what is no choice is not used"


@pytest.mark.parametrize(
    ("model_type", "part", "way", "num_served"),
    [("gemma2", "offset", "transformers", 0), ("olmo2", "precise", "torch", 9), ("qwen3", "rounded", "torch", 9)],
)
def test_each_kind_of_norm_has_a_way_of_its_own(
    model_type: str, part: Any, way: str, num_served: int, snapshot: SnapshotAssertion
) -> None:
    """Where the compiler fails, a norm that torch has no kernel for keeps transformers' code."""
    model = make_pair(model_type)[0]
    widths = Widths(32, 4, 8, 48, find_norm_widths(model))
    trial = FakeTrial({"torch": 0.01}, {"transformers": 2e-3, "torch": 1e-3})
    choice = choose_implementations(torch.device("cuda"), torch.bfloat16, widths, 64, make_trial=lambda *_: trial)
    assert choice.implementations[part] == way
    assert choice.reason == snapshot, "of norms, the model's own kind alone is named"
    assert serve_elementwise(model, choice.implementations).norms == num_served


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("part", CANDIDATES)
def test_trials_compare_with_transformers_formula(part: Any, dtype: torch.dtype) -> None:
    trial = choosing._Trial(part, torch.device("cpu"), dtype, ROWS.get(part, (48,)))
    assert trial.compare("blocks") < ROUNDING[dtype]
    assert trial.compare("transformers") <= (0.0 if dtype == torch.float32 else ROUNDING[dtype])


@pytest.mark.parametrize("kind", NORMS)
def test_a_weights_gradient_is_rounded_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large input, which goes through in pieces, as of a small one."""
    weight, hidden = draw(64, dtype=torch.bfloat16), draw(640, 64, dtype=torch.bfloat16)
    dout = draw(640, 64, dtype=torch.bfloat16, seed=1)
    _, rstd = operators.normalize(hidden, weight, 1e-6, kind, "blocks")
    _, expected = operators.normalize_backward(dout, hidden, weight, rstd, kind, "blocks")
    monkeypatch.setattr(operators, "split_rows", lambda *_: [slice(at, at + 16) for at in range(0, 640, 16)])
    _, in_pieces = operators.normalize_backward(dout, hidden, weight, rstd, kind, "blocks")
    assert in_pieces.dtype == torch.bfloat16
    assert (in_pieces != expected).sum() <= 2, "sums of another order may round otherwise"
