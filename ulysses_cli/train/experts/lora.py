"""LoRA on experts that are stacked in one tensor. Tensors, names and files are peft's; the forward is not. peft adds
s B A to all weights in every forward, and makes the gradient of that sum: both as large as the experts, once for each
tile, and in bfloat16 the sum loses most of a small update. Here each expert multiplies its tokens by A, then by B.

Takes transformers' experts (integrations/moe.py: use_experts_implementation). No recipe and no group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from transformers.integrations.moe import _grouped_mm

from ulysses_cli.train.memory.tiled_mlp import need_gradient

NAME = "default"  # peft's name of an adapter
ALIGNED_BYTES = 16  # of each row that a grouped product reads


def serve_adapted_experts(model: nn.Module, gather_whole: Callable[[nn.Module], None] | None = None) -> int:
    """Replaces the forward of all experts that peft has put its layers around, one for each parameter. Returns how many
    there are. `gather_whole` is called with each outermost layer: no module runs by itself in it, and ZeRO-3 gathers
    all weights with that one."""
    adapters: dict[Any, dict[str, Any]] = {}
    for wrapper in [module for module in model.modules() if hasattr(module, "parameter_name")]:
        if wrapper.get_base_layer() not in adapters and gather_whole is not None:
            gather_whole(wrapper)
            wrapper.register_forward_pre_hook(need_gradient)
        adapters.setdefault(wrapper.get_base_layer(), {})[wrapper.parameter_name] = wrapper
        wrapper.forward = _make_passing(wrapper.base_layer)
    for experts, own in adapters.items():
        experts.forward = AdaptedExperts(experts, own).run
    return len(adapters)


def _make_passing(module: Any) -> Callable[..., Any]:
    """An attribute of a module that is a module itself would be a part of it."""
    return lambda *inputs: module(*inputs)


class AdaptedExperts:
    """Computes experts with their adapters. S pairs of a token and one of its k experts are sorted by expert."""

    def __init__(self, experts: Any, adapters: Mapping[str, Any]) -> None:
        self.experts, self.adapters = experts, adapters

    def run(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Takes tokens [N, H], the numbers of their experts and the weights of these [N, k]. Returns [N, H]."""
        experts, num_chosen = self.experts, chosen.size(-1)
        numbers, order = torch.sort(chosen.flatten())
        place = torch.empty_like(order)
        place[order] = torch.arange(order.size(0), device=order.device)
        own = torch.arange(experts.num_experts, device=numbers.device, dtype=numbers.dtype)
        ends = torch.searchsorted(numbers, own, right=True, out_int32=True)
        rows = _spread(hidden, order, place, num_chosen)
        inner = self.multiply("gate_up_proj" if experts.has_gate else "up_proj", rows, numbers, ends)
        inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
        out = self.multiply("down_proj", inner, numbers, ends)
        if experts.has_post_expert_norm:
            out = experts.post_expert_norm(out)
        out = out * _spread(weights.reshape(-1, 1), order, place, 1)
        return _Sum.apply(out, order, place, num_chosen).to(hidden.dtype)

    def multiply(self, name: str, rows: Tensor, numbers: Tensor, ends: Tensor) -> Tensor:
        """[S, in] to [S, out], by each expert's weight of that name. `ends`: one for each expert."""
        experts = self.experts
        weight = getattr(experts, name)
        out = _grouped_mm(rows, weight if experts.is_transposed else weight.mT, ends)
        if experts.has_bias:
            out = out + getattr(experts, f"{name}_bias")[numbers]
        if name not in self.adapters:
            return out
        adapter = self.adapters[name]
        first, second = split_experts(adapter.lora_A[NAME].weight, adapter.lora_B[NAME].weight, experts.num_experts)
        update = _grouped_mm(_grouped_mm(rows, first.mT, ends), second, ends)
        return out.add_(update, alpha=adapter.scaling[NAME])


def split_experts(first: Tensor, second: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Each expert's A [E, r, in] and B [E, r, out] of peft's [E r, in] and [out, r E], with zeros behind the rank where
    a row of r numbers would not be aligned."""
    first = first.view(num_experts, -1, first.size(1))
    second = second.view(second.size(0), -1, num_experts).permute(2, 1, 0)
    if missing := -first.size(1) % (ALIGNED_BYTES // first.element_size()):
        first, second = (functional.pad(each, (0, 0, 0, missing)) for each in (first, second))
    return first, second.contiguous()


def _spread(rows: Tensor, order: Tensor, place: Tensor, num_copies: int) -> Tensor:
    spread: Tensor = _Copies.apply(rows, order, place, num_copies)
    return spread


class _Copies(torch.autograd.Function):
    """So many copies of each row, in another order. The gradient is a sum in a fixed order, not by atomics."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, place: Tensor, num_copies: int) -> Tensor:
        ctx.num_copies = num_copies
        ctx.save_for_backward(order, place)
        return rows[order // num_copies]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dcopies: Tensor) -> tuple[Tensor | None, ...]:
        _, place = ctx.saved_tensors
        return _sum_copies(dcopies, place, ctx.num_copies), None, None, None


class _Sum(torch.autograd.Function):
    """The sum of so many rows that belong together: the other way round."""

    @staticmethod
    def forward(ctx: Any, copies: Tensor, order: Tensor, place: Tensor, num_copies: int) -> Tensor:
        ctx.num_copies = num_copies
        ctx.save_for_backward(order, place)
        return _sum_copies(copies, place, num_copies)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dsum: Tensor) -> tuple[Tensor | None, ...]:
        order, _ = ctx.saved_tensors
        return dsum[order // ctx.num_copies], None, None, None


def _sum_copies(copies: Tensor, place: Tensor, num_copies: int) -> Tensor:
    return copies[place].view(-1, num_copies, copies.size(-1)).sum(1)
