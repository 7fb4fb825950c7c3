"""Benchmarks by their name on the hub: files and archives, what is missing, and the cache."""

import io
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from support.hub_server import SHA, Hub, use_hub
from support.refusals import explain
from syrupy.assertion import SnapshotAssertion

from ulysses_cli.evaluate.files import read_suite
from ulysses_cli.evaluate.suites import Sources, plan_suites
from ulysses_cli.plan.files import list_row_files
from ulysses_cli.run.downloads import find_suite_path

TREC = {"input": "q", "context": "c", "answers": ["Cat"], "all_classes": ["Cat", "Dog"], "dataset": "trec"}
PASSKEY = {"id": 0, "context": "c", "input": "q", "answer": ["71432"], "options": []}


def make_archive(**files: str) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, text in files.items():
            archive.writestr(f"data/{name}.jsonl", text)
    return stream.getvalue()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with use_hub(monkeypatch) as hub:
        hub.data_sets = {
            "some/infinite": {
                "passkey.jsonl": json.dumps(PASSKEY).encode(),
                "math_calc.jsonl": b'{"no": "rule"}',
                "README.md": b"words",
                "dataset_infos.json": b"{}",
            },
            "some/archive": {"data.zip": make_archive(trec=json.dumps(TREC)), "load.py": b""},
            "some/words": {"README.md": b"words"},
            "some/torn": {"data.zip": b"no archive"},
        }
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        yield hub


def ignore(_: str) -> None:
    return None


def test_a_data_set_is_downloaded_once_and_read(hub: Hub, snapshot: SnapshotAssertion) -> None:
    told: list[str] = []
    folder = find_suite_path("some/infinite", told.append)
    plan = plan_suites(["infinitebench"], Sources(path=folder))
    assert [sample.task for sample in plan.samples] == ["passkey"]
    assert [*told, *plan.notes] == snapshot
    assert not any("README" in request for request in hub.requests), "files of rows alone are downloaded"
    first = sum("resolve" in request for request in hub.requests)
    assert find_suite_path(f"some/infinite@{SHA}", ignore) == folder
    assert sum("resolve" in request for request in hub.requests) == first


def test_archives_are_all_unpacked(hub: Hub) -> None:
    """Once, also where they have one name."""
    rows = {"a/data.zip": "first", "b/data.zip": "second", "b.zip": "third"}
    hub.data_sets["some/three"] = {
        name: make_archive(trec=json.dumps({**TREC, "input": text})) for name, text in rows.items()
    }
    folder = find_suite_path("some/three", ignore)
    assert find_suite_path("some/three", ignore) == folder
    files = [file.relative_to(folder).as_posix() for file in folder.rglob("*.jsonl")]
    assert sorted(files) == [f"{name}/{Path(name).stem}/data/trec.jsonl" for name in sorted(rows)]
    asked = [sample.content for sample in read_suite("longbench", folder)]
    assert sorted(text for question in asked for text in rows.values() if text in question) == sorted(rows.values())


def test_nothing_is_read_before_its_archive_is_unpacked(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So nothing is that a killed process has left."""
    seen: list[list[Path]] = []
    replace = Path.replace

    def look(part: Path, target: Path) -> Path:
        seen.append(list_row_files(target.parent))
        assert list_row_files(part)
        return replace(part, target)

    monkeypatch.setattr(Path, "replace", look)
    assert (seen, len(list_row_files(find_suite_path("some/archive", ignore)))) == ([[]], 1)
    assert list((tmp_path / "home/.cache/ulysses/unpacking").iterdir()) == []


def test_what_is_missing_is_said(hub: Hub, snapshot: SnapshotAssertion) -> None:
    names = ("some/nothing", "some/words", "some/infinite@old", "some/torn")
    assert [explain(find_suite_path, name, ignore) for name in names] == snapshot


def test_without_the_hub_the_cache_serves(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    folder = find_suite_path("some/infinite", ignore)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert find_suite_path("some/infinite", ignore) == folder
    assert explain(find_suite_path, "some/archive", ignore).partition(": Got")[0] == snapshot


def test_a_path_on_this_machine_is_not_looked_for_elsewhere(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    assert find_suite_path(str(tmp_path), ignore) == tmp_path
    paths = (find_suite_path(missing, ignore) for missing in ("data/rows.jsonl", "nowhere.parquet"))
    assert [explain(read_suite, "mrcr", path) for path in paths] == snapshot
