"""Loads the function of train.token_loss and checks that it can be applied to any part of a row: the loss of a token
must follow from the cross-entropy of this token alone."""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path
from types import ModuleType

import torch

from ulysses_cli.train.assembly.loading import BuildError
from ulysses_cli.train.loss import TokenLoss

PROBE = (1e-3, 0.02, 0.3, 0.7, 1.0, 1.9, 4.0, 11.0)
TOLERANCE = 1e-9  # in float64


def load_token_loss(reference: str | None) -> TokenLoss | None:
    """Returns the function that a recipe names, or None where it names none."""
    if reference is None:
        return None
    place, _, name = reference.rpartition(":")
    function = getattr(_import(reference, place), name, None)
    if not callable(function):
        raise BuildError(f"train.token_loss: {place} has no function {name}")
    _check(reference, function)
    loss: TokenLoss = function
    return loss


def _import(reference: str, place: str) -> ModuleType:
    try:
        if not place.endswith(".py"):
            return importlib.import_module(place)
        file = Path(os.path.expanduser(place))
        spec = importlib.util.spec_from_file_location(file.stem, file)
        if spec is None or spec.loader is None:
            raise ImportError(f"{file} is no Python file")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except Exception as error:  # the user's code may raise anything
        raise BuildError(f"train.token_loss: {reference} cannot be imported: {_describe(error)}") from error
    return module


def _check(reference: str, function: TokenLoss) -> None:
    """Runs the function on a few losses: together, and one by one."""
    losses = torch.tensor(PROBE, dtype=torch.float64, requires_grad=True)
    try:
        results = function(losses)
        alone = [function(loss) for loss in losses.detach().split(1)]
    except Exception as error:  # the user's code may raise anything
        raise BuildError(f"train.token_loss: {reference} fails on losses [N]: {_describe(error)}") from error
    if not isinstance(results, torch.Tensor) or results.shape != losses.shape or results.dtype != losses.dtype:
        raise BuildError(f"train.token_loss: {reference} must return a loss for each of its {len(PROBE)} tokens, [N]")
    if not results.requires_grad:
        raise BuildError(f"train.token_loss: {reference} returns losses without gradients")
    (slopes,) = torch.autograd.grad(results.sum(), losses)
    if not torch.isfinite(results).all() or not torch.isfinite(slopes).all():
        raise BuildError(
            f"train.token_loss: {reference} returns NaN or infinity for losses from {PROBE[0]} to {PROBE[-1]}"
        )
    if (results.detach() - torch.cat(alone)).abs().max() > TOLERANCE * max(1.0, results.detach().abs().max().item()):
        raise BuildError(
            f"train.token_loss: {reference} mixes tokens: a token's loss must follow from its own cross-entropy alone, "
            "because a row is split over ranks and into tiles"
        )


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"
