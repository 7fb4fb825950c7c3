"""`ulysses estimate-memory`: will it fit, how long, how much, and what to change."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ulysses_cli.commands.options import Format, FormatOption, check_page, or_exit, write_page
from ulysses_cli.plan.exit_codes import DONE, FAILED, USAGE

if TYPE_CHECKING:
    from ulysses_cli.plan.hardware import Gpu
    from ulysses_cli.plan.levers import Levers
    from ulysses_cli.plan.models.shape import ModelShape
    from ulysses_cli.plan.planner.estimate import Estimate
    from ulysses_cli.validate import Validated

DEFAULT_GPU = "h100-80gb"
MAX_PROCESSES = 1 << 20


def estimate_memory(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[RECIPE] [KEY=VALUE ...]", help="a recipe, and settings laid over it")
    ] = None,
    model: Annotated[str | None, typer.Option(help="instead of a recipe: hub name or local folder")] = None,
    max_length: Annotated[str | None, typer.Option(help="with --model: tokens per row, such as 128Ki or 1M")] = None,
    num_processes: Annotated[
        int | None, typer.Option(min=1, max=MAX_PROCESSES, help="with --model: GPUs of the run; 8 when left out")
    ] = None,
    gpu: Annotated[list[str] | None, typer.Option(help="GPU kind; may be repeated; h100-80gb when left out")] = None,
    sweep: Annotated[bool, typer.Option("--sweep", help="memory against length, for several layouts")] = False,
    html: Annotated[Path | None, typer.Option(help="with --sweep: write the picture to this file")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="exit code 1 when it does not fit for sure")] = False,
    trace: Annotated[
        bool, typer.Option("--trace", help="also run the real model and engine without data, and compare; minutes")
    ] = False,
    online: Annotated[bool, typer.Option("--online", help="ask the hub for shapes that are not known here")] = False,
    output: FormatOption = Format.text,
) -> None:
    """Predict the memory of every phase, the time and the price of a recipe before a GPU is rented.

    Per rank on the GPU and per node on the host, line by line, with the longest row that fits and the cheapest change
    that would make this one fit. Without a recipe, sp_size is the largest legal one inside a node and levers are auto.

    \b
    Examples:
      ulysses estimate-memory recipes/llama-3.1-8b-128k-8gpu.yaml --gpu h100-80gb --gpu h200
      ulysses estimate-memory --model Qwen/Qwen3-8B --max-length 256Ki --num-processes 8
      ulysses estimate-memory my.yaml data.max_length=512Ki memory.offload_optimizer=cpu --format json
      ulysses estimate-memory --model Qwen/Qwen3-8B --max-length 1M --sweep --html sweep.html
      ulysses estimate-memory my.yaml --trace
    """
    from ulysses_cli.hardware_table import describe_calibration, load_hardware
    from ulysses_cli.plan.ledger.job import is_known
    from ulysses_cli.plan.planner.estimate import compute_estimate
    from ulysses_cli.report import ledger, printing, traced

    or_exit(lambda: check_page(html))
    table = or_exit(load_hardware)
    gpus = or_exit(lambda: [table.get_gpu(name) for name in dict.fromkeys(gpu or [DEFAULT_GPU])])
    valid, said = or_exit(lambda: _find_recipe(words or [], model, max_length, num_processes, online=online))
    if valid.problems or valid.loaded is None or valid.shape is None:
        if output is Format.json:
            printing.print_json({"problems": [problem.as_json() for problem in valid.problems]})
        else:
            printing.print_problems(valid.problems)
        raise typer.Exit(USAGE)
    if not gpu:
        said.append(f"no --gpu is named: {DEFAULT_GPU}")
    said += describe_calibration()
    recipe, shape = valid.loaded.recipe, valid.shape
    if trace and not is_known(shape):
        raise typer.Exit(_show_trace_alone(valid, gpus, output, strict=strict, online=online))
    results = or_exit(lambda: [compute_estimate(recipe, shape, kind) for kind in gpus])
    if sweep or html is not None:
        _show_sweep(results, html, output)
    elif output is Format.json:
        described = [ledger.describe_estimate(each, said) for each in results]
        for each, told in zip(results, described, strict=True) if trace else ():
            told["trace"] = traced.describe_trace(_trace(valid, each.job.levers, online=online), each.ledger)
        printing.print_json({"results": described})
    else:
        for number, each in enumerate(results):
            text = ledger.format_estimate(each, valid.file, said)
            printing.print_data(f"\n{text}" if number else text)
            if trace:
                found = _trace(valid, each.job.levers, online=online)
                printing.print_data("\n" + traced.format_trace(found, each.ledger))
    raise typer.Exit(FAILED if strict and any(each.fit.verdict != "fits" for each in results) else DONE)


def _trace(valid: Validated, levers: Levers, *, online: bool) -> dict[str, Any]:
    from ulysses_cli import hub
    from ulysses_cli.commands.tracing import trace_recipe

    if valid.loaded is None:
        raise AssertionError("no recipe")
    recipe = valid.loaded.recipe
    return or_exit(lambda: trace_recipe(recipe, hub.find_model_config(recipe, online=online)[0], levers))


def _show_trace_alone(valid: Validated, gpus: list[Gpu], output: Format, *, strict: bool, online: bool) -> int:
    """A model that no formula describes: what a trace says, with levers that are left open off."""
    from ulysses_cli.plan.planner.lever_choice import read_levers
    from ulysses_cli.report import printing, traced

    if valid.loaded is None or valid.shape is None:
        raise AssertionError("no recipe")
    found = _trace(valid, read_levers(valid.loaded.recipe, valid.shape)[0], online=online)
    results = [traced.judge_trace(found, gpu) for gpu in gpus]
    if output is Format.json:
        printing.print_json({"results": results})
    else:
        printing.print_data(traced.format_verdicts(results) + "\n\n" + traced.format_trace(found, None))
    return FAILED if strict and any(each["verdict"] != "fits" for each in results) else DONE


def _show_sweep(results: list[Estimate], html: Path | None, output: Format) -> None:
    from ulysses_cli.report import printing, sweep

    found = sweep.compute_sweeps(results)
    if output is Format.json:
        printing.print_json({"sweeps": [sweep.describe_sweep(*each) for each in found]})
    else:
        printing.print_data("\n\n".join(sweep.format_sweep(*each) for each in found))
    if html is not None:
        write_page(html, sweep.make_sweep_page(found))


def _find_recipe(
    words: list[str], model: str | None, max_length: str | None, num_processes: int | None, *, online: bool
) -> tuple[Validated, list[str]]:
    """The recipe that is asked about, and what was taken for granted to have one."""
    from ulysses_cli import validate
    from ulysses_cli.plan.problem import Problem, RecipeError

    files, overrides = validate.split_words(words)
    if model is None:
        if max_length is not None:
            raise RecipeError(
                [Problem("--max-length", "belongs to --model", "write data.max_length=... after a recipe")]
            )
        if not files:
            hint = "name a recipe file, or --model NAME --max-length N --num-processes P"
            raise RecipeError([Problem("", "there is neither a recipe nor --model", hint)])
        if len(files) > 1:
            raise RecipeError([Problem("", f"one recipe at a time, not {', '.join(files)}")])
        return validate.validate_recipe(files[0], overrides, num_processes, online=online), []
    if files:
        raise RecipeError([Problem("--model", f"is given beside {files[0]}", "name a recipe or a model, not both")])
    return draft_and_validate(model, max_length, num_processes or 8, overrides, online=online)


def draft_and_validate(
    model: str, max_length: str | None, num_processes: int, overrides: list[str], *, online: bool
) -> tuple[Validated, list[str]]:
    """A recipe from a model's name and a length, checked like any other. Sizes that overrides give are kept, and the
    others made to fit."""
    from ulysses_cli import validate
    from ulysses_cli.plan.layout import Layout
    from ulysses_cli.plan.planner.draft import (
        GPUS_PER_NODE,
        Draft,
        find_obstacle,
        find_sp_size,
        needs_stretch,
        write_draft,
    )
    from ulysses_cli.plan.recipe.loader import parse_recipe

    shape = find_shape(model, online=online)
    tokens = read_length("--max-length", max_length)
    stretches = needs_stretch(shape, tokens)
    given = parse_recipe(write_draft(Draft(model, tokens, Layout())), "the command line", overrides)
    parallel = given.recipe.parallel
    replicas = parallel.dp_replicate_size
    said = []
    if "parallel.sp_size" in given.places:
        sp_size = parallel.sp_size
    else:
        sp_size = find_sp_size(shape, num_processes // replicas or 1, tokens)
        said.append(f"sp_size {sp_size}, the largest legal one inside a node; levers are auto")
        if tokens % GPUS_PER_NODE and num_processes > sp_size and not find_obstacle(shape):
            below = tokens // GPUS_PER_NODE * GPUS_PER_NODE
            said.append(f"{tokens:,} divides by few sp_sizes; {below:,} would leave more of them")
    shards = max(1, num_processes // (sp_size * replicas))
    layout = Layout(replicas, parallel.dp_shard_size if "parallel.dp_shard_size" in given.places else shards, sp_size)
    if stretches:
        said.append(f"positions are stretched by yarn: the model knows {shape.max_position_embeddings:,}")
    text = write_draft(Draft(model, tokens, layout, needs_stretch=stretches, is_packed=not shape.crosses_documents))
    return validate.validate_recipe("the command line", overrides, num_processes, online=online, text=text), said


def find_shape(model: str, *, online: bool) -> ModelShape:
    """A model's shape by its name, without a recipe."""
    from dataclasses import replace

    from ulysses_cli import hub
    from ulysses_cli.plan.planner.draft import quote
    from ulysses_cli.plan.problem import Problem, RecipeError, Where
    from ulysses_cli.plan.recipe.loader import parse_recipe

    if model.endswith((".yaml", ".yml")):
        raise RecipeError([Problem("--model", f"{model} is a recipe", "name its model: owner/name or a local folder")])
    text = f"model:\n  name_or_path: {quote(model)}\ndata:\n  datasets:\n    - path: owner/texts\n  max_length: 2\n"
    try:
        return hub.find_model_shape(parse_recipe(text).recipe, online=online).shape
    except RecipeError as error:
        raise RecipeError([replace(each, key="--model", where=Where()) for each in error.problems]) from None


def read_length(key: str, text: str | None) -> int:
    """A number of tokens, as in a recipe."""
    from ulysses_cli.plan.problem import Problem, RecipeError
    from ulysses_cli.plan.recipe.setting import MAX_TOKENS
    from ulysses_cli.plan.recipe.yaml_tree import parse_number

    hint = "write a number of tokens, such as 131072, 128Ki or 1M"
    if text is None:
        raise RecipeError([Problem(key, "required with --model", hint)])
    found = parse_number(re.sub("B$", "G", text.strip()))
    if not isinstance(found, int) or not 2 <= found <= MAX_TOKENS:
        raise RecipeError([Problem(key, f"{text} is not a whole number from 2 to {MAX_TOKENS:,}", hint)])
    return found
