"""The reference for attention, written independently: the whole matrix of logits, autograd, no ranks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st
from torch import Tensor


@dataclass(frozen=True)
class Problem:
    """A case of attention on rows that ranks share. `lengths` are the documents of all rows of the batch together;
    `shared`: how many tokens of the last document that shares none each sees as its own first ones."""

    heads: int = 4
    kv_heads: int = 2
    dim: int = 8
    lengths: tuple[int, ...] = (16,)
    batch: int = 1
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    chunks: int = 1
    dtype: torch.dtype = torch.float64
    scale: float = field(default=0.3)
    value_dim: int = 0  # 0: as wide as keys
    shared: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """Returns the tokens of one row."""
        return sum(self.lengths) // self.batch

    @property
    def width(self) -> int:
        """Returns the numbers of one value."""
        return self.value_dim or self.dim


def make_tensors(problem: Problem, seed: int = 0) -> dict[str, Tensor]:
    """Returns q, k, v and dout [B, row, heads, dim] and sinks [heads], the same on every rank."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(problem.dtype)

    shape = (problem.batch, problem.tokens)
    return {
        "q": draw(*shape, problem.heads, problem.dim),
        "k": draw(*shape, problem.kv_heads, problem.dim),
        "v": draw(*shape, problem.kv_heads, problem.width),
        "sinks": draw(problem.heads),
        "dout": draw(*shape, problem.heads, problem.width),
    }


def draw_shared(draw: st.DrawFn, lengths: Sequence[int]) -> tuple[int, ...]:
    """Any number of branches behind any document."""
    shared, stem = list[int](), 0
    for document, length in enumerate(lengths):
        is_branch = document > 0 and draw(st.booleans())
        stem = stem if is_branch else length
        shared.append(draw(st.integers(1, stem)) if is_branch else 0)
    return tuple(shared)


def compute_reference(problem: Problem, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns output and gradients in float64."""
    leaves = {name: tensor.double().clone().requires_grad_() for name, tensor in tensors.items() if name != "dout"}
    total = problem.batch * problem.tokens
    q, k, v = (leaves[name].reshape(total, -1, tensors[name].size(-1)) for name in "qkv")
    group = problem.heads // problem.kv_heads
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    logits = torch.einsum("qhd,khd->hqk", q, k) * problem.scale
    if problem.softcap is not None:
        logits = problem.softcap * torch.tanh(logits / problem.softcap)
    owner = torch.repeat_interleave(torch.arange(len(problem.lengths)), torch.tensor(problem.lengths))
    shared = problem.shared or (0,) * len(problem.lengths)
    position = torch.cat([torch.arange(s, s + n) for s, n in zip(shared, problem.lengths, strict=True)])
    distance = position[:, None] - position
    can_see = owner[:, None] == owner
    for document, num_shared in enumerate(shared):
        if num_shared:
            stem = max(at for at in range(document) if not shared[at])
            can_see |= (owner == document)[:, None] & (owner == stem) & (position < num_shared)
    allowed = (distance >= 0) & can_see
    if problem.window is not None:
        allowed &= distance < problem.window
    logits = logits.masked_fill(~allowed, -math.inf)
    if problem.has_sinks:
        logits = torch.cat([logits, leaves["sinks"][:, None, None].expand(-1, total, 1)], -1)
    out = torch.einsum("hqk,khd->qhd", logits.softmax(-1)[..., :total], v)
    out = out.reshape(problem.batch, problem.tokens, problem.heads, problem.width)
    names = ["q", "k", "v", *(["sinks"] if problem.has_sinks else [])]
    grads = torch.autograd.grad(out, [leaves[name] for name in names], tensors["dout"].double())
    return {"out": out.detach(), **{f"d{name}": grad for name, grad in zip(names, grads, strict=True)}}
