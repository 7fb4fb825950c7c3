"""Delta rules and state-space scans on split rows: heads are exchanged, the model's own rule runs on whole rows of this
rank's heads, one document at a time, and the result is exchanged back. The state begins anew in each document.
Tensors of unlike widths and dtypes travel as bytes in one collective. A head that several ranks use gets its
gradient as the sum of theirs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ulysses_cli.train.attention.documents import Documents, walk_bounds
from ulysses_cli.train.attention.heads import Spans, plan_heads
from ulysses_cli.train.clock import part_of_step, watch_backward
from ulysses_cli.train.memory.checkpointing import compute_and_save
from ulysses_cli.train.processes.groups import SequenceAxis

# packed: the package's kernel, called once with the bounds of documents; by document: called for each document.
Kernel = Literal["packed", "by document", "torch"]
ALIGNMENT_BYTES = 16  # a tensor of any dtype may begin there

# Shapes. B rows in a batch, S tokens of a row on this rank, P ranks that share it, T = B x P x S tokens in all,
# h heads of one tensor on one rank, D values of a head.


def pick_function(original: Callable[..., Any], kernel: Kernel) -> Callable[..., Any]:
    """transformers wraps its torch code with a function that calls an installed package instead."""
    return getattr(original, "__wrapped__", original) if kernel == "torch" else original


def gather_rows(slices: Sequence[Tensor], spans: Sequence[Spans], axis: SequenceAxis) -> list[Tensor]:
    """Takes tensors [B, S, all heads, D], returns [T, h, D]. `spans` lists which heads of each tensor each rank gets.
    Collective over the axis: one exchange forward, one backward."""
    if axis.group is None:
        return [part.flatten(0, 1) for part in slices]
    return list(_ToRows.apply(axis, tuple(spans), *slices))


def scatter_rows(rows: Tensor, spans: Spans, axis: SequenceAxis, batch: int) -> Tensor:
    """Takes [T, h, D], returns [B, S, all heads, D]. Collective over the axis: one exchange forward, one backward."""
    if axis.group is None:
        return rows.unflatten(0, (batch, -1))
    slices: Tensor = _ToSlices.apply(axis, spans, batch, rows)
    return slices


class _ToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: SequenceAxis, spans: tuple[Spans, ...], *slices: Tensor) -> tuple[Tensor, ...]:
        ctx.axis, ctx.spans, ctx.batch = axis, spans, slices[0].size(0)
        return tuple(_exchange_in(slices, spans, axis))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *_exchange_out(grads, ctx.spans, ctx.axis, ctx.batch)


class _ToSlices(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: SequenceAxis, spans: Spans, batch: int, rows: Tensor) -> Tensor:
        ctx.axis, ctx.spans = axis, spans
        return _exchange_out([rows], [spans], axis, batch)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, _exchange_in([grad], [ctx.spans], ctx.axis)[0]


def _exchange_in(slices: Sequence[Tensor], spans: Sequence[Spans], axis: SequenceAxis) -> list[Tensor]:
    outgoing = [
        [part[:, :, slice(*of_ranks[rank])] for part, of_ranks in zip(slices, spans, strict=True)]
        for rank in range(axis.size)
    ]
    incoming = _trade(outgoing, [outgoing[axis.rank]] * axis.size, axis)
    return [torch.stack(parts, 1).flatten(0, 2) for parts in zip(*incoming, strict=True)]


def _exchange_out(rows: Sequence[Tensor], spans: Sequence[Spans], axis: SequenceAxis, batch: int) -> tuple[Tensor, ...]:
    by_rank = [row.unflatten(0, (batch, axis.size, -1)).unbind(1) for row in rows]
    like = [
        [
            parts[0][:, :, :1].expand(-1, -1, of_ranks[rank].num_heads, -1)
            for parts, of_ranks in zip(by_rank, spans, strict=True)
        ]
        for rank in range(axis.size)
    ]
    incoming = _trade([list(parts) for parts in zip(*by_rank, strict=True)], like, axis)
    return tuple(
        _add_up(list(parts), of_ranks) for parts, of_ranks in zip(zip(*incoming, strict=True), spans, strict=True)
    )


def _add_up(parts: Sequence[Tensor], spans: Spans) -> Tensor:
    """Puts each rank's heads in their place. Heads of several ranks are summed, in float32 or better."""
    batch, tokens, _, dim = parts[0].shape
    num_heads, is_shared = max(span.stop for span in spans), sum(span.num_heads for span in spans)
    dtype = parts[0].dtype if is_shared == num_heads else torch.promote_types(parts[0].dtype, torch.float32)
    whole = torch.zeros(batch, tokens, num_heads, dim, dtype=dtype, device=parts[0].device)
    for part, span in zip(parts, spans, strict=True):
        whole[:, :, slice(*span)] += part
    return whole.to(parts[0].dtype)


def _trade(
    outgoing: Sequence[Sequence[Tensor]], like: Sequence[Sequence[Tensor]], axis: SequenceAxis
) -> list[list[Tensor]]:
    """Sends each rank its tensors, returns each rank's tensors, shaped `like`. One collective on the axis: all its
    ranks reach it, since they run the same layers on slices of the same rows."""
    device = outgoing[0][0].device
    send = torch.empty(sum(map(_count_bytes, outgoing)), dtype=torch.uint8, device=device)
    received = torch.empty(sum(map(_count_bytes, like)), dtype=torch.uint8, device=device)
    for target, part in zip(_view_parts(send, outgoing), outgoing, strict=True):
        for view, tensor in zip(target, part, strict=True):
            view.copy_(tensor)
    with part_of_step("exchange"):
        splits = [_count_bytes(parts) for parts in like], [_count_bytes(parts) for parts in outgoing]
        dist.all_to_all_single(received, send, *splits, group=axis.group)
    return _view_parts(received, like)


def _view_parts(buffer: Tensor, like: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    views: list[list[Tensor]] = []
    begin = 0
    for tensors in like:
        views.append([])
        for tensor in tensors:
            num_bytes = tensor.numel() * tensor.dtype.itemsize
            views[-1].append(buffer[begin : begin + num_bytes].view(tensor.dtype).view(tensor.shape))
            begin += _align(num_bytes)
    return views


def _count_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(_align(tensor.numel() * tensor.dtype.itemsize) for tensor in tensors)


def _align(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


# Takes tensors [1, T, h, D] of one document: those of groups of heads, then those of heads, and parameters [h].
# Returns [1, T, h, D]. A kernel that packs takes whole rows and the documents' bounds.
Rule = Callable[..., Tensor]
# The same with the state before, for one sequence per row of the batch. Returns the result and the state after.
StatefulRule = Callable[
    [Sequence[Tensor], Sequence[Tensor], Sequence[Tensor], Tensor | None], tuple[Tensor, Tensor | None]
]


class StateKeeper(Protocol):
    """Keeps recurrences' states from forward to forward, for generation."""

    def recur(
        self, run: StatefulRule, shared: Sequence[Tensor], own: Sequence[Tensor], parameters: Sequence[Tensor]
    ) -> Tensor:
        """Takes and returns tensors as run_on_whole_rows does. Collective over the axis."""


def apply_delta_rule(
    rule: Callable[..., tuple[Tensor, Any]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    documents: Documents | None,
    axis: SequenceAxis,
    options: dict[str, Any],
    kernel: Kernel = "by document",
    generation: StateKeeper | None = None,
) -> Tensor:
    """Takes query and key [B, S, key heads, Dk], value [B, S, heads, Dv], beta [B, S, heads], and the log of the decay
    g [B, S, heads] or, for each channel, [B, S, heads, Dk]. Returns [B, S, heads, Dv]."""
    has_channels = g.dim() == 4

    function = pick_function(rule, kernel)

    def call(shared: Sequence[Tensor], own: Sequence[Tensor], **more: Any) -> tuple[Tensor, Tensor | None]:
        (q, k), (v, decay, strength) = shared, own
        decay = decay if has_channels else decay[..., 0]
        result: tuple[Tensor, Tensor | None] = function(q, k, v, g=decay, beta=strength[..., 0], **options, **more)
        return result

    def run(shared: Sequence[Tensor], own: Sequence[Tensor], _: Sequence[Tensor], **bounds: Tensor) -> Tensor:
        return call(shared, own, **bounds)[0]

    def run_on(
        shared: Sequence[Tensor], own: Sequence[Tensor], _: Sequence[Tensor], state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        return call(shared, own, initial_state=state, output_final_state=True)

    own = [value, g if has_channels else g[..., None], beta[..., None]]
    if generation is not None:
        return generation.recur(run_on, [query, key], own, [])
    assert documents is not None, "rows without documents"
    bounds = list_bounds(documents) if kernel == "packed" else {}
    return run_on_whole_rows(run, [query, key], own, [], documents, axis, bounds)


def apply_scan(
    scan: Callable[..., Tensor],
    hidden: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    of_heads: dict[str, Tensor | None],
    documents: Documents | None,
    axis: SequenceAxis,
    options: dict[str, Any],
    kernel: Kernel = "by document",
    generation: StateKeeper | None = None,
) -> Tensor:
    """Mamba2's scan. Takes hidden [B, S, heads, D], dt [B, S, heads], b and c [B, S, groups, N]; returns
    [B, S, heads, D]. `of_heads`: parameters [heads]. A rank uses those of its own heads; their gradients are zero for
    other heads, so that the sum over ranks is right, as it is for every weight."""

    names = [name for name, whole in of_heads.items() if whole is not None]

    function = pick_function(scan, kernel)

    def run(shared: Sequence[Tensor], own: Sequence[Tensor], parameters: Sequence[Tensor], **more: Any) -> Any:
        (x, steps), (b_rows, c_rows) = own, shared
        by_name = dict(zip(names, parameters, strict=True))
        return function(x, steps[..., 0], by_name.pop("A"), b_rows, c_rows, **by_name, **options, **more)

    def run_on(
        shared: Sequence[Tensor], own: Sequence[Tensor], parameters: Sequence[Tensor], state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        result: tuple[Tensor, Tensor] = run(shared, own, parameters, initial_states=state, return_final_states=True)
        return result

    parameters = [whole for whole in of_heads.values() if whole is not None]
    if generation is not None:
        return generation.recur(run_on, [b, c], [hidden, dt[..., None]], parameters)
    assert documents is not None, "rows without documents"
    bounds = {"seq_idx": number_tokens(documents)} if kernel == "packed" else {}
    return run_on_whole_rows(run, [b, c], [hidden, dt[..., None]], parameters, documents, axis, bounds)


def list_bounds(documents: Documents) -> dict[str, Tensor]:
    """The documents' bounds as flash-linear-attention takes them: on the host too, so that it need not wait for the
    device. transformers leaves out what the installed release does not take."""
    on_device, on_host = documents.long_bounds
    return {"cu_seqlens": on_device, "cu_seqlens_cpu": on_host}


def number_tokens(documents: Documents) -> Tensor:
    """Each token's document, int32 [1, T], without waiting for the device."""
    starts = torch.zeros(documents.num_tokens, dtype=torch.int32, device=documents.cu_seqlens.device)
    starts[documents.cu_seqlens[1:-1].long()] = 1
    return starts.cumsum(0, dtype=torch.int32)[None]


def run_on_whole_rows(
    rule: Rule,
    shared: Sequence[Tensor],
    own: Sequence[Tensor],
    parameters: Sequence[Tensor],
    documents: Documents,
    axis: SequenceAxis,
    bounds: Mapping[str, Tensor],
) -> Tensor:
    """`own`: tensors [B, S, heads, D]; `shared`: tensors [B, S, groups, D], where a group serves heads / groups heads
    that adjoin; `parameters`: tensors [heads]. With `bounds`, the rule takes all documents at once.

    Returns the rule's results as slices with all heads. Collective over the axis. A checkpointed layer saves the
    result, so that its recomputation needs neither the rule nor a collective.
    """
    batch, tokens, num_heads, _ = own[0].shape
    documents.check_num_tokens(batch, tokens, axis.size)
    plan = plan_heads(num_heads, shared[0].size(2), axis.size)
    chunk = plan.chunks[0]
    num_shared = len(shared)  # `compute` lives until the backward: it must hold no tensor
    spans = [chunk.keys] * num_shared + [chunk.queries] * len(own)
    first = chunk.queries[axis.rank].start

    def compute(*tensors: Tensor) -> Tensor:
        rows = gather_rows(tensors[: len(spans)], spans, axis)
        shared_rows, own_rows, wholes = rows[:num_shared], rows[num_shared:], tensors[len(spans) :]
        results = []
        for heads, groups in plan.list_runs(chunk, axis.rank):
            mine = [whole[first + heads.start : first + heads.stop] for whole in wholes]
            parts = [row[:, slice(*groups)] for row in shared_rows], [row[:, slice(*heads)] for row in own_rows]
            with part_of_step("recurrence"):
                results.append(_run_documents(rule, *parts, mine, documents, bounds))
            watch_backward("recurrence", results[-1], parts[1][0], "projections")
        return scatter_rows(_join(results, 1), chunk.queries, axis, batch)

    return compute_and_save(compute, *shared, *own, *parameters)


def _run_documents(
    rule: Rule,
    shared: Sequence[Tensor],
    own: Sequence[Tensor],
    parameters: Sequence[Tensor],
    documents: Documents,
    bounds: Mapping[str, Tensor],
) -> Tensor:
    """Each document is a call of its own: no state passes from one to the next. With `bounds` the kernel sees to it."""
    if bounds:
        return rule([row[None] for row in shared], [row[None] for row in own], parameters, **bounds)[0]
    results = [
        rule([row[None, begin:end] for row in shared], [row[None, begin:end] for row in own], parameters)[0]
        for begin, end in walk_bounds(documents.lengths)
    ]
    return _join(results, 0)


def _join(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)
