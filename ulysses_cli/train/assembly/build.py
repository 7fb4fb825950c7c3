"""Builds model, loss, optimizer and engine of a resolved plan on this rank. Initializes DeepSpeed; the rest of train/
takes plain arguments.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from ulysses_cli.plan.ds_config import make_ds_config, merge_user_config
from ulysses_cli.plan.ledger.job import read_adapters
from ulysses_cli.plan.ledger.weights import list_weights
from ulysses_cli.plan.ledger.zero.swapping import size_weight_buffers
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.plan.resolved import RunPlan
from ulysses_cli.train.assembly.head import check_head, read_head_rule
from ulysses_cli.train.assembly.levers import apply_levers
from ulysses_cli.train.assembly.loading import BuildError, grow_embeddings, sharded_loading
from ulysses_cli.train.assembly.loss_model import LossModel
from ulysses_cli.train.assembly.model_config import load_model_config, stretch_positions
from ulysses_cli.train.assembly.optimizer import make_optimizer, make_schedule
from ulysses_cli.train.assembly.parts import REAL_PARTS, Parts, describe_plain_norms, describe_sums
from ulysses_cli.train.assembly.quantized_base import find_nonfinite_scale
from ulysses_cli.train.assembly.recurrent_layers import serve_layers
from ulysses_cli.train.assembly.token_loss import load_token_loss
from ulysses_cli.train.attention.interface import register_attention
from ulysses_cli.train.attention.kernels.choice import KernelChoice
from ulysses_cli.train.attention.kernels.workload import ANY_MIX, LengthMix
from ulysses_cli.train.attention.rotary import serve_rotary
from ulysses_cli.train.elementwise.choice import describe
from ulysses_cli.train.elementwise.interface import find_norm_widths, serve_elementwise
from ulysses_cli.train.engine import Engine
from ulysses_cli.train.finiteness import WORDS, find_file, find_nonfinite
from ulysses_cli.train.memory.replica_copies import OrderedCopies
from ulysses_cli.train.objective import Objective
from ulysses_cli.train.optimizer.early_steps import EarlySteps
from ulysses_cli.train.optimizer.shards import get_shape
from ulysses_cli.train.optimizer.swap_files import read_each_once
from ulysses_cli.train.optimizer.unlocked_adam import unlock
from ulysses_cli.train.processes.consistency import gather_values
from ulysses_cli.train.processes.groups import Groups
from ulysses_cli.train.telemetry.clock import count_as, watch_module

MLP_NAMES = ("mlp", "block_sparse_moe", "feed_forward")
ATTENTION_NAMES = ("self_attn", "attention", "attn", "linear_attn", "mamba")


LOCKED = (
    "early steps of the optimizer hold Python's lock, since DeepSpeed's CPU Adam could not be called without it: they "
    "may slow the backward; compare with memory.overlap_optimizer: false"
)


@dataclass(frozen=True, eq=False)
class Built:
    """What the loop and the checkpoint need."""

    engine: Engine
    module: LossModel
    config: PretrainedConfig
    adapter: Any  # peft's model around the same weights, or None
    kernel: KernelChoice
    num_trained: int


def build(
    plan: RunPlan,
    groups: Groups,
    device: torch.device,
    num_steps: int,
    *,
    parts: Parts = REAL_PARTS,
    report: Callable[[str], None] = lambda _: None,
    mix: LengthMix = ANY_MIX,
    swap_folder: Path | None = None,
    objective: Objective | None = None,
) -> Built:
    """Collective over all ranks. `mix`: the lengths of the run's documents, on which kernels are timed.
    `swap_folder`: the folder for what is offloaded to a disk. `objective`: left out, the loss of the next token."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    recipe = plan.recipe
    take_over_groups()
    ds_config = _make_engine_config(plan, swap_folder)
    kernel = parts.choose_kernel(plan, groups, device, mix)
    report(f"attention {kernel.name}: {kernel.reason}")
    config = load_model_config(recipe)
    stretch_positions(config, recipe, plan.resolved)
    kernels, chunks = kernel.by_head_dim or kernel.name, plan.levers.head_chunks
    attention = register_attention(groups.ulysses_axis, kernels, chunks, ring=groups.ring_axis)
    model = _load_model(plan, groups, config, attention, device, ds_config, parts, report)
    serve_layers(model, plan, groups, device, parts.choose_recurrences, report)
    serve_rotary(model, groups.sp_axis)
    adapter = parts.add_adapters(recipe, model) if recipe.lora is not None else None
    norms = find_norm_widths(model)
    choice = parts.choose_ways(plan, groups, device, norms)
    report(describe(choice, serve_elementwise(model, choice.ways)))
    for cost in (describe_plain_norms(plan, choice, norms), describe_sums(plan, device)):
        if cost:
            report(cost)
    head_rule = read_head_rule(config, recipe.train.z_loss_weight, load_token_loss(recipe.train.token_loss))
    loss = apply_levers(model, plan, head_rule, device, swap_folder, choice.ways["loss"])
    module = LossModel(model, loss, objective)
    module.train()
    trained = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    optimizer = make_optimizer(recipe.train, trained, plan.levers.offload_optimizer)
    wrapped, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=ds_config, dist_init_required=False)
    if hasattr(wrapped.optimizer, "check_grad_overflow"):
        wrapped.optimizer.check_grad_overflow = True  # stages 1 and 2 check float32 gradients for NaN only with this
    if recipe.parallel.zero_stage == 3 and plan.layout.dp_replicate_size > 1:
        OrderedCopies(module.parameters(), get_accelerator())
    if plan.levers.offload_param == "nvme":
        read_each_once(module.parameters())
    early = None
    if plan.levers.early_groups and plan.levers.offload_optimizer == "cpu":
        if not unlock(optimizer):
            report(LOCKED)
        early = EarlySteps(wrapped.optimizer, device, parts.make_executor(device), plan.levers.early_groups)
    check_head(model, head_rule, groups, device)
    _watch(wrapped, module)
    schedule = make_schedule(recipe.train, num_steps)
    engine = Engine(wrapped, groups, device, schedule, _clear_module_stack, close_wrapped, early)
    num_trained = sum(math.prod(get_shape(parameter)) for _, parameter in trained)
    return Built(engine, module, config, adapter, kernel, num_trained)


def take_over_groups() -> None:
    """Collective over all ranks. DeepSpeed uses torch's groups from here on. Its sums in shared memory, which a CPU
    would compile for a minute at its first start, are left out: only its inference uses them."""
    import deepspeed

    backend = importlib.import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None  # type: ignore[attr-defined]
    deepspeed.init_distributed(dist_backend=dist.get_backend())


def build_for_answers(
    plan: RunPlan, groups: Groups, device: torch.device, report: Callable[[str], None] = lambda _: None
) -> Engine:
    """Collective over all ranks. Builds the model without an optimizer, its weights sharded over all ranks, or adapters
    beside a base in fewer bits: an engine that only computes losses and logits."""
    import deepspeed

    recipe = plan.recipe
    take_over_groups()
    ds_config = {**_make_engine_config(plan, None), "gradient_accumulation_steps": 1, "gradient_clipping": 0.0}
    # a base in fewer bits is whole on each rank: ZeRO-3 would gather codes without their scales
    is_sharded = recipe.parallel.zero_stage == 3
    place = ds_config["zero_optimization"].get("offload_param")
    ds_config["zero_optimization"] = {"stage": 3, "overlap_comm": True} if is_sharded else {"stage": 0}
    if place is not None:
        ds_config["zero_optimization"]["offload_param"] = place
    kernel = REAL_PARTS.choose_kernel(plan, groups, device, ANY_MIX)
    report(f"attention {kernel.name}: {kernel.reason}")
    config = load_model_config(recipe)
    stretch_positions(config, recipe, plan.resolved)
    kernels, chunks = kernel.by_head_dim or kernel.name, plan.levers.head_chunks
    attention = register_attention(groups.ulysses_axis, kernels, chunks, ring=groups.ring_axis)
    model = _load_model(plan, groups, config, attention, device, ds_config, REAL_PARTS, report)
    serve_layers(model, plan, groups, device, REAL_PARTS.choose_recurrences, report)
    serve_rotary(model, groups.sp_axis)
    if recipe.lora is not None:
        REAL_PARTS.add_adapters(recipe, model)
    model.requires_grad_(False)
    head_rule = read_head_rule(config, 0.0)
    module = LossModel(model, apply_levers(model, plan, head_rule, device))
    wrapped, *_ = deepspeed.initialize(model=module, config=ds_config, dist_init_required=False)
    wrapped.eval()
    check_head(model, head_rule, groups, device)
    return Engine(wrapped, groups, device, lambda _: 0.0, _clear_module_stack, close_wrapped)


def _make_engine_config(plan: RunPlan, swap_folder: Path | None) -> dict[str, Any]:
    levers, recipe = plan.levers, plan.recipe
    own_config = make_ds_config(recipe, plan.layout, levers.offload_optimizer, levers.offload_param)
    ds_config = merge_user_config(own_config, recipe.deepspeed)
    if swap_folder is None:
        return ds_config
    zero = ds_config["zero_optimization"]
    for name in ("offload_optimizer", "offload_param"):
        if zero.get(name, {}).get("device") == "nvme":
            zero[name]["nvme_path"] = str(swap_folder)
            if name == "offload_param":
                weights = list_weights(plan.shape, read_adapters(recipe, plan.shape))
                dtype = getattr(torch, recipe.model.dtype)
                zero[name].update(size_weight_buffers(weights, plan.layout.world_size, dtype.itemsize))
    return ds_config


def _load_model(
    plan: RunPlan,
    groups: Groups,
    config: PretrainedConfig,
    attention: str,
    device: torch.device,
    ds_config: dict[str, Any],
    parts: Parts,
    report: Callable[[str], None],
) -> Any:
    """Loads the model with its weights and grows it by rows for tokens that the recipe adds."""
    recipe, vocab_size = plan.recipe, plan.shape.vocab_size
    sharding = ds_config if recipe.parallel.zero_stage == 3 else None
    num_own_tokens = config.vocab_size
    if recipe.model.config is not None:
        config.vocab_size = vocab_size  # random weights are drawn at the final size
    with sharded_loading(sharding):
        model = parts.load_weights(recipe, config, attention, device)
        _check_finite(model, recipe, groups)
        if vocab_size > config.vocab_size:
            grow_embeddings(model, vocab_size, sharding)
            config.vocab_size = vocab_size
    if vocab_size > num_own_tokens:
        whole = {"embed_tokens", "lm_head"} if recipe.lora is None else set(recipe.lora.modules_to_save) - {"norm"}
        fate = f"trained in {' and '.join(sorted(whole))}" if whole else "frozen, as all of the model is under lora"
        report(f"embedding and head grew from {num_own_tokens:,} to {vocab_size:,} tokens; new rows are {fate}")
    return model


def _check_finite(model: Any, recipe: Recipe, groups: Groups) -> None:
    """Collective over all ranks: each checks its part of the model's own weights."""
    if dist.get_backend() == "fake":  # nothing was read
        return
    found = find_nonfinite(model) or find_nonfinite_scale(model)
    name = next(filter(None, gather_values(found, groups.host_group)), "")
    if name:
        source = recipe.model.name_or_path
        file = find_file(source, name, recipe.model.revision) if source else None
        raise BuildError(
            f"{file or source or 'the random model'} holds {WORDS} in {name}: no model can be trained from it"
        )


def _clear_module_stack() -> None:
    """A recomputation that stops early leaves modules on DeepSpeed's stack of running modules, which would grow without
    bound."""
    from deepspeed.runtime.zero import parameter_offload

    del parameter_offload.FWD_MODULE_STACK[1:]


def close_wrapped(wrapped: Any) -> None:
    """Ends DeepSpeed's engine. Under ZeRO-3 two places of DeepSpeed's hold engines and their weights for as long as the
    process lives: its stack of running modules, and a cache of methods' results, whose keys are coordinators."""
    from deepspeed.runtime.zero import parameter_offload
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    wrapped.destroy()
    stack = parameter_offload.FWD_MODULE_STACK
    stack[:] = [module for module in stack if module is not wrapped.module]
    for method in vars(PartitionedParameterCoordinator).values():
        for cache in _list_caches(method):
            cache.cache_clear()  # an engine that goes on computes its results once more


def _list_caches(function: Any) -> Iterator[Any]:
    """The caches around a function, at whatever place among its decorators."""
    if hasattr(function, "cache_clear"):
        yield function
    for cell in getattr(function, "__closure__", None) or ():
        if callable(cell.cell_contents) and not isinstance(cell.cell_contents, type):
            yield from _list_caches(cell.cell_contents)


def _watch(wrapped: Any, module: LossModel) -> None:
    """Registers the clock's hooks for the parts of a step."""
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
