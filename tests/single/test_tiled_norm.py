"""Norms in tiles against the same norms whole; and what looks like a norm and is none."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ulysses_cli.train.tiled_norm import tile_norms

WIDTH = 32
NORMS = (LlamaRMSNorm, Gemma2RMSNorm, nn.LayerNorm, nn.RMSNorm)
SHAPES = ((1, 37, WIDTH), (3, 37, WIDTH), (2, 4, 37, WIDTH), (2, 37, 4, WIDTH), (37, WIDTH), (1, 1, WIDTH))


def make_pair(make: Callable[[int], nn.Module], trains: bool) -> tuple[nn.Module, nn.Module]:
    whole = make(WIDTH)
    for weight in whole.parameters():
        nn.init.uniform_(weight, 0.5, 1.5)
        weight.requires_grad_(trains)
    tiled = copy.deepcopy(whole)
    assert tile_norms(tiled, lambda _: 5) == 1
    return whole, tiled


def run(norm: nn.Module, hidden: Tensor, needs_gradient: bool) -> tuple[Tensor, Tensor | None, list[Tensor | None]]:
    leaf = hidden.clone().requires_grad_(needs_gradient)
    out = norm(leaf)
    if out.requires_grad:
        out.backward(torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape))
    return out.detach(), leaf.grad, [weight.grad for weight in norm.parameters()]


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("needs_gradient", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("make", NORMS)
def test_a_norm_is_what_it_was(
    make: type[nn.Module], shape: tuple[int, ...], needs_gradient: bool, trains: bool
) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(shape)
    whole, tiled = make_pair(make, trains)
    out, dhidden, dweights = run(tiled, hidden, needs_gradient)
    right, expected, wanted = run(whole, hidden, needs_gradient)
    assert torch.equal(out, right)
    torch.testing.assert_close(dhidden, expected, rtol=0, atol=0)
    assert [grad is None for grad in dweights] == [grad is None for grad in wanted]
    for grad, other in zip(dweights, wanted, strict=True):
        torch.testing.assert_close(grad, other, rtol=1e-4, atol=1e-4)  # sums in another order
    with torch.no_grad():
        assert torch.equal(tiled(hidden), right)


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str)
def test_weights_and_tokens_of_two_dtypes(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(2, 37, WIDTH).to(dtypes[1])
    whole, tiled = make_pair(lambda width: LlamaRMSNorm(width).to(dtypes[0]), True)
    out, dhidden, (dweight,) = run(tiled, hidden, True)
    right, expected, (wanted,) = run(whole, hidden, True)
    assert out.dtype == right.dtype
    assert torch.equal(out, right)
    torch.testing.assert_close(dhidden, expected, rtol=0, atol=0)
    torch.testing.assert_close(dweight, wanted, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("make", [lambda: nn.BatchNorm1d(6), lambda: nn.GroupNorm(2, 6), lambda: nn.PReLU(6)])
def test_what_sees_more_than_the_last_dimension_stays_whole(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    whole = make()
    tiled = copy.deepcopy(whole)
    tile_norms(tiled, lambda _: 3)
    rows = torch.randn(4, 6, 11)
    assert torch.equal(tiled(rows), whole(rows))
