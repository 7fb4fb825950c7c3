"""The groups of shards that ZeRO-3's optimizer steps together."""

from __future__ import annotations

from functools import lru_cache

from ulysses_cli.plan.ledger.weights import Weights, count_shard


@lru_cache(maxsize=64)
def list_sub_groups(weights: Weights, num_ranks: int, size: int) -> tuple[int, ...]:
    """Elements of this rank's shards that the optimizer steps together. Weights are added until there are `size` or
    more, so a group may be larger by up to one weight's shard (stage3.py: _create_fp16_sub_groups)."""
    whole = count_shard(weights.num_trained, num_ranks)
    if size >= whole:
        return (whole,)
    numels = {name: numel for module in weights.modules if module.is_trained for name, numel in module.weights}
    groups, filled = [], 0
    for numel in numels.values():
        filled += count_shard(numel, num_ranks)
        if filled >= size:
            groups.append(filled)
            filled = 0
    return (*groups, filled) if filled else tuple(groups)
