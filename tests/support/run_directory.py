"""Writes a run directory as a real run leaves it, for tests of the report."""

import json
import math
import random
from pathlib import Path
from typing import Any

SECRET = "hf_QwErTyUiOpAsDfGhJkLzXcVb"
BUCKETS = ("0-2K", "2K-4K", "4K-8K", "8K-16K", "16K-32K", "32K-64K", "64K-128K")
FACTS: dict[str, Any] = {
    "recipe_hash": "3f9c1e77",
    "recipe_file": "recipes/qwen3-8b-128k-8gpu.yaml",
    "recipe": {
        "model": {"name_or_path": "Qwen/Qwen3-8B", "tokenizer": "Qwen/Qwen3-8B", "hub_token": SECRET},
        "parallel": {"dp_replicate_size": 1, "dp_shard_size": 1, "sp_size": 8},
        "data": {"datasets": [{"path": "s3://bucket/x?X-Amz-Signature=deadbeefcafe&v=1"}], "max_length": 131072},
        "deepspeed": {"nebula": {"api_key": "correct horse battery staple", "password": 123456}},
    },
    "layout": {"dp_replicate_size": 1, "dp_shard_size": 1, "sp_size": 8, "world_size": 8},
    "model": {"name": "Qwen/Qwen3-8B", "model_type": "qwen3", "num_parameters": 8_190_735_360},
    "versions": {"torch": "2.13.0", "deepspeed": "0.19.8", "tokenizers": "0.22.1"},
    "machine": {"device": "NVIDIA H200", "num_gpus_per_node": 8, "device_memory_bytes": 141 * 2**30},
    "data": {"hash": "77aa01", "num_rows": 4_096, "num_documents": 51_377, "num_tokens": 536_870_912},
    "levers": {
        "tiled_mlp": {"value": True, "reason": "the MLP's activations would take 38 GiB"},
        "offload_optimizer": {"value": "none", "reason": "it fits without"},
    },
    "attention": {"name": "flash_attention_3", "reason": "the fastest that proved exact here"},
    "prediction": {"peak_memory_bytes": 96 * 2**30, "step_seconds": 20.5},
    "price_per_gpu_hour": 2.5,
    "started": "2026-03-01T09:30:00+00:00",
    "num_steps": 1200,
}


def make_step(step: int, noise: random.Random) -> dict[str, Any]:
    seconds = 21.0 + noise.gauss(0, 0.4) + (9 if step % 211 == 0 else 0)
    line: dict[str, Any] = {
        "step": step,
        "epoch": step / 1000,
        "loss": 1.62 + 0.9 * math.exp(-step / 90) + noise.gauss(0, 0.05),
        "grad_norm": math.exp(noise.gauss(-0.5, 0.3)) + (25 if step == 640 else 0),
        "learning_rate": 1e-5 * min(1, step / 60) * (0.55 + 0.45 * math.cos(math.pi * step / 1200)),
        "tokens": 1_048_576,
        "supervised_tokens": 830_000,
        "step_seconds": seconds,
        "tokens_per_second": 1_048_576 / seconds,
        "tokens_per_second_per_gpu": 131_072 / seconds,
        "tflops": 410.0,
        "mfu": 0.41 + noise.gauss(0, 0.01),
        "peak_memory_bytes": int(94.2 * 2**30) + step * 1000,
        "host_peak_memory_bytes": 180 * 2**30,
        "communication_share": 0.12 + noise.gauss(0, 0.01),
        "a_key_of_the_future": [1, 2],
    }
    if step % 10 == 0:
        shares = {"projections": 0.12, "attention": 0.5, "mlp": 0.16, "head_loss": 0.05, "exchange": 0.08}
        shares |= {"gather_reduce": 0.04, "optimizer": 0.03, "data": 0.001, "other": 0.019}
        line["step_parts"] = {name: seconds * share for name, share in shares.items()}
    return line


def write_run(folder: Path, num_steps: int = 1000, **facts: Any) -> Path:
    noise = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps({**FACTS, **facts}))
    steps = [make_step(step, noise) for step in range(1, num_steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps))
    evals = [
        {
            "step": step,
            "loss": 1.66 + 0.8 * math.exp(-step / 90),
            "perplexity": 5.3,
            "tokens": 2_000_000,
            "by_position": {
                name: {"loss": 1.9 + 0.8 * math.exp(-step / 90) - 0.07 * place, "tokens": 100_000}
                for place, name in enumerate(BUCKETS)
            },
        }
        for step in range(100, num_steps + 1, 100)
    ]
    (folder / "eval.jsonl").write_text("".join(json.dumps(line) + "\n" for line in evals))
    return folder
