"""Takes a recipe and its model, returns a small recipe of the same kinds: layers, head counts, windows, levers,
packing, LoRA.

Pure functions. What has to differ for the proof, sizes apart, is listed in words.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ulysses_cli.plan.layout import Layout
from ulysses_cli.plan.models.family import FULL_ATTENTION, SLIDING_ATTENTION
from ulysses_cli.plan.models.shape import TEXT_PARTS, ModelShape
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.plan.resolved import compute_rope_factor, compute_rope_theta
from ulysses_cli.prove.verify.small_layers import name_kind, shrink_experts, shrink_heads, shrink_mixers

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


def compute_row_tokens(sp_size: int) -> int:
    return max(MIN_ROW_TOKENS, LOCAL_TOKENS * sp_size)


def pick_layers(shape: ModelShape) -> list[int]:
    """The first layer of each kind, then other layers from the front until there are two; in the model's order. Of the
    layers that use a shared block, the first two."""
    kinds: dict[Any, int] = {}
    for index, layer in enumerate(shape.layers):
        borrows = layer.attention is not None and layer.attention.borrows_kv
        is_again = layer.shared is not None and layer in shape.layers[:index]
        number = layer.shared.number if layer.shared else None
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
    memory = _choose_levers(recipe, shape.num_heads // layout.ulysses_size, device, notes)
    model = _shrink_model(recipe, config, shape, notes)
    train = _shrink_training(recipe, notes)
    lora = recipe.lora
    if lora is not None:
        dropout = _change(notes, "lora.dropout", lora.dropout, 0.0, "since each rank draws its own")
        start = _change(notes, "lora.adapter_name_or_path", lora.adapter_name_or_path, None, "since sizes differ")
        lora = lora.model_copy(update={"dropout": dropout, "adapter_name_or_path": start})
    if recipe.preference is not None:
        notes.append("preference: the loss of the next token instead, by the same forward and backward of the model")
    proof = recipe.model_copy(
        update={
            "preference": None,
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


def _choose_levers(recipe: Recipe, heads_per_rank: int, device: str, notes: list[str]) -> dict[str, Any]:
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
        levers["attention_head_chunks"] = _change(notes, key, chunks, 1, reason)
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
    return {
        "name_or_path": None,
        "config": shrink_config(config, shape),
        "dtype": dtype,
        "attn_implementation": _change(notes, key, model.attn_implementation, kernel, reason),
        "rope_scaling": rope,
        "rope_theta": compute_rope_theta(recipe, shape),
        "tokenizer": "bytes",
        "trust_remote_code": False,
    }


def _shrink_data(sp_size: int) -> dict[str, Any]:
    return {
        "max_length": compute_row_tokens(sp_size),
        "pad_to_multiple_of": sp_size,
        "eval_split": 0.0,
        "assistant_only_loss": False,
        "chat_template": None,
        "added_tokens": (),
        "skip_untrainable": True,
        "num_workers": 1,
    }


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
        "optim": _change(notes, "train.optim", train.optim, "adamw", "whose arithmetic is known"),
    }
