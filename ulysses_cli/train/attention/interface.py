"""Registers Ulysses attention as an attention implementation of transformers. No model is patched.

A model whose config names the implementation calls it in every layer. Documents are an argument of the model's forward,
which transformers passes to every layer and activation checkpointing saves for the recomputation. No mask function is
registered: transformers then builds no mask and does not search for documents, which would wait for the device in every
step.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface

from ulysses_cli.train.attention.documents import Documents
from ulysses_cli.train.attention.kernels.rule import Rule
from ulysses_cli.train.attention.ulysses import ulysses_attention
from ulysses_cli.train.processes.sequence_axis import NO_AXIS, SequenceAxis

_numbers = itertools.count()
# Arguments of transformers' layers that this attention computes anyway, or that do not concern it.
IGNORED_ARGUMENTS = frozenset(
    {"position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states", "position_embeddings"}
    | {"return_dict", "num_items_in_batch", "output_router_logits", "labels", "shift_labels"}
)


class UnservedError(ValueError):
    """A layer asks for what this tool does not compute, or is not known to compute exactly."""


class CachedAttention(Protocol):
    """Attention with a cache, for generation: takes and returns tensors as ulysses_attention does."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, rule: Rule, sinks: Tensor | None, kernel: str, num_head_chunks: int
    ) -> Tensor:
        """Collective over the cache's axis."""


def register_attention(
    axis: SequenceAxis, kernel: str | Mapping[int, str], num_head_chunks: int = 1, *, ring: SequenceAxis = NO_AXIS
) -> str:
    """Registers an attention implementation. Returns its name, for `attn_implementation`. Each call registers another,
    so that one process can hold models of different groups. Heads are read from the tensors."""

    @torch.compiler.disable  # breaks the graph; values do not change
    def attention(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        documents: Documents | None = None,
        generation: CachedAttention | None = None,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        is_causal: bool | None = None,
        **other_arguments: Any,
    ) -> tuple[Tensor, None]:
        layer = f"layer {getattr(module, 'layer_idx', '?')} ({type(module).__name__})"
        if documents is None and generation is None:
            raise ValueError(f"{layer} got no documents: pass documents=make_documents(...) to the model's forward")
        if attention_mask is not None:
            raise ValueError(f"{layer} got an attention mask; documents decide which tokens a token attends to")
        if dropout:
            raise UnservedError(f"{layer} asks for attention dropout {dropout}, which this tool does not offer")
        unknown = {name for name, value in other_arguments.items() if value is not None} - IGNORED_ARGUMENTS
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if unknown or not causal:
            features = ", ".join(sorted(unknown)) or "attention that is not causal"
            raise UnservedError(f"{layer} asks for {features}, which this tool is not known to compute exactly")
        rule = Rule(scaling if scaling is not None else query.size(-1) ** -0.5, sliding_window, softcap)
        q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
        name = kernel if isinstance(kernel, str) else kernel[max(query.size(-1), value.size(-1))]
        if generation is not None:
            return generation.attend(q, k, v, rule, s_aux, name, num_head_chunks), None
        out = ulysses_attention(
            q, k, v, documents, rule, axis=axis, ring=ring, kernel=name, sinks=s_aux, num_head_chunks=num_head_chunks
        )
        return out, None

    name = f"ulysses_{next(_numbers)}"
    AttentionInterface.register(name, attention)
    return name
