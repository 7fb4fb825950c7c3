"""Measures a step of a tiny hybrid model on two CPU ranks that share each row (sp 2) beside two that have rows of their
own (dp 2): seconds per token, and the bytes that the formula says a rank sends for sequence parallelism.

Both have the same weights, kernels, ZeRO stage and row length. Their steps alternate in the same processes, so that a
busy machine slows both. Bar: sp 2 takes at most 1.15 times as long per token.

    python benchmarks/hybrid_cpu.py [--tokens 2048] [--repeats 15] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

from ulysses_cli.prove.ranks.ranks import run_on_ranks

BAR = 1.15
RANKS, WARMUP = 2, 2
MODELS = {
    "gated delta net": {
        "model_type": "qwen3_5_text",
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    },
    "Mamba2": {
        "model_type": "bamba",
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "attn_layer_indices": [3],
        "mamba_n_heads": 16,
        "mamba_d_head": 32,
        "mamba_n_groups": 2,
        "mamba_d_state": 32,
        "mamba_chunk_size": 64,
    },
}
SIDES = {"sp": f"parallel.sp_size={RANKS}", "dp": f"parallel.dp_shard_size={RANKS}"}


def measure_sides(_: int, model: str, tokens: int, repeats: int) -> tuple[dict[str, list[float]], float]:
    """Returns seconds of each step, and the bytes that a rank sends for sequence parallelism in a step."""
    import torch.distributed as dist
    from support.run_harness import RunHarness
    from support.training import MemoryRows, make_recipe

    from ulysses_cli.plan.ledger.job import make_job
    from ulysses_cli.plan.speed import compute_exchange_bytes
    from ulysses_cli.train.loop import train

    config = {**MODELS[model], "vocab_size": 1024, "max_position_embeddings": tokens, "tie_word_embeddings": False}
    harnesses, num_bytes = {}, 0.0
    for side, words in SIDES.items():
        recipe = make_recipe(f"data.max_length={tokens}", "train.lr_scheduler_type=constant", words, config=config)
        harnesses[side] = RunHarness(recipe, MemoryRows([[(tokens, 0)]] * 8, 1024), 10**6)
        plan = harnesses[side].plan
        num_bytes = max(num_bytes, compute_exchange_bytes(make_job(plan.recipe, plan.shape, plan.levers)))
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(WARMUP + repeats):
        for side, harness in harnesses.items():
            dist.barrier()
            start = time.perf_counter()
            harness.train_state.num_steps = harness.train_state.step + 1
            train(harness.train_state)
            seconds[side].append(time.perf_counter() - start)
    return {side: each[WARMUP:] for side, each in seconds.items()}, num_bytes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results, is_good = {}, True
    for model in MODELS:
        answers = run_on_ranks(RANKS, measure_sides, model, options.tokens, options.repeats)
        seconds, num_bytes = answers[0]
        # a step of sp 2 has one row, one of dp 2 has a row for each rank
        ratio = RANKS * statistics.median(sp / dp for sp, dp in zip(seconds["sp"], seconds["dp"], strict=True))
        medians = {side: statistics.median(each) for side, each in seconds.items()}
        is_good = is_good and ratio <= BAR
        results[model] = {"seconds_per_step": medians, "ratio_per_token": ratio, "bytes_sent_per_rank": num_bytes}
        print(
            f"{model:<16} sp {RANKS}: {medians['sp']:.3f} s, dp {RANKS}: {medians['dp']:.3f} s per step; "
            f"per token {ratio:.3f} (bar {BAR}); {num_bytes / 2**20:.1f} MiB sent per rank and step"
        )
    if options.json is not None:
        options.json.write_text(json.dumps({"row_tokens": options.tokens, **results}, indent=1) + "\n")
    return int(not is_good)


if __name__ == "__main__":
    sys.exit(main())
