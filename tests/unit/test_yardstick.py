"""Holds searches and runs on sizes to the traces of benchmarks/results/yardstick.json, and tests how recipes are
drawn."""

import json
import sys
from typing import Any

import pytest
from support.paths import ROOT
from support.random_recipes import (
    YARDSTICK,
    draw_recipe,
    draw_recipes,
    make_drawn_job,
    measure_errors,
    read_recipe,
    run_phases,
)
from support.tiers import sample

from ulysses_cli.plan.ledger.ledger import measure_ledger
from ulysses_cli.plan.ledger.parts import weigh
from ulysses_cli.plan.models.families import FAMILIES

sys.path.append(str(ROOT / "benchmarks"))

from yardstick import BARS, NEAR, WORST, list_versions

RECORD = json.loads(YARDSTICK.read_text())
ROWS: list[dict[str, Any]] = RECORD["rows"]
# Runs on sizes that are off by more than rounding, and by how much at most.
OFF = {20: 0.052, 56: 0.025, 60: 0.05, 43: 0.02, 82: 0.015, 180: 0.0015, 86: 0.001, 196: 0.0011}


def name_row(number: int) -> str:
    return f"{number}, {ROWS[number]['recipe']['model']['config']['model_type']}"


@pytest.mark.parametrize("stride", sample([9, 1], [9]))
def test_searches_weigh_about_what_traces_take(stride: int) -> None:
    peaks = {}
    for number in range(0, len(ROWS), stride):
        job = make_drawn_job(read_recipe(ROWS[number]["recipe"]))
        peaks[name_row(number)] = abs(max(weigh(job).values()) / max(ROWS[number]["traced"].values()) - 1)
    assert sum(peak <= NEAR for peak in peaks.values()) >= BARS["searches"] * len(peaks)
    assert {name: peak for name, peak in peaks.items() if peak > WORST["searches"]} == {}


@pytest.mark.parametrize(
    "number", sample(range(len(ROWS)), range(4, len(ROWS), 25), range(1, len(ROWS), 8)), ids=name_row
)
def test_a_run_on_sizes_takes_the_bytes_of_its_trace(number: int) -> None:
    errors = measure_errors(run_phases(read_recipe(ROWS[number]["recipe"])), ROWS[number]["traced"])
    assert errors.keys() | {"save"} == {"peak", "save"} | ROWS[number]["traced"].keys()
    assert errors == dict.fromkeys(errors, pytest.approx(0, abs=OFF.get(number, 3e-4)))


def test_the_yardstick_has_every_family_and_was_traced_by_the_tested_versions() -> None:
    assert {row["recipe"]["model"]["config"]["model_type"] for row in ROWS} == set(FAMILIES)
    tested = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    assert RECORD["versions"] == {name: tested[name] for name in list_versions()}


def test_a_seed_and_a_number_give_the_same_recipe() -> None:
    assert [each.settings for each in draw_recipes(3, 4)] == [draw_recipe(3, number).settings for number in range(4)]
    assert draw_recipe(3, 0).settings != draw_recipe(4, 0).settings
    assert draw_recipe(202648, 7).command == "python benchmarks/yardstick.py --draw 1 --seed 202648 --first 7"


@pytest.mark.full
def test_draws_cover_every_family_and_every_setting() -> None:
    drawn = list(draw_recipes(1, 2 * len(FAMILIES)))
    for start in (0, len(FAMILIES)):
        assert {each.family for each in drawn[start : start + len(FAMILIES)]} == set(FAMILIES)
    recipes = [each.recipe for each in drawn]
    adapters = [recipe.lora for recipe in recipes if recipe.lora]
    assert {lora.quantize_base for lora in adapters} == {None, "nf4", "int8"}
    for values in (
        *zip(*(recipe.memory.model_dump().values() for recipe in recipes), strict=True),
        [recipe.parallel.zero_stage for recipe in recipes],
        [recipe.parallel.ring_size for recipe in recipes],
        [recipe.parallel.dp_replicate_size for recipe in recipes],
        [recipe.model.dtype for recipe in recipes],
        [recipe.train.optim for recipe in recipes],
        [recipe.train.z_loss_weight > 0 for recipe in recipes],
        [recipe.train.gradient_accumulation_steps > 1 for recipe in recipes],
        [bool(recipe.data.added_tokens) for recipe in recipes],
        [bool(recipe.data.eval_split) for recipe in recipes],
        [recipe.lora is None for recipe in recipes],
        [lora.use_dora for lora in adapters],
        [bool(lora.modules_to_save) for lora in adapters],
    ):
        assert len(set(values)) > 1


def test_the_names_that_programs_read_stay() -> None:
    """Lines of the ledger are keys of `--format json`, and so are the fields of levers."""
    number = next(n for n, row in enumerate(ROWS) if row["recipe"].get("lora", {}).get("use_dora"))
    job = make_drawn_job(read_recipe(ROWS[number]["recipe"]))
    lines = {name for moment in measure_ledger(job).phases.values() for name in moment.lines}
    assert {"parameters", "gradients", "logits", "allocator"} <= lines
    assert {"early_groups", "offloaded_layers", "head_chunks"} <= set(vars(job.levers))
