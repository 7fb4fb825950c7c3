"""Weights, adapters and attention kernel of a model: the parts that depend on files, values or a real device. They are
arguments of the assembler, so that a trace can use others.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PretrainedConfig

from ulysses_cli.plan.attention import list_needs
from ulysses_cli.plan.hardware import GIB
from ulysses_cli.plan.ledger.job import is_known, make_job
from ulysses_cli.plan.ledger.layer import is_one_kernel
from ulysses_cli.plan.ledger.ledger import compute_ledger
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.plan.resolved import RunPlan
from ulysses_cli.plan.rows.indexing import RowSizes
from ulysses_cli.train.assembly.adapters import add_adapters
from ulysses_cli.train.assembly.first_rank import choose_on_first
from ulysses_cli.train.assembly.loading import ModelOptions, load_pretrained, start_from_random
from ulysses_cli.train.assembly.quantized_base import make_quantization_config, quantize_layers, settle_layers
from ulysses_cli.train.assembly.recurrent_layers import Choose, choose_recurrences
from ulysses_cli.train.attention.kernels.choice import KernelChoice, KernelSearch, choose_kernel, join_choices
from ulysses_cli.train.attention.kernels.presence import CommonPresence, join_presence, read_presence
from ulysses_cli.train.attention.kernels.workload import KernelWorkload, LengthMix
from ulysses_cli.train.elementwise.choice import NO_WAYS, ElementwiseChoice, Widths, choose_ways
from ulysses_cli.train.elementwise.formulas import NormKind
from ulysses_cli.train.memory.tiling import adds_in_product
from ulysses_cli.train.processes.consistency import gather_values
from ulysses_cli.train.processes.device import enter_device
from ulysses_cli.train.processes.groups import Groups

NormWidths = Mapping[NormKind, Collection[int]]
ChooseWays = Callable[[RunPlan, Groups, torch.device, NormWidths], ElementwiseChoice]


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
        search = KernelSearch(need, device, window, KernelWorkload(mix, heads, kv_heads), presence)
        choices[need.head_dim] = choose_kernel(recipe.model.attn_implementation, search, uses_cache=True)
    return join_choices(choices)


def _measure_rows(plan: RunPlan) -> RowSizes:
    """What decides the largest call of a kernel."""
    recipe, layout = plan.recipe, plan.layout
    num_rows = recipe.train.per_device_train_batch_size
    return RowSizes(
        tokens=num_rows * recipe.data.max_length,
        sp_size=layout.sp_size,
        ring_size=layout.ring_size,
        head_chunks=plan.levers.head_chunks,
        tiled_mlp=plan.levers.tiled_mlp,
        is_quantized=False,
        num_rows=num_rows,
    )


def choose_common_ways(plan: RunPlan, groups: Groups, device: torch.device, norms: NormWidths) -> ElementwiseChoice:
    """Collective over all ranks: all use rank 0's choice, since times differ from rank to rank. `norms`: the formulas
    of the model's norms, with their widths."""
    recipe, shape = plan.recipe, plan.shape
    if not recipe.model.fused_kernels:
        return ElementwiseChoice(NO_WAYS, "as the recipe says")
    inner = shape.intermediate_size or shape.hidden_size
    vocabulary = shape.vocab_size if plan.levers.tiled_loss else 0
    widths = Widths(shape.hidden_size, shape.num_heads, shape.head_dim, inner, norms, vocabulary)
    dtype, num_tokens = getattr(torch, recipe.model.dtype), plan.resolved.local_tokens
    return choose_on_first(groups, lambda: choose_ways(device, dtype, widths, num_tokens, uses_cache=True))


def describe_plain_norms(plan: RunPlan, choice: ElementwiseChoice, norms: Collection[NormKind]) -> str:
    """What it costs that norms run by transformers' own code where the ledger counted on fused ones, or ''. The
    installed transformers may have norms that no formula is recognised in."""
    if not is_known(plan.shape):
        return ""
    is_served = bool(norms) and all(choice.ways[kind] != "transformers" for kind in norms)
    job = make_job(plan.recipe, plan.shape, plan.levers)
    plain = replace(job, fused_norms=False)
    if is_served or is_one_kernel(job) == is_one_kernel(plain):
        return ""
    planned, needed = (compute_ledger(each).gpu_peak_bytes for each in (job, plain))
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
    add_adapters: Callable[[Recipe, Any], Any] = add_adapters
    choose_kernel: Callable[[RunPlan, Groups, torch.device, LengthMix], KernelChoice] = choose_common_kernel
    choose_ways: ChooseWays = choose_common_ways
    choose_recurrences: Choose = choose_recurrences
    make_executor: Callable[[torch.device], Executor] = make_thread


REAL_PARTS = Parts()
