"""Tests 8-bit codes: they decode as in bitsandbytes, and encoding what was decoded gives the same codes."""

import sys
from typing import Any

import pytest
import torch
from syrupy.assertion import SnapshotAssertion

from ulysses_cli.train.optimizer import adamw_8bit as codes
from ulysses_cli.train.optimizer.adamw_8bit import BLOCK, AdamW8bit, count_blocks, decode, encode, make_table
from ulysses_cli.train.processes.host import find_missing_package

DEVICE = torch.device("cpu")
NUMBERS = {
    "normal": lambda numel: torch.randn(numel),
    "wide": lambda numel: torch.randn(numel) * 10 ** torch.empty(numel).uniform_(-8, 1),
    "tiny": lambda numel: torch.randn(numel) * 1e-30,
    "negative": lambda numel: -torch.rand(numel),
    "one block is zero": lambda numel: torch.randn(numel).index_fill_(0, torch.arange(BLOCK), 0.0),
    "nothing": lambda numel: torch.zeros(numel),
}


def encode_with_bitsandbytes(values: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ops.bitsandbytes.quantize_blockwise(values, table, BLOCK)


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("moment", ["exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("numel", [1, 255, 256, 40 * 256 + 3])
def test_decoded_codes_are_encoded_exactly(name: str, moment: str, numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks tensors of one chunk and of several."""
    monkeypatch.setattr(codes, "CHUNK", 16 * BLOCK)
    torch.manual_seed(numel)
    values = NUMBERS[name](max(numel, BLOCK))[:numel]
    table = make_table(moment, DEVICE)
    reference, scales = encode_with_bitsandbytes(values if moment == "exp_avg" else values * values, table)
    result = decode(reference, scales, table, 0, numel)
    assert torch.equal(
        result, torch.ops.bitsandbytes.dequantize_blockwise(reference, scales, table, BLOCK, torch.float32)
    )
    part = slice(numel // 3, numel - numel // 4)
    assert torch.equal(decode(reference, scales, table, part.start, part.stop - part.start), result[part])
    ours, our_scales = encode(result, table)
    assert torch.equal(our_scales, scales)
    assert torch.equal(decode(ours, our_scales, table, 0, numel), result)
    lives = scales.repeat_interleave(BLOCK)[:numel] > 0
    assert torch.equal(ours[lives], reference[lives])


def test_other_numbers_are_rounded_to_the_nearest_entry() -> None:
    table = make_table("exp_avg", DEVICE)
    values = torch.randn(10 * BLOCK)
    result, scales = encode(values, table)
    assert torch.equal(scales, values.view(-1, BLOCK).abs().amax(1))
    shares = (values.view(-1, BLOCK) / scales[:, None]).view(-1)
    distance = (shares[:, None] - table).abs()
    assert torch.equal(distance.gather(1, result.long()[:, None])[:, 0], distance.amin(1))


def step_some(numel: int, grads: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, Any]]:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(numel))
    groups = [{"params": [weight], "weight_decay": 0.1}]
    optimizer = AdamW8bit(groups, lr=0.01, betas=(0.9, 0.99), eps=1e-6)
    for grad in grads:
        weight.grad = grad.clone()
        optimizer.step()
    return weight.data, optimizer.state[weight]


def test_a_step_is_adamw_on_decoded_moments() -> None:
    """Compares with the paper's formula in float64, from the codes of the step before."""
    numel = 3 * BLOCK + 7
    grads = [torch.randn(numel) * 10.0**-step for step in range(4)]
    before, state = step_some(numel, grads[:3])
    tables = [make_table(moment, DEVICE) for moment in ("exp_avg", "exp_avg_sq")]
    first, second = (
        decode(state[f"{moment}_codes"], state[f"{moment}_scales"], table, 0, numel).double()
        for moment, table in zip(("exp_avg", "exp_avg_sq"), tables, strict=True)
    )
    first, second = 0.9 * first + 0.1 * grads[3], 0.99 * second + 0.01 * grads[3].double() ** 2
    step = (first / (1 - 0.9**4)) / ((second / (1 - 0.99**4)).sqrt() + 1e-6)
    expected = before.double() * (1 - 0.01 * 0.1) - 0.01 * step
    after, state = step_some(numel, grads)
    assert torch.allclose(after.double(), expected, rtol=1e-5, atol=1e-7)
    assert state["step"] == 4
    held = sum(value.numel() * value.element_size() for name, value in state.items() if name[-5:] in ("codes", "cales"))
    assert held == 2 * numel + 8 * count_blocks(numel)


def test_a_tensor_of_more_than_2_31_elements_is_updated_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    numel = 7 * BLOCK + 9
    grads = [torch.randn(numel) for _ in range(3)]
    whole, state = step_some(numel, grads)
    monkeypatch.setattr(codes, "CALL_NUMEL", 2 * BLOCK)
    parts, other = step_some(numel, grads)
    assert torch.equal(whole, parts)
    assert all(torch.equal(state[name], other[name]) for name in state if name != "step")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion) -> None:
    assert find_missing_package("adamw") == find_missing_package("adamw_8bit") == ""
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    assert find_missing_package("adamw") == ""
    assert find_missing_package("adamw_8bit") == snapshot
