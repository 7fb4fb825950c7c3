"""Measures a training step with adapters on experts against the same step with peft's own forward, which adds them to
all weights: the same run, with alternating steps in one process. One rank, one layer of the width of Qwen3-30B-A3B's,
with a quarter of its experts, for each token and in all; experts' adapters have its rank. The bar is for tiles, which a
long row has: peft adds adapters to all weights once for each.

    python benchmarks/experts.py [--rounds 8]
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

ROW_TOKENS, BAR = 2048, 0.6
CONFIG = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_hidden_layers": 1, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 64, "num_experts": 32,
    "num_experts_per_tok": 2, "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 1024,
    "max_position_embeddings": ROW_TOKENS, "tie_word_embeddings": False,
}  # fmt: skip
LORA = ("lora.r=4", "lora.target_modules=[q_proj, k_proj, v_proj, o_proj]", "lora.experts=[gate_up, down]")
CASES = {
    "bfloat16, in tiles": ("model.dtype=bfloat16", "memory.tiled_mlp=true"),
    "bfloat16": ("model.dtype=bfloat16", "memory.tiled_mlp=false"),
    "float32, in tiles": ("model.dtype=float32", "memory.tiled_mlp=true"),
    "float32": ("model.dtype=float32", "memory.tiled_mlp=false"),
}
SIDES = {"ours": True, "peft's": False, "peft's, again": False}


def make_sides(words: tuple[str, ...]) -> dict[str, Any]:
    from support.run_harness import RunHarness
    from support.training import MemoryRows, make_recipe

    from ulysses_cli.train.model import loss_model

    parts: dict[str, Any] = vars(loss_model)
    serve, harnesses = parts["serve_adapted_experts"], {}
    for side, is_ours in SIDES.items():
        parts["serve_adapted_experts"] = serve if is_ours else lambda *_: 0
        recipe = make_recipe(
            *LORA, *words, f"data.max_length={ROW_TOKENS}", "train.lr_scheduler_type=constant", config=CONFIG
        )
        harnesses[side] = RunHarness(recipe, MemoryRows([[(ROW_TOKENS, 0)]] * 4, 1024), 10**6)
    parts["serve_adapted_experts"] = serve
    return harnesses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    num_rounds = parser.parse_args().rounds
    connect()
    result: dict[str, Any] = {"row_tokens": ROW_TOKENS, "rounds": num_rounds, "bar": BAR, "cases": {}}
    for name, words in CASES.items():
        print(name)
        harnesses = make_sides(words)
        own = summarize(measure_in_turns(harnesses, num_rounds), *SIDES)
        own["losses"] = {side: harness.results[-1].loss for side, harness in harnesses.items()}
        print(f"  bar {BAR}; losses {own['losses']}")
        result["cases"][name] = own
    (RESULTS / "experts-cpu.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
