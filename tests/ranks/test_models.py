"""Compares every model family, with rows split over ranks by heads, on a ring or both, with the plain model on one
process.

The models run through transformers' own interface. Compared are the logits' loss and the gradient of every parameter,
with documents that do not attend to each other.
"""

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.families import ATTENTION_ONLY, TELLING, make_model
from support.hybrids import HYBRIDS, make_hybrid
from support.rank_pool import run_on_ranks
from support.split_attention import ALWAYS, NEVER, list_tokens, make_axes
from support.tiers import NUM_RANKS, mark_by, sample
from torch import Tensor

from ulysses_cli.plan.rows.ring import Ring, deal_rows
from ulysses_cli.train.attention.documents import make_documents
from ulysses_cli.train.attention.interface import register_attention, serve_rotary
from ulysses_cli.train.memory.checkpointing import checkpoint_layers
from ulysses_cli.train.processes.groups import NO_AXIS, make_sequence_axis
from ulysses_cli.train.recurrence.interface import serve_recurrent_layers

Lengths = tuple[int, ...]
LENGTHS: Lengths = (21, 1, 30, 12)


@dataclass(frozen=True)
class Split:
    """A model whose packed row all ranks share, by heads and over a ring. Its keys come in rounds where they are more
    than `max_shares`. `checkpointing` is transformers' own, or one of ours."""

    model_type: str
    chunks: int = 1
    checkpointing: str = ""
    changes: dict[str, Any] = field(default_factory=dict)
    max_shares: float | None = None
    ring_size: int = 1
    lengths: Lengths = LENGTHS
    in_double: bool = False

    def make(self, attention: str) -> Any:
        return (make_hybrid if self.model_type in HYBRIDS else make_model)(self.model_type, attention, **self.changes)


def make_row(lengths: Lengths) -> tuple[Tensor, Tensor]:
    """Returns token ids and their positions, which start at 0 in each document."""
    ids = torch.randint(3, 64, (1, sum(lengths)), generator=torch.Generator().manual_seed(1))
    return ids, torch.cat([torch.arange(length) for length in lengths])[None]


def compute_loss(logits: Tensor, ids: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).double(), ids.flatten() * 7 % 64, reduction="sum")


def run_plain(split: Split) -> tuple[Tensor, dict[str, Tensor]]:
    """Runs each document by itself through the model's eager attention, without packing."""
    model, (ids, _) = split.make("eager"), make_row(split.lengths)
    total = torch.zeros((), dtype=torch.float64)
    for document in ids.split(split.lengths, 1):
        total = total + compute_loss(model(document, use_cache=False).logits, document)
    total.backward()
    return total.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def run_split(split: Split) -> tuple[Tensor, dict[str, Tensor]]:
    lengths, ring_size = split.lengths, split.ring_size
    axis = make_sequence_axis(dist.group.WORLD if dist.is_initialized() else None)
    heads, ring = (axis, NO_AXIS) if ring_size == 1 else make_axes(ring_size)
    order = deal_rows(lengths, 1, Ring(ring_size)) if ring_size > 1 else ()
    model = split.make(register_attention(heads, "sdpa", split.chunks, ring=ring))
    if split.checkpointing == "transformers":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    elif split.checkpointing:
        checkpoint_layers(model, split.checkpointing)  # type: ignore[arg-type]
    model.train()
    serve_rotary(model, axis)
    assert bool(serve_recurrent_layers(model, axis)) == (split.model_type in HYBRIDS)
    if order:
        documents = make_documents(lengths, order=order, max_shares=split.max_shares)
        own = list_tokens(order, 1, heads.size)[axis.rank, 0]
    else:
        documents, own = make_documents(lengths), torch.arange(sum(lengths)).chunk(axis.size)[axis.rank]
    ids, positions = (whole[:, own] for whole in make_row(lengths))
    logits = model(ids, position_ids=positions, use_cache=False, documents=documents).logits
    loss = compute_loss(logits, ids)
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    total = loss.detach()
    if axis.group is not None:
        for tensor in (total, *grads.values()):
            dist.all_reduce(tensor)
    return total, grads


def compare_models(split: Split) -> float:
    """Returns the largest differences of loss and gradients, relative to the largest value of each."""
    with without_casts() if split.in_double else ExitStack():
        loss, grads = run_split(split)
        if dist.is_initialized() and dist.get_rank():
            return 0.0  # all ranks have the same sums
        expected_loss, expected = run_plain(split)
    assert grads.keys() == expected.keys()
    errors = [
        ((grads[name] - right).abs().max() / right.abs().max().clamp(min=1e-12)).item()
        for name, right in expected.items()
    ]
    return max(*errors, abs(loss - expected_loss).item() / expected_loss.item())


def without_casts() -> ExitStack:
    """Families cast parts of their forward to float32. Within this context these casts give float64."""
    stack = ExitStack()
    for patch in (
        mock.patch.object(torch, "float32", torch.float64),
        mock.patch.object(Tensor, "float", Tensor.double),
    ):
        stack.enter_context(patch)
    return stack


# Some models compute parts of their float64 path in float32 (rotary tables, norms, routers' softmax). Rounding there
# depends on the number of rows computed together. It bounds what float64 weights can show.
TOLERANCE = 1e-5
TOLERANCES = {"gemma4_unified_text": 5e-5, "gemma4_text": 5e-5}  # at one rank too


# The families that share no code run always on two ranks, and in CI on four, with every other one of the rest on two.
IN_CI = {*TELLING, *ATTENTION_ONLY[::2]}
CASES = [
    pytest.param(
        name,
        num_ranks,
        marks=mark_by(name in TELLING and num_ranks == 2, name in TELLING or (num_ranks == 2 and name in IN_CI)),
    )
    for name in ATTENTION_ONLY
    for num_ranks in (2, 4)
]


@pytest.mark.parametrize(("model_type", "num_ranks"), CASES)
def test_a_family_is_exact(model_type: str, num_ranks: int) -> None:
    assert max(run_on_ranks(num_ranks, compare_models, Split(model_type))) < TOLERANCES.get(model_type, TOLERANCE)


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=mark_by(False, name in TELLING)) for name in ATTENTION_ONLY]
)
def test_a_family_is_exact_on_one_rank(model_type: str) -> None:
    assert compare_models(Split(model_type, 2)) < TOLERANCES.get(model_type, TOLERANCE)


@pytest.mark.parametrize("model_type", sample(["llama", "gemma2", "gpt_oss"], quick=["gemma2"]))
def test_a_family_is_exact_with_chunks_and_checkpointing(model_type: str) -> None:
    """Documents must reach the recomputation too."""
    assert max(run_on_ranks(2, compare_models, Split(model_type, 2, "transformers"))) < TOLERANCE


GEMMA_4: dict[str, dict[str, Any]] = {
    "keys of an earlier layer": {"num_kv_shared_layers": 6, "num_hidden_layers": 12, "use_double_wide_mlp": True},
    "keys as values": {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "experts beside the MLP": {
        "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24,
    },
}  # fmt: skip


@pytest.mark.parametrize("variant", sample(GEMMA_4, quick=["keys as values"]))
def test_gemma_4_is_exact(variant: str) -> None:
    """With recomputation, which gets keys and values of an earlier layer too."""
    split = Split("gemma4_text", 1, "transformers", GEMMA_4[variant])
    assert max(run_on_ranks(2, compare_models, split)) < TOLERANCES["gemma4_text"]


# Two documents are longer than the original length, two are shorter.
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16,
    "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.0, 3.0, 4.0],
}  # fmt: skip
BY_LENGTH: dict[str, dict[str, Any]] = {
    "phi3": {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16},
    "llama": {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
        "max_position_embeddings": 16,
    },
}


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
@pytest.mark.parametrize("model_type", BY_LENGTH)
def test_each_document_chooses_its_rotary_frequencies(model_type: str, num_ranks: int) -> None:
    """As if it were alone: neither a rank's slice nor a longer document of the row decides."""
    split = Split(model_type, 1, "transformers", BY_LENGTH[model_type])
    assert max(run_on_ranks(num_ranks, compare_models, split)) < TOLERANCE


@pytest.mark.full
@pytest.mark.parametrize("max_shares", [0.0, 1e9], ids=["in rounds", "at once"])
@pytest.mark.parametrize("model_type", ["gpt_oss", "gemma2", "deepseek_v3", "gemma4_text"])
def test_a_family_is_exact_on_a_ring(model_type: str, max_shares: float) -> None:
    """Sinks, softcaps with windows, latent keys, and heads of two widths."""
    errors = run_on_ranks(2, compare_models, Split(model_type, 1, "transformers", {}, max_shares, 2))
    assert max(errors) < TOLERANCES.get(model_type, TOLERANCE)


# Sinks with windows, softcaps with windows. Without their float32 casts all of them are exact to rounding in float64.
RING_FAMILIES = ("llama", "gpt_oss", "gemma2")
RING_LENGTHS = (5, 30, 1, 1, 40, 19)
RING_TOLERANCE = 1e-10
# ring, ranks that share heads, heads, key/value heads
RINGS = [
    *((2, 2, 4, 2), (4, 1, 4, 2), (1, 4, 4, 2), (3, 2, 6, 2), (2, 4, 8, 2)),
    *((4, 1, 7, 1), (2, 1, 7, 7), (4, 1, 9, 3), (2, 3, 9, 3), (2, 2, 14, 2), (4, 2, 14, 7)),
]


@pytest.mark.parametrize(
    ("model_type", "layout"),
    [
        pytest.param(name, layout, marks=mark_by(False, (name, layout) == ("gpt_oss", RINGS[0])), id=f"{name}-{layout}")
        for name in RING_FAMILIES
        for layout in RINGS
    ],
)
def test_a_family_is_exact_on_a_ring_that_shares_heads(model_type: str, layout: tuple[int, int, int, int]) -> None:
    """With recomputation, which must find the same keys; these come in rounds and at once."""
    ring_size, num_sharing, num_heads, num_kv_heads = layout
    heads = {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads, "hidden_size": 8 * num_heads}
    for max_shares in (ALWAYS, NEVER) if ring_size > 1 else (NEVER,):
        split = Split(model_type, 1, "transformers", heads, max_shares, ring_size, RING_LENGTHS, True)
        assert max(run_on_ranks(ring_size * num_sharing, compare_models, split)) < RING_TOLERANCE


@pytest.mark.full
@pytest.mark.parametrize("model_type", TELLING)
def test_a_family_is_exact_on_eight_ranks(model_type: str) -> None:
    """There are more ranks than key/value heads: each of these heads serves four ranks."""
    heads = {"num_attention_heads": 8, "hidden_size": 128}
    assert max(run_on_ranks(8, compare_models, Split(model_type, changes=heads))) < TOLERANCE
