"""What a rank keeps of tokens that the model has read (keys and values of its own heads, inputs of convolutions, states
of its own heads' recurrences), and attention of a few new tokens to it. A forward passes it to the layers as
`generation`.  It reads a prefix once, split over the ranks, and then any number of sequences that begin with it;
every rank computes these tokens, each its own heads' share. Takes tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ulysses_cli.plan.rows.ring import TokenRun
from ulysses_cli.train.attention.documents import Documents
from ulysses_cli.train.attention.heads import plan_heads
from ulysses_cli.train.attention.kernels.native import Rule, add_sinks, get_precision, has_varlen, merge
from ulysses_cli.train.attention.ring import KernelTask
from ulysses_cli.train.attention.ulysses import choose_way, exchange_in, exchange_out, measure_heads
from ulysses_cli.train.processes.groups import NO_AXIS, SequenceAxis
from ulysses_cli.train.recurrence.rules import StatefulRule, gather_rows, scatter_rows

# Shapes. Q sequences, n new tokens of each, T cached tokens, h query heads, k key/value heads, g = h / k, D, V widths.

MAX_LOGITS = 1 << 22  # of a block of keys

aten = torch.ops.aten
Part = tuple[Tensor, Tensor]  # out [Q, n, h, V] and log-sum-exp [Q, n, h]


def attend_to_prefix(q: Tensor, k: Tensor, v: Tensor, rule: Rule, num_between: int, ages: Tensor) -> Part:
    """Takes q [Q, n, h, D], k [k, T, D] and v [k, T, V]: each head's keys lie side by side in memory, which a CPU reads
    more than twice as fast as those of all heads in turn. `ages`: how far each cached token is from the prefix's end,
    on the host, the oldest first. `num_between`: tokens between the prefix's end and the first new one. The new tokens
    of all sequences are queries of one call: nothing is computed once per sequence. Of no keys, out is 0 and the
    log-sum-exp is -inf."""
    groups = k.size(0), q.size(2) // k.size(0)
    queries = q.unflatten(2, groups).permute(2, 0, 1, 3, 4)  # [k, Q, n, g, D]
    shape = queries.shape[:-1]
    flat = queries.flatten(1, 3)
    oldest = int(ages[0]) if len(ages) else 0
    is_visible = rule.window_tokens is None or oldest + num_between + q.size(1) <= rule.window_tokens
    if is_visible and len(ages) and _has_flash(flat, v, rule):
        out, lse = _run_flash(flat, k, v, rule)
    else:
        distances = None if is_visible else (_measure_distances(shape, num_between, q.device), ages.to(q.device))
        out, lse = _run_blocks(flat, k, v, rule, distances)
    out = out.view(*shape, v.size(2)).permute(1, 2, 0, 3, 4).flatten(2, 3)
    return out, lse.view(shape).permute(1, 2, 0, 3).flatten(2, 3)


def _has_flash(q: Tensor, v: Tensor, rule: Rule) -> bool:
    is_plain = rule.softcap is None and v.size(-1) == q.size(-1)
    return is_plain and (q.device.type == "cpu" or has_varlen(q, rule))


def _run_flash(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> Part:
    """torch's flash attention, with a group's query heads as more queries of its key/value head."""
    rows = q[None], k[None], v[None]
    if q.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*rows, 0.0, False, scale=rule.scale)
    else:
        out, lse, *_ = aten._scaled_dot_product_flash_attention(*rows, 0.0, False, False, scale=rule.scale)
    return out[0], lse[0]


def _measure_distances(shape: torch.Size, num_between: int, device: torch.device) -> Tensor:
    """Tokens from the prefix's end to each query, [Q n g]."""
    steps = torch.arange(shape[2], device=device) + num_between
    return steps[None, :, None].expand(shape[1:]).flatten()


def _run_blocks(q: Tensor, k: Tensor, v: Tensor, rule: Rule, distances: tuple[Tensor, Tensor] | None) -> Part:
    """An online softmax over blocks of keys. q [k, M, D]. `distances`: of each query and of each key to the prefix's
    end, where the window hides some keys."""
    precision = get_precision(q)
    q = q.to(precision)
    maximum = q.new_full(q.shape[:2], -math.inf)
    total, mixed = torch.zeros_like(maximum), q.new_zeros(*q.shape[:2], v.size(2))
    block = max(1, MAX_LOGITS // (q.size(0) * q.size(1)))
    for start in range(0, k.size(1), block):
        keys, values = (row[:, start : start + block].to(precision) for row in (k, v))
        logits = _compute_logits(q, keys, rule)
        if distances is not None:
            own = distances[0][:, None] + distances[1][start : start + block]
            logits = logits.masked_fill(own >= (rule.window_tokens or 0), -math.inf)
        highest = torch.maximum(maximum, logits.amax(-1))
        finite = highest.masked_fill(highest == -math.inf, 0.0)
        weights, rescale = torch.exp(logits - finite[..., None]), torch.exp(maximum - finite)
        total, mixed = total * rescale + weights.sum(-1), mixed * rescale[..., None] + weights @ values
        maximum = highest
    return mixed / total.clamp_min(torch.finfo(precision).tiny)[..., None], maximum + torch.log(total)


def _compute_logits(q: Tensor, k: Tensor, rule: Rule) -> Tensor:
    logits = (q @ k.mT) * rule.scale
    return logits if rule.softcap is None else torch.tanh(logits / rule.softcap) * rule.softcap


def attend_to_own(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> Part:
    """Takes q [Q, n, h, D], k [Q, k, t, D] and v [Q, k, t, V]; the last n of the t tokens are the queries' own."""
    precision, groups = get_precision(q), (k.size(1), q.size(2) // k.size(1))
    queries = q.to(precision).unflatten(2, groups).permute(0, 2, 3, 1, 4)  # [Q, k, g, n, D]
    keys, values = (row.to(precision)[:, :, None] for row in (k, v))  # [Q, k, 1, t, D]
    logits = _compute_logits(queries, keys, rule)
    num_keys, window = k.size(2), rule.window_tokens
    if q.size(1) > 1 or (window is not None and window < num_keys):  # one token alone sees all before it
        at = torch.arange(num_keys, device=q.device)
        distance = at[num_keys - q.size(1) :, None] - at
        is_hidden = distance < 0
        if window is not None:
            is_hidden |= distance >= window
        logits = logits.masked_fill(is_hidden, -math.inf)
    lse = torch.logsumexp(logits, -1)
    out = torch.exp(logits - lse[..., None]) @ values
    return out.permute(0, 3, 1, 2, 4).flatten(2, 3), lse.permute(0, 3, 1, 2).flatten(2, 3)


def join_parts(parts: list[Part], sinks: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The attention to all tokens of the parts, from the attention to each part's."""
    (out, lse), *others = [(out.to(lse.dtype).flatten(0, 1), lse.flatten(0, 1).mT) for out, lse in parts]
    out, lse = out.clone(), lse.clone()
    for other in others:
        merge(out, lse, *other)
    if sinks is not None:
        out, _ = add_sinks(out, lse, sinks)
    return out.view(parts[0][0].shape).to(dtype)


@dataclass(eq=False)
class KeyValues:
    """One attention layer's keys and values: the prefix's [k, T, D], and those of each sequence [Q, k, capacity, D].

    `ages`: how far the prefix's are from its end. `num_kept`: how many the ranks of a ring keep together.
    """

    prefix: tuple[Tensor, Tensor] | None = None
    ages: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    num_kept: int = 0
    own: tuple[Tensor, Tensor] | None = None


@dataclass(eq=False)
class States:
    """One layer's convolution inputs or recurrent states: after the prefix, and after each sequence's tokens."""

    prefix: list[Tensor] = field(default_factory=list)
    own: list[Tensor] = field(default_factory=list)


class GenerationCache:
    """The caches of all layers, in the order in which a forward calls them: layers may share a module.

    `axis`: the ranks that have heads of their own. `ring`: the ranks that have the same heads, and a share of the
    prefix's keys each; recurrent layers have none. `num_tokens`: the length that rotary frequencies follow, where a
    model's do.
    """

    def __init__(self, axis: SequenceAxis, ring: SequenceAxis = NO_AXIS) -> None:
        self.axis, self.ring = axis, ring
        self.documents: Documents | None = None  # of the prefix, while it is read
        self.num_tokens = 0
        self.prefix_tokens = self.num_sequences = self.own_tokens = self.capacity = 0
        self._layers: dict[tuple[str, int], Any] = {}
        self._num_calls: dict[str, int] = {}

    def start_prefix(self, documents: Documents, num_tokens: int) -> None:
        """The next forward reads the prefix, each rank its slice."""
        self.documents, self.num_tokens = documents, num_tokens
        self.prefix_tokens = documents.num_tokens
        self._num_calls = {}

    def start_sequences(self, num_sequences: int, capacity: int) -> None:
        """The next forwards read sequences after the prefix, at most `capacity` tokens of each. Earlier ones are
        forgotten."""
        self.documents = None
        self.num_sequences, self.capacity, self.own_tokens = num_sequences, capacity, 0
        for layer in self._layers.values():
            layer.own = [] if isinstance(layer, States) else None

    def start_tokens(self, num_tokens: int) -> None:
        """The next forward reads tokens [Q, n] of each sequence, the same on all ranks. `num_tokens`: as above."""
        self.num_tokens, self._num_calls = num_tokens, {}

    def end_tokens(self, num_new: int) -> None:
        self.own_tokens += num_new

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def count_bytes(self) -> int:
        """Bytes of this rank's cached tensors."""
        tensors: list[Tensor] = []
        for layer in self._layers.values():
            for kept in (layer.prefix, layer.own):
                tensors += kept or ()
        return sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors)

    def _get_layer(self, kind: str, make: Callable[[], Any]) -> Any:
        number = self._num_calls[kind] = self._num_calls.get(kind, -1) + 1
        return self._layers.setdefault((kind, number), make())

    # -- attention --------------------------------------------------------------------------------------------------

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, rule: Rule, sinks: Tensor | None, kernel: str, num_head_chunks: int
    ) -> Tensor:
        """Takes q [B, S, heads, D], k [B, S, kv_heads, D] and v [B, S, kv_heads, V], returns [B, S, heads, V]: of the
        prefix this rank's slice, of sequences all their new tokens. Collective over the axis."""
        layer: KeyValues = self._get_layer("attention", KeyValues)
        if self.documents is not None:
            return self._attend_prefix(layer, q, k, v, rule, sinks, kernel, num_head_chunks)
        return self._attend_tokens(layer, q, k, v, rule, sinks)

    def _attend_prefix(
        self,
        layer: KeyValues,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rule: Rule,
        sinks: Tensor | None,
        kernel: str,
        num_head_chunks: int,
    ) -> Tensor:
        assert self.documents is not None
        axis, ring, documents = self.axis, self.ring, self.documents
        documents.check_num_tokens(q.size(0), q.size(1), axis.size * ring.size)
        own = plan_heads(q.size(2), k.size(2), axis.size).chunks[0].keys[axis.rank]
        # Later tokens see the token before them and the window before that.
        layer.num_kept = min(documents.num_tokens, (rule.window_tokens or documents.num_tokens + 1) - 1)
        layer.ages = self._list_ages(layer.num_kept)
        num_own = len(layer.ages)
        layer.prefix = k.new_empty(own.num_heads, num_own, k.size(3)), v.new_empty(own.num_heads, num_own, v.size(3))
        plan = plan_heads(q.size(2), k.size(2), axis.size, num_head_chunks)
        heads = measure_heads(plan, axis, kernel, max(q.size(3), v.size(3)))
        calls = documents.plan_calls(rule.window_tokens, ring, heads)
        out = q.new_empty(*q.shape[:3], v.size(3))
        for chunk in plan.chunks:
            rows = exchange_in([q, k, v], [chunk.queries, chunk.keys, chunk.keys], axis)
            keys = chunk.keys[axis.rank]
            for kept, row in zip(layer.prefix, rows[1:], strict=True):
                kept[keys.start - own.start : keys.stop - own.start] = row[row.size(0) - num_own :].transpose(0, 1)
            own_sinks = None if sinks is None else sinks[slice(*chunk.queries[axis.rank])]
            task = KernelTask(calls, plan.list_runs(chunk, axis.rank), ring, kernel, rule)
            result, _ = choose_way(calls).forward(rows, own_sinks, task)
            del rows
            exchange_out([result], [chunk.queries], axis, q.size(0), [out])
        return out

    def _list_ages(self, num_kept: int) -> Tensor:
        """Of this rank's tokens among the last `num_kept` of the prefix, on the host. A rank's tokens are in rising
        order, so that these are its last ones."""
        assert self.documents is not None
        end = self.documents.num_tokens
        runs = self.documents.order[self.ring.rank] if self.documents.order else (TokenRun(0, end),)
        ages = torch.cat([torch.arange(end - run.start, end - run.stop, -1) for run in runs])
        return ages[ages <= num_kept]

    def _attend_tokens(
        self, layer: KeyValues, q: Tensor, k: Tensor, v: Tensor, rule: Rule, sinks: Tensor | None
    ) -> Tensor:
        plan = plan_heads(q.size(2), k.size(2), self.axis.size)
        chunk = plan.chunks[0]
        queries, keys = chunk.queries[self.axis.rank], chunk.keys[self.axis.rank]
        begin, end = self.own_tokens, self.own_tokens + q.size(1)
        if layer.own is None:
            layer.own = tuple(
                new.new_empty(self.num_sequences, keys.num_heads, self.capacity, new.size(3)) for new in (k, v)
            )
        own = layer.own
        assert own is not None
        for kept, new in zip(own, (k, v), strict=True):
            kept[:, :, begin:end] = new[:, :, slice(*keys)].transpose(1, 2)
        own_q, own_sinks = q[:, :, slice(*queries)], None if sinks is None else sinks[slice(*queries)]
        results = []
        for heads, groups in plan.list_runs(chunk, self.axis.rank):
            part = own_q[:, :, slice(*heads)]
            own_keys, own_values = (kept[:, slice(*groups), :end] for kept in own)
            parts = [attend_to_own(part, own_keys, own_values, rule)]
            if layer.prefix is not None and layer.num_kept:
                prefix_keys, prefix_values = (kept[slice(*groups)] for kept in layer.prefix)
                parts += self._gather_parts(attend_to_prefix(part, prefix_keys, prefix_values, rule, begin, layer.ages))
            results.append(join_parts(parts, None if own_sinks is None else own_sinks[slice(*heads)], q.dtype))
        return self._gather_heads(_join(results, 2))

    def _gather_parts(self, own: Part) -> list[Part]:
        """The results of all ranks of the ring, each of its share of the prefix. One collective on the ring: all its
        ranks reach it, since they have the same heads and know what the prefix's layers keep together."""
        if self.ring.group is None:
            return [own]
        out, lse = own
        joined = torch.cat([out.to(lse.dtype), lse[..., None]], -1)
        parts = [torch.empty_like(joined) for _ in range(self.ring.size)]
        dist.all_gather(parts, joined, group=self.ring.group)
        return [(each[..., :-1], each[..., -1]) for each in parts]

    def _gather_heads(self, own: Tensor) -> Tensor:
        """Takes [Q, n, h, D] of this rank's heads, returns all heads. One collective on the axis: all its ranks reach
        it, since they run the same layers on the same tokens."""
        if self.axis.group is None:
            return own.contiguous()  # some models view it in another shape
        parts = [torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(self.axis.size)]
        dist.all_gather(parts, own.contiguous(), group=self.axis.group)
        return torch.cat(parts, 2)

    # -- convolutions and recurrences -------------------------------------------------------------------------------

    def convolve(
        self, slices: Tensor, num_before: int, run: Callable[[Tensor], Tensor], run_split: Callable[[], Tensor]
    ) -> Tensor:
        """Takes and returns [B, C, S]. `run`: the convolution, which looks back over `num_before` tokens; `run_split`
        computes the prefix's result on split rows. Every rank keeps the last inputs of all channels. Collective over
        the axis."""
        layer: States = self._get_layer("convolution", States)
        if self.documents is not None:
            layer.prefix = [self._gather_tail(slices, num_before)]
            return run_split()
        if not layer.own:
            zeros = slices.new_zeros(1, slices.size(1), num_before)
            before = layer.prefix[0] if layer.prefix else zeros
            layer.own = [before.expand(slices.size(0), -1, -1)]
        whole = torch.cat([layer.own[0], slices], 2)
        layer.own = [whole[:, :, whole.size(2) - num_before :]]
        return run(whole)[:, :, num_before:]

    def _gather_tail(self, slices: Tensor, num_tokens: int) -> Tensor:
        """The last tokens of the row, on all ranks. One collective on the axis."""
        tail = slices[:, :, max(0, slices.size(2) - num_tokens) :].contiguous()
        parts = [tail]
        if self.axis.group is not None:
            parts = [torch.empty_like(tail) for _ in range(self.axis.size)]
            dist.all_gather(parts, tail, group=self.axis.group)
        whole = torch.cat(parts, 2)
        missing = num_tokens - whole.size(2)
        whole = torch.nn.functional.pad(whole, (max(0, missing), 0))
        return whole[:, :, whole.size(2) - num_tokens :].clone()

    def recur(
        self, run: StatefulRule, shared: Sequence[Tensor], own: Sequence[Tensor], parameters: Sequence[Tensor]
    ) -> Tensor:
        """Tensors as for run_on_whole_rows in train/recurrence/rules.py. Collective over the axis."""
        layer: States = self._get_layer("recurrence", States)
        axis, (batch, _, num_heads, _) = self.axis, own[0].shape
        plan = plan_heads(num_heads, shared[0].size(2), axis.size)
        chunk = plan.chunks[0]
        if self.documents is not None:
            spans = [chunk.keys] * len(shared) + [chunk.queries] * len(own)
            rows = [row[None] for row in gather_rows([*shared, *own], spans, axis)]
            before: Sequence[Tensor | None] = ()
        else:
            spans_of_rank = [chunk.keys[axis.rank]] * len(shared) + [chunk.queries[axis.rank]] * len(own)
            rows = [whole[:, :, slice(*span)] for whole, span in zip([*shared, *own], spans_of_rank, strict=True)]
            before = layer.own or [state.expand(batch, *state.shape[1:]) for state in layer.prefix]
        first, results, after = chunk.queries[axis.rank].start, [], []
        for number, (heads, groups) in enumerate(plan.list_runs(chunk, axis.rank)):
            mine = [whole[first + heads.start : first + heads.stop] for whole in parameters]
            parts = [row[:, :, slice(*groups)] for row in rows[: len(shared)]]
            own_parts = [row[:, :, slice(*heads)] for row in rows[len(shared) :]]
            result, state = run(parts, own_parts, mine, before[number] if before else None)
            assert state is not None, "a recurrence that was asked for its state returned none"
            results.append(result)
            after.append(state)
        if self.documents is not None:
            layer.prefix = after
            return scatter_rows(_join(results, 2)[0], chunk.queries, axis, batch)
        layer.own = after
        return self._gather_heads(_join(results, 2))


def _join(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)
