"""Measures what norms of one pass (model.fused_kernels) save of a training step on a CPU: the same run with and without
them, with alternating steps in one process. One rank, a Llama of four layers, float32.

    python benchmarks/elementwise.py
"""

from __future__ import annotations

import json
import os
import statistics
import time

os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
os.environ.setdefault("OMP_NUM_THREADS", "1")
from paths import RESULTS
from train_cpu import CONFIG, connect

ROW_TOKENS, NUM_STEPS, NUM_WARMUP = 1024, 9, 1
BAR = 0.97


def main() -> None:
    from support.run_harness import RunHarness
    from support.training import MemoryRows, make_recipe

    from ulysses_cli.train.loop import train

    connect()
    config = {**CONFIG, "num_hidden_layers": 4}
    harnesses = {}
    for fused in (True, False):
        words = (f"data.max_length={ROW_TOKENS}", "train.lr_scheduler_type=constant", f"model.fused_kernels={fused}")
        recipe = make_recipe(*words, config=config)
        harnesses[fused] = RunHarness(recipe, MemoryRows([[(ROW_TOKENS, 0)]] * 4, 4096), 10**6)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(NUM_WARMUP + NUM_STEPS):
        for fused, harness in harnesses.items():
            start = time.process_time()  # of this process alone: other programs run on the same cores
            harness.train_state.num_steps = harness.train_state.step + 1
            train(harness.train_state)
            seconds[fused].append(time.process_time() - start)
    kept = {fused: values[NUM_WARMUP:] for fused, values in seconds.items()}
    ratio = statistics.median(ours / plain for ours, plain in zip(kept[True], kept[False], strict=True))
    medians = {"fused": statistics.median(kept[True]), "transformers": statistics.median(kept[False])}
    losses = [harness.losses[-1] for harness in harnesses.values()]
    print(f"{medians}; time with fused kernels / without: {ratio:.3f} (bar {BAR}); losses {losses}")
    result = {"row_tokens": ROW_TOKENS, "cpu_seconds": medians, "time_ratio": ratio, "losses": losses}
    (RESULTS / "elementwise-cpu.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
