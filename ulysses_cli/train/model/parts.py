"""The parts of a model that depend on files, values or a real device: weights, adapters, kernels of attention, of
recurrent layers and of elementwise functions. They are arguments of the assembler, so that a trace can use others.

Rank 0 chooses and all ranks follow, since times differ from rank to rank. Recurrent layers are made exact on split
rows under every ZeRO stage."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import nn
from transformers import PretrainedConfig

from ulysses_cli.plan.attention import list_needs
from ulysses_cli.plan.hardware import GIB
from ulysses_cli.plan.ledger.job import is_known, make_job
from ulysses_cli.plan.ledger.ledger import measure_ledger
from ulysses_cli.plan.levers import compute_num_mlp_tiles
from ulysses_cli.plan.models.layers import AttentionMixer, ConvolutionMixer
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.plan.resolved import RunPlan
from ulysses_cli.plan.rows.indexing import RowSizes
from ulysses_cli.train.attention.kernels.choice import (
    BrokenDeviceError,
    CommonPresence,
    KernelChoice,
    choose_kernel,
    join_choices,
    join_presence,
    read_presence,
)
from ulysses_cli.train.attention.kernels.trial import KernelSearch, KernelWorkload, LengthMix
from ulysses_cli.train.choosing import Choice, Outcome, find_version, try_in_child
from ulysses_cli.train.elementwise.choice import (
    ElementwiseChoice,
    Widths,
    choose_implementations,
    foresee_implementations,
)
from ulysses_cli.train.elementwise.formulas import NormKind
from ulysses_cli.train.experts import (
    DISTRIBUTIONS,
    ExpertsProbe,
    choose_experts,
    find_experts,
    find_missing_package,
)
from ulysses_cli.train.memory.tiling import adds_in_product
from ulysses_cli.train.model.adapters import add_adapters, make_quantization_config, quantize_layers, settle_layers
from ulysses_cli.train.model.loading import BuildError, ModelOptions, load_pretrained, start_from_random
from ulysses_cli.train.processes.consistency import gather_values
from ulysses_cli.train.processes.device import enter_device
from ulysses_cli.train.processes.groups import Groups
from ulysses_cli.train.recurrence.choice import (
    PackedProbe,
    choose_recurrence_kernel,
    describe_cost,
    find_missing,
    time_torch,
)
from ulysses_cli.train.recurrence.interface import (
    CONVOLUTION,
    UnknownLayersError,
    list_functions,
    list_recurrent_layers,
    serve_recurrent_layers,
)
from ulysses_cli.train.recurrence.rules import Kernel

_T = TypeVar("_T")


def choose_on_first(groups: Groups, choose: Callable[[], _T]) -> _T:
    """Collective over all ranks. Rank 0 chooses, and all get its choice or its error: none waits for a rank that has
    failed."""
    choice: _T | None = None
    error: Exception | None = None
    if groups.is_first:
        try:
            choice = choose()
        except (ValueError, BrokenDeviceError) as refusal:
            error = BuildError(str(refusal))
        except Exception as unforeseen:  # noqa: BLE001 - the other ranks wait for this one
            error = unforeseen
    told = None if error is None else (isinstance(error, BuildError), str(error) or type(error).__name__)
    choice, told = gather_values((choice, told), groups.host_group)[0]
    if error is not None:
        raise error
    if told is not None:
        is_refusal, text = told
        raise BuildError(text) if is_refusal else RuntimeError(f"rank 0: {text}")
    return cast(_T, choice)


# Distributions: those that have kernels, what they are built on, and the compiler of kernels that come as source code.
PACKAGES = ("flash-linear-attention", "fla-core", "mamba-ssm", "causal-conv1d", "triton")


@dataclass(frozen=True)
class PackagePresence:
    """Facts of one rank. `missing`: why each function or implementation has no kernel, or ''."""

    machine: str
    versions: Mapping[str, str]
    missing: Mapping[str, str]


def read_recurrence_presence(functions: Mapping[str, Callable[..., Any]]) -> PackagePresence:
    return PackagePresence(
        machine=socket.gethostname(),
        versions={name: find_version([name]) for name in PACKAGES},
        missing={name: find_missing(function) for name, function in functions.items()},
    )


def find_differences(ranks: Sequence[PackagePresence]) -> dict[str, str]:
    """Says for each function why not all ranks can run a kernel alike, or why none can. Says nothing of the others."""
    first = ranks[0]
    differing: dict[str, str] = {}
    for rank, other in enumerate(ranks):
        place = f"{other.machine} (rank {rank})"
        unlike = [name for name, version in first.versions.items() if other.versions[name] != version]
        for name, why in other.missing.items():
            if why:
                is_everywhere = all(each.missing[name] for each in ranks)
                differing.setdefault(name, first.missing[name] if is_everywhere else f"{why} on {place}")
            elif unlike:
                package = unlike[0]
                versions = f"{other.versions[package]} on {place} and {first.versions[package]} on {first.machine}"
                differing.setdefault(name, f"{package} has several versions: {versions}")
    return differing


Functions = Mapping[str, Callable[..., Any]]
Choose = Callable[[Functions, RunPlan, Groups, torch.device], dict[str, Choice[Kernel]]]


def serve_layers(
    model: Any,
    plan: RunPlan,
    groups: Groups,
    device: torch.device,
    choose: Choose,
    report: Callable[[str], None],
) -> None:
    """Collective over all ranks."""
    choices = choose(list_functions(model), plan, groups, device)
    for name, choice in choices.items():
        report(f"{name} {choice.name}: {choice.reason}")
    try:
        serve_recurrent_layers(model, groups.sp_axis, {name: choice.name for name, choice in choices.items()})
    except UnknownLayersError as error:
        raise BuildError(str(error)) from None
    if plan.recipe.zero_stage == 3:
        _gather_convolutions(model)


def choose_recurrences(
    functions: Functions, plan: RunPlan, groups: Groups, device: torch.device
) -> dict[str, Choice[Kernel]]:
    """Collective over all ranks. Ranks compare what they have. Rank 0 tries the kernels that all have alike, and all
    use its choice."""
    if device.type != "cuda":
        return dict.fromkeys(functions, Choice("torch", "the only one that runs on a CPU"))
    missing = find_differences(gather_values(read_recurrence_presence(functions), groups.host_group))

    def choose() -> dict[str, Choice[Kernel]]:
        return {
            name: _choose_recurrence(name, function, plan, device, missing.get(name, ""))
            for name, function in functions.items()
        }

    return choose_on_first(groups, choose)


def _choose_recurrence(
    name: str,
    function: Callable[..., Any],
    plan: RunPlan,
    device: torch.device,
    missing: str,
    run_trial: Callable[[Callable[[], Outcome]], Outcome] = try_in_child,
) -> Choice[Kernel]:
    """`missing`: why not all ranks have a kernel."""
    dtype = getattr(torch, plan.recipe.model.dtype)
    mixers = [mixer for layer in plan.shape.layers for mixer in layer.mixers if not isinstance(mixer, AttentionMixer)]
    if isinstance(mixers[0], ConvolutionMixer) and name != CONVOLUTION:
        return Choice("torch", "no layer calls it")
    probe = PackedProbe(name, function, mixers[0], device)

    def explain_cost() -> str:
        """Of all such layers, on one rank."""
        num_forwards = 1 if plan.levers.gradient_checkpointing is False else 2
        seconds = len(mixers) * time_torch(probe, plan.layout.ulysses_size, dtype, num_forwards)
        return describe_cost(
            seconds / plan.layout.sp_size if name == CONVOLUTION else seconds, plan.resolved.max_length
        )

    if missing:
        return Choice("torch", f"{explain_cost()}; {missing}")
    return choose_recurrence_kernel(probe, dtype, explain_cost, run_trial)


def choose_common_experts(experts: Any, plan: RunPlan, groups: Groups, device: torch.device) -> Choice[str]:
    """Collective over all ranks. Rank 0 tries the implementations that all have alike, on one block like `experts`; all
    use its choice."""
    recipe, levers = plan.recipe, plan.levers
    if recipe.lora is not None and recipe.lora.experts:
        return Choice("grouped_mm", "adapters run beside it")
    presence = PackagePresence(
        machine=socket.gethostname(),
        versions={name: find_version([name]) for name in DISTRIBUTIONS},
        missing={"sonicmoe": find_missing_package(device)},
    )
    missing = find_differences(gather_values(presence, groups.host_group))
    tokens = recipe.micro_step_tokens // plan.layout.sp_size
    if levers.tiled_mlp:
        tokens //= compute_num_mlp_tiles(tokens, plan.shape.hidden_size, is_large=levers.large_tiles)
    chosen, dtype = plan.shape.num_experts_per_token, getattr(torch, recipe.model.dtype)
    probe = ExpertsProbe(type(experts), experts.config, chosen, device, dtype, tokens)
    return choose_on_first(groups, lambda: choose_experts(recipe.model.experts_implementation, probe, missing))


def serve_experts(
    model: Any,
    plan: RunPlan,
    groups: Groups,
    device: torch.device,
    choose: ChooseExperts,
    report: Callable[[str], None],
) -> None:
    """Collective over all ranks. Layers read the name of their implementation from their config."""
    found = list(find_experts(model).values())
    if not found:
        return
    choice = choose(found[0], plan, groups, device)
    report(f"experts {choice.name}: {choice.reason}")
    for experts in found:
        experts.config._experts_implementation = choice.name


def _gather_convolutions(model: nn.Module) -> None:
    """A layer reads its convolution's weights without running the convolution's module, so ZeRO-3 would not gather
    them: it does with the layer."""
    from deepspeed.runtime.zero.partition_parameters import register_external_parameter

    for _, layer in list_recurrent_layers(model):
        for child in layer.children():
            if isinstance(child, nn.Conv1d):
                for weight in child.parameters():
                    register_external_parameter(layer, weight)


ChooseExperts = Callable[[Any, RunPlan, Groups, torch.device], Choice[str]]
NormWidths = Mapping[NormKind, Collection[int]]
ChooseImplementations = Callable[[RunPlan, Groups, torch.device, NormWidths], ElementwiseChoice]


def load_weights(recipe: Recipe, config: PretrainedConfig, attention: str, device: torch.device) -> Any:
    model = recipe.model
    dtype = getattr(torch, model.dtype)
    options = ModelOptions(config, dtype, attention, model.trust_remote_code)
    kind = recipe.lora.quantize_base if recipe.lora is not None else None
    if model.config is not None:
        made = start_from_random(options, recipe.run.seed, device)
        if kind is not None:
            quantize_layers(made, kind, device)
    else:
        if kind is not None:
            options = replace(options, quantization=make_quantization_config(kind, dtype), device=device)
        made = load_pretrained(options, os.path.expanduser(str(model.name_or_path)), model.revision)
    if kind is not None:
        settle_layers(made)
    return made


def choose_common_kernel(plan: RunPlan, groups: Groups, device: torch.device, mix: LengthMix) -> KernelChoice:
    """Collective over all ranks. Ranks compare what they have before any of them loads a kernel. Rank 0 tries and times
    kernels; all use its choice, since times differ from rank to rank. Kernels are timed on `mix`."""
    presence = join_presence(gather_values(read_presence(device), groups.host_group))
    return choose_on_first(groups, lambda: _choose_kernels(plan, groups, device, mix, presence))


def _choose_kernels(
    plan: RunPlan, groups: Groups, device: torch.device, mix: LengthMix, presence: CommonPresence
) -> KernelChoice:
    """A kernel for each width of heads."""
    shape, recipe = plan.shape, plan.recipe
    has_more_keys, sizes = groups.ring_axis.size > 1 or plan.resolved.shares_prompts, _measure_rows(plan)
    needs, choices = list_needs(shape, recipe.model.dtype, has_more_keys=has_more_keys, sizes=sizes), {}
    for need, mixers in needs.items():
        window = min(shape.windows) if need.has_window else None
        num_heads, num_kv_heads = (
            (mixers[0].num_heads, mixers[0].num_kv_heads) if mixers else (shape.num_heads, shape.num_kv_heads)
        )
        heads = max(1, num_heads // groups.ulysses_axis.size // plan.levers.head_chunks)
        kv_heads = max(1, heads * num_kv_heads // num_heads)
        search = KernelSearch(need, device, window, KernelWorkload(mix, heads, kv_heads))
        choices[need.head_dim] = choose_kernel(recipe.model.attn_implementation, search, presence, uses_cache=True)
    return join_choices(choices)


def _measure_rows(plan: RunPlan) -> RowSizes:
    """What decides the largest call of a kernel."""
    recipe, layout = plan.recipe, plan.layout
    return RowSizes(
        tokens=recipe.micro_step_tokens,
        sp_size=layout.sp_size,
        ring_size=layout.ring_size,
        head_chunks=plan.levers.head_chunks,
        tiled_mlp=plan.levers.tiled_mlp,
        is_quantized=False,
        num_rows=recipe.train.per_device_train_batch_size,
    )


def choose_common_implementations(
    plan: RunPlan, groups: Groups, device: torch.device, norms: NormWidths
) -> ElementwiseChoice:
    """Collective over all ranks: all use rank 0's choice, since times differ from rank to rank. `norms`: the formulas
    of the model's norms, with their widths."""
    recipe, shape = plan.recipe, plan.shape
    dtype = getattr(torch, recipe.model.dtype)
    if not recipe.model.fused_kernels:
        plain = foresee_implementations(dtype, is_fused=False, is_gpu=device.type == "cuda")
        return ElementwiseChoice(plain, "as the recipe says")
    inner = shape.intermediate_size or shape.hidden_size
    vocabulary = shape.vocab_size if plan.levers.tiled_loss else 0
    widths = Widths(shape.hidden_size, shape.num_heads, shape.head_dim, inner, norms, vocabulary)
    num_tokens = plan.resolved.local_tokens
    return choose_on_first(groups, lambda: choose_implementations(device, dtype, widths, num_tokens, uses_cache=True))


def describe_plain_norms(plan: RunPlan, choice: ElementwiseChoice, norms: Collection[NormKind]) -> str:
    """What it costs that norms run by transformers' own code where the ledger counted on fused ones, or ''. The
    installed transformers may have norms that no formula is recognised in."""
    if not is_known(plan.shape):
        return ""
    is_served = bool(norms) and all(choice.implementations[kind] != "transformers" for kind in norms)
    job = make_job(plan.recipe, plan.shape, plan.levers)
    plain = replace(job, fused_norms=False)
    if is_served:
        return ""
    planned, needed = (measure_ledger(each).gpu_peak_bytes for each in (job, plain))
    if planned == needed:
        return ""
    return (
        f"norms run by transformers' own code, which takes {(needed - planned) / GIB:.2f} GiB more at the peak than "
        f"the plan counts: {needed / GIB:.2f} GiB in all; model.fused_kernels=false plans with it"
    )


def describe_sums(plan: RunPlan, device: torch.device) -> str:
    """What it costs that this GPU does not add gradients of tiles inside the product, as plans count, or ''."""
    recipe, levers = plan.recipe, plan.levers
    is_tiled = (levers.tiled_mlp or levers.tiled_loss) and recipe.lora is None
    if device.type != "cuda" or not is_tiled or adds_in_product(device, getattr(torch, recipe.model.dtype)):
        return ""
    return (
        "gradients of tiles are added to their sums by a pass of its own, which reads and writes 12 bytes for each "
        "weight and tile: this torch has no product that adds to float32 here, and the plan counts on one"
    )


def make_thread(device: torch.device) -> Executor:
    """Runs one step of the optimizer at a time beside the backward on this device."""
    return ThreadPoolExecutor(1, "early-steps", initializer=enter_device, initargs=(device,))


@dataclass(frozen=True)
class Parts:
    load_weights: Callable[[Recipe, PretrainedConfig, str, torch.device], Any] = load_weights
    add_adapters: Callable[[Recipe, ModelShape, Any], Any] = add_adapters
    choose_kernel: Callable[[RunPlan, Groups, torch.device, LengthMix], KernelChoice] = choose_common_kernel
    choose_implementations: ChooseImplementations = choose_common_implementations
    choose_recurrences: Choose = choose_recurrences
    choose_experts: ChooseExperts = choose_common_experts
    make_executor: Callable[[torch.device], Executor] = make_thread


REAL_PARTS = Parts()
