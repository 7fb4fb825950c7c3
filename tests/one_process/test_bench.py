"""Tests how bench judges: a row that runs out of memory is reported and the sweep goes on, and calibration moves the
estimate to the measurement. In `make test-full` the whole command also runs beside the Trainer."""

import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from support.commands import succeed
from support.paths import TINY_RECIPE
from support.refusals import explain
from support.small_run import CONFIG
from support.training import make_recipe
from syrupy.assertion import SnapshotAssertion
from typer.testing import CliRunner

from ulysses_cli import hardware_table
from ulysses_cli.cli import app
from ulysses_cli.commands.bench import save_calibration
from ulysses_cli.hardware_table import load_hardware
from ulysses_cli.plan.hardware import read_hardware
from ulysses_cli.plan.ledger.job import make_job
from ulysses_cli.plan.levers import Levers
from ulysses_cli.plan.models.shape import read_model_shape
from ulysses_cli.plan.speed import compute_speed
from ulysses_cli.prove import bench as subject
from ulysses_cli.prove.ranks import Interleaving, RankFailureError, compare_pairs, run_interleaved
from ulysses_cli.prove.results import find_version
from ulysses_cli.prove.rows import FullRows
from ulysses_cli.prove.speed import Timed, calibrate
from ulysses_cli.report.proofs import make_findings_page

BIG = {**CONFIG, "hidden_size": 2048, "intermediate_size": 8192, "head_dim": 128, "num_hidden_layers": 16}


def make_timed(parts: dict[str, float], seconds: float = 1.0, loss: float = 2.0) -> Timed:
    steps = {step: seconds * (1 + step / 100) for step in range(4, 8)}
    return Timed(steps, 100, 1e12, 989.0, 1 << 30, 1 << 30, loss, parts, 0.1)


def run_sweep(outcomes: Any, place: subject.BenchDevice | None = None, **more: Any) -> Any:
    """Runs a sweep without starting ranks: `outcomes(recipe, is_ours, num_sides)` says how each side ends."""

    def run(world: int, calls: Any, **_: Any) -> list[Any]:
        return [outcomes(args[0], function is subject.time_steps, len(calls)) for function, args in calls]

    options = {"lengths": (32, 64), "sp_sizes": (1, 2), "levers": "auto", "num_steps": 4, "against_trainer": False}
    sweep = subject.BenchSweep(**{**options, "time_limit_seconds": 60.0, **more})
    recipe = make_recipe("parallel.sp_size=2")
    return subject.bench(recipe, CONFIG, "test", load_hardware(), sweep, lambda _: None, device=place, run=run)


def test_an_oom_is_a_row_and_the_sweep_goes_on(snapshot: SnapshotAssertion) -> None:
    def end(recipe: Any, is_ours: bool, num_sides: int) -> Any:
        if recipe.data.max_length == 64:
            return RankFailureError(1, "OutOfMemoryError", "tried to allocate 2 GiB", "")
        if recipe.data.max_length == 96:
            return RankFailureError(0, "ValueError", "something else", "")
        return make_timed({"mlp": 0.5})

    findings = run_sweep(end, lengths=(32, 64, 96, 128))
    assert [row.verdict for row in findings.rows] == ["", "OOM", "FAIL", ""] * 2
    assert findings.rows[1].text == snapshot
    assert {row.group for row in findings.rows} == {"sp 1 x dp 2", "sp 2 x dp 1"}


def test_on_a_gpu_each_row_stands_beside_its_prediction_and_an_oom_beside_its_cause() -> None:
    place = subject.BenchDevice("cuda", 2, load_hardware().get_gpu("h100-80gb"))

    def end(recipe: Any, is_ours: bool, num_sides: int) -> Any:
        is_long = recipe.data.max_length == 64
        return RankFailureError(0, "OutOfMemoryError", "no", "") if is_long else make_timed({"mlp": 0.5})

    findings = run_sweep(end, place, sp_sizes=(2,))
    values = findings.rows[0].values
    assert values["step_error"] == pytest.approx(values["predicted_step_seconds"] / values["step_seconds"] - 1)
    assert values["memory_error"] == pytest.approx(values["predicted_memory_bytes"] / (1 << 30) - 1)
    assert values["host_memory_error"] == pytest.approx(values["predicted_host_memory_bytes"] / (1 << 30) - 1)
    assert (findings.rows[1].verdict, "largest in " in findings.rows[1].text) == ("OOM", True)
    page = make_findings_page(findings.describe())
    assert page.count("<svg ") == 0  # one length that fits is no curve
    longer = run_sweep(lambda *_: make_timed({"mlp": 0.5}), place, sp_sizes=(2,))
    page = make_findings_page(longer.describe())
    assert "sp 2 x dp 1, predicted" in page
    assert f"torch {find_version('torch')}" in page
    assert page.count("<svg ") >= 5


def test_the_peer_is_compared_pair_by_pair_and_alone_where_both_do_not_fit(snapshot: SnapshotAssertion) -> None:
    def end(recipe: Any, is_ours: bool, num_sides: int) -> Any:
        if recipe.data.max_length == 64 and num_sides == 2:
            return RankFailureError(0, "OutOfMemoryError", "two models at once", "")
        loss = 2.0 if is_ours or recipe.data.max_length != 96 else 2.1
        return make_timed({"exchange": 0.5, "mlp": 0.5}, 1.0 if is_ours else 1.5, loss)

    findings = run_sweep(end, lengths=(32, 64, 96), sp_sizes=(2,), against_trainer=True)
    ratios = {row.name: row for row in findings.rows if row.group == "the Trainer's time by ours"}
    assert [row.verdict for row in findings.rows if row.group == "sp 2 x dp 1, the Trainer"] == ["", "", ""]
    paired, alone, other = (ratios[f"sp 2 x dp 1, {length}"] for length in (32, 64, 96))
    assert paired.values["speed_ratio"] == pytest.approx(1.5)
    assert (paired.values["num_pairs"], paired.values["exchange_share"]) == (4, 0.5)
    assert "num_pairs" not in alone.values
    assert (other.verdict, [alone.text, other.text]) == ("WARN", snapshot)


def test_what_goes_to_a_disk_has_a_folder_that_is_gone_afterwards(tmp_path: Path) -> None:
    words = (f"memory.nvme_path={tmp_path}", "memory.activation_offload_device=nvme", "memory.activation_offloading=1")
    recipe, made = make_recipe("parallel.sp_size=2", *words), list[Path]()

    def run(world: int, calls: Any, **_: Any) -> list[Any]:
        for _, args in calls:
            made.append(args[-1])
            made[-1].mkdir()
        return [make_timed({"mlp": 0.5}) for _ in calls]

    sweep = subject.BenchSweep((32,), (1, 2), "auto", 4, False, 60.0, is_paired=True)
    subject.bench(recipe, CONFIG, "test", load_hardware(), sweep, lambda _: None, run=run)
    assert {folder.parent for folder in made} == {tmp_path}
    assert len(set(made)) == 2, "two cells at once share nothing"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.check
def test_bench_measures_what_goes_to_a_disk(tmp_path: Path) -> None:
    words = (f"memory.nvme_path={tmp_path}", "memory.activation_offload_device=nvme", "memory.activation_offloading=1")
    sweep = subject.BenchSweep((64,), (2,), "auto", 1, False, 240.0)
    recipe = make_recipe("parallel.sp_size=2", *words)
    findings = subject.bench(recipe, CONFIG, "test", load_hardware(), sweep, lambda _: None)
    assert [row.verdict for row in findings.rows] == [""], findings.rows
    assert list(tmp_path.iterdir()) == []


def test_all_levers_are_the_strongest_set() -> None:
    shape, h100 = read_model_shape(CONFIG, "test"), load_hardware().get_gpu("h100-80gb")
    recipe = make_recipe("parallel.sp_size=2")
    _, levers = subject.settle_levers(recipe, shape, h100, "all")
    assert (levers.tiled_mlp, levers.tiled_loss, levers.offloaded_layers > 0) == (True, True, True)
    assert (levers.offload_optimizer, levers.offload_param) == ("cpu", "cpu")
    _, here = subject.settle_levers(recipe, shape, None, "all")
    assert (here.tiled_mlp, here.offload_optimizer, here.offload_param) == (True, "none", "none")
    assert not subject.settle_levers(recipe, shape, h100, "none")[1].gradient_checkpointing


def test_sequence_parallelism_off_and_on() -> None:
    def end(recipe: Any, is_ours: bool, num_sides: int) -> Any:
        assert num_sides == 2
        return make_timed({"exchange": 0.2, "mlp": 0.8}, 1.0 if recipe.parallel.sp_size == 2 else 0.8)

    findings = run_sweep(end, lengths=(32,), is_paired=True)
    row = findings.rows[-1]
    assert row.group == "time with sp off by time with sp on"
    assert row.values["speed_ratio"] == pytest.approx(0.8)
    assert row.values["exchange_share"] == pytest.approx(0.2)


def test_pairs_are_of_the_same_step() -> None:
    result = compare_pairs({4: 1.0, 5: 10.0, 6: 1.0}, {4: 2.0, 5: 20.0, 7: 1.0})
    assert (result.num_pairs, result.median, result.low, result.high) == (2, 2.0, 2.0, 2.0)
    assert compare_pairs({1: 1.0}, {2: 1.0}) is None


@pytest.mark.check
def test_two_worlds_step_in_turns_and_one_finishes_alone(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    result = run_interleaved(
        2, [(mark_steps, (marks, "a", 5, 99)), (mark_steps, (marks, "b", 5, 3))], device="cpu", time_limit=120
    )
    assert result[0] == "a"
    assert isinstance(result[1], RankFailureError)
    assert "tired" in result[1].message
    output = marks.read_text()
    assert output.startswith("a<a>b<b>a<a>b<b>a<a>b<b>a<a>")
    assert output.count("a<a>") == 5


def mark_steps(device: Any, interleaving: Interleaving, marks: Path, name: str, num_steps: int, fails_at: int) -> str:
    """Patches a step so that rank 0 of each world notes in one file what happens inside steps and between them."""
    is_first = torch.distributed.get_rank() == 0
    for step in range(num_steps):
        interleaving.wait_for_turn()
        if step == fails_at:
            raise ValueError(f"{name} is tired")
        for text in (f"{name}<", f"{name}>"):
            if is_first:
                with open(marks, "a") as stream:
                    stream.write(text)
            time.sleep(0.01)
            torch.distributed.barrier()
        interleaving.pass_turn()
    return name


def test_calibration_moves_the_prediction_to_the_measurement() -> None:
    gpu = load_hardware().get_gpu("h100-80gb")
    recipe = make_recipe("data.max_length=32Ki", "parallel.sp_size=2", "model.dtype=bfloat16", config=BIG)
    job = make_job(recipe, read_model_shape(BIG, "test"), Levers(), gpus_per_node=8)
    measured = {name: 1.6 * seconds for name, seconds in compute_speed(job, gpu).parts.items()}
    shipped = yaml.safe_load(hardware_table.SHIPPED.read_text())
    table = read_hardware(("shipped", shipped), ("measured", calibrate([(job, make_timed(measured))], gpu)))
    again = compute_speed(job, table.get_gpu("h100-80gb")).parts
    for name in ("projections", "mlp", "head_loss", "attention", "other", "exchange"):
        assert again[name] == pytest.approx(measured[name], rel=0.02), name
    # a kind of GPU that was not measured keeps its prediction
    assert table.get_gpu("h200") == load_hardware().get_gpu("h200")
    assert calibrate([], gpu) == {}


def test_a_calibration_applies_to_its_gpus_and_the_users_own_file_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], snapshot: SnapshotAssertion
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    driver = tmp_path / "driver"

    def move_to(*uuids: str) -> None:
        shutil.rmtree(driver, ignore_errors=True)
        for number, uuid in enumerate(uuids):
            (driver / f"0000:0{number}:00.0").mkdir(parents=True)
            text = f"Model: \t\t NVIDIA H100\nGPU UUID: \t {uuid}\nVideo BIOS: \t 96\n"
            (driver / f"0000:0{number}:00.0" / "information").write_text(text)

    monkeypatch.setattr(hardware_table, "DRIVER", driver)
    monkeypatch.setenv("PATH", "")  # without nvidia-smi
    shipped = load_hardware().get_gpu("h100-80gb").efficiency

    def read_shares() -> tuple[float, float]:
        efficiency = load_hardware().get_gpu("h100-80gb").efficiency
        return efficiency.matmul, efficiency.link

    def save(matmul: float) -> None:
        rates = {"gpus": {"h100-80gb": {"efficiency": {"matmul": matmul, "link": 0.3}}}}
        save_calibration({"calibration": rates, "subject": "my.yaml"})

    save(0.1)
    assert capsys.readouterr().err == snapshot(name="no driver")
    move_to("GPU-b", "GPU-a")
    save(0.5)
    move_to("GPU-c")
    assert read_shares() == (shipped.matmul, shipped.link)
    assert hardware_table.describe_calibration() == []
    save(0.6)
    assert read_shares() == (0.6, 0.3)
    move_to("GPU-a", "GPU-b")
    assert read_shares() == (0.5, 0.3)
    assert re.sub(r"\d{4}-\S+", "DATE", hardware_table.describe_calibration()[0]) == snapshot(name="measured")
    (tmp_path / "config" / "ulysses" / "hardware.yaml").write_text("gpus: {h100-80gb: {efficiency: {link: 0.4}}}\n")
    assert read_shares()[1] == 0.4
    hardware_table.get_calibration_file().write_text("efficiency: {matmul: 0.5}\n")
    assert explain(load_hardware) == snapshot(name="no list")


def test_a_local_model_without_weights_is_refused_before_ranks_start(
    tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 260, "max_position_embeddings": 4096}))
    words = ["bench", str(TINY_RECIPE), "model.config=null", f"model.name_or_path={tmp_path}"]
    done = CliRunner().invoke(app, words)
    assert (done.exit_code, done.stderr) == (2, snapshot)


PAIRS = ("preference.loss=sigmoid", "data.datasets.0.type=preference")


@pytest.mark.parametrize(
    ("words", "lengths", "shared", "num_targets"),
    [
        ((), (130,), (0,), 129),
        (PAIRS, (128, 2), (0, 126), 2 + 1),
        ((*PAIRS, "preference.share_prompts=false"), (65, 65), (0, 0), 2 + 2),
    ],
)
def test_a_timed_row_is_full_and_its_tokens_follow_each_other(
    words: tuple[str, ...], lengths: tuple[int, ...], shared: tuple[int, ...], num_targets: int
) -> None:
    rows = FullRows(make_recipe(*words, "data.max_length=130"), read_model_shape(CONFIG, "test"))
    assert (rows.get_lengths(0), rows.get_shared(0), rows.count_targets(0)) == (lengths, shared, num_targets)
    whole, parts = rows.read(0, 0, 136), [rows.read(0, start, start + 8) for start in range(0, 136, 8)]
    assert np.array_equal(np.concatenate([part.labels for part in parts]), whole.labels)
    assert (whole.labels >= 0).sum() == num_targets
    assert (whole.labels[130:] == -100).all()
    positions = [at for begin, length in zip(shared, lengths, strict=True) for at in range(begin, begin + length)]
    assert whole.positions.tolist() == [*positions, *range(6)]
    for at in np.flatnonzero(whole.labels >= 0):
        assert whole.labels[at] == whole.input_ids[at + 1]
        assert whole.positions[at + 1] == whole.positions[at] + 1


@pytest.mark.check
@pytest.mark.parametrize("is_beside", [False, pytest.param(True, marks=pytest.mark.full)])
def test_steps_on_pairs_are_timed(is_beside: bool) -> None:
    sweep = subject.BenchSweep((128,), (2,), "auto", 1, is_beside, 240.0)
    findings = subject.bench(make_recipe(*PAIRS), CONFIG, "test", load_hardware(), sweep, lambda _: None)
    assert {row.verdict for row in findings.rows} == {""}, findings.rows
    assert findings.rows[0].values["tokens_per_second"] > 0
    assert any(f"one {'document' if is_beside else 'pair'}" in note for note in findings.notes)
    assert any("Trainer" in note for note in findings.notes) == is_beside


@pytest.mark.full
def test_the_command_measures_beside_the_trainer(tmp_path: Path) -> None:
    words, page = ("--max-length", "256,512", "--against", "trainer", "--format", "json"), tmp_path / "bench.html"
    answer = json.loads(succeed("bench", str(TINY_RECIPE), *words, "--html", str(page)).stdout)
    rows = {(row["group"], row["name"]): row["values"] for row in answer["rows"]}
    own, reference = (rows[group, "512"] for group in ("sp 2 x dp 1", "sp 2 x dp 1, the Trainer"))
    assert own["exchange_share"] > 0
    assert reference["first_loss"] == pytest.approx(own["first_loss"], rel=1e-5)
    ratio = rows["the Trainer's time by ours", "sp 2 x dp 1, 512"]
    assert ratio["speed_ratio"] > 0
    assert ratio["num_pairs"] == 5
    assert "<svg " in page.read_text()
