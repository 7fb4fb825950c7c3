"""Speed and memory of a recipe at several lengths and sp sizes, each beside its prediction. A row that does not fit is
told with its cause, and the sweep goes on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch

from ulysses_cli.plan.hardware import Gpu, Hardware
from ulysses_cli.plan.ledger.job import Job, make_job
from ulysses_cli.plan.ledger.ledger import compute_ledger
from ulysses_cli.plan.levers import Levers
from ulysses_cli.plan.models.shape import ModelShape, read_model_shape
from ulysses_cli.plan.nouns import format_count
from ulysses_cli.plan.planner.estimate import explain_memory
from ulysses_cli.plan.planner.lever_choice import choose_levers, list_strongest
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.plan.resolved import make_layout
from ulysses_cli.plan.speed import compute_speed
from ulysses_cli.prove.bench.calibration import calibrate
from ulysses_cli.prove.bench.speed import Timed, time_steps
from ulysses_cli.prove.ranks.interleaving import compare_pairs
from ulysses_cli.prove.ranks.ranks import RankFailureError, run_in_turns
from ulysses_cli.prove.results import Findings, Row, Tell
from ulysses_cli.train.processes.host_memory import count_host_bytes

LeverWish = Literal["auto", "all", "none"]
NUM_WARMUP = 3  # the last of them is clocked by parts, which costs a little
LARGEST_CPU_WORLD = 8
MEMORY_WORDS = ("OutOfMemoryError", "MemoryError", "killed")
SAME_LOSS = 5e-3  # relative; bfloat16 and another order of sums


@dataclass(frozen=True)
class BenchSweep:
    """What is to be measured. With `is_paired`, all sp sizes of a length take steps in turns, the first one's time by
    the others'."""

    lengths: tuple[int, ...]
    sp_sizes: tuple[int, ...]
    levers: LeverWish
    num_steps: int
    against_trainer: bool
    time_limit_seconds: float
    is_paired: bool = False


@dataclass(frozen=True)
class BenchDevice:
    """What ranks run on here."""

    device: str
    num_places: int
    gpu: Gpu | None


@dataclass(frozen=True)
class Cell:
    """One row of the sweep: a length and a layout, with everything settled."""

    group: str
    recipe: Recipe
    levers: Levers
    job: Job

    @property
    def length(self) -> int:
        return self.recipe.data.max_length


@dataclass(frozen=True)
class Side:
    """Someone who takes a cell's steps: this tool, or the Trainer."""

    cell: Cell
    call: tuple[Callable[..., Any], tuple[Any, ...]]

    @property
    def is_ours(self) -> bool:
        return self.call[0] is time_steps

    @property
    def group(self) -> str:
        return self.cell.group if self.is_ours else f"{self.cell.group}, the Trainer"

    @property
    def name(self) -> str:
        return f"{self.cell.length:,}"


Outcome = Timed | RankFailureError


def find_place(recipe: Recipe, hardware: Hardware) -> BenchDevice:
    """The recipe's device where it is there; CPU ranks otherwise."""
    count = torch.cuda.device_count() if recipe.run.device != "cpu" else 0
    if not count:
        return BenchDevice("cpu", LARGEST_CPU_WORLD, None)
    facts = torch.cuda.get_device_properties(0)
    host_bytes = count_host_bytes() // count
    return BenchDevice("cuda", count, hardware.recognise(facts.name, facts.total_memory, host_bytes)[0])


def bench(
    recipe: Recipe, config: Mapping[str, Any], subject: str, hardware: Hardware, sweep: BenchSweep, tell: Tell
) -> Findings:
    """For a recipe that passed its checks. All rows use the same number of ranks: what is not sp is dp."""
    findings, place = Findings("bench", subject), find_place(recipe, hardware)
    shape = read_model_shape(config, subject)
    sizes = tuple(size for size in sweep.sp_sizes if size <= place.num_places)
    for size in sorted(set(sweep.sp_sizes) - set(sizes)):
        text = f"this machine has places for {format_count(place.num_places, 'rank')}"
        findings.rows.append(Row(f"sp {size}", "all lengths", "SKIP", {}, text))
    world = min(place.num_places, max(sizes, default=1) * make_layout(recipe).dp_size)
    world -= world % max(sizes, default=1)
    measured: list[tuple[Job, Timed]] = []
    ratios: list[Row] = []
    settled = partial(settle, recipe, config, shape, world=world, place=place, wish=sweep.levers)
    cells = [settled(length, size) for size in sizes for length in sweep.lengths]
    for sides in list_turns(cells, shape, place, sweep):
        names = " and ".join(f"{side.group}, {side.name} tokens" for side in sides)
        tell(f"{names}: {format_count(world, 'rank')}" + (" each, step by step in turns" if len(sides) > 1 else ""))
        found, is_paired = measure(sides, world, place, sweep)
        for side, outcome in zip(sides, found, strict=True):
            findings.rows.append(describe(side, outcome, shape, place))
            if side.is_ours and isinstance(outcome, Timed):
                measured.append((side.cell.job, outcome))
        if len(sides) > 1 and isinstance(found[0], Timed) and isinstance(found[1], Timed):
            ratios.append(compare(sides, found[0], found[1], is_paired=is_paired))
    findings.rows += ratios
    _add_notes(findings, sweep, place, world)
    if place.gpu is not None:
        findings.calibration = calibrate(measured, place.gpu)
    return findings


def settle(
    recipe: Recipe,
    config: Mapping[str, Any],
    shape: ModelShape,
    length: int,
    sp_size: int,
    *,
    world: int,
    place: BenchDevice,
    wish: LeverWish,
) -> Cell:
    dp_size = world // sp_size
    wanted = make_bench_recipe(recipe, config, length, sp_size, dp_size, place.device)
    levers = settle_levers(wanted, shape, place.gpu, wish)
    job = make_job(wanted, shape, levers, gpus_per_node=place.gpu.gpus_per_node if place.gpu else 8)
    return Cell(f"sp {sp_size} x dp {dp_size}", wanted, levers, job)


def list_turns(
    cells: Sequence[Cell], shape: ModelShape, place: BenchDevice, sweep: BenchSweep
) -> Iterator[tuple[Side, ...]]:
    """What runs side by side: a cell alone, with the Trainer, or with the same length at another sp size."""
    peak = place.gpu.tflops if place.gpu else None

    def take(cell: Cell) -> Side:
        args = (cell.recipe, shape, cell.levers, peak, NUM_WARMUP, sweep.num_steps)
        return Side(cell, (time_steps, args))

    if sweep.is_paired:
        for length in sweep.lengths:
            first, *others = [cell for cell in cells if cell.length == length]
            yield from ((take(other), take(first)) for other in others) if others else [(take(first),)]
        return
    for cell in cells:
        own = take(cell)
        if sweep.against_trainer:
            from ulysses_cli.prove.bench.trainer import time_trainer

            args = (cell.recipe, shape, cell.levers, NUM_WARMUP, sweep.num_steps)
            yield own, Side(cell, (time_trainer, args))
        else:
            yield (own,)


def measure(sides: Sequence[Side], world: int, place: BenchDevice, sweep: BenchSweep) -> tuple[list[Outcome], bool]:
    """-> how each side fared, and whether they took turns to the end. Two models at once may be too much for the
    memory: then each runs by itself."""
    run = partial(run_in_turns, world, device=place.device, time_limit=sweep.time_limit_seconds)
    found = run([side.call for side in sides])
    if len(sides) == 1 or not any(isinstance(outcome, RankFailureError) and is_memory(outcome) for outcome in found):
        return found, True
    return [run([side.call])[0] for side in sides], False


def make_bench_recipe(
    recipe: Recipe, config: Mapping[str, Any], length: int, sp_size: int, dp_size: int, device: str
) -> Recipe:
    """The recipe at another length and layout. A model that is not a local folder, or that grows, starts from random
    weights, whose speed is the same. `config` has room for added tokens."""
    model = recipe.model
    is_here = os.path.isdir(os.path.expanduser(str(model.name_or_path)))
    if not is_here or recipe.data.added_tokens:
        model = model.model_copy(update={"name_or_path": None, "config": dict(config)})
    parallel = {"sp_size": sp_size, "dp_shard_size": dp_size, "dp_replicate_size": 1, "sp_seq_length": None}
    return recipe.model_copy(
        update={
            "model": model,
            "parallel": recipe.parallel.model_copy(update={**parallel, "sp_seq_length_is_variable": True}),
            "data": recipe.data.model_copy(
                update={"max_length": length, "pad_to_multiple_of": sp_size, "added_tokens": ()}
            ),
            "run": recipe.run.model_copy(update={"device": device}),
        }
    )


def settle_levers(recipe: Recipe, shape: ModelShape, gpu: Gpu | None, wish: LeverWish) -> Levers:
    if wish == "auto":
        return choose_levers(recipe, shape, gpu).levers
    if wish == "none":
        return Levers(gradient_checkpointing=False)
    strongest = list_strongest(make_job(recipe, shape, Levers()))[-1]  # recomputing keeps attention, weights stay
    if gpu is None:  # CPU Adam would be the optimizer that runs there anyway
        strongest = replace(strongest, offload_optimizer="none")
    return strongest


def is_memory(failure: RankFailureError) -> bool:
    return failure.kind in MEMORY_WORDS or "allocate memory" in failure.message


def describe(side: Side, found: Outcome, shape: ModelShape, place: BenchDevice) -> Row:
    """One side of one cell as a row; ours beside its prediction."""
    cell = side.cell
    if isinstance(found, RankFailureError):
        return _explain(found, side, shape, place)
    values: dict[str, Any] = {"max_length": cell.length, **found.describe()}
    if not side.is_ours:
        return Row(side.group, side.name, "", values)
    if place.gpu is not None:
        values |= dict(_compare_prediction(found, cell.job, place.gpu))
    parts = sorted(found.parts.items(), key=lambda part: -part[1])[:3]
    total = sum(found.parts.values()) or 1.0
    return Row(cell.group, side.name, "", values, ", ".join(f"{name} {time / total:.0%}" for name, time in parts))


def _compare_prediction(found: Timed, job: Job, gpu: Gpu) -> Iterator[tuple[str, Any]]:
    """What `estimate-memory` says of this row. An error is the prediction's: above zero it was too high."""
    seconds, ledger = compute_speed(job, gpu).step_seconds, compute_ledger(job)
    yield "predicted_step_seconds", seconds
    yield "step_error", seconds / found.step_seconds - 1
    if found.peak_memory_bytes:
        yield "predicted_memory_bytes", ledger.gpu_allocated_bytes
        yield "memory_error", ledger.gpu_allocated_bytes / found.peak_memory_bytes - 1
    host_bytes = ledger.host_peak_bytes // min(job.world_size, gpu.gpus_per_node)  # a node's, shared by its ranks
    yield "predicted_host_memory_bytes", host_bytes
    yield "host_memory_error", host_bytes / found.host_peak_memory_bytes - 1


def _explain(failure: RankFailureError, side: Side, shape: ModelShape, place: BenchDevice) -> Row:
    """A row that was too long is no failure of the sweep; the peer's failures are not this tool's."""
    cell, text, values = side.cell, str(failure), {"max_length": side.cell.length}
    if not is_memory(failure):
        return Row(side.group, side.name, "FAIL" if side.is_ours else "WARN", values, text)
    if side.is_ours and place.gpu is not None and failure.kind == "OutOfMemoryError":
        cause = " ".join(explain_memory(cell.recipe, shape, cell.levers, place.gpu).split())
        text = f"rank {failure.rank}: {cause}"
    return Row(side.group, side.name, "OOM", values, text)


def compare(sides: Sequence[Side], ours: Timed, theirs: Timed, *, is_paired: bool) -> Row:
    """The second side by the first. Above 1: the first is faster, or needs less."""
    first, second = sides
    group = "the Trainer's time by ours" if first.cell is second.cell else "time with sp off by time with sp on"
    pairs = compare_pairs(ours.seconds_per_token, theirs.seconds_per_token)
    values: dict[str, Any] = {}
    if pairs is not None:
        spread = {"ratio_low": pairs.low, "ratio_high": pairs.high, "num_pairs": pairs.num_pairs} if is_paired else {}
        values = {"speed_ratio": pairs.middle, **spread}
    values["host_memory_ratio"] = theirs.host_peak_memory_bytes / ours.host_peak_memory_bytes
    if ours.peak_memory_bytes and theirs.peak_memory_bytes:
        values["memory_ratio"] = theirs.peak_memory_bytes / ours.peak_memory_bytes
    share = ours.get_share("exchange")
    if share is not None:
        values["exchange_share"] = share
    difference = abs(ours.first_loss - theirs.first_loss) / max(abs(theirs.first_loss), 1e-12)
    values["first_loss_difference"] = difference
    text = "above 1: the first is faster, or needs less"
    text += "" if is_paired else "; one after the other, since both at once do not fit"
    name = f"{first.cell.group}, {first.name}"
    if not difference <= SAME_LOSS:
        return Row(group, name, "WARN", values, f"the sides do not compute the same loss; {text}")
    return Row(group, name, "", values, text)


def _add_notes(findings: Findings, sweep: BenchSweep, place: BenchDevice, world: int) -> None:
    medians = f"median of {format_count(sweep.num_steps, 'step')} after {NUM_WARMUP}"
    where = f"{format_count(world, 'rank')} on {place.gpu.name if place.gpu else 'CPU'}"
    findings.notes.append(f"{where}; levers {sweep.levers}; each row is one document; {medians}")
    if sweep.against_trainer or sweep.is_paired:
        findings.notes.append("ratios are medians of pairs of neighbouring steps; low and high are their quartiles")
    if place.gpu is None:
        findings.notes.append("CPU ranks: nothing is predicted for them, and nothing can be calibrated")
