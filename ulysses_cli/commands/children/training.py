"""The order of a run, from its recipe to its end: its data, its agent and its ranks are child processes. Prints
messages to stderr, nothing to stdout."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ulysses_cli.plan.problem import DONE, FAILED, USAGE, get_signal_code

if TYPE_CHECKING:
    from ulysses_cli.plan.recipe.loader import Loaded
    from ulysses_cli.plan.recipe.recipe import Recipe, Run
    from ulysses_cli.plan.resolved import Resolved, ResolvedRecipe
    from ulysses_cli.run.folder import NewLock
    from ulysses_cli.run.launcher import Outcome, StepListener
    from ulysses_cli.run.nodes import Nodes
    from ulysses_cli.validate import Validated


@dataclass(frozen=True)
class TrainOptions:
    """Options of the command line that are not settings of the recipe."""

    num_processes: int | None = None
    resume: str | None = None
    resume_anyway: bool = False
    overwrite: bool = False
    dry_run: bool = False
    agent_args: tuple[str, ...] = ()


@dataclass(frozen=True)
class Machine:
    """Which machine of the run this is; None where no option gives it."""

    nnodes: int | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    hostfile: Path | None = None


@dataclass(frozen=True)
class ValidRecipe:
    """A recipe that passed its checks. `plan` goes to the processes that the command starts."""

    result: Validated
    plan: ResolvedRecipe

    @property
    def loaded(self) -> Loaded:
        return self.plan.loaded

    @property
    def resolved(self) -> Resolved:
        return self.plan.resolved

    @property
    def recipe(self) -> Recipe:
        return self.loaded.recipe

    @property
    def run_dir(self) -> Path:
        return Path(os.path.expanduser(self.recipe.run.output_dir))


@dataclass(frozen=True)
class RunPlace:
    """Where the run runs: its machines, and its locked folder."""

    nodes: Nodes
    lock: NewLock
    starts_anew: bool


@dataclass(frozen=True)
class FinishedRun:
    """How a run ended. `model_dir`: its model, if this run completed one on this machine."""

    outcome: Outcome
    run_settings: Run
    run_dir: Path
    model_dir: Path | None


class PreparationError(Exception):
    """The data cannot be prepared, or the named checkpoint is damaged. The problems have been printed."""

    def __init__(self, exit_code: int, messages: Sequence[str]) -> None:
        super().__init__("; ".join(messages) or f"the preparation of the data ended with exit code {exit_code}")
        self.exit_code = exit_code


def run_recipe(
    file: str, overrides: list[str], options: TrainOptions, machine: Machine, listener: StepListener | None = None
) -> FinishedRun:
    """The order of a run, from its recipe to its end. Progress goes to stderr, nothing to stdout. Raises RecipeError
    for what stops the run before its ranks start, and PreparationError."""
    with _telling_interruption():
        valid = _validate(file, overrides, options)
        if valid.recipe.run.push_to_hub and not options.dry_run:
            _check_hub(valid)
    with ExitStack() as stack:
        with _telling_interruption():
            place = _lock_run_dir(valid, machine, options, stack)
        try:
            rows = _prepare_rows(valid)
            outcome, model_dir = _launch(valid, place, rows, options, listener)
        except PreparationError as error:
            _tell_end(valid, place, "failed", str(error), error.exit_code)
            raise
    if model_dir is not None and valid.recipe.run.push_to_hub and place.nodes.rank == 0:
        outcome = _push(valid, outcome)
    if not options.dry_run:
        event, message = _summarize_end(outcome, model_dir)
        _tell_end(valid, place, event, message, outcome.exit_code)
    return FinishedRun(outcome, valid.recipe.run, valid.run_dir, model_dir)


@contextmanager
def _telling_interruption() -> Iterator[None]:
    """While a run begins, which may take minutes of downloads: Ctrl-C and SIGTERM end it with a message."""
    from ulysses_cli.report import printing, recipe

    def stop(number: int, _: object) -> None:
        sys.exit(get_signal_code(number))

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        printing.print_message(recipe.explain_interrupted_start())
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _check_hub(valid: ValidRecipe) -> None:
    """Asks the hub for the account before anything is trained: a refused token is reported in the first minute."""
    from ulysses_cli.commands.children.publishing import HubModels
    from ulysses_cli.report import printing

    HubModels(printing.print_message).complete_name(valid.recipe.run.hub_model_id or valid.run_dir.name)


def _push(valid: ValidRecipe, outcome: Outcome) -> Outcome:
    """Publishes the model. A failure fails the command; the model stays on disk."""
    from ulysses_cli.commands.children.publishing import push_run
    from ulysses_cli.plan.problem import RecipeError
    from ulysses_cli.report import printing

    run = valid.recipe.run
    try:
        _, address = push_run(
            valid.run_dir, run.hub_model_id, is_private=run.hub_private_repo, report=printing.print_message
        )
    except RecipeError as error:
        printing.print_problems(error.problems)
        message = f"the model is complete but not published: run `ulysses push {valid.run_dir}`"
        printing.print_message(message)
        return replace(outcome, exit_code=FAILED, failure={"message": message})
    printing.print_message(f"published {address}")
    return outcome


def _summarize_end(outcome: Outcome, model_dir: Path | None) -> tuple[Literal["done", "stopped", "failed"], str]:
    from ulysses_cli.run.records import has_diverged

    if outcome.stopped_by:
        return "stopped", f"by {outcome.stopped_by}, with a checkpoint"
    if outcome.exit_code != DONE:
        return "failed", str(outcome.failure.get("message") or f"exit code {outcome.exit_code}")
    if model_dir is not None and has_diverged(model_dir.parent / "metrics.jsonl"):
        return "done", f"{model_dir}, but the loss diverged"
    return "done", str(model_dir or "")


def _tell_end(
    valid: ValidRecipe, place: RunPlace, event: Literal["done", "stopped", "failed"], message: str, exit_code: int
) -> None:
    """On the first machine: sends the notifications that the recipe asks for."""
    from ulysses_cli.report import printing
    from ulysses_cli.run.notification import RunEnd, notify
    from ulysses_cli.run.records import note_notification

    run = valid.recipe.run
    if place.nodes.rank or not (run.notify_command or run.notify_webhook):
        return
    known = printing.hide_known(printing.hide_secrets(message))
    end = RunEnd(event, run.run_name or valid.run_dir.name, str(valid.run_dir.absolute()), known, exit_code)
    complaints = notify(end, run.notify_command, run.notify_webhook)
    for complaint in complaints:
        printing.print_message(complaint)
    for name in ("notify_command", "notify_webhook"):
        if getattr(run, name):
            failed = next((complaint for complaint in complaints if complaint.startswith(f"run.{name}")), "")
            note_notification(valid.run_dir, "run's end", f"run.{name}", failed or f"told: {event}")


def _validate(file: str, overrides: list[str], options: TrainOptions) -> ValidRecipe:
    from ulysses_cli.plan.problem import Problem, RecipeError
    from ulysses_cli.plan.resolved import ResolvedRecipe
    from ulysses_cli.report import printing
    from ulysses_cli.run.downloads import bring_inputs
    from ulysses_cli.validate import validate_recipe

    if options.resume and options.overwrite:
        hint = "keep --resume to go on from a checkpoint, or --overwrite to start a new run in the same folder"
        raise RecipeError([Problem("--overwrite", f"contradicts --resume {options.resume}", hint)])
    if options.resume is not None and not options.resume.strip():
        hint = "write --resume auto or a checkpoint's folder; an unset variable of the shell is empty"
        raise RecipeError([Problem("--resume", "names no checkpoint", hint)])
    if options.resume:
        overrides = [*overrides, f"run.resume_from_checkpoint={json.dumps(options.resume)}"]
    bring_inputs(file, overrides, printing.print_message)
    result = validate_recipe(file, overrides, options.num_processes, online=True, starts_anew=options.overwrite)
    if result.problems or result.loaded is None or result.resolved is None:
        raise RecipeError(result.problems)
    if options.resume_anyway and not result.loaded.recipe.run.resume_from_checkpoint:
        raise RecipeError(
            [Problem("--resume-anyway", "is not used without --resume", "add --resume auto, or leave it out")]
        )
    return ValidRecipe(result, ResolvedRecipe(result.loaded, result.resolved))


def _lock_run_dir(valid: ValidRecipe, machine: Machine, options: TrainOptions, stack: ExitStack) -> RunPlace:
    """Finds this machine's part in the run, locks the run's folder, and reports what would stop the run later."""
    from ulysses_cli.plan.problem import Problem, RecipeError
    from ulysses_cli.report import printing
    from ulysses_cli.report import recipe as run_end
    from ulysses_cli.run import preflight
    from ulysses_cli.run.downloads import bring_checkpoint
    from ulysses_cli.run.folder import check_continued_dir, check_run_dir, lock_run
    from ulysses_cli.run.nodes import find_nodes
    from ulysses_cli.run.notification import find_unset_webhook

    recipe, world_size = valid.recipe, valid.resolved.layout.world_size
    nodes = find_nodes(world_size, os.environ, **vars(machine))
    machines = nodes.describe() if nodes.count > 1 or options.dry_run else ""
    printing.print_message(run_end.format_start(valid.result, machines, nodes.count))
    lock = lock_run(valid.run_dir, nodes.rank, recipe.model_dump(mode="json"))
    stack.callback(os.close, lock.handle)
    if not lock.is_locked:
        printing.print_message(run_end.format_missing_lock(valid.run_dir))
    starts_anew = not recipe.run.resume_from_checkpoint and not options.dry_run and nodes.rank == 0
    inputs = [path for path in (recipe.model.name_or_path, *(dataset.path for dataset in recipe.data.datasets)) if path]
    if starts_anew:
        check_run_dir(valid.run_dir, inputs, overwrite=options.overwrite)
    if recipe.run.resume_from_checkpoint == "auto" and not options.dry_run and nodes.rank == 0:
        bring_checkpoint(valid.loaded, valid.run_dir, printing.print_message)
        check_continued_dir(valid.run_dir)
    obstacles = preflight.find_obstacles(
        valid.loaded,
        processes_here=nodes.processes_here,
        resumes_anyway=options.resume_anyway,
        is_dry_run=options.dry_run,
        starts_anew=starts_anew and not options.overwrite,
    )
    obstacles += [] if nodes.rank else find_unset_webhook(valid.loaded, os.environ)
    if obstacles:
        raise RecipeError(obstacles)
    if not options.dry_run:
        _check_weights_access(valid)
    if nodes.rank == 0 and (damage := preflight.find_named_damage(recipe)):
        key, hint = "run.resume_from_checkpoint", "--resume auto takes the newest valid one"
        printing.print_problems([Problem(key, damage, hint, valid.loaded.locate(key))])
        raise PreparationError(FAILED, [damage])
    return RunPlace(nodes, lock, starts_anew)


def _check_weights_access(valid: ValidRecipe) -> None:
    """Asks the hub for a model that is not on this machine before data is prepared."""
    from ulysses_cli.hub import check_weights_access
    from ulysses_cli.plan.problem import RecipeError

    try:
        check_weights_access(valid.recipe)
    except RecipeError as error:
        raise RecipeError(
            replace(problem, where=valid.loaded.locate(problem.key)) for problem in error.problems
        ) from None


def _prepare_rows(valid: ValidRecipe) -> Path:
    """Prepares the data. Returns the folder of rows; all their tokens are in the model's vocabulary."""
    from ulysses_cli.commands.prepare import prepare_recipe
    from ulysses_cli.plan.problem import RecipeError
    from ulysses_cli.report import printing, recipe

    data = prepare_recipe(valid.plan)
    if data.exit_code != DONE:
        raise PreparationError(data.exit_code, [str(problem["message"]) for problem in data.report.get("problems", ())])
    for note in data.report["notes"]:
        printing.print_message(f"note: {note}")
    vocabulary = valid.result.shape.vocab_size if valid.result.shape else 0
    outside = [source for source in data.report["sources"] if source["max_id"] >= vocabulary]
    if outside:
        raise RecipeError([recipe.explain_tokens(valid.loaded, outside[0], vocabulary)])
    return Path(data.report["path"])


def _launch(
    valid: ValidRecipe, place: RunPlace, rows: Path, options: TrainOptions, listener: StepListener | None
) -> tuple[Outcome, Path | None]:
    """Starts the ranks, waits for them, and reports how the run ended. Returns the outcome and the complete model's
    folder."""
    from ulysses_cli.report import printing
    from ulysses_cli.run import launcher
    from ulysses_cli.run.folder import set_results_aside
    from ulysses_cli.run.host import watch_builds
    from ulysses_cli.run.nodes import Nodes, open_rendezvous
    from ulysses_cli.run.records import MachineLogs

    run, nodes, device = valid.recipe.run, place.nodes, valid.recipe.run.device
    rank_args = ["--data", str(rows)]
    rank_args += [f"--resume={run.resume_from_checkpoint}"] if run.resume_from_checkpoint else []
    rank_args += ["--resume-anyway"] if options.resume_anyway else []
    if options.dry_run:
        rank_args.append("--dry-run")
        if valid.resolved.layout.world_size > launcher.count_rank_slots(device):
            rank_args.append("--pretend")
            nodes, device = Nodes(), "cpu"
    with ExitStack() as stack:
        meeting = open_rendezvous(nodes, valid.run_dir, os.environ, run.join_timeout, run.step_timeout)
        rendezvous = stack.enter_context(meeting)
        aside = set_results_aside(valid.run_dir) if place.starts_anew else None
        agent_args = launcher.make_agent_args(nodes, run.max_restarts, rendezvous, options.agent_args)
        environ = launcher.make_environment(os.environ, device, nodes.processes_here, rendezvous)
        logs = MachineLogs(valid.run_dir / "logs", nodes.rank, nodes.count, nodes.processes_here)
        stack.enter_context(watch_builds(environ, printing.print_message))
        plan = valid.plan.dump()
        if listener is None:
            outcome = launcher.launch(agent_args, plan, rank_args, environ, logs, place.lock)
        else:
            environ |= listener.environ
            outcome = launcher.launch(agent_args, plan, rank_args, environ, logs, place.lock, wait=listener.follow)
    return outcome, _report_end(valid.run_dir, outcome, aside, is_dry_run=options.dry_run)


def _report_end(run_dir: Path, outcome: Outcome, aside: Path | None, *, is_dry_run: bool) -> Path | None:
    """Deletes an earlier run's results when the new model is complete, or restores them; then reports the end. Returns
    the complete model's folder."""
    from ulysses_cli.report import printing, recipe
    from ulysses_cli.run import folder
    from ulysses_cli.run.checkpoints import find_newest_valid

    is_complete = outcome.exit_code == DONE and not is_dry_run and folder.is_model_of_newest(run_dir)
    if is_complete:
        folder.drop_replaced_results(run_dir)
    elif aside is not None:
        is_restored = folder.restore_results(run_dir, aside)
        where = "are restored" if is_restored else f"are kept in {aside} until a new model is complete"
        printing.print_message(f"the earlier run's results {where}")
    checkpoint = find_newest_valid(run_dir, lambda _: None, is_quick=True)
    if outcome.exit_code > FAILED + USAGE:
        printing.print_message(recipe.format_interruption(outcome.failure, checkpoint))
    elif outcome.exit_code != DONE:
        printing.print_message(recipe.format_failure(outcome.failure, run_dir / "logs"))
        if outcome.exit_code == FAILED and checkpoint is not None:
            printing.print_message(recipe.explain_resume(checkpoint))
    elif outcome.stopped_by and checkpoint is not None:
        printing.print_message(recipe.explain_resume(checkpoint, outcome.stopped_by))
    return run_dir / "model" if is_complete else None
