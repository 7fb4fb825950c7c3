"""Tries one kernel: compares it with the definition of attention, forward and backward, and times it on the run's mix
of lengths. Reads the lengths of rows, never their tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product

import torch
from torch import Tensor

from ulysses_cli.data.steps import Rows
from ulysses_cli.plan.attention import MAX_CUDNN_LENGTHS, Device, Need
from ulysses_cli.train.attention.documents import Documents, make_documents
from ulysses_cli.train.attention.kernels.native import Rule, add_sinks, merge
from ulysses_cli.train.attention.kernels.operators import attend, list_options, run_backward
from ulysses_cli.train.choosing import Outcome, describe_error, measure_error, measure_seconds

# Largest relative error of any token's head against float32. bfloat16 keeps 8 bits: kernels round weights and results,
# and the gradient of a query is a difference of two that nearly cancel. Right ones reach 0.08; one that leaves out a
# scale, softcap, sink, token or bound, or whose window is one token off, has 0.4 and more.
PROBE_TOLERANCE = {"bfloat16": 0.2, "float32": 1e-3}
PROBE_LENGTHS = (700, 1, 64, 33)  # longer than a tile of any kernel, one token, no multiple of a tile
PROBE_KEY_LENGTHS = (900, 130, 65, 400)  # on a ring, a document's queries are the last of more keys
PROBE_HEADS, PROBE_KV_HEADS = 4, 2
MAX_TIMED_TOKENS = 32 * 1024  # with more tokens the fastest kernel stays the same
NUM_SAMPLED_ROWS = 64
NUM_TIMED = 3


@dataclass(frozen=True)
class LengthMix:
    """`lengths`: of the documents in a typical row. `has_few_lengths`: all rows of the run have the same few."""

    lengths: tuple[int, ...] = (4096, 1500, 1, 2595)
    has_few_lengths: bool = False


ANY_MIX = LengthMix()


@dataclass(frozen=True)
class KernelWorkload:
    """What one rank's kernel gets: documents of the mix, and the rank's heads."""

    mix: LengthMix = ANY_MIX
    num_heads: int = 8
    num_kv_heads: int = 2

    def cut(self) -> tuple[int, ...]:
        """At most MAX_TIMED_TOKENS of the mix. Long and short documents keep their shares of the tokens; only documents
        longer than a quarter of it are shortened."""
        lengths = sorted(filter(None, self.mix.lengths), reverse=True)
        total = sum(lengths)
        if total <= MAX_TIMED_TOKENS:
            return tuple(length for length in self.mix.lengths if length)
        quarter, kept, due = MAX_TIMED_TOKENS // 4, list[int](), 0.0
        for length in lengths:
            due += length * MAX_TIMED_TOKENS / total
            left = MAX_TIMED_TOKENS - sum(kept)
            if left > 0 and due >= min(length, quarter) / 2:
                kept.append(min(length, left, max(quarter, int(due))))
                due -= kept[-1]
        return tuple(kept)


ANY_WORK = KernelWorkload()


def measure_mix(rows: Rows, eval_rows: Rows | None = None, *, generates: bool = False) -> LengthMix:
    """Takes the row of median work among a sample that is spread over all rows. Kernels get the lengths of evaluation
    too. `generates`: and those of prompts, of which there are many."""
    num_rows = len(rows)
    if not num_rows:
        return ANY_MIX
    step = -(-num_rows // NUM_SAMPLED_ROWS)
    sampled = sorted((rows.get_lengths(row) for row in range(0, num_rows, step)), key=_measure_work)
    all_rows = [rows] if eval_rows is None else [rows, eval_rows]
    return LengthMix(tuple(sampled[len(sampled) // 2]), not generates and _has_few_lengths(all_rows))


def _measure_work(lengths: tuple[int, ...]) -> int:
    return sum(length * length for length in lengths)


def _has_few_lengths(all_rows: Iterable[Rows]) -> bool:
    """What fills up a row is a document too, of a length that follows from the row's tokens: their number counts."""
    found: set[int] = set()
    for lengths in (rows.get_lengths(row) for rows in all_rows for row in range(len(rows))):
        found.update(lengths)
        found.add(sum(lengths))
        if len(found) > MAX_CUDNN_LENGTHS:
            return False
    return True


@dataclass(frozen=True, eq=False)
class KernelSearch:
    """Where and for what a kernel is sought."""

    need: Need
    device: torch.device
    window_tokens: int | None = None
    work: KernelWorkload = ANY_WORK

    @property
    def kind(self) -> Device:
        return "cuda" if self.device.type == "cuda" else "cpu"


def try_kernel(name: str, search: KernelSearch, timed_lengths: Sequence[int] = ()) -> Outcome:
    """Compares small cases with the model's head_dim and rules to plain torch in float32, then takes the time on
    documents of `timed_lengths`."""
    obstacle = _compare(name, search)
    return Outcome(obstacle, _time(name, search, timed_lengths) if timed_lengths and not obstacle else 0.0)


def _compare(name: str, search: KernelSearch) -> str:
    need, device = search.need, search.device
    cases = [make_documents(PROBE_LENGTHS, device)]
    cases += [make_documents(PROBE_LENGTHS, device, PROBE_KEY_LENGTHS)] if need.has_more_keys else []
    for documents, rule in product(cases, _list_rules(need, search.window_tokens)):
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
            error_share = measure_error(result[at], expected[at])
            if not error_share <= PROBE_TOLERANCE[need.dtype]:  # or not a number
                window = f", window {rule.window_tokens}" if rule.window_tokens else ""
                label = ("out", "dq", "dk", "dv")[at]
                return f"differs from the reference by {error_share:.2g} on its probe ({label}{window}{case})"
    return ""


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
    queries, device = documents.lengths, q.device
    before = [keys - own for keys, own in zip(documents.key_lengths, queries, strict=True)]
    places = torch.arange(k.size(0), device=device).split([*chain(*zip(before, queries, strict=True))])
    rounds = [
        (torch.cat(places[1::2]), list_options(make_documents(queries, device), name, rule)),
        (
            torch.cat(places[::2]),
            list_options(make_documents(queries, device, before), name, replace(rule, is_causal=False)),
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
    dq, dk, dv = (torch.zeros_like(tensor) for tensor in (precise, k, v))
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


def _time(name: str, search: KernelSearch, lengths: Sequence[int]) -> float:
    """Seconds of a packed row in the model's kinds of layers."""
    device, work = search.device, search.work
    documents = make_documents(lengths, device)
    heads = (work.num_heads, work.num_kv_heads)
    tensors = _make_tensors(search.need, documents.num_tokens, heads, device, device)

    def run() -> None:
        for rule in _list_rules(search.need, search.window_tokens):
            _run(name, tensors, None, documents, rule)

    try:
        return measure_seconds(run, device, NUM_TIMED)
    except Exception:  # noqa: BLE001 - it passed the small case; one that fails here counts as the slowest
        return math.inf
