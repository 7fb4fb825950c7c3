"""Checks what a valid recipe needs from this machine, before data is prepared and ranks are started: packages, GPUs,
complete weight files, a checkpoint that the recipe can resume from.

Imports nothing heavy; ranks check again in more detail."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from ulysses_cli.plan.models.model_files import find_weight_problem
from ulysses_cli.plan.problem import Problem, Problems
from ulysses_cli.plan.recipe.changes import list_start_changes, shorten_list
from ulysses_cli.plan.recipe.loader import Loaded
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.plan.resolved import make_layout
from ulysses_cli.plan.rules.merged_models import find_problems, parse_parts
from ulysses_cli.plan.units import format_count
from ulysses_cli.run.bucket import Bucket, BucketError
from ulysses_cli.run.checkpoints import (
    MANIFEST,
    NAME,
    find_damage,
    find_run_dir,
    get_folder,
    list_checkpoints,
    load_state,
)
from ulysses_cli.run.downloads import explain_access, find_missing_package
from ulysses_cli.run.host import HINT, find_file_shortage, find_write_problem
from ulysses_cli.run.launcher import count_rank_slots
from ulysses_cli.run.remote_checkpoints import list_remote_steps, try_out
from ulysses_cli.run.resume import ResumeError, adapt

OTHER_GPUS = ("/dev/kfd", "/dev/dxg")  # of AMD, and of WSL: only torch can count them


def find_obstacles(
    loaded: Loaded,
    *,
    processes_here: int,
    resumes_anyway: bool = False,
    is_dry_run: bool = False,
    starts_anew: bool = False,
) -> list[Problem]:
    """All problems at once, each with its place in the recipe. A dry run may need more GPUs than this machine has.
    `starts_anew`: this is the first machine of a run that neither resumes nor overwrites."""
    recipe = loaded.recipe
    problems = [*check_trackers(recipe), *check_weight_files(recipe)]
    if not is_dry_run:
        problems += check_gpus(recipe, processes_here)
        problems += check_bucket(recipe, starts_anew=starts_anew)
    problems += check_builds(recipe)
    if (shortage := find_file_shortage(make_layout(recipe).world_size)) is not None:
        problems.append(shortage)
    problems += check_newest_checkpoint(recipe, anyway=resumes_anyway)
    problems += check_start_weights(recipe)
    return [replace(problem, where=loaded.locate(problem.key)) if problem.key else problem for problem in problems]


def check_trackers(recipe: Recipe) -> Problems:
    """The packages of the trackers in run.report_to are installed."""
    for name in recipe.run.report_to:
        if find_spec(name) is None:
            yield Problem(
                "run.report_to",
                f"{name} is not installed",
                f"pip install ulysses-cli[{name}], or leave it out: metrics.jsonl and `ulysses report` work without it",
            )


def check_gpus(recipe: Recipe, processes_here: int) -> Problems:
    """One GPU for each process of this machine."""
    if recipe.run.device == "cpu" or any(os.path.exists(path) for path in OTHER_GPUS):
        return
    num_gpus = count_rank_slots("cuda")
    if num_gpus < processes_here:
        gpus = format_count(num_gpus, "GPU") if num_gpus else "no GPU"
        yield Problem(
            "run.device",
            f"{format_count(processes_here, 'process')} on this machine, but {gpus}",
            "use fewer processes (parallel section) or more machines (--nnodes); run.device: cpu trains small models "
            "on the CPU; --dry-run tries the layout without GPUs",
        )


def check_builds(recipe: Recipe) -> Problems:
    """A folder to build DeepSpeed's operators in, where the recipe needs one: for CPU ranks, or for offload."""
    offload = {recipe.memory.offload_optimizer, recipe.memory.offload_param}
    if recipe.run.device == "cpu" or offload & {"cpu", "nvme"}:
        yield from check_builds_folder()


def check_builds_folder() -> Problems:
    """This user can write to the folder in which operators are built."""
    if problem := find_write_problem(os.environ):
        yield Problem("", problem, HINT)


def check_weight_files(recipe: Recipe) -> Problems:
    """The weight files of a local model exist, are complete, and have a dtype that can be trained."""
    folder = Path(os.path.expanduser(recipe.model.name_or_path or ""))
    if recipe.model.name_or_path and folder.is_dir() and (problem := find_weight_problem(folder)):
        yield Problem("model.name_or_path", problem, "copy the model's folder again, or name another")


def check_newest_checkpoint(recipe: Recipe, *, anyway: bool) -> Problems:
    """With --resume, the recipe can resume from the newest valid checkpoint, which is the one that ranks will choose.
    With `anyway` only its layout can be wrong. Before a checkpoint refuses the recipe, every byte of it is checked; one
    that accepts the recipe is not read whole."""
    source = recipe.run.resume_from_checkpoint
    if source is None:
        return
    run_dir = Path(os.path.expanduser(recipe.run.output_dir))
    paths = list_checkpoints(run_dir) if source == "auto" else [Path(os.path.expanduser(source))]
    for path in paths:
        if find_damage(path, is_quick=True):
            continue  # ranks skip it and report what is wrong
        state = load_state(path)
        try:
            written, layout = recipe.model_dump(mode="json"), make_layout(recipe)
            adapt(state, written, state["data"], layout, anyway=anyway, report=lambda _: None)
        except ResumeError as error:
            if find_damage(path):
                continue
            text, *details, hint = str(error).split("\n")
            yield Problem("run.resume_from_checkpoint", text, hint, details=tuple(map(str.strip, details)))
        return


def check_start_weights(recipe: Recipe) -> Problems:
    """run.start_from names a finished checkpoint, or a run with one, and its weights are those of the recipe's model.
    Ranks read every byte of them later."""
    source, key = recipe.run.start_from, "run.start_from"
    if source is None or recipe.run.resume_from_checkpoint is not None:
        return
    path = Path(os.path.expanduser(source))
    run_dir = find_run_dir(path)
    checkpoints = [path] if run_dir is None else list_checkpoints(run_dir)
    if run_dir is None and not (path / MANIFEST).is_file():
        is_model = (path / "config.json").is_file()
        hint = "name it as model.name_or_path, which starts from its weights" if is_model else "name a run's output_dir"
        yield Problem(key, f"{source} {'holds no checkpoint' if path.is_dir() else 'is not a folder'}", hint)
        return
    damage = "the run has not written one"
    for checkpoint in checkpoints:
        if damage := find_damage(checkpoint, is_quick=True):
            continue  # ranks skip it and report what is wrong
        changes = list_start_changes(load_state(checkpoint)["recipe"], recipe.model_dump(mode="json"))
        if changes:
            what = f"the weights of {checkpoint} are not those of this recipe's model:"
            hint = "name the same model and the same adapters as that run"
            yield Problem(key, what, hint, details=shorten_list(changes))
        return
    yield Problem(key, f"{source} has no valid checkpoint: {damage}", "name another run or checkpoint")


def find_named_damage(recipe: Recipe) -> str:
    """What is wrong with the checkpoint that --resume names, or ''. Ranks read every byte of it later."""
    source = recipe.run.resume_from_checkpoint
    path = None if source in (None, "auto") else Path(os.path.expanduser(str(source)))
    damage = "" if path is None else find_damage(path, is_quick=True)
    return f"{path} cannot be resumed from: {damage}" if damage else ""


def check_bucket(recipe: Recipe, *, starts_anew: bool) -> Problems:
    """run.checkpoint_uri can be written, read and deleted from, and a new run finds no checkpoints there."""
    key, address = "run.checkpoint_uri", recipe.run.checkpoint_uri
    if address is None:
        return
    if (missing := find_missing_package(key, address)) is not None:
        yield missing
        return
    hint = explain_access(address)
    try:
        bucket = Bucket(address, pauses=(1.0,))
        if problem := try_out(bucket):
            yield Problem(key, f"{address}: {problem}", hint)
        elif starts_anew and (steps := list_remote_steps(bucket)):
            text = f"{address} holds checkpoints of an earlier run, the newest of step {steps[0]}"
            yield Problem(key, text, "go on from it with --resume auto, name another address, or use --overwrite")
    except (BucketError, OSError) as error:
        yield Problem(key, str(error), hint)


def check_merge(words: Sequence[str], last: int | None, to: Path) -> Problems:
    """MODEL is several models with weights, or with --last a run; --to does not exist yet."""
    if last is None:
        yield from find_problems(parse_parts(words))
        yield from _check_target(to)
    elif last < 2:
        yield Problem("--last", f"{last} is no number of checkpoints to merge", "write 2 or more")
    elif len(words) > 1:
        yield Problem(
            "--last", f"takes one run, not {len(words)} models", "name a run's output_dir, or leave --last out"
        )
    else:
        yield from check_export(Path(words[0]), to)


def check_export(checkpoint: Path, to: Path) -> Problems:
    """CHECKPOINT is a checkpoint, or a run that has some; --to does not exist yet."""
    key, hint = "CHECKPOINT", "name a run's output_dir, or one of its checkpoints/step-N"
    if not checkpoint.exists():
        yield Problem(key, f"{checkpoint} does not exist", _list_steps(checkpoint.parent) or hint)
    elif not checkpoint.is_dir():
        is_recipe = checkpoint.suffix in (".yaml", ".yml")
        yield Problem(key, f"{checkpoint} is {'a recipe' if is_recipe else 'not a folder'}", hint)
    elif (run_dir := find_run_dir(checkpoint)) is not None:
        if not list_checkpoints(run_dir):
            yield Problem(key, f"{checkpoint} holds no checkpoint: the run has not written one", "name another run")
    elif (checkpoint / "run.json").is_file():
        yield Problem(
            key, f"{checkpoint} holds no checkpoint: the run has not written one", "wait, or name another run"
        )
    elif not (checkpoint / MANIFEST).exists() and not NAME.fullmatch(checkpoint.resolve().name):
        is_model = (checkpoint / "config.json").exists()
        what = "is already a model that transformers can load" if is_model else "is neither a checkpoint nor a run"
        yield Problem(key, f"{checkpoint} {what}", hint)
    yield from _check_target(to)


def _check_target(to: Path) -> Problems:
    if to.exists() or to.is_symlink():
        yield Problem("--to", f"{to} already exists", "name a folder that does not exist")


def _list_steps(folder: Path) -> str:
    names = [path.name for path in list_checkpoints(folder.parent)]
    return f"{folder} holds {', '.join(names)}" if names and folder == get_folder(folder.parent) else ""
