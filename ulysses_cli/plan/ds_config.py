"""Makes the DeepSpeed config from a recipe and its layout; finds contradictions in a user's `deepspeed:` section.

Does not import DeepSpeed: the config is a dict with DeepSpeed's keys.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from ulysses_cli.plan.layout import Layout
from ulysses_cli.plan.recipe.changes import flatten
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.plan.recipe.schema import format_value

# DeepSpeed's key -> the recipe's key that decides it.
OWNERS = {
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
}
# Sections that would decide a second time what the recipe decides.
REFUSED = {
    "train_batch_size": "rows per step follow from the train and parallel sections",
    "sequence_parallel_size": "use parallel.sp_size; DeepSpeed itself knows of data parallelism only",
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


RENAMED = {
    "zero_optimization.cpu_offload": "memory.offload_optimizer: cpu",
    "zero_optimization.cpu_offload_param": "memory.offload_param: cpu",
    "zero_optimization.cpu_offload_use_pin_memory": "memory.offload_optimizer: cpu",
    "bfloat16": "model.dtype",
    "bfloat16.enabled": "model.dtype",
}
# What a user may add. A test compares the keys of zero_optimization with the installed DeepSpeed.
KNOWN = frozenset(
    {"aio", "bf16", "comms_logger", "communication_data_type", "data_types", "dump_state", "flops_profiler"}
    | {"gradient_predivide_factor", "memory_breakdown", "prescale_gradients"}
    | {"sparse_gradients", "steps_per_print", "wall_clock_breakdown", "zero_allow_untested_optimizer"}
    | {"zero_force_ds_cpu_optimizer", "zero_optimization"}
)
ZERO = frozenset(
    {"allgather_bucket_size", "allgather_partitions", "allgather_sequential", "contiguous_gradients"}
    | {"ignore_unused_parameters", "log_trace_cache_warnings", "max_live_parameters", "max_reuse_distance"}
    | {"model_persistence_threshold", "module_granularity_threshold", "offload_optimizer", "offload_param"}
    | {"overlap_comm", "param_persistence_threshold", "prefetch_bucket_size", "reduce_bucket_size", "reduce_scatter"}
    | {"round_robin_gradients", "stage", "sub_group_size", "use_all_reduce_for_fetch_params"}
    | {"use_multi_rank_bucket_allreduce", "zero_hpz_partition_size", "zero_quantized_gradients"}
    | {"zero_quantized_weights", "zero_quantized_nontrainable_weights"}
)


# Gradients are reduced in buckets of this many elements. DeepSpeed's default of 500 million takes 4 GB of each GPU as
# float32: 2 GB for the bucket, and as much for the concatenated copy that is sent. Adapters have fewer in all. A weight
# is never cut, so messages are 76 million elements (8B) or more: with a whole layer's there would be one instead of
# three a layer, for 0.5 to 2.8 GiB, and links have their full rate already (benchmarks/prefetch.py).
REDUCE_BUCKET, ADAPTERS_BUCKET = 100_000_000, 20_000_000
# Weights that the optimizer steps at once. Several float32 copies of them exist then, on the GPU or page-locked in host
# memory, where torch rounds blocks up to a power of two: this number and one more weight fill 512 MiB.
SUB_GROUP = 125_000_000
# Weights on a disk: all of them; none is prefetched or kept beyond its module. DeepSpeed's prefetch leaves weights in
# buffers, and a step then updates them there and not in the file (partitioned_param_swapper.py).
WEIGHTS_ON_DISK = {"prefetch_bucket_size": 0, "max_reuse_distance": 0}
MAX_PERSISTENT = 100_000  # elements of a weight that stays on each GPU: DeepSpeed's default; too small for a file


def make_ds_config(
    recipe: Recipe, layout: Layout, offload_optimizer: str = "none", offload_param: str = "none"
) -> dict[str, Any]:
    """The config that the recipe decides. The offload devices are those of memory.* once auto is settled."""
    train, memory = recipe.train, recipe.memory
    zero: dict[str, Any] = {
        "stage": recipe.zero_stage,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": REDUCE_BUCKET if recipe.lora is None else ADAPTERS_BUCKET,
    }
    if recipe.zero_stage == 3:
        zero["sub_group_size"] = SUB_GROUP
    if layout.dp_replicate_size > 1 and recipe.zero_stage == 3:
        zero["zero_hpz_partition_size"] = layout.replica_size
    for part, device in (("offload_optimizer", offload_optimizer), ("offload_param", offload_param)):
        if device != "none":
            zero[part] = {"device": device, "pin_memory": True}
            if device == "nvme":
                zero[part]["nvme_path"] = memory.nvme_path
    if offload_param == "nvme":
        zero["offload_param"]["max_in_cpu"] = 0
        zero.update(WEIGHTS_ON_DISK)
    return {
        "train_micro_batch_size_per_gpu": train.per_device_train_batch_size,
        "gradient_accumulation_steps": train.gradient_accumulation_steps,
        # For DeepSpeed all ranks are data-parallel. If it knows of sequence parallelism, ZeRO-3 (0.19.8) divides
        # gradients by the world size on one of its reduction paths and by world / sp on the other.
        "train_batch_size": train.rows_per_group * layout.world_size,
        "gradient_clipping": train.max_grad_norm,
        "bf16": {"enabled": recipe.model.dtype == "bfloat16"},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**31 - 1,
        "communication_data_type": "bf16" if _sums_exactly(recipe, layout) else "fp32",
        **({"data_types": {"grad_accum_dtype": "fp32"}} if _accumulates(recipe) else {}),
    }


def _sums_exactly(recipe: Recipe, layout: Layout) -> bool:
    """Reducing gradients in bfloat16 loses nothing with one rank, or with two ranks whose single sum is then kept in
    bfloat16, unless a user's section divides before the sum or keeps more precision. It halves bytes and buckets."""
    user_section = recipe.deepspeed
    is_narrow = recipe.model.dtype == "bfloat16" and recipe.zero_stage == 3
    if not is_narrow or "gradient_predivide_factor" in user_section:
        return False
    keeps_more = _accumulates(recipe) or "data_types" in user_section
    return layout.world_size == 1 or (layout.world_size == 2 and not keeps_more)


def _accumulates(recipe: Recipe) -> bool:
    """bfloat16 gradients of several micro-steps are summed in float32. (At stage 1 DeepSpeed has another optimizer for
    that, which keeps no shards of the moments.)"""
    train, stage = recipe.train, recipe.zero_stage
    return recipe.model.dtype == "bfloat16" and train.gradient_accumulation_steps > 1 and stage > 1


def merge_user_config(made: Mapping[str, Any], user: Mapping[str, Any]) -> dict[str, Any]:
    """Merges the user's section, which has passed find_contradictions, into ours level by level."""
    merged = dict(made)
    for key, value in user.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge_user_config(merged[key], value) if both else value
    return merged


def find_contradictions(recipe: Recipe, made: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(DeepSpeed key, what is wrong, what to do) for each key of the recipe's deepspeed section that other settings
    decide or that is unknown. `made` is the config that those settings make."""
    for key, value in flatten(recipe.deepspeed):
        written = json.dumps(value, default=str)
        top, ours, owner = key.partition(".")[0], _get(made, key), OWNERS.get(key)
        if top in REFUSED:
            yield top, "is the recipe's to decide", REFUSED[top]
        elif key in RENAMED:
            yield key, "is DeepSpeed's old name", f"use {RENAMED[key]}"
        elif isinstance(ours, Mapping):
            what = f"is {written}, which would remove everything that the recipe sets there"
            yield key, what, f"write settings below {key}"
        elif owner is None and not _is_known(key):
            yield key, "is not a key of DeepSpeed's that this tool passes on", _suggest(key)
        elif value == "auto":
            yield key, "is auto, which DeepSpeed alone takes for its own default", f"leave {key} out"
        elif owner is not None and value != ours and not (ours is None and value in ("none", 1)):
            section, name = owner.split(".")
            setting = format_value(getattr(getattr(recipe, section), name))
            yield key, f"is {written}, but {owner} is {setting}", f"change {owner} and leave {key} out"


def _suggest(key: str) -> str:
    known = [*OWNERS, *KNOWN, *(f"zero_optimization.{name}" for name in ZERO)]
    close = difflib.get_close_matches(key, known, n=1)
    names = ", ".join(sorted({name.partition(".")[0] for name in known}))
    return f"did you mean {close[0]}?" if close else f"leave it out; these are passed on: {names}"


def _is_known(key: str) -> bool:
    top, _, rest = key.partition(".")
    return top in KNOWN if top != "zero_optimization" else rest.split(".")[0] in ZERO


def _get(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, Mapping) else None
    return tree
