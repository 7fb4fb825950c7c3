"""Predicts speed from 8 to 1,024 GPUs, and checks the groups of layouts of up to 4,096 ranks on torch's fake backend.

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
from published import ALST, UPIPE, get_shape, list_speed
from torch.testing._internal.distributed.fake_pg import FakeStore

from ulysses_cli.hardware_table import load_hardware
from ulysses_cli.plan.hardware import GIB, Gpu
from ulysses_cli.plan.layout import Layout, Placement
from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.ledger.ledger import compute_ledger
from ulysses_cli.plan.levers import Levers
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.planner.fit import judge
from ulysses_cli.plan.planner.lever_choice import find_cheapest
from ulysses_cli.plan.planner.search import list_sp_sizes
from ulysses_cli.plan.speed import compute_exchange_bytes, compute_speed
from ulysses_cli.train.processes.groups import make_groups

MODELS = ("meta-llama/Llama-3.1-8B", "Qwen/Qwen3-32B", "meta-llama/Llama-3.1-70B")
LENGTHS = (128 << 10, 1 << 20)
COUNTS = tuple(8 << power for power in range(8))
WORLDS = (8, 64, 512, 4096)
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
    inside_mib: float  # what a rank sends in a micro-step's exchange, to ranks of its machine
    between_mib: float


def predict(name: str, shape: ModelShape, gpus: int, tokens: int, gpu: Gpu) -> Prediction | None:
    """Returns the fastest layout that fits, or None."""
    best: tuple[float, Job] | None = None
    for sp_size in list_sp_sizes(shape, gpus, tokens):
        job = Job(shape, Layout(1, gpus // sp_size, sp_size), tokens, Levers(), gpus_per_node=gpu.gpus_per_node)
        levers = find_cheapest(job, gpu, OPEN)
        if levers is None:
            continue
        settled = replace(job, levers=levers)
        if judge(settled, compute_ledger(settled), gpu).verdict != "fits":
            continue
        speed = compute_speed(settled, gpu).tokens_per_second
        if best is None or speed > best[0]:
            best = speed, settled
    if best is None:
        return None
    job = best[1]
    pace, size = compute_speed(job, gpu), job.layout.sp_size
    sent, near = compute_exchange_bytes(job) / 2**20, (min(size, gpu.gpus_per_node) - 1) / max(1, size - 1)
    layout = f"dp {job.layout.dp_shard_size} x sp {size}"
    return Prediction(
        name, tokens, gpus, layout, pace.tokens_per_second, pace.mfu, pace.step_seconds,
        compute_ledger(job).gpu_peak_bytes / GIB, sent * near, sent * (1 - near),
    )  # fmt: skip


def format_row(row: Prediction) -> str:
    head = f"{row.model:<16}{row.tokens:>10,}{row.gpus:>6}  {row.layout:<16}"
    speed = f"{row.tokens_per_second:>12,.0f}{row.mfu:>7.0%}{row.step_seconds:>8.1f}s"
    return f"{head}{speed}{row.gib:>7.1f}{row.inside_mib:>12,.0f}{row.between_mib:>9,.0f}"


def check_groups(world: int) -> float:
    """Makes the groups of every sp size on torch's fake backend, as the first, the middle and the last rank, and
    compares their members with the layout's arithmetic. Returns the seconds that one rank takes for sp 8."""
    seconds = 0.0
    for rank in (0, world // 2, world - 1):
        for sp_size in (1, 4, 8):
            layout = Layout(1, world // sp_size, sp_size)
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
            began = time.perf_counter()
            groups = make_groups(layout, timedelta(minutes=1))
            seconds = time.perf_counter() - began
            members = dist.get_process_group_ranks(groups.sp_group) if groups.sp_group is not None else [rank]
            expected = [other for other in range(world) if other // sp_size == rank // sp_size]
            assert members == expected, (world, rank, sp_size)
            assert Placement(layout, world // 8).num_crossing == 0
            dist.destroy_process_group()
    return seconds


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
    print(f"{'model':<16}{'tokens':>10}{'GPUs':>6}  {'layout':<16}{'tokens/s':>12}{'MFU':>7}{'step':>9}{'GiB':>7}"
          f"{'MiB inside':>12}{'between':>9}")  # fmt: skip
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
        if published.source in (ALST, UPIPE):
            peers.append(vars(published))
            figures = f"{published.published:>8,.0f} tokens/s per GPU, predicted {published.predicted:,.0f}"
            print(f"{published.what:<42}{figures}  {published.source}")
    print("\ngroups on torch's fake backend, members compared with the layout's arithmetic:")
    groups = {world: check_groups(world) for world in WORLDS}
    for world, seconds in groups.items():
        print(f"{world:>6} ranks: one rank makes its groups in {seconds:.2f} s")
    with open(options.json, "w", encoding="utf-8") as file:
        json.dump(
            {"assumptions": assumptions, "predicted": rows, "published": peers, "group_seconds": groups}, file, indent=1
        )


if __name__ == "__main__":
    main()
