"""Measures what smaller buckets cost in a training step.

One side sends the gradients and steps the optimizer in as many pieces as a large model needs. The other uses
DeepSpeed's default sizes, where all of this model is one piece.

    python benchmarks/buckets.py [--pairs 8] [--json FILE]

Two gloo ranks train 104 M weights. Both sides live on the same ranks and take steps in turns. On 8 GPUs an 8 B model
has 80 messages and 8 groups with this tool's sizes; here there are as many. Bytes are what the ledger says of that 8 B
model.
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from paths import RESULTS

ZERO = "deepspeed.zero_optimization"
CONFIG = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
SIZES = {"one piece": (500_000_000, 1_000_000_000), "many pieces": (1_300_000, 6_500_000)}
OFFLOADS = ("none", "cpu")
GIB = 1 << 30


def measure(offload: str, num_pairs: int) -> dict[str, list[float]]:
    """Returns, on each rank, the seconds of each side's steps, which are taken in turns."""
    import torch.distributed as dist
    from support.run_harness import RunHarness
    from support.training import MemoryRows, make_recipe

    from ulysses_cli.train.loop import train

    harnesses = {}
    for name, (bucket, group) in SIZES.items():
        words = ("parallel.sp_size=2", f"memory.offload_optimizer={offload}", f"{ZERO}.sub_group_size={group}")
        recipe = make_recipe(*words, f"{ZERO}.reduce_bucket_size={bucket}", config=CONFIG)
        harnesses[name] = RunHarness(recipe, MemoryRows([[(64, 0)]] * 4, 512), 10**6)
    seconds: dict[str, list[float]] = {name: [] for name in harnesses}
    for turn in range(num_pairs + 1):
        for name in list(harnesses)[:: 1 if turn % 2 else -1]:
            dist.barrier()
            start = time.perf_counter()
            harnesses[name].train_state.num_steps = harnesses[name].train_state.step + 1
            train(harnesses[name].train_state)
            seconds[name].append(time.perf_counter() - start)
    return {name: result[1:] for name, result in seconds.items()}


def compute_bytes(offload: str) -> dict[str, dict[str, float]]:
    """Returns GiB of a GPU and of a machine, for Llama-3.1-8B with rows of 128Ki on 8 GPUs, in both sizes."""
    from ulysses_cli.hub import load_table
    from ulysses_cli.plan.ds_config import REDUCE_BUCKET, SUB_GROUP
    from ulysses_cli.plan.layout import Layout
    from ulysses_cli.plan.ledger.job import EngineSettings, Job
    from ulysses_cli.plan.ledger.ledger import measure_ledger
    from ulysses_cli.plan.levers import Levers
    from ulysses_cli.plan.models.shape import read_model_shape

    name = "meta-llama/llama-3.1-8b"
    shape = read_model_shape(load_table()[name]["config"], name)
    levers = Levers(tiled_loss=True, tiled_mlp=True, offload_optimizer=offload)  # type: ignore[arg-type]
    job = Job(shape, Layout(1, 1, 8), 1 << 17, levers, engine=EngineSettings(communication_bytes=4))
    ours = replace(job, engine=replace(job.engine, reduce_bucket=REDUCE_BUCKET, sub_group=SUB_GROUP))
    values = {}
    for size, each in (("DeepSpeed's", job), ("ours", ours)):
        ledger = measure_ledger(each)
        values[size] = {"GPU": ledger.gpu_peak_bytes / GIB, "machine": ledger.host_peak_bytes / GIB}
    return values


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--json", type=Path, default=RESULTS / "buckets-cpu.json")
    options = parser.parse_args()
    from support.rank_pool import run_on_ranks

    result: dict[str, Any] = {"ranks": 2, "pairs": options.pairs, "sizes": SIZES, "offload": {}}
    for offload in OFFLOADS:
        seconds = run_on_ranks(2, measure, offload, options.pairs)[0]
        ratios = [many / one for one, many in zip(*(seconds[name] for name in SIZES), strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        sizes = compute_bytes(offload)
        result["offload"][offload] = {"seconds": seconds, "ratio": middle, "quartiles": [low, high], "gib": sizes}
        print(f"offload_optimizer {offload}: many pieces / one piece {middle:.3f} (quartiles {low:.3f} to {high:.3f})")
        for name, answer in sizes.items():
            print(
                f"  8B, 8 GPUs, sizes {name:<12} {answer['GPU']:6.1f} GiB per GPU, {answer['machine']:6.1f} per machine"
            )
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
