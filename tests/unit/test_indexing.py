"""Tests the census of operators by the width of their indices: its sources, and what rules and planner make of it."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
from support.model_shapes import LLAMA
from support.paths import ROOT

from ulysses_cli.plan.layout import Layout
from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.levers import Levers
from ulysses_cli.plan.planner.fit import is_indexable
from ulysses_cli.plan.rows.indexing import (
    INT32_LIMIT,
    OPERATORS,
    PIECE_BYTES,
    WRAP_BYTES,
    IndexedOperator,
    RowSizes,
    list_excess,
    split_rows,
)

SIZES = RowSizes(1 << 20, 8, 1, 1, 1, tiled_mlp=True, is_quantized=False)


def find_source(operator: IndexedOperator) -> Path | None:
    """The operator's source where it is installed here."""
    name = operator.source.split("|")[0].split(":")[0]
    if name.startswith("ulysses_cli/"):
        return ROOT / name
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
    number = int(place.rpartition(":")[2])
    assert text in file.read_text(encoding="utf-8").splitlines()[number - 1]


def test_what_can_be_refused_is_in_the_census() -> None:
    refused = {operator.name for operator in OPERATORS if operator.verdict == "refused"}
    experts = replace(SIZES, tokens=1 << 40, tiled_mlp=False, is_quantized=True, ring_size=2)
    assert {excess.operator for excess in list_excess(LLAMA, experts)} <= refused
    assert len({operator.name for operator in OPERATORS}) == len(OPERATORS)


def test_only_attention_bounds_a_dense_model() -> None:
    """A rank's kernel gets 4 heads of 128 for each token of the row, then 2 and 1 in chunks."""
    for chunks in (1, 2, 4):
        longest = INT32_LIMIT // (4 // chunks * 128)
        assert list_excess(LLAMA, replace(SIZES, tokens=longest - 1, head_chunks=chunks)) == []
        (excess,) = list_excess(LLAMA, replace(SIZES, tokens=longest, head_chunks=chunks))
        assert (excess.operator, excess.numel) == ("attention", INT32_LIMIT)
    job = Job(LLAMA, Layout(1, 1, 8), 5 << 20, Levers(head_chunks=2))
    assert job.local_tokens * LLAMA.hidden_size > INT32_LIMIT  # which others still refuse
    assert is_indexable(job)
    assert not is_indexable(replace(job, levers=Levers()))


def test_pieces_are_whole_small_and_equal() -> None:
    assert split_rows(10, WRAP_BYTES - 1) == [slice(0, 10)]
    for rows, num_bytes in ((1 << 20, WRAP_BYTES), (1_000_003, 3 * WRAP_BYTES + 7), (5, WRAP_BYTES)):
        parts = split_rows(rows, num_bytes)
        assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
        assert parts[-1].stop == rows
        sizes = [part.stop - part.start for part in parts]
        assert max(sizes) - min(sizes) <= 1
        assert max(sizes) <= max(1, -(-PIECE_BYTES * rows // num_bytes))
