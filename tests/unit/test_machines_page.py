"""Checks the commands and files of docs/machines.md: those of this tool run, and each cluster's own loader reads what
its commands would read. tests/ranks/test_machines.py and tests/ranks/test_slurm.py run those that start ranks."""

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from support.blocks import list_blocks
from support.commands import load_elsewhere
from support.generated_docs import DOCS
from typer.testing import CliRunner

from ulysses_cli.cli import app
from ulysses_cli.run.nodes import Nodes, find_nodes

PAGE = (DOCS / "machines.md").read_text()
COMMANDS = "".join(list_blocks(PAGE, "sh")).splitlines()
RECIPE = """
model: {name_or_path: Qwen/Qwen3-8B}
data: {datasets: [{path: a.jsonl}], max_length: 32Ki}
parallel: {sp_size: 8, dp_shard_size: 2}
"""
RUN_ELSEWHERE = {"ulysses train": 4, "mpirun": 1, "sbatch": 1, "kubectl": 2, "sky": 1}
DSTACK_CHECK = """
import json, sys, yaml
from dstack._internal.core.models.configurations import parse_run_configuration
found = parse_run_configuration(yaml.safe_load(sys.stdin))
print(json.dumps([found.nodes, found.resources.gpu.count.min, found.commands]))
"""
PYTORCH_JOB_CHECK = """
import json, sys, types, yaml
from kubeflow.training.api_client import ApiClient
given = yaml.safe_load(sys.stdin)
client, answer = ApiClient(), types.SimpleNamespace(data=json.dumps(given))
found = client.sanitize_for_serialization(client.deserialize(answer, "KubeflowOrgV1PyTorchJob"))
print(json.dumps(found == given))
"""


def run_page(folder: Path, start: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs the one command of the page that begins so. Returns what it printed."""
    (folder / "my.yaml").write_text(RECIPE)
    (folder / "a.jsonl").write_text('{"text": "a document"}\n')
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (command,) = [line for line in COMMANDS if line.startswith(start)]
    result = CliRunner().invoke(app, shlex.split(command)[1:])
    assert result.exit_code == 0, result.output
    return result.output


def find_file(start: str) -> str:
    """The file that the one command of the page which begins so takes."""
    (command,) = [line for line in COMMANDS if line.startswith(start)]
    return shlex.split(command)[-1]


def test_each_command_of_the_page_is_known_here() -> None:
    """A new one needs a test."""
    ours = [line for line in COMMANDS if re.match(r"ulysses (launch (slurm|k8s|sky)|validate-config) ", line)]
    assert len(ours) == 4
    for start, count in RUN_ELSEWHERE.items():
        assert sum(line.startswith(f"{start} ") for line in COMMANDS) == count
    assert len(COMMANDS) == len(ours) + sum(RUN_ELSEWHERE.values())


@pytest.mark.parametrize(
    ("start", "use", "words"),
    [
        ("slurm", "sbatch ", ("#SBATCH --nodes=2\n", "#SBATCH --partition=gpu\n")),
        ("k8s", "kubectl apply -f my.k8s", ("numNodes: 2\n",)),
        ("sky", "sky ", ("num_nodes: 1\n", "use_spot: true\n")),
    ],
)
def test_the_files_of_jobs_are_written(
    start: str, use: str, words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """test_job_files.py has them read by the clusters' own loaders."""
    run_page(tmp_path, f"ulysses launch {start}", monkeypatch)
    text = (tmp_path / find_file(use)).read_text()
    assert all(word in text for word in words)


def test_dstacks_own_loader_reads_the_configuration() -> None:
    (text,) = list_blocks(PAGE, "yaml my.dstack.yml")
    task = yaml.safe_load(text)
    environ = {"DSTACK_NODES_NUM": str(task["nodes"]), "DSTACK_NODE_RANK": "1", "DSTACK_MASTER_NODE_IP": "10.0.0.1"}
    assert find_nodes(16, environ | {"DSTACK_GPUS_PER_NODE": "8"}) == Nodes(2, 1, "10.0.0.1", 29400, 8)
    assert json.loads(load_elsewhere(DSTACK_CHECK, text)) == [2, 8, task["commands"]]


def test_kubeflows_own_model_reads_the_pytorchjob() -> None:
    """What the model does not know vanishes. The variables are those that the operator sets in each pod."""
    (text,) = list_blocks(PAGE, f"yaml {find_file('kubectl apply -f my.pytorchjob')}")
    job = yaml.safe_load(text)["spec"]
    count = sum(replica["replicas"] for replica in job["pytorchReplicaSpecs"].values())
    environ = {"MASTER_ADDR": "my-run-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": "16", "RANK": "8"}
    environ |= {"PET_NNODES": str(count), "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": job["nprocPerNode"]}
    environ |= {"PET_MASTER_ADDR": "my-run-master-0", "PET_MASTER_PORT": "23456"}
    assert find_nodes(16, environ) == Nodes(2, 1, "my-run-master-0", 23456, 8)
    assert load_elsewhere(PYTORCH_JOB_CHECK, text) == "true"


@pytest.mark.parametrize("rank", [0, 1])
def test_machines_started_by_hand_or_from_a_list_know_themselves(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ulysses_cli.run.nodes.list_own_names", lambda: {f"10.0.0.{rank + 1}"})
    (hosts,) = list_blocks(PAGE, "text hosts")
    (tmp_path / find_file("ulysses train my.yaml --hostfile")).write_text(hosts)
    expected = Nodes(2, rank, "10.0.0.1", 29400, 8)
    assert find_nodes(16, {}, hostfile=tmp_path / "hosts") == expected
    (by_hand,) = [line for line in COMMANDS if f"--node-rank {rank}" in line]
    words = shlex.split(by_hand)[3:]
    given = {
        name.removeprefix("--").replace("-", "_"): value for name, value in zip(words[::2], words[1::2], strict=True)
    }
    numbers = {name: int(value) for name, value in given.items() if value.isdecimal()}
    assert find_nodes(16, {}, **{**given, **numbers}) == expected
