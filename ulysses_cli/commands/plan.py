"""`ulysses plan`: finds GPUs, layouts and memory levers for a model and a row length, with their cost and time."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ulysses_cli.commands.estimate_memory import find_shape, read_length
from ulysses_cli.commands.options import Format, FormatOption, OnlineOption, complete_gpus, or_exit
from ulysses_cli.plan.problem import DONE, USAGE
from ulysses_cli.plan.units import format_count, format_usd

if TYPE_CHECKING:
    from ulysses_cli.plan.hardware import Hardware
    from ulysses_cli.plan.models.shape import ModelShape
    from ulysses_cli.plan.planner.candidates import Candidate, Offer, PlanRequest, SearchResult

DEFAULT_TOKENS = 10**9
MAX_MACHINES = 64
MAX_GPUS = 1 << 20
UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


class Method(StrEnum):
    auto = "auto"
    full = "full"
    lora = "lora"
    qlora = "qlora"


class Order(StrEnum):
    cost = "cost"
    time = "time"


def plan(
    model: Annotated[str, typer.Option(help="a model on the hub (owner/name) or a local folder")],
    max_length: Annotated[str | None, typer.Option(help="tokens per row, such as 128Ki or 1M")] = None,
    tokens: Annotated[str | None, typer.Option(help="tokens to train on in all  [default: 1B]")] = None,
    tokens_per_step: Annotated[
        str | None,
        typer.Option(
            help="tokens of an optimizer step, the same in every plan  [default: 1Mi, at most a hundredth of --tokens, "
            "in whole rows]"
        ),
    ] = None,
    gpus: Annotated[
        list[str] | None,
        typer.Option(
            help="the GPUs you can get, as KIND:MOST,... or repeated  [default: all NVIDIA kinds, up to 64 machines]",
            autocompletion=complete_gpus,
        ),
    ] = None,
    budget: Annotated[
        float | None, typer.Option(min=0.01, max=1e12, help="highest cost in USD, at mid-range prices")
    ] = None,
    deadline: Annotated[str | None, typer.Option(help="longest time, such as 24h or 3d")] = None,
    method: Annotated[
        Method,
        typer.Option(
            help="train all weights (full), adapters of rank 16 (lora), those on a base in 4 bits (qlora), or the "
            "first that fits"
        ),
    ] = Method.auto,
    nvme_path: Annotated[
        str | None,
        typer.Option(help="a folder on each machine's local disk, for what neither its GPUs nor its memory hold"),
    ] = None,
    longest: Annotated[
        bool, typer.Option("--longest", help="instead: find the longest row that fits on all GPUs of --gpus")
    ] = False,
    by: Annotated[Order, typer.Option(help="whether --write takes the cheapest plan or the fastest")] = Order.cost,
    write: Annotated[Path | None, typer.Option(help="write the best plan as a recipe to this file")] = None,
    force: Annotated[bool, typer.Option("--force", help="overwrite an existing file")] = False,
    online: OnlineOption = False,
    output: FormatOption = Format.text,
) -> None:
    """Find the cheapest and the fastest GPUs, machine counts and settings that can train a model at a row length.

    Each plan shows its memory margin, its hours, a range of its cost, and what limits its speed. When nothing fits, the
    limit that stops it and how far away it is are shown. Exit code 2 when there is no plan.

    \b
    Examples:
      ulysses plan --model Qwen/Qwen3-8B --max-length 256Ki --tokens 500M
      ulysses plan --model Qwen/Qwen3-8B --max-length 1M --gpus h100-80gb:8,h200:16 --budget 200 --write my.yaml
      ulysses plan --model Qwen/Qwen3-8B --longest --gpus h100-80gb:8,a100-80gb:8
      ulysses plan --model Qwen/Qwen3-8B --max-length 1Mi --gpus h200:1 --nvme-path /mnt/nvme
    """
    from ulysses_cli.hardware_table import describe_calibration, load_hardware
    from ulysses_cli.plan.hardware import list_untested
    from ulysses_cli.plan.planner import search
    from ulysses_cli.report import planner, printing

    table = or_exit(load_hardware)
    offers = or_exit(lambda: read_offers(",".join(gpus) if gpus else None, table))
    request, notes = or_exit(
        lambda: read_request(model, max_length, tokens, budget, deadline, longest, online, nvme_path, tokens_per_step)
    )
    if write is not None:
        or_exit(lambda: _check_writable(write, force, longest))
    notes += list_untested(offer.gpu for offer in offers)
    wished = None if method is Method.auto else str(method)
    requests = or_exit(lambda: search.list_methods(request, wished))
    if longest:
        raise typer.Exit(_show_longest(requests, offers, notes, output))
    notes += [*search.list_limits(request, offers), *describe_calibration()]
    notes += [f"the budget of {format_usd(budget)} is compared with mid-range prices"] if budget is not None else []
    shown = max(search.SHOWN, len(offers) if gpus else 0)
    request, result = or_exit(lambda: search.search_methods(requests, offers, shown, explains=bool(gpus)))
    if request.method != requests[0].method and result.by_cost:
        inside = " inside the bounds" if budget is not None or deadline is not None else ""
        notes.append(f"--method {request.method}: no plan that trains all weights fits{inside}")
    if output is Format.json:
        printing.print_json(planner.describe_search(result, notes))
    elif result.by_cost:
        rows = f"{request.max_length:,} tokens per row, {request.num_tokens:,} tokens in all"
        title = f"{request.shape.name}, {rows}, {request.method} training"
        printing.print_data(planner.format_search(result, title, notes))
    if not result.by_cost:
        _explain_walls(result)
        if budget is not None:
            printing.print_message(planner.format_prices([offer.gpu for offer in offers]))
        raise typer.Exit(USAGE)
    if write is not None:
        best = result.by_cost[0] if by is Order.cost else result.by_time[0]
        or_exit(lambda: _write_recipe(best, request, model, write, online=online))
        printing.print_message(f"wrote {write}: put your data in it, then ulysses validate-config {write}")


def _show_longest(requests: list[PlanRequest], offers: list[Offer], notes: list[str], output: Format) -> int:
    """Prints the longest row of each offer. Returns the exit code."""
    from ulysses_cli.plan.planner import search
    from ulysses_cli.report import planner, printing

    if len(offers) > 1:
        message = f"looking for the longest row on {len(offers)} kinds of GPU; --gpus with fewer is quicker"
        printing.print_message(message)
    rows = or_exit(lambda: search.search_longest(requests, offers))
    if output is Format.json:
        printing.print_json(planner.describe_longest(rows, notes))
        return DONE if rows else USAGE
    if rows:
        title = f"{requests[0].shape.name}: the longest row that memory holds for sure"
        printing.print_data(planner.format_longest(rows, title, notes))
    hint = "offer more of them, or GPUs with more memory"
    hint += "" if len(requests) > 1 or requests[0].method == "qlora" else ", or leave out --method to try adapters"
    for offer in offers:
        if offer.gpu.key not in {row.candidate.gpu.key for row in rows}:
            named = f"{offer.max_gpus} x {offer.gpu.key}: {', '.join(each.method for each in requests)}"
            printing.print_message(f"{named}: no row fits, with any memory levers: {hint}")
    return DONE if rows else USAGE


def read_request(
    model: str,
    max_length: str | None,
    tokens: str | None,
    budget: float | None,
    deadline: str | None,
    longest: bool,
    online: bool,
    nvme_path: str | None = None,
    tokens_per_step: str | None = None,
) -> tuple[PlanRequest, list[str]]:
    from ulysses_cli.plan.planner.candidates import PlanRequest, find_obstacle, needs_stretch
    from ulysses_cli.plan.problem import Problem, RecipeError

    if longest and max_length is not None:
        raise RecipeError(
            [Problem("--longest", "finds the length, but --max-length gives one", "leave out one of them")]
        )
    bounds = {"--budget": budget, "--deadline": deadline, "--tokens-per-step": tokens_per_step}
    ruled_out = [name for name, bound in bounds.items() if longest and bound is not None]
    if ruled_out:
        message, hint = "bounds a plan for rows of --max-length; --longest has none", "leave out one of them"
        raise RecipeError([Problem(name, message, hint) for name in ruled_out])
    shape = find_shape(model, online=online)
    length = 0 if longest else read_length("--max-length", max_length)
    num_tokens = DEFAULT_TOKENS if tokens is None else read_length("--tokens", tokens)
    if not longest and num_tokens < length:
        hint = f"write at least {length:,}"
        given = f"{num_tokens:,}" if tokens is not None else f"{num_tokens:,}, its default,"
        raise RecipeError([Problem("--tokens", f"{given} are less than one row of {length:,}", hint)])
    notes = [] if tokens is not None or longest else [f"--tokens {DEFAULT_TOKENS:,}"]
    _check_model(model, shape, length or 2)
    if find_obstacle(shape):
        notes.append(f"one GPU for each row: {find_obstacle(shape)}")
    if needs_stretch(shape, length):
        notes.append(f"positions are stretched by yarn: the model was trained on {shape.max_position_embeddings:,}")
    seconds = None if deadline is None else _read_time(deadline)
    wished = None if tokens_per_step is None else read_length("--tokens-per-step", tokens_per_step)
    if wished is not None and wished > num_tokens:
        hint = "write fewer, or raise --tokens"
        raise RecipeError([Problem("--tokens-per-step", f"{wished:,} are more than the {num_tokens:,} in all", hint)])
    request = PlanRequest(
        shape,
        length,
        num_tokens,
        budget_usd=budget,
        deadline_seconds=seconds,
        nvme_path=nvme_path,
        tokens_per_step=wished,
    )
    notes += [] if longest else [_describe_step(request)]
    return request, notes


def _describe_step(request: PlanRequest) -> str:
    rows = request.rows_per_step
    step = f"{rows * request.max_length:,} ({format_count(rows, 'row')})"
    if request.tokens_per_step is None:
        return f"--tokens-per-step {step}; every plan keeps it, by accumulation where its GPUs are few"
    if request.tokens_per_step % request.max_length:
        return f"--tokens-per-step {request.tokens_per_step:,} is rounded up to {step}"
    return f"--tokens-per-step {step}"


def _check_model(model: str, shape: ModelShape, length: int) -> None:
    """Raises RecipeError for what no layout can fix: weights, dropout, positions."""
    from ulysses_cli.plan.layout import Layout
    from ulysses_cli.plan.planner.candidates import Draft, needs_stretch, write_draft
    from ulysses_cli.plan.problem import RecipeError
    from ulysses_cli.plan.recipe.loader import parse_recipe
    from ulysses_cli.plan.rules import model as check_model

    draft = Draft(model, length, Layout(), needs_stretch=needs_stretch(shape, length))
    recipe = parse_recipe(write_draft(draft)).recipe
    rules = (
        check_model.check_weights,
        check_model.check_dropout,
        check_model.check_attention_kind,
        check_model.check_router_loss,
        check_model.check_positions,
    )
    problems = [problem for rule in rules for problem in rule(recipe, shape)]
    if problems:
        raise RecipeError(problems)


def _read_time(text: str) -> float:
    from ulysses_cli.plan.problem import Problem, RecipeError

    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([a-z]+)", text.strip().lower())
    if not match or match[2] not in UNITS or float(match[1]) <= 0:
        raise RecipeError([Problem("--deadline", f"{text} is not a time", "write hours or days, such as 24h or 3d")])
    return float(match[1]) * UNITS[match[2]]


def read_offers(text: str | None, table: Hardware) -> list[Offer]:
    """Reads `h100-80gb:8,h200`; a kind without a number means up to 64 machines, and nothing every kind of NVIDIA's."""
    from ulysses_cli.plan.planner.candidates import Offer
    from ulysses_cli.plan.problem import Problem, RecipeError

    if text is None:
        return [Offer(gpu, MAX_MACHINES * gpu.gpus_per_node) for gpu in table.gpus.values() if not gpu.is_amd]
    offers: list[Offer] = []
    for part in text.strip(", ").split(","):
        name, colon, count = part.strip().partition(":")
        gpu = table.get_gpu(name, "--gpus")
        if colon and not (count.isascii() and count.isdigit() and 1 <= int(count) <= MAX_GPUS):
            hint = f"write KIND:MOST, such as {gpu.key}:8"
            message = f"{count or 'nothing'} is not a number of GPUs from 1 to {MAX_GPUS:,}"
            raise RecipeError([Problem("--gpus", message, hint)])
        if any(offer.gpu.key == gpu.key for offer in offers):
            hint = f"name each kind once, with the most that you can get, such as {gpu.key}:8"
            raise RecipeError([Problem("--gpus", f"{gpu.key} is named twice", hint)])
        offers.append(Offer(gpu, int(count) if colon else MAX_MACHINES * gpu.gpus_per_node))
    return offers


def _check_writable(file: Path, force: bool, longest: bool) -> None:
    from ulysses_cli.plan.problem import Problem, RecipeError

    if longest:
        raise RecipeError([Problem("--write", "is for a plan with --max-length", "leave out --longest")])
    if file.is_dir():
        raise RecipeError([Problem("--write", f"{file} is a folder", "name a file")])
    if file.exists() and not force:
        raise RecipeError([Problem("--write", f"{file} exists", "add --force to overwrite it, or name another file")])
    if not file.parent.is_dir():
        raise RecipeError([Problem("--write", f"{file.parent} is not a folder", "make it, or name another file")])


def _write_recipe(best: Candidate, request: PlanRequest, model: str, file: Path, *, online: bool) -> None:
    """Writes the recipe of a plan, after checking it."""
    from ulysses_cli.plan.planner.candidates import write_draft
    from ulysses_cli.plan.planner.search import draft_candidate
    from ulysses_cli.plan.problem import Problem, RecipeError
    from ulysses_cli.validate import validate_recipe

    draft, header = draft_candidate(best, request, model, str(file))
    text = write_draft(draft, header)
    valid = validate_recipe(str(file), online=online, text=text)
    if valid.problems:
        raise RecipeError(valid.problems)
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RecipeError([Problem("--write", f"{file} cannot be written: {error.strerror}")]) from None


def _explain_walls(result: SearchResult) -> None:
    from ulysses_cli.plan.problem import Problem
    from ulysses_cli.report import printing

    printing.print_problems([Problem(f"no plan ({wall.kind})", wall.message, wall.hint) for wall in result.walls])
