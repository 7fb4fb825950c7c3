"""Makes a loaded model's convolution and recurrent layers exact on split rows, under every ZeRO stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ulysses_cli.plan.models.layers import AttentionMixer, ConvolutionMixer
from ulysses_cli.plan.resolved import RunPlan
from ulysses_cli.train.assembly.first_rank import choose_on_first
from ulysses_cli.train.assembly.loading import BuildError
from ulysses_cli.train.processes.consistency import gather_values
from ulysses_cli.train.processes.groups import Groups
from ulysses_cli.train.recurrence.interface import (
    CONVOLUTION,
    UnknownLayersError,
    list_functions,
    list_recurrent_layers,
    serve_recurrent_layers,
)
from ulysses_cli.train.recurrence.kernels import (
    FAST,
    Kernel,
    RecurrenceChoice,
    choose_recurrence_kernel,
    describe_cost,
    pick_function,
)
from ulysses_cli.train.recurrence.presence import find_differences, read_recurrence_presence
from ulysses_cli.train.recurrence.probes import time_convolution, time_rule
from ulysses_cli.train.recurrence.trial_process import find_obstacle_in_process

Functions = Mapping[str, Callable[..., Any]]
Choose = Callable[[Functions, RunPlan, Groups, torch.device], dict[str, RecurrenceChoice]]


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
        report(f"{name} {choice.kernel}: {choice.reason}")
    try:
        serve_recurrent_layers(model, groups.sp_axis, {name: choice.kernel for name, choice in choices.items()})
    except UnknownLayersError as error:
        raise BuildError(str(error)) from None
    if plan.recipe.parallel.zero_stage == 3:
        _gather_convolutions(model)


def choose_recurrences(
    functions: Functions, plan: RunPlan, groups: Groups, device: torch.device
) -> dict[str, RecurrenceChoice]:
    """Collective over all ranks. Ranks compare what they have. Rank 0 tries the kernels that all have alike, and all
    use its choice."""
    if device.type != "cuda":
        return dict.fromkeys(functions, RecurrenceChoice("torch", "the only one that runs on a CPU"))
    missing = find_differences(gather_values(read_recurrence_presence(functions), groups.host_group))

    def choose() -> dict[str, RecurrenceChoice]:
        return {
            name: _choose_kernel(name, function, plan, device, missing.get(name, ""))
            for name, function in functions.items()
        }

    return choose_on_first(groups, choose)


def _choose_kernel(
    name: str, function: Callable[..., Any], plan: RunPlan, device: torch.device, missing: str
) -> RecurrenceChoice:
    """`missing`: why not all ranks have a kernel."""
    dtype = getattr(torch, plan.recipe.model.dtype)
    mixers = [mixer for layer in plan.shape.layers for mixer in layer.mixers if not isinstance(mixer, AttentionMixer)]
    recurrent, num_forwards = mixers[0], 1 + (plan.levers.gradient_checkpointing is not False)
    of_convolution, num_ranks = name == CONVOLUTION, plan.layout.ulysses_size

    def explain_cost() -> str:
        """Of all such layers, on one rank."""
        bare = pick_function(function, "torch")
        if of_convolution or isinstance(recurrent, ConvolutionMixer):
            seconds = time_convolution(bare, recurrent, device, dtype, num_forwards) / plan.layout.sp_size
        else:
            seconds = time_rule(bare, recurrent, num_ranks, device, dtype, num_forwards)
        return describe_cost(len(mixers) * seconds, plan.resolved.row_tokens)

    if isinstance(recurrent, ConvolutionMixer) and not of_convolution:
        return RecurrenceChoice("torch", "no layer calls it")
    if missing:
        return RecurrenceChoice("torch", f"{explain_cost()}; {missing}")

    def try_kernel(kernel: Kernel) -> str:
        return find_obstacle_in_process(name, function, recurrent, kernel, device, dtype)

    return choose_recurrence_kernel(try_kernel, ["by document"] if of_convolution else FAST, explain_cost)


def _gather_convolutions(model: nn.Module) -> None:
    """A layer reads its convolution's weights without running the convolution's module, so ZeRO-3 would not gather
    them: it does with the layer."""
    from deepspeed.runtime.zero.partition_parameters import register_external_parameter

    for _, layer in list_recurrent_layers(model):
        for child in layer.children():
            if isinstance(child, nn.Conv1d):
                for weight in child.parameters():
                    register_external_parameter(layer, weight)
