"""Levers: settings that trade time or host memory for GPU memory, with every `auto` settled. planner/lever_choice.py
chooses them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ulysses_cli.plan.models.shape import ModelShape

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
    from the first layer, whose saved tensors are needed last."""

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
