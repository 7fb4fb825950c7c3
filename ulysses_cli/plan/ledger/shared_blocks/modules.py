"""The modules of a layer that uses a shared block, with the sizes of their weights, in forward order (transformers:
modeling_zamba2.py, Zamba2HybridLayer)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from ulysses_cli.plan.ledger.adapters.modules import ATTENTION, Adapters, Module, make_linear
from ulysses_cli.plan.ledger.recurrence.modules import walk_scan
from ulysses_cli.plan.models.layers import AttentionMixer, DenseMlp, Layer, Mamba2Mixer, SharedBlock
from ulysses_cli.plan.models.shape import ModelShape

# The norm of both inputs, the one before the MLP, and that of the layer's own mixer.
BLOCK_NORM, MLP_NORM, MIXER_NORM = "input_norm", "norm0", "norm"
OF_MIXER = "mixer"  # stands before the names of its weights
LAST_MATRIX = "linear"  # behind the block, and the layer's own
QUERY_ADAPTERS, GATE_ADAPTER = ("q_adapter", "k_adapter", "v_adapter"), "gate_up_adapter"

Make = Callable[..., Module]


def name_block(shared: SharedBlock) -> str:
    """Stands before the names of its weights, in place of a layer's number."""
    return f"block{shared.number}"


def split_layer(layer: Layer) -> tuple[SharedBlock, AttentionMixer, DenseMlp, Mamba2Mixer]:
    """The parts of a layer that uses a shared block."""
    scan = next((mixer for mixer in layer.mixers if isinstance(mixer, Mamba2Mixer)), None)
    if layer.shared is None or layer.attention is None or not isinstance(layer.mlp, DenseMlp) or scan is None:
        raise AssertionError("no layer with a shared block")
    return layer.shared, layer.attention, layer.mlp, scan


def walk_shared_layer(
    shape: ModelShape, layer: Layer, make: Make, make_shared: Make, adapters: Adapters | None
) -> Iterator[Module]:
    """`make` makes modules with the layer's own weights, `make_shared` those with the block's. The block reads the
    hidden state beside the embedding."""
    shared, attention, mlp, scan = split_layer(layer)
    hidden, inner, both = shape.hidden_size, mlp.inner_size, attention.num_inputs * shape.hidden_size
    query, kv = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
    has_bias = shape.biases.mlp
    linear, of_block = make_linear(make, adapters), make_linear(make, adapters, make_shared)

    def adapter(name: str, num_in: int, num_out: int, *, in_mlp: bool = False) -> Iterator[Module]:
        own = make_linear(partial(_make_inside, make, name), adapters)
        yield make(5, name, in_mlp=in_mlp)
        yield from own("0", num_in, shared.rank, in_mlp=in_mlp, depth=6)
        yield from own("1", shared.rank, num_out, in_mlp=in_mlp, depth=6)

    yield make(3, "block")
    yield make_shared(4, BLOCK_NORM, (BLOCK_NORM, both))
    yield make(4, ATTENTION)
    for name, width in (("q_proj", query), ("k_proj", kv), ("v_proj", kv)):
        yield from of_block(name, both, width, depth=5)
    for name in QUERY_ADAPTERS * shared.adapts_attention:
        yield from adapter(name, both, both)
    yield from of_block("o_proj", query, hidden, depth=5)
    yield make_shared(4, MLP_NORM, (MLP_NORM, hidden))
    yield make(4, "mlp", in_mlp=True)
    yield from of_block("gate_up_proj", hidden, 2 * inner, in_mlp=True, depth=5, num_biases=2 * inner * has_bias)
    yield from adapter(GATE_ADAPTER, hidden, 2 * inner, in_mlp=True)
    yield make(5, "act_fn", in_mlp=True)
    yield from of_block("down_proj", inner, hidden, in_mlp=True, depth=5, num_biases=hidden * has_bias)
    yield from linear(LAST_MATRIX, hidden, hidden, depth=3)
    in_mixer = partial(_make_inside, make, OF_MIXER)
    yield make(3, "mixer")
    yield in_mixer(4, MIXER_NORM, (MIXER_NORM, hidden))
    yield from walk_scan(
        shape, scan, partial(_make_deeper, in_mixer), partial(make_linear(in_mixer, adapters), depth=5)
    )


def list_copied_adapters(shape: ModelShape, modules: Sequence[Module]) -> Iterator[tuple[int, str, int]]:
    """(Layer, weight, elements): a layer has a copy of its block, with the block's own adapters of each other layer
    that uses it. No forward uses these. Copies share the weights, and not what LoRA puts on them."""
    users = [(number, layer.shared.number) for number, layer in enumerate(shape.layers) if layer.shared]
    own = {
        number: {name: size for module in modules if module.layer == number for name, size in module.weights}
        for number, _ in users
    }
    for number, block in users:
        for other in (each for each, same in users if same == block and each != number):
            for name, size in own[other].items():
                if name.split(".")[1] in (*QUERY_ADAPTERS, GATE_ADAPTER):
                    yield number, f"{number}.of {name}" if name.endswith((".a", ".b")) else name, size


def _make_inside(
    make: Make,
    prefix: str,
    depth: int,
    name: str,
    *weights: tuple[str, int],
    reads: tuple[tuple[str, int], ...] = (),
    **more: bool,
) -> Module:
    """With weights whose names begin with that of the module around it."""
    own, read = (tuple((f"{prefix}.{key}", size) for key, size in each) for each in (weights, reads))
    return make(depth, name, *own, reads=read, **more)


def _make_deeper(make: Make, depth: int, name: str, *weights: tuple[str, int], **more: Any) -> Module:
    return make(depth + 1, name, *weights, **more)
