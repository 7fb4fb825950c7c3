"""Where the numbers of a run go besides its own files: one class for each service, and a pipe to the program that
called `train` from Python. Only rank 0 makes any of them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ulysses_cli.plan.secrets import mask_text

PROJECT = "ulysses"
LINE_PIPE = "ULYSSES_LINES"  # a FIFO; its reader is the process that started the run


class Tracker(Protocol):
    """Receives the lines of metrics.jsonl (`split` train) and eval.jsonl (eval). `place`: where a person finds them, or
    ''."""

    place: str

    def write(self, split: str, line: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class TrackerError(ValueError):
    """A tracker that the recipe names is not installed, or refuses the run."""


def make_trackers(
    names: Sequence[str], run_dir: Path, run_name: str, environ: Mapping[str, str] | None = None
) -> list[Tracker]:
    trackers: list[Tracker] = []
    run_name = mask_text(run_name)  # services show it
    for name in names:
        try:
            trackers.append(TRACKERS[name](run_dir, run_name))
        except ImportError as error:
            raise TrackerError(
                f"run.report_to: {name} is not installed ({error}): pip install ulysses-cli[{name}]"
            ) from error
        except Exception as error:  # a service may raise anything
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise TrackerError(f"run.report_to: {name} cannot start: {mask_text(lines[0][:300])}") from error
    if pipe := (environ or {}).get(LINE_PIPE):
        trackers.append(LinePipe(Path(pipe)))
    return trackers


def pick_numbers(split: str, line: Mapping[str, Any]) -> dict[str, float]:
    numbers = {name: value for name, value in line.items() if isinstance(value, int | float) and name != "step"}
    return {f"{split}/{name}": value for name, value in numbers.items()}


class TensorBoard:
    def __init__(self, run_dir: Path, run_name: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.place = str(run_dir / "tensorboard" / run_name)
        self.writer = SummaryWriter(self.place)

    def write(self, split: str, line: dict[str, Any]) -> None:
        for name, value in pick_numbers(split, line).items():
            self.writer.add_scalar(name, value, line["step"])

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    def __init__(self, run_dir: Path, run_name: str) -> None:
        import wandb

        self.run = wandb.init(project=PROJECT, name=run_name, dir=str(run_dir))
        self.place = str(getattr(self.run, "url", None) or run_dir / "wandb")

    def write(self, split: str, line: dict[str, Any]) -> None:
        self.run.log(pick_numbers(split, line), step=line["step"])

    def close(self) -> None:
        self.run.finish()


class MLflow:
    """Writes to MLFLOW_TRACKING_URI, or to mlflow.db in the run's folder where it is not set."""

    def __init__(self, run_dir: Path, run_name: str) -> None:
        from mlflow.tracking import MlflowClient

        address = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(run_dir / 'mlflow.db').absolute()}"
        run_dir.mkdir(parents=True, exist_ok=True)
        self.client = MlflowClient(address)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self.client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment is not None else self.client.create_experiment(name)
        self.run_id = self.client.create_run(number, run_name=run_name).info.run_id
        self.place = f"{mask_text(address)}, experiment {name}, run {self.run_id}"

    def write(self, split: str, line: dict[str, Any]) -> None:
        from mlflow.entities import Metric

        now, step = int(time.time() * 1000), line["step"]
        metrics = [Metric(name, float(value), now, step) for name, value in pick_numbers(split, line).items()]
        self.client.log_batch(self.run_id, metrics=metrics)

    def close(self) -> None:
        self.client.set_terminated(self.run_id)


class Trackio:
    """Writes to Trackio's folder (TRACKIO_DIR), which `trackio show` reads."""

    def __init__(self, run_dir: Path, run_name: str) -> None:
        import trackio

        self.run = trackio.init(project=PROJECT, name=run_name, embed=False)
        self.place = f"trackio show --project {PROJECT}, run {run_name}"

    def write(self, split: str, line: dict[str, Any]) -> None:
        self.run.log(pick_numbers(split, line), step=line["step"])

    def close(self) -> None:
        self.run.finish()


class LinePipe:
    """Writes each line, with its split, to a pipe. A reader that has gone away needs no lines. The line that a killed
    rank has left unfinished is ended first."""

    place = ""

    def __init__(self, path: Path) -> None:
        self.handle = os.open(path, os.O_WRONLY)
        self._send(b"\n")

    def write(self, split: str, line: dict[str, Any]) -> None:
        self._send(json.dumps({"split": split, **line}).encode() + b"\n")

    def _send(self, data: bytes) -> None:
        try:
            while data:
                data = data[os.write(self.handle, data) :]
        except BrokenPipeError:
            return

    def close(self) -> None:
        os.close(self.handle)


TRACKERS: dict[str, Callable[[Path, str], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
    "trackio": Trackio,
}
