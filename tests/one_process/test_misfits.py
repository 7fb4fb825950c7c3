"""Tests configs of which transformers makes no model, keys that DeepSpeed has, and messages of libraries."""

from typing import Any

import pytest
import torch
import transformers
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from support.refusals import explain
from support.training import CONFIG, make_recipe
from syrupy.assertion import SnapshotAssertion

import ulysses_cli.train  # noqa: F401 - sets which messages are shown
from ulysses_cli.plan.ds_config import OWNERS, RENAMED, ZERO
from ulysses_cli.plan.problem import USAGE
from ulysses_cli.train.attention.interface import UnservedError
from ulysses_cli.train.failure import describe_failure
from ulysses_cli.train.model.loading import BuildError, ModelOptions, load_model_config, start_from_random


@pytest.mark.parametrize("changes", [{"model_type": "qwem3"}, {"head_dim": 31}, {"rope_parameters": 5}], ids=str)
def test_a_config_that_cannot_be_used(changes: dict[str, Any], snapshot: SnapshotAssertion) -> None:
    recipe = make_recipe(config={**CONFIG, **changes})
    said = explain(load_model_config, recipe, error=BuildError).replace(transformers.__version__, "VERSION")
    assert said.partition(" doesn't match")[0] == snapshot


def test_a_name_that_transformers_does_not_know_is_not_the_whole_message(snapshot: SnapshotAssertion) -> None:
    config = load_model_config(make_recipe(config={**CONFIG, "hidden_act": "nosuch"}))
    assert (
        explain(
            start_from_random, ModelOptions(config, torch.float32, "eager"), 0, torch.device("cpu"), error=BuildError
        )
        == snapshot
    )


def test_layers_that_are_not_served_are_the_recipes_to_change() -> None:
    failure = describe_failure(UnservedError("why"))
    assert (failure["message"], failure["exit_code_wanted"]) == ("why", USAGE)


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
