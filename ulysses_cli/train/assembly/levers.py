"""Applies the memory levers of a plan to a loaded model. They change how its parts run, not what they compute."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from ulysses_cli.plan.resolved import RunPlan
from ulysses_cli.plan.tiles import compute_loss_tile_tokens, compute_num_mlp_tiles
from ulysses_cli.train.assembly.loading import BuildError
from ulysses_cli.train.loss import HeadRule, Loss, PlainLoss
from ulysses_cli.train.memory.checkpointing import Mode, checkpoint_layers
from ulysses_cli.train.memory.offload import Offloader
from ulysses_cli.train.memory.tiled_loss import make_tiled_loss
from ulysses_cli.train.memory.tiled_mlp import tile_mlps
from ulysses_cli.train.memory.tiled_norm import tile_norms


def apply_levers(model: Any, plan: RunPlan, rule: HeadRule, device: torch.device) -> Loss:
    """Changes the model in place and returns the loss, which is tiled where the plan says so."""
    from deepspeed.utils import set_z3_leaf_module

    levers = plan.levers
    gather_whole: Callable[[nn.Module], None] | None = None
    if plan.recipe.parallel.zero_stage == 3:
        gather_whole = partial(set_z3_leaf_module, flag=True)
    try:
        if levers.tiled_mlp:
            count_tiles = partial(
                compute_num_mlp_tiles, hidden_size=plan.shape.hidden_size, is_large=levers.large_tiles
            )
            tile_mlps(model, count_tiles, gather_whole)
            tile_norms(model, count_tiles)
        if levers.gradient_checkpointing:
            make_storage = Offloader(device, levers.offloaded_layers).make_storage if levers.offloaded_layers else None
            mode: Mode = "full" if levers.gradient_checkpointing == "full" else "save_attention"
            checkpoint_layers(model, mode, make_storage)
    except ValueError as error:
        raise BuildError(f"{error}: turn memory.tiled_mlp or memory.gradient_checkpointing off") from error
    head = model.get_output_embeddings()
    if not levers.tiled_loss:
        return PlainLoss(head, rule)
    tokens = plan.recipe.train.per_device_train_batch_size * plan.resolved.local_tokens
    tile = compute_loss_tile_tokens(tokens, plan.shape.vocab_size, plan.shape.hidden_size, is_large=levers.large_tiles)
    return make_tiled_loss(head, rule, tile, gather_whole)
