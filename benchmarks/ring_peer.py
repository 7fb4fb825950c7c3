"""Ring attention as ring-flash-attention's zigzag computes it, written in plain torch: each rank passes all its keys
and values on, step by step, and in the backward their gradients in float32 too. Compared with the rounds of this
project on the same tensors: values against plain attention in float64, bytes sent, collectives, peak bytes.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from support.byte_counter import ByteCounter
from torch import Tensor

from ulysses_cli.plan.layout import Layout
from ulysses_cli.plan.rows.ring import Ring, deal_row
from ulysses_cli.train.attention.documents import make_documents
from ulysses_cli.train.attention.kernels.native import Rule
from ulysses_cli.train.attention.ulysses import ulysses_attention
from ulysses_cli.train.processes.groups import make_groups

HEADS, KV_HEADS, DIM, SCALE = 8, 2, 64, 0.125
aten = torch.ops.aten


class Counter(ByteCounter):
    """Counts bytes alive, collectives, and the bytes that a rank sends."""

    def __init__(self) -> None:
        super().__init__()
        self.num_collectives = self.sent_bytes = 0

    def run(self, op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if str(op).startswith("c10d"):
            self.num_collectives += 1
            self.sent_bytes += args[1].nbytes
        return op(*args, **kwargs)


class ZigzagRing(torch.autograd.Function):
    """q [S, h, D], k and v [S, h_k, D]: the first half of a rank's tokens is chunk `rank` of the row, the second half
    the chunk that is as far from its end."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rank, size, half = dist.get_rank(), dist.get_world_size(), q.size(0) // 2
        held, out, lse = (k, v), torch.empty(0), torch.empty(0)
        for step in range(size):
            if step:
                held = tuple(map(pass_on, held))
            if step == 0:
                part, out_lse = attend(q, *held, is_causal=True)
                out, lse = part.float(), out_lse
            elif step <= rank:
                merge(out, lse, *attend(q, held[0][:half], held[1][:half], is_causal=False))
            else:
                merge(out[half:], lse[:, half:], *attend(q[half:], *held, is_causal=False))
        ctx.save_for_backward(q, k, v, out.to(q.dtype), lse)
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        rank, size, half = dist.get_rank(), dist.get_world_size(), q.size(0) // 2
        held, whole = (k, v), slice(None)
        dq, dk, dv = (torch.zeros(each.shape) for each in (q, k, v))
        for step in range(size):
            if step:
                held, dk, dv = tuple(map(pass_on, held)), pass_on(dk), pass_on(dv)
            queries = slice(half, None) if step > rank else whole
            keys = slice(0, half) if 0 < step <= rank else whole
            grads = attend_backward(
                dout[queries], q[queries], held[0][keys], held[1][keys], out[queries], lse[:, queries], step == 0
            )
            dq[queries] += grads[0]
            dk[keys] += grads[1]
            dv[keys] += grads[2]
        dk, dv = pass_on(dk), pass_on(dv)  # home
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


def pass_on(tensor: Tensor) -> Tensor:
    """Sends a tensor to the next rank and returns the previous rank's. Every rank calls it in every step."""
    rank, size = dist.get_rank(), dist.get_world_size()
    incoming, outgoing = [0] * size, [0] * size
    incoming[(rank - 1) % size] = outgoing[(rank + 1) % size] = tensor.size(0)
    received = torch.empty_like(tensor)
    dist.all_to_all_single(received, tensor.contiguous(), incoming, outgoing)
    return received


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    out -= torch.sigmoid(part_lse - lse).mT[..., None] * (out - part)
    lse -= torch.nn.functional.logsigmoid(lse - part_lse)


def attend(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> tuple[Tensor, Tensor]:
    heads = [tensor.float().transpose(0, 1)[None] for tensor in (q, k, v)]
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*heads, 0.0, is_causal, scale=SCALE)
    return out[0].transpose(0, 1).to(q.dtype), lse[0]


def attend_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool
) -> list[Tensor]:
    heads = [tensor.float().transpose(0, 1)[None] for tensor in (dout, q, k, v, out)]
    grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(*heads, lse[None], 0.0, is_causal, scale=SCALE)
    return [grad[0].transpose(0, 1).to(q.dtype) for grad in grads]


def compare_with_peer(device: torch.device, tokens: int) -> dict[str, dict[str, float]]:
    """On a rank: errors against plain attention in float64, and what each side sends and holds. In bfloat16."""
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = make_groups(Layout(sp_size=size, ring_size=size), timedelta(minutes=2))
    generator = torch.Generator().manual_seed(0)
    row = [
        torch.randn(tokens, heads, DIM, generator=generator).bfloat16() for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    ]
    order = deal_row((tokens,), Ring(size))
    own = torch.tensor([token for run in order[rank] for token in range(*run)])
    leaves = [tensor.double().requires_grad_() for tensor in row[:3]]
    reference = attend_plainly(*leaves)
    expected = [reference.detach(), *torch.autograd.grad(reference, leaves, row[3].double())]
    sides: dict[str, Any] = {
        "zigzag ring": ZigzagRing.apply,
        "ours, in rounds": make_ours(groups, tokens, 0.0),
        "ours, at once": make_ours(groups, tokens, 1e9),
    }
    results = {}
    for name, side in sides.items():
        inputs = [tensor[own].requires_grad_() for tensor in row[:3]]
        with Counter() as counter:
            counter.ignore(*inputs, row[3])
            out = side(*inputs)
            grads = torch.autograd.grad(out, inputs, row[3][own])
        pairs = zip((out.detach(), *grads), expected, strict=True)
        errors = [((got.double() - all_[own]).abs().max() / all_.abs().max()).item() for got, all_ in pairs]
        results[name] = {
            "largest error of out": errors[0],
            "largest error of a gradient": max(errors[1:]),
            "collectives": counter.num_collectives,
            "sent, of a rank's keys and values": counter.sent_bytes / (inputs[1].nbytes + inputs[2].nbytes),
            "peak, of a rank's keys and values": counter.peak / (inputs[1].nbytes + inputs[2].nbytes),
        }
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, results)
    return {
        name: {what: max(each[name][what] for each in everyone) for what in values} for name, values in results.items()
    }


def make_ours(groups: Any, tokens: int, max_shares: float) -> Any:
    documents = make_documents(
        (tokens,), order=deal_row((tokens,), Ring(groups.layout.ring_size)), max_shares=max_shares
    )

    def side(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = ulysses_attention(
            q[None], k[None], v[None], documents, Rule(SCALE),
            axis=groups.ulysses_axis, ring=groups.ring_axis, kernel="sdpa",
        )  # fmt: skip
        return out[0]

    return side


def attend_plainly(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (tensor.repeat_interleave(q.size(1) // tensor.size(1), 1) for tensor in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q, k) * SCALE
    hidden = torch.ones(q.size(0), q.size(0), dtype=torch.bool).triu(1)
    return torch.einsum("hqk,khd->qhd", logits.masked_fill(hidden, float("-inf")).softmax(-1), v)
