"""Tests configs of which transformers makes no model, keys that DeepSpeed has, and messages of libraries."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from support.training import CONFIG, make_recipe

import ulysses_cli.train  # noqa: F401 - sets which messages are shown
from ulysses_cli.plan.ds_config import OWNERS, RENAMED, ZERO
from ulysses_cli.plan.problem import USAGE
from ulysses_cli.train.attention.interface import UnservedError
from ulysses_cli.train.elementwise.choice import describe
from ulysses_cli.train.failure import describe_failure
from ulysses_cli.train.model.loading import BuildError, ModelOptions, load_model_config, start_from_random


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "qwem3"}, "knows no model type qwem3; did you mean qwen3?"),
        ({"head_dim": 31}, "'validate_rope': ValueError: RoPE requires an even rotary dimension"),
        ({"rope_parameters": 5}, "'rope_parameters': TypeError: Field 'rope_parameters' with value 5"),
    ],
)
def test_a_config_that_cannot_be_used(changes: dict[str, Any], message: str) -> None:
    recipe = make_recipe(config={**CONFIG, **changes})
    with pytest.raises(BuildError, match="the model's config cannot be used: ") as error:
        load_model_config(recipe)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_name_that_transformers_does_not_know_is_not_the_whole_message() -> None:
    config = load_model_config(make_recipe(config={**CONFIG, "hidden_act": "nosuch"}))
    with pytest.raises(BuildError, match=r"makes no model of model\.config: KeyError: 'nosuch'"):
        start_from_random(ModelOptions(config, torch.float32, "eager"), 0, torch.device("cpu"))


def test_layers_that_are_not_served_are_the_recipes_to_change() -> None:
    failure = describe_failure(UnservedError("layer 0 asks for attention that is not causal"))
    assert failure["message"] == "layer 0 asks for attention that is not causal"
    assert failure["exit_code_wanted"] == USAGE


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ((13, 1, 3), "in one pass each: 13 norms, 1 rotary embedding, 3 gated MLPs: as measured"),
        ((1, 0, 0), "in one pass each: 1 norm: as measured"),
        ((0, 0, 0), "norms, rotary embedding and MLPs are those of transformers"),
    ],
)
def test_parts_that_a_model_lacks_are_not_counted(counts: tuple[int, int, int], words: str) -> None:
    served = SimpleNamespace(**dict(zip(("norms", "rotations", "gates"), counts, strict=True)))
    choice: Any = SimpleNamespace(reason="as measured")
    assert describe(choice, served) == words


def test_zero_optimization() -> None:
    reference = set(DeepSpeedZeroConfig.model_fields)
    assert reference >= ZERO
    assert {key.split(".")[1] for key in (*OWNERS, *RENAMED) if key.startswith("zero_optimization.")} <= reference


def test_a_missing_kernel_that_no_run_uses_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    ops = pytest.importorskip("bitsandbytes.backends.cpu.ops")
    ops.logger.warning("Failed to load CPU gemm_4bit_forward from kernels-community: %s.", "no module")
    assert not caplog.records
    ops.logger.error("what stops the library")
    assert [record.message for record in caplog.records] == ["what stops the library"]
