"""Tests the census of operators by the width of their indices: its sources, and what rules and planner make of it."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.model_shapes import LLAMA
from support.paths import ROOT
from syrupy.assertion import SnapshotAssertion
from test_order import WINDOWS
from test_order import rows as draw_rows

from ulysses_cli.plan.attention import BACK_ENDS, list_able, list_needs
from ulysses_cli.plan.layout import Layout
from ulysses_cli.plan.ledger.job import Job, is_indexable
from ulysses_cli.plan.levers import Levers
from ulysses_cli.plan.rows import indexing
from ulysses_cli.plan.rows.indexing import (
    BLOCK_TOKENS,
    INT32_LIMIT,
    LINEAR,
    OPERATORS,
    PIECE_BYTES,
    WRAP_BYTES,
    CallSize,
    IndexedOperator,
    RowSizes,
    count_indexed,
    count_ring_keys,
    find_overrun,
    list_excess,
    split_rows,
    wraps,
)
from ulysses_cli.plan.rows.ring import Ring, deal_rows, plan_keys, plan_rounds

SIZES = RowSizes(1 << 20, 8, 1, 1, tiled_mlp=True, is_quantized=False)


def find_source(operator: IndexedOperator) -> Path | None:
    """The operator's source where it is installed here."""
    name = operator.source.split("|")[0].split(":")[0]
    if name.startswith("ulysses_cli/"):
        return ROOT / name
    if "@" in name:  # a tag of a repository
        return None
    spec = importlib.util.find_spec(name.split("/")[0])  # finds torch without importing it
    if spec is None or not spec.submodule_search_locations:
        return None
    file = Path(next(iter(spec.submodule_search_locations))).parent / name
    return file if file.is_file() else None


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_a_source_that_is_installed_says_so_at_its_line(operator: IndexedOperator) -> None:
    place, _, text = operator.source.partition("|")
    assert text
    file = find_source(operator)
    if file is None:
        pytest.skip("its project is not installed here")
    lines, (_, _, number) = file.read_text(encoding="utf-8").splitlines(), place.partition(":")
    assert any(text in line for line in (lines[int(number) - 1 : int(number)] if number else lines))


def test_what_can_be_refused_is_in_the_census() -> None:
    refused = {operator.name for operator in OPERATORS if operator.verdict == "refused"}
    experts = replace(SIZES, tokens=1 << 40, tiled_mlp=False, is_quantized=True, ring_size=2)
    assert {excess.operator for excess in list_excess(LLAMA, experts)} <= refused
    assert len({operator.name for operator in OPERATORS}) == len(OPERATORS)


def test_the_census_decides_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rule and a rank refuse follows its verdicts."""
    sizes = replace(SIZES, tokens=1 << 26, is_quantized=True, uses_dora=True)
    call = CallSize(queries=1 << 26, keys=1 << 26, heads=8, kv_heads=8, head_dim=128)
    for name in ("torch_varlen", "quantized_linear", "dora"):
        assert name in {excess.operator for excess in list_excess(LLAMA, sizes)}
        monkeypatch.setitem(indexing._VERDICTS, name, "safe")
        assert name not in {excess.operator for excess in list_excess(LLAMA, sizes)}
    assert find_overrun("flash_attention_2", call)
    assert not find_overrun("torch_varlen", call)


def test_only_attention_bounds_a_dense_model() -> None:
    """A rank's kernel gets 4 heads of 128 for each token of the row, then 2 and 1 in chunks."""
    for chunks in (1, 2, 4):
        longest = INT32_LIMIT // (4 // chunks * 128)
        assert list_excess(LLAMA, replace(SIZES, tokens=longest - BLOCK_TOKENS, head_chunks=chunks)) == []
        (excess,) = list_excess(LLAMA, replace(SIZES, tokens=longest - 1, head_chunks=chunks))
        assert (excess.operator, excess.numel) == ("torch_varlen", INT32_LIMIT), "auto counts on what is always there"
    job = Job(LLAMA, Layout(1, 1, 8), 5 << 20, Levers(head_chunks=2))
    assert job.local_tokens * LLAMA.hidden_size > INT32_LIMIT  # which others still refuse
    assert is_indexable(job)
    assert not is_indexable(replace(job, levers=Levers()))


def test_a_back_end_is_bounded_by_its_own_indices() -> None:
    """FlashAttention 3 counts in one head, FlashAttention 2 and torch's in all queries, others in all keys too. Widths
    are filled up, and each document after the first begins a block later."""
    call = CallSize(queries=1000, keys=3000, heads=8, kv_heads=4, head_dim=80)
    assert count_indexed("flash_attention_3", call) == (3072 + 128) * 96
    assert count_indexed("flash_attention_2", call) == count_indexed("torch_varlen", call) == 1024 * 8 * 96
    assert count_indexed("flex_attention", call) == 3072 * 4 * 96
    assert count_indexed("flash_attention_2", replace(call, head_dim=160)) == 1024 * 8 * 192
    assert count_indexed("flash_attention_2", replace(call, num_documents=11)) == (1024 + 10 * 128 + 0) * 8 * 96


def test_auto_takes_a_back_end_whose_indices_suffice(snapshot: SnapshotAssertion) -> None:
    """8 heads of 2 Mi tokens pass 2^31 in every back end but FlashAttention 3, which is named."""
    sizes = replace(SIZES, tokens=2 << 20, sp_size=1, head_chunks=4)
    ((need, _),) = list_needs(LLAMA, "bfloat16", sizes=sizes).items()
    assert list_able(need, "cuda", (9, 0)) == ["flash_attention_3"]
    assert list_able(need, "cuda", (10, 0)) == []
    (excess,) = list_excess(LLAMA, sizes)
    assert [BACK_ENDS["torch_varlen"].find_obstacle(need, "cuda"), excess.remedy] == snapshot
    assert list_excess(LLAMA, replace(sizes, kernel="flash_attention_3")) == []
    ((shorter, _),) = list_needs(LLAMA, "bfloat16", sizes=replace(sizes, tokens=1 << 20)).items()
    assert len(list_able(shorter, "cuda", (9, 0))) == len(BACK_ENDS)


def test_a_row_reaches_as_far_as_its_stride() -> None:
    """8 of 32 heads of 1.2 Mi tokens are 1.3e9 elements that lie 5.0e9 apart."""
    assert not wraps(1200 << 10, 8 * 128)
    assert wraps(1200 << 10, 32 * 128)


def test_a_ring_divides_the_longest_row() -> None:
    """A rank's call gets the queries of its share, and blocks of keys that are no longer."""
    for ring_size in (2, 8):
        sizes = replace(SIZES, sp_size=4 * ring_size, ring_size=ring_size, head_chunks=8)
        longest = ring_size * INT32_LIMIT // 128
        assert list_excess(LLAMA, replace(sizes, tokens=longest - ring_size * BLOCK_TOKENS)) == []
        (excess,) = list_excess(LLAMA, replace(sizes, tokens=longest))
        assert (excess.name, excess.numel) == ("one call of attention", INT32_LIMIT)


@given(draw_rows(), st.integers(1, 3), WINDOWS)
def test_no_call_on_a_ring_gets_more_keys_than_are_bounded(
    row: tuple[tuple[int, ...], int], num_rows: int, window: int | None
) -> None:
    lengths, size = row
    lengths *= num_rows
    order = deal_rows(lengths, num_rows, Ring(size, ((window, 1),)))
    sizes = replace(SIZES, tokens=sum(lengths), sp_size=size, ring_size=size, num_rows=num_rows)
    shape: Any = SimpleNamespace(attentions=(SimpleNamespace(window_tokens=window),))
    for rank in range(size):
        blocks = [each.num_keys for each in plan_rounds(lengths, order, window, rank)]
        assert max(blocks, default=plan_keys(lengths, order, window, rank).num_keys) <= count_ring_keys(shape, sizes)


def test_pieces_are_whole_small_and_equal() -> None:
    assert split_rows(10, WRAP_BYTES - 1, *LINEAR) == [slice(0, 10)]
    for rows, num_bytes in ((1 << 20, WRAP_BYTES), (1_000_003, 3 * WRAP_BYTES + 7), (5, WRAP_BYTES)):
        parts = split_rows(rows, num_bytes, *LINEAR)
        assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
        assert parts[-1].stop == rows
        sizes = [part.stop - part.start for part in parts]
        assert max(sizes) - min(sizes) <= 1
        assert max(sizes) <= max(1, -(-PIECE_BYTES * rows // num_bytes))
