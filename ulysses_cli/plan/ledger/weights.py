"""The model's modules with the sizes of their weights, in the order of a forward. Holds no tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial

from ulysses_cli.plan.ledger.modules import (
    ATTENTION,
    BIAS,
    EMBEDDING,
    HEAD,
    LAYERS,
    UNREAD_EMBEDDING,
    Adapters,
    Module,
    list_copied_adapters,
    make_beside,
    make_linear,
    name_block,
    trains,
    walk_all_vectors,
    walk_convolution,
    walk_delta_net,
    walk_kimi_delta,
    walk_latent_attention,
    walk_own_vector,
    walk_scan,
    walk_shared_layer,
)
from ulysses_cli.plan.models.families import FAMILIES
from ulysses_cli.plan.models.family import Family, Trait
from ulysses_cli.plan.models.layers import (
    AttentionMixer,
    ConvolutionMixer,
    DeltaNetMixer,
    ExpertsMlp,
    KimiDeltaMixer,
    Layer,
    Mamba2Mixer,
)
from ulysses_cli.plan.models.shape import ModelShape

SCALED_LAYER = "scaled layer"
ADAPTER_NAMES = (".a", ".b", ".lengths")
INPUT_NORM, NORM_BEHIND = "input_norm", "behind_norm"
# Gates of attention with a matrix of their own (modeling_afmoe.py, modeling_laguna.py).
ATTENTION_GATES = ("g_proj", "gate_proj")


@dataclass(frozen=True)
class Weights:
    """Every module once, in forward order and before the modules inside it, and sums that the ledger needs."""

    modules: tuple[Module, ...]
    num_trained: int
    num_frozen: int
    largest: int  # elements of the largest weight
    largest_trained: int
    persistent_sizes: tuple[int, ...]

    def __hash__(self) -> int:
        """Cheap, because every ledger looks up caches by weights."""
        return hash((self.num_trained, self.num_frozen, self.largest))

    @cached_property
    def first_trained(self) -> int:
        """The number of the first layer with a trained weight, 0 where the embedding is trained: no gradient goes to
        the layers before it, and they save nothing."""
        return find_first_trained(self.modules)

    @property
    def num_elements(self) -> int:
        return self.num_trained + self.num_frozen


def find_first_trained(modules: Sequence[Module]) -> int:
    trained = [module for module in modules if module.is_trained and module.weights]
    if any(module.part == EMBEDDING for module in trained):
        return 0
    last = max((module.layer for module in modules), default=0)
    return min((module.layer for module in trained if module.part == LAYERS), default=last + 1)


@lru_cache(maxsize=64)
def list_weights(shape: ModelShape, adapters: Adapters | None) -> Weights:
    """Sizes as transformers builds them: one matrix per linear layer, all experts of a layer in two tensors."""
    modules = tuple(_walk_modules(shape, adapters))
    sizes: dict[str, tuple[int, bool]] = {}
    for module in modules:
        for name, size in module.weights:
            sizes[name] = size, module.is_trained
    for _, name, size in list_copied_adapters(shape, modules):
        sizes.setdefault(name, (size, True))
    trained = [size for size, is_trained in sizes.values() if is_trained]
    frozen = [size for size, is_trained in sizes.values() if not is_trained]
    counted, known = sum(trained) + sum(frozen), shape.num_parameters
    biases = 0 if known is None or adapters is not None else known - counted
    everything = tuple(size for size, _ in sizes.values())
    largest = max(everything), max(trained, default=0)
    return Weights(modules, sum(trained) + biases, sum(frozen), *largest, everything)


def is_adapter(weight: str) -> bool:
    return weight.endswith(ADAPTER_NAMES)


def _walk_modules(shape: ModelShape, adapters: Adapters | None) -> Iterator[Module]:
    embedding = shape.vocab_size * shape.hidden_size
    yield Module("", -1, 0, "with_loss")
    yield Module("", -1, 1, "model")
    yield Module(EMBEDDING, -1, 2, "embed_tokens", (("embedding", embedding),), trains(adapters, "embed_tokens"))
    if vectors := shape.per_layer_embeddings:
        make = partial(make_beside, adapters)
        yield from walk_all_vectors(shape.hidden_size, vectors, make, make_linear(make, adapters))
    if shape.rope_type:
        yield Module("", -1, 2, "rotary_emb")
    for index, layer in enumerate(shape.layers):
        yield from _walk_layer(shape, adapters, index, layer)
    yield Module(HEAD, -1, 2, "norm", tuple(list_norm("norm", shape)), trains(adapters, "norm"))
    name = "embedding" if shape.tie_word_embeddings else "head"
    yield Module(HEAD, -1, 1, "lm_head", ((name, embedding),), trains(adapters, "lm_head"))


def list_norm(name: str, shape: ModelShape) -> Iterator[tuple[str, int]]:
    """Its weights: none, one, or one and a bias."""
    names = (name, f"{name}{BIAS}")
    return ((each, shape.hidden_size) for each in names[: FAMILIES[shape.model_type].norm_parts])


def count_norms(shape: ModelShape) -> int:
    """Of a layer, with those behind its blocks."""
    return FAMILIES[shape.model_type].norms_per_layer + (2 if shape.has_post_norms else 0)


def _walk_layer(shape: ModelShape, adapters: Adapters | None, index: int, layer: Layer) -> Iterator[Module]:
    """Module by module, also those without weights: DeepSpeed prefetches at each of them."""
    shape = replace(shape, model_type=find_alike(shape, layer))
    family, full, norms = FAMILIES[shape.model_type], adapters is None, trains(adapters, "norm")

    def make(
        depth: int,
        name: str,
        *weights: tuple[str, int],
        in_mlp: bool = False,
        is_trained: bool | None = None,
        owner: str = str(index),
        reads: tuple[tuple[str, int], ...] = (),
    ) -> Module:
        own, read = (tuple((f"{owner}.{key}", size) for key, size in each) for each in (weights, reads))
        whole = full or (norms and "norm" in name)
        is_beside = in_mlp and Trait.PARALLEL in shape.traits
        is_own = whole if is_trained is None else is_trained
        return Module(LAYERS, index, depth, name, own, is_own, in_mlp, is_beside, read)

    linear = make_linear(make, adapters)

    def of_mlp(name: str, num_in: int, num_out: int) -> Iterator[Module]:
        return linear(name, num_in, num_out, in_mlp=True, num_biases=num_out * shape.biases.mlp)

    def norm(name: str) -> Module:
        return make(3, name, *list_norm(name, shape))

    hidden, inner = shape.hidden_size, layer.mlp.inner_size if layer.mlp else shape.intermediate_size
    before, behind = has_norm_before(shape), has_norm_behind(shape)
    between = [f"norm{number}" for number in range(count_norms(shape) - before - behind)]
    is_unread = family.shares_blocks and not layer.shared and trains(adapters, "embed_tokens")
    is_scaled = Trait.SCALED_LAYERS in shape.traits
    yield make(2, UNREAD_EMBEDDING if is_unread else SCALED_LAYER if is_scaled else "layer")
    if layer.shared:
        yield from walk_shared_layer(shape, layer, make, partial(make, owner=name_block(layer.shared)), adapters)
        return
    if before:
        yield norm(INPUT_NORM)
    usual = AttentionMixer(shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.head_dim)
    for mixer in layer.mixers or ((usual,) if layer.mlp is None else ()):
        if isinstance(mixer, ConvolutionMixer):
            yield from walk_convolution(shape, mixer, make, linear)
        elif isinstance(mixer, DeltaNetMixer):
            yield from walk_delta_net(shape, mixer, make, linear)
        elif isinstance(mixer, Mamba2Mixer):
            yield from walk_scan(shape, mixer, make, linear)
        elif isinstance(mixer, KimiDeltaMixer):
            yield from walk_kimi_delta(shape, mixer, make, linear)
        elif isinstance(mixer, AttentionMixer):
            yield from _walk_attention(shape, mixer, make, linear)
    yield from map(norm, between)
    if layer.mlp is None:
        return
    yield make(3, "mlp", in_mlp=True)
    if isinstance(layer.mlp, ExpertsMlp):
        yield from _walk_experts(shape, layer.mlp, make, linear, adapters.experts if adapters else ())
    elif not layer.mlp.is_gated:
        yield from of_mlp("up_proj", hidden, inner)
        yield make(4, "act_fn", in_mlp=True)
        yield from of_mlp("down_proj", inner, hidden)
    else:
        fused = is_fused_mlp(family)
        yield from of_mlp("gate_up_proj" if fused else "gate_proj", hidden, inner * (1 + fused))
        if Trait.WITHOUT_ACTIVATION not in shape.traits:
            yield make(4, "act_fn", in_mlp=True)
        if not fused:
            yield from of_mlp("up_proj", hidden, inner)
        yield from of_mlp("down_proj", inner, hidden)
    if behind:
        yield norm(NORM_BEHIND)
    if vectors := shape.per_layer_embeddings:
        yield from walk_own_vector(hidden, vectors, make, linear)


def _walk_experts(
    shape: ModelShape,
    mlp: ExpertsMlp,
    make: Callable[..., Module],
    linear: Callable[..., Iterator[Module]],
    adapted: Sequence[tuple[str, int]],
) -> Iterator[Module]:
    """A router, all experts in two tensors, and before them or after them the expert that every token goes to."""
    family, hidden = FAMILIES[shape.model_type], shape.hidden_size
    inner, num, num_first = mlp.inner_size, mlp.num_experts, 1 + int(mlp.is_gated)
    router = make(4, "router", ("router", num * hidden), in_mlp=True)
    sizes = [("experts.gate_up", num_first * num * inner * hidden), ("experts.down", num * inner * hidden)]
    if family.experts_have_bias:
        sizes.insert(1, (f"experts.gate_up{BIAS}", num_first * num * inner))
        sizes.append((f"experts.down{BIAS}", num * hidden))
    block = make(4, "experts", *sizes, in_mlp=True)
    widths = {"gate_up": (hidden, num_first * inner), "down": (inner, hidden)}
    for name, rank in adapted:
        for end, width in zip(ADAPTER_NAMES, widths[name], strict=False):
            weight = f"experts.{name}{end}", num * rank * width
            yield make(4, weight[0], weight, in_mlp=True, is_trained=True)
    shared = list(_walk_shared(shape, mlp, make, linear)) if mlp.shared_size else []
    if Trait.BESIDE_MLP in shape.traits:
        yield from shared
        yield make(3, "norm behind the MLP", ("mlp_norm", hidden), in_mlp=True)
        scales = ("router.scale", hidden), ("router.expert_scale", num)
        yield make(3, "router", ("router", num * hidden), *scales, in_mlp=True)
        yield make(3, "norm before experts", ("experts_norm", hidden), in_mlp=True)
        yield make(3, "experts", *sizes, in_mlp=True)
        yield make(3, "norm behind experts", ("experts_behind_norm", hidden), in_mlp=True)
        return
    if Trait.SHARED_FIRST in shape.traits:
        yield from shared
    yield from (block, router) if Trait.EXPERTS_FIRST in shape.traits else (router, block)
    if Trait.SHARED_FIRST not in shape.traits:
        yield from shared
    if mlp.shared_size and family.has_shared_gate:
        yield from linear("shared_expert_gate", hidden, 1, in_mlp=True)


def _walk_shared(
    shape: ModelShape, mlp: ExpertsMlp, make: Callable[..., Module], linear: Callable[..., Iterator[Module]]
) -> Iterator[Module]:
    hidden, inner = shape.hidden_size, mlp.shared_size
    yield make(4, "shared", in_mlp=True)
    if is_fused_mlp(FAMILIES[shape.model_type]):
        yield from linear("gate_up_proj", hidden, 2 * inner, in_mlp=True)
    elif mlp.is_gated:
        yield from linear("gate_proj", hidden, inner, in_mlp=True)
        yield make(4, "act_fn", in_mlp=True)
        yield from linear("up_proj", hidden, inner, in_mlp=True)
    else:
        yield from linear("up_proj", hidden, inner, in_mlp=True)
    yield from linear("down_proj", inner, hidden, in_mlp=True)


def is_fused_mlp(family: Family) -> bool:
    """Gate and up are one matrix (modeling_phi3.py: Phi3MLP; modeling_granitemoehybrid.py: GraniteMoeHybridMLP)."""
    return any(name in family.mlp_modules for name in ("gate_up_proj", "input_linear"))


def _walk_attention(
    shape: ModelShape,
    attention: AttentionMixer,
    make: Callable[..., Module],
    linear: Callable[..., Iterator[Module]],
) -> Iterator[Module]:
    if attention.latent is not None:
        yield from walk_latent_attention(shape.hidden_size, shape.biases, attention, attention.latent, make, linear)
        return
    family, head_dim, biases = FAMILIES[shape.model_type], attention.head_dim, shape.biases
    hidden, query, kv = shape.hidden_size, attention.num_heads * head_dim, attention.num_kv_heads * head_dim
    yield make(3, ATTENTION, *([("sinks", attention.num_heads)] if attention.has_sinks else []))
    if "qkv_proj" in family.attention_modules:
        yield from linear("qkv_proj", hidden, query + 2 * kv, num_biases=(query + 2 * kv) * biases.qkv)
    else:
        is_full = shape.query_key_norm == "full"
        has_weights = family.norm_parts > 0
        q_norm = make(4, "q_norm", *([("q_norm", query if is_full else head_dim)] if has_weights else []))
        k_norm = make(4, "k_norm", *([("k_norm", kv if is_full else head_dim)] if has_weights else []))
        together = Trait.NORMS_AFTER_ALL in shape.traits
        gate = next((name for name in family.linear_extras if name in ATTENTION_GATES), "")
        wide = query + (attention.gate_width if not gate else 0)  # gates are a part of its result
        yield from linear("q_proj", hidden, wide, num_biases=query * biases.qkv)
        if shape.query_key_norm and not together:
            yield q_norm
        if attention.shares_kv:
            yield from linear("o_proj", query, hidden, num_biases=hidden * biases.out)
            return
        yield from linear("k_proj", hidden, kv, num_biases=kv * biases.qkv)
        if shape.query_key_norm and not (together or Trait.NORMS_OF_VALUES in shape.traits):
            yield k_norm
        if not attention.keys_are_values:
            yield from linear("v_proj", hidden, kv, num_biases=kv * biases.qkv)
        if shape.query_key_norm and together:
            yield q_norm
            yield k_norm
        if Trait.NORMS_OF_VALUES in shape.traits:
            yield k_norm
            yield make(4, "v_norm")
        if gate and attention.gate_width:
            yield from linear("g_proj", hidden, attention.gate_width, target=str(gate))
    yield from linear("o_proj", query, hidden, num_biases=hidden * biases.out)


def find_alike(shape: ModelShape, layer: Layer) -> str:
    """The family whose layers are built as this one is."""
    return (layer.attention and FAMILIES[shape.model_type].attention_like) or shape.model_type


def has_norm_before(shape: ModelShape) -> bool:
    """Whether attention projects the output of a norm; otherwise it projects the layer's input."""
    return Trait.WITHOUT_INPUT_NORM not in shape.traits


def has_norm_behind(shape: ModelShape) -> bool:
    """Whether a layer ends with a norm after its MLP. A family with two norms then has none before attention."""
    return Trait.POST_NORMS in shape.traits or shape.has_post_norms


def count_shard(num_elements: int, num_ranks: int) -> int:
    """Elements of a shard, rounded up as each weight is."""
    return -(-num_elements // num_ranks)
