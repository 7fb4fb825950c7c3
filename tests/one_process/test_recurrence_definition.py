"""transformers' torch code, which runs where no package is installed, equals the recurrence's definition token by
token, in float64, on a row of 50,000 tokens whose states outlive thousands of them."""

import pytest
import torch
from support.recurrences import run_delta_rule, run_scan
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
    """By the definition, each document by itself."""
    of_rows = {name: part[None] for name, part in inputs.items() if part.size(0) == NUM_TOKENS}
    if rule != "mamba2":
        of_rows["query"], of_rows["key"] = normalize(of_rows["query"]) / KEYS**0.5, normalize(of_rows["key"])
    results = []
    for begin, end in walk_bounds(LENGTHS):
        part = {name: whole[:, begin:end] for name, whole in of_rows.items()}
        if rule == "mamba2":
            of_heads = {"D": inputs["D"], "dt_bias": inputs["dt_bias"]}
            results.append(run_scan(part["x"], part["dt"], inputs["A"], part["b"], part["c"], **of_heads))
        else:
            results.append(run_delta_rule(part["query"], part["key"], part["value"], g=part["g"], beta=part["beta"])[0])
    return torch.cat(results, 1)[0]


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
