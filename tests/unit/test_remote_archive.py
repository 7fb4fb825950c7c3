"""Tests checkpoints and models in a bucket: what is uploaded, what is fetched, what is deleted, what is refused. The
bucket is a folder with a file:// address; tests/ranks/test_uploads.py has a server."""

import json
import threading
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from unittest.mock import DEFAULT, patch

import pytest
from support.checkpoints import make_checkpoint
from support.recipes import load
from support.refusals import explain
from syrupy.assertion import SnapshotAssertion

from ulysses_cli.plan.files import find_address, name_local_copy
from ulysses_cli.plan.recipe.loader import load_recipe
from ulysses_cli.run import bucket as transfers
from ulysses_cli.run import downloads, remote_checkpoints
from ulysses_cli.run.bucket import Bucket, BucketError, format_transfer
from ulysses_cli.run.checkpoints import FORMAT, CheckpointError, find_damage, name_share
from ulysses_cli.run.preflight import check_bucket
from ulysses_cli.run.remote_checkpoints import Sending, bring_newest, list_remote_steps
from ulysses_cli.validate import validate_recipe

FORGED = json.dumps({"format": FORMAT, "files": {"../../evil": {"bytes": 1, "sha256": ""}}}).encode()
SHARES = [name_share(0), name_share(1)]


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return Bucket(f"file://{tmp_path}/bucket/my runs", pauses=(0.0,))


def upload(bucket: Bucket, run_dir: Path, *steps: int) -> None:
    for step in steps:
        Sending(bucket).send_checkpoint(make_checkpoint(run_dir, step), SHARES, 0, 1)


def bring(bucket: Bucket, run_dir: Path) -> list[str]:
    lines: list[str] = []
    bring_newest(bucket, run_dir, lines.append)
    return [line.replace(bucket.address, "BUCKET") for line in lines]


def list_local(run_dir: Path) -> list[str]:
    return sorted(path.name for path in run_dir.glob("checkpoints/*"))


def test_the_newest_checkpoint_comes_back_byte_for_byte(bucket: Bucket, tmp_path: Path) -> None:
    upload(bucket, tmp_path / "here", 2, 4)
    assert bring(bucket, tmp_path / "there") == ["downloading BUCKET/checkpoints/step-4"]
    assert list_local(tmp_path / "there") == ["step-4"]
    for file in (tmp_path / "here" / "checkpoints" / "step-4").iterdir():
        assert (tmp_path / "there" / "checkpoints" / "step-4" / file.name).read_bytes() == file.read_bytes()
    assert bring(bucket, tmp_path / "there") == []


def test_the_newest_valid_checkpoint_of_both_places_is_kept(bucket: Bucket, tmp_path: Path) -> None:
    upload(bucket, tmp_path / "here", 2)
    make_checkpoint(tmp_path / "there", 3)
    assert bring(bucket, tmp_path / "there") == []
    assert list_local(tmp_path / "there") == ["step-3"]
    upload(bucket, tmp_path / "here", 4)
    damaged = make_checkpoint(tmp_path / "there", 4)
    (damaged / SHARES[0]).write_bytes(b"short")
    assert bring(bucket, tmp_path / "there") == ["downloading BUCKET/checkpoints/step-4"]
    assert find_damage(damaged) == ""


def test_a_damaged_checkpoint_of_the_bucket_is_skipped_with_its_reason(
    bucket: Bucket, tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    upload(bucket, tmp_path / "here", 2, 4)
    flipped = bytearray(bucket.read(f"checkpoints/step-4/{SHARES[0]}"))
    flipped[7] ^= 1
    damages = {
        "missing": (SHARES[1], None),
        "unfinished": ("manifest.json", None),
        "short": (SHARES[1], b"x"),
        "flipped": (SHARES[0], bytes(flipped)),
        "state": ("state.json", b"{}"),
        "torn manifest": ("manifest.json", b"{"),
        "forged manifest": ("manifest.json", FORGED),
    }
    said = {}
    for damage, (name, content) in damages.items():
        Sending(bucket).send_checkpoint(tmp_path / "here" / "checkpoints" / "step-4", SHARES, 0, 1)
        damaged = f"checkpoints/step-4/{name}"
        bucket.delete(damaged) if content is None else bucket.put_bytes(content, damaged)
        said[damage] = bring(bucket, tmp_path / damage)
        assert list_local(tmp_path / damage) == ["step-2"]
    assert said == snapshot(name="skipped")
    bucket.delete("checkpoints/step-2/state.json")
    said = explain(bring, bucket, tmp_path / "nothing", error=CheckpointError)
    assert said == snapshot(name="none is valid")
    assert list_local(tmp_path / "nothing") == []


def test_the_manifest_waits_for_every_machine(bucket: Bucket, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "here", 2)
    first = threading.Thread(
        target=lambda: Sending(bucket, poll_seconds=0.01).send_checkpoint(folder, SHARES[:1], 0, 2)
    )
    first.start()
    first.join(0.2)
    assert first.is_alive()
    assert list_remote_steps(bucket) == []
    Sending(bucket).send_checkpoint(folder, SHARES[1:], 1, 2)
    first.join(20)
    assert list_remote_steps(bucket) == [2]
    names = {name.rpartition("/")[2] for name in bucket.list_names("checkpoints")}
    assert names == {*SHARES, "state.json", "manifest.json"}


def test_an_upload_that_fails_on_another_machine_fails_on_the_first(bucket: Bucket, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "here", 2)
    with pytest.raises(FileNotFoundError):
        Sending(bucket).send_checkpoint(folder, [name_share(9)], 1, 2)
    with pytest.raises(BucketError, match=name_share(9)):
        Sending(bucket).send_checkpoint(folder, SHARES[:1], 0, 2)
    assert list_remote_steps(bucket) == []


def test_old_checkpoints_go_and_the_newest_stays(bucket: Bucket, tmp_path: Path) -> None:
    upload(bucket, tmp_path / "here", 2, 4, 6, 8)
    bucket.delete("checkpoints/step-2/manifest.json")  # never finished
    remote_checkpoints.prune_remote(bucket, 8, 2)
    assert list_remote_steps(bucket) == [8, 6]
    assert remote_checkpoints.list_objects(bucket).keys() == {8, 6}
    remote_checkpoints.prune_remote(bucket, 8, None)
    assert list_remote_steps(bucket) == [8, 6]


def test_checkpoints_of_another_attempt_are_kept_and_not_used(bucket: Bucket, tmp_path: Path) -> None:
    upload(bucket, tmp_path / "here", 2, 4, 6)
    lines: list[str] = []
    remote_checkpoints.set_remote_aside(bucket, 2, lines.append)
    assert list_remote_steps(bucket) == [2]
    assert len(lines) == 2
    remote_checkpoints.prune_remote(bucket, 8, 1)
    assert remote_checkpoints.list_objects(bucket).keys() == {2, 4, 6}


def test_a_call_that_fails_is_tried_again(bucket: Bucket) -> None:
    answers = [TimeoutError(), ConnectionError("reset"), DEFAULT]
    with patch.object(bucket.files, "pipe_file", wraps=bucket.files.pipe_file, side_effect=answers):
        with pytest.raises(BucketError, match="reset"):
            bucket.put_bytes(b"content", "name")  # one pause, two attempts
        bucket.put_bytes(b"content", "name")
    assert bucket.read("name") == b"content"


def test_a_model_is_complete_when_its_step_is_there(bucket: Bucket, tmp_path: Path) -> None:
    model = tmp_path / "model"
    (model / "base").mkdir(parents=True)
    for name in ("model.safetensors", "base/config.json"):
        (model / name).write_text(name)
    (model / "ulysses.json").write_text(json.dumps({"step": 8}))
    bucket.put_bytes(b"", "model/model-00002.safetensors")
    Sending(bucket).send_model(model)
    assert remote_checkpoints.read_remote_model_steps(bucket) == (8, 8)
    assert bucket.list_names("model") == ["model/base/config.json", "model/model.safetensors", "model/ulysses.json"]


def test_preflight_tries_the_address(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    def look(name: str, starts_anew: bool = True) -> list[str]:
        recipe = load(f"run.checkpoint_uri=file://{tmp_path}/{name}").recipe
        return [problem.message for problem in check_bucket(recipe, starts_anew=starts_anew)]

    assert look("new") == []
    assert list((tmp_path / "new").iterdir()) == []
    (tmp_path / "file").touch()
    upload(Bucket(f"file://{tmp_path}/used"), tmp_path / "here", 2)
    assert look("file/below") + look("used") == snapshot
    assert look("used", starts_anew=False) == []


RECIPE = """\
model: {name_or_path: "gs://mine/model"}
data: {datasets: [{path: "gs://mine/texts.jsonl"}], max_length: 64}
train: {max_steps: 1}
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home, and a bucket behind every gs:// address, which is below the folder `remote`."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    real = Bucket.__init__

    def open_folder(self: Bucket, address: str, pauses: tuple[float, ...] = ()) -> None:
        real(self, address.replace("gs://", f"file://{tmp_path}/remote/"), pauses)

    monkeypatch.setattr(Bucket, "__init__", open_folder)
    monkeypatch.setattr(downloads, "find_spec", lambda _: object())
    return tmp_path / "home"


def test_a_model_and_data_are_downloaded_once(home: Path, tmp_path: Path) -> None:
    remote = tmp_path / "remote" / "mine"
    (remote / "model" / "deep").mkdir(parents=True)
    (remote / "model" / "deep" / "config.json").write_text("{}")
    (remote / "texts.jsonl").write_text('{"text": "a"}\n')
    recipe = tmp_path / "r.yaml"
    recipe.write_text(RECIPE)
    lines: list[str] = []
    for _ in range(2):
        downloads.bring_inputs(str(recipe), [], lines.append)
    copies = home / ".cache" / "ulysses" / "gs" / "mine"
    assert lines == [
        f"downloading gs://mine/model to {copies}/model",
        f"downloading gs://mine/texts.jsonl to {copies}/texts.jsonl",
    ]
    assert (copies / "model" / "deep" / "config.json").read_text() == "{}"
    assert (copies / "texts.jsonl").read_text() == '{"text": "a"}\n'
    assert sorted(path.name for path in copies.iterdir()) == ["model", "texts.jsonl"]
    assert load_recipe(str(recipe), []).recipe.model.name_or_path == "~/.cache/ulysses/gs/mine/model"


def test_a_copy_that_is_not_there_is_explained_with_its_place(
    home: Path, tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    """Without a network, and where it cannot be downloaded."""
    recipe = tmp_path / "r.yaml"
    recipe.write_text(RECIPE)
    said = [*map(str, validate_recipe(str(recipe)).problems), explain(downloads.bring_inputs, str(recipe), [], print)]
    assert said == snapshot
    assert not any(path.is_file() for path in home.rglob("*"))


def test_addresses_and_their_copies() -> None:
    """An address with a key, a pattern or a way up has none."""
    assert name_local_copy("s3://bucket/models/small/") == "~/.cache/ulysses/s3/bucket/models/small"
    assert find_address("~/.cache/ulysses/s3/bucket/models/small") == "s3://bucket/models/small"
    assert name_local_copy("file:///disk/data") == "/disk/data"
    for own in ("owner/model", "s3://key:secret@bucket/model", "s3://bucket/*.jsonl", "s3://bucket/../model"):
        assert (name_local_copy(own), find_address(own)) == (own, "")


def test_bytes_on_their_way_are_told_with_rate_and_time_left(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert format_transfer(0, 8 << 30, 3.0) == "0.00 of 8.00 GiB"
    assert format_transfer(3 << 29, 8 << 30, 15.0) == "1.50 of 8.00 GiB, 102 MiB/s, 65 s left"
    assert format_transfer(0, (1 << 20) - 1, 3.0) == "0.00 of 1.00 MiB"
    assert format_transfer(700, 700, 7.0) == "700 of 700 B, 100 B/s"
    upload(bucket, tmp_path / "here", 4)
    lines: Queue[str] = Queue()

    class SlowBucket(Bucket):
        def get_file(self, name: str, file: Path) -> None:
            """Of a share, half arrives; the rest follows when that has been told."""
            if name.endswith(SHARES[0]):
                file.write_bytes(b"x" * (self.get_size(name) // 2))
                while " s left" not in (line := lines.get(timeout=60)):
                    assert file.exists()
                assert line.startswith(f"{bucket.address}/checkpoints/step-4: ")
            super().get_file(name, file)

    monkeypatch.setattr(transfers, "REPORT_SECONDS", 0.01)
    bring_newest(SlowBucket(bucket.address), tmp_path / "there", lines.put)
    assert list_local(tmp_path / "there") == ["step-4"]


def test_the_hubs_word_for_a_missing_object_is_understood(bucket: Bucket) -> None:
    class AnswerError(Exception):
        def __init__(self, code: str) -> None:
            self.response = SimpleNamespace(headers={"X-Error-Code": code})

    def fail(code: str) -> None:
        raise AnswerError(code)

    with pytest.raises(FileNotFoundError):
        bucket._try(lambda: fail("EntryNotFound"))
    with pytest.raises(BucketError):
        bucket._try(lambda: fail("RepoNotFound"))
