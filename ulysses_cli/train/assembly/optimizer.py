"""Makes the optimizer and the learning rate schedule of a recipe."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ulysses_cli.plan.recipe.recipe import Train
from ulysses_cli.plan.schedule import make_share
from ulysses_cli.train.optimizer.adamw_8bit import AdamW8bit
from ulysses_cli.train.optimizer.shards import get_shape
from ulysses_cli.train.optimizer.states import reset_beta_powers


def make_optimizer(train: Train, trained: list[tuple[str, nn.Parameter]], offload: str) -> torch.optim.Optimizer:
    """Weight decay applies to matrices alone. Norms and sinks are vectors; experts' biases are excluded by name."""
    decayed = {name for name, p in trained if len(get_shape(p)) >= 2 and not name.endswith("bias")}
    groups = [
        {"params": [p for name, p in trained if name in decayed], "weight_decay": train.weight_decay},
        {"params": [p for name, p in trained if name not in decayed], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    settings: dict[str, Any] = {
        "lr": train.learning_rate,
        "betas": (train.adam_beta1, train.adam_beta2),
        "eps": train.adam_epsilon,
    }
    if train.optim == "adamw_8bit":
        return AdamW8bit(groups, **settings)
    if offload != "none":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        optimizer = DeepSpeedCPUAdam(groups, adamw_mode=True, **settings)
        optimizer.register_step_pre_hook(reset_beta_powers)
        return optimizer
    return torch.optim.AdamW(groups, fused=True, **settings)


def make_schedule(train: Train, num_steps: int) -> Callable[[int], float]:
    """From a step (0, 1, ...) to its learning rate."""
    warmup = train.warmup_steps or math.ceil(train.warmup_ratio * num_steps)
    peak = train.learning_rate
    share = make_share(train.lr_scheduler_type, num_steps, warmup, train.lr_scheduler_kwargs, peak)
    return lambda step: peak * share(step)
