"""Registers Ulysses attention as an attention implementation of transformers, and gives each token the rotary
frequencies of its own document's length, as if the document were alone (longrope, dynamic). No model is patched.

Documents are an argument of the model's forward, which transformers passes to every layer. No mask function is
registered: transformers then builds no mask and does not search for documents, which would wait for the device in
every step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from ulysses_cli.train.attention.documents import Documents
from ulysses_cli.train.attention.kernels.native import Rule
from ulysses_cli.train.attention.ulysses import ulysses_attention
from ulysses_cli.train.processes.groups import NO_AXIS, SequenceAxis

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
    axis: SequenceAxis,
    kernel: str | Mapping[int, str],
    num_head_chunks: int = 1,
    *,
    ring: SequenceAxis = NO_AXIS,
    overlaps: bool = False,
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
        how: dict[str, Any] = {"num_head_chunks": num_head_chunks, "overlaps": overlaps, "kernel": name}
        out = ulysses_attention(q, k, v, documents, rule, axis=axis, ring=ring, sinks=s_aux, **how)
        return out, None

    name = f"ulysses_{next(_numbers)}"
    AttentionInterface.register(name, attention)
    return name


ORIGINAL = "original_max_position_embeddings"
STATE = ("max_seq_len_cached", "attention_scaling")  # what a call changes, with a layer type's prefix or without


def serve_rotary(model: Any, axis: SequenceAxis) -> int:
    """Makes the model's rotary embeddings choose frequencies by document. Returns how many follow a length. The model's
    forward takes `documents`, as its attention does."""
    decoder = model.get_decoder()
    served = [_DocumentRotary(module, axis) for module in decoder.modules() if _follows_length(module)]

    def enter(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        for rotary in served:
            rotary.documents = options.get("documents")
            rotary.length = getattr(options.get("generation"), "num_tokens", None)

    if served:
        decoder.register_forward_pre_hook(enter, with_kwargs=True)
    return len(served)


def _follows_length(module: nn.Module) -> bool:
    types = getattr(module, "rope_type", "")
    return any(_depends(each) for each in (types.values() if isinstance(types, dict) else (types,)))


def _depends(rope_type: object) -> bool:
    return isinstance(rope_type, str) and ("dynamic" in rope_type or rope_type == "longrope")


class _DocumentRotary:
    """A rotary embedding whose forward is replaced. `documents`: those of the call that is running; `length`: the one
    length of all its tokens, in generation."""

    def __init__(self, module: Any, axis: SequenceAxis) -> None:
        self.module, self.axis = module, axis
        self.documents: Documents | None = None
        self.length: int | None = None
        self.original: Callable[..., tuple[Tensor, Tensor]] = module.forward
        self.buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
        self.values = {name: value for name, value in vars(module).items() if name.endswith(STATE)}
        module.forward = self._run

    def _run(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
        options = {} if layer_type is None else {"layer_type": layer_type}
        rope_type = self.module.rope_type if layer_type is None else self.module.rope_type[layer_type]
        if not _depends(rope_type):
            return self.original(x, position_ids, **options)
        lengths = self._list_lengths(position_ids)
        result: tuple[Tensor, Tensor] | None = None
        for length, is_own in self._list_classes(lengths, rope_type, layer_type):
            self._restore(x.device)
            last = position_ids.new_full((*position_ids.shape[:-1], 1), length - 1)
            ids = torch.cat([position_ids.clamp(max=length - 1), last], -1)  # the longest position decides
            cos, sin = (part[..., :-1, :] for part in self.original(x, ids, **options))
            if result is None:
                result = cos, sin
            else:
                own = is_own.to(x.device, non_blocking=True)[..., None]
                result = torch.where(own, cos, result[0]), torch.where(own, sin, result[1])
        assert result is not None
        return result

    def _list_lengths(self, position_ids: Tensor) -> Tensor:
        """The length of the document of each of this rank's tokens, [B, S] on the host."""
        if self.length is not None:
            return torch.full(position_ids.shape[-2:], self.length)
        if self.documents is None or self.documents.shared:
            what = "no documents" if self.documents is None else "documents of several lengths with one beginning"
            raise ValueError(f"rotary frequencies follow a document's length, and the model's forward got {what}")
        batch, tokens = position_ids.shape[-2:]
        return self.documents.list_local_lengths(batch, tokens, self.axis)

    def _list_classes(self, lengths: Tensor, rope_type: str, layer_type: str | None) -> Iterator[tuple[int, Tensor]]:
        """Lengths with frequencies of their own, and which tokens have them. Up to the original length all are alike;
        longrope has one other set of frequencies, dynamic one for each length."""
        if rope_type == "longrope":
            parameters = self.module.config.rope_parameters
            original = int((parameters if layer_type is None else parameters[layer_type])[ORIGINAL])
            lengths = torch.where(lengths > original, lengths.max(), original)
        else:
            lengths = lengths.clamp(min=int(self.module.original_max_seq_len))
        for length in lengths.unique().tolist():
            yield length, lengths == length

    def _restore(self, device: torch.device) -> None:
        """A call begins as a new module's would: what an earlier call left does not matter."""
        for name, buffer in self.buffers.items():
            self.module.register_buffer(name, buffer.to(device, copy=True), persistent=False)
        for name, value in self.values.items():
            setattr(self.module, name, value)
