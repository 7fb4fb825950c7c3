"""Makes a loaded model's convolution and recurrent layers exact on split rows, under every ZeRO stage."""

from __future__ import annotations

from typing import Any

from torch import nn

from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.train.assembly.loading import BuildError
from ulysses_cli.train.processes.sequence_axis import SequenceAxis
from ulysses_cli.train.recurrence.interface import UnknownLayersError, list_recurrent_layers, serve_recurrent_layers


def serve_layers(model: Any, recipe: Recipe, axis: SequenceAxis) -> None:
    try:
        serve_recurrent_layers(model, axis)
    except UnknownLayersError as error:
        raise BuildError(str(error)) from None
    if recipe.parallel.zero_stage == 3:
        _gather_convolutions(model)


def _gather_convolutions(model: nn.Module) -> None:
    """A layer reads its convolution's weights without running the convolution's module, so ZeRO-3 would not gather
    them: it does with the layer."""
    from deepspeed.runtime.zero.partition_parameters import register_external_parameter

    for _, layer in list_recurrent_layers(model):
        for child in layer.children():
            if isinstance(child, nn.Conv1d):
                for weight in child.parameters():
                    register_external_parameter(layer, weight)
