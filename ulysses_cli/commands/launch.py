"""`ulysses launch slurm | k8s | sky`: writes the file that submits a recipe to a cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ulysses_cli.commands.options import Format, OnlineOption, RecipeWords, end_with, or_exit
from ulysses_cli.plan.problem import USAGE

if TYPE_CHECKING:
    from ulysses_cli.plan.hardware import Gpu
    from ulysses_cli.run.jobs import ClusterJob
    from ulysses_cli.validate import Validated

MAX_RESTARTS = 10
MAX_HOURS = 24 * 366
GpuOption = Annotated[
    str | None, typer.Option("--gpu", help="kind of GPU, such as h200  [default: run.gpu, or h100-80gb where it fits]")
]
PerNodeOption = Annotated[
    int | None, typer.Option("--gpus-per-node", min=1, help="GPUs of a machine  [default: the kind's usual machine]")
]
OutOption = Annotated[Path | None, typer.Option("--out", "-o", help="the file to write  [default: beside the recipe]")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="print the file to stdout and write nothing")]
ForceOption = Annotated[bool, typer.Option("--force", help="overwrite an existing file")]


def slurm(
    words: RecipeWords,
    gpu: GpuOption = None,
    gpus_per_node: PerNodeOption = None,
    hours: Annotated[
        float | None, typer.Option(min=0.02, max=MAX_HOURS, help="time of one job; it goes back into the queue")
    ] = None,
    partition: Annotated[str | None, typer.Option(help="sbatch's --partition")] = None,
    account: Annotated[str | None, typer.Option(help="sbatch's --account")] = None,
    out: OutOption = None,
    dry_run: DryRunOption = False,
    force: ForceOption = False,
    online: OnlineOption = False,
) -> None:
    """Write a batch script for SLURM. The job saves a checkpoint before its time is over and goes back into the queue
    until all steps are done.

    \b
    Examples:
      ulysses launch slurm my.yaml --gpu h100 --hours 24 --partition gpu
      ulysses launch slurm my.yaml parallel.dp_shard_size=4 --dry-run
    """
    from ulysses_cli.run.jobs import write_slurm

    settings = {name: value for name, value in (("partition", partition), ("account", account)) if value is not None}
    job, _ = _make_job(words, gpu, gpus_per_node, hours, online=online)
    target = Target(out or job.recipe.with_suffix(".sbatch"), dry_run, force)
    target.write(job, lambda file: write_slurm(job, file, settings))


def k8s(
    words: RecipeWords,
    image: Annotated[str, typer.Option(help="container image with ulysses; docker/Dockerfile builds one")],
    claim: Annotated[
        str | None,
        typer.Option(help="volume claim with the data; the run writes there, too  [not needed with checkpoint_uri]"),
    ] = None,
    gpu: GpuOption = None,
    gpus_per_node: PerNodeOption = None,
    queue: Annotated[str | None, typer.Option(help="Kueue's local queue")] = None,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="how often all pods start again after a failure or an early stop")
    ] = MAX_RESTARTS,
    out: OutOption = None,
    dry_run: DryRunOption = False,
    force: ForceOption = False,
    online: OnlineOption = False,
) -> None:
    """Write objects for Kubeflow Trainer v2 (2.2 or 2.3): the recipe, a TrainingRuntime and a TrainJob.

    \b
    Examples:
      ulysses launch k8s my.yaml --image me/ulysses:1 --claim data --gpu h100
      ulysses launch k8s my.yaml --image me/ulysses:1 --claim data --queue team-a --dry-run
      ulysses launch k8s my.yaml run.checkpoint_uri=s3://mine/run --image me/ulysses:1 --max-restarts 100
    """
    from ulysses_cli.run.kubernetes import write_kubernetes

    job, text = _make_job(words, gpu, gpus_per_node, max_restarts=max_restarts, online=online)
    target = Target(out or job.recipe.with_suffix(".k8s.yaml"), dry_run, force)
    target.write(job, lambda file: write_kubernetes(job, text, file, image=image, claim=claim, queue=queue))


def sky(
    words: RecipeWords,
    image: Annotated[str, typer.Option(help="container image with ulysses; docker/Dockerfile builds one")],
    bucket: Annotated[str | None, typer.Option(help="where one machine keeps the run, such as s3://mine/runs")] = None,
    volume: Annotated[str | None, typer.Option(help="a SkyPilot volume that all machines can write")] = None,
    gpu: GpuOption = None,
    gpus_per_node: PerNodeOption = None,
    spot: Annotated[bool, typer.Option("--spot", help="take machines that may be taken away")] = False,
    out: OutOption = None,
    dry_run: DryRunOption = False,
    force: ForceOption = False,
    online: OnlineOption = False,
) -> None:
    """Write a task for SkyPilot 0.14, to run as a managed job.

    \b
    Examples:
      ulysses launch sky my.yaml --image me/ulysses:1 --bucket s3://mine/runs --gpu h100 --spot
      ulysses launch sky my.yaml --image me/ulysses:1 --volume shared --dry-run
    """
    from ulysses_cli.run.jobs import write_skypilot

    job, _ = _make_job(words, gpu, gpus_per_node, online=online)
    target = Target(out or job.recipe.with_suffix(".sky.yaml"), dry_run, force)
    target.write(job, lambda file: write_skypilot(job, file, image=image, bucket=bucket, volume=volume, spot=spot))


@dataclass(frozen=True)
class Target:
    """Where the text of a job goes."""

    file: Path
    dry_run: bool
    force: bool

    def write(self, job: ClusterJob, make: Callable[[str], str]) -> None:
        from ulysses_cli.report import printing

        or_exit(self._check_name)
        text = or_exit(lambda: make(str(self.file)))
        if self.dry_run:
            printing.print_data(text.rstrip("\n"))
            return
        or_exit(lambda: self._write_file(text, job.recipe))
        printing.print_message(f"wrote {self.file}: {job.describe()}")

    def _check_name(self) -> None:
        from ulysses_cli.plan.recipe.sections import find_control
        from ulysses_cli.run.environments import refuse

        if odd := find_control(str(self.file)):
            raise refuse(f"--out: the file's name holds the control character {odd!r}", "name another file")

    def _write_file(self, text: str, recipe: Path) -> None:
        from ulysses_cli.plan.files import write_whole
        from ulysses_cli.run.environments import refuse

        if self.file.is_dir():
            raise refuse(f"{self.file} is a folder", "name a file with --out")
        if self.file.exists() and self.file.samefile(recipe):
            raise refuse(f"{self.file} is the recipe", "name another file with --out")
        if self.file.exists() and not self.force:
            raise refuse(f"{self.file} exists", "add --force to overwrite it, or name another file with --out")
        try:
            write_whole(self.file, text)
        except OSError as error:
            raise refuse(f"{self.file} cannot be written: {error.strerror}", "name another file with --out") from None


def _make_job(
    words: list[str],
    gpu: str | None,
    gpus_per_node: int | None,
    hours: float | None = None,
    *,
    max_restarts: int = MAX_RESTARTS,
    online: bool,
) -> tuple[ClusterJob, str]:
    """Returns the job of a valid recipe, and the recipe's text."""
    from ulysses_cli.plan.problem import Problem
    from ulysses_cli.plan.recipe.loader import load_whole_text
    from ulysses_cli.report import printing
    from ulysses_cli.run.jobs import make_job
    from ulysses_cli.validate import no_recipe, several_recipes, split_words, validate_recipe

    files, overrides = split_words(words)
    if len(files) != 1:
        printing.print_problems([no_recipe(words) if not files else several_recipes(files)])
        raise typer.Exit(USAGE)
    valid = validate_recipe(files[0], overrides, online=online)
    if valid.problems or valid.loaded is None or valid.resolved is None:
        end_with(valid.problems, Format.text)
    recipe, world_size, file = valid.loaded.recipe, valid.resolved.layout.world_size, Path(files[0])
    if recipe.run.device == "cpu" and gpus_per_node is None:
        hint = (
            "leave it out to train on GPUs, start it on this machine with ulysses train, or give --gpus-per-node, as "
            "many ranks as a machine shall have"
        )
        message = "cpu needs no GPU, and a job is written for machines with GPUs"
        end_with([Problem("run.device", message, hint, valid.loaded.locate("run.device"))], Format.text)
    kind = or_exit(lambda: _choose_gpu(gpu, valid))
    settings: dict[str, Any] = {"gpus_per_node": gpus_per_node, "hours": hours, "max_restarts": max_restarts}
    job = or_exit(lambda: make_job(recipe, file, tuple(overrides), world_size, kind, **settings))
    return job, load_whole_text(file)


def _choose_gpu(name: str | None, valid: Validated) -> Gpu:
    """Returns the named kind, or the recipe's own. Without either: the kind that `estimate-memory` assumes, if the
    recipe fits there for sure, else of NVIDIA's kinds that on which a token costs least."""
    from ulysses_cli.commands.estimate_memory import DEFAULT_GPU, find_own_gpu
    from ulysses_cli.hardware_table import load_hardware
    from ulysses_cli.plan.hardware import list_untested
    from ulysses_cli.plan.planner.estimate import find_rate
    from ulysses_cli.report import printing
    from ulysses_cli.run.environments import refuse

    table = load_hardware()
    own = find_own_gpu(valid.loaded, table) if valid.loaded is not None else None
    gpu = table.get_gpu(name) if name is not None else own
    if gpu is not None:
        for note in list_untested([gpu]):
            printing.print_message(note)
        return gpu
    if valid.loaded is None or valid.shape is None:
        raise refuse("the model's shape is unknown, so no GPU can be chosen", "name one with --gpu, or add --online")
    recipe, shape = valid.loaded.recipe, valid.shape
    usual = table.get_gpu(DEFAULT_GPU)
    if find_rate(recipe, shape, usual):
        printing.print_message(f"the job takes {usual.key}, on which it fits; --gpu or run.gpu names another kind")
        return usual
    kinds = [gpu for gpu in table.gpus.values() if not gpu.is_amd]
    usd = {
        gpu.key: gpu.usd_middle / rate for gpu in kinds if gpu.usd_middle and (rate := find_rate(recipe, shape, gpu))
    }
    if not usd:
        hint = "ulysses validate-config --gpu KIND says what is short"
        raise refuse("the recipe fits no kind of NVIDIA's GPUs that has a price", hint)
    best = table.get_gpu(min(usd, key=lambda key: usd[key]))
    printing.print_message(
        f"the job takes {best.key}: it does not fit {usual.key}, and of NVIDIA's kinds that it fits, a token costs "
        "least on this; --gpu or run.gpu names another kind"
    )
    return best
