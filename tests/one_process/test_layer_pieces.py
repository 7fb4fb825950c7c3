"""Tests that no layer of any family gets a whole row that its kernel could not index: neither an embedding nor a linear
layer nor a layer norm of torch's."""

import importlib
from typing import Any

import pytest
import torch
from support.families import ATTENTION_ONLY, TELLING, make_model
from support.hybrids import HYBRIDS, make_hybrid
from support.tiers import sample
from torch import Tensor, nn
from torch.nn import functional

from ulysses_cli.plan.rows.indexing import OPERATORS
from ulysses_cli.train.memory.tiled_mlp import ShardedLinear, run_in_pieces, save_before_last_products

TOKENS, LIMIT_BYTES = 96, 96 * 40 * 8  # widths of 40 or more numbers in float64 pass the limit
indexing = importlib.import_module("ulysses_cli.plan.rows.indexing")
census = importlib.import_module("ulysses_cli.plan.rows.indexing")


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
        monkeypatch.setitem(census._VERDICTS, operator.name, "safe")


@pytest.mark.usefixtures("_safe")
def test_the_census_decides_what_runs_in_pieces() -> None:
    model = make_family("starcoder2")
    assert run_in_pieces(model, TOKENS, torch.float64) == 0
    assert indexing.split_rows(TOKENS, 2 * LIMIT_BYTES, *indexing.RMS_NORM) == [slice(0, TOKENS)]
