"""A batch script for SLURM: it saves before its time is over, and goes back into the queue until the run is done."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Mapping

from ulysses_cli.launch.environments import refuse
from ulysses_cli.launch.jobs.job import GS_FILE, ClusterJob, refuse_difference, refuse_secrets, show

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
SECRETS = """
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
    secrets = SECRETS.format(checks="\n".join(checks)) if checks else ""
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
