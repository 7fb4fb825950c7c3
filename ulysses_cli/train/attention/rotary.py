"""Rotary frequencies that follow a length (longrope, dynamic), on packed rows that are split over ranks.

transformers takes the longest position that it sees: on a rank, a slice's; in a packed row, another document's. Here
each token gets the frequencies of its own document's length, as if the document were alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ulysses_cli.train.attention.documents import Documents
from ulysses_cli.train.processes.sequence_axis import SequenceAxis

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
