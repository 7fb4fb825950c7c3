"""Tests which machine of how many this is, from options, a hostfile, and the environment of each kind of cluster."""

import re
import shlex
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.messages import COMMANDS
from support.refusals import explain
from syrupy.assertion import SnapshotAssertion

from ulysses_cli.plan.problem import DONE, STOPPED, RecipeError
from ulysses_cli.run.environments import SCHEDULERS, choose_stop_code, expand_host_list
from ulysses_cli.run.nodes import Nodes, find_nodes


def test_options_win_over_the_environment_and_that_over_slurm() -> None:
    assert find_nodes(8, {}) == Nodes(processes_here=8)
    assert find_nodes(8, {"NPROC_PER_NODE": "8", "MASTER_ADDR": "gpu01"}) == Nodes(processes_here=8)
    slurm = {"SLURM_STEP_NODELIST": "gpu[07-08,12]", "SLURM_STEP_NUM_NODES": "3", "SLURM_NODEID": "2"}
    assert find_nodes(24, slurm) == Nodes(3, 2, "gpu07", 29400, 8)
    ours = {**slurm, "NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}
    assert find_nodes(16, ours) == Nodes(2, 1, "10.0.0.1", 1234, 8)
    assert find_nodes(16, ours, node_rank=0, master_addr="head", master_port=9) == Nodes(2, 0, "head", 9, 8)
    assert find_nodes(4, {"SLURM_STEP_NODELIST": "login1"}) == Nodes(processes_here=4)  # not inside srun


CLUSTERS = {
    "by hand": {
        "NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "gpu01", "MASTER_PORT": "1234", "NPROC_PER_NODE": "8"
    },
    "srun": {
        "SLURM_JOB_NUM_NODES": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "1",
        "SLURM_STEP_NODELIST": "gpu[01-02]", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    },
    "TrainJob": {
        "PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "gpu01", "PET_MASTER_PORT": "1234",
        "PET_NPROC_PER_NODE": "auto",
    },
    "PyTorchJob": {
        "PET_NNODES": "2:2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "gpu01", "PET_MASTER_PORT": "1234",
        "PET_NPROC_PER_NODE": "8", "WORLD_SIZE": "16", "RANK": "1", "MASTER_ADDR": "gpu01", "MASTER_PORT": "1234",
    },
    "PyTorchJob, older": {
        "KUBERNETES_SERVICE_HOST": "10.0.0.1", "WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "gpu01",
        "MASTER_PORT": "1234",
    },
    "RunPod": {
        "NUM_NODES": "2", "NODE_RANK": "1", "NUM_TRAINERS": "8", "PRIMARY_ADDR": "gpu01", "PRIMARY_PORT": "1234",
        "MASTER_ADDR": "gpu01", "MASTER_PORT": "1234", "WORLD_SIZE": "16", "NODE_ADDR": "10.65.0.3",
    },
    "SkyPilot": {
        "SKYPILOT_NODE_IPS": "gpu01\ngpu02\n", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    },
    "dstack": {
        "DSTACK_NODES_NUM": "2", "DSTACK_NODE_RANK": "1", "DSTACK_MASTER_NODE_IP": "gpu01", "DSTACK_GPUS_PER_NODE": "8"
    },
    "mpirun": {
        "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
        "MASTER_ADDR": "gpu01",
    },
}  # fmt: skip


RANKS = (
    *("NODE_RANK", "SLURM_NODEID", "PET_NODE_RANK", "RANK", "SKYPILOT_NODE_RANK", "DSTACK_NODE_RANK"),
    "OMPI_COMM_WORLD_RANK",
)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", CLUSTERS)
def test_each_kind_of_cluster_is_read(name: str, rank: int) -> None:
    environ = CLUSTERS[name] | {variable: str(rank) for variable in RANKS if variable in CLUSTERS[name]}
    port = 1234 if any("PORT" in variable for variable in environ) else 29400
    nodes = find_nodes(16, environ)
    assert nodes == Nodes(2, rank, "gpu01", port, 8)
    assert f"this is number {rank}, by " in nodes.describe()
    for variable in environ:
        rest = {key: value for key, value in environ.items() if key != variable}
        try:
            assert find_nodes(16, rest).count == 2 or variable == "RANK", variable  # WORLD_SIZE alone means nothing
        except RecipeError as error:  # what is left of it never makes a run of one machine
            assert all(problem.hint for problem in error.problems)


def test_an_option_decides_where_the_number_of_machines_cannot_be_read() -> None:
    """All of them are refused without it: commands.txt."""
    asked, _, _ = COMMANDS.blocks["machines of a cluster"].partition("\n>")
    environments = re.findall(r"^\$ (.*) ulysses train t.yaml parallel.dp_shard_size=8$", asked, flags=re.MULTILINE)
    assert len(environments) == 28
    for words in environments:
        environ = dict(word.split("=", 1) for word in shlex.split(words))
        assert find_nodes(16, environ, nnodes=1) == Nodes(processes_here=16)


def test_a_job_of_one_machine_is_read_as_one(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("gpu01\ngpu01\n")
    for environ in (
        {"SLURM_JOB_NUM_NODES": "1", "SLURM_NNODES": "1", "SLURM_NODEID": "0", "SLURM_JOB_NODELIST": "gpu01"},
        {"PBS_NUM_NODES": "1", "PBS_NODEFILE": str(tmp_path / "nodes")},
        {"LSB_MCPU_HOSTS": "gpu01 8", "LSB_HOSTS": "gpu01 gpu01"},
        {"FLUX_JOB_NNODES": "1", "PMI_SIZE": "1", "PMI_RANK": "0"},
        {"SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": "10.0.0.1"},
        {"NUM_NODES": "1", "NODE_RANK": "0", "NUM_TRAINERS": "8"},
        {"NNODES": "1", "NODE_RANK": "0"},
        {"PET_NNODES": "1", "PET_NODE_RANK": "0", "WORLD_SIZE": "1", "RANK": "0"},
        {"WORLD_SIZE": "16"},
        {"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"},
        {"CLUSTER_SPEC": '{"cluster": {"workerpool0": ["a:2222"]}}'},
        {"AZUREML_NODE_COUNT": "1"},
        {"PET_NNODES": "1", "PET_NODE_RANK": "0", "JOB_COMPLETION_INDEX": "0"},
    ):
        assert find_nodes(16, environ) == Nodes(processes_here=16), environ


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("rack[1-2]node[01-02],login", ["rack1node01", "rack1node02", "rack2node01", "rack2node02", "login"]),
        ("gpu-[1-2]-[3-4]", ["gpu-1-3", "gpu-1-4", "gpu-2-3", "gpu-2-4"]),
        ("gpu[07-09,12]", ["gpu07", "gpu08", "gpu09", "gpu12"]),
        ("gpu[9-11]", ["gpu9", "gpu10", "gpu11"]),
        ("10.0.0.1\n10.0.0.2", ["10.0.0.1", "10.0.0.2"]),
        ("n[1-2].a.b", ["n1.a.b", "n2.a.b"]),
        ("", []),
    ],
)
def test_lists_of_machines(text: str, hosts: list[str]) -> None:
    """The lists equal those that `scontrol show hostnames` prints."""
    assert list(expand_host_list(text)) == hosts


@given(st.lists(st.integers(0, 99), min_size=1, max_size=9, unique=True), st.sampled_from(["a", "a-", "r1n"]))
def test_a_compressed_list_expands_to_its_machines(numbers: list[int], prefix: str) -> None:
    text = f"{prefix}[{','.join(f'{number:02}' for number in numbers)}]"
    assert list(expand_host_list(text)) == [f"{prefix}{number:02}" for number in numbers]


def test_a_hostfile_names_the_machines(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    file = tmp_path / "hosts"
    file.write_text(f"# two\ngpu01.invalid slots=8\n\n{socket.gethostname()} slots=8  # the second\n")
    assert find_nodes(16, {}, hostfile=file) == Nodes(2, 1, "gpu01.invalid", 29400, 8)
    assert find_nodes(16, {}, hostfile=file, node_rank=0) == Nodes(2, 0, "gpu01.invalid", 29400, 8)
    file.write_text("gpu01.invalid slots=8\ngpu02.invalid slots=8\n")
    assert explain(find_nodes, 16, {}, hostfile=file) == snapshot


def test_an_early_stop_is_no_success_for_a_scheduler() -> None:
    assert choose_stop_code(None, {}) == DONE
    for name in SCHEDULERS:
        assert choose_stop_code(None, {name: "7"}) == STOPPED == 75
    assert choose_stop_code(0, {"KUBERNETES_SERVICE_HOST": "x"}) == 0
    assert choose_stop_code(9, {}) == 9
