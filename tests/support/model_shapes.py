"""Shapes of well-known models from the shipped table."""

from ulysses_cli.hub import load_table
from ulysses_cli.plan.models.shape import ModelShape, read_model_shape

NAMES = ("Qwen/Qwen3-4B", "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-30B-A3B", "google/gemma-2-9b", "openai/gpt-oss-20b")


def get_shape(name: str) -> ModelShape:
    return read_model_shape(load_table()[name.lower()]["config"], name)


SHAPES = {name: get_shape(name) for name in NAMES}
QWEN, LLAMA = SHAPES["Qwen/Qwen3-4B"], SHAPES["meta-llama/Llama-3.1-8B"]
