"""Compiled flex attention. Its mask is stored by blocks and made once per row, from the documents' bounds."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ulysses_cli.train.attention.documents import Documents, walk_bounds
from ulysses_cli.train.attention.kernels.rule import Rule
from ulysses_cli.train.processes.compiling import compile_for_all_threads

FLEX_BLOCK = 128
MAX_USUAL_DIM = 256
# Blocks of torch's own choice for wider heads exceed a GPU's shared memory: a block of 32 tokens of 512 bfloat16 is
# 32 KB, and a kernel holds three of them forward, six backward.
NUM_BLOCKS_HELD = 6
WIDE_BLOCKS = (32, 16)  # tokens; a tensor core takes no fewer than 16
BLOCK_NAMES = ("BLOCK_M", "BLOCK_N", "BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2")


def forward_flex(q: Tensor, k: Tensor, v: Tensor, documents: Documents, rule: Rule) -> tuple[Tensor, Tensor]:
    return _call_flex(q, k, v, documents, rule)


def backward_flex(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, documents: Documents, rule: Rule
) -> tuple[Tensor, Tensor, Tensor]:
    """Flex attention has no separate backward, so its forward runs again under autograd. With sinks or in
    rounds, `out` and `lse` are those of more than these keys; the factor between the two normalisers turns the
    cotangent of one into that of the other."""
    with torch.enable_grad():
        inputs = tuple(tensor.detach().requires_grad_() for tensor in (q, k, v))
        plain_out, plain_lse = _call_flex(inputs[0], inputs[1], inputs[2], documents, rule)
        share = torch.exp(plain_lse.detach() - lse)  # 1 where these are all keys
        dlse = (share * (dout * (plain_out.detach() - out)).sum(-1).mT).to(plain_lse.dtype)
        scaled = (dout * share.mT[..., None]).to(dout.dtype)
        dq, dk, dv = torch.autograd.grad((plain_out, plain_lse), inputs, (scaled, dlse))
    return dq, dk, dv


def _call_flex(q: Tensor, k: Tensor, v: Tensor, documents: Documents, rule: Rule) -> tuple[Tensor, Tensor]:
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    softcap = rule.softcap

    def apply_softcap(score: Tensor, _b: Tensor, _h: Tensor, _q: Tensor, _k: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    mask = make_block_mask(documents.lengths, documents.key_lengths, rule, q.device)
    compiled = _compile_flex() if q.device.type == "cuda" else flex_attention
    heads = [tensor.transpose(0, 1)[None] for tensor in (q, k, v)]
    out, aux = compiled(
        *heads, score_mod=apply_softcap if softcap else None, block_mask=mask, scale=rule.scale,
        enable_gqa=q.size(1) != k.size(1), return_aux=AuxRequest(lse=True),
        kernel_options=pick_options(q.size(2), q.element_size(), q.device),
    )  # fmt: skip
    return out[0].transpose(0, 1), aux.lse[0]


def pick_options(head_dim: int, element_size: int, device: torch.device) -> dict[str, int] | None:
    """For wide heads, the largest blocks of which a kernel's fit into the GPU's shared memory. None: torch's choice."""
    if head_dim <= MAX_USUAL_DIM or device.type != "cuda":
        return None
    room = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)
    able = [tokens for tokens in WIDE_BLOCKS if NUM_BLOCKS_HELD * tokens * head_dim * element_size <= room]
    tokens = max(able, default=min(WIDE_BLOCKS))
    return {**dict.fromkeys(BLOCK_NAMES, tokens), "num_stages": 1, "num_warps": tokens // 4}


@lru_cache(maxsize=1)
def _compile_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    # past the limit torch runs it without a kernel, which holds all scores
    return compile_for_all_threads(flex_attention, dynamic=True)


@lru_cache(maxsize=2)  # one row's layers with and without a window. Tables grow with the square of the blocks
def make_block_mask(lengths: tuple[int, ...], key_lengths: tuple[int, ...], rule: Rule, device: torch.device) -> Any:
    """Lists, for each block of queries, the blocks of keys that any of them attends to: one contiguous run, computed
    from the bounds alone. No [tokens, tokens] mask is made. A document's queries are the last of its keys, or
    stand behind all of them."""
    from torch.nn.attention.flex_attention import BlockMask

    num_queries, num_keys, counts = sum(lengths), sum(key_lengths), torch.tensor(lengths)
    bounds = [*zip(walk_bounds(lengths), walk_bounds(key_lengths), strict=True)]
    # of each query, on the host: where its document's keys start, and its own place among the keys
    starts = torch.repeat_interleave(torch.tensor([keys[0] for _, keys in bounds]), counts)
    shifts = torch.repeat_interleave(torch.tensor([keys[1] - queries[1] for queries, keys in bounds]), counts)
    ends = torch.repeat_interleave(torch.tensor([keys[1] for _, keys in bounds]), counts)
    window_tokens, places = rule.window_tokens, torch.arange(num_queries) + shifts if rule.is_causal else ends - 1
    num_blocks, num_key_blocks = -(-num_queries // FLEX_BLOCK), -(-num_keys // FLEX_BLOCK)
    first_query = torch.arange(num_blocks) * FLEX_BLOCK
    last_query = (first_query + FLEX_BLOCK - 1).clamp(max=num_queries - 1)
    earliest = starts[first_query]
    if window_tokens is not None:
        earliest = torch.maximum(earliest, places[first_query] - window_tokens + 1)
    first_key = earliest // FLEX_BLOCK
    num_read = places[last_query] // FLEX_BLOCK - first_key + 1
    indices = (first_key[:, None] + torch.arange(num_key_blocks)).clamp(max=num_key_blocks - 1)
    start, place = starts.to(device), places.to(device)

    def is_allowed(_b: Tensor, _h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        allowed = (place[query] >= key) & (key >= start[query])
        return allowed if window_tokens is None else allowed & (place[query] - key < window_tokens)

    return BlockMask.from_kv_blocks(
        num_read[None, None].to(device, torch.int32), indices[None, None].to(device, torch.int32),
        BLOCK_SIZE=FLEX_BLOCK, mask_mod=is_allowed, seq_lengths=(num_queries, num_keys),
    )  # fmt: skip
