"""Levers: settings that trade time or host memory for GPU memory, with every `auto` settled; and how many tokens a
tile of the MLP or of the loss has. planner/lever_choice.py chooses levers. The ledger and the code that runs both
read the sizes of tiles here. They follow only from lengths that all ranks share, never from one rank's data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ulysses_cli.plan.models.shape import ModelShape

LAST_LINEARS = ("down_proj", "fc2", "c_proj", "w2", "output_linear")  # by which a dense MLP is recognised
# A layer that has one of these after its MLP needs the MLP's output again in the backward.
NORMS_AFTER = ("post_feedforward_layernorm", "post_mlp_layernorm", "post_norm2", "post_ffn_norm")

Offload = Literal["none", "cpu", "nvme"]
Device = Literal["cpu", "nvme"]
SPELLED = {
    "head_chunks": "attention_head_chunks",
    "offloaded_layers": "activation_offloading",
    "offloaded_to": "activation_offload_device",
    "early_groups": "overlap_optimizer",
}
ALL_GROUPS = 10_000  # more than any rank has


@dataclass(frozen=True)
class Levers:
    """Settled values of the recipe's memory section. None of them changes what is computed. `offloaded_layers` counts
    from the first layer, whose saved tensors are needed last, and `saved_layers` from the last one: these save all that
    they compute, where the others are computed again."""

    gradient_checkpointing: bool | Literal["full"] = True
    head_chunks: int = 1
    offloaded_layers: int = 0
    tiled_mlp: bool = False
    tiled_loss: bool = False
    offload_optimizer: Offload = "none"
    offload_param: Offload = "none"
    large_tiles: bool = False  # of tiled_mlp and tiled_loss; spends memory and saves time
    early_groups: int = 0  # of the optimizer on the host, from the last group; spends host memory and saves time
    offloaded_to: Device = "cpu"  # where what offloaded layers save waits
    leaf_layers: bool = False  # a layer's weights are gathered at once; spends memory and saves the host's time
    saved_layers: int = 0  # spends memory and saves time
    overlap_exchange: bool = False  # a chunk of heads travels while another attends; spends memory and saves time


def explain_no_leaves(shape: ModelShape, zero_stage: int, offload_param: Offload | str) -> str:
    """Why layers cannot be leaf modules, or ''."""
    if zero_stage < 3:
        return f"ZeRO stage {zero_stage} gathers no weights"
    if offload_param == "nvme":
        return "weights on a disk are read in fewer buffers"
    shares = shape.family is not None and shape.family.shares_blocks
    if shares or shape.has_per_layer_embeddings or any(mixer.shares_kv for mixer in shape.attentions):
        return "layers of this model read weights or keys of others"
    return ""


def explain_no_overlap(shape: ModelShape, ulysses_size: int) -> str:
    """Why no chunk of heads can travel while another attends, or ''."""
    if ulysses_size == 1 or not shape.attentions:
        return "no heads of attention are exchanged"
    return "a rank has one head" if shape.common_heads == ulysses_size else ""


def count_most_offloaded(shape: ModelShape) -> int:
    """All but the last two layers, whose saved tensors are still on the GPU when the backward begins."""
    return max(1, shape.num_layers - 2)


def list_on_disk(levers: Levers) -> list[str]:
    """The levers by which a run keeps something below memory.nvme_path."""
    names = [name for name in ("offload_optimizer", "offload_param") if getattr(levers, name) == "nvme"]
    return [*names, "offloaded_to"] if swaps_activations(levers) else names


def uses_disk(levers: Levers) -> bool:
    return bool(list_on_disk(levers))


def swaps_activations(levers: Levers) -> bool:
    return levers.offloaded_to == "nvme" and levers.offloaded_layers > 0


def get_key(lever: str) -> str:
    """Its name in a recipe's memory section."""
    return SPELLED.get(lever, lever)


LOSS_TILE_BYTES = 256 << 20  # float32 logits of one tile
LOSS_TILE_MULTIPLE = 128
# Large tiles (Levers.large_tiles). A weight's gradient is one product per tile, which reads and writes a float32 sum, 8
# bytes for 2 T operations: with T of 2,048 an H100 or H200 computes for longer than it moves bytes; 512 are too few.
LARGE_TILE, LARGE_TILE_OF_SMALL = 2048, 4096
SMALL_HIDDEN = 4096  # models of fewer hidden numbers have smaller products, of which more tokens fill a GPU
# What layers save goes to a disk in chunks, each by one of these threads: drives reach their rate with a few large
# transfers at a time.
SWAP_CHUNK_BYTES, SWAP_THREADS = 64 << 20, 4


def compute_num_mlp_tiles(local_tokens: int, hidden_size: int, *, is_large: bool = False) -> int:
    """Tiles of about hidden_size tokens: large enough for full speed, since each matrix then sees as many tokens as
    it has columns (the rule of ALST, arXiv 2506.13996, section 3.3.2). At least two: one tile would be the plain MLP,
    which saves its whole inside, and a slightly longer row in two tiles would then take less memory."""
    tokens = max(hidden_size, _find_floor(hidden_size)) if is_large else hidden_size
    return max(2, math.ceil(local_tokens / tokens))


def compute_loss_tile_tokens(local_tokens: int, vocab_size: int, hidden_size: int, *, is_large: bool = False) -> int:
    """Tokens whose float32 logits take at most LOSS_TILE_BYTES, for rows of any length; more in large tiles."""
    tokens = LOSS_TILE_BYTES // (4 * vocab_size) // LOSS_TILE_MULTIPLE * LOSS_TILE_MULTIPLE
    floor = _find_floor(hidden_size) if is_large else LOSS_TILE_MULTIPLE
    return min(local_tokens, max(floor, tokens))


def _find_floor(hidden_size: int) -> int:
    return LARGE_TILE if hidden_size >= SMALL_HIDDEN else LARGE_TILE_OF_SMALL
