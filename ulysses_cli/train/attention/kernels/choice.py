"""Chooses a run's attention kernel: the fastest one that is exact for this model on this device, checked by running it.

plan/attention.py lists what each kernel supports; a model that none supports is an error that names the reasons.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ulysses_cli.plan.attention import BACK_ENDS, Device, Need, list_able
from ulysses_cli.plan.nouns import format_count
from ulysses_cli.train.attention.documents import Documents, make_documents
from ulysses_cli.train.attention.kernels.operators import KERNELS, attend, run_backward
from ulysses_cli.train.attention.kernels.rule import Rule


@dataclass(frozen=True)
class KernelChoice:
    """The kernel of a run, and why it was chosen. `by_head_dim`: where layers differ in the width of their heads, the
    kernel of each width."""

    name: str
    reason: str
    by_head_dim: Mapping[int, str] = field(default_factory=dict)

    def pick(self, head_dim: int) -> str:
        return self.by_head_dim.get(head_dim, self.name)


# Largest relative error of any token's head against float32. bfloat16 keeps 8 bits and rounds inputs, weights and
# results; a missing scale, softcap, sink, token, bound or window causes a far larger error.
PROBE_TOLERANCE = {"bfloat16": 0.1, "float32": 1e-3}
PROBE_LENGTHS = (700, 1, 64, 33)  # longer than a tile of any kernel, one token, no multiple of a tile
PROBE_HEADS, PROBE_KV_HEADS = 4, 2
MAX_TIMED_TOKENS = 32 * 1024  # with more tokens the fastest kernel stays the same


@dataclass(frozen=True)
class KernelWorkload:
    """The shape on which kernels are timed: a row of the run, cut to MAX_TIMED_TOKENS, and the heads of one rank."""

    lengths: tuple[int, ...] = (4096, 1500, 1, 2595)
    num_heads: int = 8
    num_kv_heads: int = 2

    def cut(self) -> tuple[int, ...]:
        lengths, num_left = [], MAX_TIMED_TOKENS
        for length in self.lengths:
            if num_left > 0 and length:
                lengths.append(min(length, num_left))
                num_left -= length
        return tuple(lengths)


def choose_kernel(
    wanted: str, need: Need, device: torch.device, window_tokens: int | None = None, work: KernelWorkload | None = None
) -> KernelChoice:
    """Returns the named kernel, or for `auto` the fastest one that is exact here. Each candidate runs once against the
    reference. One that fails or differs is passed over, with its reason; if the recipe named it, that is an error."""
    kind: Device = "cuda" if device.type == "cuda" else "cpu"
    work = work or KernelWorkload()
    passed: dict[str, float] = {}
    notes: list[str] = []
    for name in BACK_ENDS if wanted == "auto" else (wanted,):
        obstacle = BACK_ENDS[name].find_obstacle(need, kind)
        obstacle = obstacle or (KERNELS[name].find_missing() if wanted == "auto" else "")
        obstacle = obstacle or _probe(name, need, device, window_tokens)
        if not obstacle:
            passed[name] = (
                _time(name, need, device, window_tokens, work) if kind == "cuda" and wanted == "auto" else 0.0
            )
        elif wanted != "auto":
            able = [other for other in list_able(need, kind) if other != name and not KERNELS[other].find_missing()]
            others = f"for this model and device there are: {', '.join(able)}" if able else "nothing else serves here"
            raise ValueError(f"attention {name} {obstacle}; {others}")
        elif kind in BACK_ENDS[name].devices:
            notes.append(f"{name} {obstacle}")
    if not passed:
        raise ValueError("no attention kernel is exact here: " + "; ".join(notes))
    best = min(passed, key=lambda name: passed[name])
    reason = "as the recipe says" if wanted != "auto" else "the only one that runs on a CPU"
    if wanted == "auto" and kind == "cuda":
        times = ", ".join(f"{name} {passed[name] * 1e3:.2f} ms" for name in sorted(passed, key=lambda n: passed[n]))
        timed = f"{sum(work.cut()):,} tokens, {format_count(work.num_heads, 'head')}"
        reason = f"fastest of those exact here, forward and backward of {timed}: {times}"
        reason += f"; passed over: {'; '.join(notes)}" if notes else ""
    return KernelChoice(best, reason)


def join_choices(choices: Mapping[int, KernelChoice]) -> KernelChoice:
    """Takes the choice for each width of heads. One that serves all widths has one name."""
    names = {width: choice.name for width, choice in choices.items()}
    if len(names) == 1:
        return next(iter(choices.values()))
    reason = "; ".join(f"heads of {width}: {choice.reason}" for width, choice in choices.items())
    if len(set(names.values())) == 1:
        return KernelChoice(next(iter(names.values())), reason)
    name = " and ".join(f"{name} (heads of {width})" for width, name in names.items())
    return KernelChoice(name, reason, names)


def _list_rules(need: Need, window_tokens: int | None) -> list[Rule]:
    """Rules of every kind of layer that the model may have, with a scale that is no default and a low softcap."""
    scale, softcap = 0.7 * need.head_dim**-0.5, 1.5 if need.has_softcap else None
    windows = [None, min(window_tokens or 100, 100)] if need.has_window else [None]
    return [Rule(scale, window, softcap) for window in windows]


def _make_tensors(need: Need, tokens: int, heads: tuple[int, int], device: torch.device) -> list[Tensor]:
    """Makes dout, q, k and v as an exchange returns them: their heads adjoin in one buffer."""
    generator = torch.Generator().manual_seed(0)
    width = 2 * heads[0] + 2 * heads[1]
    joined = torch.randn(tokens, width, need.head_dim, generator=generator).to(device, getattr(torch, need.dtype))
    return list(joined.split([heads[0], heads[0], heads[1], heads[1]], dim=1))


def _probe(name: str, need: Need, device: torch.device, window_tokens: int | None) -> str:
    """Compares small cases forward and backward, with the model's head_dim and rules, to plain torch in float32.
    Returns why the kernel cannot be used, or ''."""
    documents = make_documents(PROBE_LENGTHS, device)
    tensors = _make_tensors(need, documents.num_tokens, (PROBE_HEADS, PROBE_KV_HEADS), device)
    sinks = torch.linspace(-1, 1, PROBE_HEADS, device=device).to(tensors[0].dtype) if need.has_sinks else None
    for rule in _list_rules(need, window_tokens):
        try:
            results = _run(name, tensors, sinks, documents, rule)
        except Exception as error:  # noqa: BLE001 - a foreign package may raise anything
            reason = str(error).strip().splitlines() or [type(error).__name__]
            return f"failed its probe: {reason[0][:160]}"
        expected = _run_reference([tensor.float() for tensor in tensors], sinks, documents, rule)
        for label, result, reference in zip(("out", "dq", "dk", "dv"), results, expected, strict=True):
            error_share = _measure_error(result, reference)
            if math.isnan(error_share) or error_share > PROBE_TOLERANCE[need.dtype]:
                window = f", window {rule.window_tokens}" if rule.window_tokens else ""
                return f"differs from the reference by {error_share:.2g} on its probe ({label}{window})"
    return ""


def _measure_error(result: Tensor, expected: Tensor) -> float:
    """The largest relative error of any token's head: norm of the difference over norm of the expected vector, so that
    a late token, whose values are means of many, counts like an early one. Vectors near zero use the mean norm."""
    norm = torch.linalg.vector_norm(expected, dim=-1)
    floor = 0.1 * norm.square().mean().sqrt()
    return (torch.linalg.vector_norm(result.float() - expected, dim=-1) / torch.maximum(norm, floor)).max().item()


def _run(name: str, tensors: Sequence[Tensor], sinks: Tensor | None, documents: Documents, rule: Rule) -> list[Tensor]:
    dout, q, k, v = tensors
    row = (documents.cu_seqlens, documents.lengths, name, rule.scale, rule.window_tokens, rule.softcap)
    out, lse = attend(q, k, v, sinks, *row)
    return [out, *run_backward(dout, q, k, v, out, lse, *row)]


def _run_reference(tensors: Sequence[Tensor], sinks: Tensor | None, documents: Documents, rule: Rule) -> list[Tensor]:
    """Attention by its definition, with the whole matrix of logits and autograd."""
    dout, *inputs = tensors
    with torch.enable_grad():
        q, k, v = inputs = [tensor.detach().requires_grad_() for tensor in inputs]
        group = q.size(1) // k.size(1)
        key, value = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        logits = torch.einsum("qhd,khd->hqk", q, key) * rule.scale
        if rule.softcap is not None:
            logits = rule.softcap * torch.tanh(logits / rule.softcap)
        positions = torch.arange(q.size(0), device=q.device)
        document = torch.searchsorted(documents.cu_seqlens, positions, right=True)
        distance = positions[:, None] - positions
        allowed = (distance >= 0) & (document[:, None] == document)
        if rule.window_tokens is not None:
            allowed &= distance < rule.window_tokens
        logits = logits.masked_fill(~allowed, -math.inf)
        if sinks is not None:
            column = sinks.to(q.dtype)[:, None, None].expand(-1, q.size(0), 1)
            logits = torch.cat([logits, column], -1)
        weights = logits.softmax(-1)[..., : q.size(0)]
        out = torch.einsum("hqk,khd->qhd", weights, value)
        return [out.detach(), *torch.autograd.grad(out, inputs, dout)]


def _time(name: str, need: Need, device: torch.device, window_tokens: int | None, work: KernelWorkload) -> float:
    """Seconds of forward and backward of a packed row in the model's kinds of layers, best of three after a warm-up."""
    documents = make_documents(work.cut(), device)
    tensors = _make_tensors(need, documents.num_tokens, (work.num_heads, work.num_kv_heads), device)
    best = math.inf
    try:
        for _ in range(4):
            torch.cuda.synchronize(device)
            start = time.perf_counter()
            for rule in _list_rules(need, window_tokens):
                _run(name, tensors, None, documents, rule)
            torch.cuda.synchronize(device)
            best = min(best, time.perf_counter() - start)
    except Exception:  # noqa: BLE001 - it passed the small case; one that fails here counts as the slowest
        return math.inf
    return best
