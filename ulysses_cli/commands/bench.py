"""`ulysses bench`: measures speed and memory of a recipe on this machine, at several lengths and sp sizes."""

from __future__ import annotations

import importlib.util
import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from ulysses_cli.commands.options import Format, FormatOption, OnlineOption, PageOption, RecipeWords, or_exit


class BenchLevers(StrEnum):
    auto = "auto"
    all = "all"
    none = "none"


class Peer(StrEnum):
    trainer = "trainer"


def bench(
    words: RecipeWords,
    max_length: Annotated[
        str | None, typer.Option(help="tokens per row, such as 8Ki,32Ki,128Ki  [default: the recipe's data.max_length]")
    ] = None,
    sp_size: Annotated[
        str | None, typer.Option(help="sizes, such as 1,2,4  [default: the recipe's parallel.sp_size]")
    ] = None,
    on_off: Annotated[
        bool, typer.Option("--sp-on-off", help="compare sp_size 1 with the recipe's sp_size, on the same ranks")
    ] = False,
    levers: Annotated[BenchLevers, typer.Option(help="memory levers: chosen as train does, all, or none")] = (
        BenchLevers.auto
    ),
    against: Annotated[
        Peer | None, typer.Option(help="also run the Hugging Face Trainer with its own Ulysses sequence parallelism")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, max=1000, help="timed steps, after three warm-up steps")] = 5,
    time_limit: Annotated[float, typer.Option(min=10, max=86400, help="seconds for each measurement")] = 1800.0,
    save: Annotated[
        bool,
        typer.Option(
            "--save-calibration", help="save the measured rates, for estimate-memory and plan on this machine"
        ),
    ] = False,
    html: PageOption = None,
    online: OnlineOption = False,
    output: FormatOption = Format.text,
) -> None:
    """Measure tokens/s, TFLOPS, memory and communication of a recipe on this machine's GPUs, or on CPU ranks.

    Trains on full rows of random tokens, once for each length and sp_size. The number of ranks is always the same:
    ranks that do not share a row train on rows of their own. A measurement that runs out of memory is reported with its
    cause, and the next one starts. On GPUs, each measurement is compared with its prediction.

    \b
    Examples:
      ulysses bench my.yaml --max-length 8Ki,32Ki,128Ki --sp-size 1,2,4 --html curves.html
      ulysses bench recipes/tiny-cpu.yaml --max-length 512,1Ki --against trainer
    """
    from ulysses_cli.commands.children.proving import prove, read_subject

    subject = read_subject(words, output, online=online)
    parallel, model = subject.recipe.parallel, subject.recipe.model
    or_exit(lambda: _check_weights(model.name_or_path), output)
    or_exit(lambda: _check_comparison(parallel.sp_size, sp_size, against, on_off=on_off), output)
    own_sizes = [1, parallel.sp_size] if on_off else [parallel.sp_size]
    sizes = or_exit(lambda: read_numbers("--sp-size", sp_size, own_sizes), output)
    lengths = or_exit(lambda: read_numbers("--max-length", max_length, [subject.recipe.data.max_length]), output)
    or_exit(lambda: _check_sizes(subject.shape, parallel.sp_size, sizes, lengths), output)
    options: dict[str, Any] = {
        "lengths": lengths,
        "sp_sizes": sizes,
        "levers": levers.value,
        "num_steps": steps,
        "against_trainer": against is Peer.trainer,
        "time_limit_seconds": time_limit,
        "is_paired": on_off,
    }
    prove("bench", subject, options, output, html, save_calibration if save else None)


def save_calibration(findings: dict[str, Any]) -> None:
    """Saves the measured rates of this machine's GPUs, which later estimates on this machine use."""
    import time

    from ulysses_cli import hardware_table
    from ulysses_cli.report import printing

    if not findings.get("calibration"):
        printing.print_message("nothing saved: rates are measured on GPUs only, and nothing ran on a GPU")
        return
    if not hardware_table.list_gpu_uuids():
        printing.print_message("nothing saved: the driver does not name its GPUs, and rates are saved for named GPUs")
        return
    measured = f"{time.strftime('%Y-%m-%d')}, {findings['subject']}"
    file = or_exit(lambda: hardware_table.save_calibration(findings["calibration"], measured))
    printing.print_message(f"wrote {file}; delete it to go back to the shipped rates")


def _check_comparison(own_size: int, sizes: str | None, against: Peer | None, *, on_off: bool) -> None:
    from ulysses_cli.plan.problem import Problem, RecipeError

    if on_off and sizes is not None:
        raise RecipeError([Problem("--sp-on-off", "chooses the sizes itself", "leave out --sp-size")])
    if on_off and against is not None:
        raise RecipeError([Problem("--sp-on-off", "and --against are two comparisons", "run one after the other")])
    if on_off and own_size == 1:
        raise RecipeError(
            [Problem("--sp-on-off", "the recipe has sp_size 1", "add parallel.sp_size=4 after the recipe")]
        )
    if against is not None and importlib.util.find_spec("accelerate") is None:
        hint = "pip install 'ulysses-cli[compare]'"
        raise RecipeError([Problem("--against", "the Trainer needs accelerate, which is not installed", hint)])


def _check_weights(name: str | None) -> None:
    """The weight files of a local model can be loaded. A model of the hub gets random weights: its speed is the
    same."""
    from ulysses_cli.plan.models.model_files import find_weight_problem
    from ulysses_cli.plan.problem import Problem, RecipeError

    folder = Path(os.path.expanduser(name or ""))
    if name and folder.is_dir() and (problem := find_weight_problem(folder)):
        raise RecipeError([Problem("model.name_or_path", problem, "copy the model's folder again, or name another")])


def read_numbers(key: str, text: str | None, default: list[int]) -> list[int]:
    """Reads numbers with commas between them; each is kept once."""
    from ulysses_cli.plan.problem import Problem, RecipeError
    from ulysses_cli.plan.recipe.schema import parse_number

    numbers = []
    for word in default if text is None else text.split(","):
        number = word if isinstance(word, int) else parse_number(word.strip())
        if not isinstance(number, int) or not 1 <= number <= 1 << 40:
            message = f"{word or 'nothing'} is not a whole number above 0"
            raise RecipeError([Problem(key, message, "write numbers with commas: 8Ki,32Ki")])
        numbers.append(number)
    return list(dict.fromkeys(numbers))


def _check_sizes(shape: Any, own_size: int, sizes: list[int], lengths: list[int]) -> None:
    from ulysses_cli.plan.problem import Problem, RecipeError

    legal = ", ".join(str(size) for size in shape.sp_sizes)
    problems = [
        Problem("--sp-size", f"{size} does not divide the {shape.common_heads} attention heads", f"use {legal}")
        for size in sizes
        if size not in shape.sp_sizes and size != own_size
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
