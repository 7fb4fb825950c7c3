"""Tests that no layer of any family gets a whole row that its kernel could not index: neither an embedding nor a linear
layer nor a layer norm of torch's."""

import importlib
from collections import Counter
from typing import Any

import pytest
import torch
from support.families import ATTENTION_ONLY, TELLING, make_model
from support.hybrids import HYBRIDS, make_hybrid
from support.levers import LENGTHS, SHARDED, Case, Levers, make_loss_model, make_row
from support.tiers import sample
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from ulysses_cli.plan.rows.indexing import OPERATORS
from ulysses_cli.train.attention.documents import make_documents
from ulysses_cli.train.memory import tiled_mlp
from ulysses_cli.train.memory.tiled_mlp import ShardedLinear, run_in_pieces, save_before_last_products
from ulysses_cli.train.processes.groups import make_sequence_axis

TOKENS, LIMIT_BYTES = 96, 96 * 40 * 8  # widths of 40 or more numbers in float64 pass the limit
indexing = importlib.import_module("ulysses_cli.plan.rows.indexing")


@pytest.fixture(autouse=True)
def _small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexing, "WRAP_BYTES", LIMIT_BYTES)
    monkeypatch.setattr(indexing, "PIECE_BYTES", LIMIT_BYTES // 4)


class Calls:
    """Largest tensors that torch's functions got, in bytes, while it watches."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.largest: dict[str, int] = {}
        for name in ("linear", "embedding", "layer_norm"):
            monkeypatch.setattr(functional, name, self._watch(name, getattr(functional, name)))

    def _watch(self, name: str, function: Any) -> Any:
        def run(first: Tensor, *args: Any, **words: Any) -> Tensor:
            out: Tensor = function(first, *args, **words)
            self.largest[name] = max(self.largest.get(name, 0), out.nbytes, first.nbytes * first.is_floating_point())
            return out

        return run


def make_family(kind: str) -> nn.Module:
    """Wide enough for each layer to pass the limit; experts are refused past 2^31 and not run in pieces."""
    torch.manual_seed(0)
    model = make_hybrid(kind, "eager") if kind in HYBRIDS else make_model(kind, "eager")
    return model.eval()


def differentiate(model: nn.Module) -> tuple[Tensor, list[Tensor]]:
    tokens = torch.arange(TOKENS)[None] * 7 % 50
    logits = model(input_ids=tokens, position_ids=torch.arange(TOKENS)[None], use_cache=False).logits
    model.zero_grad()
    logits.square().mean().backward()
    return logits.detach(), [weight.grad for weight in model.parameters() if weight.grad is not None]


def has_experts(model: nn.Module) -> bool:
    return any("expert" in name for name, _ in model.named_modules())


@pytest.mark.parametrize(
    "kind",
    sample(sorted({*ATTENTION_ONLY, *HYBRIDS}), quick=["olmo", "starcoder2"], checked=[*TELLING, "lfm2", "bamba"]),
)
def test_no_layer_gets_what_its_kernel_cannot_index(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_family(kind)
    expected, gradients = differentiate(model)
    assert run_in_pieces(model, TOKENS, torch.float64) > 0
    calls = Calls(monkeypatch)
    logits, found = differentiate(model)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-6)
    for gradient, right in zip(found, gradients, strict=True):
        torch.testing.assert_close(gradient, right, rtol=1e-3, atol=1e-4 * right.abs().max().item() + 1e-7)
    if not has_experts(model):
        assert max(calls.largest.values()) < LIMIT_BYTES, calls.largest


def test_layers_that_pass_no_limit_stay_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(8, 80), nn.Linear(16, 8), nn.LayerNorm(80), nn.LayerNorm(8), nn.Embedding(9, 80))
    assert run_in_pieces(model, TOKENS, torch.float64) == 3
    assert ["forward" in vars(layer) for layer in model] == [True, False, True, False, True]
    model = nn.Sequential(nn.Linear(8, 80), nn.Linear(8, 80))
    assert run_in_pieces(model, TOKENS, torch.float64, in_tiles=[model[0]]) == 1
    assert "forward" not in vars(model[0])


def test_an_mlps_last_product_of_a_large_row_is_made_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not by what saves its input before the product, which makes it at once."""
    model = make_family("llama")
    run_in_pieces(model, TOKENS, torch.float64)
    assert save_before_last_products(model, ShardedLinear(functional.linear, None)) == 0
    calls = Calls(monkeypatch)
    differentiate(model)
    assert calls.largest["linear"] < LIMIT_BYTES


@pytest.fixture
def _safe(monkeypatch: pytest.MonkeyPatch) -> None:
    for operator in OPERATORS:
        monkeypatch.setitem(indexing._VERDICTS, operator.name, "safe")


@pytest.mark.usefixtures("_safe")
def test_the_census_decides_what_runs_in_pieces() -> None:
    assert run_in_pieces(make_family("starcoder2"), TOKENS, torch.float64) == 0
    assert indexing.split_rows(TOKENS, 2 * LIMIT_BYTES, *indexing.RMS_NORM) == [slice(0, TOKENS)]


CHECKPOINTED = Case("llama", Levers(checkpointing="save_attention"), changes={"intermediate_size": 40})
INNER = 40


class CountedProducts(TorchDispatchMode):
    """Counts matrix products by the number of elements that each sums up."""

    def __init__(self) -> None:
        super().__init__()
        self.widths: Counter[int] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.widths[args[-2].size(-1)] += 1
        return function(*args, **(kwargs or {}))


def run(case: Case, *, saves: bool = True) -> tuple[dict[str, Tensor], Counter[int], int]:
    """Returns loss and gradients, the products of a step, and the number of layers."""
    model = make_loss_model(case, make_sequence_axis(None), saves_products=saves)
    with CountedProducts() as counted:
        loss = model(**make_row(LENGTHS), documents=make_documents(LENGTHS))
        loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **grads}, counted.widths, model.model.config.num_hidden_layers


@pytest.mark.parametrize("lora", [(), ("o_proj",), ("down_proj",)], ids=["full", "adapters", "adapted last"])
@pytest.mark.parametrize("kind", ["llama", "gemma2", "phi3"])
def test_values_are_those_of_deepspeeds_linear_layer(
    kind: str, lora: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nn.functional, "linear", SHARDED.replacement)
    case = Case(kind, CHECKPOINTED.levers, lora=lora)
    ours, *_ = run(case)
    expected, *_ = run(case, saves=False)
    assert ours.keys() == expected.keys()
    for name, right in expected.items():
        assert torch.equal(ours[name], right), name


def test_a_recomputation_leaves_out_the_last_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products that sum over the MLP's inner width: the last linear layer's in the forward and in the recomputation,
    and in the backward those of the two first layers for their input's gradient. torch's own layer needs no help."""
    _, widths, num_layers = run(CHECKPOINTED)
    assert widths[INNER] == (1 + 2) * num_layers
    monkeypatch.setattr(nn.functional, "linear", SHARDED.replacement)
    _, widths, _ = run(CHECKPOINTED)
    assert widths[INNER] == (1 + 2) * num_layers
    _, widths, _ = run(CHECKPOINTED, saves=False)
    assert widths[INNER] == (2 + 2) * num_layers


def test_a_layer_whose_forward_is_replaced_stays_as_it_is() -> None:
    model = make_loss_model(Case(), make_sequence_axis(None)).model
    down = model.model.layers[0].mlp.down_proj
    down.forward = forward = lambda wide: wide
    assert tiled_mlp.save_before_last_products(model, SHARDED) == model.config.num_hidden_layers - 1
    assert down.forward is forward
