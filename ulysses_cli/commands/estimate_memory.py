"""`ulysses estimate-memory`: predicts memory, time and price of a recipe, and what to change if it does not fit.
With --trace a child process traces a step; its result is cached under a hash of all that it depends on."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ulysses_cli.commands.options import (
    Format,
    FormatOption,
    OnlineOption,
    OptionalRecipeWords,
    check_page,
    complete_gpus,
    end_with,
    get_cache_folder,
    or_exit,
    write_page,
)
from ulysses_cli.plan.problem import DONE, FAILED

if TYPE_CHECKING:
    from ulysses_cli.plan.hardware import Gpu, Hardware
    from ulysses_cli.plan.levers import Levers
    from ulysses_cli.plan.models.shape import ModelShape
    from ulysses_cli.plan.planner.estimate import Estimate
    from ulysses_cli.plan.planner.lever_choice import LeverChoice
    from ulysses_cli.plan.problem import Problem
    from ulysses_cli.plan.recipe.loader import Loaded
    from ulysses_cli.plan.recipe.recipe import Recipe
    from ulysses_cli.validate import Validated


DEFAULT_GPU = "h100-80gb"
OPTIONS = {  # by the setting that each makes
    "model.name_or_path": "--model",
    "data.max_length": "--max-length",
    "parallel.dp_shard_size": "--num-processes",
}
MAX_PROCESSES = 1 << 20


def estimate_memory(
    words: OptionalRecipeWords = None,
    model: Annotated[
        str | None, typer.Option(help="instead of a recipe: a model on the hub (owner/name) or a local folder")
    ] = None,
    max_length: Annotated[str | None, typer.Option(help="with --model: tokens per row, such as 128Ki or 1M")] = None,
    num_processes: Annotated[
        int | None,
        typer.Option(
            min=1, max=MAX_PROCESSES, help="GPUs of the run; a recipe must fill them  [default with --model: 8]"
        ),
    ] = None,
    gpu: Annotated[
        list[str] | None,
        typer.Option(
            help="kind of GPU; repeat to compare several  [default: run.gpu, or h100-80gb]",
            autocompletion=complete_gpus,
        ),
    ] = None,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="memory against row length, for several layouts, instead of one estimate")
    ] = False,
    html: Annotated[
        Path | None, typer.Option(help="also write memory against row length to this file, as an HTML page")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="exit code 1 unless it fits with a safety margin")] = False,
    trace: Annotated[
        bool,
        typer.Option(
            "--trace",
            help="also run a step on tensors without data, count its allocations and compare; takes minutes",
        ),
    ] = False,
    online: OnlineOption = False,
    output: FormatOption = Format.text,
) -> None:
    """Predict the memory, time and price of a recipe before a GPU is rented. Needs no GPU.

    Shows GPU memory per rank and host memory per machine, item by item, and the longest row that fits. When the recipe
    does not fit, shows the cheapest change that makes it fit. With --model instead of a recipe, sp_size is the largest
    valid one inside a machine, and memory levers are auto.

    \b
    Examples:
      ulysses estimate-memory recipes/llama-3.1-8b-128k-8gpu.yaml --gpu h100-80gb --gpu h200
      ulysses estimate-memory --model Qwen/Qwen3-8B --max-length 256Ki --num-processes 8
      ulysses estimate-memory my.yaml data.max_length=512Ki memory.offload_optimizer=cpu --format json
      ulysses estimate-memory --model Qwen/Qwen3-8B --max-length 1M --sweep --html sweep.html
      ulysses estimate-memory my.yaml --trace
    """
    from ulysses_cli.hardware_table import describe_calibration, load_hardware
    from ulysses_cli.plan.hardware import list_untested
    from ulysses_cli.plan.ledger.job import is_known
    from ulysses_cli.plan.planner.estimate import compute_estimate

    or_exit(lambda: check_page(html))
    table = or_exit(load_hardware)
    named = or_exit(lambda: [table.get_gpu(name) for name in dict.fromkeys(gpu or ())])
    valid, notes = or_exit(lambda: _find_recipe(words or [], model, max_length, num_processes, online=online))
    if valid.problems or valid.loaded is None or valid.shape is None:
        end_with(valid.problems, output)
    recipe, shape = valid.loaded.recipe, valid.shape
    own = valid.loaded
    gpus = named or or_exit(lambda: [find_own_gpu(own, table) or table.get_gpu(DEFAULT_GPU)])
    if not named and recipe.run.gpu is None:
        notes.append(f"no --gpu is named: {DEFAULT_GPU}")
    notes += [*describe_calibration(), *list_untested(gpus)]
    if not is_known(shape):
        if trace:
            raise typer.Exit(_show_trace_alone(valid, gpus, output, strict=strict, online=online))
        raise typer.Exit(_show_moments_alone(valid, gpus, output, strict=strict))
    results = or_exit(lambda: [compute_estimate(recipe, shape, kind) for kind in gpus])
    if sweep:
        _show_sweep(results, output)
    else:
        _show_estimates(valid, results, notes, output, trace=trace, online=online)
    if html is not None:
        from ulysses_cli.report.ledger import compute_sweeps, make_sweep_page

        write_page(html, make_sweep_page(compute_sweeps(results)))
    raise typer.Exit(FAILED if strict and any(result.fit.verdict != "fits" for result in results) else DONE)


def find_own_gpu(loaded: Loaded, table: Hardware) -> Gpu | None:
    """The kind that the recipe is for. Training does not look at it: it sees the GPU."""
    from ulysses_cli.plan.problem import RecipeError

    name = loaded.recipe.run.gpu
    if name is None:
        return None
    try:
        return table.get_gpu(name, "run.gpu")
    except RecipeError as error:
        located = [replace(each, where=loaded.locate("run.gpu")) for each in error.problems]
        raise RecipeError(located) from None


def _show_estimates(
    valid: Validated, results: list[Estimate], notes: list[str], output: Format, *, trace: bool, online: bool
) -> None:
    """Prints one estimate per kind of GPU, each with a trace if one is asked for."""
    from ulysses_cli.report import ledger, printing

    if output is Format.json:
        described = [ledger.describe_estimate(result, notes) for result in results]
        for result, description in zip(results, described, strict=True) if trace else ():
            peaks = _trace(valid, result.job.levers, result.choice, online=online)
            description["trace"] = ledger.describe_trace(peaks, result.ledger)
        printing.print_json({"results": described})
        return
    for number, result in enumerate(results):
        text = ledger.format_estimate(result, valid.file, notes)
        printing.print_data(f"\n{text}" if number else text)
        if trace:
            peaks = _trace(valid, result.job.levers, result.choice, online=online)
            printing.print_data("\n" + ledger.format_trace(peaks, result.ledger))


def _trace(valid: Validated, levers: Levers, choice: LeverChoice | None = None, *, online: bool) -> dict[str, Any]:
    from ulysses_cli import hub

    if valid.loaded is None:
        raise AssertionError("no recipe")
    recipe = valid.loaded.recipe if choice is None else choice.settle_stage(valid.loaded.recipe)
    return or_exit(lambda: trace_recipe(recipe, hub.find_model_config(recipe, online=online)[0], levers))


def _show_trace_alone(valid: Validated, gpus: list[Gpu], output: Format, *, strict: bool, online: bool) -> int:
    """For a model of which weights are not known: the trace alone, with levers that are `auto` switched off."""
    from ulysses_cli.plan.planner.lever_choice import read_levers
    from ulysses_cli.report import ledger, printing

    if valid.loaded is None or valid.shape is None:
        raise AssertionError("no recipe")
    peaks = _trace(valid, read_levers(valid.loaded.recipe, valid.shape)[0], online=online)
    results = [ledger.judge_trace(peaks, gpu) for gpu in gpus]
    if output is Format.json:
        printing.print_json({"results": results})
    else:
        printing.print_data(ledger.format_verdicts(results) + "\n\n" + ledger.format_trace(peaks, None))
    return FAILED if strict and any(result["verdict"] != "fits" for result in results) else DONE


def _show_moments_alone(valid: Validated, gpus: list[Gpu], output: Format, *, strict: bool) -> int:
    """The same without torch: the model's own code runs on sizes alone."""
    from ulysses_cli.plan.ledger.job import make_job
    from ulysses_cli.plan.ledger.ledger import measure_alone
    from ulysses_cli.plan.planner.lever_choice import read_levers
    from ulysses_cli.report import ledger, printing

    if valid.loaded is None or valid.shape is None:
        raise AssertionError("no recipe")
    recipe, shape = valid.loaded.recipe, valid.shape
    job = make_job(recipe, shape, read_levers(recipe, shape)[0], needs_weights=False)

    moments = or_exit(lambda: measure_alone(job))
    results = [ledger.judge_moments(moments, gpu) for gpu in gpus]
    if output is Format.json:
        printing.print_json({"results": results})
    else:
        printing.print_data(ledger.format_moments(results, moments))
    return FAILED if strict and any(result["verdict"] != "fits" for result in results) else DONE


def _show_sweep(results: list[Estimate], output: Format) -> None:
    from ulysses_cli.report import ledger, printing

    sweeps = ledger.compute_sweeps(results)
    if output is Format.json:
        printing.print_json({"sweeps": [ledger.describe_sweep(*pair) for pair in sweeps]})
    else:
        printing.print_data("\n\n".join(ledger.format_sweep(*pair) for pair in sweeps))


def _find_recipe(
    words: list[str], model: str | None, max_length: str | None, num_processes: int | None, *, online: bool
) -> tuple[Validated, list[str]]:
    """The recipe to estimate, and notes on what was assumed to make one from --model."""
    from ulysses_cli.plan.problem import Problem, RecipeError
    from ulysses_cli.validate import split_words, validate_recipe

    files, overrides = split_words(words)
    if model is None:
        if max_length is not None:
            raise RecipeError(
                [Problem("--max-length", "is for --model only", "with a recipe, write data.max_length=... after it")]
            )
        if not files:
            hint = "name a recipe file, or --model NAME --max-length N --num-processes P"
            raise RecipeError([Problem("", "neither a recipe nor --model is given", hint)])
        if len(files) > 1:
            raise RecipeError([Problem("", f"one recipe at a time, not {', '.join(files)}")])
        return validate_recipe(files[0], overrides, num_processes, online=online, starts_anew=True), []
    if files:
        raise RecipeError(
            [Problem("--model", f"cannot be combined with {files[0]}", "name a recipe or a model, not both")]
        )
    for override in overrides:
        if (option := OPTIONS.get(override.partition("=")[0].strip())) in ("--model", "--max-length"):
            raise RecipeError([Problem(override.partition("=")[0].strip(), f"is what {option} says", "write it once")])
    return draft_and_validate(model, max_length, num_processes or 8, overrides, online=online)


def _name_option(problem: Problem) -> Problem:
    """A problem of the drafted recipe, which nobody sees: by the option that it comes from."""
    from ulysses_cli.plan.problem import Where

    if not problem.where.line:
        return problem
    option = OPTIONS.get(problem.key)
    if option == "--num-processes":
        problem = replace(problem, message=f"sets {problem.key}: {problem.message}", hint="use fewer processes")
    return replace(problem, key=option or problem.key, where=Where("command line"))


def draft_and_validate(
    model: str, max_length: str | None, num_processes: int, overrides: list[str], *, online: bool
) -> tuple[Validated, list[str]]:
    """Makes and checks a recipe from a model's name and a length. Sizes in overrides are kept; the others are chosen to
    match them."""
    from ulysses_cli.plan.layout import GPUS_PER_NODE, Layout
    from ulysses_cli.plan.planner.candidates import Draft, find_obstacle, find_sp_size, needs_stretch, write_draft
    from ulysses_cli.plan.recipe.loader import parse_recipe
    from ulysses_cli.plan.resolved import find_ring_size
    from ulysses_cli.validate import validate_recipe

    shape = find_shape(model, online=online)
    tokens = read_length("--max-length", max_length)
    stretches = needs_stretch(shape, tokens)
    given = parse_recipe(write_draft(Draft(model, tokens, Layout())), "the command line", overrides)
    parallel = given.recipe.parallel
    replicas = parallel.dp_replicate_size
    notes = []
    if "parallel.sp_size" in given.places:
        sp_size = parallel.sp_size
    else:
        sp_size = find_sp_size(shape, num_processes // replicas or 1, tokens)
        notes.append(f"sp_size {sp_size}, the largest valid one inside a machine; levers are auto")
        if tokens % GPUS_PER_NODE and num_processes > sp_size and not find_obstacle(shape):
            below = tokens // GPUS_PER_NODE * GPUS_PER_NODE
            notes.append(f"few sp_sizes divide {tokens:,}; more of them divide {below:,}")
    shards = max(1, num_processes // (sp_size * replicas))
    shards = parallel.dp_shard_size if "parallel.dp_shard_size" in given.places else shards
    ring_size = find_ring_size(shape, sp_size) if parallel.ring_size == "auto" else 1
    layout = Layout(replicas, shards, sp_size, ring_size)
    if stretches:
        notes.append(f"positions are stretched by yarn: the model was trained on {shape.max_position_embeddings:,}")
    text = write_draft(Draft(model, tokens, layout, needs_stretch=stretches, is_packed=not shape.crosses_documents))
    valid = validate_recipe("the command line", overrides, num_processes, online=online, text=text)
    return replace(valid, problems=tuple(map(_name_option, valid.problems))), notes


def find_shape(model: str, *, online: bool, key: str = "--model") -> ModelShape:
    """A model's shape from its name, without a recipe. `key`: where the name was written."""
    from ulysses_cli import hub
    from ulysses_cli.plan.planner.candidates import quote
    from ulysses_cli.plan.problem import Problem, RecipeError, Where
    from ulysses_cli.plan.recipe.loader import parse_recipe

    if model.endswith((".yaml", ".yml")):
        raise RecipeError([Problem(key, f"{model} is a recipe", "name its model: owner/name or a local folder")])
    text = f"model:\n  name_or_path: {quote(model)}\ndata:\n  datasets:\n    - path: owner/texts\n  max_length: 2\n"
    try:
        return hub.find_model_shape(parse_recipe(text).recipe, online=online).shape
    except RecipeError as error:
        raise RecipeError([replace(problem, key=key, where=Where()) for problem in error.problems]) from None


def read_length(key: str, text: str | None) -> int:
    """Reads a number of tokens, written as in a recipe."""
    from ulysses_cli.plan.problem import Problem, RecipeError
    from ulysses_cli.plan.recipe.schema import parse_number
    from ulysses_cli.plan.recipe.sections import MAX_TOKENS

    hint = "write a number of tokens, such as 131072, 128Ki or 1M"
    if text is None:
        raise RecipeError([Problem(key, "required with --model", hint)])
    number = parse_number(re.sub("B$", "G", text.strip()))
    if not isinstance(number, int) or not 2 <= number <= MAX_TOKENS:
        raise RecipeError([Problem(key, f"{text} is not a whole number from 2 to {MAX_TOKENS:,}", hint)])
    return number


SHOWN_CHARS = 2000


def trace_recipe(recipe: Recipe, config: Mapping[str, Any], levers: Levers) -> dict[str, Any]:
    """For a recipe that passed its checks. Takes minutes, or no time where the result is in the cache. Raises
    RecipeError where the trace fails."""
    from ulysses_cli.plan.problem import Problem, RecipeError
    from ulysses_cli.plan.resolved import make_layout
    from ulysses_cli.run import host

    request = {
        "recipe": recipe.model_dump(mode="json"),
        "config": dict(config),
        "levers": vars(levers),
        "world_size": make_layout(recipe).world_size,
    }
    file = get_cache_folder() / "traces" / f"{compute_key(request)}.json"
    try:
        return {**json.loads(file.read_text(encoding="utf-8")), "from_cache": True}
    except (OSError, ValueError):
        pass
    with host.start_module("ulysses_cli.prove.trace", [], stdin=PIPE, stdout=PIPE) as child:
        answer, _ = child.communicate(json.dumps(request))
    if child.returncode:
        reason = answer.strip()[-SHOWN_CHARS:] or f"it ended with code {child.returncode}"
        raise RecipeError([Problem("--trace", f"the traced step failed: {reason}", "see its output above")])
    result: dict[str, Any] = json.loads(answer)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps(result), encoding="utf-8")
        part.replace(file)
    except OSError:
        pass  # without a cache the next trace only takes longer
    return {**result, "from_cache": False}


def compute_key(request: Mapping[str, Any]) -> str:
    """A hash of the request, of the code that is traced and of the packages that it uses. Paths of data and of the run
    do not count."""
    from ulysses_cli.plan.ledger.kept import hash_code, hash_text

    recipe = {name: value for name, value in request["recipe"].items() if name != "run"}
    recipe["data"] = {name: value for name, value in recipe["data"].items() if name not in ("datasets", "store_dir")}
    return hash_text(hash_code() + json.dumps({**request, "recipe": recipe}, sort_keys=True, default=str))
