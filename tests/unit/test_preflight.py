"""Tests that what a machine lacks is reported before data is prepared or a rank starts."""

import json
import re
from pathlib import Path

import pytest
from support.checkpoints import make_checkpoint
from support.paths import TINY_RECIPE
from support.refusals import explain
from syrupy.assertion import SnapshotAssertion
from typer.testing import CliRunner

from ulysses_cli.cli import app
from ulysses_cli.commands.children import evaluating
from ulysses_cli.plan.models.model_files import LENGTH_BYTES, list_weight_names
from ulysses_cli.plan.recipe.loader import Loaded, parse_recipe
from ulysses_cli.run import checkpoints, preflight
from ulysses_cli.run.bucket import Bucket
from ulysses_cli.run.checkpoints import name_share
from ulysses_cli.run.remote_checkpoints import Sending

TEXT = """\
model:
  name_or_path: owner/model
data:
  datasets:
    - path: owner/texts
  max_length: 8Ki
train:
  max_steps: 10
run:
  output_dir: {run_dir}
  device: cpu
"""


def load(run_dir: Path, *overrides: str) -> Loaded:
    return parse_recipe(TEXT.format(run_dir=run_dir), "r.yaml", overrides)


def look(run_dir: Path, *overrides: str, processes_here: int = 1, anyway: bool = False, dry: bool = False) -> list[str]:
    match = preflight.find_obstacles(
        load(run_dir, *overrides), processes_here=processes_here, resumes_anyway=anyway, is_dry_run=dry
    )
    return [str(problem).strip() for problem in match]


def test_a_machine_that_has_everything(tmp_path: Path) -> None:
    assert look(tmp_path, processes_here=2) == []
    assert look(tmp_path, "run.resume_from_checkpoint=auto") == []


def test_fewer_gpus_than_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    on_gpu = "run.device=cuda"
    monkeypatch.setattr(preflight, "count_rank_slots", lambda _: 2)
    monkeypatch.setattr(preflight, "OTHER_GPUS", ())
    assert look(tmp_path, on_gpu, processes_here=4) == snapshot
    assert look(tmp_path, on_gpu, processes_here=4, dry=True) == look(tmp_path, processes_here=4) == []
    monkeypatch.setattr(preflight, "count_rank_slots", lambda _: 0)
    assert look(tmp_path, on_gpu) == snapshot
    monkeypatch.setattr(preflight, "OTHER_GPUS", ("/dev/null",))
    assert look(tmp_path, on_gpu) == []


def write_weights(file: Path, kind: str = "F32") -> None:
    header = json.dumps({"a": {"dtype": kind, "shape": [2], "data_offsets": [0, 8]}}).encode()
    file.write_bytes(len(header).to_bytes(LENGTH_BYTES, "little") + header + bytes(8))


def test_weight_files_are_read_by_their_headers_without_torch(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    model, run_dir = tmp_path / "model", tmp_path / "run"
    model.mkdir()
    file = model / "model.safetensors"
    name = f"model.name_or_path={model}"
    problems = {"no file": look(run_dir, name)}
    write_weights(file)
    assert look(run_dir, name) == []
    assert list_weight_names(model) == ["a"]
    whole = file.read_bytes()
    damaged = {
        "long": whole + b"x",
        "short": whole[:-1],
        "no header": b"\xff" * 40,
        "a list": b"\2".ljust(8, b"\0") + b"[]",
    }
    for what, content in damaged.items():
        file.write_bytes(content)
        problems[what] = look(run_dir, name)
    write_weights(file, "I8")
    problems["quantized"] = look(run_dir, name)
    assert problems == snapshot


def test_a_recipe_that_cannot_resume_from_the_newest_checkpoint(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    written = load(tmp_path, "data.max_length=4Ki").recipe.model_dump(mode="json")
    folder = make_checkpoint(tmp_path, 3, recipe=written)
    for choice in ("auto", str(folder)):
        assert look(tmp_path, f"run.resume_from_checkpoint={choice}") == snapshot(name="other length")
        assert look(tmp_path, f"run.resume_from_checkpoint={choice}", anyway=True) == []
    assert look(tmp_path, "run.resume_from_checkpoint=auto", "data.max_length=4Ki") == []
    words = ("run.resume_from_checkpoint=auto", "data.max_length=4Ki", "parallel.sp_size=1", "parallel.dp_shard_size=3")
    for anyway in (False, True):
        assert look(tmp_path, *words, anyway=anyway) == snapshot(name="3 processes")
    (folder / "state.json").write_text("{")
    assert look(tmp_path, "run.resume_from_checkpoint=auto") == []


@pytest.mark.parametrize("file", ["manifest.json", "state.json", "rank-00001.safetensors"])
def test_the_newest_valid_checkpoint_decides_whether_a_recipe_resumes(tmp_path: Path, file: str) -> None:
    written = load(tmp_path, "data.max_length=4Ki").recipe.model_dump(mode="json")
    make_checkpoint(tmp_path, 3, recipe=written)
    newest = make_checkpoint(tmp_path, 6, recipe=load(tmp_path, "data.max_length=2Ki").recipe.model_dump(mode="json"))
    (newest / file).write_bytes((newest / file).read_bytes()[:-1] + b"x")  # of the same size
    auto = "run.resume_from_checkpoint=auto"
    assert look(tmp_path, auto, "data.max_length=4Ki") == []
    assert "data.max_length: was 4096, is 8192" in look(tmp_path, auto)[0]


def test_the_command_stops_before_data_is_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    monkeypatch.setattr(preflight, "find_spec", lambda _: None)
    words = ["train", str(TINY_RECIPE), f"run.output_dir={tmp_path / 'run'}", f"data.store_dir={tmp_path / 'store'}"]
    result = CliRunner().invoke(app, [*words, "run.report_to=[wandb]"])
    assert (result.exit_code, result.stderr) == (2, snapshot)
    assert not (tmp_path / "store").exists()


def test_a_damaged_checkpoint_that_is_named_ends_the_command_before_data_is_prepared(
    tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    folder = make_checkpoint(tmp_path / "old", 3, recipe=load(tmp_path).recipe.model_dump(mode="json"))
    (folder / "rank-00001.safetensors").write_bytes(b"cut")
    words = ["train", str(TINY_RECIPE), f"run.output_dir={tmp_path / 'run'}", f"data.store_dir={tmp_path / 'store'}"]
    result = CliRunner().invoke(app, [*words, "--resume", str(folder), "--resume-anyway"])
    assert (result.exit_code, result.stderr) == (1, snapshot)
    assert not (tmp_path / "store").exists()


def test_a_stage_starts_only_from_weights_of_its_own_model(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """Another length, base of positions, schedule and data are what a stage is for."""
    run, recipe = tmp_path / "earlier", load(tmp_path / "run").recipe.model_dump(mode="json")
    other = {**recipe, "model": {**recipe["model"], "rope_theta": 1e5}, "data": {**recipe["data"], "max_length": 64}}
    make_checkpoint(run, 2, recipe={**other, "model": {**other["model"], "name_or_path": "owner/other"}})
    make_checkpoint(run, 3, recipe=other)
    words = (f"run.start_from={run}",)
    assert look(tmp_path / "run", *words) == []
    assert look(tmp_path / "run", f"run.start_from={run}/checkpoints/step-2") == snapshot
    assert look(tmp_path / "run", *words, "lora.r=8") == snapshot
    (tmp_path / "empty").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    for other in ("nowhere", "empty", "model"):
        assert look(tmp_path / "run", f"run.start_from={tmp_path / other}") == snapshot(name=other)
    for step in (2, 3):
        (run / "checkpoints" / f"step-{step}" / "state.json").write_text("{")
    (problem,) = look(tmp_path / "run", *words)
    assert re.sub(r"of [\d,]+", "of N", problem) == snapshot  # a recipe is as long as its paths


def test_an_export_without_a_checkpoint_is_refused_before_torch_is_loaded(
    tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    run_dir, file, model = tmp_path / "run", tmp_path / "file", tmp_path / "run" / "model"
    newest = make_checkpoint(run_dir, 4)
    make_checkpoint(run_dir, 2)
    file.write_text("x")
    model.mkdir()
    (model / "config.json").write_text("{}")
    (tmp_path / "fresh" / "checkpoints").mkdir(parents=True)
    for path in (run_dir / "checkpoints" / "step-3", tmp_path / "nowhere", file, model, tmp_path, tmp_path / "fresh"):
        result = CliRunner().invoke(app, ["export", str(path), "--to", str(tmp_path / "to")])
        assert (result.exit_code, result.stdout, result.stderr) == (2, "", snapshot(name=path.name))
    for path in (run_dir, run_dir / "checkpoints", newest):
        assert list(preflight.check_export(path, tmp_path / "to")) == []
    assert [str(problem) for problem in preflight.check_export(newest, model)] == snapshot


def test_a_run_is_evaluated_from_its_newest_whole_checkpoint(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    steps = [make_checkpoint(tmp_path, step) for step in (2, 4)]
    assert evaluating._find_checkpoint(tmp_path) == steps[1]
    (steps[1] / "state.json").write_text("{")
    assert evaluating._find_checkpoint(tmp_path) == steps[0]
    (steps[0] / "state.json").unlink()
    assert explain(evaluating._find_checkpoint, tmp_path) == snapshot


def test_a_run_is_exported_from_its_newest_valid_checkpoint(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    steps = [make_checkpoint(tmp_path, step) for step in (2, 4, 6)]
    (steps[2] / "state.json").write_text("{")
    messages: list[str] = []
    assert checkpoints.choose_checkpoint(tmp_path, messages.append) == steps[1]
    assert messages == snapshot
    assert checkpoints.choose_checkpoint(steps[0], messages.append) == steps[0]
    with pytest.raises(checkpoints.CheckpointError, match="is no whole checkpoint"):
        checkpoints.choose_checkpoint(steps[2], messages.append)


def test_an_unwritable_builds_folder_is_refused_where_operators_are_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "find_write_problem", lambda _: "FOLDER cannot be written")
    monkeypatch.setattr(preflight, "count_rank_slots", lambda _: 8)
    for overrides in ((), ("run.device=cuda", "memory.offload_optimizer=cpu")):
        (result,) = look(tmp_path, *overrides)
        assert result == f"FOLDER cannot be written\n\nhint: {preflight.HINT}"
    assert look(tmp_path, "run.device=cuda") == []


def test_a_new_run_refuses_an_address_that_holds_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    monkeypatch.chdir(tmp_path)
    address = f"file://{tmp_path}/bucket"
    Sending(Bucket(address)).send_checkpoint(make_checkpoint(tmp_path / "earlier", 4), [name_share(0)], 0, 1)
    words = ["train", str(TINY_RECIPE), "run.output_dir=run", f"run.checkpoint_uri={address}"]
    result = CliRunner().invoke(app, words)
    assert (result.exit_code, result.stderr) == (2, snapshot)
    assert not (tmp_path / "run" / "logs").exists()
