"""Families with convolutions and recurrences on split rows, against the plain model document by document: logits' loss
and the gradient of every parameter. A token of one document changes no bit of another's logits."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from support.families import make_model
from support.hybrids import HYBRIDS, make_hybrid
from support.rank_pool import run_on_ranks
from support.refusals import explain
from support.tiers import mark_by, sample
from syrupy.assertion import SnapshotAssertion
from test_models import Split, compare_models, make_row
from torch import Tensor

from ulysses_cli.train.attention.documents import make_documents, walk_bounds
from ulysses_cli.train.attention.interface import register_attention
from ulysses_cli.train.memory.checkpointing import Mode, checkpoint_layers
from ulysses_cli.train.processes.groups import SequenceAxis, make_sequence_axis
from ulysses_cli.train.recurrence.interface import UnknownLayersError, serve_recurrent_layers

LENGTHS = (14, 1, 2, 14, 21, 12)  # one token, shorter than a convolution; a bound just before the edge of a slice
ALONE = SequenceAxis(None, 1, 0)
ONE_TOKEN_NEIGHBOURS = (13, 1, 1, 1, 16, 23, 1, 8)  # the last bounds are edges of slices


def make_split_model(model_type: str, axis: SequenceAxis, **changes: Any) -> torch.nn.Module:
    model = make_hybrid(model_type, register_attention(axis, "sdpa"), **changes)
    assert serve_recurrent_layers(model, axis) > 0
    return model


# transformers' own rules compute in float32. Gradients of A_log and dt_bias are sums of terms that nearly cancel.
TOLERANCE = 1e-4
ONE_OF_EACH = ("qwen3_5_text", "nemotron_h", "lfm2")


CASES = [
    pytest.param(
        name,
        num_ranks,
        marks=mark_by(
            num_ranks == 2 and name in ONE_OF_EACH, num_ranks == 2 or (num_ranks == 4 and name in ONE_OF_EACH)
        ),
    )
    for name in HYBRIDS
    for num_ranks in (1, 2, 4)
]


@pytest.mark.parametrize(("model_type", "num_ranks"), CASES)
def test_a_family_is_exact(model_type: str, num_ranks: int) -> None:
    assert max(run_on_ranks(num_ranks, compare_models, Split(model_type, lengths=LENGTHS))) < TOLERANCE


# A rank of eight has one head of each kind; of keys, groups and latent keys there are fewer, as many, or one.
EIGHT_HEADS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {"num_attention_heads": 8, "linear_num_value_heads": 8},
    "nemotron_h": {"num_attention_heads": 8},
    "kimi_linear": {"num_attention_heads": 8, "num_key_value_heads": 8, "linear_num_heads": 8},
    "lfm3": {"num_attention_heads": 8},
}


@pytest.mark.full
@pytest.mark.parametrize("model_type", EIGHT_HEADS)
def test_a_recurrence_of_each_kind_on_eight_ranks(model_type: str) -> None:
    split = Split(model_type, changes=EIGHT_HEADS[model_type], lengths=LENGTHS)
    assert max(run_on_ranks(8, compare_models, split)) < TOLERANCE


@pytest.mark.parametrize(
    ("model_type", "mode"),
    sample(
        [
            *(("qwen3_5_text", "full"), ("nemotron_h", "save_attention"), ("falcon_h1", "save_attention")),
            *(("lfm2", "full"), ("kimi_linear", "save_attention"), ("zamba2", "save_attention")),
        ],
        quick=[("lfm2", "full"), ("nemotron_h", "save_attention")],
        checked=[("kimi_linear", "save_attention"), ("qwen3_5_text", "full")],
    ),
)
def test_with_checkpointing(model_type: str, mode: Mode) -> None:
    """Documents must reach the recomputation too, which gets the saved result of a recurrence."""
    assert max(run_on_ranks(2, compare_models, Split(model_type, 1, mode, lengths=LENGTHS))) < TOLERANCE


def count_rules(mode: Mode) -> int:
    """Calls of the rule in a step, by layer and document."""
    module = sys.modules[type(make_hybrid("qwen3_5_text", "eager")).__module__]
    axis = SequenceAxis(None, 1, 0)
    model = make_split_model("qwen3_5_text", axis).train()
    ids, positions = make_row(LENGTHS)
    checkpoint_layers(model, mode)
    with mock.patch.object(module, "l2norm", wraps=module.l2norm) as normalize:  # called for queries and for keys
        model(ids, position_ids=positions, use_cache=False, documents=make_documents(LENGTHS)).logits.sum().backward()
    return normalize.call_count // (2 * 3 * len(LENGTHS))


@pytest.mark.check
def test_a_recomputation_gets_the_saved_result() -> None:
    """Once forward and once in the backward in either mode; what is saved is not computed a third time."""
    assert [count_rules("save_attention"), count_rules("full")] == [2, 2]


def compute_own(
    model: torch.nn.Module, axis: SequenceAxis, lengths: Sequence[int], changed: int | None
) -> tuple[Tensor, Tensor]:
    """This rank's logits, and the gradient of its tokens' embeddings. A changed document has another first token, and
    other targets: neither may another document's tokens notice."""
    row, positions = make_row(lengths)
    factors = torch.linspace(-1, 1, row.size(1), dtype=torch.float64)
    if changed is not None:
        begin, end = list(walk_bounds(lengths))[changed]
        row[0, begin] = (row[0, begin] + 11) % 64
        factors[begin:end] *= 3
    ids, positions = (whole.chunk(axis.size, 1)[axis.rank] for whole in (row, positions))
    hidden = model.get_input_embeddings()(ids).detach().requires_grad_()
    options = {"position_ids": positions, "use_cache": False, "documents": make_documents(lengths)}
    logits: Tensor = model(inputs_embeds=hidden, **options).logits
    (logits.logsumexp(-1)[0] * factors.chunk(axis.size)[axis.rank]).sum().backward()
    return logits.detach()[0], hidden.grad[0]


# No experts: where tokens go decides how many are computed together, and so how a sum is rounded.
DENSE: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {},
    "kimi_linear": {"mlp_layer_types": ["dense"] * 3},
    "bamba": {},
    "lfm3": {},
    "falcon_h1": {},
    "olmo_hybrid": {},
    "lfm2": {},
    "nemotron_h": {"layer_types": ["mamba", "mlp", "mamba", "attention"]},
    "granitemoehybrid": {"num_local_experts": 0},
    "gemma4_text": {"num_hidden_layers": 6, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True},
}
EVERY = tuple(range(len(LENGTHS)))
OF_NEIGHBOURS: dict[str, Any] = {
    "changed": tuple(range(len(ONE_TOKEN_NEIGHBOURS))), "lengths": ONE_TOKEN_NEIGHBOURS,
}  # fmt: skip


@dataclass(frozen=True)
class Isolation:
    """`changed`: documents that change, one after the other."""

    model_type: str
    num_ranks: int = 2
    changed: tuple[int, ...] = EVERY
    mode: Mode | None = None
    lengths: tuple[int, ...] = LENGTHS
    heads: dict[str, Any] = field(default_factory=dict)

    def make(self, axis: SequenceAxis) -> torch.nn.Module:
        changes = {**DENSE[self.model_type], **self.heads}
        if self.model_type in HYBRIDS:
            model = make_split_model(self.model_type, axis, **changes)
        else:
            model = make_model(self.model_type, register_attention(axis, "sdpa"), **changes)
        if self.mode:
            checkpoint_layers(model.train(), self.mode)
        return model


def list_changed_tokens(case: Isolation) -> list[list[int]]:
    """For each changed document, this rank's tokens whose logits differ in any bit, then those whose gradients do."""
    axis = make_sequence_axis(dist.group.WORLD)
    model = case.make(axis)
    before = compute_own(model, axis, case.lengths, None)
    first = axis.rank * before[0].size(0)
    return [
        [first + int(token) for token in (own != other).any(-1).nonzero().flatten()]
        for document in case.changed
        for own, other in zip(before, compute_own(model, axis, case.lengths, document), strict=True)
    ]


TWO = ("qwen3_5_text", "lfm3")
QUICK = [Isolation(name, changed=(4,)) for name in TWO]
CHECKED = [
    *(Isolation(name) for name in (*TWO, "bamba", "gemma4_text")),
    Isolation("falcon_h1", **OF_NEIGHBOURS),
]
MODES: tuple[Mode | None, ...] = (None, "save_attention")
ISOLATED = [
    *QUICK,
    *(Isolation(name, num_ranks) for name in DENSE for num_ranks in (2, 4)),
    *(Isolation(name, mode="save_attention") for name in DENSE),
    *(Isolation(name, **OF_NEIGHBOURS) for name in DENSE),
    *(Isolation(name, 8, mode=mode, heads=heads) for name, heads in EIGHT_HEADS.items() for mode in MODES),
]


@pytest.mark.parametrize(
    "case", [pytest.param(each, marks=mark_by(each in QUICK, each in CHECKED)) for each in ISOLATED], ids=str
)
def test_a_token_changes_its_own_document_alone(case: Isolation) -> None:
    """The first token of a document, from which the recurrence carries on to the last; and its gradients, which the
    backward carries from the last to the first. A recomputation gets the saved result of a recurrence, of all
    documents. Slices of eight ranks are 8 tokens long: most documents lie on several, and a rank holds up to 3."""
    by_rank = run_on_ranks(case.num_ranks, list_changed_tokens, case)
    bounds = list(walk_bounds(case.lengths))
    expected = [list(range(*bounds[document])) for document in case.changed for _ in ("logits", "gradients")]
    assert [list(chain.from_iterable(of_ranks)) for of_ranks in zip(*by_rank, strict=True)] == expected


def refuse(call: Callable[..., object], *words: object, **options: object) -> str:
    return explain(call, *words, error=UnknownLayersError, **options).replace(transformers.__version__, "VERSION")


@pytest.mark.parametrize(("model_type", "function"), [("lfm2", "causal_conv1d_fn"), ("bamba", "mamba2_chunk_scan")])
def test_functions_of_other_names_are_refused(
    model_type: str, function: str, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    model = make_hybrid(model_type, "eager")
    monkeypatch.delattr(sys.modules[type(model).__module__], function)
    assert refuse(serve_recurrent_layers, model, ALONE) == snapshot


def test_a_layer_that_documents_cannot_reach_is_refused(
    monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    """As LFM2's convolution in transformers 5.17."""
    model = make_hybrid("lfm2", "eager")

    def forward(self: Any, hidden_states: Tensor, past_key_values: Any = None, seq_idx: Any = None) -> Tensor:
        raise AssertionError("was called")

    monkeypatch.setattr(type(model.model.layers[0].conv), "forward", forward)
    assert refuse(serve_recurrent_layers, model, ALONE) == snapshot


def test_a_layer_that_calls_other_functions_is_refused(
    monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    model = make_split_model("lfm2", ALONE)
    monkeypatch.setattr(type(model.model.layers[0].conv), "forward", lambda self, hidden_states, **_: hidden_states)
    ids, positions = make_row(LENGTHS)
    options = {"position_ids": positions, "use_cache": False, "documents": make_documents(LENGTHS)}
    assert refuse(model, ids, **options) == snapshot


def test_a_layer_without_documents_is_refused(snapshot: SnapshotAssertion) -> None:
    model = make_split_model("lfm2", ALONE)
    assert explain(model, make_row(LENGTHS)[0], error=ValueError, use_cache=False) == snapshot
