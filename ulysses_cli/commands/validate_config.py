"""`ulysses validate-config`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ulysses_cli.commands.options import Format, FormatOption, or_exit
from ulysses_cli.plan.exit_codes import DONE, USAGE

if TYPE_CHECKING:
    from ulysses_cli.validate import Validated


def validate_config(
    words: Annotated[
        list[str], typer.Argument(metavar="RECIPE... [KEY=VALUE ...]", help="recipe files, and settings laid over them")
    ],
    num_processes: Annotated[
        int | None, typer.Option(min=1, max=1 << 20, help="processes of the run; left out: the recipe's own product")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="also say whether it fits this GPU kind, and with which levers")
    ] = None,
    online: Annotated[bool, typer.Option("--online", help="ask the hub for shapes that are not known here")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="problems, and what does not fit --gpu")] = False,
    output: FormatOption = Format.text,
) -> None:
    """Find every mistake in a recipe before a GPU is rented.

    Nothing is launched. Exit code 2 when there is a problem, each with its place and what to write instead.

    \b
    Examples:
      ulysses validate-config recipes/tiny-cpu.yaml
      ulysses validate-config my.yaml parallel.sp_size=8 data.max_length=512Ki --num-processes 8
      ulysses validate-config my.yaml --gpu h200
      ulysses validate-config recipes/*.yaml --format json
    """
    from ulysses_cli import validate
    from ulysses_cli.report import printing, resolved_plan

    files, overrides = validate.split_words(words)
    results = [validate.validate_recipe(file, overrides, num_processes, online=online) for file in files]
    problems = [problem for result in results for problem in result.list_problems(is_alone=len(files) == 1)]
    plans = [resolved_plan.describe_plan(result) for result in results if not result.problems]
    if gpu is not None:
        memory = or_exit(lambda: _judge_all(gpu, [result for result in results if not result.problems]))
        plans = [{**plan, "memory": found} for plan, found in zip(plans, memory, strict=True)]
    if not files:
        problems = [validate.no_recipe(words)]
    if output is Format.json:
        printing.print_json(
            {
                "valid": not problems,
                "problems": [problem.as_json() for problem in problems],
                "plans": [] if quiet else plans,
            }
        )
    else:
        if quiet:
            for plan in plans:
                if plan.get("memory", {}).get("verdict", "fits") != "fits":
                    memory = plan["memory"]
                    printing.print_data(f"{plan['recipe']}: {memory['gpu']}: {memory['text']}")
        elif plans:
            printing.print_data(
                "\n\n".join(resolved_plan.format_plan(plan, with_defaults=len(files) == 1) for plan in plans)
            )
        if problems:
            printing.print_problems(problems)
    raise typer.Exit(USAGE if problems else DONE)


def _judge_all(gpu: str, valid: list[Validated]) -> list[dict[str, Any]]:
    """The ledger's verdict and the levers that it chooses, for recipes that are valid."""
    from ulysses_cli.hardware_table import load_hardware
    from ulysses_cli.plan.planner.estimate import compute_estimate
    from ulysses_cli.report.ledger import describe_verdict

    kind = load_hardware().get_gpu(gpu)
    return [
        describe_verdict(compute_estimate(each.loaded.recipe, each.shape, kind))
        for each in valid
        if each.loaded is not None and each.shape is not None
    ]
