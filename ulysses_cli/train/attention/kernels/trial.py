"""Tries one kernel: compares it with the definition of attention, forward and backward, and times it on the run's mix
of lengths. trial_process.py does the same in a process of its own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from ulysses_cli.plan.attention import Need
from ulysses_cli.train.attention.documents import Documents, make_documents
from ulysses_cli.train.attention.kernels.native import Rule, add_sinks, merge
from ulysses_cli.train.attention.kernels.operators import attend, list_options, run_backward

# Largest relative error of any token's head against float32. bfloat16 keeps 8 bits: kernels round weights and results,
# and the gradient of a query is a difference of two that nearly cancel. Right ones reach 0.08; one that leaves out a
# scale, softcap, sink, token or bound, or whose window is one token off, has 0.4 and more.
PROBE_TOLERANCE = {"bfloat16": 0.2, "float32": 1e-3}
LEAST_NORM = 0.5  # of the mean norm: what a smaller vector is compared with
PROBE_LENGTHS = (700, 1, 64, 33)  # longer than a tile of any kernel, one token, no multiple of a tile
PROBE_KEY_LENGTHS = (900, 130, 65, 400)  # on a ring, a document's queries are the last of more keys
PROBE_HEADS, PROBE_KV_HEADS = 4, 2
NUM_TIMED = 3


@dataclass(frozen=True)
class TrialRequest:
    """One kernel on one device for one kind of layer. `timed_lengths`: documents on which it is timed, or none."""

    name: str
    need: Need
    device: str
    window_tokens: int | None = None
    timed_lengths: tuple[int, ...] = ()
    num_heads: int = PROBE_HEADS
    num_kv_heads: int = PROBE_KV_HEADS


@dataclass(frozen=True)
class TrialResult:
    """`obstacle`: why the kernel cannot be used, or ''. `seconds` of forward and backward."""

    obstacle: str = ""
    seconds: float = 0.0


def try_kernel(request: TrialRequest) -> TrialResult:
    """Compares small cases with the model's head_dim and rules to plain torch in float32, then takes the time."""
    obstacle = _compare(request)
    if obstacle or not request.timed_lengths:
        return TrialResult(obstacle)
    return TrialResult(seconds=_time(request))


def _compare(request: TrialRequest) -> str:
    name, need, device = request.name, request.need, torch.device(request.device)
    cases = [make_documents(PROBE_LENGTHS, device)]
    cases += [make_documents(PROBE_LENGTHS, device, PROBE_KEY_LENGTHS)] if need.has_more_keys else []
    for documents, rule in product(cases, _list_rules(need, request.window_tokens)):
        heads = (PROBE_HEADS, PROBE_KV_HEADS)
        tensors = _make_tensors(need, sum(documents.key_lengths), heads, device, torch.device("cpu"))
        tensors[:2] = (tensor[: documents.num_tokens] for tensor in tensors[:2])
        sinks = torch.linspace(-1, 1, PROBE_HEADS, device=device).to(tensors[0].dtype) if need.has_sinks else None
        try:
            results = {"": _run(name, tensors, sinks, documents, rule)}
            if documents.key_lengths != documents.lengths:
                results = {", more keys than queries": results[""]}
                if rule.window_tokens is None:
                    results[", keys in rounds"] = _run_in_rounds(name, tensors, sinks, documents, rule)
            expected = _run_reference([tensor.float() for tensor in tensors], sinks, documents, rule)
        except Exception as error:  # noqa: BLE001 - a foreign package may raise anything
            return f"failed its probe: {describe_error(error)}"
        for (case, result), at in product(results.items(), range(len(expected))):
            error_share = _measure_error(result[at], expected[at])
            if math.isnan(error_share) or error_share > PROBE_TOLERANCE[need.dtype]:
                window = f", window {rule.window_tokens}" if rule.window_tokens else ""
                label = ("out", "dq", "dk", "dv")[at]
                return f"differs from the reference by {error_share:.2g} on its probe ({label}{window}{case})"
    return ""


def describe_error(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:160]


def _list_rules(need: Need, window_tokens: int | None) -> list[Rule]:
    """Rules of every kind of layer that the model may have, with a scale that is no default and a low softcap."""
    scale, softcap = 0.7 * need.head_dim**-0.5, 1.5 if need.has_softcap else None
    windows = [None, min(window_tokens or 100, 100)] if need.has_window else [None]
    return [Rule(scale, window, softcap) for window in windows]


def _make_tensors(
    need: Need, tokens: int, heads: tuple[int, int], device: torch.device, drawn_on: torch.device
) -> list[Tensor]:
    """Makes dout, q, k and v as an exchange returns them: their heads adjoin in one buffer. A CPU draws the same values
    for every device, which draws others for itself, but in no time."""
    generator = torch.Generator(drawn_on).manual_seed(0)
    shape = (tokens, 2 * heads[0] + 2 * heads[1], need.head_dim)
    joined = torch.randn(shape, generator=generator, device=drawn_on, dtype=getattr(torch, need.dtype)).to(device)
    return list(joined.split([heads[0], heads[0], heads[1], heads[1]], dim=1))


def _measure_error(result: Tensor, expected: Tensor) -> float:
    """The largest relative error of any token's head: norm of the difference over norm of the expected vector, so that
    a late token, whose values are means of many, counts nearly like an early one. The gradient of a query is computed
    from terms that cancel and whose rounding does not: one near zero is compared with a share of the mean norm."""
    norm = torch.linalg.vector_norm(expected, dim=-1)
    floor = LEAST_NORM * norm.square().mean().sqrt()
    return (torch.linalg.vector_norm(result.float() - expected, dim=-1) / torch.maximum(norm, floor)).max().item()


def _run(name: str, tensors: Sequence[Tensor], sinks: Tensor | None, documents: Documents, rule: Rule) -> list[Tensor]:
    dout, q, k, v = tensors
    row = list_options(documents, name, rule)
    out, lse = attend(q, k, v, sinks, *row)
    return [out, *run_backward(dout, q, k, v, out, lse, *row)]


def _run_in_rounds(
    name: str, tensors: Sequence[Tensor], sinks: Tensor | None, documents: Documents, rule: Rule
) -> list[Tensor]:
    """The same in two rounds: first each document's last keys, then those before its queries. The backward of each
    gets the result and the log-sum-exp of both."""
    dout, q, k, v = tensors
    pairs = list(zip(documents.lengths, documents.key_lengths, strict=True))
    places = torch.arange(k.size(0), device=q.device).split(documents.key_lengths)
    rounds = [
        (
            torch.cat([each[-queries:] for each, (queries, _) in zip(places, pairs, strict=True)]),
            list_options(make_documents(documents.lengths, q.device), name, rule),
        ),
        (
            torch.cat([each[:-queries] for each, (queries, _) in zip(places, pairs, strict=True)]),
            list_options(
                make_documents(documents.lengths, q.device, [keys - queries for queries, keys in pairs]),
                name,
                replace(rule, is_causal=False),
            ),
        ),
    ]
    precise: Tensor | None = None
    for own, row in rounds:
        out, lse = attend(q, k[own], v[own], None, *row)
        if precise is None:
            precise, total = out.float(), lse
        else:
            merge(precise, total, out, lse)
    assert precise is not None
    if sinks is not None:
        precise, total = add_sinks(precise, total, sinks)
    whole = precise.to(q.dtype)
    dq = torch.zeros_like(precise)
    dk = torch.zeros_like(k)
    dv = torch.zeros_like(v)
    for own, row in rounds:
        part, dk[own], dv[own] = run_backward(dout, q, k[own], v[own], whole, total, *row)
        dq += part
    return [whole, dq, dk, dv]


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
        positions = torch.arange(k.size(0), device=q.device)
        document = torch.searchsorted(documents.key_cu_seqlens, positions, right=True)
        lengths = torch.tensor(documents.lengths, device=q.device)
        ends = documents.key_cu_seqlens[1:] - documents.cu_seqlens[1:]
        places = positions[: q.size(0)] + ends.repeat_interleave(lengths)  # queries are the last keys
        distance = places[:, None] - positions
        allowed = (distance >= 0) & (document[places][:, None] == document)
        if rule.window_tokens is not None:
            allowed &= distance < rule.window_tokens
        logits = logits.masked_fill(~allowed, -math.inf)
        if sinks is not None:
            column = sinks.to(q.dtype)[:, None, None].expand(-1, q.size(0), 1)
            logits = torch.cat([logits, column], -1)
        weights = logits.softmax(-1)[..., : k.size(0)]
        out = torch.einsum("hqk,khd->qhd", weights, value)
        return [out.detach(), *torch.autograd.grad(out, inputs, dout)]


def _time(request: TrialRequest) -> float:
    """Seconds of a packed row in the model's kinds of layers, best of three after a warm-up."""
    device = torch.device(request.device)
    documents = make_documents(request.timed_lengths, device)
    heads = (request.num_heads, request.num_kv_heads)
    tensors = _make_tensors(request.need, documents.num_tokens, heads, device, device)
    best = math.inf
    try:
        for _ in range(1 + NUM_TIMED):
            _wait_for(device)
            start = time.perf_counter()
            for rule in _list_rules(request.need, request.window_tokens):
                _run(request.name, tensors, None, documents, rule)
            _wait_for(device)
            best = min(best, time.perf_counter() - start)
    except Exception:  # noqa: BLE001 - it passed the small case; one that fails here counts as the slowest
        return math.inf
    return best


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
