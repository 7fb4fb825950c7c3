"""Recipe -> model, loss, optimizer and engine on this rank. The only place that wraps or patches; each feature becomes
a value here. deepspeed is imported in this file; the rest of train/ is handed what it needs.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig, PretrainedConfig, get_scheduler

from ulysses_cli.plan.attention import Need
from ulysses_cli.plan.ds_config import make_ds_config, merge_user_config
from ulysses_cli.plan.ledger.job import read_adapters
from ulysses_cli.plan.ledger.swapping import size_weight_buffers
from ulysses_cli.plan.ledger.weights import list_weights
from ulysses_cli.plan.levers import Levers
from ulysses_cli.plan.model_shape import ModelShape, read_model_shape
from ulysses_cli.plan.recipe import Recipe, Train
from ulysses_cli.plan.resolved import (
    compute_rope_factor,
    compute_row_tokens,
    get_original_positions,
    make_layout,
)
from ulysses_cli.plan.tiles import compute_loss_tile_tokens, compute_num_mlp_tiles
from ulysses_cli.plan.vocabulary import compute_vocab_size, grow_config
from ulysses_cli.train.agreement import gather_values
from ulysses_cli.train.clock import count_as, watch_module
from ulysses_cli.train.documents import make_documents
from ulysses_cli.train.eight_bits import AdamW8bit
from ulysses_cli.train.engine import Engine
from ulysses_cli.train.finiteness import WORDS, find_file, find_spoilt
from ulysses_cli.train.groups import Groups
from ulysses_cli.train.interface import register_attention
from ulysses_cli.train.kernel_choice import Choice, Work, choose_kernel
from ulysses_cli.train.loading import (
    BuildError,
    Making,
    first_line,
    grow_embeddings,
    load_pretrained,
    sharded_loading,
    start_from_random,
)
from ulysses_cli.train.loss import HeadRule, Loss, LossModel, PlainLoss, apply_rule
from ulysses_cli.train.offload import Offloader
from ulysses_cli.train.recompute import recompute_layers
from ulysses_cli.train.shards import get_shape
from ulysses_cli.train.states import forget_powers
from ulysses_cli.train.tiled_loss import make_tiled_loss
from ulysses_cli.train.tiled_mlp import tile_mlps
from ulysses_cli.train.tiled_norm import tile_norms

PROBE_TOKENS = 8
HEAD_TOLERANCE = 0.02  # bfloat16 keeps 8 bits; a lost scale or softcap costs far more
MLP_NAMES = ("mlp", "block_sparse_moe", "feed_forward")
ATTENTION_NAMES = ("self_attn", "attention", "attn")


@dataclass(frozen=True, eq=False)
class Built:
    """What the loop and the checkpoint need."""

    engine: Engine
    module: LossModel
    config: PretrainedConfig
    adapter: Any  # peft's model around the same weights, or None
    kernel: Choice
    num_trained: int


def load_model_config(recipe: Recipe) -> PretrainedConfig:
    model = recipe.model
    try:
        if model.config is not None:
            config = AutoConfig.for_model(**model.config)
        else:
            path = os.path.expanduser(str(model.name_or_path))
            config = AutoConfig.from_pretrained(
                path, revision=model.revision, trust_remote_code=model.trust_remote_code
            )
        config = config.get_text_config(decoder=True)
    except (OSError, ValueError) as error:
        raise BuildError(f"the model's config cannot be read: {first_line(error)}") from error
    return config


def read_shape(recipe: Recipe, config: PretrainedConfig, tokenizer: Any) -> ModelShape:
    """The shape of the model with rows for the tokens that the recipe adds to its tokenizer."""
    content, name = config.to_dict(), str(recipe.model.name_or_path or "the model of model.config")
    size = read_model_shape(content, name).vocab_size
    size = compute_vocab_size(size, tokenizer.convert_tokens_to_ids(list(recipe.data.added_tokens)))
    return read_model_shape(grow_config(content, size), name)


def stretch_positions(config: PretrainedConfig, recipe: Recipe, shape: ModelShape) -> None:
    """Write the recipe's stretch and length into the config, which goes with the exported model."""
    model = recipe.model
    if model.rope_scaling is not None:
        written = model.rope_scaling.model_dump(exclude_none=True, exclude={"type", "factor"})
        original = get_original_positions(recipe, shape)
        # llama3's own number of original positions is part of its formula and stays as written in the model.
        stretch = {"rope_type": model.rope_scaling.type, "factor": compute_rope_factor(recipe, shape), **written}
        if model.rope_scaling.type in ("yarn", "llama3"):
            stretch.setdefault("original_max_position_embeddings", original)
        config.rope_parameters = {**_get_rope_base(config), **stretch}
    config.max_position_embeddings = max(config.max_position_embeddings, recipe.data.max_length)


def _get_rope_base(config: PretrainedConfig) -> dict[str, Any]:
    """The rotary base and how much of a head turns: what a stretch leaves alone."""
    own = getattr(config, "rope_parameters", None) or {}
    return {name: own[name] for name in ("rope_theta", "partial_rotary_factor") if name in own}


def build(
    recipe: Recipe,
    shape: ModelShape,
    groups: Groups,
    device: torch.device,
    num_steps: int,
    levers: Levers,
    tell: Callable[[str], None] = lambda _: None,
    row_lengths: Sequence[int] = (),
    swap_folder: Path | None = None,
) -> Built:
    """Collective over all ranks. `row_lengths`: documents of a row of the run, for kernels to be timed on.
    `swap_folder`: where optimizer states and weights live that are on a disk."""
    import deepspeed

    layout = groups.layout
    deepspeed.init_distributed(dist_backend=dist.get_backend())  # takes over torch's groups
    made = make_ds_config(recipe, layout, levers.offload_optimizer, levers.offload_param)
    ds_config = merge_user_config(made, recipe.deepspeed)
    if swap_folder is not None:
        _place_on_disk(ds_config["zero_optimization"], swap_folder, recipe, shape)
    kernel = _choose_kernel(recipe, shape, groups, device, levers.head_chunks, row_lengths)
    tell(f"attention {kernel.name}: {kernel.reason}")
    config = load_model_config(recipe)
    stretch_positions(config, recipe, shape)
    attention = register_attention(groups.sp_axis, kernel.name, levers.head_chunks)
    sharding = ds_config if recipe.parallel.zero_stage == 3 else None
    num_own_tokens = config.vocab_size
    if recipe.model.config is not None:
        config.vocab_size = shape.vocab_size  # drawn as large as it is to be
    with sharded_loading(sharding):
        model = _load_weights(recipe, config, attention, device)
        _check_numbers(model, recipe, groups)
        if shape.vocab_size > config.vocab_size:
            grow_embeddings(model, shape.vocab_size, sharding)
            config.vocab_size = shape.vocab_size
    if shape.vocab_size > num_own_tokens:
        fate = "frozen, as all of the model is under lora" if recipe.lora is not None else "trained"
        tell(f"embedding and head grew from {num_own_tokens:,} to {shape.vocab_size:,} tokens; new rows are {fate}")
    adapter = _add_adapters(recipe, model) if recipe.lora is not None else None
    head_rule = read_head_rule(config, recipe.train.z_loss_weight)
    loss = _pull_levers(model, levers, head_rule, recipe, shape, device)
    module = LossModel(model, loss)
    module.train()
    trained = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    optimizer = _make_optimizer(recipe.train, trained, levers.offload_optimizer)
    wrapped, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=ds_config, dist_init_required=False)
    if hasattr(wrapped.optimizer, "check_grad_overflow"):
        wrapped.optimizer.check_grad_overflow = True  # stages 1 and 2 look for NaN in float32 only when told
    _prove_head(model, head_rule, groups, device)
    _watch(wrapped, module)
    engine = Engine(wrapped, groups, device, make_schedule(recipe.train, num_steps), _forget_modules)
    num_trained = sum(math.prod(get_shape(parameter)) for _, parameter in trained)
    return Built(engine, module, config, adapter, kernel, num_trained)


def _place_on_disk(zero: dict[str, Any], folder: Path, recipe: Recipe, shape: ModelShape) -> None:
    for name in ("offload_optimizer", "offload_param"):
        if zero.get(name, {}).get("device") == "nvme":
            zero[name]["nvme_path"] = str(folder)
            if name == "offload_param":
                weights, dtype = list_weights(shape, read_adapters(recipe)), getattr(torch, recipe.model.dtype)
                zero[name].update(size_weight_buffers(weights, make_layout(recipe).world_size, dtype.itemsize))


def read_head_rule(config: PretrainedConfig, z_loss_weight: float) -> HeadRule:
    """What the families do to their logits; what another model does is found by _prove_head."""
    softcap, divisor = getattr(config, "final_logit_softcapping", None), getattr(config, "logits_scaling", None)
    return HeadRule(softcap, float(divisor or 1.0), z_loss_weight)


@torch.no_grad()
def _prove_head(model: Any, rule: HeadRule, groups: Groups, device: torch.device) -> None:
    """The loss starts from hidden states: its logits are compared with the model's own, on a few tokens. Collective
    over all ranks."""
    axis = groups.sp_axis
    model.eval()
    ids = torch.arange(PROBE_TOKENS, device=device)[None] % model.config.vocab_size
    given = {
        "input_ids": ids,
        "position_ids": torch.arange(PROBE_TOKENS, device=device)[None] + axis.rank * PROBE_TOKENS,
        "documents": make_documents([PROBE_TOKENS * axis.size], device),
        "use_cache": False,
    }
    right = model(**given).logits.float()
    ours = apply_rule(model.get_output_embeddings()(model.get_decoder()(**given).last_hidden_state).float(), rule)
    model.train()
    share = ((ours - right).norm() / right.norm()).item() if dist.get_backend() != "fake" else 0.0
    worst = max(gather_values(share, groups.host_group)) if dist.get_backend() != "fake" else share
    if math.isnan(worst):
        raise BuildError("the model's logits are not numbers: its weights hold NaN or infinity")
    if not worst <= HEAD_TOLERANCE:
        raise BuildError(
            f"{model.config.model_type} does more to its logits than head and softcap: they differ by {worst:.2g}, "
            "and so would its loss"
        )


def _pull_levers(
    model: Any, levers: Levers, rule: HeadRule, recipe: Recipe, shape: ModelShape, device: torch.device
) -> Loss:
    """Each lever changes how a part of the model runs, none what it computes."""
    from deepspeed.utils import set_z3_leaf_module

    gather_whole: Callable[[nn.Module], None] | None = None
    if recipe.parallel.zero_stage == 3:
        gather_whole = partial(set_z3_leaf_module, flag=True)
    try:
        if levers.tiled_mlp:
            count_tiles = partial(compute_num_mlp_tiles, hidden_size=shape.hidden_size)
            tile_mlps(model, count_tiles, gather_whole)
            tile_norms(model, count_tiles)
        if levers.gradient_checkpointing:
            shelves = Offloader(device, levers.offloaded_layers).make_shelf if levers.offloaded_layers else None
            recompute_layers(model, "full" if levers.gradient_checkpointing == "full" else "keep_attention", shelves)
    except ValueError as error:
        raise BuildError(f"{error}: turn memory.tiled_mlp or memory.gradient_checkpointing off") from error
    head = model.get_output_embeddings()
    if not levers.tiled_loss:
        return PlainLoss(head, rule)
    local_tokens = recipe.train.per_device_train_batch_size * compute_row_tokens(recipe) // recipe.parallel.sp_size
    return make_tiled_loss(head, rule, compute_loss_tile_tokens(local_tokens, shape.vocab_size), gather_whole)


def _choose_kernel(
    recipe: Recipe, shape: ModelShape, groups: Groups, device: torch.device, head_chunks: int, lengths: Sequence[int]
) -> Choice:
    """Rank 0 tries and times; all use what it chose, since times differ from rank to rank."""
    need = Need(
        head_dim=shape.head_dim,
        has_window=bool(shape.windows),
        has_softcap=shape.attention_softcap is not None,
        has_sinks=shape.has_sinks,
        dtype=recipe.model.dtype,
    )
    choice: Choice | str | None = None
    if groups.is_first:
        try:
            window = min(shape.windows) if shape.windows else None
            heads = max(1, shape.num_heads // groups.sp_axis.size // head_chunks)
            kv_heads = max(1, heads * shape.num_kv_heads // shape.num_heads)
            work = Work(tuple(lengths), heads, kv_heads) if lengths else Work()
            choice = choose_kernel(recipe.model.attn_implementation, need, device, window, work)
        except ValueError as error:
            choice = str(error)
    choice = gather_values(choice, groups.host_group)[0]
    if not isinstance(choice, Choice):
        raise BuildError(str(choice))
    return choice


def _load_weights(recipe: Recipe, config: PretrainedConfig, attention: str, device: torch.device) -> Any:
    model = recipe.model
    making = Making(config, getattr(torch, model.dtype), attention, model.trust_remote_code)
    if model.config is not None:
        return start_from_random(making, recipe.run.seed, device)
    return load_pretrained(making, os.path.expanduser(str(model.name_or_path)), model.revision)


def _check_numbers(model: Any, recipe: Recipe, groups: Groups) -> None:
    """Collective over all ranks: each looks at what it holds of the model's own weights."""
    if dist.get_backend() == "fake":  # nothing was read
        return
    name = next(filter(None, gather_values(find_spoilt(model), groups.host_group)), "")
    if name:
        source = recipe.model.name_or_path
        file = find_file(source, name, recipe.model.revision) if source else None
        raise BuildError(
            f"{file or source or 'the random model'} holds {WORDS} in {name}: no model can be trained from it"
        )


def make_adapter_config(recipe: Recipe) -> Any:
    from peft import LoraConfig

    lora = recipe.lora
    if lora is None:
        raise AssertionError("no lora section")
    targets: Any = lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules)
    return LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
        base_model_name_or_path=recipe.model.name_or_path,
    )


def _add_adapters(recipe: Recipe, model: Any) -> Any:
    """peft puts adapters into the model, which keeps its own class; the base is frozen."""
    from peft import get_peft_model

    settings = make_adapter_config(recipe)
    torch.manual_seed(recipe.run.seed)
    try:
        return get_peft_model(model, settings, autocast_adapter_dtype=False)
    except ValueError as error:
        raise BuildError(f"the adapters cannot be added: {first_line(error)}") from error


def _make_optimizer(train: Train, trained: list[tuple[str, nn.Parameter]], offload: str) -> torch.optim.Optimizer:
    """Weight decay is for matrices: norms and sinks are vectors; biases of experts are not, but have their name."""
    decayed = {name for name, p in trained if len(get_shape(p)) >= 2 and not name.endswith("bias")}
    groups = [
        {"params": [p for name, p in trained if name in decayed], "weight_decay": train.weight_decay},
        {"params": [p for name, p in trained if name not in decayed], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    numbers: dict[str, Any] = {
        "lr": train.learning_rate,
        "betas": (train.adam_beta1, train.adam_beta2),
        "eps": train.adam_epsilon,
    }
    if train.optim == "adamw_8bit":
        return AdamW8bit(groups, **numbers)
    if offload != "none":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        optimizer = DeepSpeedCPUAdam(groups, adamw_mode=True, **numbers)
        optimizer.register_step_pre_hook(forget_powers)
        return optimizer
    return torch.optim.AdamW(groups, fused=True, **numbers)


def make_schedule(train: Train, num_steps: int) -> Callable[[int], float]:
    """Learning rate of step 0, 1, ...: transformers' schedules as a pure function. There is no state to save."""
    stand_in = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    warmup = train.warmup_steps or math.ceil(train.warmup_ratio * num_steps)
    special: dict[str, Any] = dict(train.lr_scheduler_kwargs)
    for name in ("num_decay_steps", "num_stable_steps", "timescale"):
        if name in special:
            special[name] = int(special[name])
    for name in ("lr_end", "min_lr"):  # written as rates; the stand-in's peak is 1
        if name in special and train.learning_rate:
            special[name] = special[name] / train.learning_rate
    factor = get_scheduler(train.lr_scheduler_type, stand_in, warmup, num_steps, special).lr_lambdas[0]
    return lambda step: train.learning_rate * factor(step)


def _forget_modules() -> None:
    """A recomputation that ends early leaves modules that DeepSpeed thinks are still running: one list, for ever."""
    from deepspeed.runtime.zero import parameter_offload

    del parameter_offload.FWD_MODULE_STACK[1:]


def _watch(wrapped: Any, module: LossModel) -> None:
    """Let the clock see the parts of a step."""
    for name, part in module.model.named_modules():
        last = name.rpartition(".")[2]
        if last in ATTENTION_NAMES:
            watch_module(part, "projections")
        elif last in MLP_NAMES:
            watch_module(part, "mlp")
    offload = getattr(wrapped.optimizer, "parameter_offload", None)
    if offload is not None:
        coordinator = offload.get_param_coordinator()
        coordinator.fetch_sub_module = count_as("gather_reduce", coordinator.fetch_sub_module)
    for name in ("reduce_independent_p_g_buckets_and_remove_grads", "reduce_ready_partitions_and_remove_grads"):
        if hasattr(wrapped.optimizer, name):
            setattr(wrapped.optimizer, name, count_as("gather_reduce", getattr(wrapped.optimizer, name)))
