"""What a forward on sizes does with each token: the matrix products in which a weight takes part, and the norms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from inspect import signature
from typing import Any, NamedTuple

from ulysses_cli.plan.layout import Layout
from ulysses_cli.plan.ledger.depth import Depth, choose_depth, find_number
from ulysses_cli.plan.ledger.hooks import ATTENTION, find_part
from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.ledger.kept import KeptOnDisk
from ulysses_cli.plan.ledger.moments import get_stack
from ulysses_cli.plan.ledger.step import SizedRun, alone, load_own
from ulysses_cli.plan.levers import Levers
from ulysses_cli.plan.models.layers import ExpertsMlp
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.sizes.nn import SizedModule
from ulysses_cli.plan.sizes.tensor import Running, Storage, Tensor

TOKENS = 64  # of the forward: products with weights have a row for each


class Products(NamedTuple):
    """Of all layers, without the head. `mlp` and `others`: multiplications of a token's numbers by weights of MLPs,
    with the experts that it is sent to, and by all others. `mlp_weights`: elements of matrices of MLPs, with all
    experts, whose own are `expert_weights`. `widest_mlp`: the multiplications in the layer that has most. `normed`: a
    token's numbers that norms without a gate take. `norms_heads`: some are of heads, or of what heads are made of."""

    mlp: int
    others: int
    mlp_weights: int
    expert_weights: int
    widest_mlp: int
    normed: int
    norms_heads: bool


def count_products(shape: ModelShape) -> Products:
    """Raises UnknownOperator for what has no sizes."""
    return PRODUCTS.get(shape, None, lambda: _find_products(shape))


PRODUCTS = KeptOnDisk("products", 64, list, lambda packed: Products(*packed))


def _find_products(shape: ModelShape) -> Products:
    """A model that is not listed may train on one rank for each row, though its file does not run on sizes."""
    try:
        return _count_products(shape)
    except Exception:  # its code may ask for what nobody has foreseen
        if shape.family is not None:
            raise
        return _guess_products(shape)


def _guess_products(shape: ModelShape) -> Products:
    """Of Llama's layers, or Mixtral's, with these widths."""
    hidden, others, in_mlps, weights, in_experts = shape.hidden_size, 0, [0], 0, 0
    for layer in shape.layers:
        if (attention := layer.attention) is not None:
            others += 2 * hidden * (attention.num_heads + attention.num_kv_heads) * attention.head_dim
        if isinstance(layer.mlp, ExpertsMlp):
            expert, router = 3 * hidden * layer.mlp.inner_size, hidden * layer.mlp.num_experts
            in_mlps.append(layer.mlp.num_per_token * expert + router)
            in_experts += layer.mlp.num_experts * expert
            weights += layer.mlp.num_experts * expert + router
        elif layer.mlp is not None:
            in_mlps.append(3 * hidden * layer.mlp.inner_size)
            weights += in_mlps[-1]
    normed = 2 * hidden * len(shape.layers)
    return Products(sum(in_mlps), others, weights, in_experts, max(in_mlps), normed, norms_heads=False)


def _count_products(shape: ModelShape) -> Products:
    """Of a float32 model, which casts no weight. Which module is an MLP, the lever says that runs MLPs in tiles."""
    job = Job(shape, Layout(), TOKENS, Levers(gradient_checkpointing=False), zero_stage=1, dtype_bytes=4)
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
        found, in_layer, normed = Counter[bool](), Counter[int | None](), Counter[bool]()
        for module, (num_alike, is_inside) in _find_norms(layers, depth).items():

            def add(_: Any, __: Any, out: Tensor, num_alike: int = num_alike, is_inside: bool = is_inside) -> None:
                normed[is_inside] += num_alike * out.numel()

            module.register_forward_hook(add)

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
        normed=sum(normed.values()) // TOKENS,
        norms_heads=normed[True] > 0,
    )


def _find_norms(layers: Sequence[SizedModule], depth: Depth) -> dict[SizedModule, tuple[int, bool]]:
    """Each once, with the number of layers like its own, and whether it is inside of attention."""
    return {
        module: (depth.like.count(place), find_part(f".{number}.{path}") == ATTENTION)
        for place, number in enumerate(depth.live)
        for path, module in layers[number].named_modules()
        if "Norm" in type(module).__name__ and len(signature(module.forward).parameters) == 1
    }
