"""Recipe + Layout -> the DeepSpeed config, and where a user's `deepspeed:` section contradicts the recipe.

DeepSpeed itself is not imported: this is a dict whose keys are DeepSpeed's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ulysses_cli.plan.layout import Layout
from ulysses_cli.plan.recipe import Recipe

# DeepSpeed's key -> the recipe's key that decides it.
OWNERS = {
    "train_batch_size": "train.per_device_train_batch_size",
    "train_micro_batch_size_per_gpu": "train.per_device_train_batch_size",
    "gradient_accumulation_steps": "train.gradient_accumulation_steps",
    "gradient_clipping": "train.max_grad_norm",
    "bf16.enabled": "model.dtype",
    "zero_optimization.stage": "parallel.zero_stage",
    "zero_optimization.zero_hpz_partition_size": "parallel.dp_replicate_size",
    "zero_optimization.offload_optimizer.device": "memory.offload_optimizer",
    "zero_optimization.offload_optimizer.nvme_path": "memory.nvme_path",
    "zero_optimization.offload_param.device": "memory.offload_param",
    "zero_optimization.offload_param.nvme_path": "memory.nvme_path",
    "sequence_parallel_size": "parallel.sp_size",
}
# Sections that would bring a second owner for what the recipe decides.
REFUSED = {
    "optimizer": "the optimizer is made from train.optim, train.learning_rate and train.adam_*",
    "scheduler": "the schedule is made from train.lr_scheduler_type",
    "fp16": "float16 is not offered; see model.dtype",
    "amp": "mixed precision is model.dtype's",
    "activation_checkpointing": "recompute is memory.gradient_checkpointing's",
    "data_efficiency": "rows come from the data section",
    "curriculum_learning": "rows come from the data section",
    "tensorboard": "trackers are run.report_to's",
    "wandb": "trackers are run.report_to's",
    "pipeline": "pipeline parallelism is not offered",
    "tensor_parallel": "tensor parallelism is not offered",
}


def make_ds_config(recipe: Recipe, layout: Layout, offload_optimizer: str = "none") -> dict[str, Any]:
    """What the recipe alone decides. `offload_optimizer` is memory.offload_optimizer once auto is settled."""
    train, memory = recipe.train, recipe.memory
    zero: dict[str, Any] = {
        "stage": recipe.parallel.zero_stage,
        "overlap_comm": True,
        "contiguous_gradients": True,
    }
    if layout.dp_replicate_size > 1 and recipe.parallel.zero_stage == 3:
        zero["zero_hpz_partition_size"] = layout.replica_size
    for part, device in (("offload_optimizer", offload_optimizer), ("offload_param", memory.offload_param)):
        if device != "none":
            zero[part] = {"device": device, "pin_memory": True}
            if device == "nvme":
                zero[part]["nvme_path"] = memory.nvme_path
    return {
        "train_micro_batch_size_per_gpu": train.per_device_train_batch_size,
        "gradient_accumulation_steps": train.gradient_accumulation_steps,
        # DeepSpeed multiplies by the ranks that hold different rows; ranks of one sp group hold the same ones.
        "train_batch_size": train.per_device_train_batch_size * train.gradient_accumulation_steps * layout.dp_size,
        "gradient_clipping": train.max_grad_norm,
        "bf16": {"enabled": recipe.model.dtype == "bfloat16"},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**31 - 1,
        "sequence_parallel_size": layout.sp_size,
    }


def merge_user_config(made: Mapping[str, Any], user: Mapping[str, Any]) -> dict[str, Any]:
    """The user's section laid over ours, level by level."""
    merged = dict(made)
    for key, value in user.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge_user_config(merged[key], value) if both else value
    return merged


def find_contradictions(made: Mapping[str, Any], user: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(DeepSpeed key, what is wrong, what to do) for each user key that the recipe decides otherwise."""
    for section in user:
        if section in REFUSED:
            yield section, "is the recipe's to decide", REFUSED[section]
    for key, value in _flatten(user):
        owner = OWNERS.get(key)
        if owner is None:
            continue
        ours: Any = made
        for part in key.split("."):
            ours = ours.get(part) if isinstance(ours, Mapping) else None
        if value != ours and value != "auto":
            said = "does not set it" if ours is None else f"says {ours}"
            yield key, f"is {value}, but {owner} {said}", f"change {owner} and leave {key} out"


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
