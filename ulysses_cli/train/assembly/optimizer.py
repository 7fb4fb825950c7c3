"""The optimizer and the schedule of learning rates that a recipe asks for."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import get_scheduler

from ulysses_cli.plan.recipe.recipe import Train
from ulysses_cli.train.optimizer.adamw_8bit import AdamW8bit
from ulysses_cli.train.optimizer.shards import get_shape
from ulysses_cli.train.optimizer.states import forget_powers


def make_optimizer(train: Train, trained: list[tuple[str, nn.Parameter]], offload: str) -> torch.optim.Optimizer:
    """Weight decay is for matrices: norms and sinks are vectors; biases of experts are not, but have their name."""
    decayed = {name for name, p in trained if len(get_shape(p)) >= 2 and not name.endswith("bias")}
    groups = [
        {"params": [p for name, p in trained if name in decayed], "weight_decay": train.weight_decay},
        {"params": [p for name, p in trained if name not in decayed], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    numbers: dict[str, Any] = {
        "lr": train.learning_rate,
        "betas": (train.adam_beta1, train.adam_beta2),
        "eps": train.adam_epsilon,
    }
    if train.optim == "adamw_8bit":
        return AdamW8bit(groups, **numbers)
    if offload != "none":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        optimizer = DeepSpeedCPUAdam(groups, adamw_mode=True, **numbers)
        optimizer.register_step_pre_hook(forget_powers)
        return optimizer
    return torch.optim.AdamW(groups, fused=True, **numbers)


def make_schedule(train: Train, num_steps: int) -> Callable[[int], float]:
    """Learning rate of step 0, 1, ...: transformers' schedules as a pure function. There is no state to save."""
    stand_in = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    warmup = train.warmup_steps or math.ceil(train.warmup_ratio * num_steps)
    special: dict[str, Any] = dict(train.lr_scheduler_kwargs)
    for name in ("num_decay_steps", "num_stable_steps", "timescale"):
        if name in special:
            special[name] = int(special[name])
    for name in ("lr_end", "min_lr"):  # written as rates; the stand-in's peak is 1
        if name in special and train.learning_rate:
            special[name] = special[name] / train.learning_rate
    factor = get_scheduler(train.lr_scheduler_type, stand_in, warmup, num_steps, special).lr_lambdas[0]
    return lambda step: train.learning_rate * factor(step)
