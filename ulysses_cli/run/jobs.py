"""What a cluster must know of a run (machines, GPUs, the command, the time, the names of secrets), YAML for people, and
the files of SLURM and SkyPilot 0.14. What is written is read again.

A job goes on where it stopped: it saves before its time is over, goes back into the queue or to the bucket, and the
command resumes from the newest checkpoint, or starts anew where there is none."""

from __future__ import annotations

import itertools
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from ulysses_cli.plan.files import find_address, get_scheme
from ulysses_cli.plan.hardware import Gpu
from ulysses_cli.plan.problem import DONE, FAILED, STOPPED, USAGE, RecipeError
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.plan.recipe.sections import find_control
from ulysses_cli.plan.rules.files import is_local
from ulysses_cli.plan.secrets import IN_ADDRESS, find_named_secrets, find_variable
from ulysses_cli.plan.units import format_count
from ulysses_cli.run.environments import refuse

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
    """Returns names and paths of the model, its tokenizer, all data and the texts of run.short_check."""
    tokenizer = recipe.model.tokenizer
    names = [recipe.model.name_or_path, tokenizer if tokenizer != "bytes" else None, recipe.run.short_check]
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


class _Dumper(yaml.SafeDumper):
    pass


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)


def dump_yaml(content: dict[str, Any]) -> str:
    return str(yaml.dump(content, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True))


def write_documents(head: str, documents: Sequence[dict[str, Any]], file: str) -> str:
    """Returns comments, then a document each. Raises RecipeError where a reader would find anything else in it."""
    text = head + "---\n".join(dump_yaml(each) for each in documents)
    try:
        found = list(yaml.safe_load_all(text))
    except yaml.YAMLError:
        found = []
    if found != list(documents):
        raise refuse_difference(file)
    return text


NAME = re.compile(r"[A-Za-z0-9_.,+@:=-]+")  # of partitions and accounts, several by commas
SCRIPT = """\
#!/bin/bash
# {description}
# Written by `ulysses launch slurm`; submit it with: sbatch {file}
{options}

set -uo pipefail
cd "$SLURM_SUBMIT_DIR" || exit 1
mkdir -p -- {logs}
{secrets}
# {warning} seconds before the time is over, and when the job is preempted: the ranks save a checkpoint and end.
stop() {{
  signalled=yes
  scancel --signal=TERM "$SLURM_JOB_ID.0"
}}
signalled=yes
trap stop USR1 TERM

# srun runs the command once on each machine; ulysses starts the processes of its GPUs.
srun --ntasks-per-node=1 --kill-on-bad-exit=0 --output={logs}/slurm-%j-%n.log \\
  {command} &
step=$!
while [ -n "$signalled" ]; do  # a signal ends a wait early
  signalled=
  wait "$step"
  code=$?
done

if [ "$code" = {stopped} ]; then  # stopped with a checkpoint: there are steps left
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""
SLURM_SECRETS = """
# secrets come from the environment of sbatch; this file holds none
{checks}
"""
MAY_BE_SET = "# so do these, where they are set: {names}"


def write_slurm(job: ClusterJob, file: str, settings: Mapping[str, str] = {}) -> str:
    """`settings`: further options of sbatch, such as partition and account; they go before the script's own."""
    for name, value in settings.items():
        if not NAME.fullmatch(value):
            hint = f"sbatch's --{name} takes letters, digits and _ . , + @ : = -"
            raise refuse(f"--{name}: {value!r} is not a name in SLURM", hint)
    options: dict[str, str | None] = {
        "job-name": job.name,
        "nodes": str(job.num_nodes),
        "ntasks-per-node": "1",
        "gpus-per-node": str(job.gpus_per_node),
        "exclusive": None,  # all cores and all host memory of each machine
        "mem": "0",
        "requeue": None,
        "open-mode": "append",
        "output": f"{job.name}-%j.log",  # of this script; sbatch makes no folder
        "signal": f"B:USR1@{job.warning_seconds}",
    }
    if job.hours is not None:
        options["time"] = format_time(job.hours)
    options |= settings
    lines = [f"#SBATCH --{name}" + (f"={value}" if value is not None else "") for name, value in options.items()]
    checks = [f': "${{{name}:?set it before sbatch}}"' for name in job.secrets]
    if names := [*job.optional_secrets, *([GS_FILE] if "gs" in job.schemes else [])]:
        checks.append(MAY_BE_SET.format(names=" ".join(names)))
    logs = f"{job.run_dir}/logs"
    secrets = SLURM_SECRETS.format(checks="\n".join(checks)) if checks else ""
    fixed = {"secrets": secrets, "warning": job.warning_seconds, "stopped": job.stop_code}
    text = SCRIPT.format(
        description=show(job.describe()),
        file=show(shlex.quote(file)),
        options="\n".join(lines),
        logs=shlex.quote(logs),
        command=job.write_command(),
        **fixed,
    )
    plain = SCRIPT.format(description="", file="", options="", logs="LOGS", command="COMMAND", **fixed)
    words: list[str] = []
    for word in _split(plain):
        words += job.list_words() if word == "COMMAND" else [word.replace("LOGS", logs)]
    if _split(text) != words or _read_directives(text) != lines:
        raise refuse_difference(file)
    return refuse_secrets(job, text)


def _split(script: str) -> list[str]:
    """The words that a shell reads, without comments; none where a quote is open."""
    try:
        return shlex.split(script, comments=True)
    except ValueError:
        return []


def _read_directives(script: str) -> list[str]:
    """What sbatch reads: the lines before the first command."""
    before = itertools.takewhile(lambda line: not line or line.startswith("#"), script.split("\n"))
    return [line for line in before if line.startswith("#SBATCH")]


def format_time(hours: float) -> str:
    """Returns SLURM's days-hours:minutes:00."""
    minutes = max(1, round(hours * 60))
    return f"{minutes // 1440}-{minutes % 1440 // 60:02}:{minutes % 60:02}:00"


WORKDIR = "~/sky_workdir"
ACCELERATORS = {  # SkyPilot's names of the kinds in hardware.yaml
    "h100-80gb": "H100",
    "h100-pcie": "H100-PCIE",
    "h100-nvl": "H100-NVL",
    "h200": "H200",
    "b200": "B200",
    "b300": "B300",
    "gh200": "GH200",
    "a100-80gb": "A100-80GB",
    "a100-40gb": "A100",
    "l40s": "L40S",
    "rtx-4090": "RTX4090",
    "rtx-5090": "RTX5090",
    "rtx-6000-ada": "RTX6000-Ada",
    "rtx-pro-6000": "RTXPRO6000",
    "mi300x": "MI300X",
    "mi355x": "MI355X",
}
HEAD = """\
# {description}
# Written by `ulysses launch sky`; submit it with: sky jobs launch {file}
{secrets}# {place}
"""
IN_BUCKET = "The bucket keeps checkpoints and the model: name one that you own."
ON_VOLUME = "The volume keeps checkpoints and the model: all machines must be able to write it."
BY_ADDRESS = "Machines have disks of their own; the run resumes from {uri}."
SKYPILOT_SECRETS = """\
# with the secrets that it names, from your environment: {options}
"""
GS_PLACE = "/tmp/gs-key.json"
GS_SOURCE = "~/.config/gcloud/application_default_credentials.json"


def write_skypilot(
    job: ClusterJob, file: str, *, image: str, bucket: str | None = None, volume: str | None = None, spot: bool = False
) -> str:
    """`bucket`: an address such as s3://name, for one machine; `volume`: a SkyPilot volume. Either is mounted where the
    run writes; a run with an address of its own (run.checkpoint_uri) needs none of them."""
    if job.gpu.key not in ACCELERATORS:
        raise refuse(f"SkyPilot's name of {job.gpu.key} is not known here", f"use one of {', '.join(ACCELERATORS)}")
    if job.run_dir.is_absolute():
        hint = "give a path below the folder that SkyPilot copies, such as runs/mine"
        raise refuse(f"run.output_dir is {job.run_dir}", hint)
    if (bucket is not None and volume is not None) or (bucket is volume is None and not job.is_kept_in_bucket):
        hint = "give --bucket or --volume, not both, or set run.checkpoint_uri to an address"
        raise refuse("the run needs one place that outlives its machines", hint)
    if bucket is not None and "://" not in bucket:
        raise refuse(
            f"--bucket {bucket} is not an address", f"write the store before the name, such as s3://{bucket.strip('/')}"
        )
    if bucket is not None and job.num_nodes > 1:
        message = (
            f"{job.num_nodes} machines cannot save one checkpoint in a mounted bucket: each sees only what it wrote"
        )
        raise refuse(message, "give --volume, the name of a SkyPilot volume that all of them can write")
    resources: dict[str, Any] = {
        "accelerators": f"{ACCELERATORS[job.gpu.key]}:{job.gpus_per_node}",
        "image_id": f"docker:{image}",
        "use_spot": spot,
        "job_recovery": {"max_restarts_on_errors": 0, "recover_on_exit_codes": [job.stop_code]},
    }
    place = f"{WORKDIR}/{job.run_dir}"
    # MOUNT_CACHED writes like a disk; plain MOUNT cannot rename a folder, which makes a checkpoint whole
    mounts: dict[str, Any] = {place: {"source": bucket, "mode": "MOUNT_CACHED"}} if bucket else {}
    envs = {}
    if "gs" in job.schemes:
        mounts[GS_PLACE], envs[GS_FILE] = GS_SOURCE, GS_PLACE
    job = job if bucket or volume else job.with_key()
    secrets = (*job.secrets, *(S3_SECRETS if "s3" in job.schemes else ()))
    task: dict[str, Any] = {
        "name": job.name,
        "num_nodes": job.num_nodes,
        "resources": resources,
        "workdir": ".",
        **({"file_mounts": mounts} if mounts else {}),
        **({"volumes": {place: volume}} if volume else {}),
        **({"envs": envs} if envs else {}),
        **({"secrets": dict.fromkeys(secrets)} if secrets else {}),
        "run": f"{job.write_command()}\n",
    }
    where = IN_BUCKET if bucket else ON_VOLUME if volume else BY_ADDRESS.format(uri=show(job.checkpoint_uri))
    options = " ".join(f"--secret {name}" for name in secrets)
    head = HEAD.format(
        description=show(job.describe()),
        file=show(shlex.quote(file)),
        place=where,
        secrets=SKYPILOT_SECRETS.format(options=options) if options else "",
    )
    if shlex.split(task["run"]) != job.list_words():
        raise refuse_difference(file)
    return refuse_secrets(job, write_documents(head, [task], file))
