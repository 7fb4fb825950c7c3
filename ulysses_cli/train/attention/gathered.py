"""Attention with all keys of a query in one kernel call. On a ring these are fetched in one collective, and their
gradients return in one; no partial results are merged."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ulysses_cli.train.attention.kernel_task import KernelTask, cut
from ulysses_cli.train.attention.kernels.operators import attend, list_options, run_backward
from ulysses_cli.train.attention.keys import fetch_keys, return_gradients


def attend_gathered(rows: Sequence[Tensor], sinks: Tensor | None, task: KernelTask) -> tuple[Tensor, Tensor]:
    """Takes q [n, heads, D], k and v [n, kv_heads, D or V] and the sinks of these heads; returns out [n, heads, V] and
    log-sum-exp [heads, n]. Collective over the ring where its ranks need keys of each other."""
    rows = _fetch(rows, task)
    calls = list(task.walk(task.calls.parts))
    whole: tuple[Tensor, Tensor] | None = None
    for queries, keys, part in calls:
        q, k, v = cut(rows, queries, keys, part)
        own_sinks = None if sinks is None else sinks[queries]
        out, lse = attend(q, k, v, own_sinks, *list_options(part.documents, task.kernel, task.rule))
        if len(calls) == 1:
            return out, lse
        if whole is None:
            tokens, heads, _ = rows[0].shape
            whole = out.new_empty(tokens, heads, out.size(2)), lse.new_empty(heads, tokens)
        whole[0][part.queries, queries] = out
        whole[1][queries, part.queries] = lse
    assert whole is not None
    return whole


def backward_gathered(rows: Sequence[Tensor], dout: Tensor, out: Tensor, lse: Tensor, task: KernelTask) -> list[Tensor]:
    """Returns the gradients of the rows. Keys of other ranks are fetched again, so that none is kept from the
    forward."""
    fetched = _fetch(rows, task)
    grads = _run_kernels(fetched, dout, out, lse, task)
    del fetched
    grads[1:] = return_gradients(grads[1], grads[2], task.calls.plan, task.ring, dout.dtype)
    return grads


def _fetch(rows: Sequence[Tensor], task: KernelTask) -> list[Tensor]:
    """This rank's queries, and the keys and values that they attend to."""
    q, k, v = rows
    return [q, *fetch_keys(k, v, task.calls.plan, task.ring)]


def _run_kernels(rows: Sequence[Tensor], dout: Tensor, out: Tensor, lse: Tensor, task: KernelTask) -> list[Tensor]:
    """Gradients of queries, and of all keys and values that they attend to. A key of several parts gets the sum of its
    gradients: that of two is rounded once, more are summed in float32 or better. Each part uses the log-sum-exp of its
    queries over all of their keys, so gradients of parts need no correction."""
    calls, whole = list(task.walk(task.calls.parts)), list[Tensor]()
    for queries, keys, part in calls:
        own_lse = lse[queries, part.queries]
        tensors = (dout[part.queries, queries], *cut(rows, queries, keys, part), out[part.queries, queries])
        lse_here = own_lse if len(calls) == 1 else own_lse.contiguous()
        grads = run_backward(*tensors, lse_here, *list_options(part.documents, task.kernel, task.rule))
        if len(calls) == 1:
            return list(grads)
        if not whole:
            precise = torch.promote_types(dout.dtype, torch.float32)
            precision = precise if len(task.calls.parts) > 2 else dout.dtype
            whole = [torch.empty_like(rows[0]), *(torch.zeros_like(row, dtype=precision) for row in rows[1:])]
        whole[0][part.queries, queries] = grads[0]
        for total, grad in zip(whole[1:], grads[1:], strict=True):
            total[part.keys, keys] += grad
    return whole
