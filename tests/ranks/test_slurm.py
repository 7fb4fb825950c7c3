"""The batch script that `ulysses launch slurm` writes, on a real SLURM of two machines, by the commands of
docs/machines.md."""

import json
import re
import shlex
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from support import slurm
from support.blocks import list_blocks
from support.faults import RECIPE
from support.generated_docs import DOCS
from support.paths import ROOT
from support.served import write_program
from typer.testing import CliRunner

from ulysses_cli.cli import app

NUM_STEPS, SAVE_STEPS = 30, 5


@pytest.mark.check
def test_a_job_is_told_to_stop_and_goes_on_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two machines of one GPU each. The job gets SLURM's warning in mid-run, saves, goes back into the queue, resumes
    and completes; every step is there once."""
    if why := slurm.find_obstacle():
        pytest.skip(why)
    monkeypatch.chdir(tmp_path)
    settings = {**RECIPE, "parallel": {"sp_size": 2}, "train": {**RECIPE["train"], "max_steps": NUM_STEPS}}
    settings["run"] = {**RECIPE["run"], "save_steps": SAVE_STEPS, "output_dir": "run"}
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(settings))
    page = "".join(list_blocks((DOCS / "machines.md").read_text(), "sh"))
    launch, submit = re.findall(r"^(ulysses launch slurm .*)\n(sbatch .*)$", page, re.MULTILINE)[0]
    result = CliRunner().invoke(app, [*shlex.split(launch)[1:], "--gpus-per-node", "1"])
    assert result.exit_code == 0, result.output
    program = write_program(tmp_path / "bin")
    metrics = tmp_path / "run" / "metrics.jsonl"

    def count_steps() -> int:
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    with slurm.start_cluster() as cluster:
        path = f"{program.parent}:{cluster.environ['PATH']}"
        began = time.monotonic()
        environ = {"PATH": path, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
        out = cluster.run(*shlex.split(submit), **environ, OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu")
        job = out.split()[-1]  # Submitted batch job 1

        def describe() -> str:
            logs = [*tmp_path.glob("*.log"), *(tmp_path / "run" / "logs").glob("*.log")]
            return "\n".join([str(cluster.get_state(job)), *(f"{log}: {log.read_text()[-2000:]}" for log in logs)])

        def has_ended() -> bool:
            return cluster.get_state(job)["JobState"] in ("COMPLETED", "FAILED", "CANCELLED")

        def wait_for(what: str, is_there: Callable[[], bool]) -> None:
            cluster.wait(is_there, describe)
            print(f"from sbatch to {what}: {time.monotonic() - began:.1f} s")

        wait_for("the first step", lambda: count_steps() >= 1)
        wait_for("a checkpoint", lambda: count_steps() > SAVE_STEPS)
        cluster.run("scancel", "--batch", "--signal=USR1", job)
        wait_for("the job's return to the queue", lambda: cluster.get_state(job).get("Restarts") == "1")
        assert count_steps() < NUM_STEPS, "the job was stopped before its end"
        # SLURM waits two minutes before it starts a job again. In the second in which the job ended, a machine refuses
        # it: its credential was withdrawn then, and SLURM compares whole seconds.
        ended = time.time()
        cluster.wait(lambda: time.time() > ended + 2, describe)
        wait_for("the end of its processes", lambda: cluster.get_state(job)["JobState"] in ("PENDING", "RUNNING"))
        if cluster.get_state(job)["JobState"] == "PENDING":
            cluster.run("scontrol", "update", f"job={job}", "StartTime=now")
        wait_for("the last step", lambda: count_steps() >= NUM_STEPS or has_ended())
        wait_for("its end", has_ended)
        assert cluster.get_state(job)["JobState"] == "COMPLETED", describe()
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == [*range(1, NUM_STEPS + 1)]
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
    nodes = "".join(log.read_text() for log in (tmp_path / "run" / "logs").glob(f"slurm-{job}-*.log"))
    assert (
        "2; this is number 1, by SLURM (SLURM_STEP_NUM_NODES, SLURM_NODEID, SLURM_STEP_NODELIST); they meet at "
        in nodes
    )
