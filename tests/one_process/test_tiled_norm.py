"""Tests norms in tiles: they give the same values and gradients and save only the input."""

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.byte_counter import ByteCounter
from torch import Tensor, nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ulysses_cli.train.memory.tiling import tile_norms

WIDTH = 6


def make_norm(kind: str) -> nn.Module:
    torch.manual_seed(1)
    made: dict[str, nn.Module] = {
        "scaled": LlamaRMSNorm(WIDTH),
        "scaled from one": Gemma3RMSNorm(WIDTH),
        "centred, with a bias": nn.LayerNorm(WIDTH),
    }
    norm = made[kind].double()
    for weight in norm.parameters():
        nn.init.normal_(weight)
    return norm


def run(norm: nn.Module, hidden: Tensor, slope: Tensor, frozen: str = "") -> list[Tensor | None]:
    """Returns the result, the gradient of the input, and those of the weights. `frozen`: what needs none."""
    leaf = hidden.detach().requires_grad_(frozen != "tokens")
    norm.requires_grad_(frozen != "weights")
    result = norm(leaf)
    result.backward(slope)
    grads = [weight.grad for weight in norm.parameters()]
    norm.zero_grad()
    return [result.detach(), leaf.grad, *grads]


@pytest.mark.parametrize("kind", ["scaled", "scaled from one", "centred, with a bias"])
@given(
    shape=st.sampled_from([(1, 13), (3, 5), (1, 13, 4), (1, 4, 13), (2, 4, 7), (17,)]),
    num_tiles=st.integers(2, 20),
    is_turned=st.booleans(),
    frozen=st.sampled_from(["", "tokens", "weights"]),
)
def test_values_and_gradients(kind: str, shape: tuple[int, ...], num_tiles: int, is_turned: bool, frozen: str) -> None:
    hidden, slope = torch.randn(2, *shape, WIDTH, dtype=torch.float64)
    if is_turned and len(shape) > 1:  # as queries are laid out: heads stand behind tokens in memory
        hidden = hidden.transpose(0, 1).contiguous().transpose(0, 1)
    norm = make_norm(kind)
    expected = run(norm, hidden, slope, frozen)
    assert tile_norms(norm, lambda _: num_tiles) == 1
    tolerance = 1e-5 if kind == "scaled from one" else 1e-12  # Gemma's norm always computes in float32
    for own, reference in zip(run(norm, hidden, slope, frozen), expected, strict=True):
        assert (own is None) == (reference is None)
        if own is not None:
            torch.testing.assert_close(own, reference, rtol=tolerance, atol=tolerance)
    with torch.no_grad():
        assert torch.equal(norm(hidden), expected[0])


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str)
def test_weights_and_tokens_of_two_dtypes(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """The result has the norm's own dtype, as without tiles."""
    torch.manual_seed(1)
    norm, hidden = LlamaRMSNorm(WIDTH).to(dtypes[0]), torch.randn(2, 9, WIDTH).to(dtypes[1])
    slope = torch.randn(2, 9, WIDTH)
    expected = run(norm, hidden, slope.to(norm(hidden).dtype))
    tile_norms(norm, lambda _: 3)
    result = run(norm, hidden, slope.to(norm(hidden).dtype))
    assert result[0].dtype == expected[0].dtype
    assert torch.equal(result[0], expected[0])
    assert torch.equal(result[1], expected[1])
    torch.testing.assert_close(result[2], expected[2], rtol=0.02, atol=0.02)


def test_only_vector_weights_make_a_norm() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, hidden: Tensor, gate: Tensor) -> Tensor:
            return self.weight * hidden * gate

    others = [nn.Linear(WIDTH, WIDTH), nn.Embedding(9, WIDTH), nn.Dropout(), nn.SiLU(), Gated()]
    norms = [LlamaRMSNorm(WIDTH), nn.Sequential(nn.LayerNorm(WIDTH))]
    assert tile_norms(nn.ModuleList([*norms, *others]), lambda _: 2) == 2


def test_saved_and_peak_bytes() -> None:
    """Of 64 tiles, memory holds the input, the result and one tile; without tiles it holds float32 copies of all."""

    def measure(num_tiles: int) -> tuple[int, int]:
        norm = LlamaRMSNorm(64).to(torch.bfloat16)
        tile_norms(norm, lambda _: num_tiles)
        hidden = torch.randn(1, 4096, 64, dtype=torch.bfloat16, requires_grad=True)
        with ByteCounter() as counter:
            result = norm(hidden)
            kept = counter.now
            result.backward(result.detach())
        unit = hidden.numel() * 2
        return round(kept / unit), round(counter.peak / unit)

    assert measure(64) == (2, 3)
    kept, most = measure(1)
    assert kept >= 4
    assert most >= 10


@pytest.mark.parametrize("make", [lambda: nn.BatchNorm1d(6), lambda: nn.GroupNorm(2, 6), lambda: nn.PReLU(6)])
def test_a_norm_over_more_than_the_last_dimension_stays_whole(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    whole = make()
    tiled = copy.deepcopy(whole)
    tile_norms(tiled, lambda _: 3)
    rows = torch.randn(4, 6, 11)
    assert torch.equal(tiled(rows), whole(rows))
