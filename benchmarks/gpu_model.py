"""Trains a whole model of the 0.5B class from random weights, bfloat16, on one GPU: the real engine and loop. Measures
steps by parts, MFU, and the memory that torch gives out, that it reserves, and that the GPU has in use, each beside its
prediction. Figures are medians of steps after a warm-up. One more step runs under torch's profiler: how long the device
had work, and its longest kernels. Each row is printed as a line of JSON when it is measured.

    python benchmarks/gpu_model.py [--lengths 8192,32768] [--steps 8] [settings of the recipe, KEY=VALUE ...]
    python benchmarks/gpu_model.py --rehearse    in miniature on a CPU; measures nothing
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as the command sets it

import paths  # noqa: F401 - makes tests/support importable
from gpu_device import Gpu, Rehearsal
from torch.profiler import profile

if TYPE_CHECKING:
    from ulysses_cli.train.loop import StepResult, TrainState

NUM_WARMUP = 3
NUM_KERNELS, NAME_CHARS = 24, 100  # of a profile, the longest first
MEDIANS = ("step_seconds", "tokens_per_second", "tflops")
CONFIG: dict[str, Any] = {  # Qwen2.5-0.5B's shape
    "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}  # fmt: skip
SMALL = {**CONFIG, "hidden_size": 56, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 512}


class StepProfile:
    """Profiles the last step. Its hooks stand outside those of the meter."""

    def __init__(self, device: Gpu | Rehearsal) -> None:
        self.device, self.profile = device, profile(activities=[device.activity])

    def start(self, state: TrainState) -> None:
        if state.step + 1 == state.num_steps:
            self.device.synchronize()
            self.profile.start()

    def stop(self, state: TrainState, result: StepResult) -> None:
        if state.step == state.num_steps:
            self.device.synchronize()
            self.profile.stop()

    def describe(self) -> dict[str, Any]:
        events = [event for event in self.profile.events() if event.device_type == self.device.event_type]
        busy, end = 0.0, float("-inf")
        for span in sorted((event.time_range.start, event.time_range.end) for event in events):
            busy, end = busy + max(0.0, span[1] - max(span[0], end)), max(span[1], end)
        seconds, counts = Counter[str](), Counter(event.name for event in events)
        for event in events:
            seconds[event.name] += event.time_range.elapsed_us() / 1e6
        return {
            "num_kernels": len(events), "busy_seconds": busy / 1e6,
            "kernels": [
                {"name": name[:NAME_CHARS], "seconds": round(each, 6), "count": counts[name]}
                for name, each in seconds.most_common(NUM_KERNELS)
            ],
        }  # fmt: skip


def measure(
    device: Gpu | Rehearsal, config: dict[str, Any], length: int, num_steps: int, settings: Sequence[str]
) -> dict[str, Any]:
    from support.run_harness import RunHarness
    from support.training import MemoryRows, make_recipe

    from ulysses_cli.hardware_table import load_hardware
    from ulysses_cli.plan.flops import compute_model_flops
    from ulysses_cli.plan.models.shape import read_model_shape
    from ulysses_cli.plan.planner.estimate import compute_estimate
    from ulysses_cli.train.loop import train
    from ulysses_cli.train.metrics import Meter
    from ulysses_cli.train.processes.host import count_host_bytes

    facts, kind = device.read_facts(), device.torch_device.type
    words = f"data.max_length={length}", "model.dtype=bfloat16", f"run.device={kind}"
    recipe = make_recipe(*words, "train.lr_scheduler_type=constant", *settings, config=config)
    shape = read_model_shape(config, "benchmark")
    gpu, is_known = load_hardware().recognise(facts.name, facts.total_memory, count_host_bytes())
    estimate = compute_estimate(recipe, shape, gpu)
    device.forget_peak()
    rows = MemoryRows([[(length, 0)]] * 2, config["vocab_size"])
    harness = RunHarness(recipe, rows, 10**6, device=device.torch_device, gpu=gpu)
    lines: list[dict[str, Any]] = []
    meter = Meter(partial(compute_model_flops, shape), gpu.tflops if is_known else None, lines.append)
    state = harness.train_state
    last = StepProfile(device)
    state.pre_step_hooks = (last.start, meter.start)
    state.post_step_hooks = (meter.record, last.stop, *state.post_step_hooks)
    state.num_steps = NUM_WARMUP + num_steps + 1
    device.begin_row(length)
    train(state)
    kept = [line for line in lines[NUM_WARMUP:-1] if "step_parts" not in line]
    kernel = harness.built.kernel
    row = {
        "name": f"a whole model, {length:,} tokens", "attention": f"{kernel.name}: {kernel.reason}",
        "settings": list(settings), "levers": vars(estimate.choice.levers), "losses": [line["loss"] for line in lines],
        **{key: statistics.median(line[key] for line in kept) for key in MEDIANS},
        "predicted_step_seconds": estimate.speed.step_seconds,
        "mfu": statistics.median(line["mfu"] for line in kept) if is_known else None,
        "part_seconds": next(line["step_parts"] for line in lines if "step_parts" in line),
        "predicted_part_seconds": dict(estimate.speed.parts),
        "profiled_step_seconds": lines[-1]["step_seconds"], **last.describe(),
        "peak_memory_bytes": device.read_peak(), "predicted_memory_bytes": estimate.ledger.gpu_allocated_bytes,
        "reserved_memory_bytes": device.read_reserved(),
        "device_memory_bytes": device.read_used(), "predicted_device_memory_bytes": estimate.fit.gpu_peak_bytes,
    }  # fmt: skip
    harness.built.engine.close()
    del harness, state
    gc.collect()
    device.free_cache()
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="of the recipe")
    parser.add_argument("--lengths", default="8192,32768")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rehearse", action="store_true", help="in miniature on a CPU")
    options = parser.parse_args()
    import torch
    import torch.distributed as dist

    if not options.rehearse and not torch.cuda.is_available():
        print("this benchmark needs a GPU; --rehearse needs none", file=sys.stderr)
        return 2
    device: Gpu | Rehearsal = Gpu()
    config, lengths, steps = CONFIG, [int(length) for length in options.lengths.split(",")], options.steps
    if options.rehearse:
        device, config, lengths, steps = Rehearsal(), SMALL, [128, 256], 1
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(str(Path(folder) / "store"), 1)
        backend = "gloo" if options.rehearse else "nccl"
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timedelta(minutes=10))
        for length in lengths:
            print(json.dumps(measure(device, config, length, steps, options.settings), default=str), flush=True)
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
