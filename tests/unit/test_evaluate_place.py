"""Which machine of an evaluation this is, and how many ranks there are."""

import pytest

from ulysses_cli.commands.children.evaluating import find_place
from ulysses_cli.commands.children.training import Machine
from ulysses_cli.plan.problem import RecipeError

SECOND = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1"}


@pytest.mark.parametrize(
    ("sp_size", "slots", "environ", "num_ranks"),
    [
        (1, 0, {}, 1),
        (4, 0, {}, 4),
        (4, 8, {}, 8),
        (3, 8, {}, 6),
        (16, 8, {}, 16),  # more ranks than GPUs: refused where ranks start
        (1, 8, {"NPROC_PER_NODE": "4"}, 8),
        (2, 0, SECOND, 2),
        (1, 0, SECOND, 2),
        (3, 0, SECOND, 6),
        (16, 8, SECOND, 16),
        (4, 8, SECOND, 16),
        (6, 8, SECOND, 12),
    ],
)
def test_ranks_are_dealt_to_machines(sp_size: int, slots: int, environ: dict[str, str], num_ranks: int) -> None:
    nodes, found = find_place(sp_size, slots, environ, Machine())
    assert (found, nodes.processes_here) == (num_ranks, num_ranks // nodes.count)
    assert (nodes.count, nodes.rank) == ((2, 1) if environ is SECOND else (1, 0))


@pytest.mark.parametrize(
    ("environ", "message", "hint"),
    [
        (SECOND, "15 ranks cannot be dealt evenly to 2 machines", "use a --sp-size that divides 16"),
        ({"TORCHELASTIC_RUN_ID": "x"}, "torchrun started this command", "`ulysses evaluate` starts the processes"),
        (
            {"SLURM_JOB_NUM_NODES": "2"},
            "SLURM gave this job 2 machines",
            "srun --ntasks-per-node=1 ulysses evaluate ...; or --nnodes 1",
        ),
        ({"NODE_RANK": "1"}, "NUM_NODES does not name several machines", "set NNODES"),
    ],
)
def test_what_cannot_be_read_is_refused(environ: dict[str, str], message: str, hint: str) -> None:
    with pytest.raises(RecipeError) as caught:
        find_place(5, 8, environ, Machine())
    (problem,) = caught.value.problems
    assert message in problem.message
    assert hint in problem.hint
