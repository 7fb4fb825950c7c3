"""Tests trackers against the packages themselves: what a run sends is read back from mlflow's store and Trackio's."""

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.refusals import explain
from syrupy.assertion import SnapshotAssertion

from ulysses_cli.report.run_summary import load_run
from ulysses_cli.train.record import LINE_PIPE, TRACKERS, Record, TrackerError, make_trackers

LINE = {"step": 1, "loss": 3.5, "mfu": None, "step_parts": {"mlp": 1.0}}


def skip_without(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        importlib.util.find_spec(name) is None, reason=f"no {name}: pip install ulysses-cli[{name}]"
    )


def write_lines(name: str, folder: Path) -> None:
    (tracker,) = make_trackers([name], folder, "mine")
    tracker.write("train", LINE)
    tracker.write("train", {**LINE, "step": 2, "loss": 3.25})
    tracker.write("eval", {"step": 2, "loss": 4.0, "by_position": {}})
    tracker.close()


@pytest.mark.check
@skip_without("mlflow")
def test_mlflow_has_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.tracking import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    write_lines("mlflow", tmp_path)
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (found,) = client.search_runs([client.get_experiment_by_name("ulysses").experiment_id])
    assert (found.info.run_name, found.info.status) == ("mine", "FINISHED")
    history = client.get_metric_history(found.info.run_id, "train/loss")
    assert [(metric.step, metric.value) for metric in history] == [(1, 3.5), (2, 3.25)]
    assert found.data.metrics["eval/loss"] == 4.0


@pytest.mark.check
@skip_without("trackio")
def test_trackio_has_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    import trackio.utils
    from trackio.sqlite_storage import SQLiteStorage

    monkeypatch.setattr(trackio.utils, "TRACKIO_DIR", tmp_path)
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path)
    write_lines("trackio", tmp_path)
    logged = SQLiteStorage.get_logs("ulysses", "mine")
    assert [line["train/loss"] for line in logged if "train/loss" in line] == [3.5, 3.25]
    assert [line["eval/loss"] for line in logged if "eval/loss" in line] == [4.0]


@pytest.mark.parametrize("name", TRACKERS)
def test_a_missing_package_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    package = {"tensorboard": "torch.utils.tensorboard", "mlflow": "mlflow.tracking"}.get(name, name)
    monkeypatch.setitem(sys.modules, package, None)
    assert explain(make_trackers, [name], tmp_path, "mine", error=TrackerError) == snapshot


def test_a_service_that_refuses_a_run_is_told_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    def refuse(*_: Any) -> Any:
        raise RuntimeError("403: https://user:secretword@host refuses")

    monkeypatch.setitem(TRACKERS, "mlflow", refuse)
    assert explain(make_trackers, ["mlflow"], tmp_path, "mine", error=TrackerError) == snapshot, "without the secret"


def test_training_goes_on_when_a_service_fails(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    events: list[Any] = []

    class Failing:
        place, times, is_closed = "https://numbers.example/mine", 0, False

        def write(self, split: str, line: dict[str, Any]) -> None:
            self.times += 1
            raise ConnectionError("the server is gone")

        def close(self) -> None:
            self.is_closed = True
            raise ConnectionError("the server is still gone")

    class Unclosed:
        place = "here"

        def write(self, split: str, line: dict[str, Any]) -> None:
            pass

        def close(self) -> None:
            raise TimeoutError("no answer")

    failing, record = Failing(), Record(tmp_path)
    record.open(SimpleNamespace(emit=events.append, close=lambda: None), [failing, Unclosed()])
    record.start_files(0, 100)
    record.write_step(LINE)
    record.write_step({**LINE, "step": 2})
    record.close()
    assert (failing.times, failing.is_closed) == (1, True)
    assert [event["message"] for event in events if event["event"] == "warning"] == snapshot(name="warnings")
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    assert [(line["name"], line["text"]) for line in load_run(tmp_path).told] == snapshot(name="told")


def test_lines_reach_the_program_that_started_the_run(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    os.mkfifo(path)
    handle = os.open(path, os.O_RDWR)
    (pipe,) = make_trackers([], tmp_path, "mine", {LINE_PIPE: str(path)})
    pipe.write("train", LINE)
    pipe.close()
    assert json.loads(os.read(handle, 1 << 16)) == {"split": "train", **LINE}
    os.close(handle)
