"""The model as a list of modules with the sizes of their weights, in the order of a forward. Sizes only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from ulysses_cli.plan.families import FAMILIES
from ulysses_cli.plan.model_shape import Layer, ModelShape

EMBEDDING, LAYERS, HEAD = "embedding", "layers", "head"


@dataclass(frozen=True)
class Adapters:
    """LoRA: rank, and the last part of the names of the layers that get one; () for every linear layer."""

    rank: int
    targets: tuple[str, ...] = ()


@dataclass(frozen=True)
class Module:
    """One module: where it stands, its own weights as (name, elements), and whether they are trained. An MLP in tiles
    is gathered as a whole: its modules are `in_mlp`."""

    part: str
    layer: int
    weights: tuple[tuple[str, int], ...] = ()
    is_trained: bool = True
    in_mlp: bool = False


@dataclass(frozen=True)
class Weights:
    """Every module once, in forward order, and sums that the ledger needs."""

    modules: tuple[Module, ...]
    num_trained: int
    num_frozen: int
    largest: int  # elements of the largest trained weight, or of the largest weight if none is trained in full
    persistent_sizes: tuple[int, ...]

    def __hash__(self) -> int:
        """Cheap: what is cached by weights is asked for in every ledger."""
        return hash((self.num_trained, self.num_frozen, self.largest))

    @property
    def num_elements(self) -> int:
        return self.num_trained + self.num_frozen


@lru_cache(maxsize=64)
def list_weights(shape: ModelShape, adapters: Adapters | None) -> Weights:
    """Sizes as transformers builds them: one matrix per linear layer, all experts of a layer in two tensors."""
    modules = tuple(_walk_modules(shape, adapters))
    sizes: dict[str, tuple[int, bool]] = {}
    for module in modules:
        for name, size in module.weights:
            sizes[name] = size, module.is_trained
    trained = [size for size, is_trained in sizes.values() if is_trained]
    frozen = [size for size, is_trained in sizes.values() if not is_trained]
    counted, known = sum(trained) + sum(frozen), shape.num_parameters
    biases = 0 if known is None or adapters is not None else known - counted
    everything = [size for size, _ in sizes.values()]
    return Weights(modules, sum(trained) + biases, sum(frozen), max(everything), tuple(everything))


def count_adapter_elements(shape: ModelShape, adapters: Adapters | None) -> int:
    return 0 if adapters is None else list_weights(shape, adapters).num_trained


def _walk_modules(shape: ModelShape, adapters: Adapters | None) -> Iterator[Module]:
    full = adapters is None
    embedding = shape.vocab_size * shape.hidden_size
    yield Module("", -1)
    yield Module("", -1)
    yield Module(EMBEDDING, -1, (("embedding", embedding),), full)
    yield Module("", -1)
    for index, layer in enumerate(shape.layers):
        yield from _walk_layer(shape, adapters, index, layer)
    yield Module(HEAD, -1, (("norm", shape.hidden_size),), full)
    name = "embedding" if shape.tie_word_embeddings else "head"
    yield Module(HEAD, -1, ((name, embedding),), full)


def _walk_layer(shape: ModelShape, adapters: Adapters | None, index: int, layer: Layer) -> Iterator[Module]:
    """Module by module, those without weights too: DeepSpeed prefetches at each of them."""
    family = FAMILIES[shape.model_type]
    hidden, query, kv = shape.hidden_size, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    full = adapters is None

    def plain(*weights: tuple[str, int], in_mlp: bool = False) -> Module:
        return Module(LAYERS, index, tuple((f"{index}.{name}", size) for name, size in weights), full, in_mlp)

    def linear(name: str, num_in: int, num_out: int, in_mlp: bool = False) -> Iterator[Module]:
        yield plain((name, num_in * num_out), in_mlp=in_mlp)
        if adapters is not None and (not adapters.targets or name in adapters.targets):
            yield Module(LAYERS, index, ((f"{index}.{name}.a", num_in * adapters.rank),), True, in_mlp)
            yield Module(LAYERS, index, ((f"{index}.{name}.b", num_out * adapters.rank),), True, in_mlp)

    norms = family.norms_per_layer
    yield plain()
    yield plain(("norm1", hidden))
    yield plain(*([("sinks", shape.num_heads)] if shape.has_sinks else []))
    if "qkv_proj" in family.attention_modules:
        yield from linear("qkv_proj", hidden, query + 2 * kv)
    else:
        width = {"": 0, "head": shape.head_dim, "full": 1}[family.query_key_norm]
        yield from linear("q_proj", hidden, query)
        if width:
            yield plain(("q_norm", query if width == 1 else width))
        yield from linear("k_proj", hidden, kv)
        if width:
            yield plain(("k_norm", kv if width == 1 else width))
        yield from linear("v_proj", hidden, kv)
    yield from linear("o_proj", query, hidden)
    for number in range(2, norms):
        yield plain((f"norm{number}", hidden))
    yield plain(in_mlp=True)
    if layer.num_experts:
        experts, inner = layer.num_experts, shape.moe_intermediate_size
        yield plain(("router", experts * hidden), in_mlp=True)
        bias = family.experts_have_bias * experts
        yield plain(
            ("experts.gate_up", 2 * experts * inner * hidden),
            ("experts.down", experts * inner * hidden),
            *([("experts.biases", bias * (2 * inner + hidden))] if bias else []),
            in_mlp=True,
        )
    elif "gate_up_proj" in family.mlp_modules:
        yield from linear("gate_up_proj", hidden, 2 * shape.intermediate_size, in_mlp=True)
        yield plain(in_mlp=True)
        yield from linear("down_proj", shape.intermediate_size, hidden, in_mlp=True)
    else:
        yield from linear("gate_proj", hidden, shape.intermediate_size, in_mlp=True)
        yield plain(in_mlp=True)
        yield from linear("up_proj", hidden, shape.intermediate_size, in_mlp=True)
        yield from linear("down_proj", shape.intermediate_size, hidden, in_mlp=True)
    yield plain((f"norm{norms}", hidden))


def count_shard(num_elements: int, num_ranks: int) -> int:
    """Elements of a shard, rounded up as each weight is."""
    return -(-num_elements // num_ranks)
