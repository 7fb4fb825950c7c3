"""Tests estimate-memory and plan as a user meets them: stable JSON, exit codes, mistakes, written recipes that
validate."""

import itertools
import json
import re
import resource
from pathlib import Path
from typing import Any

import pytest
from support.commands import run
from support.paths import RECIPES
from support.tiers import sample
from syrupy.assertion import SnapshotAssertion

from ulysses_cli.commands.plan import read_offers
from ulysses_cli.hardware_table import load_hardware
from ulysses_cli.plan.recipe.loader import load_recipe
from ulysses_cli.plan.speed import HOST, PARTS

RECIPE = str(RECIPES / "llama-3.1-8b-128k-8gpu.yaml")
ALONE = str(RECIPES / "qwen3-4b-32k-lora-24gb.yaml")  # one GPU
KEYS = {
    "gpu", "verdict", "gpu_peak_bytes", "gpu_capacity_bytes", "host_peak_bytes_per_node", "margin_bytes",
    "uncertainty_bytes", "peak_phase", "phases", "max_length", "max_length_all_levers", "suggestion", "step_seconds",
    "step_parts", "tokens_per_second", "mfu", "usd_per_million_tokens",
}  # fmt: skip


def ask(*words: str, **variables: str) -> list[dict[str, Any]]:
    """An estimate's answer in JSON."""
    done = run("estimate-memory", *words, "--format", "json", **variables)
    assert (done.returncode, done.stderr) == (0, "")
    results: list[dict[str, Any]] = json.loads(done.stdout)["results"]
    return results


NOISE = 2.5  # the speed of a shared core doubles and halves; benchmarks/estimate.py holds the real bars


@pytest.mark.check
def test_the_json_of_an_estimate() -> None:
    results = ask(RECIPE, "--gpu", "h100-80gb", "--gpu", "h200")
    assert [each["gpu"] for each in results] == ["h100-80gb", "h200"]
    for each in results:
        assert each.keys() >= KEYS
        assert set(each["step_parts"]) == {*PARTS, HOST}
        assert sum(each["step_parts"].values()) == pytest.approx(each["step_seconds"])
        assert max(sum(lines.values()) for lines in each["phases"].values()) == each["gpu_peak_bytes"]
        assert each["margin_bytes"] == each["gpu_capacity_bytes"] - each["gpu_peak_bytes"]
        assert each["host_margin_bytes"] == each["host_capacity_bytes_per_node"] - each["host_peak_bytes_per_node"]
        assert each["host_uncertainty_bytes"] > 0
        assert each["verdict"] in ("fits", "too_close", "does_not_fit")
        assert each["peak_phase"] in each["phases"]
        assert each["max_length"] <= each["max_length_all_levers"]
    assert list(results[0]["phases"]) == ["load", "forward", "backward", "optimizer_step", "evaluation", "save"]


@pytest.mark.check
def test_a_row_that_fits_is_no_longer_than_the_longest() -> None:
    """The longest row is searched in whole multiples."""
    words = ("--model", "Qwen/Qwen3-8B", "--max-length", "100001", "--num-processes", "8", "--gpu", "h200")
    (result,) = ask(*words)
    assert result["verdict"] == "fits"
    assert min(result["max_length"], result["max_length_all_levers"]) >= 100_001


def measure_cpu_seconds(*words: str) -> float:
    """Returns a command's CPU seconds, which other programs on the machine do not change."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert run(*words).returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.check
def test_an_estimate_takes_half_a_second() -> None:
    assert min(measure_cpu_seconds("estimate-memory", RECIPE) for _ in range(3)) < 0.5 * NOISE


def test_a_users_table_is_read_and_its_mistakes_are_placed(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    folder = tmp_path / "ulysses"
    folder.mkdir()
    own = folder / "hardware.yaml"
    own.write_text("gpus:\n  h100-80gb:\n    usd_per_hour: 1.5\n")
    (answer,) = ask(RECIPE, XDG_CONFIG_HOME=str(tmp_path))
    price, rates = answer["usd_per_million_tokens"], answer["tokens_per_second_range"]
    assert price["low"] * rates["high"] == pytest.approx(price["high"] * rates["low"]), "one price, a range of speeds"
    own.write_text("gpus:\n  h100-80gb:\n   - [\n")
    done = run("estimate-memory", RECIPE, XDG_CONFIG_HOME=str(tmp_path))
    assert (done.returncode, done.stderr) == (2, snapshot)


@pytest.mark.parametrize("method", sample(["full", "lora"], quick=[], checked=["lora"]))
def test_a_written_plan_is_a_recipe_that_validates_and_fits(tmp_path: Path, method: str) -> None:
    file = tmp_path / "planned.yaml"
    words = ("plan", "--model", "Qwen/Qwen3-8B", "--max-length", "256Ki", "--gpus", "h100-80gb:16", "--tokens", "200M")
    done = run(*words, "--method", method, "--write", str(file))
    assert done.returncode == 0
    assert "wrote " in done.stderr
    assert run("validate-config", str(file)).returncode == 0
    assert file.read_text().startswith("# ")
    assert "# predicted  " in file.read_text()
    assert (load_recipe(file).recipe.lora is not None) == (method == "lora")
    (answer,) = ask(str(file))
    assert answer["verdict"] == "fits"
    planned = json.loads(run(*words, "--method", method, "--format", "json").stdout)["by_cost"][0]
    assert planned["gpu_peak_bytes"] == pytest.approx(answer["gpu_peak_bytes"], rel=0.01)


@pytest.mark.full
def test_a_search_over_all_kinds_does_not_grow_unseen() -> None:
    """12 CPU seconds on two busy cores, and 72 before the most promising layouts came first."""
    words = ("plan", "--model", "meta-llama/Llama-3.1-70B", "--max-length", "128Ki")
    assert measure_cpu_seconds(*words) < 12 * NOISE


@pytest.mark.check
def test_positions_that_cannot_be_stretched_bound_the_longest_row() -> None:
    words = "plan --model microsoft/Phi-3-mini-128k-instruct --longest --gpus b300:1 --format json"
    (row,) = json.loads(run(*words.split()).stdout)["longest"]
    assert (row["max_length"], row["stretch"]) == (131072, 1)


def test_no_plan_is_for_amd_unless_one_is_named() -> None:
    """Nothing here was tried on ROCm."""
    offers = read_offers(None, load_hardware())
    assert {"h100-80gb", "rtx-4090"} <= {offer.gpu.key for offer in offers}
    assert not any(offer.gpu.is_amd for offer in offers)


def test_what_no_gpu_has_confirmed_is_a_range_and_says_so_once() -> None:
    plan = ("plan", "--model", "Qwen/Qwen3-0.6B", "--max-length", "2Ki", "--gpus", "h100-80gb:1", "--tokens", "10M")
    for done in (run("estimate-memory", RECIPE), run(*plan)):
        assert done.stdout.count("predicted, not") == 1
    answer = json.loads(run(*plan, "--format", "json").stdout)["by_cost"][0]
    for name in ("tokens_per_second", "hours"):
        assert answer[f"{name}_range"]["low"] < answer[name] < answer[f"{name}_range"]["high"]
    assert answer["limited_by"] == "host", "short rows of a small model"


@pytest.mark.check
def test_a_sweep_as_a_table_as_json_and_as_a_picture(tmp_path: Path) -> None:
    page = tmp_path / "sweep.html"
    done = run("estimate-memory", RECIPE, "--gpu", "a100-40gb", "--sweep", "--html", str(page))
    assert done.returncode == 0
    for words in ("sp 8 x dp 1", "sp 1 x dp 8", "every lever", "131,072", " x"):
        assert words in done.stdout
    assert "<svg" in page.read_text()
    assert "wrote " in done.stderr
    words = ("memory.tiled_loss=true", "memory.tiled_mlp=true", "--sweep", "--format", "json")
    sweep = json.loads(run("estimate-memory", ALONE, *words).stdout)["sweeps"][0]
    for peaks in sweep["gpu_peak_bytes"].values():
        known = [peak for peak in peaks if peak is not None]
        assert len(peaks) == len(sweep["lengths"])
        assert all(a <= b * 1.02 for a, b in itertools.pairwise(known))
    done = run("estimate-memory", ALONE, "--html", str(tmp_path / "new" / "x.html"))
    assert (done.returncode, done.stdout) == (0, run("estimate-memory", ALONE).stdout)
    assert (tmp_path / "new" / "x.html").is_file()


@pytest.mark.check
def test_a_recipes_price_of_a_gpu_wins() -> None:
    words = (RECIPE, "run.price_per_gpu_hour=3.5")
    (answer,) = ask(*words)
    low, high = (3.5 * 8 / 3600 * 1e6 / answer["tokens_per_second_range"][end] for end in ("high", "low"))
    assert answer["usd_per_million_tokens"] == {"low": pytest.approx(low), "high": pytest.approx(high)}
    assert "(run.price_per_gpu_hour)" in run("estimate-memory", *words).stdout


@pytest.mark.parametrize(
    ("words", "masks"),
    [
        (("data.datasets.0.type=chat", "data.assistant_only_loss=true"), True),
        (("data.datasets.0.type=completion",), True),
        (("data.datasets.0.type=completion", "data.completion_only_loss=false"), False),
        (("data.datasets.0.type=text",), False),
    ],
)
def test_a_head_that_runs_on_fewer_tokens_than_are_counted_is_named(
    words: tuple[str, ...], masks: bool, snapshot: SnapshotAssertion
) -> None:
    (result,) = ask(RECIPE, *words)
    share = result["step_parts"]["head_loss"] / result["step_seconds"]
    assert result["head_share"] == (pytest.approx(share) if masks else None)
    lines = re.findall(r".*head is counted.*", run("estimate-memory", RECIPE, *words).stdout)
    assert lines == snapshot
    assert [f" {share:.0%} less" in line for line in lines] == [True] * masks


@pytest.mark.check
def test_pairs_have_a_forward_before_step_1(snapshot: SnapshotAssertion) -> None:
    recipe = str(RECIPES / "dpo-32k-qlora-24gb.yaml")
    share = ask(recipe)[0]["reference_share"]
    assert 0.2 < share < 0.4
    (line,) = re.findall(r".*before step 1.*", run("estimate-memory", recipe).stdout)
    assert line == snapshot
    assert f" {share:.0%} " in line
    (other,) = ask(recipe, "preference.loss=simpo")
    assert other["reference_share"] is None
    assert 0 < other["head_share"] < 0.2


@pytest.mark.check
def test_validate_config_says_whether_it_fits() -> None:
    answer = json.loads(run("validate-config", RECIPE, "--gpu", "rtx-4090", "--format", "json").stdout)
    memory = answer["plans"][0]["memory"]
    (estimate,) = ask(RECIPE, "--gpu", "rtx-4090")
    assert (memory["verdict"], memory["levers"]) == (estimate["verdict"], estimate["levers"])


PHI = {
    "model_type": "phi", "architectures": ["PhiForCausalLM"], "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 3, "num_attention_heads": 8, "vocab_size": 4096, "max_position_embeddings": 2048,
}  # fmt: skip
UNKNOWN_OPTIONS = ("--max-length", "2Ki", "--num-processes", "2")


def write_model(folder: Path, **config: object) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_a_model_without_a_formula_is_run_on_sizes(tmp_path: Path) -> None:
    (result,) = ask("--model", write_model(tmp_path, **PHI), *UNKNOWN_OPTIONS)
    assert list(result["phases"]) == ["load", "forward", "backward", "optimizer_step", "save"]
    assert max(sum(lines.values()) for lines in result["phases"].values()) == result["gpu_peak_bytes"]
    assert {"parameters", "attention", "gradients"} <= result["phases"]["backward"].keys()
    assert result["peak_moment"].startswith("backward of ")


@pytest.mark.full
def test_its_bytes_are_those_of_its_trace(tmp_path: Path) -> None:
    options = ("--model", write_model(tmp_path, **PHI), *UNKNOWN_OPTIONS)
    (result,), (traced,) = ask(*options), ask(*options, "--trace")
    unseen = ("cuda_context", "nccl", "allocator", "cublas_workspace")
    for phase, num_bytes in traced["trace"]["phases"].items():
        lines = result["phases"][phase]
        assert sum(lines.values()) - sum(lines.get(name, 0) for name in unseen) == pytest.approx(num_bytes, rel=1e-3)
