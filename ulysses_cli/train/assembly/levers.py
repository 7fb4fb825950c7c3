"""Applies the memory levers of a plan to a loaded model. They change how its parts run, not what they compute."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ulysses_cli.plan.levers import swaps_activations
from ulysses_cli.plan.resolved import RunPlan
from ulysses_cli.plan.tiles import compute_loss_tile_tokens, compute_num_mlp_tiles
from ulysses_cli.train.assembly.loading import BuildError
from ulysses_cli.train.elementwise.operators import Way
from ulysses_cli.train.loss import HeadRule, Loss, PlainLoss
from ulysses_cli.train.memory.checkpointing import Mode, checkpoint_layers
from ulysses_cli.train.memory.disk import DiskFile
from ulysses_cli.train.memory.last_linear import ShardedLinear, save_before_last_products
from ulysses_cli.train.memory.offload import Offloader
from ulysses_cli.train.memory.pieces import run_in_pieces
from ulysses_cli.train.memory.saved_results import ResultStorage
from ulysses_cli.train.memory.tiled_loss import make_tiled_loss
from ulysses_cli.train.memory.tiled_mlp import tile_mlps
from ulysses_cli.train.memory.tiled_norm import tile_norms
from ulysses_cli.train.processes.device import enter_device


def open_disk(device: torch.device, folder: Path | None) -> DiskFile:
    """For what layers save on this device. Raises BuildError where nobody has made a folder for it."""
    if folder is None:
        raise BuildError("what layers save goes to a disk, and there is no folder for it: set memory.nvme_path")
    return DiskFile(folder, partial(enter_device, device))


def apply_levers(
    model: Any,
    plan: RunPlan,
    rule: HeadRule,
    device: torch.device,
    swap_folder: Path | None = None,
    loss_way: Way = "blocks",
) -> Loss:
    """Changes the model in place and returns the loss, which is tiled where the plan says so. `swap_folder`: on a
    disk, for what layers save. `loss_way`: how a tile's losses are computed."""
    from deepspeed.runtime.zero import linear
    from deepspeed.utils import set_z3_leaf_module

    levers = plan.levers
    gather_whole: Callable[[nn.Module], None] | None = None
    if plan.recipe.parallel.zero_stage == 3:
        gather_whole = partial(set_z3_leaf_module, flag=True)
    head = model.get_output_embeddings()
    tokens = plan.recipe.train.per_device_train_batch_size * plan.resolved.local_tokens
    try:
        if levers.tiled_mlp:
            count_tiles = partial(
                compute_num_mlp_tiles, hidden_size=plan.shape.hidden_size, is_large=levers.large_tiles
            )
            tile_mlps(model, count_tiles, gather_whole)
            tile_norms(model, count_tiles)
        dtype: torch.dtype = getattr(torch, plan.recipe.model.dtype)
        run_in_pieces(model, tokens, dtype, in_tiles=[head] if levers.tiled_loss else [])
        if levers.gradient_checkpointing:
            make_storage: Callable[[int], ResultStorage] | None = None
            if levers.offloaded_layers:
                disk = open_disk(device, swap_folder) if swaps_activations(levers) else None
                make_storage = Offloader(device, levers.offloaded_layers, disk).make_storage
            mode: Mode = "full" if levers.gradient_checkpointing == "full" else "save_attention"
            checkpoint_layers(model, mode, make_storage)
            if not levers.tiled_mlp and plan.recipe.parallel.zero_stage == 3:
                sharded = ShardedLinear(linear.zero3_linear_wrap, linear.LinearFunctionForZeroStage3)
                save_before_last_products(model, sharded)
    except ValueError as error:
        raise BuildError(f"{error}: turn memory.tiled_mlp or memory.gradient_checkpointing off") from error
    loss: Loss = PlainLoss(head, rule)
    if levers.tiled_loss:
        vocabulary, hidden = plan.shape.vocab_size, plan.shape.hidden_size
        tile = compute_loss_tile_tokens(tokens, vocabulary, hidden, is_large=levers.large_tiles)
        loss = make_tiled_loss(head, rule, tile, gather_whole, loss_way)
    return loss
