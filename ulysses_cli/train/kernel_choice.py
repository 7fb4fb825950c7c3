"""Which attention kernel a run uses: the fastest one that is exact for this model on this device, proven by running it.

No kernel lives here. What one can serve stands in plan/attention.py; what cannot be served is an error with names.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ulysses_cli.plan.attention import BACK_ENDS, Device, Need, list_able
from ulysses_cli.train.documents import Documents, make_documents
from ulysses_cli.train.kernels import KERNELS, attend, attend_backward
from ulysses_cli.train.torch_kernels import Rule


@dataclass(frozen=True)
class Choice:
    """The kernel of a run, and why it was taken."""

    name: str
    reason: str


# Largest error of a bfloat16 kernel against float32 on the probe's data, which has unit variance. Rounding q, k, v and
# the result to 8 bits of mantissa costs about 0.01; a lost token, bound or window costs about 1.
PROBE_TOLERANCE = {"bfloat16": 0.06, "float32": 1e-4}
PROBE_LENGTHS = (150, 1, 64, 33)
TIMED_TOKENS = 8192


def choose_kernel(wanted: str, need: Need, device: torch.device, window_tokens: int | None = None) -> Choice:
    """The named kernel, or for `auto` the fastest one that proves exact here. Each candidate runs once against the
    reference; what does not start or differs is passed over with its reason, and an explicit wish is then refused."""
    kind: Device = "cuda" if device.type == "cuda" else "cpu"
    passed: dict[str, float] = {}
    notes: list[str] = []
    for name in BACK_ENDS if wanted == "auto" else (wanted,):
        obstacle = BACK_ENDS[name].find_obstacle(need, kind)
        obstacle = obstacle or (KERNELS[name].find_missing() if wanted == "auto" else "")
        obstacle = obstacle or _probe(name, need, device, window_tokens)
        if not obstacle:
            passed[name] = _time(name, need, device) if kind == "cuda" and wanted == "auto" else 0.0
        elif wanted != "auto":
            able = ", ".join(list_able(need, kind))
            raise ValueError(f"attention {name} {obstacle}; for this model and device there are: {able}")
        elif kind in BACK_ENDS[name].devices:
            notes.append(f"{name} {obstacle}")
    if not passed:
        raise ValueError("no attention kernel is exact here: " + "; ".join(notes))
    best = min(passed, key=lambda name: passed[name])
    reason = "as the recipe says" if wanted != "auto" else "the only one that runs on a CPU"
    if wanted == "auto" and kind == "cuda":
        times = ", ".join(f"{name} {passed[name] * 1e3:.2f} ms" for name in sorted(passed, key=lambda n: passed[n]))
        reason = f"fastest of those exact here, forward and backward of {TIMED_TOKENS} tokens: {times}"
        reason += f"; passed over: {'; '.join(notes)}" if notes else ""
    return Choice(best, reason)


def _probe(name: str, need: Need, device: torch.device, window_tokens: int | None) -> str:
    """Run a small case forward and backward, with the model's head_dim and rules, against plain torch in float32."""
    dtype = getattr(torch, need.dtype)
    generator = torch.Generator(device="cpu").manual_seed(0)
    tokens, documents = sum(PROBE_LENGTHS), make_documents(PROBE_LENGTHS, device)
    window = min(window_tokens or 50, 50) if need.has_window else None
    rule = Rule(need.head_dim**-0.5, window, 20.0 if need.has_softcap else None)
    shapes = [(tokens, heads, need.head_dim) for heads in (4, 4, 2, 2)]
    dout, q, k, v = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    sinks = torch.randn(4, generator=generator).to(device, dtype) if need.has_sinks else None
    try:
        found = _run(name, (dout, q, k, v), sinks, documents, rule)
    except (RuntimeError, TypeError, ValueError, ImportError, NotImplementedError, AssertionError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        return f"failed its probe: {reason[0][:160]}"
    expected = _run_reference([tensor.float() for tensor in (dout, q, k, v)], sinks, documents, rule)
    largest = max((a.float() - b).abs().max().item() for a, b in zip(found, expected, strict=True))
    if math.isnan(largest) or largest > PROBE_TOLERANCE[need.dtype]:
        return f"differs from the reference by {largest:.3g} on its probe"
    return ""


def _run(
    name: str, tensors: tuple[Tensor, ...], sinks: Tensor | None, documents: Documents, rule: Rule
) -> list[Tensor]:
    dout, q, k, v = tensors
    row = (documents.cu_seqlens, documents.lengths, name, rule.scale, rule.window_tokens, rule.softcap)
    out, lse = attend(q, k, v, sinks, *row)
    return [out, *attend_backward(dout, q, k, v, out, lse, *row)]


def _run_reference(tensors: Sequence[Tensor], sinks: Tensor | None, documents: Documents, rule: Rule) -> list[Tensor]:
    """Attention as its definition says, with the whole matrix of logits and autograd."""
    dout, *inputs = tensors
    with torch.enable_grad():
        q, k, v = inputs = [tensor.detach().requires_grad_() for tensor in inputs]
        group = q.size(1) // k.size(1)
        key, value = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        logits = torch.einsum("qhd,khd->hqk", q, key) * rule.scale
        if rule.softcap is not None:
            logits = rule.softcap * torch.tanh(logits / rule.softcap)
        at = torch.arange(q.size(0), device=q.device)
        owner = torch.searchsorted(documents.cu_seqlens, at, right=True)
        distance = at[:, None] - at
        allowed = (distance >= 0) & (owner[:, None] == owner)
        if rule.window_tokens is not None:
            allowed &= distance < rule.window_tokens
        logits = logits.masked_fill(~allowed, -math.inf)
        if sinks is not None:
            column = sinks.to(q.dtype)[:, None, None].expand(-1, q.size(0), 1)
            logits = torch.cat([logits, column], -1)
        weights = logits.softmax(-1)[..., : q.size(0)]
        out = torch.einsum("hqk,khd->qhd", weights, value)
        return [out.detach(), *torch.autograd.grad(out, inputs, dout)]


def _time(name: str, need: Need, device: torch.device) -> float:
    """Seconds of forward and backward of one document, best of three after a warm-up."""
    documents = make_documents((TIMED_TOKENS,), device)
    rule = Rule(need.head_dim**-0.5, None, 20.0 if need.has_softcap else None)
    tensors = tuple(
        torch.randn(TIMED_TOKENS, heads, need.head_dim, device=device, dtype=getattr(torch, need.dtype))
        for heads in (8, 8, 2, 2)
    )
    best = math.inf
    for _ in range(4):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        _run(name, tensors, None, documents, rule)
        torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best
