"""What a cluster must know of a run: machines, GPUs, the command, the time, the names of secrets.

A job goes on where it stopped: the command resumes from the newest checkpoint, or starts anew where there is none.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from ulysses_cli.launch.environments import refuse
from ulysses_cli.plan.exit_codes import DONE, FAILED, STOPPED, USAGE
from ulysses_cli.plan.hardware import Gpu
from ulysses_cli.plan.recipe.recipe import Recipe

GRACE_SECONDS = 120  # a rank takes at most a minute to save and end
WARNING_SECONDS = 300  # before the end of a job's time
NAME_LENGTH = 40
TRACKER_SECRETS = {"wandb": "WANDB_API_KEY"}


@dataclass(frozen=True)
class ClusterJob:
    """`secrets`: names of environment variables; a file never holds their values. `hours`: None for no limit."""

    name: str
    recipe: Path
    overrides: tuple[str, ...]
    num_nodes: int
    gpus_per_node: int
    gpu: Gpu
    run_dir: Path
    secrets: tuple[str, ...]
    hours: float | None
    max_restarts: int
    stop_code: int

    def list_words(self, recipe: str | None = None) -> list[str]:
        """Returns the command line. `recipe`: the file's path where the job runs, if that is another one."""
        return ["ulysses", "train", recipe or str(self.recipe), *self.overrides, "--resume", "auto"]

    def write_command(self) -> str:
        return shlex.join(self.list_words())

    def describe(self) -> str:
        machines = "1 machine" if self.num_nodes == 1 else f"{self.num_nodes} machines"
        gpus = "1 GPU" if self.gpus_per_node == 1 else f"{self.gpus_per_node} GPUs"
        return f"{self.recipe.name} on {machines} with {gpus} each ({self.gpu.name})"


def make_job(
    recipe: Recipe,
    file: Path,
    overrides: tuple[str, ...],
    world_size: int,
    gpu: Gpu,
    *,
    gpus_per_node: int | None = None,
    hours: float | None = None,
    max_restarts: int = 10,
) -> ClusterJob:
    """Raises RecipeError where the recipe's processes do not fill machines evenly."""
    per_node = min(gpus_per_node or gpu.gpus_per_node, world_size)
    if world_size % per_node:
        hint = "change the parallel sizes, or give --gpus-per-node a number that divides them"
        raise refuse(f"{world_size} processes do not fill machines of {per_node} GPUs evenly", hint)
    run = recipe.run
    is_on_hub = recipe.model.name_or_path is not None and not Path(recipe.model.name_or_path).expanduser().is_dir()
    of_trackers = [TRACKER_SECRETS[name] for name in run.report_to if name in TRACKER_SECRETS]
    return ClusterJob(
        name=name_job(run.run_name or Path(run.output_dir).name),
        recipe=file,
        overrides=overrides,
        num_nodes=world_size // per_node,
        gpus_per_node=per_node,
        gpu=gpu,
        run_dir=Path(run.output_dir),
        secrets=(*(["HF_TOKEN"] if is_on_hub else []), *of_trackers),
        hours=hours,
        max_restarts=max_restarts,
        stop_code=choose_job_stop_code(run.stop_exit_code),
    )


def choose_job_stop_code(given: int | None) -> int:
    """Returns the exit code by which the cluster knows an early stop. Raises RecipeError for one that jobs end with for
    other reasons too."""
    code = STOPPED if given is None else given
    if code in (DONE, FAILED, USAGE):
        hint = f"leave it out, which is {STOPPED}, or take another one: the job goes on by this code alone"
        raise refuse(f"run.stop_exit_code is {code}, which also ends jobs that are done or failed", hint)
    return code


def name_job(text: str) -> str:
    """Returns a name that every cluster takes: small letters, digits and hyphens, a letter first."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    name = name if name[:1].isalpha() else f"run-{name}"
    return name[:NAME_LENGTH].rstrip("-")
