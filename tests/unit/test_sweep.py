"""Tests memory against length: the table and the picture where a row cannot be indexed."""

import re
from functools import cache
from pathlib import Path

import pytest
from support.paths import RECIPES
from support.tiers import sample
from syrupy.assertion import SnapshotAssertion

from ulysses_cli.hardware_table import load_hardware
from ulysses_cli.hub import find_model_shape
from ulysses_cli.plan.planner.estimate import Estimate, compute_estimate
from ulysses_cli.plan.planner.sweep import LengthSweep
from ulysses_cli.plan.recipe.loader import load_recipe
from ulysses_cli.report.ledger import compute_sweeps, format_sweep, make_sweep_page


@cache
def sweep(name: str, *overrides: str, gpu: str = "h100-80gb") -> list[tuple[Estimate, LengthSweep]]:
    recipe = load_recipe(RECIPES / f"{name}.yaml", overrides).recipe
    return compute_sweeps([compute_estimate(recipe, find_model_shape(recipe).shape, load_hardware().get_gpu(gpu))])


@pytest.mark.full
def test_an_open_lever_comes_on_where_a_row_could_not_be_indexed_without_it() -> None:
    """Tokens of experts outside tiles pass 2^31 elements; in tiles all rows can be indexed."""
    words = ("data.max_length=8Ki", "model.rope_scaling=null", "model.name_or_path=Qwen/Qwen3-30B-A3B")
    values = {value: sweep("qwen3-8b-64k-sp4-dp2", *words, f"memory.tiled_mlp={value}") for value in ("auto", "false")}
    at = values["auto"][0][1].lengths.index(262_144)
    alone = {value: each[0][1].curves[0] for value, each in values.items()}
    assert alone["auto"].name == alone["false"].name == "sp 1 x dp 8"
    assert alone["auto"].peaks[at] is not None
    assert alone["false"].peaks[at] is None
    assert "memory.tiled_mlp" in format_sweep(*values["false"][0])
    assert "2^31" not in format_sweep(*values["auto"][0])


@pytest.mark.parametrize(
    ("name", "gpu"),
    sample([("nemotron-3-nano-256k-2x8gpu", "h200"), ("tiny-cpu", "h100-80gb")], (), [("tiny-cpu", "h100-80gb")]),
)
def test_with_every_lever_a_row_is_indexed_wherever_it_is_with_fewer(name: str, gpu: str) -> None:
    """The set that needs least for a short row may be one with which kernels cannot index a long one."""
    ((_, curves),) = sweep(name, gpu=gpu)
    fewer, every = curves.curves[-2:]
    assert every.name == f"{fewer.name.partition(' x ')[0]}, every lever"
    assert None not in [least for least, peak in zip(every.peaks, fewer.peaks, strict=True) if peak is not None]


@pytest.mark.check
def test_chunks_that_the_recipe_sets_are_named_where_they_end_a_curve(snapshot: SnapshotAssertion) -> None:
    (swept,) = sweep("llama-3.1-8b-5m-8gpu", gpu="h200")
    assert re.findall(r".*attention_head_chunks.*", format_sweep(*swept)) == snapshot


@pytest.mark.check
def test_a_cell_is_the_estimate_of_its_length(snapshot: SnapshotAssertion) -> None:
    """Past the estimate's own length, a run opens chunks of heads and drops kept attention results."""
    split = ("parallel.sp_size=8", "parallel.dp_shard_size=1")
    ((estimate, curves),) = sweep("qwen3-8b-64k-sp4-dp2", *split)
    curve = next(curve for curve in curves.curves if curve.name == "sp 8 x dp 1")
    assert re.findall(r".* levers that .*", format_sweep(estimate, curves)) == snapshot
    words = (*split, "data.max_length=4Mi", "memory.large_tiles=false")
    recipe = load_recipe(RECIPES / "qwen3-8b-64k-sp4-dp2.yaml", words).recipe
    alone = compute_estimate(recipe, find_model_shape(recipe).shape, load_hardware().get_gpu("h100-80gb"))
    at = curves.lengths.index(4 << 20)
    assert alone.fit.verdict == "fits"
    assert curve.fits[at]
    assert curve.peaks[at] == pytest.approx(alone.fit.gpu_peak_bytes, rel=0.01)
    assert not curve.fits[curves.lengths.index(8_388_608)]


@pytest.mark.parametrize("device", sample(["optimizer", "param"], quick=(), checked=()))
def test_what_is_given_to_a_disk_stays_there(device: str, tmp_path: Path) -> None:
    words = (f"memory.offload_{device}=nvme", f"memory.nvme_path={tmp_path}")
    ((_, on_disk),) = sweep("qwen3-8b-64k-sp4-dp2", *words)
    ((_, open_levers),) = sweep("qwen3-8b-64k-sp4-dp2")
    (least, least_open) = (each.curves[-1].peaks[0] for each in (on_disk, open_levers))
    assert least <= 1.05 * least_open


@pytest.mark.full
def test_memory_is_not_spent_along_a_curve() -> None:
    """`auto` makes tiles large at the recipe's own length alone; where every lever is on, no tile is large."""
    name, gpu = "llama-3.1-8b-128k-8gpu", "b200"
    tiled = ("memory.tiled_mlp=true", "memory.tiled_loss=true")
    curves = {
        value: sweep(name, *tiled, f"memory.large_tiles={value}", gpu=gpu)[0] for value in ("auto", "false", "true")
    }
    assert curves["auto"][0].job.levers.large_tiles
    assert curves["auto"][1] == curves["false"][1]
    assert curves["true"][1].curves[-1] == curves["false"][1].curves[-1]
    assert curves["true"][1].curves[-2] != curves["false"][1].curves[-2]


@pytest.mark.parametrize(
    "name", sample(["llama-3.3-70b-128k-4x8gpu", "qwen3-32b-128k-4x8gpu", "tiny-cpu"], quick=(), checked=["tiny-cpu"])
)
def test_the_pictures_titles_and_legends_are_complete(name: str) -> None:
    texts = re.findall("<text[^>]*>([^<]*)</text>", make_sweep_page(sweep(name, gpu="a100-40gb")))
    assert [text for text in texts if "\u2026" in text] == []
    assert any(text.endswith("every lever") for text in texts)
