"""`ulysses validate-config`: prints every mistake of recipes, and the plan of valid ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ulysses_cli.commands.options import Format, FormatOption, OnlineOption, complete_gpus, complete_words, or_exit
from ulysses_cli.plan.problem import DONE, USAGE

if TYPE_CHECKING:
    from ulysses_cli.validate import Validated


def validate_config(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE... [KEY=VALUE ...]",
            help="recipe files, and settings that override them",
            autocompletion=complete_words,
        ),
    ],
    num_processes: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1 << 20,
            help="processes of the run, one per GPU  [default: the product of the recipe's parallel sizes]",
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="also predict whether it fits this kind of GPU, such as h200, and which memory levers it needs",
            autocompletion=complete_gpus,
        ),
    ] = None,
    nnodes: Annotated[
        int | None,
        typer.Option(
            min=1, help="also draw the ranks on so many machines; warn of rows and copies of weights that cross them"
        ),
    ] = None,
    online: OnlineOption = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="print problems only, and recipes that do not fit --gpu")
    ] = False,
    shows_all: Annotated[
        bool, typer.Option("--all", help="also list the settings that are left to their defaults; json always does")
    ] = False,
    output: FormatOption = Format.text,
) -> None:
    """Find every mistake in a recipe before a GPU is rented.

    Starts no training. Prints all problems at once, each with its line in the recipe and what to write instead. Exit
    code 2 when there is a problem.

    \b
    Examples:
      ulysses validate-config recipes/tiny-cpu.yaml
      ulysses validate-config my.yaml parallel.sp_size=8 data.max_length=512Ki --num-processes 8
      ulysses validate-config my.yaml --gpu h200
      ulysses validate-config my.yaml --nnodes 4 --gpu h100
      ulysses validate-config recipes/*.yaml --format json
    """
    from ulysses_cli.report import printing, recipe
    from ulysses_cli.validate import no_recipe, split_words, validate_recipe

    files, overrides = split_words(words)
    results = [validate_recipe(file, overrides, num_processes, online=online) for file in files]
    problems = [problem for result in results for problem in result.list_problems(is_alone=len(files) == 1)]
    plans = [recipe.describe_plan(result) for result in results if not result.problems]
    if gpu is not None:
        verdicts = or_exit(lambda: _predict_memory(gpu, [result for result in results if not result.problems]))
        plans = [{**plan, "memory": verdict} for plan, verdict in zip(plans, verdicts, strict=True)]
    if nnodes is not None:
        valid = [result for result in results if not result.problems]
        drawn = or_exit(lambda: [_place(result, nnodes, gpu) for result in valid])
        plans = [{**plan, "placement": placement} for plan, placement in zip(plans, drawn, strict=True)]
    if not files:
        problems = [no_recipe(words)]
    if output is Format.json:
        described = [problem.as_json() for problem in problems]
        printing.print_json({"valid": not problems, "problems": described, "plans": [] if quiet else plans})
    else:
        _print_plans(plans, quiet=quiet, with_settings=len(files) == 1, with_defaults=shows_all)
        if problems:
            printing.print_problems(problems)
    raise typer.Exit(USAGE if problems else DONE)


def _print_plans(plans: list[dict[str, Any]], *, quiet: bool, with_settings: bool, with_defaults: bool) -> None:
    from ulysses_cli.report import printing, recipe

    if quiet:
        for plan in plans:
            memory = plan.get("memory")
            if memory and memory["verdict"] != "fits":
                printing.print_data(f"{plan['recipe']}: {memory['gpu']}: {memory['text']}")
    elif plans:
        texts = [recipe.format_plan(plan, with_settings=with_settings, with_defaults=with_defaults) for plan in plans]
        printing.print_data("\n\n".join(texts))


def _place(valid: Validated, num_nodes: int, gpu: str | None) -> dict[str, Any]:
    """Where the ranks stand on so many machines, and what it costs where rows cross them."""
    from dataclasses import replace

    from ulysses_cli.hardware_table import load_hardware
    from ulysses_cli.plan.layout import Placement
    from ulysses_cli.plan.planner.estimate import compute_estimate
    from ulysses_cli.plan.problem import Problem, RecipeError
    from ulysses_cli.report.planner import compute_crossing_costs, describe_placement

    assert valid.loaded is not None
    assert valid.shape is not None
    assert valid.resolved is not None
    layout = valid.resolved.layout
    if layout.world_size % num_nodes:
        message = f"{layout.world_size} processes do not fill {num_nodes} machines evenly"
        raise RecipeError([Problem("--nnodes", message, "every machine runs the same number of processes")])
    placement = Placement(layout, num_nodes)
    if gpu is None:
        return describe_placement(placement, None, valid.shape)
    kind = replace(load_hardware().get_gpu(gpu), gpus_per_node=placement.gpus_per_node)
    estimate = compute_estimate(valid.loaded.recipe, valid.shape, kind)
    return describe_placement(placement, compute_crossing_costs(placement, estimate), valid.shape)


def _predict_memory(gpu: str, valid: list[Validated]) -> list[dict[str, Any]]:
    """The ledger's verdict, and the levers that it chooses, for each valid recipe."""
    from ulysses_cli.hardware_table import load_hardware
    from ulysses_cli.plan.planner.estimate import compute_estimate
    from ulysses_cli.report.ledger import describe_verdict

    kind = load_hardware().get_gpu(gpu)
    return [
        describe_verdict(compute_estimate(result.loaded.recipe, result.shape, kind))
        for result in valid
        if result.loaded is not None and result.shape is not None
    ]
