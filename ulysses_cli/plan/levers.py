"""What trades time or host memory for GPU memory, with every `auto` settled. How they are chosen: lever_choice.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Offload = Literal["none", "cpu", "nvme"]


@dataclass(frozen=True)
class Levers:
    """Settled values of the recipe's memory section. None of them changes what is computed."""

    gradient_checkpointing: bool | Literal["full"] = True
    head_chunks: int = 1
    activation_offloading: bool = False
    tiled_mlp: bool = False
    tiled_loss: bool = False
    offload_optimizer: Offload = "none"
    offload_param: Offload = "none"
