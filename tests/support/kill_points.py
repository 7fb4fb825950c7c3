"""Kills a run at an exact event, from inside.

Rank 0 sees every file that it opens, renames and removes, and every phase that it enters. At the planned one it sends a
signal to the chosen processes. The product has no code for this. `arm` is called in each forked rank; the plan is in
its environment. Each rank also logs its collectives.
"""

import json
import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

PLAN, PIDS = "FAULTS_PLAN", "FAULTS_PIDS"
# when the n-th save is killed: at its beginning, in each of its stages, or in the step after it
MOMENTS = ("step", "share", "state", "manifest", "rename", "renamed", "prune", "start")
STEP_SECONDS, SHARE_SECONDS, MAX_OPENS = 0.4, 0.004, 250
FINAL = re.compile(r"/step-\d+$")
UPLOADED = re.compile(r"/checkpoints/step-\d+/[^/]+$")  # read after it has its name


def draw(seed: int) -> dict[str, Any]:
    """Returns the plan of a seed."""
    generator = random.Random(seed)
    moment = MOMENTS[seed % len(MOMENTS)]
    return {
        "moment": moment,
        "ranks": generator.choice([[0], [1], [0, 1]]),
        "ahead": generator.randint(2 if moment == "prune" else 0, 3),  # saves of this start before it
        "wait": generator.random(),
        "nth": generator.randint(1, 4 if moment == "prune" else MAX_OPENS),
    }


def arm(module: str, environ: Mapping[str, str]) -> None:
    """Sets up a rank before any of its own code runs."""
    if module != "ulysses_cli.train" or PIDS not in environ:
        return
    pids = Path(environ[PIDS])
    (pids / "part").mkdir(parents=True, exist_ok=True)
    part = pids / "part" / environ["RANK"]
    part.write_text(str(os.getpid()))
    part.rename(pids / environ["RANK"])
    log_collectives(pids / f"collectives-{environ['RANK']}")
    if environ["RANK"] == "1":
        hang_when_signalled()
    plan = json.loads(environ.get(PLAN, "{}"))
    if "stay" in plan:
        watch_phases(StayInPhase(plan, pids))
    elif "pause" in plan:
        write_slowly(plan["pause"])
    elif "upload_pause" in plan:
        upload_slowly(plan["upload_pause"])
    elif environ["RANK"] == "0" and plan and environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        if "phase" in plan:
            watch_phases(KillAtPhase(plan, pids))
        else:
            sys.addaudithook(KillAtFile(plan, pids))


COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_object", "barrier", "broadcast", "broadcast_object_list"),
    *("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "all_to_all"),
)


def log_collectives(file: Path) -> None:
    """Makes this rank write a line before each collective that it enters."""
    import torch
    import torch.distributed as dist

    log = open(file, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 - open as long as the rank lives

    def wrap(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            log.write(f"{name} {[tuple(each.shape) for each in args if isinstance(each, torch.Tensor)]}\n")
            return function(*args, **kwargs)

        return call

    for name in COLLECTIVES:
        setattr(dist, name, wrap(name, getattr(dist, name)))


def read_collectives(pids: Path) -> list[list[str]]:
    """Returns the lines of each rank."""
    return [file.read_text().splitlines() for file in sorted(pids.glob("collectives-*"))]


def list_phases(num_steps: int, evaluated: int, saved: int) -> dict[str, dict[str, Any]]:
    """Returns plans by event of a run, without `who` and `signal`. `evaluated` is a step with an evaluation, `saved`
    one with a save and a sample."""
    return {
        "start": {"phase": "reading inputs"},
        "loading": {"phase": "loading the model"},
        "rehearsal": {"phase": "rehearsal: evaluation"},
        "first evaluation": {"phase": "evaluation", "step": 0},
        "mid-step": {"phase": "micro-step 2", "step": evaluated - 1},
        "evaluation": {"phase": "evaluation", "step": evaluated},
        "save": {"phase": "saving", "step": saved},
        "samples": {"phase": "sample 1 of 1, token 2", "step": saved},
        "last save": {"phase": "saving", "step": num_steps},
        "last evaluation": {"phase": "evaluation", "step": num_steps},
        "last samples": {"phase": "sample 1 of 1, token 2", "step": num_steps},
        "export": {"phase": "writing the model"},
        "check of the export": {"phase": "loading what was exported"},
    }


def watch_phases(note: Callable[[str, int | None], None]) -> None:
    """Calls `note` with each phase that the run or a step enters, and the number of steps done."""
    from ulysses_cli.train.loop import TrainState
    from ulysses_cli.train.record import Record

    for kind in (TrainState, Record):
        plain = kind.__setattr__

        def set_attribute(self: Any, name: str, value: Any, plain: Any = plain) -> None:
            plain(self, name, value)
            if name == "phase":
                note(value, getattr(self, "step", None))

        kind.__setattr__ = set_attribute  # type: ignore[method-assign, assignment]


class KillAtPhase:
    """Sends the signal once, when a phase begins whose name starts with the plan's, after the plan's step if it has
    one. `who` is all, one, this, agent or command. With `seconds` this rank waits for the signal to be noted."""

    def __init__(self, plan: Mapping[str, Any], pids: Path) -> None:
        self.plan, self.pids, self.is_done = plan, pids, False

    def __call__(self, phase: str, step: int | None) -> None:
        if self.is_done or not phase.startswith(self.plan["phase"]) or self.plan.get("step") not in (None, step):
            return
        self.is_done = True
        (self.pids / "fired").touch()
        for process in self.find():
            os.kill(process, self.plan["signal"])
        time.sleep(self.plan.get("seconds", 0))

    def find(self) -> list[int]:
        agent = os.getppid()
        match self.plan["who"]:
            case "all":  # this one last
                return [find_rank(self.pids, rank) for rank in reversed(range(int(os.environ["WORLD_SIZE"])))]
            case "one":
                return [find_rank(self.pids, 1)]
            case "this":
                return [os.getpid()]
            case "agent":
                return [agent]
        return [int(Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[1])]


class StayInPhase:
    """Keeps this rank for some seconds in the first phase whose name starts with the plan's."""

    def __init__(self, plan: Mapping[str, Any], pids: Path) -> None:
        self.plan, self.file = plan, pids / f"stays-{os.environ['RANK']}"

    def __call__(self, phase: str, step: int | None) -> None:
        if phase.startswith(self.plan["stay"]) and not self.file.exists():
            self.file.touch()
            time.sleep(self.plan["seconds"])


def hang_when_signalled() -> None:
    """Makes this rank hang where it reads its rows, once it gets SIGUSR2."""
    from ulysses_cli.train import loop

    signals: list[int] = []
    signal.signal(signal.SIGUSR2, lambda number, _: signals.append(number))
    read = loop.read_micro_batch

    def read_slowly(*args: Any) -> Any:
        if signals:
            time.sleep(10**6)
        return read(*args)

    loop.read_micro_batch = read_slowly


def write_slowly(seconds: float) -> None:
    """Makes each tensor of a checkpoint take that long to be written."""
    from ulysses_cli.train import tensor_file

    walk = tensor_file._walk_bytes

    def walk_slowly(*args: Any) -> Any:
        for piece in walk(*args):
            time.sleep(seconds)
            yield piece

    tensor_file._walk_bytes = walk_slowly


def upload_slowly(seconds: float) -> None:
    """Makes each file take that long to arrive in a bucket."""
    from ulysses_cli.run.bucket import Bucket

    put = Bucket.put_file

    def put_slowly(self: Bucket, *args: Any) -> None:
        time.sleep(seconds)
        put(self, *args)

    Bucket.put_file = put_slowly  # type: ignore[method-assign]


def find_rank(pids: Path, rank: int) -> int:
    end = time.monotonic() + 60
    while not (pids / str(rank)).exists():
        assert time.monotonic() < end, f"rank {rank} never started"
        time.sleep(0.005)
    return int((pids / str(rank)).read_text())


class KillAtFile:
    """Watches files with an audit hook, which gets an event and its arguments."""

    def __init__(self, plan: Mapping[str, Any], pids: Path) -> None:
        self.plan, self.pids = plan, pids
        self.num_saves, self.num_seen, self.is_pruning, self.is_done = 0, 0, False, False

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if self.is_done or event not in ("open", "os.rename", "os.remove", "shutil.rmtree"):
            return
        path = str(args[0])
        target = str(args[1]) if event == "os.rename" else ""
        is_named = bool(FINAL.search(target)) and ".writing" in path
        if self.plan["moment"] == "start":
            self.num_seen += event == "open"
            if self.num_seen >= self.plan["nth"]:
                self.kill()
        elif self.num_saves >= self.plan["ahead"] and self.is_moment(event, path, target, is_named):
            self.kill()
        if is_named:
            self.num_saves += 1
            if self.plan["moment"] == "step" and self.num_saves > self.plan["ahead"]:
                self.kill_after(STEP_SECONDS)

    def is_moment(self, event: str, path: str, target: str, is_named: bool) -> bool:
        is_written = event == "open" and ".writing/" in path
        match self.plan["moment"]:
            case "share":
                if is_written and path.endswith(".safetensors"):
                    self.kill_after(SHARE_SECONDS)
            case "state" | "manifest" as name:
                return is_written and path.endswith(f"{name}.json")
            case "rename":
                return is_named
            case "renamed":  # the folder is synced after its checkpoint has its name
                return event == "open" and path.endswith("/checkpoints") and self.num_saves > self.plan["ahead"]
            case "upload":
                self.num_seen += event == "open" and bool(UPLOADED.search(path))
                return self.num_seen >= self.plan["nth"]
            case "prune":
                self.is_pruning = self.is_pruning or target.endswith(".gone")
                self.num_seen += self.is_pruning
                return self.num_seen >= self.plan["nth"]
        return False

    def kill_after(self, most: float) -> None:
        if not self.is_done:
            self.is_done = True
            threading.Timer(self.plan["wait"] * most, self.kill).start()

    def kill(self) -> None:
        self.is_done = True
        (self.pids / "fired").touch()
        for rank in sorted(self.plan["ranks"], reverse=True):  # this rank last
            os.kill(find_rank(self.pids, rank), signal.SIGKILL)
