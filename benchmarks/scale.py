"""Predicts speed and memory from 8 to 4,096 GPUs, and checks the groups of layouts of up to 4,096 ranks on torch's fake
backend.

    python benchmarks/scale.py [--gpu KIND] [--json FILE]

Nothing here was measured on a GPU. Each prediction is the fastest layout whose memory fits by the ledger, with the
levers that `auto` chooses. The assumptions are printed, and the published rows of other programs stand beside them.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from paths import RESULTS
from published import ALST, UPIPE, get_shape, list_claims, list_speed
from torch.testing._internal.distributed.fake_pg import FakeStore

from ulysses_cli.hardware_table import load_hardware
from ulysses_cli.plan.hardware import GIB, Gpu
from ulysses_cli.plan.layout import Layout, Placement, count_near_ranks
from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.ledger.ledger import measure_ledger
from ulysses_cli.plan.ledger.weights import get_weights
from ulysses_cli.plan.levers import Levers
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.planner.fit import judge
from ulysses_cli.plan.planner.lever_choice import find_cheapest
from ulysses_cli.plan.planner.rings import list_sp_layouts
from ulysses_cli.plan.planner.search import list_sp_sizes
from ulysses_cli.plan.speed import compute_exchange_bytes, compute_ring_bytes, compute_speed
from ulysses_cli.train.processes.groups import make_groups

MODELS = ("meta-llama/Llama-3.1-8B", "Qwen/Qwen3-32B", "meta-llama/Llama-3.1-70B")
LENGTHS = (128 << 10, 1 << 20)
COUNTS = tuple(8 << power for power in range(10))
WORLDS = (8, 64, 512, 4096)
SP_LAYOUTS = ((1, 1), (4, 1), (8, 1), (4, 2), (8, 8), (16, 2), (64, 8))  # sp_size and ring_size
OPEN = [name for name in Levers.__dataclass_fields__ if name not in ("gradient_checkpointing", "offload_param")]


@dataclass(frozen=True)
class Prediction:
    model: str
    tokens: int
    gpus: int
    layout: str
    tokens_per_second: float
    mfu: float
    step_seconds: float
    gib: float
    inside_mib: float  # of heads and of a ring's keys, what a rank sends in a micro-step to ranks of its machine
    between_mib: float
    zero_gib: float  # of weights and gradients, what a rank receives and sends in a micro-step


def predict(name: str, shape: ModelShape, gpus: int, tokens: int, gpu: Gpu) -> Prediction | None:
    """Returns the fastest layout that fits, or None."""
    best: tuple[float, Job] | None = None
    layouts = [layout for size in list_sp_sizes(shape, gpus, tokens) for layout in list_sp_layouts(shape, gpus, size)]
    for layout in layouts:
        job = Job(shape, layout, tokens, Levers(), gpus_per_node=gpu.gpus_per_node)
        levers = find_cheapest(job, gpu, OPEN)
        if levers is None:
            continue
        settled = replace(job, levers=levers)
        if judge(settled, measure_ledger(settled), gpu).verdict != "fits":
            continue
        speed = compute_speed(settled, gpu).tokens_per_second
        if best is None or speed > best[0]:
            best = speed, settled
    if best is None:
        return None
    job = best[1]
    pace, layout = compute_speed(job, gpu), job.layout
    inside, between = split_by_link(job)
    return Prediction(
        name, tokens, gpus, name_layout(layout), pace.tokens_per_second, pace.mfu, pace.step_seconds,
        measure_ledger(job).gpu_peak_bytes / GIB, inside / 2**20, between / 2**20, count_zero_bytes(job) / GIB,
    )  # fmt: skip


def name_layout(layout: Layout) -> str:
    split = f" ({layout.ring_size} x {layout.ulysses_size})" if layout.ring_size > 1 else ""
    return f"dp {layout.dp_shard_size} x sp {layout.sp_size}{split}"


def split_by_link(job: Job) -> tuple[float, float]:
    """What the worst-placed rank sends of heads and keys: to ranks of its machine, and to others."""
    layout, per_node = job.layout, job.gpus_per_node
    heads, keys = compute_exchange_bytes(job), compute_ring_bytes(job)
    near_shares = max(1, count_near_ranks(layout.sp_size, per_node) // layout.ulysses_size)
    inside = heads * (count_near_ranks(layout.ulysses_size, per_node) - 1) / max(1, layout.ulysses_size - 1)
    inside += keys * (near_shares - 1) / max(1, layout.ring_size - 1)
    return inside, heads + keys - inside


def count_zero_bytes(job: Job) -> float:
    """Weights are gathered for the forward and for the backward, and gradients are reduced."""
    gathered = 2 * job.dtype_bytes * get_weights(job).num_elements
    reduced = job.engine.communication_bytes * get_weights(job).num_trained
    return float(gathered + reduced) * (job.world_size - 1) / job.world_size


def format_row(row: Prediction) -> str:
    head = f"{row.model:<16}{row.tokens:>10,}{row.gpus:>6}  {row.layout:<24}"
    speed = f"{row.tokens_per_second:>12,.0f}{row.mfu:>7.0%}{row.step_seconds:>8.1f}s"
    return f"{head}{speed}{row.gib:>7.1f}{row.inside_mib:>12,.0f}{row.between_mib:>9,.0f}{row.zero_gib:>7,.0f}"


def check_groups(world: int) -> float:
    """Makes the groups of layouts on torch's fake backend, as the first, the middle and the last rank, and compares
    their members with what rank numbers say. Returns the seconds that one rank takes for the last layout."""
    seconds = 0.0
    for sp_size, ring_size in (each for each in SP_LAYOUTS if each[0] <= world):
        layout, width = Layout(1, world // sp_size, sp_size, ring_size), sp_size // ring_size
        for rank in (0, world // 2, world - 1):
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
            began = time.perf_counter()
            groups = make_groups(layout, timedelta(minutes=1))
            seconds = time.perf_counter() - began
            row = [other for other in range(world) if other // sp_size == rank // sp_size]
            expected = {
                "row": row,
                "heads": [other for other in row if other // width == rank // width],
                "ring": [other for other in row if other % width == rank % width],
            }
            made = {"row": groups.sp_group, "heads": groups.ulysses_axis.group, "ring": groups.ring_axis.group}
            for name, group in made.items():
                members = [rank] if group is None else dist.get_process_group_ranks(group)
                assert members == (expected[name] if len(expected[name]) > 1 else [rank]), (world, rank, layout, name)
            dist.destroy_process_group()
        check_placement(layout, world)
    return seconds


def check_placement(layout: Layout, world: int, per_node: int = 8) -> None:
    """Counts groups that stand on more than one machine, rank by rank; with two copies of the weights (hpZ) too."""
    placement = Placement(layout, world // per_node)
    assert placement.num_crossing == count_apart(world, layout.sp_size, per_node), layout
    assert placement.num_crossing_heads == count_apart(world, layout.ulysses_size, per_node), layout
    if layout.dp_shard_size % 2 == 0:
        copied = replace(layout, dp_replicate_size=2, dp_shard_size=layout.dp_shard_size // 2)
        apart = count_apart(world, world // 2, per_node)
        assert Placement(copied, world // per_node).num_crossing_copies == apart, copied


def count_apart(world: int, size: int, per_node: int) -> int:
    machines: dict[int, set[int]] = {}
    for rank in range(world):
        machines.setdefault(rank // size, set()).add(rank // per_node)
    return sum(len(one) > 1 for one in machines.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="h100-80gb")
    parser.add_argument("--json", default=str(RESULTS / "scale.json"))
    options = parser.parse_args()
    gpu = load_hardware().get_gpu(options.gpu)
    assumptions = [
        f"{gpu.name}: {gpu.tflops:,.0f} TFLOP/s, machines of {gpu.gpus_per_node}, {gpu.link_gb_s:,.0f} GB/s inside one",
        f"{gpu.network_gb_s:,.0f} GB/s per GPU between machines, of which {gpu.efficiency.network:.0%} is reached",
        "each group of ranks takes one row a step, documents as long as the row, ZeRO-3, bfloat16, AdamW",
        "no link is ever congested, no rank is slower than another, nothing fails",
    ]
    print("\n".join(assumptions))
    print(f"{'model':<16}{'tokens':>10}{'GPUs':>6}  {'layout':<24}{'tokens/s':>12}{'MFU':>7}{'step':>9}{'GiB':>7}"
          f"{'MiB inside':>12}{'between':>9}{'ZeRO':>7}")  # fmt: skip
    rows = []
    for model in MODELS:
        shape, name = get_shape(model), model.rpartition("/")[2]
        for tokens in LENGTHS:
            for count in COUNTS:
                row = predict(name, shape, count, tokens, gpu)
                rows.append(
                    vars(row) if row else {"model": name, "tokens": tokens, "gpus": count, "layout": "none fits"}
                )
                if row is None:
                    print(f"{name:<16}{tokens:>10,}{count:>6}  none fits")
                    continue
                print(format_row(row))
    print("\npublished rows of other programs, in their own settings, beside this model of them:")
    peers: list[dict[str, Any]] = []
    for published in list_speed():
        if published.source == UPIPE:
            peers.append(vars(published))
            figures = f"{published.published:>8,.0f} tokens/s per GPU, predicted {published.predicted:,.0f}"
            print(f"{published.what:<42}{figures}  {published.source}")
    print("\nrows that others trained, and what the ledger counts for their settings (they published no speed):")
    claims = [vars(claim) for claim in list_claims() if claim.source == ALST]
    for claim in claims:
        print(f"{claim['what']:<42}{claim['peak_gib']:>6.1f} of {claim['capacity_gib']:.1f} GiB  {claim['source']}")
    print("\ngroups on torch's fake backend, members compared with the layout's arithmetic:")
    groups = {world: check_groups(world) for world in WORLDS}
    for world, seconds in groups.items():
        print(f"{world:>6} ranks: one rank makes its groups in {seconds:.2f} s")
    with open(options.json, "w", encoding="utf-8") as file:
        json.dump(
            {
                "assumptions": assumptions,
                "predicted": rows,
                "published": peers,
                "rows_of_others": claims,
                "group_seconds": groups,
            },
            file,
            indent=1,
        )


if __name__ == "__main__":
    main()
