"""Measures what early steps of the optimizer on the host (memory.overlap_optimizer) save of a training step: the same
run with and without them, with alternating steps in one process. One CPU rank, a Llama of 45 M weights in sub-groups as
many as a large model has.

    python benchmarks/early_steps.py [--rounds 12] [--tokens 256] [--limit 0]

The backward has one core and Adam another: OMP_NUM_THREADS is 1. With a --limit (train.max_grad_norm) that clips every
step nothing may be early, and the ratio shows what trying costs.
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
from train_cpu import connect

CONFIG = {
    "model_type": "llama", "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 6,
    "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 512, "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}  # fmt: skip
SIDES = {"early": True, "plain": False, "plain again": False}
ZERO = "deepspeed.zero_optimization"


def make_sides(num_tokens: int, limit: float) -> dict[str, Any]:
    from support.run_harness import RunHarness
    from support.training import MemoryRows, make_recipe

    connect()
    harnesses = {}
    for side, overlap in SIDES.items():
        words = ("memory.offload_optimizer=cpu", f"memory.overlap_optimizer={overlap}", f"train.max_grad_norm={limit}")
        sizes = (f"{ZERO}.sub_group_size=2000000", f"{ZERO}.reduce_bucket_size=2000000")
        row = (f"data.max_length={num_tokens}", "train.lr_scheduler_type=constant")
        recipe = make_recipe(*words, *sizes, *row, config=CONFIG)
        harnesses[side] = RunHarness(recipe, MemoryRows([[(num_tokens, 0)]] * 4, 512), 10**6)
    return harnesses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--limit", type=float, default=0.0)
    options = parser.parse_args()
    harnesses = make_sides(options.tokens, options.limit)
    seconds = measure_in_turns(harnesses, options.rounds)
    result: dict[str, Any] = {**vars(options), **summarize(seconds, *SIDES)}
    zero = harnesses["early"].built.engine.wrapped.optimizer
    result["groups"], result["kept_early"] = len(zero.fp16_groups), zero.step.__self__.num_kept
    losses = {side: harness.losses[-1] for side, harness in harnesses.items()}
    print(f"{result['kept_early']} steps of {result['groups']} groups were early; last losses {losses}")
    if len(set(losses.values())) > 1:
        raise AssertionError("early steps have changed a loss")
    name = "early-steps-cpu.json" if not options.limit else "early-steps-clipped-cpu.json"
    (RESULTS / name).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
