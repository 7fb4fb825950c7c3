"""Trains a 0.5B-class model from random weights, bfloat16, on one GPU at 8Ki and 64Ki tokens: the real engine and loop.

Reports tokens per second, model TFLOPS, MFU and peak memory, each beside the ledger's and the speed model's prediction,
with the machine's facts. Figures are medians of steps after a warm-up.

    python benchmarks/train_gpu.py [--lengths 8192,65536] [--steps 8] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from paths import RESULTS

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
NUM_WARMUP = 3
CONFIG: dict[str, Any] = {  # Qwen2.5-0.5B's shape
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}


def measure(length: int, num_steps: int, device_name: str) -> dict[str, Any]:
    import torch
    from support.run_harness import RunHarness
    from support.training import MemoryRows, make_recipe

    from ulysses_cli.hardware_table import load_hardware
    from ulysses_cli.plan.flops import compute_model_flops
    from ulysses_cli.plan.models.shape import read_model_shape
    from ulysses_cli.plan.planner.estimate import compute_estimate
    from ulysses_cli.train.hooks.metrics import Meter
    from ulysses_cli.train.loop import train
    from ulysses_cli.train.processes.host_memory import count_host_bytes

    device = torch.device("cuda", 0)
    recipe = make_recipe(
        *(f"data.max_length={length}", "model.dtype=bfloat16", "run.device=cuda", "train.lr_scheduler_type=constant"),
        config=CONFIG,
    )
    shape = read_model_shape(CONFIG, "benchmark")
    memory = torch.cuda.get_device_properties(device).total_memory
    host_bytes = count_host_bytes()
    gpu, is_known = load_hardware().recognise(device_name, memory, host_bytes)
    estimate = compute_estimate(recipe, shape, gpu)
    torch.cuda.reset_peak_memory_stats()
    harness = RunHarness(recipe, MemoryRows([[(length, 0)]] * 2, CONFIG["vocab_size"]), 10**6, device=device, gpu=gpu)
    lines: list[dict[str, Any]] = []
    meter = Meter(partial(compute_model_flops, shape), gpu.tflops if is_known else None, lines.append)
    harness.train_state.pre_step_hooks, harness.train_state.post_step_hooks = (
        (meter.start,),
        (meter.record, *harness.train_state.post_step_hooks),
    )
    harness.train_state.num_steps = NUM_WARMUP + num_steps
    train(harness.train_state)
    kept = [line for line in lines[NUM_WARMUP:] if "step_parts" not in line]
    values = {
        "row_tokens": length,
        "kernel": harness.built.kernel.name,
        "kernel_reason": harness.built.kernel.reason,
        "levers": vars(estimate.choice.levers),
        "losses": [line["loss"] for line in lines],
        **{name: statistics.median(line[name] for line in kept) for name in ("tokens_per_second", "tflops")},
        "mfu": statistics.median(line["mfu"] for line in kept) if is_known else None,
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        "predicted_allocated_bytes": estimate.ledger.gpu_allocated_bytes,
        "predicted_peak_bytes": estimate.fit.gpu_peak_bytes,
        "predicted_tokens_per_second": estimate.speed.tokens_per_second,
        "step_parts": next((line["step_parts"] for line in lines if "step_parts" in line), None),
    }
    harness.built.engine.wrapped.destroy()
    del harness
    gc.collect()
    torch.cuda.empty_cache()
    return values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", default="8192,65536")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", type=Path, default=RESULTS / "train-gpu.json")
    options = parser.parse_args()
    import deepspeed
    import torch
    import torch.distributed as dist
    import transformers

    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a GPU")
    store = dist.FileStore(str(Path(tempfile.mkdtemp()) / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, timeout=timedelta(minutes=10))
    name = torch.cuda.get_device_name(0)
    machine = {
        "gpu": name,
        "memory_bytes": torch.cuda.get_device_properties(0).total_memory,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": transformers.__version__,
        "deepspeed": deepspeed.__version__,
    }
    results = []
    for length in map(int, options.lengths.split(",")):
        results.append(measure(length, options.steps, name))
        row = results[-1]
        print(
            f"{length:>8,} tokens  {row['tokens_per_second']:>10,.0f} tokens/s"
            f" (predicted {row['predicted_tokens_per_second']:,.0f})  {row['tflops']:.0f} TFLOPS"
            f"  MFU {row['mfu'] or 0:.1%}  peak {row['peak_allocated_bytes'] / 2**30:.2f} GiB"
            f" (predicted {row['predicted_allocated_bytes'] / 2**30:.2f})  {row['kernel']}",
            flush=True,
        )
        options.json.write_text(json.dumps({"machine": machine, "rows": results}, indent=1, default=str) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
