"""Finds out at which gradients of a step the bucket is full and is sent, for `reductions.py` (DeepSpeed: stage3.py,
stage_1_and_2.py). Counts elements; holds no tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby
from typing import NamedTuple

from ulysses_cli.plan.ledger.adapters.modules import LAYERS, Module
from ulysses_cli.plan.ledger.weights import CHILD_DEPTH, Weights, name_weight

NO_LEAVES: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Flush:
    """The bucket is sent: in the backward of which weight of which layer, how many elements it held, and how many have
    been sent in all by then. `num_coming`: elements of that weight; `num_waiting`: in an MLP, or experts beside one,
    the same and those of the weights whose gradients are made after it."""

    layer: int
    name: str
    in_mlp: bool
    num_elements: int
    num_sent: int
    largest: int
    num_coming: int
    num_waiting: int

    @property
    def weight(self) -> str:
        """Its name in the layer, or in a block that layers share."""
        return name_weight(self.name)

    @property
    def num_before(self) -> int:
        return self.num_sent - self.num_elements


@lru_cache(maxsize=64)
def list_flushes(weights: Weights, bucket: int, leaves: frozenset[int] = NO_LEAVES) -> tuple[Flush, ...]:
    """Gradients fill the bucket in the order in which the backward makes them. One that does not fit first sends what
    is there; one larger than the bucket is sent alone, when the next is made (stage3.py:
    reduce_independent_p_g_buckets_and_remove_grads). A tied embedding is last. In layers whose MLP is a leaf module its
    gradients wait until all are made, and are added in the order of weights (reduce_leaf_module_grads)."""
    filled, sent, largest, flushes, seen = 0, 0, 0, [], {"embedding"}
    blocks: dict[int, dict[str, int]] = {}
    for number, module in _number_blocks(weights):
        if module.is_trained:
            blocks.setdefault(number, {}).update(module.weights)
    for number, module, name, size in _walk_gradients(weights, leaves):
        if name in seen or weights.first_layers[name] != module.layer:
            continue
        seen.add(name)
        if filled and filled + size > bucket:
            sent += filled
            if module.part == LAYERS:
                rest = size + sum(n for key, n in blocks[number].items() if key not in seen)
                place = module.layer, name, module.in_mlp
                flushes.append(Flush(*place, filled, sent, largest, size, rest * module.in_mlp))
            filled = largest = 0
        filled, largest = filled + size, max(largest, size)
    return tuple(flushes)


def _number_blocks(weights: Weights) -> list[tuple[int, Module]]:
    """The number of a module is that of the part of a layer which it is, or is inside. The MLP of a shared block is a
    part too."""
    modules = weights.modules
    begins = (
        int(module.depth <= CHILD_DEPTH or module.in_mlp != before.in_mlp)
        for before, module in zip((modules[0], *modules), modules, strict=False)
    )
    return list(zip(accumulate(begins), modules, strict=True))


def _walk_gradients(weights: Weights, leaves: frozenset[int]) -> Iterator[tuple[int, Module, str, int]]:
    for number, group in groupby(reversed(_number_blocks(weights)), lambda numbered: numbered[0]):
        modules = [module for _, module in group]
        gradients = [
            (number, module, *weight) for module in modules if module.is_trained for weight in reversed(module.weights)
        ]
        is_leaf = any(module.in_mlp and module.layer in leaves for module in modules)
        yield from reversed(gradients) if is_leaf else gradients


class FilledBucket(NamedTuple):
    """Elements in the bucket when it is sent, those of its largest weight, and those sent before it."""

    num_elements: int
    largest: int
    num_before: int


@lru_cache(maxsize=64)
def list_last_filled(weights: Weights, bucket: int) -> tuple[FilledBucket, FilledBucket]:
    """What is sent when the embedding's gradient is made (nothing where it fits into the bucket), and at the end."""
    sizes = {name: size for module in weights.modules if module.is_trained for name, size in module.weights}
    embedding = sizes.pop("embedding", 0)
    filled = largest = sent = 0
    for size in reversed(sizes.values()):
        if filled and filled + size > bucket:
            sent, filled, largest = sent + filled, 0, 0
        filled, largest = filled + size, max(largest, size)
    if filled and embedding and filled + embedding > bucket:
        return FilledBucket(filled, largest, sent), FilledBucket(embedding, embedding, sent + filled)
    return FilledBucket(0, 0, sent), FilledBucket(filled + embedding, max(largest, embedding), sent)


@lru_cache(maxsize=64)
def find_filled(weights: Weights, bucket: int, name: str) -> FilledBucket:
    """What is sent when the gradient of the weight `name` is made; nothing where it fits into the bucket."""
    sizes = {name: size for module in weights.modules if module.is_trained for name, size in module.weights}
    sizes.pop("embedding", 0)
    filled = largest = sent = 0
    for each, size in reversed(sizes.items()):
        is_sent = filled and filled + size > bucket
        if each == name:
            return FilledBucket(filled, largest, sent) if is_sent else FilledBucket(0, 0, sent)
        if is_sent:
            sent, filled, largest = sent + filled, 0, 0
        filled, largest = filled + size, max(largest, size)
    return FilledBucket(0, 0, sent)
