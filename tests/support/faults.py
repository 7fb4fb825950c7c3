"""Injects faults into real runs: signals to ranks at chosen moments, damage to files on disk."""

import json
import os
import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from support import kill_points
from support.forked import Command, is_alive, read_parent
from support.paths import ROOT
from support.small_run import make_settings

TIME_LIMIT = 240.0
RECIPE = make_settings(
    parallel={"sp_size": 2},
    train={"max_steps": 60, "gradient_accumulation_steps": 2},
    run={"save_steps": 1, "rehearsal": False},
)


class Runs:
    """A folder with a recipe and the runs that it starts."""

    def __init__(self, folder: Path, recipe: Mapping[str, Any] = RECIPE) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        (folder / "r.yaml").write_text(yaml.safe_dump(recipe))
        self.environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}

    def start(
        self, run: str, *words: str, plan: Mapping[str, Any] | None = None, peer: Command | None = None
    ) -> Command:
        """Starts a run. `plan` says where it is killed (kill_points.py); `peer` is the same run's command on another
        machine."""
        environ = {**self.environ, kill_points.PLAN: json.dumps(plan)} if plan else dict(self.environ)
        if peer is not None:
            environ[kill_points.PIDS] = str(peer.pids.parent)
        return Command(["train", "r.yaml", f"run.output_dir={run}", *words], self.folder, environ)

    def train(self, run: str, *words: str) -> tuple[int, str]:
        process = self.start(run, *words)
        _, err = process.communicate(timeout=TIME_LIMIT)
        return process.returncode, err

    def finish(self, run: str, *words: str) -> str:
        """Trains to the end, which must be a good one. Returns what it showed."""
        code, output = self.train(run, *words)
        assert code == 0, output
        return output

    def read_lines(self, run: str, name: str = "metrics") -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / run / f"{name}.jsonl").read_text().splitlines()]

    def count_steps(self, run: str) -> int:
        file = self.folder / run / "metrics.jsonl"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def read_losses(self, run: str) -> dict[int, float]:
        lines = self.read_lines(run)
        assert len({line["step"] for line in lines}) == len(lines), "a step appears twice"
        return {line["step"]: line["loss"] for line in lines}

    def read_model(self, run: str) -> bytes:
        return (self.folder / run / "model" / "model.safetensors").read_bytes()

    def list_checkpoints(self, run: str) -> list[str]:
        """Returns every name in the folder, of finished and of half-written checkpoints."""
        try:
            return sorted(os.listdir(self.folder / run / "checkpoints"))
        except FileNotFoundError:
            return []


def wait_until(process: Command, is_there: Callable[[], bool], pause: float = 0.01) -> bool:
    """Returns False when the run ended before."""
    end = time.monotonic() + TIME_LIMIT
    while not is_there():
        if process.poll() is not None:
            return False
        assert time.monotonic() < end
        time.sleep(pause)
    return True


def list_processes(command: Command) -> set[int]:
    """Returns the ranks and their agent."""
    ranks = {int(file.read_text()) for file in command.pids.glob("[0-9]")}
    return ranks | {parent for rank in ranks if (parent := read_parent(rank)) not in (0, 1)}


def wait_for_end(processes: set[int], seconds: float) -> float:
    """Returns the seconds until no process is left."""
    begun = time.monotonic()
    while left := [process for process in processes if is_alive(process)]:
        assert time.monotonic() - begun < seconds, f"{left} live on"
        time.sleep(0.05)
    return time.monotonic() - begun


def damage_newest(run_dir: Path, kind: str, generator: random.Random) -> None:
    """Damages the newest checkpoint as a bad disk or a person would."""
    newest = max((run_dir / "checkpoints").glob("step-*[0-9]"), key=lambda path: int(path.name[5:]))
    shard = newest / f"rank-{generator.randrange(2):05d}.safetensors"
    if kind == "truncated file":
        os.truncate(shard, generator.randrange(shard.stat().st_size))
    elif kind == "flipped byte":
        content = bytearray(shard.read_bytes())
        content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
        shard.write_bytes(content)
    elif kind == "missing shard":
        shard.unlink()
    elif kind == "missing manifest":
        (newest / "manifest.json").unlink()
    elif kind == "torn metrics":
        metrics = run_dir / "metrics.jsonl"
        os.truncate(metrics, max(1, metrics.stat().st_size - generator.randrange(1, 200)))
