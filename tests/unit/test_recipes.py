"""Tests that every shipped recipe is valid, has its header, and is listed."""

import math
import re
from pathlib import Path

import pytest
from support.paths import RECIPES, ROOT
from support.tiers import sample

from ulysses_cli.hardware_table import load_hardware
from ulysses_cli.hub import find_model_shape
from ulysses_cli.plan.ledger.machine import compute_node_disk_bytes
from ulysses_cli.plan.models.layers import AttentionMixer
from ulysses_cli.plan.planner.estimate import compute_estimate
from ulysses_cli.plan.planner.lever_choice import choose_levers
from ulysses_cli.plan.recipe.loader import load_recipe
from ulysses_cli.plan.resolved import ResolvedRecipe, parse_plan
from ulysses_cli.plan.units import format_range
from ulysses_cli.validate import validate_recipe

FILES = sorted(RECIPES.rglob("*.yaml"))
GIB = 1 << 30
HEADER = ("model", "hardware", "launch", "predicted")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_recipe_is_valid_and_has_its_header(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a folder without a run
    result = validate_recipe(str(file))
    assert [str(problem) for problem in result.problems] == []
    assert result.loaded is not None
    assert result.resolved is not None
    plan = ResolvedRecipe(result.loaded, result.resolved)
    assert parse_plan(plan.dump()) == plan, "its processes get what the command has resolved"
    lines = file.read_text().splitlines()
    header = [line[2:] for line in lines[: lines.index("")]]
    assert header[0].endswith(".")
    for field in HEADER:
        assert any(line.startswith(f"{field:<11}") for line in header), field
    assert f"ulysses train recipes/{file.name}" in "\n".join(header)


def list_predicted() -> list[Path]:
    return [file for file in FILES if load_recipe(file).recipe.run.device != "cpu"]


PREDICTED = list_predicted()


def read_field(file: Path, field: str) -> str:
    return next(line[13:] for line in file.read_text().splitlines() if line.startswith(f"# {field:<11}"))


@pytest.mark.parametrize("file", sample(PREDICTED, PREDICTED[:1], PREDICTED[::3]), ids=lambda file: file.stem)
def test_the_header_agrees_with_the_ledger_and_the_recipe_fits(file: Path) -> None:
    written = read_field(file, "predicted")
    gpu = load_hardware().get_gpu(written.split(" on ")[1])
    recipe = load_recipe(file).recipe
    assert recipe.run.gpu == gpu.key
    estimate = compute_estimate(recipe, find_model_shape(recipe).shape, gpu)
    assert estimate.fit.verdict == "fits"
    peak, room = estimate.fit.gpu_peak_bytes / GIB, estimate.fit.gpu_capacity_bytes / GIB
    host, rates = math.ceil(estimate.fit.host_peak_bytes / GIB), format_range(*estimate.tokens_per_second)
    line = f"{peak:.1f} of {room:.1f} GiB per GPU, {host} GiB of host per machine, {rates} tokens/s on {gpu.key}"
    assert written == line
    hardware = read_field(file, "hardware")
    sizes = [int(size) for size in re.findall(r"(\d+) GB", hardware)]
    assert sizes
    assert max(sizes) * 0.93 <= gpu.memory_bytes / 1e9 <= max(sizes) * 1.08, "the GPU is of another size"
    if "of host memory" in hardware:
        amount, unit = re.search(r"(\d+) ([GT]iB) of host memory", hardware).groups()  # type: ignore[union-attr]
        assert host <= int(amount) * (1024 if unit == "TiB" else 1)
    assert estimate.job.world_size <= int(hardware.split()[0]) * (8 if "machines" in hardware else 1)


def test_a_recipe_with_recurrent_layers_names_the_extra_whose_kernels_its_figure_takes() -> None:
    named = {file.stem for file in FILES if "`recurrent`" in file.read_text()}
    recurrent = set()
    for file in list_predicted():
        layers = find_model_shape(load_recipe(file).recipe).shape.layers
        if any(not isinstance(mixer, AttentionMixer) for layer in layers for mixer in layer.mixers):
            recurrent.add(file.stem)
    assert named == recurrent
    assert len(named) == 3


def test_figures_of_tiles_and_norms_are_those_of_the_ledger() -> None:
    page = " ".join((ROOT / "docs/memory.md").read_text().split())
    command = re.search(r"`ulysses estimate-memory (recipes/\S+) --gpu (\S+) ([^`]*)` prints the first figure", page)
    paragraph = page[page.index("**MLPs and norms**") : command.start()]
    peaks = []
    for more in ((), ("memory.tiled_mlp=false",), ("memory.tiled_mlp=false", "model.fused_kernels=false")):
        recipe = load_recipe(ROOT / command[1], (*command[3].split(), *more)).recipe
        fit = choose_levers(recipe, find_model_shape(recipe).shape, load_hardware().get_gpu(command[2])).fit
        peaks.append(f"{fit.gpu_peak_bytes / GIB:.1f}")
    assert re.findall(r"(\d+\.\d) GiB", paragraph) == peaks


@pytest.mark.check
def test_the_page_on_memory_says_what_a_host_must_hold(tmp_path: Path) -> None:
    """8B at 500,000 tokens on one GPU with 80 GB: as it is, with a plain update, and then with a disk too."""
    file, gpu = RECIPES / "llama-3.1-8b-500k-1gpu.yaml", load_hardware().get_gpu("h100-80gb")
    common = ("memory.offload_optimizer=cpu", "memory.activation_offloading=auto")
    plain = (*common, "memory.overlap_optimizer=false")
    disk = (*plain, "memory.activation_offload_device=nvme", f"memory.nvme_path={tmp_path}")
    recipes = [load_recipe(file, words).recipe for words in (common, plain, disk)]
    estimates = [compute_estimate(recipe, find_model_shape(recipe).shape, gpu) for recipe in recipes]
    assert [each.fit.verdict for each in estimates] == ["fits", "fits", "fits"]
    hosts = [f"{each.fit.host_peak_bytes / GIB:.1f}" for each in estimates]
    disk_need = f"{compute_node_disk_bytes(estimates[2].job) / GIB:.1f}"
    text = " ".join((ROOT / "docs" / "memory.md").read_text().split())
    paragraph = re.search(r"takes \S+ GiB of host memory without a disk.*?on the disk", text)
    assert re.findall(r"(\d+\.\d) GiB", paragraph[0]) == [*hosts, disk_need]
