"""Tests what ranks say of their processor and of a slow attention kernel."""

import re
from dataclasses import replace
from typing import Any

import pytest
from support.training import make_recipe

from ulysses_cli.hardware_table import load_hardware
from ulysses_cli.plan.levers import Levers
from ulysses_cli.plan.models.shape import read_model_shape
from ulysses_cli.plan.planner.lever_choice import LeverChoice
from ulysses_cli.plan.resolved import settle
from ulysses_cli.train import inputs
from ulysses_cli.train.inputs import Forecast, Yardstick, measure_core_milliseconds

H100 = load_hardware().get_gpu("h100-80gb")


def make_plan() -> Any:
    recipe = make_recipe()
    return settle(recipe, read_model_shape(recipe.model.config, "test"), Levers())


def test_ranks_count_with_their_own_core(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, seconds = make_plan(), []
    for milliseconds in (H100.host.yardstick, 3 * H100.host.yardstick):
        monkeypatch.setattr(inputs, "measure_core_milliseconds", lambda found=milliseconds: found)
        what, helps = Forecast(LeverChoice(Levers(), {}, None), H100, True).explain_host(plan)
        assert what.startswith("steps are limited by the host: a processor takes about ")
        assert helps.startswith("what helps: ")
        seconds.append(float(what.split("about ")[1].split(" ms")[0].replace(",", "")))
    assert seconds[1] / seconds[0] == pytest.approx(3, rel=0.1)


def test_nothing_is_said_where_the_gpu_is_unknown_or_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, choice = make_plan(), LeverChoice(Levers(), {}, None)
    monkeypatch.setattr(inputs, "measure_core_milliseconds", lambda: 1e-6 * H100.host.yardstick)
    assert Forecast(choice, None, False).explain_host(plan) == []
    assert Forecast(choice, replace(H100, tflops=1e-3), True).explain_host(plan) == []
    assert Forecast(choice, H100, False).explain_host(plan) == []


def test_a_slow_attention_kernel_is_named_with_its_cost() -> None:
    """By the lengths of the run's documents: short ones leave attention little to do."""
    plan, said = make_plan(), Forecast(LeverChoice(Levers(), {}, None), H100, True)
    assert said.explain_attention(plan, ["torch_varlen"], [plan.resolved.max_length]) == []
    recipe = make_recipe("data.max_length=1048576", "model.dtype=bfloat16")
    long = settle(
        recipe, read_model_shape({**recipe.model.config, "max_position_embeddings": 1 << 20}, "test"), Levers()
    )
    (line,) = said.explain_attention(long, ["torch_varlen"], [1 << 20])
    found = re.search(r"a step takes ([\d.]+) times as long .*pip install 'ulysses-cli\[flash-attn-4\]'", line)
    assert found
    assert 1.3 < float(found[1]) < 1.75
    assert said.explain_attention(long, ["flash_attention_3"], [1 << 20]) == []
    assert said.explain_attention(long, ["torch_varlen"], [256] * 4096) == []
    assert (
        Forecast(said.choice, replace(H100, packed_attention=None), True).explain_attention(
            long, ["torch_varlen"], [1 << 20]
        )
        == []
    )


def test_a_core_is_measured_in_milliseconds() -> None:
    assert 0.05 < measure_core_milliseconds() < 50
    yardstick = Yardstick()
    yardstick.measure()
    assert yardstick.module.weight.grad is None, "nothing is kept from call to call"
