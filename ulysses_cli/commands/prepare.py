"""`ulysses prepare`: tokenizes and packs a recipe's data, without GPUs. `train` calls prepare_recipe too."""

from __future__ import annotations

import re
import signal
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ulysses_cli.commands.options import Format, FormatOption, RecipeWords, check_page, or_exit, write_page
from ulysses_cli.plan.problem import DONE, USAGE, Problem, get_signal_code

if TYPE_CHECKING:
    from ulysses_cli.plan.resolved import ResolvedRecipe

ENDED_BY_USER = tuple(code for number in (signal.SIGINT, signal.SIGTERM) for code in (get_signal_code(number), -number))


@dataclass(frozen=True)
class PreparedData:
    """The child process's exit code and report. `report["path"]` is the folder for data.rows.open_rows."""

    exit_code: int
    report: dict[str, Any]


def prepare(
    words: RecipeWords,
    html: Annotated[
        Path | None, typer.Option("--html", help="also write the report, with charts, to this file")
    ] = None,
    samples: Annotated[
        int, typer.Option(min=0, max=1000, help="documents of each source to print, with their targets marked")
    ] = 1,
    show: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE:ROW", help="print a row as it is trained, whole: 0:17 is row 17 of the first source"
        ),
    ] = None,
    output: FormatOption = Format.text,
) -> None:
    """Tokenize and pack a recipe's data into rows on disk, and account for every token.

    Uses no GPU. Data that is already prepared is used again, by train too. The model's config.json is downloaded if it
    is not on this machine.

    \b
    Examples:
      ulysses prepare recipes/tiny-cpu.yaml
      ulysses prepare my.yaml data.max_length=256Ki data.on_bad_row=skip --html report.html
      ulysses prepare my.yaml --samples 5
      ulysses prepare my.yaml --show 0:17
      ulysses prepare my.yaml --format json
    """
    from ulysses_cli.plan.resolved import ResolvedRecipe
    from ulysses_cli.report import data_report, printing
    from ulysses_cli.run.downloads import bring_inputs
    from ulysses_cli.validate import no_recipe, several_recipes, split_words, validate_recipe

    files, overrides = split_words(words)
    if len(files) != 1:
        printing.print_problems([several_recipes(files) if files else no_recipe(words)])
        raise typer.Exit(USAGE)
    if show is not None and not re.fullmatch(r"[0-9]+:[0-9]+", show):
        printing.print_problems([Problem("", f"--show {show} is no SOURCE:ROW", "write two numbers, such as 0:17")])
        raise typer.Exit(USAGE)
    or_exit(lambda: check_page(html), output)
    or_exit(lambda: bring_inputs(files[0], overrides, printing.print_message), output)
    result = validate_recipe(files[0], overrides, online=True)
    if result.problems or result.loaded is None or result.resolved is None:
        if output is Format.json:
            printing.print_json({"problems": [problem.as_json() for problem in result.problems]})
        else:
            printing.print_problems(result.problems)
        raise typer.Exit(USAGE)
    done = prepare_recipe(ResolvedRecipe(result.loaded, result.resolved), samples, show)
    if output is Format.json:
        printing.print_json(done.report)
    elif done.exit_code == DONE:
        shown = data_report.format_report(done.report) if show is None else data_report.format_row(done.report)
        printing.print_data(printing.color_classes(shown))
    if html is not None and done.exit_code == DONE:
        write_page(html, data_report.make_data_page(done.report))
    raise typer.Exit(done.exit_code)


def prepare_recipe(plan: ResolvedRecipe, num_samples: int = 1, show: str | None = None) -> PreparedData:
    """For a recipe that passed validation. `num_samples`: documents shown of each source; `show`: a row, SOURCE:ROW.
    Progress and problems go to stderr; nothing is written to stdout."""
    import json

    from ulysses_cli.report import printing, recipe
    from ulysses_cli.run import host

    words = ["--format", "json", f"--samples={num_samples}", *([f"--show={show}"] if show else [])]
    with tempfile.TemporaryFile() as place:  # the key of the source that is read now, for a child that is killed
        words.append(f"--place={place.fileno()}")
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "pass_fds": (place.fileno(),)}
        try:
            with host.start_module("ulysses_cli.data", words, **pipes) as child, host.ending(child):
                answer, _ = child.communicate(plan.dump())
        except (KeyboardInterrupt, SystemExit):  # SIGTERM ends this process too
            printing.print_message(recipe.explain_interrupted_data())
            raise
        key = place.read().decode().strip()
    try:
        report = json.loads(answer)
    except ValueError:
        problems = []
        if child.returncode not in (DONE, *ENDED_BY_USER):
            process = f"the process that {'read it' if key else 'prepares the data'}"
            problems = [Problem(key, f"{process} {recipe.describe_end(child.returncode)}")]
            printing.print_problems(problems)
        report = {"problems": [problem.as_json() for problem in problems]}
    return PreparedData(child.returncode if child.returncode >= 0 else 128 - child.returncode, report)
