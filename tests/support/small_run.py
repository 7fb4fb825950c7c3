"""Holds the one small model and the one small recipe that tests and benchmarks train on CPU ranks."""

from typing import Any

CONFIG: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64,
    "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip
# large enough for the embedded tokenizer's bytes
BYTES_CONFIG = {**CONFIG, "vocab_size": 260, "max_position_embeddings": 512, "tie_word_embeddings": True}
# Adam divides a gradient by its own size. With the usual epsilon, elements whose gradient is rounding noise would take
# full steps in a random direction, on any two machines.
CALM = {"adam_epsilon": 1e-3}


def make_settings(config: dict[str, Any] | None = None, **sections: dict[str, Any]) -> dict[str, Any]:
    """Returns a recipe file's content, in float32 on CPU ranks; `sections` are merged over it key by key."""
    settings: dict[str, dict[str, Any]] = {
        "model": {"config": config or BYTES_CONFIG, "tokenizer": "bytes", "dtype": "float32"},
        "data": {"datasets": [{"type": "synthetic"}], "max_length": 128},
        "train": {"learning_rate": 0.003, **CALM},
        "run": {"device": "cpu", "output_dir": "run"},
    }
    for name, section in sections.items():
        settings[name] = {**settings.get(name, {}), **section}
    return settings
