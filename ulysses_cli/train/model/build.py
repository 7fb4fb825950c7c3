"""Builds model, loss, optimizer, learning rate schedule and engine of a resolved plan on this rank, and assembles the
run around them: train state and checkpoint context. Chooses the objective, and what it compares with. `train`,
`verify`, `bench` and the tests all use it. Initializes DeepSpeed. Collective over all ranks; the rest of train/ takes
plain arguments."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PretrainedConfig

from ulysses_cli.data.steps import Batching, Rows, make_batching
from ulysses_cli.plan.ds_config import make_ds_config, merge_user_config
from ulysses_cli.plan.ledger.hooks import is_hidden_matrix
from ulysses_cli.plan.ledger.states import size_weight_buffers
from ulysses_cli.plan.ledger.weights import read_weights, size_prefetch
from ulysses_cli.plan.recipe.recipe import Recipe, Train
from ulysses_cli.plan.recipe.sections import Preference
from ulysses_cli.plan.resolved import RunPlan, changes_positions
from ulysses_cli.plan.schedule import make_share
from ulysses_cli.train.attention.interface import register_attention, serve_rotary
from ulysses_cli.train.attention.kernels.choice import KernelChoice
from ulysses_cli.train.attention.kernels.trial import ANY_MIX, LengthMix, measure_mix
from ulysses_cli.train.checkpoint.format import CheckpointContext
from ulysses_cli.train.clock import count_as, watch_module
from ulysses_cli.train.elementwise.choice import describe, foresee_implementations
from ulysses_cli.train.elementwise.interface import find_norm_widths, serve_elementwise
from ulysses_cli.train.engine import IS_FROZEN, Engine, OrderedCopies
from ulysses_cli.train.loop import StopConditions, TrainState
from ulysses_cli.train.loss import NextToken, Objective
from ulysses_cli.train.model.adapters import find_nonfinite_scale
from ulysses_cli.train.model.loading import (
    BuildError,
    grow_embeddings,
    load_model_config,
    positions_of,
    sharded_loading,
    stretch_positions,
)
from ulysses_cli.train.model.loss_model import LossModel, apply_levers, check_head, load_token_loss, read_head_rule
from ulysses_cli.train.model.parts import (
    REAL_PARTS,
    Parts,
    describe_plain_norms,
    describe_sums,
    serve_experts,
    serve_layers,
)
from ulysses_cli.train.model.routers import RouterLosses, freeze_routers, list_router_weights
from ulysses_cli.train.optimizer.adamw_8bit import AdamW8bit
from ulysses_cli.train.optimizer.host_gradients import HostGradients
from ulysses_cli.train.optimizer.muon import IS_MUON, Muon
from ulysses_cli.train.optimizer.overlapped_optimizer import OverlappedOptimizer, unlock
from ulysses_cli.train.optimizer.shards import count_parameters, get_shape
from ulysses_cli.train.optimizer.states import read_each_once, reset_beta_powers
from ulysses_cli.train.preferences import PreferenceObjective, PreferenceSettings, UnpairedObjective
from ulysses_cli.train.processes.consistency import gather_values
from ulysses_cli.train.processes.device import seed_all
from ulysses_cli.train.processes.groups import Groups
from ulysses_cli.train.reference import ComputedReferences, ReferenceFile, References
from ulysses_cli.train.tensor_file import WORDS, find_file, find_nonfinite

SHARD_SLACK = 1.1  # parameters are padded to a multiple of the ranks


def make_router_losses(plan: RunPlan, model: nn.Module) -> RouterLosses | None:
    """The objective of a recipe that asks for losses of routers. Preferences have none."""
    train, by_sigmoid = plan.recipe.train, plan.shape.has_sigmoid_routers
    if not (train.router_aux_loss_coef or train.router_z_loss_coef):
        return None
    is_pooled = train.router_aux_loss_scope == "model"
    try:
        return RouterLosses(
            model, train.router_aux_loss_coef, train.router_z_loss_coef, by_sigmoid=by_sigmoid, is_pooled=is_pooled
        )
    except ValueError as error:
        raise BuildError(f"train.router_aux_loss_scope: {error}") from error


def make_optimizer(
    train: Train,
    trained: list[tuple[str, nn.Parameter]],
    offload: str,
    dtype: torch.dtype,
    frozen: Sequence[nn.Parameter] = (),
) -> torch.optim.Optimizer:
    """Weight decay applies to matrices alone. Norms and sinks are vectors; experts' biases are excluded by name.
    `dtype`: the model's. `frozen`: weights that no step changes, whatever their moments are."""
    numbers = {id(weight) for weight in frozen}
    trained = [(name, p) for name, p in trained if id(p) not in numbers]
    shapes = {name: get_shape(p) for name, p in trained}
    decayed = {name for name, shape in shapes.items() if len(shape) >= 2 and not name.endswith("bias")}
    matrices = {name for name in decayed if train.optim == "muon" and is_hidden_matrix(name, len(shapes[name]))}
    decay = {"weight_decay": train.weight_decay}
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in trained if name in matrices], **decay, IS_MUON: True},
        {"params": [p for name, p in trained if name in decayed - matrices], **decay},
        {"params": [p for name, p in trained if name not in decayed], "weight_decay": 0.0},
        {"params": list(frozen), "weight_decay": 0.0, "lr": 0.0, IS_FROZEN: True},
    ]
    groups = [group for group in groups if group["params"]]
    settings: dict[str, Any] = {
        "lr": train.learning_rate,
        "betas": (train.adam_beta1, train.adam_beta2),
        "eps": train.adam_epsilon,
    }
    if train.optim == "adamw_8bit":
        return AdamW8bit(groups, **settings)
    if train.optim == "muon":
        return Muon(groups, dtype, **settings)
    if offload != "none":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        optimizer = DeepSpeedCPUAdam(groups, adamw_mode=True, **settings)
        optimizer.register_step_pre_hook(reset_beta_powers)
        return optimizer
    return torch.optim.AdamW(groups, fused=True, **settings)


def make_schedule(train: Train, num_steps: int) -> Callable[[int], float]:
    """From a step (0, 1, ...) to its learning rate."""
    warmup = train.warmup_steps or math.ceil(train.warmup_ratio * num_steps)
    peak = train.learning_rate
    share = make_share(train.lr_scheduler_type, num_steps, warmup, train.lr_scheduler_kwargs, peak)
    return lambda step: peak * share(step)


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
    attention = _register_attention(plan, groups, kernel)
    model = _load_model(plan, groups, config, attention, device, ds_config, parts, report)
    serve_layers(model, plan, groups, device, parts.choose_recurrences, report)
    serve_experts(model, plan, groups, device, parts.choose_experts, report)
    serve_rotary(model, groups.sp_axis)
    adapter = parts.add_adapters(recipe, plan.shape, model) if recipe.lora is not None else None
    norms = find_norm_widths(model)
    choice = parts.choose_implementations(plan, groups, device, norms)
    report(describe(choice, serve_elementwise(model, choice.implementations)))
    for cost in (describe_plain_norms(plan, choice, norms), describe_sums(plan, device)):
        if cost:
            report(cost)
    head_rule = read_head_rule(config, recipe.train.z_loss_weight, load_token_loss(recipe.train.token_loss))
    loss = apply_levers(model, plan, head_rule, device, choice.implementations["loss"], swap_folder)
    objective = make_router_losses(plan, model) or objective
    module = LossModel(model, loss, objective)
    module.train()
    trained = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    frozen = list_router_weights(module) if recipe.train.freeze_router else []
    freeze_routers(frozen)
    dtype = getattr(torch, recipe.model.dtype)
    optimizer = make_optimizer(recipe.train, trained, plan.levers.offload_optimizer, dtype, frozen)
    wrapped, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=ds_config, dist_init_required=False)
    if isinstance(optimizer, Muon):
        optimizer.find_matrices(wrapped.optimizer)
    if hasattr(wrapped.optimizer, "check_grad_overflow"):
        wrapped.optimizer.check_grad_overflow = True  # stages 1 and 2 check float32 gradients for NaN only with this
    if recipe.zero_stage == 3 and plan.layout.dp_replicate_size > 1:
        OrderedCopies(module.parameters(), get_accelerator())
    if plan.levers.offload_param == "nvme":
        read_each_once(module.parameters())
    early = None
    if recipe.zero_stage == 3 and plan.levers.offload_optimizer == "cpu":
        gradients = HostGradients(wrapped.optimizer, get_accelerator())
        if plan.levers.early_groups:
            if not unlock(optimizer):
                report(LOCKED)
            early = OverlappedOptimizer(gradients, device, parts.make_executor(device), plan.levers.early_groups)
    check_head(model, head_rule, groups, device)
    _watch(wrapped, module)
    schedule = make_schedule(recipe.train, num_steps)
    engine = Engine(wrapped, groups, device, schedule, _clear_module_stack, close_wrapped, early)
    num_trained = sum(math.prod(get_shape(parameter)) for _, parameter in trained)
    return Built(engine, module, config, adapter, kernel, num_trained)


def _register_attention(plan: RunPlan, groups: Groups, kernel: KernelChoice) -> str:
    names, levers = kernel.by_head_dim or kernel.name, plan.levers
    how: dict[str, Any] = {"ring": groups.ring_axis, "overlaps": levers.overlap_exchange}
    return register_attention(groups.ulysses_axis, names, levers.head_chunks, **how)


def take_over_groups() -> None:
    """Collective over all ranks. DeepSpeed uses torch's groups from here on. Its sums in shared memory, which a CPU
    would compile for a minute at its first start, are left out: only its inference uses them."""
    import deepspeed

    backend = importlib.import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None  # type: ignore[attr-defined]
    deepspeed.init_distributed(dist_backend=dist.get_backend())
    shorten_hooks()


def shorten_hooks() -> None:
    """DeepSpeed marks ranges for a profiler in each hook, and lists a module's weights anew. torch reads the signature
    of its linear layer's forward in each call. That is a tenth of the processor's time for a layer."""
    importlib.import_module("deepspeed.utils.nvtx").enable_nvtx = False  # type: ignore[attr-defined]
    coordinator = importlib.import_module("deepspeed.runtime.zero.partitioned_param_coordinator")
    coordinator.get_all_parameters = _walk_weights  # type: ignore[attr-defined]
    forward: Any = importlib.import_module("deepspeed.runtime.zero.linear").LinearFunctionForZeroStage3.forward
    forward.__signature__ = inspect.signature(forward)


def _walk_weights(module: Any, recurse: bool = False) -> Iterator[tuple[str, nn.Parameter]]:
    """Its own weights, which stay the same in all steps, and those of other modules that it reads."""
    kept = vars(module).setdefault("_walked_weights", {})
    if recurse not in kept:
        kept[recurse] = tuple(module.named_parameters(recurse=recurse))
    return chain(kept[recurse], module.ds_external_parameters())


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
    is_sharded = recipe.zero_stage == 3
    place = ds_config["zero_optimization"].get("offload_param")
    ds_config["zero_optimization"] = {"stage": 3, "overlap_comm": True} if is_sharded else {"stage": 0}
    if place is not None:
        ds_config["zero_optimization"]["offload_param"] = place
    kernel = REAL_PARTS.choose_kernel(plan, groups, device, ANY_MIX)
    report(f"attention {kernel.name}: {kernel.reason}")
    config = load_model_config(recipe)
    stretch_positions(config, recipe, plan.resolved)
    attention = _register_attention(plan, groups, kernel)
    model = _load_model(plan, groups, config, attention, device, ds_config, REAL_PARTS, report)
    serve_layers(model, plan, groups, device, REAL_PARTS.choose_recurrences, report)
    serve_experts(model, plan, groups, device, REAL_PARTS.choose_experts, report)
    serve_rotary(model, groups.sp_axis)
    if recipe.lora is not None:
        REAL_PARTS.add_adapters(recipe, plan.shape, model)
    model.requires_grad_(False)
    head_rule = read_head_rule(config, 0.0)
    implementations = foresee_implementations(model.dtype, is_fused=False, is_gpu=device.type == "cuda")
    module = LossModel(model, apply_levers(model, plan, head_rule, device, implementations["loss"]))
    wrapped, *_ = deepspeed.initialize(model=module, config=ds_config, dist_init_required=False)
    wrapped.eval()
    check_head(model, head_rule, groups, device)
    return Engine(wrapped, groups, device, lambda _: 0.0, _clear_module_stack, close_wrapped)


def _make_engine_config(plan: RunPlan, swap_folder: Path | None) -> dict[str, Any]:
    levers, recipe = plan.levers, plan.recipe
    own_config = make_ds_config(recipe, plan.layout, levers.offload_optimizer, levers.offload_param)
    if levers.leaf_layers:
        prefetch, live = size_prefetch(read_weights(plan.shape, recipe.lora), leaf_layers=True)
        own_config["zero_optimization"] |= {"prefetch_bucket_size": prefetch, "max_live_parameters": live}
    ds_config = merge_user_config(own_config, recipe.deepspeed)
    if swap_folder is None:
        return ds_config
    zero = ds_config["zero_optimization"]
    for name in ("offload_optimizer", "offload_param"):
        if zero.get(name, {}).get("device") == "nvme":
            zero[name]["nvme_path"] = str(swap_folder)
            if name == "offload_param":
                weights = read_weights(plan.shape, recipe.lora)
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
    sharding = ds_config if recipe.zero_stage == 3 else None
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


@dataclass(frozen=True)
class RunLength:
    """The number of steps, and the position in the stream of rows where the run ends."""

    num_steps: int
    end: int


@dataclass(frozen=True, eq=False)
class AssembledRun:
    """One rank's run before its first step."""

    plan: RunPlan
    built: Built
    state: TrainState
    context: CheckpointContext


def assemble_run(
    plan: RunPlan,
    groups: Groups,
    device: torch.device,
    rows: Rows,
    length: RunLength | int,
    *,
    eval_rows: Rows | None = None,
    batching: Batching | None = None,
    stop: StopConditions | None = None,
    parts: Parts = REAL_PARTS,
    report: Callable[[str], None] = lambda _: None,
    swap_folder: Path | None = None,
    objective: Objective | None = None,
) -> AssembledRun:
    """Collective over all ranks. A `length` that is a number of steps takes as many rows as they need. All ranks draw
    the model from one seed and train with seeds of their own."""
    batching = batching or make_batching(plan.recipe, plan.shape, plan.resolved)
    if isinstance(length, int):
        length = RunLength(length, length * batching.rows_per_step)
    settings = plan.recipe.run
    generates = bool(settings.sample_prompts or settings.eval_suite)
    seed_all(settings.seed)
    built = build(
        plan, groups, device, length.num_steps,
        parts=parts, report=report, mix=measure_mix(rows, eval_rows, generates=generates),
        swap_folder=swap_folder, objective=objective,
    )  # fmt: skip
    state = TrainState(built.engine, groups, rows, batching, length.num_steps, length.end, stop or StopConditions())
    context = CheckpointContext(
        built.module,
        built.engine.wrapped.optimizer,
        groups.rank,
        plan.layout.world_size,
        wait=lambda: dist.barrier(group=groups.host_group),
        gather=lambda value: gather_values(value, groups.host_group),
    )
    seed_all(settings.seed + groups.rank)
    return AssembledRun(plan, built, state, context)


def choose_objective(recipe: Recipe, groups: Groups) -> Objective:
    if recipe.preference is None:
        return NextToken()
    settings = read_settings(recipe.preference)
    if recipe.preference.is_unpaired:
        return UnpairedObjective(settings, groups.sp_axis, dist.group.WORLD if groups.layout.world_size > 1 else None)
    return PreferenceObjective(settings, groups.sp_axis)


def read_settings(preference: Preference) -> PreferenceSettings:
    return PreferenceSettings(**preference.model_dump(exclude={"share_prompts"}))


def choose_references(
    run: AssembledRun, data: str, folder: Path, eval_rows: Rows | None, eval_batching: Batching
) -> References:
    """What the objective compares with; nothing where it compares with nothing. `data`: the hash of the rows."""
    plan, recipe = run.plan, run.plan.recipe
    if recipe.preference is None or not recipe.preference.has_reference:
        return References(eval_rows, eval_batching)
    key = {"data": data, "seed": recipe.run.seed, **recipe.model_dump(mode="json", include={"model", "lora"})}
    layout = {"layout": vars(plan.layout), "batching": run.state.batching, "levers": plan.levers}
    files = [ReferenceFile(folder / f"{split}.npz", key, layout) for split in ("train", "eval")]
    return ComputedReferences(eval_rows, eval_batching, run.state, files)


def find_own_positions(run: AssembledRun) -> Callable[[], AbstractContextManager[None]] | None:
    """Inside, the model has the positions of its files; None where the recipe changes none."""
    recipe = run.plan.recipe
    if not changes_positions(recipe.model.model_dump()):
        return None
    return partial(positions_of, run.built.module, load_model_config(recipe))


def assert_sharded(run: AssembledRun, report: Callable[[str], None]) -> None:
    """Under ZeRO-3 this rank holds about its share of the parameters, and no more."""
    if run.plan.recipe.zero_stage != 3:
        return
    layout = run.plan.layout
    local, total, small = count_parameters(run.built.module)
    if local > total / layout.world_size * SHARD_SLACK + small:
        raise AssertionError(f"this rank holds {local:,} of {total:,} parameters, its share is 1 in {layout}")
    report(f"each rank holds {local:,} of {total:,} parameters")
