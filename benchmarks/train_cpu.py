"""Measures the step time and memory of this tool beside a bare DeepSpeed ZeRO-3 loop around the plain model.

One CPU rank (sp 1) has the same weights, rows, optimizer and DeepSpeed config on both sides. Steps of the two alternate
in one process, so that a busy machine slows both. Peak memory is that of a process for each side.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import numpy as np
from paths import RESULTS, ROOT

os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
os.environ.setdefault("OMP_NUM_THREADS", "1")
ROW_TOKENS, NUM_STEPS, NUM_WARMUP = 2048, 15, 3
BAR = 1.05
CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
    "max_position_embeddings": ROW_TOKENS,
    "tie_word_embeddings": False,
}


def connect() -> None:
    import torch.distributed as dist

    store = dist.FileStore(str(Path(tempfile.mkdtemp()) / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(minutes=5))


def make_ours() -> Callable[[], None]:
    """Builds the real loop, with its comparison of plans, its meter and its clock."""
    from support.run_harness import RunHarness
    from support.training import MemoryRows, make_recipe

    from ulysses_cli.train.loop import train
    from ulysses_cli.train.metrics import Meter

    recipe = make_recipe(f"data.max_length={ROW_TOKENS}", "train.lr_scheduler_type=constant", config=CONFIG)
    harness = RunHarness(recipe, MemoryRows([[(ROW_TOKENS, 0)]] * 4, 4096), 10**6)
    meter = Meter(lambda *_: 1.0, None, lambda line: None)
    harness.train_state.pre_step_hooks, harness.train_state.post_step_hooks = (
        (meter.start,),
        (meter.record, *harness.train_state.post_step_hooks),
    )

    def step() -> None:
        harness.train_state.num_steps = harness.train_state.step + 1
        train(harness.train_state)

    return step


def make_bare() -> Callable[[], None]:
    """Builds what a user would write first: the plain model with its own loss, DeepSpeed around it."""
    import deepspeed
    import torch
    from support.training import MemoryRows, make_recipe
    from transformers import AutoConfig, AutoModelForCausalLM

    from ulysses_cli.plan.ds_config import make_ds_config
    from ulysses_cli.plan.resolved import make_layout

    deepspeed.init_distributed(dist_backend="gloo")
    recipe = make_recipe(config=CONFIG)
    ds_config = make_ds_config(recipe, make_layout(recipe))
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG), attn_implementation="sdpa")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003, weight_decay=0.1, eps=1e-3, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=ds_config)
    engine.train()
    rows = MemoryRows([[(ROW_TOKENS, 0)]] * 4, 4096)
    numbers = iter(range(10**9))

    def step() -> None:
        tokens = torch.from_numpy(np.asarray(rows.read(next(numbers) % 4, 0, ROW_TOKENS).input_ids))[None]
        loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        loss.item()

    return step


SIDES = {"ours": make_ours, "bare": make_bare}


def measure_peak(side: str) -> int:
    """Returns the peak resident bytes of a process that trains a few steps."""
    result = subprocess.run(
        [sys.executable, __file__, "--peak", side], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return int(result.stdout.splitlines()[-1])


def main() -> None:
    if sys.argv[1:2] == ["--peak"]:
        connect()
        step = SIDES[sys.argv[2]]()
        for _ in range(4):
            step()
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        return
    connect()
    steps = {side: make() for side, make in SIDES.items()}
    seconds: dict[str, list[float]] = {side: [] for side in steps}
    for _ in range(NUM_WARMUP + NUM_STEPS):
        for side, step in steps.items():
            start = time.perf_counter()
            step()
            seconds[side].append(time.perf_counter() - start)
    medians = {side: statistics.median(answer[NUM_WARMUP:]) for side, answer in seconds.items()}
    ratio = statistics.median(
        ours / bare for ours, bare in zip(seconds["ours"][NUM_WARMUP:], seconds["bare"][NUM_WARMUP:], strict=True)
    )
    peaks = {side: measure_peak(side) for side in SIDES}
    for side in SIDES:
        print(f"{side:<5} {medians[side]:.3f} s per step, {peaks[side] / 2**20:,.0f} MiB peak resident")
    print(f"time of ours / bare: {ratio:.3f} (bar {BAR}); peak: {peaks['ours'] / peaks['bare']:.3f}")
    result = {"row_tokens": ROW_TOKENS, "seconds": medians, "time_ratio": ratio, "peak_bytes": peaks}
    (RESULTS / "train-cpu.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
