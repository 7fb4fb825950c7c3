"""The modules that make each layer's vector of a token, and those that use it, with the sizes of their weights
(transformers: modeling_gemma4.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from ulysses_cli.plan.models.layers import TokenVectors

M = TypeVar("M")

VECTOR_EMBEDDING, VECTOR_PROJECTION = "vectors", "per_layer_model_projection"
VECTOR_GATE, VECTOR_OUTPUT, VECTOR_NORM = "per_layer_input_gate", "per_layer_projection", "vector_norm"


def walk_all_vectors(
    hidden: int, vectors: TokenVectors, make: Callable[..., M], linear: Callable[..., Iterator[M]]
) -> Iterator[M]:
    """Before the first layer: their gradients come after those of all layers (Gemma4TextModel:
    project_per_layer_inputs)."""
    yield make(2, "vectors", (VECTOR_EMBEDDING, vectors.vocab_size * vectors.width))
    yield from linear(VECTOR_PROJECTION, hidden, vectors.width, depth=2)
    yield make(2, "vectors_norm", ("vectors_norm", vectors.size))


def walk_own_vector(
    hidden: int, vectors: TokenVectors, make: Callable[..., M], linear: Callable[..., Iterator[M]]
) -> Iterator[M]:
    """At the end of a layer (Gemma4TextDecoderLayer.forward)."""
    yield from linear(VECTOR_GATE, hidden, vectors.size, depth=3)
    yield make(3, "act_fn")
    yield from linear(VECTOR_OUTPUT, vectors.size, hidden, depth=3)
    yield make(3, VECTOR_NORM, (VECTOR_NORM, hidden))
