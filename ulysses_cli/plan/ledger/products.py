"""What a token is multiplied with: the matrix products of a forward on sizes in which a weight takes part."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from ulysses_cli.plan.layout import Layout
from ulysses_cli.plan.ledger.depth import choose_depth, find_number
from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.ledger.kept import KeptOnDisk
from ulysses_cli.plan.ledger.moments import get_stack
from ulysses_cli.plan.ledger.step import SizedRun, alone, load_own
from ulysses_cli.plan.levers import Levers
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.sizes.tensor import Running, Storage, Tensor

TOKENS = 64  # of the forward: products with weights have a row for each


class Products(NamedTuple):
    """Of all layers, without the head. `mlp` and `others`: multiplications of a token's numbers by weights of MLPs,
    with the experts that it is sent to, and by all others. `mlp_weights`: elements of matrices of MLPs, with all
    experts, whose own are `expert_weights`. `widest_mlp`: the multiplications in the layer that has most."""

    mlp: int
    others: int
    mlp_weights: int
    expert_weights: int
    widest_mlp: int


def count_products(shape: ModelShape) -> Products:
    return PRODUCTS.get(shape, None, lambda: _count_products(shape))


PRODUCTS = KeptOnDisk("products", 64, list, lambda packed: Products(*packed))


def _count_products(shape: ModelShape) -> Products:
    """Which module is an MLP, the lever says that runs MLPs in tiles. Raises UnknownOperator for what has no sizes."""
    job = Job(
        shape, Layout(), TOKENS, Levers(gradient_checkpointing=False), zero_stage=1, dtype_bytes=4
    )  # no weight is cast
    stack = get_stack(job)
    depth = choose_depth(stack, is_sample=True)
    with alone():
        run = SizedRun(job, 0, depth, stack)
        for weight in run.module.parameters():
            weight.storage = Storage(0)  # by which it is known again, also in a view
        list_blocks = load_own("memory.tiled_mlp").list_blocks
        numbers, in_mlps, experts = dict[int, int](), Counter[int](), Counter[int]()
        layers = list(run.layers or ())
        for place, number in enumerate(depth.live):
            layer, num_alike = layers[number], depth.like.count(place)
            numbers.update({id(weight.storage): num_alike for weight in layer.parameters()})
            for _, block in list_blocks(layer):
                matrices = [weight for weight in block.parameters() if weight.ndim > 1]
                in_mlps.update({id(weight.storage): num_alike * weight.numel() for weight in matrices})
                experts.update({id(each.storage): num_alike * each.numel() for each in matrices if each.ndim > 2})
        head = run.module.model.get_output_embeddings().weight.storage
        weights = {id(weight.storage) for weight in run.module.parameters()} - {id(head)}
        found, in_layer = Counter[bool](), Counter[int | None]()

        def count(a: Any, b: Tensor, multiplications: int) -> None:
            for place in {id(a.storage), id(b.storage)} & weights:
                found[place in in_mlps] += multiplications * numbers.get(place, 1)
                in_layer[find_number(Running.meter.tag[1])] += multiplications * (place in in_mlps)

        Running.product = count
        run.evaluate()
    return Products(
        mlp=found[True] // TOKENS,
        others=found[False] // TOKENS,
        mlp_weights=sum(in_mlps.values()),
        expert_weights=sum(experts.values()),
        widest_mlp=max(in_layer.values()) // TOKENS,
    )
