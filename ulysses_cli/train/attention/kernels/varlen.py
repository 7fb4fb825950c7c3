"""torch's own flash kernel, all documents in one call. On GPUs, in bfloat16 or float16."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ulysses_cli.plan.attention import FLASH_CAPABILITY
from ulysses_cli.train.attention.documents import Documents
from ulysses_cli.train.attention.kernels.rule import Rule

aten = torch.ops.aten


def forward_varlen(q: Tensor, k: Tensor, v: Tensor, documents: Documents, rule: Rule) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._flash_attention_forward(
        q, k, v, *list_bounds(documents), 0.0, rule.is_causal, False, scale=rule.scale, **_window_sides(rule)
    )
    return out, lse


def backward_varlen(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, documents: Documents, rule: Rule
) -> tuple[Tensor, Tensor, Tensor]:
    no_dropout = torch.empty(2, dtype=torch.uint64, device=q.device)  # state of an unused generator
    dq, dk, dv = aten._flash_attention_backward(
        dout, q, k, v, out, lse, *list_bounds(documents), 0.0, rule.is_causal,
        no_dropout, no_dropout.new_empty(0), scale=rule.scale, **_window_sides(rule),
    )  # fmt: skip
    return dq, dk, dv


def list_bounds(documents: Documents) -> tuple[Tensor, Tensor, int, int]:
    """Returns bounds of queries and of keys, and the longest of both. Kernels take the queries for the last keys."""
    bounds = documents.cu_seqlens, documents.key_cu_seqlens
    return *bounds, documents.max_tokens, documents.max_key_tokens


def has_varlen(q: Tensor, rule: Rule) -> bool:
    is_half = q.dtype in (torch.bfloat16, torch.float16)
    fits = rule.softcap is None and q.size(2) <= 256 and q.size(2) % 8 == 0
    return q.device.type == "cuda" and is_half and fits and has_flash(q.device)


@cache
def has_flash(device: torch.device) -> bool:
    """Whether this GPU is new enough for flash kernels in bfloat16. AMD's GPUs number their generations otherwise."""
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= FLASH_CAPABILITY


def _window_sides(rule: Rule) -> dict[str, int]:
    """flash kernels count the tokens before the query's own."""
    return {} if rule.window_tokens is None else {"window_size_left": rule.window_tokens - 1, "window_size_right": 0}
