"""Holds searches and runs on sizes to the traces of benchmarks/results/yardstick.json,."""

import json
import sys
from typing import Any

import pytest
from support.paths import ROOT
from support.random_recipes import (
    YARDSTICK,
    make_drawn_job,
    measure_errors,
    read_recipe,
    run_phases,
)
from support.tiers import sample

from ulysses_cli.plan.ledger.parts import weigh
from ulysses_cli.plan.models.families import FAMILIES

sys.path.append(str(ROOT / "benchmarks"))

from yardstick import BARS, NEAR, WORST, list_versions

RECORD = json.loads(YARDSTICK.read_text())
ROWS: list[dict[str, Any]] = RECORD["rows"]
# Runs on sizes of which a phase is off by more than 0.11 %, and by how much at most. All peaks are within 0.05 %.
OFF = {20: 0.052, 43: 0.02, 82: 0.015, 128: 0.0014}


def name_row(number: int) -> str:
    return f"{number}, {ROWS[number]['recipe']['model']['config']['model_type']}"


@pytest.mark.parametrize("stride", sample([9, 1], (), [9]))
def test_searches_weigh_about_what_traces_take(stride: int) -> None:
    peaks = {}
    for number in range(0, len(ROWS), stride):
        job = make_drawn_job(read_recipe(ROWS[number]["recipe"]))
        peaks[name_row(number)] = abs(max(weigh(job).values()) / max(ROWS[number]["traced"].values()) - 1)
    assert sum(peak <= NEAR["searches"] for peak in peaks.values()) >= BARS["searches"] * len(peaks)
    assert {name: peak for name, peak in peaks.items() if peak > WORST["searches"]} == {}


@pytest.mark.parametrize(
    "number", sample(range(len(ROWS)), range(4, len(ROWS), 25), range(1, len(ROWS), 8)), ids=name_row
)
def test_a_run_on_sizes_takes_the_bytes_of_its_trace(number: int) -> None:
    errors = measure_errors(run_phases(read_recipe(ROWS[number]["recipe"])), ROWS[number]["traced"])
    assert errors.keys() | {"save"} == {"peak", "save"} | ROWS[number]["traced"].keys()
    assert errors == dict.fromkeys(errors, pytest.approx(0, abs=OFF.get(number, 1.1e-3)))
    assert abs(errors["peak"]) < 5e-4


def test_the_yardstick_has_every_family_and_was_traced_by_the_tested_versions() -> None:
    assert {row["recipe"]["model"]["config"]["model_type"] for row in ROWS} == set(FAMILIES)
    tested = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    assert RECORD["versions"] == {name: tested[name] for name in list_versions()}
