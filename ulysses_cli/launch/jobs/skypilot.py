"""A task for SkyPilot 0.14, as a managed job: it resumes from a bucket after a preemption or an early stop."""

from __future__ import annotations

import shlex
from typing import Any

from ulysses_cli.launch.environments import refuse
from ulysses_cli.launch.jobs.job import GS_FILE, S3_SECRETS, ClusterJob, refuse_difference, refuse_secrets, show
from ulysses_cli.launch.jobs.yaml_text import write_documents

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
SECRETS = """\
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
        secrets=SECRETS.format(options=options) if options else "",
    )
    if shlex.split(task["run"]) != job.list_words():
        raise refuse_difference(file)
    return refuse_secrets(job, write_documents(head, [task], file))
