"""Speed and memory of a recipe at several lengths and sp sizes, each beside its prediction. A row that does not fit is
told with its cause, and the sweep goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from ulysses_cli.plan.estimate import explain_memory
from ulysses_cli.plan.hardware import Gpu, Hardware
from ulysses_cli.plan.ledger.job import Job, make_job
from ulysses_cli.plan.lever_choice import choose_levers, list_strongest
from ulysses_cli.plan.levers import Levers
from ulysses_cli.plan.memory import compute_ledger
from ulysses_cli.plan.model_shape import ModelShape, read_model_shape
from ulysses_cli.plan.recipe import Recipe
from ulysses_cli.plan.resolved import make_layout
from ulysses_cli.plan.speed import Speed, compute_speed
from ulysses_cli.prove.calibration import calibrate
from ulysses_cli.prove.ranks import RankFailureError, run_on_ranks
from ulysses_cli.prove.results import Findings, Row, Tell
from ulysses_cli.prove.speed import Timed, time_steps
from ulysses_cli.prove.trainer import time_trainer

LeverWish = Literal["auto", "all", "none"]
NUM_WARMUP = 3  # the last of them is clocked by parts, which costs a little
LARGEST_CPU_WORLD = 8
MEMORY_WORDS = ("OutOfMemoryError", "MemoryError", "killed")


@dataclass(frozen=True)
class Sweep:
    """What is to be measured."""

    lengths: tuple[int, ...]
    sp_sizes: tuple[int, ...]
    levers: LeverWish
    num_steps: int
    against_trainer: bool
    time_limit_seconds: float


@dataclass(frozen=True)
class Place:
    """What ranks run on here."""

    device: str
    num_places: int
    gpu: Gpu | None


def find_place(recipe: Recipe, hardware: Hardware) -> Place:
    """The recipe's device where it is there; CPU ranks otherwise."""
    count = torch.cuda.device_count() if recipe.run.device != "cpu" else 0
    if not count:
        return Place("cpu", LARGEST_CPU_WORLD, None)
    import os

    facts = torch.cuda.get_device_properties(0)
    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // count
    return Place("cuda", count, hardware.recognise(facts.name, facts.total_memory, host_bytes)[0])


def bench(
    recipe: Recipe, config: Mapping[str, Any], subject: str, hardware: Hardware, sweep: Sweep, tell: Tell
) -> Findings:
    """For a recipe that passed its checks. All rows use the same number of ranks: what is not sp is dp."""
    findings, place = Findings("bench", subject), find_place(recipe, hardware)
    shape = read_model_shape(config, subject)
    sizes = tuple(size for size in sweep.sp_sizes if size <= place.num_places)
    for size in sorted(set(sweep.sp_sizes) - set(sizes)):
        text = f"this machine has places for {place.num_places} ranks"
        findings.rows.append(Row(f"sp {size}", "all lengths", "SKIP", {}, text))
    world = min(place.num_places, max(sizes, default=1) * make_layout(recipe).dp_size)
    measured: list[tuple[Job, Timed]] = []
    for size in sizes:
        for length in sweep.lengths:
            wanted = make_bench_recipe(recipe, config, length, size, world // size, place.device)
            levers = settle_levers(wanted, shape, place.gpu, sweep.levers)
            job = make_job(wanted, shape, levers, gpus_per_node=place.gpu.gpus_per_node if place.gpu else 8)
            num_ranks = size * (world // size)
            tell(f"sp {size}, {length:,} tokens: {num_ranks} ranks")
            group = f"sp {size} x dp {world // size}"
            found = _measure(wanted, shape, levers, num_ranks, place, sweep)
            if isinstance(found, RankFailureError):
                findings.rows.append(_explain(found, group, length, wanted, shape, levers, place))
            else:
                measured.append((job, found))
                findings.rows.append(_describe(found, group, length, job, place.gpu))
            if sweep.against_trainer:
                tell(f"sp {size}, {length:,} tokens: the Trainer")
                findings.rows += _compare(found, wanted, shape, group, length, num_ranks, place, sweep)
    _add_notes(findings, recipe, sweep, place, world)
    if place.gpu is not None:
        findings.calibration = calibrate(measured, place.gpu)
    return findings


def make_bench_recipe(
    recipe: Recipe, config: Mapping[str, Any], length: int, sp_size: int, dp_size: int, device: str
) -> Recipe:
    """The recipe at another length and layout. A model that is not a local folder starts from random weights, whose
    speed is the same."""
    import os

    model = recipe.model
    if model.config is None and not os.path.isdir(os.path.expanduser(str(model.name_or_path))):
        model = model.model_copy(update={"name_or_path": None, "config": dict(config)})
    parallel = {"sp_size": sp_size, "dp_shard_size": dp_size, "dp_replicate_size": 1, "sp_seq_length": None}
    return recipe.model_copy(
        update={
            "model": model,
            "parallel": recipe.parallel.model_copy(update={**parallel, "sp_seq_length_is_variable": True}),
            "data": recipe.data.model_copy(update={"max_length": length, "pad_to_multiple_of": sp_size}),
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


def _measure(
    recipe: Recipe, shape: ModelShape, levers: Levers, num_ranks: int, place: Place, sweep: Sweep
) -> Timed | RankFailureError:
    peak = place.gpu.tflops if place.gpu else None
    try:
        return run_on_ranks(
            num_ranks,
            time_steps,
            recipe,
            shape,
            levers,
            peak,
            NUM_WARMUP,
            sweep.num_steps,
            device=place.device,
            time_limit=sweep.time_limit_seconds,
        )
    except RankFailureError as failure:
        return failure


def _describe(found: Timed, group: str, length: int, job: Job, gpu: Gpu | None) -> Row:
    values: dict[str, Any] = {"max_length": length, **found.describe()}
    if gpu is not None:
        speed, memory = compute_speed(job, gpu), compute_ledger(job).gpu_allocated_bytes
        values |= dict(_compare_prediction(found, speed, memory))
    parts = sorted(found.parts.items(), key=lambda part: -part[1])[:3]
    total = sum(found.parts.values()) or 1.0
    return Row(group, f"{length:,}", "", values, ", ".join(f"{name} {time / total:.0%}" for name, time in parts))


def _compare_prediction(found: Timed, speed: Speed, memory_bytes: int) -> Iterator[tuple[str, Any]]:
    """An error is the prediction's: above zero it was too high."""
    yield "predicted_step_seconds", speed.step_seconds
    yield "step_error", speed.step_seconds / found.step_seconds - 1
    if found.peak_memory_bytes:
        yield "predicted_memory_bytes", memory_bytes
        yield "memory_error", memory_bytes / found.peak_memory_bytes - 1


def _explain(
    failure: RankFailureError,
    group: str,
    length: int,
    recipe: Recipe,
    shape: ModelShape,
    levers: Levers,
    place: Place,
) -> Row:
    is_memory = failure.kind in MEMORY_WORDS or "allocate memory" in failure.message
    if not is_memory:
        return Row(group, f"{length:,}", "FAIL", {"max_length": length}, str(failure))
    cause = failure.message
    if place.gpu is not None and failure.kind == "OutOfMemoryError":
        cause = " ".join(explain_memory(recipe, shape, levers, place.gpu).split())
    return Row(group, f"{length:,}", "OOM", {"max_length": length}, f"rank {failure.rank}: {cause}")


def _compare(
    ours: Timed | RankFailureError,
    recipe: Recipe,
    shape: ModelShape,
    group: str,
    length: int,
    num_ranks: int,
    place: Place,
    sweep: Sweep,
) -> list[Row]:
    """The Trainer's own path with the same model, rows and ZeRO config; ratios where both ran."""
    name = f"{length:,} by the Trainer"
    try:
        theirs = run_on_ranks(
            num_ranks,
            time_trainer,
            recipe,
            shape,
            NUM_WARMUP,
            sweep.num_steps,
            device=place.device,
            time_limit=sweep.time_limit_seconds,
        )
    except RankFailureError as failure:
        is_memory = failure.kind in MEMORY_WORDS
        return [Row(group, name, "OOM" if is_memory else "WARN", {}, f"the Trainer failed: {failure}")]
    rows = [Row(group, name, "", theirs.describe())]
    if isinstance(ours, Timed):
        ratios = {
            "speed_ratio": theirs.step_seconds / ours.step_seconds,
            "host_memory_ratio": theirs.host_peak_memory_bytes / ours.host_peak_memory_bytes,
        }
        if ours.peak_memory_bytes and theirs.peak_memory_bytes:
            ratios["memory_ratio"] = theirs.peak_memory_bytes / ours.peak_memory_bytes
        text = "above 1: this tool is faster, or needs less"
        rows.append(Row(group, f"{length:,} Trainer / ours", "", ratios, text))
    return rows


def _add_notes(findings: Findings, recipe: Recipe, sweep: Sweep, place: Place, world: int) -> None:
    medians = f"median of {sweep.num_steps} steps after {NUM_WARMUP}"
    where = f"{world} ranks on {place.gpu.name if place.gpu else 'CPU'}"
    findings.notes.append(f"{where}; levers {sweep.levers}; each row is one document; {medians}")
    if place.gpu is None:
        findings.notes.append("CPU ranks: nothing is predicted for them, and nothing can be calibrated")
