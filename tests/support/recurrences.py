"""The recurrences by their definitions, token by token."""

import torch
from torch import Tensor


def run_delta_rule(q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor) -> tuple[Tensor, None]:
    """The gated delta rule, token by token. A key head serves the value heads that adjoin."""
    group = v.size(2) // k.size(2)
    state = torch.zeros(v.size(0), v.size(2), k.size(3), v.size(3), dtype=v.dtype)
    outputs = []
    for t in range(v.size(1)):
        query, key = (part[:, t].repeat_interleave(group, 1) for part in (q, k))
        decay = g[:, t] if g.dim() == 4 else g[:, t, :, None]
        state = state * decay.exp()[..., None]
        correction = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", state, key))
        state = state + key[..., None] * correction[..., None, :]
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, query))
    return torch.stack(outputs, 1), None


def run_scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, *, D: Tensor, dt_bias: Tensor) -> Tensor:
    group, steps = x.size(2) // b.size(2), torch.nn.functional.softplus(dt + dt_bias)
    state = torch.zeros(x.size(0), x.size(2), b.size(3), x.size(3), dtype=x.dtype)
    outputs = []
    for t in range(x.size(1)):
        into, out_of = (part[:, t].repeat_interleave(group, 1) for part in (b, c))
        state = state * (steps[:, t] * a).exp()[..., None, None]
        state = state + steps[:, t, :, None, None] * into[..., None] * x[:, t, :, None, :]
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, out_of) + D[:, None] * x[:, t])
    return torch.stack(outputs, 1)
