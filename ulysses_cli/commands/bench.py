"""`ulysses bench`: how fast and how large a recipe is here, at several lengths and sp sizes, beside its prediction."""

from __future__ import annotations

import importlib.util
import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from ulysses_cli.commands.options import Format, FormatOption, or_exit


class LeverWish(StrEnum):
    auto = "auto"
    all = "all"
    none = "none"


class Peer(StrEnum):
    trainer = "trainer"


def bench(
    words: Annotated[
        list[str], typer.Argument(metavar="RECIPE [KEY=VALUE ...]", help="a recipe file, and settings laid over it")
    ],
    max_length: Annotated[
        str | None, typer.Option(help="lengths, such as 8Ki,32Ki,128Ki; the recipe's when left out")
    ] = None,
    sp_size: Annotated[str | None, typer.Option(help="sizes, such as 1,2,4; the recipe's when left out")] = None,
    on_off: Annotated[
        bool, typer.Option("--sp-on-off", help="one row per rank against rows shared by all, on the same ranks")
    ] = False,
    levers: Annotated[LeverWish, typer.Option(help="memory levers: as training would choose, all, or none")] = (
        LeverWish.auto
    ),
    against: Annotated[Peer | None, typer.Option(help="run the Hugging Face Trainer's own Ulysses path too")] = None,
    steps: Annotated[int, typer.Option(min=1, max=1000, help="timed steps, after three to warm up")] = 5,
    time_limit: Annotated[float, typer.Option(min=10, max=86400, help="seconds that one row may take")] = 1800.0,
    save: Annotated[
        bool, typer.Option("--save-calibration", help="let estimate-memory use the rates that were measured here")
    ] = False,
    html: Annotated[Path | None, typer.Option("--html", help="write curves and tables to this file")] = None,
    online: Annotated[bool, typer.Option("--online", help="ask the hub for shapes that are not known here")] = False,
    output: FormatOption = Format.text,
) -> None:
    """Measure tokens/s, TFLOPS, memory and communication of a recipe on this machine's GPUs, or on CPU ranks.

    Rows are made up and full. All rows run on the same number of ranks: what is not sp is dp. A row that runs out of
    memory is told with its cause and the sweep goes on. With a GPU, each row stands beside its prediction.

    \b
    Examples:
      ulysses bench my.yaml --max-length 8Ki,32Ki,128Ki --sp-size 1,2,4 --html curves.html
      ulysses bench recipes/tiny-cpu.yaml --max-length 512,1Ki --against trainer
    """
    from ulysses_cli.commands.proving import prove, read_subject

    subject = read_subject(words, output, online=online)
    recipe = subject.recipe
    or_exit(lambda: _check_weights(recipe.model.name_or_path), output)
    sizes = [recipe.parallel.sp_size]
    if sp_size is not None:
        sizes = or_exit(lambda: [_read_number("--sp-size", each) for each in sp_size.split(",")], output)
    elif on_off:
        sizes = [1, *sizes]
    or_exit(lambda: _check_comparison(recipe.parallel.sp_size, sp_size, against, on_off=on_off), output)
    lengths = [recipe.data.max_length]
    if max_length is not None:
        lengths = or_exit(lambda: [_read_number("--max-length", each) for each in max_length.split(",")], output)
    or_exit(lambda: _check_sizes(subject.shape, sizes, lengths), output)
    options: dict[str, Any] = {
        "lengths": list(dict.fromkeys(lengths)),
        "sp_sizes": list(dict.fromkeys(sizes)),
        "levers": levers.value,
        "num_steps": steps,
        "against_trainer": against is Peer.trainer,
        "time_limit_seconds": time_limit,
        "is_paired": on_off,
    }
    prove("bench", subject, options, output, html, save_calibration if save else None)


def save_calibration(found: dict[str, Any]) -> None:
    """Rates of this machine's GPUs, for estimates that are made here."""
    import time

    from ulysses_cli import hardware_table
    from ulysses_cli.report import printing

    if not found.get("calibration"):
        printing.print_message("nothing to calibrate: rates are those of GPUs, and no row ran on one")
        return
    if not hardware_table.list_gpu_uuids():
        printing.print_message("nothing saved: the driver does not name its GPUs, to which these rates belong")
        return
    measured = f"{time.strftime('%Y-%m-%d')}, {found['subject']}"
    file = or_exit(lambda: hardware_table.save_calibration(found["calibration"], measured))
    printing.print_message(f"wrote {file}; delete it to go back to the shipped rates")


def _check_comparison(own_size: int, sizes: str | None, against: Peer | None, *, on_off: bool) -> None:
    from ulysses_cli.plan.problem import Problem, RecipeError

    if on_off and sizes is not None:
        raise RecipeError([Problem("--sp-on-off", "chooses the sizes itself", "leave --sp-size out")])
    if on_off and against is not None:
        raise RecipeError([Problem("--sp-on-off", "is one comparison, --against another", "run one after the other")])
    if on_off and own_size == 1:
        raise RecipeError([Problem("--sp-on-off", "the recipe has sp_size 1", "lay parallel.sp_size=4 over it")])
    if against is not None and importlib.util.find_spec("accelerate") is None:
        hint = "pip install 'ulysses-cli[compare]'"
        raise RecipeError([Problem("--against", "the Trainer needs accelerate, which is not installed", hint)])


def _check_weights(name: str | None) -> None:
    """A local model is loaded as it is; one of the hub is drawn at random, whose speed is the same."""
    from ulysses_cli.plan.files.weight_files import find_weight_problem
    from ulysses_cli.plan.problem import Problem, RecipeError

    folder = Path(os.path.expanduser(name or ""))
    if name and folder.is_dir() and (problem := find_weight_problem(folder)):
        raise RecipeError([Problem("model.name_or_path", problem, "copy the model's folder again, or name another")])


def _read_number(key: str, text: str) -> int:
    from ulysses_cli.plan.problem import Problem, RecipeError
    from ulysses_cli.plan.recipe.yaml_tree import parse_number

    found = parse_number(text.strip())
    if not isinstance(found, int) or not 1 <= found <= 1 << 40:
        raise RecipeError(
            [Problem(key, f"{text or 'nothing'} is not a whole number above 0", "write numbers with commas: 8Ki,32Ki")]
        )
    return found


def _check_sizes(shape: Any, sizes: list[int], lengths: list[int]) -> None:
    from ulysses_cli.plan.layout import list_divisors
    from ulysses_cli.plan.problem import Problem, RecipeError

    legal = ", ".join(str(size) for size in list_divisors(shape.num_heads))
    wrong = [size for size in sizes if shape.num_heads % size]
    problems = [
        Problem("--sp-size", f"{size} does not divide the {shape.num_heads} attention heads", f"use {legal}")
        for size in wrong
    ]
    problems += [
        Problem("--sp-size", f"{shape.name} cannot be split over ranks: {shape.inexact}", "use --sp-size 1")
        for size in sizes
        if size > 1 and shape.inexact
    ]
    if min(lengths) < max(sizes):
        problems.append(
            Problem("--max-length", f"{min(lengths)} is shorter than sp_size {max(sizes)}", f"use {max(sizes)} or more")
        )
    if problems:
        raise RecipeError(problems)
