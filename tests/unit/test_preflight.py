"""Tests that what a machine lacks is reported before data is prepared or a rank starts."""

import json
from pathlib import Path

import pytest
from support.checkpoints import make_checkpoint
from support.paths import TINY_RECIPE
from typer.testing import CliRunner

from ulysses_cli.cli import app
from ulysses_cli.plan.models.model_files import LENGTH_BYTES, find_weight_problem, list_weight_names, read_header
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


def test_trackers_that_are_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "find_spec", lambda name: None if name == "wandb" else object())
    (result,) = look(tmp_path, "run.report_to=[tensorboard, wandb]")
    assert result.startswith(
        "command line: run.report_to: wandb is not installed\n\nhint: pip install ulysses-cli[wandb]"
    )


def test_fewer_gpus_than_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu = "run.device=cuda"
    monkeypatch.setattr(preflight, "count_rank_slots", lambda _: 2)
    monkeypatch.setattr(preflight, "OTHER_GPUS", ())
    (result,) = look(tmp_path, on_gpu, processes_here=4)
    assert "run.device: 4 processes on this machine, but 2 GPUs\n\nhint: use fewer processes" in result
    assert look(tmp_path, on_gpu, processes_here=4, dry=True) == look(tmp_path, processes_here=4) == []
    monkeypatch.setattr(preflight, "count_rank_slots", lambda _: 0)
    assert "1 process on this machine, but no GPU" in look(tmp_path, on_gpu)[0]
    monkeypatch.setattr(preflight, "OTHER_GPUS", ("/dev/null",))
    assert look(tmp_path, on_gpu) == []


def write_weights(file: Path, kind: str = "F32", extra: bytes = b"") -> None:
    header = json.dumps({"a": {"dtype": kind, "shape": [2], "data_offsets": [0, 8]}}).encode()
    file.write_bytes(len(header).to_bytes(LENGTH_BYTES, "little") + header + bytes(8) + extra)


def test_weight_files_are_read_by_their_headers_without_torch(tmp_path: Path) -> None:
    model, run_dir = tmp_path / "model", tmp_path / "run"
    model.mkdir()
    file = model / "model.safetensors"
    name = f"model.name_or_path={model}"
    assert "holds no weights" in look(run_dir, name)[0]
    write_weights(file)
    assert look(run_dir, name) == []
    assert list_weight_names(model) == ["a"]
    for damage, words in ((b"x", "its header describes"), (b"", "")):
        write_weights(file, extra=damage)
        assert words in find_weight_problem(model)
    file.write_bytes(file.read_bytes()[:-1])
    assert "is damaged: it has" in find_weight_problem(model)
    file.write_bytes(b"\xff" * 40)
    assert "do not hold the header that they announce" in look(run_dir, name)[0]
    file.write_bytes((2).to_bytes(8, "little") + b"[]")
    with pytest.raises(ValueError, match="not a table of tensors"):
        read_header(file)
    write_weights(file, "I8")
    assert look(run_dir, name)[0].startswith(f"command line: model.name_or_path: {file} holds a as I8: quantized")


def test_a_recipe_that_cannot_resume_from_the_newest_checkpoint(tmp_path: Path) -> None:
    written = load(tmp_path, "data.max_length=4Ki").recipe.model_dump(mode="json")
    folder = make_checkpoint(tmp_path, 3, recipe=written)
    for choice in ("auto", str(folder)):
        (result,) = look(tmp_path, f"run.resume_from_checkpoint={choice}")
        assert (
            "the recipe has changed since the checkpoint was written:\n  data.max_length: was 4096, is 8192" in result
        )
        assert "hint: put it back, start over" in result
        assert look(tmp_path, f"run.resume_from_checkpoint={choice}", anyway=True) == []
    assert look(tmp_path, "run.resume_from_checkpoint=auto", "data.max_length=4Ki") == []
    words = ("run.resume_from_checkpoint=auto", "data.max_length=4Ki", "parallel.sp_size=1", "parallel.dp_shard_size=3")
    for anyway in (False, True):
        (result,) = look(tmp_path, *words, anyway=anyway)
        assert "4 rows per step cannot be shared by 3 x 1 row at a time" in result
        assert "hint: with sp_size 1, process counts that can: 1, 2, 4" in result
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


def test_the_command_stops_before_data_is_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "find_spec", lambda _: None)
    words = ["train", str(TINY_RECIPE), f"run.output_dir={tmp_path / 'run'}", f"data.store_dir={tmp_path / 'store'}"]
    result = CliRunner().invoke(app, [*words, "run.report_to=[wandb]"])
    assert result.exit_code == 2
    assert "run.report_to: wandb is not installed" in result.stderr
    assert not (tmp_path / "store").exists()


def test_a_damaged_checkpoint_that_is_named_ends_the_command_before_data_is_prepared(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "old", 3, recipe=load(tmp_path).recipe.model_dump(mode="json"))
    (folder / "rank-00001.safetensors").write_bytes(b"cut")
    words = ["train", str(TINY_RECIPE), f"run.output_dir={tmp_path / 'run'}", f"data.store_dir={tmp_path / 'store'}"]
    result = CliRunner().invoke(app, [*words, "--resume", str(folder), "--resume-anyway"])
    assert result.exit_code == 1
    assert f"{folder} cannot be resumed from: rank-00001.safetensors has 3 bytes instead of" in result.stderr
    assert "hint: --resume auto takes the newest valid one" in result.stderr
    assert not (tmp_path / "store").exists()


def test_a_stage_starts_only_from_weights_of_its_own_model(tmp_path: Path) -> None:
    """Another length, base of positions, schedule and data are what a stage is for."""
    run, recipe = tmp_path / "earlier", load(tmp_path / "run").recipe.model_dump(mode="json")
    other = {**recipe, "model": {**recipe["model"], "rope_theta": 1e5}, "data": {**recipe["data"], "max_length": 64}}
    make_checkpoint(run, 2, recipe={**other, "model": {**other["model"], "name_or_path": "owner/other"}})
    make_checkpoint(run, 3, recipe=other)
    words = (f"run.start_from={run}",)
    assert look(tmp_path / "run", *words) == []
    (problem,) = look(tmp_path / "run", f"run.start_from={run}/checkpoints/step-2")
    assert problem.startswith(
        f"command line: run.start_from: the weights of {run}/checkpoints/step-2 are not those of this recipe's model:\n"
        "  model.name_or_path: was owner/other, is "
    )
    (problem,) = look(tmp_path / "run", *words, "lora.r=8")
    assert "  lora: was null, is {" in problem
    for other, words in (("nowhere", "is not a folder"), ("empty", "holds no checkpoint"), ("model", "holds no")):
        folder = tmp_path / other
        if other != "nowhere":
            folder.mkdir()
        if other == "model":
            (folder / "config.json").touch()
        (problem,) = look(tmp_path / "run", f"run.start_from={folder}")
        assert problem.startswith(f"command line: run.start_from: {folder} {words}")
        assert problem.endswith("name it as model.name_or_path, which starts from its weights") is (other == "model")
    words = (f"run.start_from={run}",)
    for step in (2, 3):
        (run / "checkpoints" / f"step-{step}" / "state.json").write_text("{")
    (problem,) = look(tmp_path / "run", *words)
    assert f"run.start_from: {run} has no valid checkpoint: state.json has 1 bytes instead of" in problem


def test_an_export_without_a_checkpoint_is_refused_before_torch_is_loaded(tmp_path: Path) -> None:
    run_dir, file, model = tmp_path / "run", tmp_path / "file", tmp_path / "run" / "model"
    newest = make_checkpoint(run_dir, 4)
    make_checkpoint(run_dir, 2)
    file.write_text("x")
    model.mkdir()
    (model / "config.json").write_text("{}")
    (tmp_path / "fresh" / "checkpoints").mkdir(parents=True)
    hints = {
        run_dir / "checkpoints" / "step-3": f"does not exist\n\nhint: {run_dir / 'checkpoints'} holds step-4, step-2",
        tmp_path / "nowhere": "does not exist\n\nhint: name a run's output_dir, or one of its checkpoints/step-N",
        file: "is not a folder",
        model: "is already a model that transformers can load",
        tmp_path: "is neither a checkpoint nor a run",
        tmp_path / "fresh": "holds no checkpoint",
    }
    for path, words in hints.items():
        result = CliRunner().invoke(app, ["export", str(path), "--to", str(tmp_path / "to")])
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.startswith(f"CHECKPOINT: {path} {words}")
    for path in (run_dir, run_dir / "checkpoints", newest):
        assert list(preflight.check_export(path, tmp_path / "to")) == []
    (answer,) = preflight.check_export(newest, model)
    assert str(answer) == f"--to: {model} already exists\n\nhint: name a folder that does not exist\n"


def test_a_run_is_exported_from_its_newest_valid_checkpoint(tmp_path: Path) -> None:
    steps = [make_checkpoint(tmp_path, step) for step in (2, 4, 6)]
    (steps[2] / "state.json").write_text("{")
    messages: list[str] = []
    assert checkpoints.choose_checkpoint(tmp_path, messages.append) == steps[1]
    assert f"{steps[2]} is skipped" in messages[0]
    assert messages[1] == f"the newest valid checkpoint is {steps[1]}"
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


def test_a_new_run_refuses_an_address_that_holds_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    address = f"file://{tmp_path}/bucket"
    Sending(Bucket(address)).send_checkpoint(make_checkpoint(tmp_path / "earlier", 4), [name_share(0)], 0, 1)
    words = ["train", str(TINY_RECIPE), "run.output_dir=run", f"run.checkpoint_uri={address}"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert f"{address} holds checkpoints of an earlier run, the newest of step 4" in result.stderr
    assert not (tmp_path / "run" / "logs").exists()
