"""A recipe and its model -> a small recipe of the same kinds: layers, head counts, windows, levers, packing, LoRA.

Pure: plain values in, plain values out. What had to be changed for the proof is listed in words.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ulysses_cli.plan.models.shape import FULL_ATTENTION, SLIDING_ATTENTION, TEXT_PARTS, ModelShape
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.plan.resolved import compute_rope_factor

HEAD_DIM, HIDDEN_SIZE, INTERMEDIATE_SIZE = 16, 64, 96
VOCABULARY, NUM_BYTES = 260, 256  # room for the embedded tokenizer, whose padding stands in rows; what documents hold
MIN_LAYERS, MAX_LAYERS = 2, 6
NUM_EXPERTS, EXPERT_SIZE = 4, 32
# Longer than a rank's slice and shorter than a row split over ranks: a window that is held against the wrong one of
# the two shows.
WINDOW_TOKENS, LOCAL_TOKENS, MIN_ROW_TOKENS = 40, 32, 64
LEARNING_RATE = 1e-2
# Adam divides a gradient by its own size: with the usual epsilon, elements whose gradient is rounding noise would take
# full steps in a random direction, on any two machines.
CALM_EPSILON = 1e-3


def compute_row_tokens(sp_size: int) -> int:
    return max(MIN_ROW_TOKENS, LOCAL_TOKENS * sp_size)


def pick_layers(shape: ModelShape) -> list[int]:
    """The first layer of each kind, and then others from the front until there are two; in the model's order."""
    kinds: dict[Any, int] = {}
    for index, layer in enumerate(shape.layers):
        kinds.setdefault((layer.window_tokens is not None, layer.num_experts > 0), index)
    picked = set(kinds.values())
    for index in range(shape.num_layers):
        if len(picked) >= min(MIN_LAYERS, shape.num_layers):
            break
        picked.add(index)
    return sorted(picked)[:MAX_LAYERS]


def shrink_config(config: Mapping[str, Any], shape: ModelShape) -> dict[str, Any]:
    """config.json's content with small widths. Heads, key/value heads, softcaps, sinks, biases, ties stay."""
    text: Mapping[str, Any] = next((config[part] for part in TEXT_PARTS if isinstance(config.get(part), Mapping)), {})
    small = {**config, **text}
    for name in (*TEXT_PARTS, "vision_config", "architectures", "auto_map", "quantization_config", "torch_dtype"):
        small.pop(name, None)
    small.pop("dtype", None)
    layers = pick_layers(shape)
    small |= {
        "model_type": shape.model_type,
        "hidden_size": HIDDEN_SIZE,
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
            SLIDING_ATTENTION if shape.layers[at].window_tokens else FULL_ATTENTION for at in layers
        ]
        small.pop("sliding_window_pattern", None)
    elif "layer_types" in small:
        small["layer_types"] = [FULL_ATTENTION] * len(layers)
    if "no_rope_layers" in small and isinstance(small["no_rope_layers"], list):
        small["no_rope_layers"] = [small["no_rope_layers"][at] for at in layers]
    if shape.num_experts:
        chosen = min(2, shape.num_experts_per_token)
        small |= {"num_experts": NUM_EXPERTS, "num_local_experts": NUM_EXPERTS, "num_experts_per_tok": chosen}
        small |= {"moe_intermediate_size": EXPERT_SIZE, "decoder_sparse_step": 1}
        small["mlp_only_layers"] = [at for at, index in enumerate(layers) if not shape.layers[index].num_experts]
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(small.get(name), Mapping):
            small[name] = _cut_factors(small[name])
    return small


def _cut_factors(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Factors per rotated dimension, for a smaller head."""
    return {
        name: value[: HEAD_DIM // 2] if name in ("short_factor", "long_factor") and isinstance(value, list) else value
        for name, value in rope.items()
    }


def make_proof_recipe(
    recipe: Recipe, config: Mapping[str, Any], shape: ModelShape, sp_size: int, dp_size: int, device: str
) -> tuple[Recipe, list[str]]:
    """-> a recipe for a few steps of the small model, and what in it differs from the user's besides sizes."""
    notes: list[str] = []

    def differ(key: str, found: Any, wanted: Any, reason: str) -> Any:
        if found != wanted:
            notes.append(f"{key}: {wanted} instead of {found}, {reason}")
        return wanted

    model, memory, train, lora = recipe.model, recipe.memory, recipe.train, recipe.lora
    rope = model.rope_scaling
    if rope is not None:
        rope = rope.model_copy(update={"factor": compute_rope_factor(recipe, shape)})
    heads = shape.num_heads // sp_size
    auto = {
        "tiled_mlp": True,
        "tiled_loss": True,
        "activation_offloading": memory.gradient_checkpointing is not False,
        "attention_head_chunks": 2 if heads % 2 == 0 else 1,
        "offload_optimizer": "none",
        "offload_param": "none",
    }
    levers = {name: value for name, value in auto.items() if getattr(memory, name) == "auto"}
    chunks = levers.get("attention_head_chunks", memory.attention_head_chunks)
    if isinstance(chunks, int) and heads % chunks:
        levers["attention_head_chunks"] = differ("memory.attention_head_chunks", chunks, 1, "which divides its heads")
    for name in ("offload_optimizer", "offload_param"):
        found = levers.get(name, getattr(memory, name))
        if found == "nvme" or (found != "none" and name == "offload_param" and device == "cpu"):
            levers[name] = differ(f"memory.{name}", found, "none", "since it moves bytes and changes no value")
    row_tokens = compute_row_tokens(sp_size)
    accumulation = min(2, train.gradient_accumulation_steps)
    rows = min(2, train.per_device_train_batch_size)
    kernel = model.attn_implementation if model.attn_implementation in ("auto", "sdpa") else "auto"
    proof = recipe.model_copy(
        update={
            "model": model.model_copy(
                update={
                    "name_or_path": None,
                    "config": shrink_config(config, shape),
                    "dtype": differ("model.dtype", model.dtype, "float32", "so that a fault is not lost in rounding"),
                    "attn_implementation": differ(
                        "model.attn_implementation", model.attn_implementation, kernel, "which computes in float32"
                    ),
                    "rope_scaling": rope,
                    "tokenizer": "bytes",
                    "trust_remote_code": False,
                }
            ),
            "parallel": recipe.parallel.model_copy(
                update={
                    "sp_size": sp_size,
                    "dp_shard_size": dp_size,
                    "dp_replicate_size": 1,
                    "sp_seq_length": None,
                    "sp_seq_length_is_variable": True,
                }
            ),
            "data": recipe.data.model_copy(
                update={
                    "max_length": row_tokens,
                    "pad_to_multiple_of": sp_size,
                    "eval_split": 0.0,
                    "assistant_only_loss": False,
                    "chat_template": None,
                    "added_tokens": (),
                    "skip_untrainable": True,
                    "num_workers": 1,
                }
            ),
            "train": train.model_copy(
                update={
                    "per_device_train_batch_size": rows,
                    "gradient_accumulation_steps": accumulation,
                    "learning_rate": LEARNING_RATE,
                    "lr_scheduler_type": "constant",
                    "lr_scheduler_kwargs": {},
                    "warmup_steps": 0,
                    "warmup_ratio": 0.0,
                    "adam_epsilon": CALM_EPSILON,
                    "optim": differ("train.optim", train.optim, "adamw", "whose arithmetic is known"),
                }
            ),
            "memory": memory.model_copy(update=levers),
            "lora": None if lora is None else lora.model_copy(
                update={"dropout": differ("lora.dropout", lora.dropout, 0.0, "since each rank draws its own")}
            ),
            "run": recipe.run.model_copy(update={"device": device, "seed": recipe.run.seed % 2**31}),
            "deepspeed": {},
        }
    )  # fmt: skip
    if recipe.deepspeed:
        notes.append("deepspeed: left out")
    return proof, notes
