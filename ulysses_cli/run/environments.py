"""The environments in which clusters start a command on each machine of a job: which variables name the machines, and
which tell of a scheduler that starts a job again. Holds facts and reads texts. nodes.py decides what wins."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from ulysses_cli.plan.problem import DONE, STOPPED, Problem, RecipeError

NOT_A_COUNT = ("auto", "gpu", "cpu")  # torchrun's words for: as many as the machine has
PROCESSES_BY_RECIPE = "ulysses starts the processes of a machine itself"


@dataclass(frozen=True)
class ClusterEnvironment:
    """Variables by what they say; '' where the cluster has none. `marks`: all are set where it started the command.
    `tasks`: how often it started the command on each machine. `line`: how to start it once on each."""

    name: str
    marks: tuple[str, ...]
    count: str
    rank: str
    master_addr: str = ""
    master_port: str = ""
    processes_here: str = ""
    tasks: str = ""
    line: str = ""


BY_HAND = ClusterEnvironment(
    "the environment", (), "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "NPROC_PER_NODE"
)
CLUSTERS = (
    ClusterEnvironment(
        "SkyPilot",
        ("SKYPILOT_NUM_NODES",),
        "SKYPILOT_NUM_NODES",
        "SKYPILOT_NODE_RANK",
        "SKYPILOT_NODE_IPS",
        processes_here="SKYPILOT_NUM_GPUS_PER_NODE",
    ),
    ClusterEnvironment(
        "dstack",
        ("DSTACK_NODES_NUM",),
        "DSTACK_NODES_NUM",
        "DSTACK_NODE_RANK",
        "DSTACK_MASTER_NODE_IP",
        processes_here="DSTACK_GPUS_PER_NODE",
    ),
    ClusterEnvironment(
        "Kubeflow",
        ("PET_NNODES",),
        "PET_NNODES",
        "PET_NODE_RANK",
        "PET_MASTER_ADDR",
        "PET_MASTER_PORT",
        "PET_NPROC_PER_NODE",
    ),
    ClusterEnvironment(
        "RunPod",
        ("NUM_NODES",),
        "NUM_NODES",
        "NODE_RANK",
        "PRIMARY_ADDR",
        "PRIMARY_PORT",
        "NUM_TRAINERS",
    ),
    ClusterEnvironment(
        "SLURM",
        ("SLURM_STEP_NODELIST", "SLURM_NODEID"),
        "SLURM_STEP_NUM_NODES",
        "SLURM_NODEID",
        "SLURM_STEP_NODELIST",
        tasks="SLURM_STEP_TASKS_PER_NODE",
        line="srun --ntasks-per-node=1 ulysses train ...",
    ),
    ClusterEnvironment(
        "mpirun",
        ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK",
        tasks="OMPI_COMM_WORLD_LOCAL_SIZE",
        line="mpirun --npernode 1 ulysses train ...",
    ),
    # An older PyTorchJob counts its pods so; a newer one sets PET_NNODES too.
    ClusterEnvironment("PyTorchJob", ("WORLD_SIZE", "RANK"), "WORLD_SIZE", "RANK", "MASTER_ADDR"),
)
SCHEDULERS = (  # set in each job of one that starts a job again
    *("SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST", "SKYPILOT_TASK_ID", "DSTACK_RUN_NAME", "PBS_JOBID", "LSB_JOBID"),
    "FLUX_JOB_ID",
)
NO_CLUSTER = ClusterEnvironment("no cluster", (), "", "")


def find_cluster(environ: Mapping[str, str], command: str = "train") -> ClusterEnvironment:
    """Returns the cluster that started this command. Raises RecipeError where its variables tell of a job that this
    command cannot be one process of, or of several machines that they do not let it tell apart."""
    cluster = find_named_cluster(environ, command)
    if cluster is NO_CLUSTER:
        _refuse_unread_job(environ, command)
    elif read_number(environ, cluster.count) is None:
        message = f"{cluster.name} started this command, but has not set {cluster.count}"
        raise refuse(message, "give --nnodes (1: this machine alone), --node-rank and --master-addr")
    return cluster


def find_named_cluster(environ: Mapping[str, str], command: str = "train") -> ClusterEnvironment:
    """Returns the cluster for what options leave out. Raises RecipeError where the command was started several times on
    this machine."""
    cluster = next((each for each in CLUSTERS if all(environ.get(mark) for mark in each.marks)), NO_CLUSTER)
    hint = f"leave it out: `ulysses {command}` starts the processes of a machine itself"
    if "TORCHELASTIC_RUN_ID" in environ:
        raise refuse("torchrun started this command once for each process", hint)
    if environ.get("LOCAL_RANK") and environ.get("WORLD_SIZE"):
        message = "a launcher, such as deepspeed, started this command once for each process (LOCAL_RANK, WORLD_SIZE)"
        raise refuse(message, hint)
    if cluster.tasks and (num_tasks := _count_tasks(environ.get(cluster.tasks, ""))) > 1:
        message = f"{cluster.name} started this command {num_tasks} times on each machine ({cluster.tasks})"
        raise refuse(message, f"{PROCESSES_BY_RECIPE}: write {cluster.line.replace('train', command)}")
    return cluster


def refuse_lone_rank(environ: Mapping[str, str], *, is_alone: bool) -> None:
    """Raises RecipeError where a variable gives this machine a number and none says how many machines there are; if the
    machine `is_alone`, where the number is above 0. SLURM gives a batch script on its only machine the number 0.
    It may be one of several machines or one of several runs: a run on one of four machines is worse than a refusal."""
    for each in (BY_HAND, *CLUSTERS):
        rank = read_number(environ, each.rank)
        counts = [other.count for other in (BY_HAND, *CLUSTERS) if other.rank == each.rank]
        is_counted = any(read_number(environ, name) is not None for name in counts)
        if (rank and (is_alone or not is_counted)) or (rank == 0 and not is_counted and each.name != "SLURM"):
            message = f"{each.rank} is {rank}, but {' or '.join(counts)} does not name several machines"
            raise refuse(message, f"set {counts[0]}, or give --nnodes (1: this machine alone)")


def _refuse_unread_job(environ: Mapping[str, str], command: str) -> None:
    if number := environ.get("JOB_COMPLETION_INDEX"):
        message = f"Kubernetes gave this pod the number {number} of an indexed Job (JOB_COMPLETION_INDEX), but no count"
        line = f"--nnodes N --node-rank {number} --master-addr FIRST"
        raise refuse(message, f"write {line}; or --nnodes 1, if each pod has a run of its own")
    for job in UNREAD_JOBS:
        if (count := job.count(environ, job.variable)) > 1:
            message = f"{job.name} gave this job {count} {job.unit} ({job.variable}), but not which of them this is"
            each = f"{job.start} ulysses {command} ... --nnodes {count} --node-rank {job.rank} --master-addr FIRST"
            line = job.line.replace("train", command) or each
            raise refuse(message, f"write {line}; or --nnodes 1 to use this machine alone")


def _read_plain(environ: Mapping[str, str], name: str) -> int:
    return read_count(environ, name) or 1


def _count_words(environ: Mapping[str, str], name: str) -> int:
    """Of a list of machines, which may hold a machine once for each of its cores."""
    return len(set(environ.get(name, "").split()))


def _count_pairs(environ: Mapping[str, str], name: str) -> int:
    """Of LSF's list: each machine, and its number of cores."""
    return len(set(environ.get(name, "").split()[::2]))


def _count_lines(environ: Mapping[str, str], name: str) -> int:
    """Of a file with a line for each machine, or for each of its cores."""
    try:
        lines = Path(environ.get(name) or "/dev/null").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise refuse(
            f"{name} names a file that cannot be read: {error}", "give --nnodes (1: this machine alone)"
        ) from None
    return len({line.split()[0] for line in lines if line.strip()})


def _count_hosts(environ: Mapping[str, str], name: str) -> int:
    """Of SageMaker's list, or of Vertex AI's lists, one for each pool of workers."""
    try:
        facts = json.loads(environ.get(name) or "[]")
        lists = facts["cluster"].values() if isinstance(facts, dict) else [facts]
        return sum(map(len, lists))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise refuse(f"{name} is {environ[name]}, not a list of machines", "give --nnodes") from None


@dataclass(frozen=True)
class UnreadJob:
    """A variable that tells of several machines, or processes, without saying which of them this is. `count` reads it.
    `start`: a program that starts a command on each machine; `rank`: the machine's number there."""

    name: str
    variable: str
    count: Callable[[Mapping[str, str], str], int] = _read_plain
    start: str = "on each machine"
    rank: str = "N"
    line: str = ""
    unit: str = "machines"


UNREAD_JOBS = (
    UnreadJob("SLURM", "SLURM_JOB_NUM_NODES", line="srun --ntasks-per-node=1 ulysses train ..."),
    UnreadJob("SLURM", "SLURM_NNODES", line="srun --ntasks-per-node=1 ulysses train ..."),
    UnreadJob("SkyPilot", "SKYPILOT_NODE_IPS", _count_words),
    UnreadJob("dstack", "DSTACK_NODES_IPS", _count_words),
    UnreadJob("Flux", "FLUX_JOB_NNODES", start="flux run --tasks-per-node=1", rank="$FLUX_TASK_RANK"),
    UnreadJob("PBS", "PBS_NUM_NODES"),
    UnreadJob("PBS", "PBS_NODEFILE", _count_lines),
    UnreadJob("LSF", "LSB_MCPU_HOSTS", _count_pairs),
    UnreadJob("LSF", "LSB_HOSTS", _count_words),
    UnreadJob("Grid Engine", "NHOSTS"),
    UnreadJob("SageMaker", "SM_HOSTS", _count_hosts, rank="(the place of SM_CURRENT_HOST in SM_HOSTS)"),
    UnreadJob("Vertex AI", "CLUSTER_SPEC", _count_hosts, rank="(this machine's place in CLUSTER_SPEC)"),
    UnreadJob("Azure ML", "AZUREML_NODE_COUNT", rank="$NODE_RANK"),
    UnreadJob("mpirun", "OMPI_COMM_WORLD_SIZE", rank="$OMPI_COMM_WORLD_RANK", unit="processes"),
    UnreadJob("an MPI launcher", "MV2_COMM_WORLD_SIZE", rank="$MV2_COMM_WORLD_RANK", unit="processes"),
    UnreadJob("an MPI launcher", "PMI_SIZE", rank="$PMI_RANK", unit="processes"),
)


def read_number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "").strip()
    if not text or text in NOT_A_COUNT:
        return None
    low, _, high = text.partition(":")  # torchrun's range of machines
    if not low.isdecimal() or high not in ("", low):
        wanted = "give one number of machines: the recipe's layout is fixed" if high else "write a whole number"
        raise refuse(f"{name} is {text}", wanted)
    return int(low)


def read_count(environ: Mapping[str, str], name: str) -> int | None:
    return read_number(environ, name) or None


def find_first_host(text: str) -> str:
    """Returns the first machine of a list: one per line, or SLURM's compressed form."""
    return next(expand_host_list(text), "")


def expand_host_list(text: str) -> Iterator[str]:
    """Yields the machines of a list in its order. rack[1-2]node[01-02],login: rack1node01, rack1node02, rack2node01,
    rack2node02, login."""
    for item in re.findall(r"(?:[^\[\],\s]|\[[^\]]*\])+", text):
        parts = [_expand_ranges(part) for part in re.findall(r"\[[^\]]*\]|[^\[\]]+", item)]
        yield from ("".join(choice) for choice in product(*parts))


def choose_stop_code(given: int | None, environ: Mapping[str, str]) -> int:
    """Returns the exit code of a run that stopped early with a checkpoint. A scheduler takes 0 for a job that is done
    and never starts it again."""
    if given is not None:
        return given
    return STOPPED if any(environ.get(name) for name in SCHEDULERS) else DONE


def _expand_ranges(part: str) -> list[str]:
    if not part.startswith("["):
        return [part]
    values: list[str] = []
    for each in part[1:-1].split(","):
        low, _, high = each.partition("-")
        if not low.isdecimal() or not (high or low).isdecimal():
            raise refuse(f"a list of machines holds {part}", "give --master-addr, the name of the first machine")
        values += [str(number).zfill(len(low)) for number in range(int(low), int(high or low) + 1)]
    return values


def _count_tasks(text: str) -> int:
    """Returns the largest number of SLURM's 8(x2),4."""
    return max((int(number) for number in re.findall(r"(?:^|,)(\d+)", text)), default=1)


def refuse(message: str, hint: str) -> RecipeError:
    return RecipeError([Problem("", message, hint)])
