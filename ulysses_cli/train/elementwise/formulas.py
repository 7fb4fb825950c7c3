"""RMSNorm, rotary embedding and the gated SiLU, forward and backward, as plain torch. Compiled, each becomes one kernel
(a norm's backward two). Blocks of tokens keep the intermediate results small enough for a processor's cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

# How a norm's float32 result becomes its output. rounded: cast to the model's dtype, then scaled (Llama, Qwen);
# precise: scaled in float32, then cast (OLMo 2, gpt-oss); offset: scaled by 1 + weight in float32 (Gemma).
NormKind = Literal["rounded", "precise", "offset"]
BLOCK_ELEMENTS = 1 << 17  # half a MiB in float32


def normalize(hidden: Tensor, weight: Tensor, eps: float, kind: str) -> tuple[Tensor, Tensor]:
    """Returns the output and one float32 number for each row."""
    precise = hidden.float()
    rstd = torch.rsqrt(precise.square().mean(-1, keepdim=True) + eps)
    normalized = precise * rstd
    if kind == "rounded":
        return normalized.to(hidden.dtype) * weight, rstd
    return (normalized * _scale(weight, kind)).to(hidden.dtype), rstd


def normalize_backward(dout: Tensor, hidden: Tensor, weight: Tensor, rstd: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Returns the gradient of the input, and that of the weight in float32."""
    normalized, precise = hidden.float() * rstd, dout.float()
    scaled = precise * _scale(weight, kind)
    share = (scaled * normalized).mean(-1, keepdim=True)
    dhidden = (scaled - normalized * share) * rstd
    return dhidden.to(hidden.dtype), (precise * normalized).flatten(0, -2).sum(0)


def _scale(weight: Tensor, kind: str) -> Tensor:
    return weight.float() + 1 if kind == "offset" else weight.float()


def walk_blocks(num_rows: int, width: int, elements: int = BLOCK_ELEMENTS) -> Iterator[slice]:
    rows = max(1, elements // width)
    for start in range(0, num_rows, rows):
        yield slice(start, min(start + rows, num_rows))


def normalize_in_blocks(hidden: Tensor, weight: Tensor, eps: float, kind: str) -> tuple[Tensor, Tensor]:
    rows = hidden.reshape(-1, hidden.size(-1))
    out = torch.empty_like(rows)
    rstd = torch.empty(rows.size(0), 1, dtype=torch.float32, device=rows.device)
    scale = weight if kind == "rounded" else _scale(weight, kind)
    for part in walk_blocks(*rows.shape):
        precise = rows[part].float()
        norm = torch.linalg.vector_norm(precise, dim=-1, keepdim=True)
        torch.rsqrt(norm.square_().div_(rows.size(1)).add_(eps), out=rstd[part])
        if kind == "rounded":
            torch.mul(precise, rstd[part], out=out[part]).mul_(scale)
        else:
            torch.mul(precise * rstd[part], scale, out=out[part])
    return out.view(hidden.shape), rstd.view(*hidden.shape[:-1], 1)


def normalize_backward_in_blocks(
    dout: Tensor, hidden: Tensor, weight: Tensor, rstd: Tensor, kind: str
) -> tuple[Tensor, Tensor]:
    rows, grads = hidden.reshape(-1, hidden.size(-1)), dout.reshape(-1, hidden.size(-1))
    inverse, scale = rstd.reshape(-1, 1), _scale(weight, kind)
    dhidden, dweight = torch.empty_like(rows), torch.zeros_like(scale)
    for part in walk_blocks(*rows.shape):
        normalized, precise = rows[part] * inverse[part], grads[part].float()
        products = precise * normalized
        dweight += products.sum(0)
        share = torch.mv(products, scale).div_(-rows.size(1))[:, None]
        scaled = (precise * scale).addcmul_(normalized, share)
        torch.mul(scaled, inverse[part], out=dhidden[part])
    return dhidden.view(hidden.shape), dweight


def rotate(hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates pairs of the first cos.size(-1) elements, half of them apart. The others pass unchanged. The result is
    laid out in memory as `hidden`, and rounded to its dtype where the angles are more precise. torch's compiler makes
    one kernel of this; it takes no `out=` of a part."""
    half = cos.size(-1) // 2
    pairs = hidden[..., : 2 * half]
    rotated = pairs * cos + pairs.roll(half, -1) * _negate_first_half(sin)
    return _join(rotated.to(hidden.dtype), hidden)


def rotate_backward(dout: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The transposed rotation: for equal halves of cos and sin, that by the negative angle."""
    half = cos.size(-1) // 2
    pairs = dout[..., : 2 * half]
    rotated = pairs * cos + (pairs * _negate_first_half(sin)).roll(half, -1)
    return _join(rotated.to(dout.dtype), dout)


def rotate_in_blocks(hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = sin.chunk(2, -1)
    return _rotate_in_blocks(hidden, cos, -1, first, second)


def rotate_backward_in_blocks(dout: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = sin.chunk(2, -1)
    return _rotate_in_blocks(dout, cos, 1, second, first)


def _rotate_in_blocks(hidden: Tensor, cos: Tensor, sign: int, of_second: Tensor, of_first: Tensor) -> Tensor:
    """Adds, with the sign, a share of the second element of each pair to the first; with the other sign, a share of the
    first to the second."""
    half = cos.size(-1) // 2
    out = torch.empty_like(hidden)
    out[..., 2 * half :] = hidden[..., 2 * half :]
    dim = max(range(-cos.dim(), -1), key=cos.size)  # tokens: the only rows whose angles differ
    for part in walk_blocks(hidden.size(dim), hidden.numel() // hidden.size(dim)):
        rows, angles, rotated, first, second = (
            each.narrow(dim, part.start, part.stop - part.start) for each in (hidden, cos, out, of_first, of_second)
        )
        torch.mul(rows[..., : 2 * half], angles, out=rotated[..., : 2 * half])
        rotated[..., :half].addcmul_(rows[..., half : 2 * half], second, value=sign)
        rotated[..., half : 2 * half].addcmul_(rows[..., :half], first, value=-sign)
    return out


def _negate_first_half(sin: Tensor) -> Tensor:
    places = torch.arange(sin.size(-1), device=sin.device)
    return torch.where(places < sin.size(-1) // 2, -sin, sin)


def _join(rotated: Tensor, hidden: Tensor) -> Tensor:
    """The rotated elements, and behind them those that pass unchanged."""
    width = rotated.size(-1)
    if width == hidden.size(-1):
        return rotated
    out = torch.empty_like(hidden)
    out[..., :width], out[..., width:] = rotated, hidden[..., width:]
    return out


def gate(gates: Tensor, values: Tensor) -> Tensor:
    """silu(gates) * values, rounded once."""
    return (functional.silu(gates.float()) * values.float()).to(gates.dtype)


def gate_backward(dout: Tensor, gates: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    precise, grad = gates.float(), dout.float()
    share = torch.sigmoid(precise)
    dgates = grad * values.float() * share * (1 + precise * (1 - share))
    return dgates.to(gates.dtype), (grad * precise * share).to(values.dtype)
