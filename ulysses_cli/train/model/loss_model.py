"""The module that DeepSpeed wraps: computes the objective on a slice of a row by the model's own decoder and a given
loss, or the logits of a few tokens, for generation.

The rule that a family applies to its logits is checked against the loaded model on a few tokens. The function of
train.token_loss must follow from the cross-entropy of one token alone. The memory levers of a plan change how parts
of the model run, not what they compute."""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PretrainedConfig

from ulysses_cli.plan.levers import compute_loss_tile_tokens, compute_num_mlp_tiles, swaps_activations
from ulysses_cli.plan.models.shape import compute_logits_divisor
from ulysses_cli.plan.resolved import RunPlan
from ulysses_cli.plan.rows.ring import Ring, deal_row
from ulysses_cli.train.attention.documents import Documents, make_documents
from ulysses_cli.train.clock import part_of_step, watch_backward
from ulysses_cli.train.elementwise.operators import Implementation
from ulysses_cli.train.experts import serve_adapted_experts
from ulysses_cli.train.loss import HeadRule, Loss, NextToken, Objective, Places, PlainLoss, TokenLoss, apply_rule
from ulysses_cli.train.memory.checkpointing import Mode, ResultStorage, checkpoint_layers, list_layers
from ulysses_cli.train.memory.offload import DiskFile, Offloader
from ulysses_cli.train.memory.tiled_loss import make_tiled_loss
from ulysses_cli.train.memory.tiled_mlp import (
    ShardedLinear,
    need_gradient,
    run_in_pieces,
    save_before_last_products,
    tile_mlps,
)
from ulysses_cli.train.memory.tiling import tile_norms
from ulysses_cli.train.model.loading import BuildError
from ulysses_cli.train.processes.consistency import gather_values
from ulysses_cli.train.processes.device import enter_device
from ulysses_cli.train.processes.groups import Groups

PROBE_TOKENS = 8
HEAD_TOLERANCE = 0.02  # bfloat16 keeps 8 bits; a lost scale or softcap costs far more


def read_head_rule(config: PretrainedConfig, z_loss_weight: float, token_loss: TokenLoss | None = None) -> HeadRule:
    """The rule of known families. check_head detects a model that does anything else."""
    softcap, scaling = getattr(config, "final_logit_softcapping", None), getattr(config, "logits_scaling", None)
    divisor = compute_logits_divisor(config.model_type, scaling, getattr(config, "logit_scale", None))
    return HeadRule(softcap, divisor, z_loss_weight, token_loss)


@torch.no_grad()
def check_head(model: Any, rule: HeadRule, groups: Groups, device: torch.device) -> None:
    """Collective over all ranks. The loss computes logits from hidden states; they are compared with the model's own
    logits on a few tokens."""
    axis, ring = groups.sp_axis, Ring(groups.ring_axis.size, windows=((1, 1),))  # equal work leaves tokens in order
    model.eval()
    lengths = (PROBE_TOKENS * axis.size,)
    # Spread over the vocabulary: the first ids are special tokens, whose rows are hardly trained.
    ids = torch.arange(1, PROBE_TOKENS + 1, device=device)[None] * model.config.vocab_size // (PROBE_TOKENS + 1)
    inputs = {
        "input_ids": ids,
        "position_ids": torch.arange(PROBE_TOKENS, device=device)[None] + axis.rank * PROBE_TOKENS,
        "documents": make_documents(lengths, device, order=deal_row(lengths, ring)),
        "use_cache": False,
    }
    expected = model(**inputs).logits.float()
    hidden = model.get_decoder()(**inputs).last_hidden_state
    logits = apply_rule(model.get_output_embeddings()(hidden).float(), rule)
    model.train()
    error = ((logits - expected).norm() / expected.norm()).item() if dist.get_backend() != "fake" else 0.0
    worst = max(gather_values(error, groups.host_group)) if dist.get_backend() != "fake" else error
    if math.isnan(worst):
        raise BuildError("the model's logits are not numbers: its weights hold NaN or infinity")
    if not worst <= HEAD_TOLERANCE:
        raise BuildError(
            f"{model.config.model_type} does more to its logits than head and softcap: they differ by {worst:.2g}, "
            "and so would its loss"
        )


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
        raise BuildError(f"train.token_loss: {reference} cannot be imported: {_describe_loss(error)}") from error
    return module


def _check(reference: str, function: TokenLoss) -> None:
    """Runs the function on a few losses: together, and one by one."""
    losses = torch.tensor(PROBE, dtype=torch.float64, requires_grad=True)
    try:
        results = function(losses)
        alone = [function(loss) for loss in losses.detach().split(1)]
    except Exception as error:  # the user's code may raise anything
        raise BuildError(f"train.token_loss: {reference} fails on losses [N]: {_describe_loss(error)}") from error
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


def _describe_loss(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"


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
    loss_implementation: Implementation,
    swap_folder: Path | None = None,
) -> Loss:
    """Changes the model in place and returns the loss, which is tiled where the plan says so. `loss_implementation`: of
    a tile's losses. `swap_folder`: on a disk, for what layers save."""
    from deepspeed.runtime.zero import linear
    from deepspeed.utils import set_z3_leaf_module

    levers = plan.levers
    gather_whole: Callable[[nn.Module], None] | None = None
    if plan.recipe.zero_stage == 3:
        gather_whole = partial(set_z3_leaf_module, flag=True)
    serve_adapted_experts(model, gather_whole)
    head = model.get_output_embeddings()
    tokens = plan.recipe.micro_step_tokens // plan.layout.sp_size
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
            checkpoint_layers(model, mode, make_storage, levers.saved_layers)
            if not levers.tiled_mlp and plan.recipe.zero_stage == 3:
                sharded = ShardedLinear(linear.zero3_linear_wrap, linear.LinearFunctionForZeroStage3)
                save_before_last_products(model, sharded)
    except ValueError as error:
        raise BuildError(f"{error}: turn memory.tiled_mlp or memory.gradient_checkpointing off") from error
    if levers.leaf_layers and gather_whole is not None:
        for layer in list_layers(model):
            gather_whole(layer)
            layer.register_forward_pre_hook(need_gradient)
    loss: Loss = PlainLoss(head, rule)
    if levers.tiled_loss:
        vocabulary, hidden = plan.shape.vocab_size, plan.shape.hidden_size
        tile = compute_loss_tile_tokens(tokens, vocabulary, hidden, is_large=levers.large_tiles)
        loss = make_tiled_loss(head, rule, tile, gather_whole, loss_implementation)
    return loss


class LossModel(nn.Module):
    """Takes the tokens of a slice, the places of its targets and what the objective has loaded (`answers`), returns the
    objective's sums. The decoder is the
    model's own; the loss applies the head."""

    def __init__(self, model: nn.Module, loss: Loss, objective: Objective | None = None) -> None:
        super().__init__()
        self.model = model
        self.loss = loss  # holds the head, which stays registered under the model alone
        self.objective = objective or NextToken()

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        labels: Tensor | None = None,
        documents: Documents | None = None,
        per_token: bool = False,
        is_measured: bool = False,
        generation: Any = None,
        wanted: tuple[Tensor, Tensor] | None = None,
        places: Places | None = None,
        answers: Any = None,
    ) -> Tensor:
        if wanted is not None:
            return self.compute_logits(input_ids, positions, wanted, generation, documents)
        if not per_token:
            self.objective.begin(answers)
        output: Any = self.model.get_decoder()(
            input_ids=input_ids, position_ids=positions, documents=documents, use_cache=False
        )
        assert labels is not None, "a loss has labels"
        hidden = output.last_hidden_state
        with part_of_step("head_loss"):
            if per_token:
                return self.loss.per_token(hidden, labels, places, is_measured=is_measured)
            sums = self.objective.compute(self.loss, hidden, labels, places, answers)
        watch_backward("head_loss", sums, hidden)
        return sums

    def compute_logits(
        self,
        input_ids: Tensor,
        positions: Tensor,
        wanted: tuple[Tensor, Tensor],
        generation: Any,
        documents: Documents | None,
    ) -> Tensor:
        """Returns logits [N, vocabulary] in float32 or better, of the tokens at `wanted`. The head runs even where none
        is wanted: under ZeRO-3 all ranks gather its weight."""
        output: Any = self.model.get_decoder()(
            input_ids=input_ids, position_ids=positions, documents=documents, generation=generation, use_cache=False
        )
        logits = self.model.get_output_embeddings()(output.last_hidden_state[wanted])
        return apply_rule(logits.to(torch.promote_types(logits.dtype, torch.float32)), self.loss.rule)
