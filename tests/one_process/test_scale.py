"""Tests benchmarks/scale.py: groups on torch's fake backend, what crosses machines, a prediction at 4,096 ranks."""

import json
import sys

import pytest
from support.paths import ROOT

from ulysses_cli.hardware_table import load_hardware
from ulysses_cli.plan.layout import Layout
from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.levers import Levers

sys.path.append(str(ROOT / "benchmarks"))
import scale
from published import ALST, get_shape


@pytest.mark.parametrize("world", [8, 64])
def test_groups_have_the_ranks_that_numbers_say(world: int) -> None:
    assert scale.check_groups(world) >= 0.0


def test_a_layout_of_4096_ranks_is_predicted_with_memory_and_bytes() -> None:
    gpu = load_hardware().get_gpu("h100-80gb")
    row = scale.predict("8B", get_shape("meta-llama/Llama-3.1-8B"), 4096, 128 << 10, gpu)
    assert row is not None
    assert 0 < row.gib < gpu.memory_bytes / 2**30
    assert row.layout == "dp 4096 x sp 1"
    assert row.tokens_per_second == pytest.approx(4096 * (128 << 10) / row.step_seconds)
    assert 40 < row.zero_gib < 50  # two gathers and one reduction of 8 B weights in 2 bytes


@pytest.mark.parametrize(
    ("sp_size", "ring_size", "crosses"), [(8, 1, False), (8, 2, False), (16, 2, True), (16, 1, True)]
)
def test_only_rows_longer_than_a_machine_cross(sp_size: int, ring_size: int, crosses: bool) -> None:
    job = Job(
        get_shape("meta-llama/Llama-3.1-8B"), Layout(1, 2, sp_size, ring_size), 128 << 10, Levers(), gpus_per_node=8
    )
    inside, between = scale.split_by_link(job)
    assert inside > 0
    assert (between > 0) == crosses


def test_the_stored_rows_are_those_of_today() -> None:
    stored = json.loads((ROOT / "benchmarks" / "results" / "scale.json").read_text())
    assert {row["gpus"] for row in stored["predicted"]} == set(scale.COUNTS)
    assert {row["source"] for row in stored["rows_of_others"]} == {ALST}
    name = "Llama-3.1-8B"
    row = scale.predict(name, get_shape(f"meta-llama/{name}"), 16, 1 << 20, load_hardware().get_gpu("h100-80gb"))
    assert row is not None
    (kept,) = [
        each for each in stored["predicted"] if (each["model"], each["gpus"], each["tokens"]) == (name, 16, 1 << 20)
    ]
    assert kept["layout"] == row.layout
    assert kept["step_seconds"] == pytest.approx(row.step_seconds, rel=0.02)
