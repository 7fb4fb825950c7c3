"""Tests that the installed DeepSpeed has every key that a recipe's `deepspeed:` section may hold."""

from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from ulysses_cli.plan.ds_config import OWNERS, RENAMED, ZERO


def test_zero_optimization() -> None:
    reference = set(DeepSpeedZeroConfig.model_fields)
    assert reference >= ZERO
    named = {key.split(".")[1] for key in (*OWNERS, *RENAMED) if key.startswith("zero_optimization.")}
    assert named <= reference
