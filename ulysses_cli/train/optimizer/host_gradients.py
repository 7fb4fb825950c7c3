"""Brings gradients to the optimizer on the host (ZeRO-3) once, in the dtype in which DeepSpeed keeps them, and casts
them there, one group of weights at a time.

DeepSpeed's own order (stage3.py: partition_grads) sends a gradient to the host, back, and again in float32, where a
float32 copy of all of them is page-locked. Values are the same bits. Imports nothing of DeepSpeed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class HostGradients:
    """One rank's. No method is a collective."""

    def __init__(self, zero: Any, accelerator: Any) -> None:
        self.zero, self.accelerator = zero, accelerator
        sizes, masters = zero.fp16_partitioned_groups_flat_numel, zero.fp32_partitioned_groups_flat
        self.kept: Sequence[Tensor] = zero.grad_partitions_flat_buffer.split(sizes)  # by group, page-locked
        cast = torch.empty(max(sizes) if self.kept[0].dtype != masters[0].dtype else 0, dtype=masters[0].dtype)
        for group, (kept, master) in enumerate(zip(self.kept, masters, strict=True)):
            if zero.subgroup_to_device[group] == "cpu":
                master.grad = kept if kept.dtype == master.dtype else cast[: kept.numel()]
        if torch.cuda.is_initialized() and hasattr(torch.accelerator, "empty_host_cache"):
            torch.accelerator.empty_host_cache()  # else DeepSpeed's float32 copy stays page-locked
        self.own_scaling = zero.unscale_and_clip_grads
        zero.unscale_and_clip_grads, zero.partition_grads = self.scale, self.receive
        zero._get_fp32_grad_state_partition = self.read

    def receive(self, parameters: Sequence[Any], gradients: Sequence[Tensor]) -> None:
        """In place of partition_grads. Later micro-steps add to the sum on the GPU, where its norm is taken."""
        zero = self.zero
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if holds(zero, parameter):
                group, start, _ = zero.grad_position[zero.get_param_id(parameter)]
                kept = self.kept[group].narrow(0, start, gradient.numel())
                added = gradient.to(kept.dtype)
                if zero.micro_step_id:
                    added = kept.to(gradient.device, non_blocking=True).add_(added)
                if zero.is_gradient_accumulation_boundary():
                    zero.norm_for_param_grads[zero.get_param_id(parameter)] = zero._constant_buffered_norm2(added)
                kept.copy_(added, non_blocking=True)
                if parameter.grad is not None and not self.accelerator.is_synchronized_device():
                    parameter.grad.record_stream(self.accelerator.current_stream())
            parameter.grad = None

    def cast(self, group: int) -> None:
        """Makes the gradient that the optimizer reads. The next group's takes its place."""
        kept, master = self.kept[group], self.zero.fp32_partitioned_groups_flat[group]
        if master.grad is not kept:
            master.grad.copy_(kept)

    def scale(self, group: int, norm: Tensor) -> None:
        """In place of unscale_and_clip_grads."""
        self.cast(group)
        if not keeps_gradients(norm, self.zero.loss_scale, self.zero.clip_grad):
            self.own_scaling(group, norm)

    def read(self, param: Any, release_swap_buffers: bool) -> tuple[Tensor, int]:
        """In place of _get_fp32_grad_state_partition, which tools that look at gradients call."""
        group, start, numel = self.zero.grad_position[self.zero.get_param_id(param)]
        return self.kept[group].narrow(0, start, numel), group


def holds(zero: Any, parameter: Any) -> bool:
    """Whether this rank's share is more than padding. DeepSpeed leaves out the others."""
    return bool(parameter.partition_numel() * zero._get_param_partition_rank(parameter) < parameter.ds_numel)


def keeps_gradients(norm: Tensor, loss_scale: float, limit: float) -> bool:
    """Whether DeepSpeed multiplies gradients of this norm by exactly 1 (stage3.py: unscale_and_clip_grads)."""
    return loss_scale == 1 and (limit <= 0 or float((norm / loss_scale + 1e-6) / limit) <= 1)
