"""The rule by which logits are computed from queries and keys, and the precision in which they are summed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rule:
    """Scale, window and softcap of logits. `window_tokens` counts the token itself; None reaches the document's
    start. Not causal: all keys of a document stand before its queries, as in a round of a ring, and no window ends."""

    scale: float
    window_tokens: int | None = None
    softcap: float | None = None
    is_causal: bool = True

    def covers(self, tokens: int) -> bool:
        """Whether the window spans a whole document of this length."""
        return self.window_tokens is None or self.window_tokens >= tokens


def get_precision(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def make_lse(q: Tensor) -> Tensor:
    return torch.empty(q.size(1), q.size(0), dtype=get_precision(q), device=q.device)
