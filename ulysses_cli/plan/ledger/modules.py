"""Module: one module of the model with the sizes of its weights; and what makes the modules of recurrences,
convolutions, latent attention, shared blocks and per-layer inputs, in forward order, with LoRA's adapters.
`make` makes one module, `linear` a linear layer with its adapter. weights.py walks a whole model. No tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from ulysses_cli.plan.models.families import FAMILIES
from ulysses_cli.plan.models.family import Family, Trait
from ulysses_cli.plan.models.layers import (
    AttentionMixer,
    Biases,
    ConvolutionMixer,
    DeltaNetMixer,
    DenseMlp,
    KimiDeltaMixer,
    Latent,
    Layer,
    Mamba2Mixer,
    PerLayerEmbeddings,
    SharedBlock,
)
from ulysses_cli.plan.models.shape import ModelShape

EMBEDDING, LAYERS, HEAD = "embedding", "layers", "head"
# DeepSpeed's hook does not see the end of their backward (runtime/zero/parameter_offload.py): the input of the first is
# a keyword argument, and the second gets the trained embedding beside its own input and does not read it.
ATTENTION, UNREAD_EMBEDDING = "attention", "layer beside the embedding"

BIAS = ".bias"  # stands behind the name of the weight that it belongs to


@dataclass(frozen=True)
class Adapters:
    """LoRA: its rank; the last parts of the names of the layers that get an adapter, () for every linear layer; whether
    there is dropout before the adapters; which parts are trained whole: embed_tokens, lm_head, norm; and whether the
    lengths of their weights' rows are trained too."""

    rank: int
    targets: tuple[str, ...] = ()
    drops: bool = False
    saved: tuple[str, ...] = ()
    has_magnitudes: bool = False  # DoRA
    experts: tuple[tuple[str, int], ...] = ()  # which of their matrices are adapted, with the ranks


def trains(adapters: Adapters | None, part: str) -> bool:
    """Whether a part is trained whole: embed_tokens, lm_head or norm (all norms)."""
    return adapters is None or part in adapters.saved


@dataclass(frozen=True)
class Module:
    """One module: its place, its own weights as (name, elements), and whether they are trained. The modules that follow
    it with a greater depth are inside it. An MLP in tiles is gathered as a whole: its modules are `in_mlp`.
    `is_beside`: it is of an MLP that does not read attention's result. `reads`: weights of modules inside it that it
    reads itself, so that DeepSpeed gathers them with its own (parameter_offload.py: ZeROOrderedDict)."""

    part: str
    layer: int
    depth: int
    name: str = ""
    weights: tuple[tuple[str, int], ...] = ()
    is_trained: bool = True
    in_mlp: bool = False
    is_beside: bool = False
    reads: tuple[tuple[str, int], ...] = ()

    @property
    def gathered(self) -> tuple[tuple[str, int], ...]:
        return self.weights + self.reads

    @property
    def is_left(self) -> bool:
        """Whether a hook runs at the end of its backward."""
        return self.name not in (ATTENTION, UNREAD_EMBEDDING)


def make_beside(
    adapters: Adapters | None,
    depth: int,
    name: str,
    *weights: tuple[str, int],
    is_trained: bool | None = None,
    in_mlp: bool = False,
) -> Module:
    """A module beside the embedding, before all layers."""
    whole = adapters is None or ("norm" in name and trains(adapters, "norm"))
    return Module(EMBEDDING, -1, depth, name, weights, whole if is_trained is None else is_trained, in_mlp)


def make_linear(
    make: Callable[..., Module], adapters: Adapters | None, make_base: Callable[..., Module] | None = None
) -> Callable[..., Iterator[Module]]:
    """Returns what makes a linear layer with its adapter. `make_base` makes the matrix and its bias, if not `make`;
    `target` is the layer's name in the model, if not `name`."""
    make_base = make_base or make

    def linear(
        name: str,
        num_in: int,
        num_out: int,
        in_mlp: bool = False,
        depth: int = 4,
        num_biases: int = 0,
        target: str = "",
    ) -> Iterator[Module]:
        weights = [(name, num_in * num_out)] + ([(f"{name}{BIAS}", num_biases)] if num_biases > 0 else [])
        if adapters is None or (adapters.targets and (target or name) not in adapters.targets):
            yield make_base(depth, name, *weights, in_mlp=in_mlp)
            return
        # peft reads the first adapter's dtype in the outer module, for which DeepSpeed then fetches that adapter
        yield make(depth, name, (f"{name}.a", num_in * adapters.rank), in_mlp=in_mlp, is_trained=True)
        depth += 1
        yield make_base(depth, f"{name}.base", *weights, in_mlp=in_mlp)
        yield make(depth, f"{name}.dropout", in_mlp=in_mlp)
        yield make(depth, f"{name}.a", (f"{name}.a", num_in * adapters.rank), in_mlp=in_mlp, is_trained=True)
        yield make(depth, f"{name}.b", (f"{name}.b", num_out * adapters.rank), in_mlp=in_mlp, is_trained=True)
        if adapters.has_magnitudes:
            yield make(depth, f"{name}.lengths", (f"{name}.lengths", num_out), in_mlp=in_mlp, is_trained=True)

    return linear


M = TypeVar("M")

VECTOR_EMBEDDING, VECTOR_PROJECTION = "vectors", "per_layer_model_projection"
VECTOR_GATE, VECTOR_OUTPUT, VECTOR_NORM = "per_layer_input_gate", "per_layer_projection", "vector_norm"


def walk_all_vectors(
    hidden: int, vectors: PerLayerEmbeddings, make: Callable[..., M], linear: Callable[..., Iterator[M]]
) -> Iterator[M]:
    """Before the first layer: their gradients come after those of all layers (Gemma4TextModel:
    project_per_layer_inputs)."""
    yield make(2, "vectors", (VECTOR_EMBEDDING, vectors.vocab_size * vectors.width))
    yield from linear(VECTOR_PROJECTION, hidden, vectors.width, depth=2)
    yield make(2, "vectors_norm", ("vectors_norm", vectors.size))


def walk_own_vector(
    hidden: int, vectors: PerLayerEmbeddings, make: Callable[..., M], linear: Callable[..., Iterator[M]]
) -> Iterator[M]:
    """At the end of a layer (Gemma4TextDecoderLayer.forward)."""
    yield from linear(VECTOR_GATE, hidden, vectors.size, depth=3)
    yield make(3, "act_fn")
    yield from linear(VECTOR_OUTPUT, vectors.size, hidden, depth=3)
    yield make(3, VECTOR_NORM, (VECTOR_NORM, hidden))


def walk_convolution(
    shape: ModelShape,
    mixer: ConvolutionMixer,
    make: Callable[..., M],
    linear: Callable[..., Iterator[M]],
) -> Iterator[M]:
    """The convolution's weight is read without its module; DeepSpeed then counts it to the module that reads it."""
    hidden, channels, has_bias = shape.hidden_size, mixer.conv_channels, shape.biases.convolution
    last = name_last_projection(FAMILIES[shape.model_type])
    yield make(3, ATTENTION, ("conv", channels * mixer.conv_tokens), *([(f"conv{BIAS}", channels)] if has_bias else []))
    yield from linear("in_proj", hidden, 3 * channels, num_biases=3 * channels if has_bias else 0)
    yield from linear(last, channels, hidden, num_biases=hidden if has_bias else 0)


def name_last_projection(family: Family) -> str:
    """The ledger's name of a convolution's last projection. Its own name is `out_proj`, which adapters find; where
    attention's is called so too, both are `o_proj` here (ledger/job.py: name_linear)."""
    return "o_proj" if "out_proj" in family.attention_modules else "out_proj"


def projects_gate_last(family: Family) -> bool:
    """Whether a delta net projects queries, keys and values each by itself, and its gate after the rule (transformers:
    modeling_olmo_hybrid.py, OlmoHybridGatedDeltaNet)."""
    return family.recurrence == "delta_net" and "g_proj" in family.linear_extras


def walk_delta_net(
    shape: ModelShape,
    mixer: DeltaNetMixer,
    make: Callable[..., M],
    linear: Callable[..., Iterator[M]],
) -> Iterator[M]:
    """transformers: modeling_qwen3_5.py, Qwen3_5GatedDeltaNet."""
    hidden, heads, values = shape.hidden_size, mixer.num_heads, mixer.num_heads * mixer.value_head_dim
    conv = ("conv", mixer.conv_channels * mixer.conv_tokens)
    yield make(3, ATTENTION, ("dt_bias", heads), ("A_log", heads), conv)
    if projects_gate_last(FAMILIES[shape.model_type]):
        keys = mixer.num_key_heads * mixer.key_head_dim
        for name, width in (("q_proj", keys), ("k_proj", keys), ("v_proj", values), ("b_proj", heads)):
            yield from linear(name, hidden, width)
        yield from linear("a_proj", hidden, heads)
        yield from linear("g_proj", hidden, values)
        yield make(4, "gated_norm", ("gated_norm", mixer.value_head_dim))
        yield from linear("o_proj", values, hidden)
        return
    if "in_proj_qkvz" in FAMILIES[shape.model_type].linear_extras:
        yield from linear("in_proj_qkvz", hidden, mixer.conv_channels + values)
        yield from linear("in_proj_ba", hidden, 2 * heads)
    else:
        yield from linear("in_proj_qkv", hidden, mixer.conv_channels)
        yield from linear("in_proj_z", hidden, values)
        yield from linear("in_proj_b", hidden, heads)
        yield from linear("in_proj_a", hidden, heads)
    yield make(4, "gated_norm", ("gated_norm", mixer.value_head_dim))
    yield from linear("out_proj", values, hidden)


def walk_scan(
    shape: ModelShape,
    mixer: Mamba2Mixer,
    make: Callable[..., M],
    linear: Callable[..., Iterator[M]],
) -> Iterator[M]:
    """transformers: modeling_bamba.py, BambaMixer. It hands its last weight to a kernel that may do all in one."""
    hidden, heads, inner = shape.hidden_size, mixer.num_heads, mixer.num_heads * mixer.head_dim
    biases, projected = shape.biases, inner + mixer.conv_channels + heads
    conv = [("conv", mixer.conv_channels * mixer.conv_tokens)]
    conv += [(f"conv{BIAS}", mixer.conv_channels)] * biases.convolution
    name = "mixer" if Trait.GIVES_POSITION in shape.traits else ATTENTION
    yield make(
        3, name, ("dt_bias", heads), ("A_log", heads), ("D", heads), *conv, reads=(("out_proj", inner * hidden),)
    )
    yield from linear("in_proj", hidden, projected, num_biases=projected * biases.scan)
    if mixer.gating != "alone":
        yield make(4, "gated_norm", ("gated_norm", inner))
    yield from linear("out_proj", inner, hidden, num_biases=hidden * biases.scan_out)


def walk_kimi_delta(
    shape: ModelShape, mixer: KimiDeltaMixer, make: Callable[..., M], linear: Callable[[str, int, int], Iterator[M]]
) -> Iterator[M]:
    """transformers: modeling_kimi_linear.py, KimiLinearDeltaAttention; modeling_bailing_hybrid.py."""
    hidden, heads, width = shape.hidden_size, mixer.num_heads, mixer.num_heads * mixer.head_dim

    def gate(name: str) -> Iterator[M]:
        if FAMILIES[shape.model_type].has_narrow_gates:
            yield from linear(f"{name}_a_proj", hidden, mixer.head_dim)
            yield from linear(f"{name}_b_proj", mixer.head_dim, width)
        else:
            yield from linear(f"{name}_proj", hidden, width)

    yield make(3, ATTENTION, ("conv", mixer.conv_channels * mixer.conv_tokens))
    for name in ("q_proj", "k_proj", "v_proj"):
        yield from linear(name, hidden, width)
    yield make(4, "forget_gate", ("dt_bias", width), ("A_log", heads))
    yield from gate("f")
    yield from linear("b_proj", hidden, heads)
    yield from gate("g")
    yield make(4, "gated_norm", ("gated_norm", mixer.head_dim))
    yield from linear("o_proj", width, hidden)


def walk_latent_attention(
    hidden: int,
    biases: Biases,
    attention: AttentionMixer,
    latent: Latent,
    make: Callable[..., M],
    linear: Callable[..., Iterator[M]],
) -> Iterator[M]:
    """transformers: modeling_deepseek_v3.py, DeepseekV3Attention."""
    query, values = attention.num_heads * attention.head_dim, attention.num_heads * attention.value_head_dim
    yield make(3, ATTENTION)
    if latent.query_rank is None:
        yield from linear("q_proj", hidden, query)
    else:
        yield from linear("q_a_proj", hidden, latent.query_rank, num_biases=latent.query_rank * biases.qkv)
        yield make(4, "q_a_norm", ("q_a_norm", latent.query_rank))
        yield from linear("q_b_proj", latent.query_rank, query)
    narrow = latent.kv_rank + latent.rope_dim
    yield from linear("kv_a_proj_with_mqa", hidden, narrow, num_biases=narrow * biases.qkv)
    yield make(4, "kv_a_norm", ("kv_a_norm", latent.kv_rank))
    yield from linear("kv_b_proj", latent.kv_rank, query - attention.num_heads * latent.rope_dim + values)
    yield from linear("o_proj", values, hidden, num_biases=hidden * biases.out)


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
    yield from of_block(
        "gate_up_proj", hidden, 2 * inner, in_mlp=True, depth=5, num_biases=2 * inner if has_bias else 0
    )
    yield from adapter(GATE_ADAPTER, hidden, 2 * inner, in_mlp=True)
    yield make(5, "act_fn", in_mlp=True)
    yield from of_block("down_proj", inner, hidden, in_mlp=True, depth=5, num_biases=hidden if has_bias else 0)
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
