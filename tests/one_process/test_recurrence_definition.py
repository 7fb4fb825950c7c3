"""transformers' torch code, which runs where no package is installed, equals the recurrence's definition token by
token, in float64, on a row of 50,000 tokens whose states outlive thousands of them."""

from typing import Any

import pytest
import torch
from test_recurrence_kernels import RULES, get_torch_code
from torch import Tensor

from ulysses_cli.train.attention.documents import make_documents, walk_bounds
from ulysses_cli.train.processes.groups import SequenceAxis
from ulysses_cli.train.recurrence.rules import apply_delta_rule, apply_scan

LENGTHS = (1, 20_001, 63, 29_935)
NUM_TOKENS = sum(LENGTHS)
HEADS, GROUPS, KEYS, VALUES = 4, 2, 8, 8
TOLERANCE = 1e-4  # transformers' code computes in float32
ALONE = SequenceAxis(None, 1, 0)


def recur_delta(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Takes [T, h, D] with unit queries and keys, g [T, h, D or 1] and beta [T, h] of one document."""
    state, results = value.new_zeros(HEADS, KEYS, VALUES), []
    parts = (query / KEYS**0.5, key, value, g.exp(), beta)
    for q, k, v, decay, strength in zip(*(part.unbind() for part in parts), strict=True):
        state = state * decay[..., None]
        change = (v - (k[..., None] * state).sum(1)) * strength[:, None]
        state = state + k[..., None] * change[:, None]
        results.append((q[..., None] * state).sum(1))
    return torch.stack(results)


def recur_scan(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, decay: Tensor, skip: Tensor) -> Tensor:
    """Takes x [T, h, D], dt [T, h], b and c [T, h, N] of one document, decay and skip [h]."""
    state, results = x.new_zeros(HEADS, KEYS, VALUES), []
    kept, gained = (dt * decay).exp(), b * dt[..., None]
    for hidden, keep, gain, read in zip(*(part.unbind() for part in (x, kept, gained, c)), strict=True):
        state = state * keep[:, None, None] + gain[..., None] * hidden[:, None]
        results.append((read[..., None] * state).sum(1))
    return torch.stack(results) + x * skip[:, None]


def by_document(run: Any, *tensors: Tensor) -> Tensor:
    return torch.cat([run(*(part[begin:end] for part in tensors)) for begin, end in walk_bounds(LENGTHS)])


def normalize(heads: Tensor) -> Tensor:
    return heads / (heads.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def draw_delta(rule: str) -> dict[str, Tensor]:
    """Heads forget over 10, 100, 1,000 and 10,000 tokens."""
    channels, num_keys = ([KEYS], HEADS) if rule == "kimi delta" else ([], GROUPS)
    speeds = torch.logspace(-1, -4, HEADS, dtype=torch.float64).view(HEADS, *[1] * len(channels))
    return {
        "query": draw(NUM_TOKENS, num_keys, KEYS),
        "key": draw(NUM_TOKENS, num_keys, KEYS),
        "value": draw(NUM_TOKENS, HEADS, VALUES),
        "g": -speeds * torch.rand(NUM_TOKENS, HEADS, *channels, dtype=torch.float64) * 2,
        "beta": draw(NUM_TOKENS, HEADS).sigmoid(),
    }


def draw_scan() -> dict[str, Tensor]:
    """With steps of about 0.1, heads forget over 10 to 10,000 tokens."""
    return {
        "x": draw(NUM_TOKENS, HEADS, VALUES), "dt": draw(NUM_TOKENS, HEADS) * 0.5 - 2.5,
        "b": draw(NUM_TOKENS, GROUPS, KEYS), "c": draw(NUM_TOKENS, GROUPS, KEYS),
        "A": -torch.logspace(0, -3, HEADS, dtype=torch.float64), "D": draw(HEADS), "dt_bias": draw(HEADS) * 0.3,
    }  # fmt: skip


def define(rule: str, inputs: dict[str, Tensor]) -> Tensor:
    if rule == "mamba2":
        dt = torch.nn.functional.softplus(inputs["dt"] + inputs["dt_bias"])
        b, c = (inputs[name].repeat_interleave(HEADS // GROUPS, 1) for name in ("b", "c"))
        return by_document(lambda *parts: recur_scan(*parts, inputs["A"], inputs["D"]), inputs["x"], dt, b, c)
    query, key = (
        normalize(inputs[name]).repeat_interleave(HEADS // inputs[name].size(1), 1) for name in ("query", "key")
    )
    g = inputs["g"] if inputs["g"].dim() == 3 else inputs["g"][..., None]
    return by_document(recur_delta, query, key, inputs["value"], g, inputs["beta"])


def run_torch_code(rule: str, inputs: dict[str, Tensor]) -> Tensor:
    function, documents = get_torch_code(RULES[rule][0]), make_documents(LENGTHS)
    if rule == "mamba2":
        x, dt, b, c = (inputs[name][None] for name in ("x", "dt", "b", "c"))
        of_heads = {name: inputs[name] for name in ("A", "D", "dt_bias")}
        options = {"chunk_size": 64, "dt_softplus": True}
        return apply_scan(function, x, dt, b, c, of_heads, documents, ALONE, options)[0]
    tensors = [inputs[name][None] for name in ("query", "key", "value", "g", "beta")]
    return apply_delta_rule(function, *tensors, documents, ALONE, {"use_qk_l2norm_in_kernel": True})[0]


@pytest.mark.full
@pytest.mark.parametrize("rule", RULES)
@torch.no_grad()
def test_a_long_row_equals_the_recurrence_token_by_token(rule: str) -> None:
    torch.manual_seed(0)
    inputs = draw_scan() if rule == "mamba2" else draw_delta(rule)
    right, ours = define(rule, inputs), run_torch_code(rule, inputs)
    for part in (slice(None), slice(-1000, None)):  # the last ones show what a state has gathered
        assert (ours[part] - right[part]).norm() / right[part].norm() < TOLERANCE
