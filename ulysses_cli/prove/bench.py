"""`bench`: measures speed and memory of a recipe at several lengths and sp sizes, and compares each with its
prediction.

A cell of the sweep that runs out of memory is reported with its cause, and the sweep continues."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from ulysses_cli.plan.files import remove_own
from ulysses_cli.plan.hardware import Gpu, Hardware
from ulysses_cli.plan.ledger.job import Job, make_job
from ulysses_cli.plan.ledger.ledger import measure_ledger
from ulysses_cli.plan.levers import Levers, uses_disk
from ulysses_cli.plan.models.shape import ModelShape, read_model_shape
from ulysses_cli.plan.planner.estimate import explain_memory
from ulysses_cli.plan.planner.lever_choice import choose_levers, list_strongest
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.plan.resolved import make_layout
from ulysses_cli.plan.speed import compute_speed
from ulysses_cli.plan.units import format_bytes, format_count
from ulysses_cli.prove.ranks import MAX_CPU_RANKS, RankFailureError, compare_pairs, run_interleaved
from ulysses_cli.prove.results import Findings, Report, Row
from ulysses_cli.prove.speed import Timed, calibrate, time_steps
from ulysses_cli.train.optimizer.states import name_folder
from ulysses_cli.train.processes.host import count_usable_bytes

LeverMode = Literal["auto", "all", "none"]
NUM_WARMUP = 3  # the last one is timed by parts, which costs a little time
MEMORY_WORDS = ("OutOfMemoryError", "MemoryError", "killed")
SAME_LOSS = 5e-3  # relative; bfloat16 and another order of sums


@dataclass(frozen=True)
class BenchSweep:
    """What to measure. With `is_paired`, the steps of the first sp size of a length are interleaved with those of each
    other sp size, and the ratio of their times is reported."""

    lengths: tuple[int, ...]
    sp_sizes: tuple[int, ...]
    levers: LeverMode
    num_steps: int
    against_trainer: bool
    time_limit_seconds: float
    is_paired: bool = False


@dataclass(frozen=True)
class BenchDevice:
    """What ranks run on here, and how many this machine can run."""

    device: str
    num_slots: int
    gpu: Gpu | None


@dataclass(frozen=True)
class Cell:
    """One length and one layout of the sweep, with the recipe, levers and job that belong to them."""

    group: str
    recipe: Recipe
    levers: Levers
    job: Job

    @property
    def length(self) -> int:
        return self.recipe.data.max_length


@dataclass(frozen=True)
class Side:
    """Who runs a cell's steps: this tool, or the Trainer. `swap_folder`: on a disk, for what its ranks offload."""

    cell: Cell
    call: tuple[Callable[..., Any], tuple[Any, ...]]
    swap_folder: Path | None = None

    @property
    def is_ours(self) -> bool:
        return self.call[0] is time_steps

    @property
    def group(self) -> str:
        return self.cell.group if self.is_ours else f"{self.cell.group}, the Trainer"

    @property
    def name(self) -> str:
        return f"{self.cell.length:,}"


SideResult = Timed | RankFailureError


def find_device(recipe: Recipe, hardware: Hardware) -> BenchDevice:
    """The recipe's device where this machine has it; CPU ranks otherwise."""
    count = torch.cuda.device_count() if recipe.run.device != "cpu" else 0
    if not count:
        return BenchDevice("cpu", MAX_CPU_RANKS, None)
    facts = torch.cuda.get_device_properties(0)
    host_bytes = count_usable_bytes() // count
    return BenchDevice("cuda", count, hardware.recognise(facts.name, facts.total_memory, host_bytes)[0])


Run = Callable[..., list[Any]]


def bench(
    recipe: Recipe,
    config: Mapping[str, Any],
    subject: str,
    hardware: Hardware,
    sweep: BenchSweep,
    report: Report,
    *,
    device: BenchDevice | None = None,
    run: Run = run_interleaved,
) -> Findings:
    """For a recipe that passed its checks. All cells use the same number of ranks: dp_size is the world by sp_size.
    `device`: by default that of this machine."""
    findings, device = Findings("bench", subject), device or find_device(recipe, hardware)
    if sweep.against_trainer and recipe.preference is not None:
        findings.notes.append("preference: the loss of the next token on both sides, as the Trainer has none of pairs")
        recipe = recipe.model_copy(update={"preference": None})
    shape = read_model_shape(config, subject)
    sizes = tuple(size for size in sweep.sp_sizes if size <= device.num_slots)
    for size in sorted(set(sweep.sp_sizes) - set(sizes)):
        text = f"this machine can run {format_count(device.num_slots, 'rank')}"
        findings.rows.append(Row(f"sp {size}", "all lengths", "SKIP", {}, text))
    world = min(device.num_slots, max(sizes, default=1) * make_layout(recipe).dp_size)
    world -= world % max(sizes, default=1)
    measured: list[tuple[Job, Timed]] = []
    ratios: list[Row] = []
    settle = partial(settle_cell, recipe, config, shape, world=world, device=device, mode=sweep.levers)
    cells = [settle(length, size) for size in sizes for length in sweep.lengths]
    for sides in list_matches(cells, shape, device, sweep):
        names = " and ".join(f"{side.group}, {side.name} tokens" for side in sides)
        report(f"{names}: {format_count(world, 'rank')}" + (" each, with alternating steps" if len(sides) > 1 else ""))
        results, is_paired = measure(sides, partial(run, world, device=device.device), sweep)
        for side, result in zip(sides, results, strict=True):
            findings.rows.append(describe(side, result, shape, device))
            report(summarize(findings.rows[-1]))
            if side.is_ours and isinstance(result, Timed):
                measured.append((side.cell.job, result))
        if len(sides) > 1 and isinstance(results[0], Timed) and isinstance(results[1], Timed):
            ratios.append(compare(sides, results[0], results[1], is_paired=is_paired))
    findings.rows += ratios
    _add_notes(findings, sweep, device, world, content="one document" if recipe.preference is None else "one pair")
    if device.gpu is not None:
        findings.calibration = calibrate(measured, device.gpu)
    return findings


def settle_cell(
    recipe: Recipe,
    config: Mapping[str, Any],
    shape: ModelShape,
    length: int,
    sp_size: int,
    *,
    world: int,
    device: BenchDevice,
    mode: LeverMode,
) -> Cell:
    dp_size = world // sp_size
    bench_recipe = make_bench_recipe(recipe, config, length, sp_size, dp_size, device.device)
    bench_recipe, levers = settle_levers(bench_recipe, shape, device.gpu, mode)
    job = make_job(bench_recipe, shape, levers, gpus_per_node=device.gpu.gpus_per_node if device.gpu else 8)
    return Cell(f"sp {sp_size} x dp {dp_size}", bench_recipe, levers, job)


def list_matches(
    cells: Sequence[Cell], shape: ModelShape, device: BenchDevice, sweep: BenchSweep
) -> Iterator[tuple[Side, ...]]:
    """The sides that run at once: a cell alone, with the Trainer, or with the same length at another sp size."""
    peak = device.gpu.tflops if device.gpu else None

    def make_side(cell: Cell) -> Side:
        folder = name_swap_folder(cell)
        args = (cell.recipe, shape, cell.levers, peak, NUM_WARMUP, sweep.num_steps, folder)
        return Side(cell, (time_steps, args), folder)

    if sweep.is_paired:
        for length in sweep.lengths:
            first, *others = [cell for cell in cells if cell.length == length]
            yield from ((make_side(other), make_side(first)) for other in others) if others else [(make_side(first),)]
        return
    for cell in cells:
        own = make_side(cell)
        if sweep.against_trainer:
            from ulysses_cli.prove.speed import time_trainer

            args = (cell.recipe, shape, cell.levers, NUM_WARMUP, sweep.num_steps)
            yield own, Side(cell, (time_trainer, args))
        else:
            yield (own,)


def measure(sides: Sequence[Side], start: Run, sweep: BenchSweep) -> tuple[list[SideResult], bool]:
    """Returns each side's result, and whether their steps were interleaved. Where two models at once do not fit in
    memory, the sides run one after the other."""
    run = partial(start, time_limit=sweep.time_limit_seconds)
    try:
        results = run([side.call for side in sides])
        if len(sides) == 1 or not any(isinstance(result, RankFailureError) and is_memory(result) for result in results):
            return results, True
        return [run([side.call])[0] for side in sides], False
    finally:
        for folder in filter(None, (side.swap_folder for side in sides)):
            remove_own(folder)


def name_swap_folder(cell: Cell) -> Path | None:
    """A folder of its own for each cell, since two may run at once. The next bench removes what a killed one has
    left."""
    if not uses_disk(cell.levers):
        return None
    run_dir = Path(os.path.expanduser(cell.recipe.run.output_dir)) / f"bench-sp-{cell.recipe.parallel.sp_size}"
    return name_folder(str(cell.recipe.memory.nvme_path), run_dir)


def make_bench_recipe(
    recipe: Recipe, config: Mapping[str, Any], length: int, sp_size: int, dp_size: int, device: str
) -> Recipe:
    """The recipe at another length and layout. A model that is not a local folder, or that gets added tokens,
    starts from random weights: its speed is the same. `config` has room for the added tokens."""
    model = recipe.model
    is_here = os.path.isdir(os.path.expanduser(str(model.name_or_path)))
    if not is_here or recipe.data.added_tokens:
        model = model.model_copy(update={"name_or_path": None, "config": dict(config)})
    parallel: dict[str, Any] = {
        "sp_size": sp_size,
        "dp_shard_size": dp_size,
        "dp_replicate_size": 1,
        "sp_seq_length": None,
    }
    if sp_size != recipe.parallel.sp_size:
        parallel["ring_size"] = "auto"
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


def settle_levers(recipe: Recipe, shape: ModelShape, gpu: Gpu | None, mode: LeverMode) -> tuple[Recipe, Levers]:
    """The recipe with its stage of ZeRO, and levers."""
    if mode == "auto":
        choice = choose_levers(recipe, shape, gpu)
        return choice.settle_stage(recipe), choice.levers
    if mode == "none":
        return recipe, Levers(gradient_checkpointing=False)
    strongest = list_strongest(make_job(recipe, shape, Levers()))[0]
    if gpu is None:  # weights and the optimizer are on the CPU already
        strongest = replace(strongest, offload_optimizer="none", offload_param="none")
    return recipe, strongest


def is_memory(failure: RankFailureError) -> bool:
    return failure.kind in MEMORY_WORDS or "allocate memory" in failure.message


def describe(side: Side, result: SideResult, shape: ModelShape, device: BenchDevice) -> Row:
    """One side of one cell as a row; the row of our side holds its prediction too."""
    cell = side.cell
    if isinstance(result, RankFailureError):
        return _explain(result, side, shape, device)
    values: dict[str, Any] = {"max_length": cell.length, **result.describe()}
    if not side.is_ours:
        return Row(side.group, side.name, "", values)
    if device.gpu is not None:
        values |= dict(_compare_prediction(result, cell.job, device.gpu))
    parts = sorted(result.parts.items(), key=lambda part: -part[1])[:3]
    total = sum(result.parts.values()) or 1.0
    return Row(cell.group, side.name, "", values, ", ".join(f"{name} {time / total:.0%}" for name, time in parts))


def summarize(row: Row) -> str:
    """A cell's figures as soon as they are known: what comes after it may take hours, or fail."""
    values, name = row.values, f"{row.group}, {row.name} tokens"
    if "step_seconds" not in values:
        return f"{name}: {row.verdict} {row.text}"
    words = [_name_step(values, "")] + ([f"MFU {values['mfu']:.1%}"] if "mfu" in values else [])
    words += [f"predicted {_name_step(values, 'predicted_')}"] if "predicted_step_seconds" in values else []
    return f"{name}: {', '.join(words)}"


def _name_step(values: Mapping[str, Any], kind: str) -> str:
    peak = values.get("predicted_memory_bytes" if kind else "peak_memory_bytes")
    return f"{values[f'{kind}step_seconds']:.3g} s a step" + (f" and {format_bytes(peak)}" if peak else "")


def _compare_prediction(timed: Timed, job: Job, gpu: Gpu) -> Iterator[tuple[str, Any]]:
    """What `estimate-memory` predicts for this cell. An error above 0 means that the prediction was too high."""
    speed, ledger = compute_speed(job, gpu), measure_ledger(job)
    seconds = speed.step_seconds
    yield "predicted_step_seconds", seconds
    yield "predicted_part_seconds", dict(speed.parts)
    yield "step_error", seconds / timed.step_seconds - 1
    if timed.peak_memory_bytes:
        yield "predicted_memory_bytes", ledger.gpu_allocated_bytes
        yield "memory_error", ledger.gpu_allocated_bytes / timed.peak_memory_bytes - 1
    host_bytes = ledger.host_peak_bytes // min(job.world_size, gpu.gpus_per_node)  # a node's, shared by its ranks
    yield "predicted_host_memory_bytes", host_bytes
    yield "host_memory_error", host_bytes / timed.host_peak_memory_bytes - 1


def _explain(failure: RankFailureError, side: Side, shape: ModelShape, device: BenchDevice) -> Row:
    """Out of memory is a result of the sweep, not a failure; a failure of the Trainer is not a failure of this tool."""
    cell, text, values = side.cell, str(failure), {"max_length": side.cell.length}
    if not is_memory(failure):
        return Row(side.group, side.name, "FAIL" if side.is_ours else "WARN", values, text)
    if side.is_ours and device.gpu is not None and failure.kind == "OutOfMemoryError":
        cause = " ".join(explain_memory(cell.recipe, shape, cell.levers, device.gpu).split())
        text = f"rank {failure.rank}: {cause}"
    return Row(side.group, side.name, "OOM", values, text)


def compare(sides: Sequence[Side], ours: Timed, theirs: Timed, *, is_paired: bool) -> Row:
    """Ratios of the second side to the first. Above 1: the first is faster, or needs less."""
    first, second = sides
    group = "the Trainer's time by ours" if first.cell is second.cell else "time with sp off by time with sp on"
    pairs = compare_pairs(ours.seconds_per_token, theirs.seconds_per_token)
    values: dict[str, Any] = {}
    if pairs is not None:
        spread = {"ratio_low": pairs.low, "ratio_high": pairs.high, "num_pairs": pairs.num_pairs} if is_paired else {}
        values = {"speed_ratio": pairs.median, **spread}
    values["host_memory_ratio"] = theirs.host_peak_memory_bytes / ours.host_peak_memory_bytes
    if ours.peak_memory_bytes and theirs.peak_memory_bytes:
        values["memory_ratio"] = theirs.peak_memory_bytes / ours.peak_memory_bytes
    share = ours.get_share("exchange")
    if share is not None:
        values["exchange_share"] = share
    difference = abs(ours.first_loss - theirs.first_loss) / max(abs(theirs.first_loss), 1e-12)
    values["first_loss_difference"] = difference
    text = "above 1: the first is faster, or needs less"
    text += "" if is_paired else "; the sides ran one after the other, since both at once do not fit"
    name = f"{first.cell.group}, {first.name}"
    if not difference <= SAME_LOSS:
        return Row(group, name, "WARN", values, f"the sides do not compute the same loss; {text}")
    return Row(group, name, "", values, text)


def _add_notes(findings: Findings, sweep: BenchSweep, device: BenchDevice, world: int, content: str) -> None:
    medians = f"median of {format_count(sweep.num_steps, 'step')} after {NUM_WARMUP}"
    where = f"{format_count(world, 'rank')} on {device.gpu.name if device.gpu else 'CPU'}"
    findings.notes.append(f"{where}; levers {sweep.levers}; each row is {content}; {medians}")
    if sweep.against_trainer or sweep.is_paired:
        findings.notes.append("ratios are medians of pairs of neighbouring steps; low and high are their quartiles")
    if device.gpu is None:
        findings.notes.append("CPU ranks: there is no prediction for them, and no calibration from them")
