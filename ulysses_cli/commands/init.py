"""`ulysses init`: asks six questions, lets the planner choose, and writes a recipe that validates."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from ulysses_cli.commands.options import Format as OutputFormat
from ulysses_cli.commands.options import complete_gpus, end_with, or_exit
from ulysses_cli.plan.problem import FAILED

if TYPE_CHECKING:
    from ulysses_cli.plan.models.shape import ModelShape
    from ulysses_cli.plan.planner.candidates import Offer
    from ulysses_cli.plan.planner.first_recipe import Choice, FirstAnswers
    from ulysses_cli.run.data_survey import Survey

T = TypeVar("T")
CPU = "cpu"
NO_BUDGET = "none"


class MethodAnswer(StrEnum):
    auto = "auto"
    full = "full"
    lora = "lora"
    qlora = "qlora"


def init(
    to: Annotated[Path, typer.Argument(help="the recipe file to write")] = Path("my.yaml"),
    data: Annotated[
        str | None, typer.Option(help="1. a file or folder of documents, or a data set of the hub (owner/name)")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="2. a model of the hub (owner/name), a local folder, or `tiny` to try things out")
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            help="3. KIND:MOST, such as h100-80gb:8, or cpu  [default: this machine's]", autocompletion=complete_gpus
        ),
    ] = None,
    max_length: Annotated[
        str | None, typer.Option(help="4. tokens per row, such as 32Ki  [default: by the longest document]")
    ] = None,
    method: Annotated[
        MethodAnswer | None,
        typer.Option(
            help="5. all weights (full), adapters (lora), adapters on a base in 4 bits (qlora), or what fits "
            "[default: auto]"
        ),
    ] = None,
    budget: Annotated[str | None, typer.Option(help="6. highest cost in USD, or none  [default: none]")] = None,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="ask nothing: take the defaults of what is left out")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="overwrite an existing file")] = False,
) -> None:
    """Ask six questions and write a recipe that validates, with a comment for each choice.

    Looks at the data and at this machine's GPUs, and lets the planner choose layout and memory levers. Every answer is
    also an option; what an option answers is not asked.

    \b
    Examples:
      ulysses init
      ulysses init my.yaml --data texts --model tiny --gpus cpu --yes
      ulysses init my.yaml --data owner/texts --model Qwen/Qwen3-8B --gpus h100-80gb:8 --max-length 128Ki --yes
    """
    from ulysses_cli.plan.planner.first_recipe import FirstAnswers, write_first_recipe
    from ulysses_cli.report import printing
    from ulysses_cli.run.data_survey import survey_data

    or_exit(lambda: _check_target(to, force))
    ask = Questions(is_silent=yes)
    survey = ask.get("Data: a file or folder of documents, or owner/name on the hub", data, None, survey_data, "--data")
    printing.print_message(f"  {survey.summary}")
    name = ask.get("Model: owner/name on the hub, a folder, or tiny", model, "tiny", str.strip, "--model")
    offer = ask.get("GPUs: KIND:MOST, or cpu", gpus, _find_gpus(), _read_gpus, "--gpus")
    shape = or_exit(lambda: _find_shape(name))
    default = str(_suggest_length(survey, name, shape, is_cpu=offer is None))
    length = ask.get("Length: tokens per row", max_length, default, _read_length, "--max-length")
    trained = ask.get("Method: full, lora, qlora, or auto for what fits", method, "auto", _read_method, "--method")
    usd = ask.get("Budget: highest cost in USD, or none", budget, NO_BUDGET, _read_budget, "--budget")
    answers = FirstAnswers(
        survey.path, name, length, False, survey.is_tree, survey.num_documents,
        _count_tokens(survey, name), usd, f"runs/{to.stem}", kind=survey.kind,
    )  # fmt: skip
    shape = or_exit(lambda: _find_shape(name, length))
    answers, choice = or_exit(lambda: _choose(answers, trained, shape, offer))
    text = write_first_recipe(answers, choice, str(to))
    or_exit(lambda: _write(to, text))
    for line in choice.header:
        printing.print_message(f"  {line}")
    printing.print_data(str(to))
    if survey.refusal:
        printing.print_message(f"wrote {to}, but `ulysses prepare {to}` will refuse its data:")
        printing.print_problems(survey.refusal)
        raise typer.Exit(FAILED)
    printing.print_message(f"wrote {to}, which validates. Next: ulysses prepare {to} reads all data and shows samples")


class Questions:
    """Asks on the terminal until an answer can be read. A question that an option answers is not asked."""

    def __init__(self, *, is_silent: bool) -> None:
        self.is_silent = is_silent

    def get(self, question: str, given: str | None, default: str | None, read: Callable[[str], T], option: str) -> T:
        from ulysses_cli.plan.problem import Problem, RecipeError
        from ulysses_cli.report import printing

        if given is not None or self.is_silent:
            answer = given if given is not None else default
            if answer is None:
                end_with([Problem(option, "is needed", f"add {option}, or leave out --yes")], OutputFormat.text)
            known: str = answer
            return or_exit(lambda: read(known))
        while True:
            try:
                with redirect_stdout(sys.stderr):  # stdout is data
                    answer = str(typer.prompt(question, default=default))
            except typer.Abort:
                printing.print_message("")  # ends the line of the question
                end_with(
                    [Problem(option, "has no answer", f"add {option}, or --yes for the defaults")], OutputFormat.text
                )
            try:
                return read(answer)
            except RecipeError as error:
                printing.print_problems(error.problems)


def _check_target(file: Path, force: bool) -> None:
    from ulysses_cli.plan.problem import Problem, RecipeError

    if file.is_dir() or file.suffix not in (".yaml", ".yml"):
        raise RecipeError([Problem("", f"{file} is not the name of a recipe", "name a file that ends in .yaml")])
    if file.exists() and not force:
        raise RecipeError([Problem("", f"{file} exists", "add --force to overwrite it, or name another file")])
    if not file.parent.is_dir():
        raise RecipeError([Problem("", f"{file.parent} is not a folder", "make it, or name another file")])


def _find_gpus() -> str:
    """Returns this machine's GPUs as KIND:MOST, or cpu."""
    from ulysses_cli.hardware_table import load_hardware
    from ulysses_cli.run.host import list_gpus

    found = list_gpus()
    if not found:
        return CPU
    gpu, is_known = load_hardware().recognise(found[0].name, found[0].memory_bytes, 0)
    return f"{gpu.key}:{len(found)}" if is_known else CPU


def _read_gpus(text: str) -> Offer | None:
    """Returns None for CPUs."""
    from ulysses_cli.commands.plan import read_offers
    from ulysses_cli.hardware_table import load_hardware
    from ulysses_cli.plan.problem import Problem, RecipeError

    if text.strip().lower() == CPU:
        return None
    offers = read_offers(text, load_hardware())
    if len(offers) > 1:
        hint = "name the kind that you will train on; `ulysses plan` compares several"
        raise RecipeError([Problem("--gpus", f"{len(offers)} kinds of GPU", hint)])
    return offers[0]


def _find_shape(name: str, max_length: int = 2) -> ModelShape:
    from ulysses_cli.commands.estimate_memory import find_shape
    from ulysses_cli.plan.models.shape import read_model_shape
    from ulysses_cli.plan.planner.first_recipe import TINY, make_tiny_config
    from ulysses_cli.plan.problem import Problem, RecipeError

    if (
        "/" not in name
        and not os.path.exists(name)
        and name != TINY
        and difflib.get_close_matches(name, [TINY], cutoff=0.5)
    ):
        raise RecipeError([Problem("--model", f"no model is called {name}", f"did you mean {TINY}?")])
    return read_model_shape(make_tiny_config(max_length), TINY) if name == TINY else find_shape(name, online=True)


def _get_token_bytes(model: str) -> int:
    from ulysses_cli.plan.planner.first_recipe import BYTES_PER_TOKEN, TINY

    return 1 if model == TINY else BYTES_PER_TOKEN


def _suggest_length(survey: Survey, model: str, shape: ModelShape, *, is_cpu: bool) -> int:
    from ulysses_cli.plan.planner.first_recipe import suggest_length

    longest = None if survey.longest_bytes is None else survey.longest_bytes // _get_token_bytes(model)
    return suggest_length(longest, shape.max_position_embeddings, is_cpu=is_cpu)


def _count_tokens(survey: Survey, model: str) -> int | None:
    return None if survey.num_bytes is None else survey.num_bytes // _get_token_bytes(model)


def _read_length(text: str) -> int:
    from ulysses_cli.commands.estimate_memory import read_length

    return read_length("--max-length", text)


def _read_method(text: str) -> MethodAnswer:
    from ulysses_cli.plan.problem import Problem, RecipeError

    try:
        return MethodAnswer(text.strip().lower())
    except ValueError:
        raise RecipeError([Problem("--method", f"{text} is not a method", "write full, lora, qlora or auto")]) from None


def _read_budget(text: str) -> float | None:
    from ulysses_cli.plan.problem import Problem, RecipeError

    text = text.strip().lower().removeprefix("usd").removeprefix("$").strip()
    if text == NO_BUDGET:
        return None
    if not re.fullmatch(r"\d+(\.\d+)?", text) or float(text) <= 0:
        raise RecipeError([Problem("--budget", f"{text} is not a cost", "write a number of USD, or none")])
    return float(text)


def _choose(
    answers: FirstAnswers, method: MethodAnswer, shape: ModelShape, offer: Offer | None
) -> tuple[FirstAnswers, Choice]:
    """On GPUs the planner's cheapest plan."""
    from ulysses_cli.plan.planner.candidates import METHODS
    from ulysses_cli.plan.planner.first_recipe import CPU_RANKS, choose_by_plan, choose_on_cpu, make_request
    from ulysses_cli.plan.planner.search import list_methods, search_methods
    from ulysses_cli.plan.problem import Problem, RecipeError

    name = None if method is MethodAnswer.auto else str(method)
    if offer is None:
        is_lora, quantize_base = METHODS[name or "full"]
        answers = replace(answers, is_lora=is_lora, quantize_base=quantize_base)
        ranks, zero_stage = min(CPU_RANKS, os.cpu_count() or 1), make_request(shape, answers).zero_stage
        return answers, choose_on_cpu(shape, answers.max_length, ranks, zero_stage)
    request, result = search_methods(list_methods(make_request(shape, answers), name), [offer])
    if not result.by_cost:
        raise RecipeError([Problem(f"no plan ({wall.kind})", wall.message, wall.hint) for wall in result.walls])
    answers = replace(answers, is_lora=request.is_lora, quantize_base=request.quantize_base)
    return answers, choose_by_plan(result.by_cost[0], request, answers.model)


def _write(file: Path, text: str) -> None:
    """Writes the recipe once it has passed its checks."""
    from ulysses_cli.plan.problem import RecipeError
    from ulysses_cli.shipped import write_recipe
    from ulysses_cli.validate import validate_recipe

    valid = validate_recipe(str(file), online=True, text=text)
    if valid.problems:
        raise RecipeError(valid.problems)
    write_recipe(file, text)
