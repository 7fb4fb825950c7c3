"""`ulysses train`: validate, prepare, launch, and say how it ended."""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ulysses_cli.commands.options import or_exit
from ulysses_cli.plan.exit_codes import DONE, FAILED, USAGE

if TYPE_CHECKING:
    from ulysses_cli.launch.launcher import Outcome
    from ulysses_cli.launch.nodes import Nodes
    from ulysses_cli.launch.start_lock import NewLock
    from ulysses_cli.plan.recipe.loader import Loaded
    from ulysses_cli.plan.recipe.recipe import Recipe
    from ulysses_cli.plan.resolved import Resolved
    from ulysses_cli.validate import Validated


def train(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE [KEY=VALUE ...] [-- LAUNCHER ARGS]", help="a recipe file, and settings laid over it"
        ),
    ],
    num_processes: Annotated[
        int | None, typer.Option(min=1, max=1 << 20, help="processes of the run; left out: the recipe's own product")
    ] = None,
    resume: Annotated[
        str | None, typer.Option(help="a checkpoint folder, or `auto` for the newest valid one in output_dir")
    ] = None,
    resume_anyway: Annotated[
        bool, typer.Option("--resume-anyway", help="resume although model, data or lengths have changed")
    ] = False,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite", help="start anew; an earlier run's results in output_dir go once the new model stands"
        ),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="everything but the steps")] = False,
    nnodes: Annotated[int | None, typer.Option(min=1, help="machines of the run [NNODES]")] = None,
    node_rank: Annotated[int | None, typer.Option(min=0, help="which of them this is [NODE_RANK]")] = None,
    master_addr: Annotated[str | None, typer.Option(help="where machines meet [MASTER_ADDR]")] = None,
    master_port: Annotated[int | None, typer.Option(min=1, max=65535, help="[MASTER_PORT], 29400")] = None,
) -> None:
    """Fine-tune a model as a recipe says, and leave a Hugging Face folder in output_dir/model.

    One process per GPU; with run.device: cpu, one CPU process per rank. A first Ctrl-C or SIGTERM stops after the
    present step, with a checkpoint, exit code 0; a second one stops at once, exit code 130 or 143. While the model is
    loading there is nothing to save, and the first one stops at once. The hub is asked for a model whose shape is not
    known here.

    Machines of one run share a key: ULYSSES_RUN_KEY, or a file in run.output_dir on a disk that all of them see. One
    with another key is refused.

    --resume goes on from a checkpoint with the rows and losses of a run that was never stopped. What may change then:
    train.max_steps and train.num_train_epochs (a longer run; the learning rate follows the longer schedule from there
    on), model.attn_implementation, model.trust_remote_code, data.store_dir, data.num_workers, data.pad_to_multiple_of,
    train.gradient_accumulation_steps and train.per_device_train_batch_size (if rows per step stay the same), and all of
    parallel, memory, deepspeed and run (but run.seed). Any other change needs --resume-anyway.

    \b
    Examples:
      ulysses train recipes/tiny-cpu.yaml
      ulysses train my.yaml train.max_steps=100 parallel.sp_size=8
      ulysses train my.yaml --resume auto
      ulysses train my.yaml --resume auto train.max_steps=2000
      ulysses train my.yaml --nnodes 2 --node-rank 0 --master-addr gpu01
      ulysses train my.yaml --dry-run parallel.dp_shard_size=8
    """
    extra = sys.argv[sys.argv.index("--") + 1 :] if "--" in sys.argv else []
    request = Request(resume_anyway, overwrite, dry_run, tuple(extra))
    valid = _validate(words[: len(words) - len(extra)], resume, num_processes, starts_anew=overwrite)
    machine = Machine(nnodes, node_rank, master_addr, master_port)
    place = _take_place(valid, machine, request)
    rows = _prepare_rows(valid)
    outcome = _launch(valid, place, rows, request)
    raise typer.Exit(outcome.exit_code)


@dataclass(frozen=True)
class Request:
    """What the command line asks for beside the recipe."""

    resume_anyway: bool
    overwrite: bool
    dry_run: bool
    launcher_args: tuple[str, ...]


@dataclass(frozen=True)
class Machine:
    """Which machine of the run this is, as far as options say it."""

    nnodes: int | None
    node_rank: int | None
    master_addr: str | None
    master_port: int | None


@dataclass(frozen=True)
class ValidRecipe:
    """A recipe that passed its checks, and the words that gave it."""

    file: str
    overrides: list[str]
    result: Validated
    loaded: Loaded
    resolved: Resolved

    @property
    def recipe(self) -> Recipe:
        return self.loaded.recipe

    @property
    def run_dir(self) -> Path:
        return Path(os.path.expanduser(self.recipe.run.output_dir))


@dataclass(frozen=True)
class RunPlace:
    """Where a run takes place: this machine among the run's, and the run's locked folder."""

    nodes: Nodes
    lock: NewLock
    starts_anew: bool


def _validate(words: list[str], resume: str | None, num_processes: int | None, *, starts_anew: bool) -> ValidRecipe:
    from ulysses_cli import validate
    from ulysses_cli.report import printing

    files, overrides = validate.split_words(words)
    if len(files) != 1:
        printing.print_problems([validate.no_recipe(words) if not files else validate.several_recipes(files)])
        raise typer.Exit(USAGE)
    if resume:
        overrides = [*overrides, f"run.resume_from_checkpoint={json.dumps(resume)}"]
    result = validate.validate_recipe(files[0], overrides, num_processes, online=True, starts_anew=starts_anew)
    if result.problems or result.loaded is None or result.resolved is None:
        printing.print_problems(result.problems)
        raise typer.Exit(USAGE)
    return ValidRecipe(files[0], overrides, result, result.loaded, result.resolved)


def _take_place(valid: ValidRecipe, machine: Machine, request: Request) -> RunPlace:
    """Finds this machine's part, locks the run's folder, and looks for what would stop the run later."""
    from ulysses_cli.launch import preflight
    from ulysses_cli.launch.nodes import find_nodes
    from ulysses_cli.launch.results import check_run_dir
    from ulysses_cli.launch.start_lock import lock_run
    from ulysses_cli.report import printing, run_end

    recipe, world_size = valid.recipe, valid.resolved.layout.world_size
    nodes = or_exit(lambda: find_nodes(world_size, os.environ, **vars(machine)))
    printing.print_message(run_end.format_start(valid.result, nodes.count))
    lock = or_exit(lambda: lock_run(valid.run_dir, nodes.rank, recipe.model_dump(mode="json")))
    starts_anew = not recipe.run.resume_from_checkpoint and not request.dry_run and nodes.rank == 0
    inputs = [path for path in (recipe.model.name_or_path, *(each.path for each in recipe.data.datasets)) if path]
    if starts_anew:
        or_exit(lambda: check_run_dir(valid.run_dir, inputs, overwrite=request.overwrite))
    obstacles = preflight.find_obstacles(
        valid.loaded,
        processes_here=nodes.processes_here,
        resumes_anyway=request.resume_anyway,
        is_rehearsal=request.dry_run,
    )
    if obstacles:
        printing.print_problems(obstacles)
        raise typer.Exit(USAGE)
    return RunPlace(nodes, lock, starts_anew)


def _prepare_rows(valid: ValidRecipe) -> Path:
    """-> the prepared rows, whose tokens the model knows."""
    from ulysses_cli.commands.prepare import prepare_recipe
    from ulysses_cli.report import printing, run_end

    data = prepare_recipe(valid.file, valid.overrides)
    if data.exit_code != DONE:
        raise typer.Exit(data.exit_code)
    vocabulary = valid.result.shape.vocab_size if valid.result.shape else 0
    outside = [source for source in data.report["sources"] if source["max_id"] >= vocabulary]
    if outside:
        printing.print_problems([run_end.explain_tokens(valid.loaded, outside[0], vocabulary)])
        raise typer.Exit(USAGE)
    return Path(data.report["path"])


def _launch(valid: ValidRecipe, place: RunPlace, rows: Path, request: Request) -> Outcome:
    """Starts the ranks, waits for them, and says how the run ended."""
    from ulysses_cli.launch import launcher
    from ulysses_cli.launch.meeting import open_meeting
    from ulysses_cli.launch.nodes import Nodes
    from ulysses_cli.launch.results import set_results_aside

    run, nodes, device = valid.recipe.run, place.nodes, valid.recipe.run.device
    rank_args = ["--recipe", valid.file, "--data", str(rows), *(f"--set={text}" for text in valid.overrides)]
    rank_args += [f"--resume={run.resume_from_checkpoint}"] if run.resume_from_checkpoint else []
    rank_args += ["--resume-anyway"] if request.resume_anyway else []
    if request.dry_run:
        rank_args.append("--dry-run")
        if valid.resolved.layout.world_size > launcher.count_places(device):
            rank_args.append("--pretend")
            nodes, device = Nodes(), "cpu"
    with ExitStack() as stack:
        meeting = or_exit(lambda: stack.enter_context(open_meeting(nodes, valid.run_dir, os.environ)))
        aside = set_results_aside(valid.run_dir) if place.starts_anew else None
        launcher_args = launcher.make_launcher_args(nodes, run.max_restarts, meeting, request.launcher_args)
        environ = launcher.make_environment(os.environ, device, nodes.processes_here, meeting)
        outcome = launcher.launch(launcher_args, rank_args, environ, valid.run_dir / "logs", place.lock)
    _report_end(valid.run_dir, outcome, aside, is_rehearsal=request.dry_run)
    return outcome


def _report_end(run_dir: Path, outcome: Outcome, aside: Path | None, *, is_rehearsal: bool) -> None:
    """An earlier run's results go once the new model stands, and come back where there is none."""
    from ulysses_cli.launch import results
    from ulysses_cli.report import printing, run_end

    is_whole = outcome.exit_code == DONE and not is_rehearsal and results.is_model_of_newest(run_dir)
    if is_whole:
        results.drop_replaced_results(run_dir)
    elif aside is not None:
        is_back = results.restore_results(run_dir, aside)
        kept = "are back in their place" if is_back else f"are kept in {aside} until a new model stands"
        printing.print_message(f"the earlier run's results {kept}")
    if outcome.exit_code > FAILED + USAGE:
        printing.print_message(run_end.format_interruption(outcome.failure, results.find_newest_checkpoint(run_dir)))
    elif outcome.exit_code != DONE:
        printing.print_message(run_end.format_failure(outcome.failure, run_dir / "logs"))
    elif is_whole:
        printing.print_data(str(run_dir / "model"))
