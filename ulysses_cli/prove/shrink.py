"""Takes a recipe and its model, returns a small recipe of the same kinds: layers, head counts, windows, levers,
packing, LoRA. Numbers of heads and groups, taps and the order of layers stay; widths become small.

Pure functions. What has to differ for the proof, sizes apart, is listed in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ulysses_cli.plan.layout import Layout
from ulysses_cli.plan.levers import explain_no_overlap
from ulysses_cli.plan.models.families import list_traits
from ulysses_cli.plan.models.family import (
    CONVOLUTION,
    FULL_ATTENTION,
    HYBRID,
    LINEAR_ATTENTION,
    ONLY_EXPERTS,
    ONLY_MLP,
    SLIDING_ATTENTION,
    Trait,
)
from ulysses_cli.plan.models.layers import (
    NUM_CHOSEN,
    NUM_EXPERTS,
    AttentionMixer,
    ConvolutionMixer,
    DeltaNetMixer,
    ExpertsMlp,
    KimiDeltaMixer,
    Layer,
    Mamba2Mixer,
)
from ulysses_cli.plan.models.shape import TEXT_PARTS, ModelShape
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.plan.resolved import compute_rope_factor, compute_rope_theta

WIDTH = 8  # of a head's state, of a chunk, of the parts of a latent key
LATENT_RANK, VALUE_WIDTH = 16, 12
NUM_SMALL_EXPERTS = 4
FIRST_WITH_EXPERTS = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
SHARED_SIZES = ("shared_expert_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size")
# With the usual 0.02, what a narrow layer carries from token to token would be lost in float32's rounding.
INITIALIZER_RANGE = 0.2
# What else says which layers there are, with the numbers of the large model.
OTHER_LISTS = ("hybrid_override_pattern", "layers_block_type", "full_attn_idxs", "linear_attn_config")
# What Zamba2's config computes, writes into its file, and believes when it reads that.
COMPUTED = (
    *("hybrid_layer_ids", "attention_hidden_size", "attention_head_dim", "head_dim", "mamba_headdim", "kv_channels"),
    "num_query_groups",
)


def shrink_mixers(small: dict[str, Any], layers: Sequence[Layer], hidden_size: int, expert_size: int) -> None:
    """Changes the content of a config.json whose other sizes are small already. `layers`: those that it keeps."""
    mixers = list(dict.fromkeys(mixer for layer in layers for mixer in layer.mixers))
    if any(isinstance(mixer, AttentionMixer) and mixer.is_latent for mixer in mixers):
        small |= {"kv_lora_rank": LATENT_RANK, "qk_nope_head_dim": WIDTH, "qk_rope_head_dim": WIDTH}
        small |= {"v_head_dim": VALUE_WIDTH, "head_dim": WIDTH}  # which is the rotary part's
        if small.get("q_lora_rank"):
            small["q_lora_rank"] = LATENT_RANK
    recurrent = [mixer for mixer in mixers if not isinstance(mixer, AttentionMixer)]
    kinds = [name_kind(layer) for layer in layers]
    if recurrent or ONLY_MLP in kinds:
        for name in OTHER_LISTS:
            small.pop(name, None)
        small |= _describe_layers(small["model_type"], layers, kinds, expert_size)
        small["initializer_range"] = INITIALIZER_RANGE
    for mixer in recurrent:
        small |= _shrink_mixer(mixer, hidden_size)
    for name in COMPUTED if any(layer.shared_block for layer in layers) else ():
        small.pop(name, None)


def shrink_experts(config: Mapping[str, Any], layers: Sequence[Layer], expert_size: int) -> dict[str, Any]:
    """A few experts, one group of them, and as many dense layers at the front as are kept."""
    chosen = min(2, max(layer.mlp.num_per_token for layer in layers if isinstance(layer.mlp, ExpertsMlp)))
    num_dense = sum(not layer.num_experts for layer in layers)
    small: dict[str, Any] = {"decoder_sparse_step": 1, "moe_intermediate_size": expert_size}
    small |= dict.fromkeys(NUM_EXPERTS, NUM_SMALL_EXPERTS)
    small |= {name: chosen for name in NUM_CHOSEN if name in config or name == NUM_CHOSEN[0]}
    small |= {name: num_dense for name in FIRST_WITH_EXPERTS if name in config}
    small |= {name: 1 for name in ("n_group", "topk_group", "num_expert_group") if config.get(name)}
    return small | {name: expert_size for name in SHARED_SIZES if config.get(name)}


def shrink_heads(config: Mapping[str, Any], layers: Sequence[Layer], head_dim: int) -> dict[str, Any]:
    """Where layers without a window have heads of another width, they keep heads twice as wide, and what they share."""
    mixers = [layer.attention for layer in layers if layer.attention]
    small: dict[str, Any] = {}
    if "per_layer_config" in config or "global_head_dim" in config or len({mixer.head_dim for mixer in mixers}) > 1:
        full = {str(at): mixer for at, mixer in enumerate(mixers) if not mixer.window_tokens}
        small["per_layer_config"] = {
            at: {"head_dim": 2 * head_dim, "num_key_value_heads": mixer.num_kv_heads} for at, mixer in full.items()
        }
    if "num_kv_shared_layers" in config:
        small["num_kv_shared_layers"] = sum(mixer.shares_kv for mixer in mixers)
    if config.get("hidden_size_per_layer_input"):
        small |= {"hidden_size_per_layer_input": WIDTH, "vocab_size_per_layer_input": config["vocab_size"]}
    if isinstance(config.get("time_step_limit"), list):  # files spell infinity in several ways; it is the default
        small["time_step_limit"] = (0.0, math.inf)
    return small


def has_states(layers: Sequence[Layer]) -> bool:
    """Whether a layer carries a state from token to token."""
    mixers = dict.fromkeys(mixer for layer in layers for mixer in layer.mixers)
    return any(isinstance(mixer, DeltaNetMixer | KimiDeltaMixer | Mamba2Mixer) for mixer in mixers)


def name_kind(layer: Layer) -> str:
    """As layer_types of a config.json names it."""
    if not layer.mixers:
        return ONLY_EXPERTS if layer.num_experts else ONLY_MLP
    if len(layer.mixers) > 1:
        return HYBRID
    (mixer,) = layer.mixers
    if isinstance(mixer, ConvolutionMixer):
        return CONVOLUTION
    if not isinstance(mixer, AttentionMixer):
        return LINEAR_ATTENTION
    return SLIDING_ATTENTION if mixer.window_tokens else FULL_ATTENTION


def _describe_layers(model_type: str, layers: Sequence[Layer], kinds: list[str], expert_size: int) -> dict[str, Any]:
    described: dict[str, Any] = {"layer_types": kinds, "block_auto_adjust_ff_dim": False}
    if Trait.NUMBERED_ATTENTION in list_traits(model_type):
        full = [index for index, kind in enumerate(kinds) if kind == FULL_ATTENTION]
        described = {"attn_layer_indices": full}
    elif any(layer.shared_block for layer in layers):  # `layer_types` would be set after the numbers of such layers
        described = {"layers_block_type": kinds}
    elif set(kinds) == {HYBRID}:  # all of its layers are alike
        described = {}
    if any(layer.num_experts for layer in layers):
        num_dense = sum(not layer.num_experts for layer in layers)
        described |= dict.fromkeys(("num_dense_layers", "first_k_dense_replace"), num_dense)
        described |= dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1)
        described["mlp_layer_types"] = ["sparse" if layer.num_experts else "dense" for layer in layers]
    sizes = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size")
    return described | dict.fromkeys(sizes, expert_size)


def _shrink_mixer(
    mixer: DeltaNetMixer | KimiDeltaMixer | Mamba2Mixer | ConvolutionMixer, hidden_size: int
) -> dict[str, Any]:
    if isinstance(mixer, ConvolutionMixer):
        return {"conv_L_cache": mixer.conv_tokens}
    if isinstance(mixer, KimiDeltaMixer):
        return {
            "linear_num_heads": mixer.num_heads,
            "linear_head_dim": WIDTH,
            "linear_conv_kernel_dim": mixer.conv_tokens,
        }
    if isinstance(mixer, DeltaNetMixer):
        return {
            "linear_num_key_heads": mixer.num_key_heads,
            "linear_num_value_heads": mixer.num_heads,
            "linear_key_head_dim": WIDTH,
            "linear_value_head_dim": WIDTH,
            "linear_conv_kernel_dim": mixer.conv_tokens,
        }
    expand = mixer.num_heads // math.gcd(mixer.num_heads, hidden_size)  # its heads take a multiple of the hidden size
    while expand * hidden_size < mixer.num_heads * WIDTH // 2:
        expand *= 2
    width = expand * hidden_size // mixer.num_heads
    return {
        **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), mixer.num_heads),
        **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), width),
        **dict.fromkeys(("mamba_n_groups", "n_groups", "mamba_ngroups"), mixer.num_groups),
        **dict.fromkeys(("mamba_d_state", "ssm_state_size"), WIDTH),
        **dict.fromkeys(("mamba_d_conv", "conv_kernel"), mixer.conv_tokens),
        **dict.fromkeys(("mamba_chunk_size", "chunk_size"), WIDTH),
        "mamba_d_ssm": mixer.num_heads * width,
        "mamba_expand": expand,
    }


HEAD_DIM, HIDDEN_SIZE, INTERMEDIATE_SIZE = 16, 64, 96
VOCABULARY, NUM_BYTES = (
    260,
    256,
)  # room for the built-in byte tokenizer and its padding token; the tokens of documents are below 256
MIN_LAYERS, MAX_LAYERS = 2, 6
EXPERT_SIZE = 32
# The window is longer than a rank's slice and shorter than a row that is split over ranks, so that code which compares
# it with the wrong one of the two fails.
WINDOW_TOKENS, LOCAL_TOKENS, MIN_ROW_TOKENS = 40, 32, 64
LEARNING_RATE = 1e-2
# Adam divides a gradient by its own size: with the usual epsilon, elements whose gradient is rounding noise would take
# full steps in a random direction, on any two machines.
LARGE_EPSILON = 1e-3


def compute_max_length(sp_size: int) -> int:
    return max(MIN_ROW_TOKENS, LOCAL_TOKENS * sp_size)


def pick_layers(shape: ModelShape) -> list[int]:
    """The first layer of each kind, then other layers from the front until there are two; in the model's order. Of the
    layers that use a shared block, the first two."""
    kinds: dict[Any, int] = {}
    for index, layer in enumerate(shape.layers):
        borrows = layer.attention is not None and layer.attention.shares_kv
        is_again = layer.shared_block > 0 and layer in shape.layers[:index]
        number = layer.shared_block
        kinds.setdefault((name_kind(layer), layer.num_experts > 0, borrows, number, is_again), index)
    picked = set(kinds.values())
    for index in range(shape.num_layers):
        if len(picked) >= min(MIN_LAYERS, shape.num_layers):
            break
        picked.add(index)
    return sorted(picked)[:MAX_LAYERS]


def shrink_config(config: Mapping[str, Any], shape: ModelShape) -> dict[str, Any]:
    """The content of config.json with small widths. Heads, key/value heads, softcaps, sinks, biases and ties stay."""
    text: Mapping[str, Any] = next((config[part] for part in TEXT_PARTS if isinstance(config.get(part), Mapping)), {})
    small = {**config, **text}
    for name in (*TEXT_PARTS, "vision_config", "architectures", "auto_map", "quantization_config", "torch_dtype"):
        small.pop(name, None)
    small.pop("dtype", None)
    layers = pick_layers(shape)
    ropes = [small[name] for name in ("rope_scaling", "rope_parameters") if isinstance(small.get(name), Mapping)]
    hidden_size = _choose_hidden_size(shape.num_heads, any(_is_long(rope) for rope in ropes))
    small |= {
        "model_type": shape.model_type,
        "hidden_size": hidden_size,
        "intermediate_size": INTERMEDIATE_SIZE,
        "num_hidden_layers": len(layers),
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": shape.tie_word_embeddings,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if shape.windows:
        small["sliding_window"] = WINDOW_TOKENS
        small["layer_types"] = [
            SLIDING_ATTENTION if shape.layers[index].window_tokens else FULL_ATTENTION for index in layers
        ]
        small.pop("sliding_window_pattern", None)
    elif "layer_types" in small:
        small["layer_types"] = [FULL_ATTENTION] * len(layers)
    small |= {
        name: [value[index] for index in layers]
        for name, value in small.items()
        if isinstance(value, list) and len(value) == shape.num_layers and name != "layer_types"
    }
    if shape.num_experts:
        small |= shrink_experts(small, [shape.layers[index] for index in layers], EXPERT_SIZE)
        small["mlp_only_layers"] = [at for at, index in enumerate(layers) if not shape.layers[index].num_experts]
    small |= shrink_heads(small, [shape.layers[index] for index in layers], HEAD_DIM)
    shrink_mixers(small, [shape.layers[index] for index in layers], hidden_size, EXPERT_SIZE)
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(small.get(name), Mapping):
            small[name] = _cut_factors(small[name], small.get("partial_rotary_factor") or 1.0)
    return small


def _choose_hidden_size(num_heads: int, has_factors: bool) -> int:
    """A multiple of the number of heads: transformers' configs refuse others. Those with a factor for each rotated
    dimension count the factors by the share of the hidden size that a head has."""
    return num_heads * (HEAD_DIM if has_factors else math.ceil(HIDDEN_SIZE / num_heads))


def _is_long(rope: Mapping[str, Any]) -> bool:
    return "longrope" in (rope.get("type"), rope.get("rope_type"))


def _cut_factors(rope: Mapping[str, Any], share: float) -> dict[str, Any]:
    """The lists with one factor per rotated dimension, for the smaller head. `share`: of a head that is rotated."""
    if not _is_long(rope):
        return dict(rope)
    num_factors = int(HEAD_DIM * (rope.get("partial_rotary_factor") or share)) // 2
    factors = {name: rope.get(name) or [1.0] for name in ("short_factor", "long_factor")}  # the table has no lists
    return {**rope, **{name: (each * num_factors)[:num_factors] for name, each in factors.items()}}


def make_proof_recipe(
    recipe: Recipe, config: Mapping[str, Any], shape: ModelShape, layout: Layout, device: str
) -> tuple[Recipe, list[str]]:
    """Returns a recipe for a few steps of the small model, and what else than sizes differs from the user's recipe."""
    notes: list[str] = []
    parallel = {
        "sp_size": layout.sp_size,
        "ring_size": layout.ring_size,
        "dp_shard_size": layout.dp_shard_size,
        "dp_replicate_size": 1,
        "sp_seq_length": None,
        "sp_seq_length_is_variable": True,
    }
    is_exchanged = not explain_no_overlap(shape, layout.ulysses_size)
    memory = _choose_levers(recipe, shape.num_heads // layout.ulysses_size, device, notes, is_exchanged=is_exchanged)
    model = _shrink_model(recipe, config, shape, notes)
    train = _shrink_training(recipe, notes)
    lora = recipe.lora
    if lora is not None:
        dropout = _change(notes, "lora.dropout", lora.dropout, 0.0, "since each rank draws its own")
        start = _change(notes, "lora.adapter_name_or_path", lora.adapter_name_or_path, None, "since sizes differ")
        lora = lora.model_copy(update={"dropout": dropout, "adapter_name_or_path": start})
    proof = recipe.model_copy(
        update={
            "model": recipe.model.model_copy(update=model),
            "parallel": recipe.parallel.model_copy(update=parallel),
            "data": recipe.data.model_copy(update=_shrink_data(layout.sp_size)),
            "train": recipe.train.model_copy(update=train),
            "memory": recipe.memory.model_copy(update=memory),
            "lora": lora,
            "run": recipe.run.model_copy(update={"device": device, "seed": recipe.run.seed % 2**31}),
            "deepspeed": {},
        }
    )
    if recipe.deepspeed:
        notes.append("deepspeed: left out")
    return proof, notes


def _change(notes: list[str], key: str, own: Any, value: Any, reason: str) -> Any:
    """Returns `value`, and notes why it replaces the recipe's own."""
    if own != value:
        notes.append(f"{key}: {value} instead of {own}, {reason}")
    return value


def _choose_levers(
    recipe: Recipe, heads_per_rank: int, device: str, notes: list[str], *, is_exchanged: bool
) -> dict[str, Any]:
    """Levers that the recipe leaves to `auto` are on where they can change numbers, so that they are verified too."""
    memory = recipe.memory
    auto = {
        "tiled_mlp": True,
        "tiled_loss": True,
        "activation_offloading": memory.gradient_checkpointing is not False,
        "attention_head_chunks": 2 if heads_per_rank % 2 == 0 else 1,
        "offload_optimizer": "none",
        "offload_param": "none",
        "gradient_checkpointing": True,
        "activation_offload_device": "cpu",
    }
    levers = {name: value for name, value in auto.items() if getattr(memory, name) == "auto"}
    chunks = levers.get("attention_head_chunks", memory.attention_head_chunks)
    if isinstance(chunks, int) and heads_per_rank % chunks:
        key, reason = "memory.attention_head_chunks", "which divides its heads"
        levers["attention_head_chunks"] = chunks = _change(notes, key, chunks, 1, reason)
    if memory.overlap_exchange == "auto":
        levers["overlap_exchange"] = is_exchanged and chunks != 1
    elif memory.overlap_exchange and chunks == 1:
        key, reason = "memory.overlap_exchange", "since all heads are exchanged at once"
        levers["overlap_exchange"] = _change(notes, key, True, False, reason)
    if isinstance(memory.saved_layers, int) and memory.saved_layers > 1:
        key, reason = "memory.saved_layers", "since few layers are verified"
        levers["saved_layers"] = _change(notes, key, memory.saved_layers, 1, reason)
    for name in ("offload_optimizer", "offload_param"):
        place = levers.get(name, getattr(memory, name))
        if place == "nvme" or (place != "none" and name == "offload_param" and device == "cpu"):
            reason = "since it moves bytes and changes no value"
            levers[name] = _change(notes, f"memory.{name}", place, "none", reason)
    if memory.activation_offload_device == "nvme":
        key, reason = "memory.activation_offload_device", "since it moves bytes and changes no value"
        levers["activation_offload_device"] = _change(notes, key, "nvme", "cpu", reason)
    return levers


def _shrink_model(recipe: Recipe, config: Mapping[str, Any], shape: ModelShape, notes: list[str]) -> dict[str, Any]:
    model, rope = recipe.model, recipe.model.rope_scaling
    if rope is not None:
        rope = rope.model_copy(update={"factor": compute_rope_factor(recipe, shape)})
    kernel = model.attn_implementation if model.attn_implementation in ("auto", "sdpa") else "auto"
    dtype = _change(notes, "model.dtype", model.dtype, "float32", "so that a fault is not lost in rounding")
    key, reason = "model.attn_implementation", "which computes in float32"
    experts = "auto" if model.experts_implementation == "sonicmoe" else model.experts_implementation
    return {
        "name_or_path": None,
        "config": shrink_config(config, shape),
        "dtype": dtype,
        "attn_implementation": _change(notes, key, model.attn_implementation, kernel, reason),
        "experts_implementation": _change(
            notes, "model.experts_implementation", model.experts_implementation, experts, reason
        ),
        "rope_scaling": rope,
        "rope_theta": compute_rope_theta(recipe, shape),
        "tokenizer": "bytes",
        "trust_remote_code": False,
    }


def _shrink_data(sp_size: int) -> dict[str, Any]:
    return {
        "max_length": compute_max_length(sp_size),
        "pad_to_multiple_of": sp_size,
        "eval_split": 0.0,
        "assistant_only_loss": False,
        "chat_template": None,
        "added_tokens": (),
        "skip_untrainable": True,
        "num_workers": 1,
    }


ALONE = "since the reference computes one document after another"


def _shrink_training(recipe: Recipe, notes: list[str]) -> dict[str, Any]:
    train = recipe.train
    return {
        "per_device_train_batch_size": min(2, train.per_device_train_batch_size),
        "gradient_accumulation_steps": min(2, train.gradient_accumulation_steps),
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "lr_scheduler_kwargs": {},
        "warmup_steps": 0,
        "warmup_ratio": 0.0,
        "adam_epsilon": LARGE_EPSILON,
        "router_aux_loss_coef": _change(notes, "train.router_aux_loss_coef", train.router_aux_loss_coef, 0.0, ALONE),
        "router_z_loss_coef": _change(notes, "train.router_z_loss_coef", train.router_z_loss_coef, 0.0, ALONE),
        "optim": _change(notes, "train.optim", train.optim, "adamw", "whose arithmetic is known"),
    }
