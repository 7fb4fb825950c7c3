"""Measures what norms of one pass (model.fused_kernels) and recomputations that stop before a layer's last product save
of a training step on a CPU: the same run with and without both, with alternating steps in one process. One rank, a
Llama of four layers, float32.

    python benchmarks/elementwise.py [--rounds 12]
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
os.environ.setdefault("OMP_NUM_THREADS", "1")
from paired_steps import measure_in_turns, summarize
from paths import RESULTS
from train_cpu import CONFIG, connect

ROW_TOKENS, BAR = 1024, 0.97
SIDES = {"with both": True, "without": False, "without, again": False}


def make_sides() -> dict[str, Any]:
    from support.run_harness import RunHarness
    from support.training import MemoryRows, make_recipe

    from ulysses_cli.train.model import loss_model

    parts: dict[str, Any] = vars(loss_model)
    stop_early = parts["save_before_last_products"]
    connect()
    config = {**CONFIG, "num_hidden_layers": 4}
    harnesses = {}
    for side, has_both in SIDES.items():
        words = (f"data.max_length={ROW_TOKENS}", "train.lr_scheduler_type=constant", f"model.fused_kernels={has_both}")
        parts["save_before_last_products"] = stop_early if has_both else lambda *_: 0
        rows = MemoryRows([[(ROW_TOKENS, 0)]] * 4, 4096)
        harnesses[side] = RunHarness(make_recipe(*words, config=config), rows, 10**6)
    return harnesses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    num_rounds = parser.parse_args().rounds
    harnesses = make_sides()
    result: dict[str, Any] = {"row_tokens": ROW_TOKENS, "rounds": num_rounds, "bar": BAR}
    result |= summarize(measure_in_turns(harnesses, num_rounds), *SIDES)
    result["losses"] = {side: harness.losses[-1] for side, harness in harnesses.items()}
    print(f"bar {BAR}; losses {result['losses']}")
    (RESULTS / "elementwise-cpu.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
