"""Tiles are alike: the first, one more and the last show what all of them take. For runs that compute no value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ulysses_cli.train.memory import offload, tiled_loss, tiled_mlp, tiled_norm

MAX_TILES = 3


def keep_few_tiles() -> None:
    """Replaces what cuts tokens into tiles, wherever this package does."""
    offload.list_chunks = _keep_few(offload.list_chunks)  # type: ignore[attr-defined]
    for tiled in (tiled_mlp, tiled_norm):
        tiled.split_tokens = _keep_few(tiled.split_tokens)  # type: ignore[attr-defined]
    tiled_loss.TiledLoss.walk_tiles = _keep_few(tiled_loss.TiledLoss.walk_tiles)  # type: ignore[method-assign]
    tiled_loss.TiledLoss.compute_losses_in_tiles = _compute_losses  # type: ignore[method-assign]


def _keep_few(split: Callable[..., list[slice]]) -> Callable[..., list[slice]]:
    def few(*args: Any) -> list[slice]:
        parts = split(*args)
        return parts if len(parts) <= MAX_TILES else [*parts[: MAX_TILES - 1], parts[-1]]

    return few


@torch.no_grad()
def _compute_losses(loss: Any, tokens: Tensor, labels: Tensor, places: Any, rule: Any) -> Tensor:
    """One loss per target, though only a few tiles are computed."""
    found = map(places.find, loss.walk_tiles(len(places)))
    losses = [loss.compute(loss.compute_logits(tokens[each]), labels[each], rule)[0] for each in found]
    return losses[0].new_empty(len(places))
