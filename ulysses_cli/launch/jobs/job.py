"""What a cluster must know of a run: machines, GPUs, the command, the time, the names of secrets.

A job goes on where it stopped: the command resumes from the newest checkpoint, or starts anew where there is none.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ulysses_cli.launch.environments import refuse
from ulysses_cli.plan.exit_codes import DONE, FAILED, STOPPED, USAGE
from ulysses_cli.plan.files.addresses import find_address, get_scheme
from ulysses_cli.plan.hardware import Gpu
from ulysses_cli.plan.nouns import format_count
from ulysses_cli.plan.problem import RecipeError
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.plan.recipe.setting import find_control
from ulysses_cli.plan.rules.files import is_local
from ulysses_cli.plan.secrets import IN_ADDRESS, find_named_secrets, find_variable

GRACE_SECONDS = 120  # at least, from SIGTERM to SIGKILL
WARNING_SECONDS = 300  # at least, before the end of a job's time
MARGIN_SECONDS = 60  # for what starts and ends around the run
MAX_WARNING_SECONDS = 65535  # sbatch takes no more
NAME_LENGTH = 40
TRACKER_SECRETS = {"wandb": "WANDB_API_KEY"}
RUN_KEY = "ULYSSES_RUN_KEY"  # machines without a shared disk cannot share it through a file
S3_SECRETS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
S3_SETTINGS = ("AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_DEFAULT_REGION")
GS_FILE = "GOOGLE_APPLICATION_CREDENTIALS"


@dataclass(frozen=True)
class ClusterJob:
    """`secrets`: names of environment variables; a file never holds their values. Those of `optional_secrets` may be
    left out, as where machines have a role at the bucket's owner. `schemes`: of the addresses that the run opens.
    `local_inputs`: paths that the recipe reads. `recipe_secrets`: values in the recipe that no file may hold, by key.
    `stop_seconds`: from a signal to the run's end, at most. `hours`: None for no limit."""

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
    stop_seconds: float
    optional_secrets: tuple[str, ...] = ()
    schemes: frozenset[str] = frozenset()
    checkpoint_uri: str | None = None
    local_inputs: tuple[str, ...] = ()
    recipe_secrets: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def is_kept_in_bucket(self) -> bool:
        """The run resumes from an address alone."""
        return self.checkpoint_uri is not None and get_scheme(self.checkpoint_uri) != "file"

    @property
    def grace_seconds(self) -> int:
        return max(GRACE_SECONDS, math.ceil(self.stop_seconds) + MARGIN_SECONDS)

    @property
    def warning_seconds(self) -> int:
        return min(MAX_WARNING_SECONDS, max(WARNING_SECONDS, self.grace_seconds))

    def with_key(self) -> ClusterJob:
        """The job on machines that share no disk."""
        return self if self.num_nodes == 1 else replace(self, secrets=(*self.secrets, RUN_KEY))

    def list_words(self, recipe: str | None = None) -> list[str]:
        """Returns the command line. `recipe`: the file's path where the job runs, if that is another one."""
        return ["ulysses", "train", recipe or str(self.recipe), *self.overrides, "--resume", "auto"]

    def write_command(self) -> str:
        return shlex.join(self.list_words())

    def describe(self) -> str:
        machines, each = format_count(self.num_nodes, "machine"), "" if self.num_nodes == 1 else " each"
        return (
            f"{self.recipe.name} on {machines} with {format_count(self.gpus_per_node, 'GPU')}{each} ({self.gpu.name})"
        )


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
    """Raises RecipeError where the recipe's processes do not fill machines evenly, or where a job has no time for
    steps."""
    per_node = min(gpus_per_node or gpu.gpus_per_node, world_size)
    if world_size % per_node:
        hint = "change the parallel sizes, or give --gpus-per-node a number that divides them"
        raise refuse(f"{world_size} processes do not fill machines of {per_node} GPUs evenly", hint)
    run = recipe.run
    model = recipe.model.name_or_path
    is_on_hub = model is not None and not Path(model).expanduser().is_dir() and not find_address(model)
    schemes = frozenset(get_scheme(each) for each in _list_addresses(recipe))
    of_trackers = [TRACKER_SECRETS[name] for name in run.report_to if name in TRACKER_SECRETS]
    of_webhook = find_variable(run.notify_webhook or "")
    job = ClusterJob(
        name=name_job(run.run_name or Path(run.output_dir).name),
        recipe=file,
        overrides=overrides,
        num_nodes=world_size // per_node,
        gpus_per_node=per_node,
        gpu=gpu,
        run_dir=Path(run.output_dir),
        secrets=(*(["HF_TOKEN"] if is_on_hub or "hf" in schemes else []), *of_trackers, *of_webhook),
        hours=hours,
        max_restarts=max_restarts,
        stop_code=choose_job_stop_code(run.stop_exit_code),
        stop_seconds=min(run.stop_timeout, run.step_timeout),
        optional_secrets=(*S3_SECRETS, *S3_SETTINGS) if "s3" in schemes else (),
        schemes=schemes,
        checkpoint_uri=run.checkpoint_uri,
        local_inputs=tuple(each for each in _list_inputs(recipe) if not find_address(each) and is_local(each)),
        recipe_secrets=find_named_secrets(recipe.model_dump()),
    )
    if hours is not None and hours * 3600 < 2 * job.warning_seconds:
        before = f"it is told to save {job.warning_seconds:,} s before its end"
        message = f"a job of {hours * 3600:,.0f} s has no time to train: {before}"
        raise refuse(message, f"give --hours {math.ceil(2 * job.warning_seconds / 36) / 100:g} or more")
    return job


def _list_inputs(recipe: Recipe) -> list[str]:
    """Returns names and paths of the model, its tokenizer and all data."""
    tokenizer = recipe.model.tokenizer
    names = [recipe.model.name_or_path, tokenizer if tokenizer != "bytes" else None]
    for dataset in (*recipe.data.datasets, *recipe.data.eval_datasets):
        names += [dataset.path] if dataset.path is not None else list(dataset.data_files or ())
    return [name for name in names if name is not None]


def _list_addresses(recipe: Recipe) -> list[str]:
    return list(filter(None, (recipe.run.checkpoint_uri, *map(find_address, _list_inputs(recipe)))))


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


def show(value: object) -> str:
    """A value as a comment shows it: it ends no line."""
    return "".join(ascii(letter)[1:-1] if find_control(letter) else letter for letter in str(value))


def refuse_difference(file: str) -> RecipeError:
    hint = "look for odd characters in the recipe, its file's name and the options"
    return refuse(f"{file} is not written: a program would not read in it what it is meant to say", hint)


def refuse_secrets(job: ClusterJob, text: str) -> str:
    """Returns the text of a file. Raises RecipeError where it holds a secret of the recipe, or one in an address."""
    for key, value in job.recipe_secrets.items():
        if value in text:
            hint = "leave it out; run.notify_webhook may be $NAME, a variable that the cluster holds as a secret"
            raise refuse(f"{key} is a secret, and the file would hold it", hint)
    if any(match[0] != "git" for match in IN_ADDRESS.finditer(text)):
        hint = "write the address without user:password@, and give the password as an environment variable"
        raise refuse("an address holds a user or a password, and the file would hold them", hint)
    return text
