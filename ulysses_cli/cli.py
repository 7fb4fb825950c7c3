"""The Typer app: the list of commands, and how errors that no command handles end the program."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from ulysses_cli import __version__
from ulysses_cli.commands import (
    bench,
    config_schema,
    doctor,
    estimate_memory,
    evaluate,
    export,
    init,
    launch,
    merge,
    models,
    plan,
    prepare,
    push,
    recipes,
    report,
    sample,
    train,
    validate_config,
    verify,
)
from ulysses_cli.commands.options import EXIT_CODES, Command, get_cache_folder
from ulysses_cli.plan.problem import DONE, FAILED, USAGE, get_signal_code

app = typer.Typer(
    name="ulysses",
    help="Fine-tune language models on very long sequences.",
    epilog="\b\n" + EXIT_CODES,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
launch_app = typer.Typer(
    help="Write the file that submits a recipe to a cluster.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
recipes_app = typer.Typer(
    help="The recipes that come with this tool.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


FIRST_HOUR = """\
Fine-tune language models on very long sequences. A first hour:

  ulysses doctor                       what this machine can do, and what it lacks
  ulysses recipes copy tiny-cpu        a recipe that trains in a minute on two CPU cores
  ulysses train tiny-cpu.yaml          train it: a Hugging Face model in runs/tiny-cpu/model
  ulysses init                         a recipe for your own model, data and GPUs, from six questions

ulysses --help lists all commands, ulysses COMMAND --help says more of one."""


def _print_version(is_set: bool) -> None:
    if is_set:
        from ulysses_cli.report import printing

        printing.print_data(f"ulysses {__version__}")
        raise typer.Exit(DONE)


@app.callback()
def main(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        from ulysses_cli.report import printing

        printing.print_data(FIRST_HOUR)


# One line each, short enough for one line of `ulysses --help`. A command's own --help says more.
COMMANDS: dict[str, tuple[Callable[..., None], str]] = {
    "init": (init.init, "Answer six questions and get a recipe that validates."),
    "validate-config": (validate_config.validate_config, "Find every mistake in a recipe before a GPU is rented."),
    "config-schema": (config_schema.config_schema, "Print all settings of a recipe, or of one section."),
    "prepare": (prepare.prepare, "Turn a recipe's data into packed rows of tokens."),
    "train": (train.train, "Fine-tune a model as a recipe says."),
    "export": (export.export, "Turn a checkpoint into a Hugging Face folder."),
    "merge": (merge.merge, "Write the weighted sum of models, or the mean of checkpoints."),
    "sample": (sample.sample, "Continue a prompt with a trained model."),
    "evaluate": (evaluate.evaluate, "Measure what a model answers at long lengths."),
    "verify": (verify.verify, "Prove that ranks train like one process."),
    "doctor": (doctor.doctor, "Check that this machine can train; list what to fix."),
    "bench": (bench.bench, "Measure a recipe's speed and memory on this machine."),
    "estimate-memory": (estimate_memory.estimate_memory, "Predict the memory, time and price of a recipe."),
    "plan": (plan.plan, "Find the GPUs and the layout that fit and cost least."),
    "models": (models.models, "List the models that are served; describe one."),
    "report": (report.report, "Make one HTML page of a run."),
    "push": (push.push, "Publish a run's model on the Hugging Face hub."),
}
CLUSTERS: dict[str, tuple[Callable[..., None], str]] = {
    "slurm": (launch.slurm, "Write a batch script for SLURM."),
    "k8s": (launch.k8s, "Write objects for Kubeflow Trainer v2."),
    "sky": (launch.sky, "Write a task for SkyPilot."),
}
for name, (command, short_help) in COMMANDS.items():
    app.command(name, cls=Command, short_help=short_help)(command)
app.add_typer(recipes_app, name="recipes")
recipes_app.command("list", cls=Command)(recipes.list_recipes)
recipes_app.command("show", cls=Command)(recipes.show_recipe)
recipes_app.command("copy", cls=Command)(recipes.copy_recipe)
app.add_typer(launch_app, name="launch")
for cluster, (command, short_help) in CLUSTERS.items():
    launch_app.command(cluster, cls=Command, short_help=short_help)(command)


FEW_COLLECTIONS = 20_000


def run() -> None:
    """Entry point of the `ulysses` command."""
    from ulysses_cli.plan.ledger.kept import keep_on_disk
    from ulysses_cli.plan.problem import RecipeError
    from ulysses_cli.report import printing
    from ulysses_cli.run import host

    host.refuse_core_files(os.environ)
    gc.set_threshold(FEW_COLLECTIONS)  # Python looks for cycles after 700 new objects; a plan makes millions
    printing.open_closed_streams()
    try:
        with keep_on_disk(get_cache_folder() / "sizes"):
            app()
    except RecipeError as error:  # about the machine: a command reports problems of its recipe itself
        printing.print_problems(error.problems)
        sys.exit(USAGE)
    except OSError as error:
        printing.discard_stdout()
        sys.stderr.write(f"the result cannot be written: {error.strerror}\n")
        sys.exit(FAILED)
    except KeyboardInterrupt:
        sys.exit(get_signal_code(signal.SIGINT))
