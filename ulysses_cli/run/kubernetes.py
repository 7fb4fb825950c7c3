"""Objects for Kubeflow Trainer v2: a ConfigMap with the recipe, a TrainingRuntime and a TrainJob.

A TrainJob cannot say how often it starts again, so it comes with a runtime of its own. Written for Trainer 2.2 and
2.3, whose API is trainer.kubeflow.org/v1alpha1."""

from __future__ import annotations

import re
import shlex
from typing import Any

from ulysses_cli.plan.problem import USAGE
from ulysses_cli.run.environments import refuse
from ulysses_cli.run.jobs import GS_FILE, ClusterJob, refuse_secrets, show, write_documents

API_GROUP = "trainer.kubeflow.org"
TRAINER_API = f"{API_GROUP}/v1alpha1"
RECIPES, SHARED = "/recipe", "/work"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
ANCESTOR = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
HEAD = """\
# {description}
# Written by `ulysses launch k8s`; submit it with: kubectl apply -f {file}
# Needs Kubeflow Trainer 2.2 or 2.3{claim}
# A run that stops early with a checkpoint exits with {stop}: the pods start again and resume. Each start after an early
# stop or a failure counts, up to {restarts} (--max-restarts). Exit code {usage}, a mistake in the recipe, ends the job.
{secrets}"""
ON_CLAIM = """, and a volume claim `{claim}` that all pods can write. It holds local data, if the
# recipe names any, and {run_dir}."""
IN_BUCKET = """. Each pod has a disk of its own, which ends with it: a run resumes from
# {uri}."""
SECRETS = """\
# Secrets are named here and held by the cluster{optional}:
#   kubectl create secret generic {name} {literals}
"""
OPTIONAL = "; leave out what pods do not need, as those with a role"
GS_SECRET, GS_FOLDER, GS_KEY = "{name}-gs", "/credentials", "key.json"
GS_HELP = """\
# The key of a service account, as a file:
#   kubectl create secret generic {name} --from-file=key.json="$GOOGLE_APPLICATION_CREDENTIALS"
"""
LABEL = r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?"  # of RFC 1123
NAME = re.compile(rf"(?=.{{1,253}}\Z){LABEL}(?:\.{LABEL})*")
NAME_HINT = (
    "names in Kubernetes hold small letters, digits, - and ., and begin and end with a letter or a digit; "
    "63 characters at most between two dots"
)
QUEUE_LENGTH = 63  # it is a label's value
FILE_NAME = re.compile(r"(?!\.\.)[-._a-zA-Z0-9]{1,253}")  # a key of a ConfigMap


def write_kubernetes(
    job: ClusterJob, recipe_text: str, file: str, *, image: str, claim: str | None = None, queue: str | None = None
) -> str:
    """Returns a YAML file of three documents, with comments that say what it needs. Without a volume `claim` each pod
    has a disk of its own."""
    for option, name in (("--claim", claim), ("--queue", queue)):
        if name is not None and not NAME.fullmatch(name):
            raise refuse(f"{option}: {name!r} is not a name in Kubernetes", NAME_HINT)
    if queue is not None and len(queue) > QUEUE_LENGTH:
        raise refuse(f"--queue: a name of {len(queue)} characters", f"a queue's has {QUEUE_LENGTH} at most")
    if not FILE_NAME.fullmatch(job.recipe.name) or job.recipe.name == ".":
        hint = "rename the recipe: Kubernetes takes letters without accents, digits, -, _ and ., 253 at most"
        raise refuse(f"{job.recipe.name!r} is not a name of a file in a ConfigMap", hint)
    if not image or image != image.strip() or any(letter.isspace() for letter in image):
        raise refuse(f"--image: {image!r} is not the name of an image", "write one such as me/ulysses:1")
    if claim is None:
        _require_bucket(job)
        job = job.with_key()
    objects = [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": f"{job.name}-recipe"},
            "data": {job.recipe.name: recipe_text},
        },
        make_runtime(job, image, claim),
        make_train_job(job, queue),
    ]
    literals = " ".join(f'--from-literal={name}="${name}"' for name in (*job.secrets, *job.optional_secrets))
    optional = OPTIONAL if job.optional_secrets else ""
    secrets = SECRETS.format(name=f"{job.name}-secrets", literals=literals, optional=optional) if literals else ""
    place = (ON_CLAIM if claim else IN_BUCKET).format(
        claim=claim, run_dir=show(job.run_dir), uri=show(job.checkpoint_uri)
    )
    head = HEAD.format(
        description=show(job.describe()),
        file=show(shlex.quote(file)),
        stop=job.stop_code,
        restarts=job.max_restarts,
        usage=USAGE,
        claim=place,
        secrets=secrets + (GS_HELP.format(name=GS_SECRET.format(name=job.name)) if "gs" in job.schemes else ""),
    )
    return refuse_secrets(job, write_documents(head, objects, file))


def _require_bucket(job: ClusterJob) -> None:
    hint = "give --claim, a volume claim that all pods can write"
    if not job.is_kept_in_bucket:
        message = "the run needs one place that outlives its pods"
        raise refuse(message, f"{hint}, or set run.checkpoint_uri to an address")
    if job.local_inputs:
        message = f"{job.local_inputs[0]} is a path, and pods without a volume do not have it"
        raise refuse(message, f"{hint}, or name the data by an address or on the hub")


def make_train_job(job: ClusterJob, queue: str | None) -> dict[str, Any]:
    labels = {"labels": {QUEUE_LABEL: queue}} if queue else {}
    return {
        "apiVersion": TRAINER_API,
        "kind": "TrainJob",
        "metadata": {"name": job.name, **labels},
        "spec": {
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": "TrainingRuntime",
                "name": f"{job.name}-runtime",
            },
            "trainer": {"numNodes": job.num_nodes, "numProcPerNode": job.gpus_per_node},
        },
    }


def make_runtime(job: ClusterJob, image: str, claim: str | None) -> dict[str, Any]:
    """Trainer sets PET_NNODES, PET_NODE_RANK and PET_MASTER_ADDR in the container `node`, and ulysses reads them. A pod
    that ends with another code than 0 restarts the whole set. A mistake in the recipe would come again, so it ends it.
    """
    limits = {_name_resource(job): job.gpus_per_node}
    secret = f"{job.name}-secrets"
    references: list[dict[str, Any]] = [{"name": secret, "key": name} for name in job.secrets]
    references += [{"name": secret, "key": name, "optional": True} for name in job.optional_secrets]
    env: list[dict[str, Any]] = [{"name": each["key"], "valueFrom": {"secretKeyRef": each}} for each in references]
    own_disk: dict[str, Any] = {"emptyDir": {}}
    volumes: list[dict[str, Any]] = [
        {"name": "recipe", "configMap": {"name": f"{job.name}-recipe"}},
        {"name": "work", **({"persistentVolumeClaim": {"claimName": claim}} if claim else own_disk)},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},  # a pod's own holds 64 MiB, and NCCL needs more
    ]
    mounts: list[dict[str, Any]] = [
        {"name": "recipe", "mountPath": RECIPES},
        {"name": "work", "mountPath": SHARED},
        {"name": "shared-memory", "mountPath": "/dev/shm"},
    ]
    if "gs" in job.schemes:
        env.append({"name": GS_FILE, "value": f"{GS_FOLDER}/{GS_KEY}"})
        volumes.append({"name": "gs", "secret": {"secretName": GS_SECRET.format(name=job.name)}})
        mounts.append({"name": "gs", "mountPath": GS_FOLDER, "readOnly": True})
    container = {
        "name": "node",
        "image": image,
        # $(NAME) would be replaced by a variable's value, also a secret's; $$ stands for $
        "command": [word.replace("$", "$$") for word in job.list_words(f"{RECIPES}/{job.recipe.name}")],
        "workingDir": SHARED,
        "env": env,
        "resources": {"limits": limits},
        "volumeMounts": mounts,
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.grace_seconds,
        "containers": [container],
        "volumes": volumes,
    }
    is_mistake = {"action": "FailJob", "onExitCodes": {"containerName": "node", "operator": "In", "values": [USAGE]}}
    replicated = {
        "name": "node",
        "template": {
            "metadata": {"labels": ANCESTOR},
            "spec": {"backoffLimit": 0, "podFailurePolicy": {"rules": [is_mistake]}, "template": {"spec": pod}},
        },
    }
    # JobSet tells reasons of a failure apart, not exit codes, so an early stop counts as a restart.
    stop_rule = {"name": "mistake", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {
        "apiVersion": TRAINER_API,
        "kind": "TrainingRuntime",
        "metadata": {"name": f"{job.name}-runtime", "labels": {"trainer.kubeflow.org/framework": "torch"}},
        "spec": {
            "mlPolicy": {"numNodes": job.num_nodes, "torch": {}},
            "template": {
                "spec": {
                    "failurePolicy": {"maxRestarts": job.max_restarts, "rules": [stop_rule]},
                    "replicatedJobs": [replicated],
                }
            },
        },
    }


def _name_resource(job: ClusterJob) -> str:
    return "amd.com/gpu" if job.gpu.is_amd else "nvidia.com/gpu"
