"""How the experts' implementation is chosen: by results and every gradient, of every family, and by reasons."""

from typing import Any

import pytest
import torch
from support.families import has_experts
from support.refusals import explain
from support.tiers import sample_every
from syrupy.assertion import SnapshotAssertion
from test_adapted_experts import make_model
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from ulysses_cli.plan.models.families import FAMILIES
from ulysses_cli.train import experts as choice
from ulysses_cli.train.choosing import Outcome
from ulysses_cli.train.experts import (
    ExpertsProbe,
    choose_experts,
    compute_in_loop,
    find_experts,
    find_missing_package,
    try_experts,
)

NO_GPU = {"sonicmoe": "needs a GPU"}
WITH_EXPERTS = [kind for kind in FAMILIES if has_experts(kind)]


def make_probe(kind: str, dtype: torch.dtype = torch.float32) -> ExpertsProbe:
    experts: Any = next(iter(find_experts(make_model(kind)).values()))
    return ExpertsProbe(type(experts), experts.config, 2, torch.device("cpu"), dtype, 100)


@pytest.mark.parametrize("kind", sample_every(8, WITH_EXPERTS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_grouped_products_are_exact_for_every_family(kind: str, dtype: torch.dtype) -> None:
    assert choose_experts("auto", make_probe(kind, dtype), NO_GPU).name == "grouped_mm"
    assert try_experts(make_probe(kind, dtype), "eager") == Outcome()


def test_the_loop_is_what_transformers_computes() -> None:
    """Its own forward in float64, with weights that the loop reads in float32. The last expert gets no token."""
    probe = make_probe("gpt_oss")
    block, _ = probe.make_block()
    inputs = probe.draw(block, 60)
    assert set(inputs.chosen.flatten().tolist()) == set(range(block.num_experts - 1))
    found = compute_in_loop(block, inputs)
    exact = probe.run(block.double(), "eager", inputs._replace(**{
        name: getattr(inputs, name).double() for name in ("hidden", "shares", "slopes")
    }))  # fmt: skip
    assert found.keys() == exact.keys()
    for name, value in exact.items():
        assert value is not None
        torch.testing.assert_close(found[name].double(), value, rtol=1e-4, atol=1e-5)
    assert not found["down_proj"][-1].any()


def drop_gradient(block: Any, *inputs: Tensor) -> Tensor:
    """As deepgemm: its kernels have no backward, and refuse none. What is left is the router's."""
    hidden, chosen, shares = inputs
    with torch.no_grad():
        out = grouped_mm_experts_forward(block, hidden, chosen, shares)
    return out + 0 * shares.sum()


def ignore_gate(block: Any, *inputs: Tensor) -> Tensor:
    """As sonicmoe: the activation of the config, whatever gate the class has."""

    class Plain:
        def __getattr__(self, name: str) -> Any:
            return getattr(block, name)

        @staticmethod
        def _apply_gate(both: Tensor) -> Tensor:
            gates, values = both.chunk(2, -1)
            return torch.nn.functional.silu(gates) * values

    return grouped_mm_experts_forward(Plain(), *inputs)


def fail_on_idle(block: Any, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    if len(chosen.unique()) < block.num_experts:
        raise RuntimeError("an empty group")
    return grouped_mm_experts_forward(block, hidden, chosen, shares)


def lose_last(block: Any, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """The gradient of one weight alone is wrong, by one token of one expert."""
    weight = block.down_proj
    out = grouped_mm_experts_forward(block, hidden, chosen, shares)
    weight.register_hook(lambda grad: grad)
    return out + (weight * 1e-2).sum() - (weight * 1e-2).sum().detach()


FAULTS = {
    "no gradient": (drop_gradient, "gradient of hidden"),
    "no gate of its own": (ignore_gate, "in float32"),
    "an empty group": (fail_on_idle, "an empty group"),
    "one gradient": (lose_last, "gradient of down_proj"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_faulty_implementation_is_passed_over(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault, words = FAULTS[name]
    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "sonicmoe", fault)
    probe = make_probe("gpt_oss")
    chosen = choose_experts("auto", probe, {}, run_trial=lambda trial: trial())
    assert chosen.name == "grouped_mm"
    assert words in chosen.reason
    with pytest.raises(ValueError, match=words):
        choose_experts("sonicmoe", probe, {}, run_trial=lambda trial: trial())


def test_what_is_missing_is_said_in_a_few_words() -> None:
    assert find_missing_package(torch.device("cpu")) == NO_GPU["sonicmoe"]
    if not torch.cuda.is_available():
        assert ". " not in find_missing_package(torch.device("cuda"))


def test_one_that_is_named_is_proven_too(snapshot: SnapshotAssertion) -> None:
    probe = make_probe("qwen3_moe")
    said = [choose_experts(name, probe, NO_GPU).reason for name in ("auto", "eager")]
    said.append(explain(choose_experts, "sonicmoe", probe, NO_GPU, error=ValueError))
    assert said == snapshot


def test_the_fastest_of_those_that_are_exact_is_taken(
    monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    seconds = {"grouped_mm": 2e-3, "sonicmoe": 1e-3}
    monkeypatch.setattr(choice, "try_experts", lambda _, name: Outcome(seconds=seconds[name]))
    chosen = choose_experts("auto", make_probe("qwen3_moe"), {}, run_trial=lambda trial: trial())
    assert (chosen.name, chosen.is_lasting, chosen.reason) == ("sonicmoe", True, snapshot)


def test_a_block_leaves_out_experts_that_would_take_too_much() -> None:
    """But for those that a token needs, one more, and an idle one."""
    probe = make_probe("gpt_oss")
    block, share = probe.make_block()
    assert (block.num_experts, share) == (4, 1.0)
    probe.num_chosen = probe.most_elements = 1
    block, share = probe.make_block()
    assert (block.num_experts, share) == (3, 0.75)
    assert {len(weight) for weight in block.parameters()} == {3}
    assert try_experts(probe, "grouped_mm") == Outcome()
