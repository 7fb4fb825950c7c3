"""Tests where a run resumes: damaged checkpoints, folders that a dead process left, recipes that have changed."""

import json
import math
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import make_checkpoint, make_state, write_contents
from support.paths import ROOT
from support.recipes import load
from support.refusals import explain
from syrupy.assertion import SnapshotAssertion
from typer.testing import CliRunner

from ulysses_cli.cli import app
from ulysses_cli.plan.recipe import changes
from ulysses_cli.plan.recipe.changes import list_changes
from ulysses_cli.plan.recipe.schema import walk_settings
from ulysses_cli.run import checkpoints, resume
from ulysses_cli.run.checkpoints import CheckpointError, find_damage, list_checkpoints
from ulysses_cli.run.resume import (
    ResumeError,
    ResumePoint,
    check_changes,
    describe_longer_run,
    find_resume_point,
    fit_accumulation,
)


def dump(*overrides: str) -> dict[str, Any]:
    return load(*overrides).recipe.model_dump(mode="json")


def flip(path: Path) -> None:
    content = bytearray((path / "rank-00001.safetensors").read_bytes())
    content[100] ^= 1
    (path / "rank-00001.safetensors").write_bytes(content)


def truncate(path: Path) -> None:
    content = (path / "rank-00000.safetensors").read_bytes()
    (path / "rank-00000.safetensors").write_bytes(content[:-1])


def edit_manifest(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        content = json.loads((path / "manifest.json").read_text())
        change(content["files"])
        (path / "manifest.json").write_text(json.dumps(content))

    return edit


def spoil_manifest(old: str, new: str) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        content = (path / "manifest.json").read_text()
        assert old in content
        (path / "manifest.json").write_text(content.replace(old, new, 1))

    return spoil


def spoil_state(**changes: Any) -> Callable[[Path], None]:
    """Gives the spoilt state its right hash, so that only its content is wrong."""

    def spoil(path: Path) -> None:
        contents = {file.name: file.read_bytes() for file in path.iterdir() if file.name != "manifest.json"}
        write_contents(path, contents | {"state.json": json.dumps(make_state(6) | changes).encode()})

    return spoil


def make_fifo(path: Path) -> None:
    (path / "manifest.json").unlink()
    os.mkfifo(path / "manifest.json")


def link(path: Path, name: str = "rank-00000.safetensors") -> None:
    outside = path.parent / "outside"
    shutil.move(path / name, outside)
    (path / name).symlink_to(outside)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped byte": flip,
    "truncated": truncate,
    "missing shard": lambda path: (path / "rank-00001.safetensors").unlink(),
    "missing manifest": lambda path: (path / "manifest.json").unlink(),
    "torn manifest": lambda path: (path / "manifest.json").write_text('{"files": {"a'),
    "another format": spoil_manifest('"format": 1', '"format": 2'),
    "no mapping": lambda path: (path / "manifest.json").write_text("[]"),
    "unnamed shard": edit_manifest(lambda files: files.pop("rank-00001.safetensors")),
    "unnamed first shard": edit_manifest(lambda files: files.pop("rank-00000.safetensors")),
    "escape": edit_manifest(lambda files: files.update({"../../run.json": {"bytes": 1, "sha256": ""}})),
    "absolute": edit_manifest(lambda files: files.update({"/etc/passwd": {"bytes": 1, "sha256": ""}})),
    "link": link,
    "a linked manifest": lambda path: link(path, "manifest.json"),
    "a manifest that is a FIFO": make_fifo,
    "infinite size": spoil_manifest('"bytes": 700', '"bytes": 2e80992'),
    "negative size": spoil_manifest('"bytes": 700', '"bytes": -700'),
    "deep nesting": lambda path: (path / "manifest.json").write_text("[" * 200_000),
    "NUL in a name": edit_manifest(lambda files: files.update({"a\0b": {"bytes": 1, "sha256": "0" * 64}})),
    "infinite world size": spoil_state(world_size=math.inf),
    "negative world size": spoil_state(world_size=-1),
    "another world size": spoil_state(world_size=3),
    "no recipe": spoil_state(recipe={}),
    "a step that is no number": spoil_state(step="6"),
    "endless hours": spoil_state(hours=math.inf),
}


def test_a_damaged_checkpoint_is_named_and_skipped(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    found = {}
    for name, damage in DAMAGES.items():
        good, bad = make_checkpoint(tmp_path / name, 3), make_checkpoint(tmp_path / name, 6)
        assert find_damage(bad) == ""
        damage(bad)
        messages: list[str] = []
        resume_point = find_resume_point(tmp_path / name, "auto", 0, messages.append)
        assert (resume_point.path, resume_point.step, resume_point.position) == (good, 3, 12)
        found[name] = find_damage(bad)
        (message,) = messages
        assert message.endswith(found[name])
    assert found == snapshot(name="damages")
    truncate(good)
    errors = {"skipped": message}
    for choice in (str(bad), "auto"):
        words = (tmp_path / name, choice, 0, print)
        errors[choice.replace(str(bad), "named")] = explain(find_resume_point, *words, error=CheckpointError)
    assert errors == snapshot(name="errors")


def test_docs_and_help_list_what_may_change() -> None:
    """Compares with the check's own list, key by key."""
    page = (ROOT / "docs" / "checkpoints.md").read_text()
    page = " ".join(page.split("**`--resume auto`** takes")[1].split("- **")[0].split())
    messages = CliRunner().invoke(app, ["train", "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output
    for key in changes.FREE | set(changes.LENGTHS):
        assert f"`{key}`" in page
        assert key in messages
    assert set(re.findall(r"`((?:model|data|train|lora)\.\w+)`", page)) == changes.FREE | set(changes.LENGTHS)


def test_machines_share_all_settings_but_places_on_their_disks() -> None:
    recipe = {"run": {"output_dir": "a", "save_steps": 5}, "data": {"datasets": [{"path": "x"}]}, "deepspeed": {}}
    shared = changes.list_shared_settings(recipe)
    assert shared == {"run.save_steps": 5, "data.datasets": [{"path": "x"}], "deepspeed": {}}
    assert {setting.key for setting in walk_settings()} >= changes.PLACES


def refuse(state: dict[str, Any], new: dict[str, Any], data: str = "d") -> str:
    options = {"anyway": False, "report": pytest.fail}
    return explain(check_changes, {"data": "d", **state}, new, data, error=ResumeError, **options)


def test_a_longer_run_says_what_changes(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    old, new = (dump(f"train.max_steps={steps}", "train.learning_rate=1.0") for steps in (6, 20))
    state = {"recipe": old, "data": "d", "step": 6, "num_steps": 6}
    check_changes(state, new, "d", anyway=False, report=pytest.fail)
    old["train"]["learning_rate"] = 2.0  # with --resume-anyway: that step had the checkpoint's own
    begin = ResumePoint(tmp_path, state)

    def rise(recipe: Any, num_steps: int) -> Callable[[int], float]:
        return lambda step: recipe["train"]["learning_rate"] * step / num_steps

    assert describe_longer_run(begin, new, 20, rise) == snapshot(name="longer")
    assert describe_longer_run(begin, old, 6, pytest.fail) == ""
    assert refuse(state, dump("train.max_steps=5")) == snapshot(name="done")


def test_a_checkpoint_of_this_run_knows_its_last_evaluation_and_model(tmp_path: Path) -> None:
    """Rank 0 reads them and sends them to all ranks, since they decide collectives."""
    make_checkpoint(tmp_path, 6)
    (tmp_path / "eval.jsonl").write_text('{"step": 3}\n{"step": 6}\n{"step": 9}\n{"step":')
    (tmp_path / "samples.jsonl").write_text('{"step": 3}\n{"step": 9}\n')
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "ulysses.json").write_text('{"step": 6}')
    begin = find_resume_point(tmp_path, "auto", 0, print)
    assert (begin.is_own, begin.last_eval_step, begin.last_sample_step, begin.model_steps) == (True, 6, 3, (6, 6))
    elsewhere = find_resume_point(tmp_path / "other", str(begin.path), 0, print)
    assert (elsewhere.is_own, elsewhere.last_eval_step, elsewhere.last_sample_step) == (False, -1, -1)
    assert elsewhere.model_steps is None
    (tmp_path / "model" / "ulysses.json").write_text("[[")
    assert find_resume_point(tmp_path, "auto", 0, print).model_steps is None


def test_a_restart_in_place_looks_for_its_own_newest(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    elsewhere = make_checkpoint(tmp_path / "old", 9)
    new = tmp_path / "new"
    messages: list[str] = []
    assert find_resume_point(new, "auto", 0, messages.append) == resume.FRESH
    assert messages == snapshot
    assert find_resume_point(new, None, 1, print) == resume.FRESH
    assert find_resume_point(new, str(elsewhere), 1, print).step == 9
    made = make_checkpoint(new, 12)
    assert find_resume_point(new, str(elsewhere), 1, print).path == made
    assert find_resume_point(new, None, 1, print).path == made
    assert find_resume_point(new, None, 0, print) == resume.FRESH


def test_a_replacement_can_die_at_any_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of the same name exists before, during and after."""
    for die_at in range(6):
        run_dir = tmp_path / str(die_at)
        final = make_checkpoint(run_dir, 3)
        beside = make_checkpoint(run_dir / "x", 3).rename(run_dir / "checkpoints" / "step-3.writing")
        left = [die_at]

        def count(call: Callable[..., None], left: list[int] = left) -> Callable[..., None]:
            def die_or_call(*args: Any) -> None:
                if left[0] == 0:
                    raise KeyboardInterrupt
                left[0] -= 1
                call(*args)

            return die_or_call

        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            patch.setattr(checkpoints.os, "replace", count(os.replace))
            patch.setattr(checkpoints, "remove_own", count(checkpoints.remove_own))
            checkpoints.put_in_place(beside, final)
        assert find_resume_point(run_dir, "auto", 0, print).path == final
        assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step-3"]


def test_pruning_keeps_the_newest_and_can_die(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (3, 6, 9, 12):
        make_checkpoint(tmp_path, step)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "remove_own", lambda _: None)
        checkpoints.prune_checkpoints(tmp_path, 2)
    checkpoints.tidy_folder(tmp_path)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-12", "step-9"]
    checkpoints.prune_checkpoints(tmp_path, None)
    checkpoints.prune_checkpoints(tmp_path, 1)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-12"]


def test_checkpoints_after_the_resumed_step_are_set_aside(tmp_path: Path) -> None:
    for step in (3, 6, 9):
        make_checkpoint(tmp_path, step)
    messages: list[str] = []
    checkpoints.set_aside(tmp_path, tmp_path / "checkpoints" / "step-3", messages.append)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-3"]
    assert len(messages) == 2
    assert (tmp_path / "checkpoints" / "step-9.set-aside" / "manifest.json").exists()
    checkpoints.set_aside(tmp_path, make_checkpoint(tmp_path / "other", 50), messages.append)
    assert list_checkpoints(tmp_path) == []


def test_changed_settings_that_decide_values_are_listed(snapshot: SnapshotAssertion) -> None:
    same = ["memory.tiled_mlp=true", "run.output_dir=x", "data.num_workers=2", "train.gradient_accumulation_steps=4"]
    same += ["parallel.zero_stage=2", "model.attn_implementation=sdpa", "run.save_steps=7"]
    assert list_changes(dump(), dump(*same)) == []
    new = dump("data.max_length=512", "train.learning_rate=0.5", "lora.r=4", "run.seed=9", "data.datasets.0.weight=2")
    assert list_changes(dump(), new) == snapshot
    old = dump()
    del old["train"]["z_loss_weight"]  # a version that did not have it
    assert list_changes(old, dump()) == []


def test_a_masked_setting_matches_any_value(snapshot: SnapshotAssertion) -> None:
    old, new = dump(), dump()
    old["data"]["datasets"][0]["path"] = "s3://***@bucket/x"
    new["data"]["datasets"][0]["path"] = "s3://me:another@bucket/x"
    assert list_changes(old, new) == []
    new["data"]["datasets"][0]["path"] = "s3://me:another@bucket/y"
    old["model"]["revision"], new["model"]["revision"] = "***", None
    assert list_changes(old, new) == snapshot


def test_a_changed_recipe_is_an_error_or_a_warning(snapshot: SnapshotAssertion) -> None:
    """Insisting is offered where it can work."""
    state, changed = {"recipe": dump(), "data": "abc"}, dump("data.max_length=512")
    check_changes(state, dump(), "abc", anyway=False, report=pytest.fail)
    refused = ((changed, "other"), (dump(), "other"), (dump("lora.r=8"), "abc"))
    messages = [refuse(state, *words) for words in refused]
    check_changes(state, changed, "other", anyway=True, report=messages.append)
    assert messages == snapshot


def fit(rows: int, saved: tuple[int, int], now: tuple[int, int], dp_size: int, *, anyway: bool = False) -> int:
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    state = {"rows_per_step": rows, "recipe": {"train": dict(zip(names, saved, strict=True))}}
    return fit_accumulation(state, *now, dp_size, 2, anyway=anyway)


def test_rows_per_step_are_kept(snapshot: SnapshotAssertion) -> None:
    assert fit(8, (1, 4), (1, 4), 2) == 4
    assert fit(8, (1, 4), (1, 4), 1) == 8
    assert fit(8, (1, 4), (1, 4), 8) == 1
    assert fit(8, (1, 4), (2, 1), 4) == 1
    refused = (((1, 4), (1, 4), 3), ((3, 1), (3, 1), 1), ((1, 4), (1, 2), 2))
    assert [explain(fit, 8, *words, error=ResumeError) for words in refused] == snapshot
    assert fit(8, (1, 4), (1, 2), 2, anyway=True) == 2


def test_steps_that_remain_after_a_resume() -> None:
    assert resume.FRESH.count_ahead(10, 40, 4) == (40, 10)
    assert resume.FRESH.count_ahead(None, 41, 4) == (41, 11)
    begun = resume.ResumePoint(Path("x"), {"step": 6, "position": 24})
    assert begun.count_ahead(10, 40, 4) == (40, 10)
    assert begun.count_ahead(None, 41, 4) == (41, 11)
    assert begun.count_ahead(10, 20, 2) == (32, 10)  # rows per step changed, anyway
    assert begun.count_ahead(None, 41, 2) == (41, 15)
    assert begun.count_ahead(5, 20, 4) == (24, 6)


def test_a_restart_says_why(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    reasons = [resume.describe_restart(tmp_path, 1, 3)]
    for rank, is_cause, name in ((0, False, "error"), (1, True, "error-1"), (2, True, "error-0")):
        messages = {"rank": rank, "message": f"words of {rank}", "is_cause": is_cause, "time": rank}
        (tmp_path / f"rank-{rank}.{name}.json").write_text(json.dumps(messages))
    assert [*reasons, resume.describe_restart(tmp_path, 2, 3)] == snapshot


def test_restarts_are_counted_by_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ULYSSES_LAUNCH", "1")
    assert [resume.count_restarts(tmp_path) for _ in range(3)] == [0, 1, 2]
    monkeypatch.setenv("ULYSSES_LAUNCH", "2")
    assert [resume.count_restarts(tmp_path) for _ in range(2)] == [0, 1]
    monkeypatch.delenv("ULYSSES_LAUNCH")
    assert [resume.count_restarts(tmp_path) for _ in range(2)] == [0, 0]
