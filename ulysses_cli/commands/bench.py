"""`ulysses bench`: how fast and how large a recipe is here, at several lengths and sp sizes, beside its prediction."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from ulysses_cli.commands.options import USAGE, Format, FormatOption, or_exit


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
    loaded = subject.validated.loaded
    if loaded is None:
        raise typer.Exit(USAGE)
    recipe = loaded.recipe
    sizes = [recipe.parallel.sp_size]
    if sp_size is not None:
        sizes = or_exit(lambda: [_read_number("--sp-size", each) for each in sp_size.split(",")])
    elif on_off:
        sizes = [1, *sizes]
    lengths = [recipe.data.max_length]
    if max_length is not None:
        lengths = or_exit(lambda: [_read_number("--max-length", each) for each in max_length.split(",")])
    or_exit(lambda: _check_sizes(subject.validated.shape, sizes, lengths))
    options: dict[str, Any] = {
        "lengths": list(dict.fromkeys(lengths)),
        "sp_sizes": list(dict.fromkeys(sizes)),
        "levers": levers.value,
        "num_steps": steps,
        "against_trainer": against is Peer.trainer,
        "time_limit_seconds": time_limit,
    }
    prove("bench", subject, options, output, html, save_calibration if save else None)


def save_calibration(found: dict[str, Any]) -> None:
    """Beside the user's own hardware.yaml, which wins over it."""
    import yaml

    from ulysses_cli import hub
    from ulysses_cli.report import printing

    if not found.get("calibration"):
        printing.print_talk("nothing to calibrate: rates are those of GPUs, and no row ran on one")
        return
    file = hub.get_user_folder() / "calibration.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_suffix(".part")
    beside.write_text("# Written by `ulysses bench --save-calibration`.\n" + yaml.safe_dump(found["calibration"]))
    beside.replace(file)
    printing.print_talk(f"wrote {file}; delete it to go back to the shipped rates")


def _read_number(key: str, text: str) -> int:
    from ulysses_cli.plan.problem import Problem, RecipeError
    from ulysses_cli.plan.yaml_tree import parse_number

    found = parse_number(text.strip())
    if not isinstance(found, int) or not 1 <= found <= 1 << 40:
        raise RecipeError([Problem(key, f"{text} is not a whole number", "separate numbers by commas: 8Ki,32Ki")])
    return found


def _check_sizes(shape: Any, sizes: list[int], lengths: list[int]) -> None:
    from ulysses_cli.plan.problem import Problem, RecipeError

    wrong = [size for size in sizes if shape.num_heads % size]
    problems = [
        Problem("--sp-size", f"{size} does not divide the {shape.num_heads} attention heads", "use a divisor")
        for size in wrong
    ]
    problems += [
        Problem("--sp-size", f"{shape.name} cannot be split over ranks: {shape.inexact}", "use --sp-size 1")
        for size in sizes
        if size > 1 and shape.inexact
    ]
    if min(lengths) < max(sizes):
        problems.append(Problem("--max-length", f"{min(lengths)} is shorter than sp_size {max(sizes)}", "use longer"))
    if problems:
        raise RecipeError(problems)
