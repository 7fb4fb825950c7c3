"""Measures a step of tiny hybrid models on two CPU ranks that share each row (sp 2) beside two ranks with rows of their
own (dp 2): seconds per token, and the bytes that the formula says a rank sends for sequence parallelism.

Both sides have the same weights, kernels, ZeRO stage and row length, and so has a second copy of dp 2, which shows the
noise. Their steps alternate in the same processes (paired_steps.py).

    python benchmarks/hybrid.py [--tokens N] [--rounds N] [--only KIND] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import paths  # noqa: F401 - makes tests/support importable
from paired_steps import CLOCKS, Sides, measure_in_turns, summarize

RANKS, BAR = 2, 1.15
SP, DP, COPY = f"sp {RANKS}", f"dp {RANKS}", f"dp {RANKS} again"
SIDES = {SP: "sp_size", DP: "dp_shard_size", COPY: "dp_shard_size"}
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "gated delta net": {
        "model_type": "qwen3_5_text",
        "layer_types": ["linear_attention", "full_attention"],
        "head_dim": 64,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    },
    "Kimi delta attention": {  # beside latent attention
        "model_type": "kimi_linear",
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "dense"],
        "linear_num_heads": 8,
        "linear_head_dim": 32,
        "num_key_value_heads": 4,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 48,
        "qk_rope_head_dim": 16,
        "v_head_dim": 64,
        "pad_token_id": 0,
    },
    "Mamba2": {
        "model_type": "bamba",
        "attn_layer_indices": [1],
        "mamba_n_heads": 16,
        "mamba_d_head": 32,
        "mamba_n_groups": 2,
        "mamba_d_state": 32,
        "mamba_chunk_size": 64,
    },
    "short convolution": {
        "model_type": "lfm2",
        "layer_types": ["conv", "full_attention"],
    },
}


def measure_model(_: int, model: str, tokens: int, rounds: int) -> list[Any]:
    """Returns every rank's seconds of every step, and the bytes that it sends for sequence parallelism in one."""
    import torch.distributed as dist
    from support.run_harness import RunHarness
    from support.training import MemoryRows, make_recipe

    from ulysses_cli.plan.ledger.job import make_job
    from ulysses_cli.plan.speed import compute_exchange_bytes

    config = {**SIZES, **MODELS[model], "max_position_embeddings": tokens}
    harnesses, num_bytes = {}, 0.0
    for side, setting in SIDES.items():
        words = (f"data.max_length={tokens}", "train.lr_scheduler_type=constant", f"parallel.{setting}={RANKS}")
        rows = MemoryRows([[(tokens, 0)]] * 8, SIZES["vocab_size"])
        harnesses[side] = RunHarness(make_recipe(*words, config=config), rows, 10**6)
        plan = harnesses[side].plan
        num_bytes = max(num_bytes, compute_exchange_bytes(make_job(plan.recipe, plan.shape, plan.levers)))
    answers: list[Any] = [None] * RANKS
    dist.all_gather_object(answers, (measure_in_turns(harnesses, rounds), num_bytes))
    return answers


def join_ranks(answers: list[dict[str, Sides]]) -> dict[str, Sides]:
    """Seconds per row: the CPU time of all ranks, and the clock of the slowest rank. A step of sp 2 has one row, one of
    dp 2 has two."""
    joined: dict[str, Sides] = {}
    for clock in CLOCKS:
        join = sum if clock == "cpu" else max
        joined[clock] = {
            side: [
                join(each) / (1 if side == SP else RANKS)
                for each in zip(*(a[clock][side] for a in answers), strict=True)
            ]
            for side in SIDES
        }
    return joined


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096, help="of a row")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--only", choices=MODELS, action="append", help="one kind of layer; may be given several times")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    from ulysses_cli.prove.ranks import run_on_ranks

    results, is_good = {}, True
    for model in options.only or MODELS:
        answers = run_on_ranks(RANKS, measure_model, model, options.tokens, options.rounds)
        num_bytes = max(num for _, num in answers)
        print(
            f"\n{model}: {num_bytes / 2**20:.2f} MiB sent per rank and step by the formula; seconds per row", flush=True
        )
        summary = summarize(join_ranks([seconds for seconds, _ in answers]), SP, DP, COPY)
        ratio = summary["cpu"]["ratio"][1]
        is_good = is_good and ratio <= BAR
        results[model] = {"bytes_sent_per_rank": num_bytes, **summary}
        print(f"  per token {ratio:.3f} of {DP}, bar {BAR}: {'met' if ratio <= BAR else 'MISSED'}")
    if options.json is not None:
        machine = {"cores": os.cpu_count(), "system": platform.platform()}
        versions = {name: version(name) for name in ("torch", "transformers", "deepspeed")}
        about = {"machine": machine, "versions": versions, "row_tokens": options.tokens, "bar": BAR}
        options.json.write_text(json.dumps({**about, "models": results}, indent=1) + "\n")
    return int(not is_good)


if __name__ == "__main__":
    sys.exit(main())
