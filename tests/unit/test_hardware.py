"""Tests the hardware table: what is shipped, a user's own entries, and every mistake in them."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ulysses_cli.hardware_table import SHIPPED, _read_yaml, load_hardware
from ulysses_cli.plan.hardware import read_hardware
from ulysses_cli.plan.problem import RecipeError

MINE: dict[str, Any] = {
    "name": "Mine", "memory_mib": 1000, "tflops": 10, "memory_gb_s": 100, "link_gb_s": 10, "host_gb_s": 10,
    "network_gb_s": 1, "attention": [0.5, 0.4], "gpus_per_node": 2, "host_gib_per_gpu": 16,
}  # fmt: skip


def read(own: Any) -> Any:
    return read_hardware(("shipped", _read_yaml(SHIPPED)), ("own.yaml", own))


@pytest.mark.parametrize("key", load_hardware().gpus)
def test_the_shipped_table(key: str) -> None:
    gpu = load_hardware().get_gpu(key)
    assert gpu.source
    assert 20 < gpu.memory_bytes / 2**30 < 300
    assert 0.2 < gpu.attention_backward <= gpu.attention_forward < 0.8
    if gpu.usd_low is not None:
        assert gpu.price_source
        assert gpu.price_date >= "2026"


def test_a_name_matches_in_any_spelling() -> None:
    """A name that is none is answered with its nearest: commands.txt."""
    table = load_hardware()
    for name in ("h100", "H100", "h100_80gb", " h100-sxm "):
        assert table.get_gpu(name).key == "h100-80gb"
    for name in ("RTX4090", "rtx 4090", "rtx_4090", "4090"):
        assert table.get_gpu(name).key == "rtx-4090"


def test_a_users_entry_wins_key_by_key() -> None:
    result = read({"gpus": {"h200": {"usd_per_hour": 2.2}, "mine": MINE}, "efficiency": {"matmul": 0.5}})
    assert (result.get_gpu("h200").usd_low, result.get_gpu("h200").usd_high) == (2.2, 2.2)
    assert result.get_gpu("h200").tflops == 989
    assert result.get_gpu("mine").memory_bytes == 1000 * 2**20
    assert result.get_gpu("mine").usd_middle is None
    assert result.get_gpu("b200").efficiency.matmul == 0.5


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 10**20) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from([*MINE, "usd_per_hour", "aliases", "source", "other"]), JSON)
def test_no_value_raises_anything_but_recipe_error(key: str, value: object) -> None:
    try:
        read({"gpus": {"mine": {**MINE, key: value}}})
    except RecipeError:
        pass
