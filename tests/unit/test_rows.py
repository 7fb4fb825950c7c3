"""Compares rows read from disk with a plain list of what each position holds, predicts and attends to."""

import tempfile
from bisect import bisect
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.prepared import make_prepared
from support.refusals import explain
from support.tiers import count_examples
from syrupy.assertion import SnapshotAssertion

from ulysses_cli.data.packer import Portion
from ulysses_cli.data.store import CALL, SAID, TARGET, THOUGHT, TURN, TURN_BITS, PackedRows, hash_content, open_rows
from ulysses_cli.data.transaction import read_manifest
from ulysses_cli.plan.problem import RecipeError
from ulysses_cli.readers.problems import DataError

TOKENS = st.lists(st.integers(0, 999), min_size=2, max_size=40)
SOURCE = st.lists(TOKENS, min_size=1, max_size=12)
PACKINGS = st.sampled_from(["documents", "stream", "off"])


def read_plainly(rows: PackedRows, row: int, documents: list[list[int]], flags: list[list[int]]) -> list[Any]:
    """Returns (token, label, position, class of the label) of a row's tokens, derived again from the documents. Turns
    are runs of SAID, counted from the document's begin."""
    results: list[list[int]] = []
    for number, start, stop in rows.pieces(row):
        for at in range(start, stop):
            said = "".join("x" if mark & SAID else " " for mark in flags[number][: at + 1])
            label = documents[number][at] if flags[number][at] & TARGET else -100
            if results and (at > start or rows.is_joined):
                results[-1][1] = label
            if at > start:
                results[-1][3] = flags[number][at] | max(0, len(said.split()) - 1) << TURN_BITS
            results.append([documents[number][at], -100, len(results) if rows.is_joined else at - start, 0])
    return results


@settings(max_examples=count_examples(80))
@given(st.data(), PACKINGS, st.booleans(), st.integers(4, 50), st.integers(0, 5))
def test_rows_hold_the_documents_tokens(
    data: st.DataObject, packing: str, is_joined: bool, max_length: int, seed: int
) -> None:
    sources = data.draw(st.lists(SOURCE, min_size=1, max_size=3))
    codes = st.sampled_from([0, TARGET, TURN, TURN | TARGET, SAID, SAID | TARGET, SAID | THOUGHT | TARGET, SAID | CALL])
    flags = [[[data.draw(codes) for _ in document] for document in source] for source in sources]
    with tempfile.TemporaryDirectory() as folder:
        try:
            path = make_prepared(
                Path(folder),
                sources,
                flags=flags if data.draw(st.booleans()) else None,
                max_length=max_length,
                packing=packing,
                attend_across_documents=is_joined,
                seed=seed,
                skip_untrainable=True,
                pad_id=7,
            )
        except DataError as error:
            assert [problem.key for problem in error.problems] == ["data.datasets"]
            return
        rows = open_rows(path, "train")
        documents = [document for source in sources for document in source]
        marks = [mark for source in flags for mark in source]
        if rows.stores[0].flags is None and all(store.flags is None for store in rows.stores):
            marks = [[1] * len(document) for document in documents]
        for row in range(len(rows)):
            expected = read_plainly(rows, row, documents, marks)
            assert rows.count_tokens(row) == len(expected) <= max_length
            assert rows.count_targets(row) == sum(label != -100 for _, label, *_ in expected) > 0
            lengths = [piece.stop - piece.start for piece in rows.pieces(row)]
            assert rows.get_lengths(row) == ((sum(lengths),) if is_joined else tuple(lengths))
            padded = expected + [[7, -100, at, 0] for at in range(9)]
            start = data.draw(st.integers(0, len(padded) - 1))
            stop = data.draw(st.integers(start + 1, len(padded)))
            for first, last in ((0, len(padded)), (start, stop)):
                part = rows.read(row, first, last)
                classes = [code for *_, code in padded[first:last]] if part.classes is None else part.classes
                shown = np.stack([part.input_ids, part.labels, part.positions, classes], 1)
                assert shown.dtype == np.int64
                assert shown.tolist() == padded[first:last]


@settings(max_examples=count_examples(50))
@given(st.lists(SOURCE, min_size=1, max_size=2), PACKINGS, st.integers(3, 50), st.integers(0, 9))
def test_every_token_stands_once_in_the_rows_of_an_epoch(
    sources: list[Any], packing: str, max_length: int, seed: int
) -> None:
    """test_steps.py has the order in which ranks read the rows, over epochs and resumes."""
    with tempfile.TemporaryDirectory() as folder:
        made = make_prepared(Path(folder), sources, max_length=max_length, packing=packing, seed=seed)
        rows = open_rows(made, "train")
        pieces = [piece for row in range(len(rows)) for piece in rows.pieces(row)]
    seen = Counter((number, token) for number, start, stop in pieces for token in range(start, stop))
    lengths = [len(document) for source in sources for document in source]
    assert seen == Counter((number, token) for number, length in enumerate(lengths) for token in range(length))


def test_machines_compare_the_content_of_their_data(tmp_path: Path) -> None:
    """The folder's name tells what the data was made of. A token that differs has no other name and size."""
    first, second, other = (
        make_prepared(tmp_path / name, [[[1, 2, 3, last]]], max_length=4)
        for name, last in (("a", 4), ("b", 4), ("c", 5))
    )
    assert hash_content(first) == hash_content(second) != hash_content(other)


def test_weights_are_copies_per_epoch(tmp_path: Path) -> None:
    sources = [[[n, n] for n in range(10)], [[n, n] for n in range(100, 200)]]
    rows = open_rows(make_prepared(tmp_path, sources, weights=[2.5, 0.3], max_length=2, packing="off"), "train")
    seen = Counter(rows.pieces(row)[0].document for row in range(len(rows)))
    assert sorted(seen[n] for n in range(10)) == [2] * 5 + [3] * 5
    assert sum(seen[n] for n in range(10, 110)) == 30
    assert max(seen[n] for n in range(10, 110)) == 1


def count_tokens(path: Path, bounds: Sequence[int]) -> list[int]:
    """Tokens of each source in the rows of an epoch, read from the rows. `bounds`: the first document of each source,
    and the number of all."""
    rows, counts = open_rows(path, "train"), [0] * (len(bounds) - 1)
    for row in range(len(rows)):
        for document, start, stop in rows.pieces(row):
            counts[bisect(bounds, document) - 1] += stop - start
    return counts


@given(st.integers(0, 2**32 - 1), st.floats(0.05, 0.95), st.sampled_from(["split", "truncate", "drop"]))
@settings(max_examples=count_examples(25))
def test_shares_are_those_of_the_tokens_in_rows(seed: int, share: float, strategy: str) -> None:
    """To half of a document's length, whatever the lengths are and whatever becomes of long documents."""
    generator = np.random.default_rng(seed)
    longest, sources = 30, [[[1]] * 0, [[1]] * 0]
    for source in sources:
        for length in generator.integers(2, 40, generator.integers(20, 60)):
            size = length + (length == longest + 1)  # a piece of one token has no target, and is left out
            source.append(generator.integers(0, 900, size).tolist())
    numbers = [0, len(sources[0]), len(sources[0]) + len(sources[1])]
    portions = [Portion(share=share), Portion(share=1 - share)]
    lengths = [np.asarray([len(document) for document in source]) for source in sources]
    kept = {"split": lambda n: n, "truncate": lambda n: np.minimum(n, longest), "drop": lambda n: n * (n <= longest)}
    usable = [kept[strategy](each) for each in lengths]
    total = int(sum(each.sum() for each in usable))
    with tempfile.TemporaryDirectory() as folder:
        make = partial(make_prepared, Path(folder), sources, portions=portions, max_length=longest, seed=seed)
        copies = [part * total / own.sum() for part, own in zip((share, 1 - share), usable, strict=True)]
        if max(copies) > 4:
            with pytest.raises(RecipeError, match=r"data\.datasets\.\d\.share"):
                make(strategy=strategy)
            return
        path = make(strategy=strategy)
        counts = count_tokens(path, numbers)
        facts = read_manifest(path)
    for own, wanted in zip(counts, (share * total, (1 - share) * total), strict=True):
        assert abs(own - wanted) <= 40 / 2
    assert facts["weights"] == pytest.approx(copies)
    assert [sum(bands) for bands in facts["splits"]["train"]["bands"]["tokens"]] == counts


def test_documents_of_other_lengths_are_left_out_and_counted(tmp_path: Path) -> None:
    sources = [[[n] * length for n, length in enumerate((2, 3, 5, 8, 13))], [[7] * 4]]
    portions = [Portion(min_tokens=3, max_tokens=8), Portion()]
    path = make_prepared(tmp_path, sources, portions=portions, max_length=16)
    assert count_tokens(path, [0, 5, 6]) == [3 + 5 + 8, 4]
    counts = read_manifest(path)["splits"]["train"]["sources"][0]
    assert (counts["documents"], counts["other_length_documents"], counts["other_length_tokens"]) == (5, 2, 15)
    assert (counts["left_out_documents"], counts["kept_tokens"]) == (0, 16)


def test_held_out_documents_are_of_the_lengths_that_are_trained_on(tmp_path: Path) -> None:
    sources = [[[n] * (3 if n % 2 else 9) for n in range(40)]]
    path = make_prepared(tmp_path, sources, portions=[Portion(max_tokens=5)], max_length=16, eval_share=0.25)
    facts = read_manifest(path)["splits"]
    assert (facts["train"]["num_tokens"], facts["eval"]["num_tokens"]) == (45, 15)


@given(st.lists(st.integers(0, 30), min_size=2, max_size=60), st.floats(0.01, 0.5), st.integers(0, 3))
@settings(max_examples=count_examples(60))
def test_no_document_and_no_copy_of_one_stands_in_both_splits(contents: list[int], share: float, seed: int) -> None:
    documents = [[content, content + 1] for content in contents]
    with tempfile.TemporaryDirectory() as folder:
        try:
            path = make_prepared(Path(folder), [documents], max_length=2, packing="off", eval_share=share, seed=seed)
        except RecipeError as error:
            assert [problem.key for problem in error.problems] == ["data.eval_split"]
            return
        sides = []
        for split in ("train", "eval"):
            rows = open_rows(path, split)  # type: ignore[arg-type]
            sides.append([rows.read(row, 0, 1).input_ids[0] for row in range(len(rows))])
        assert not set(sides[0]) & set(sides[1])
        assert sorted([*sides[0], *sides[1]]) == sorted(contents)
        assert len(sides[1]) >= max(1, round(share * len(contents)))


def test_what_has_no_target_may_be_left_out(tmp_path: Path) -> None:
    documents, flags = [[[1, 2, 3], [4, 5], [6, 7]]], [[[1, 0, 0], [1, 1], [0, 1]]]
    path = make_prepared(tmp_path / "a", documents, flags=flags, max_length=4, skip_untrainable=True)
    assert [piece.document for piece in open_rows(path, "train").pieces(0)] == [1, 2]
    documents, flags = [[list(range(10))]], [[[0] * 9 + [1]]]
    path = make_prepared(tmp_path / "b", documents, flags=flags, max_length=4, packing="stream", skip_untrainable=True)
    rows = open_rows(path, "train")
    assert [rows.pieces(row) for row in range(len(rows))] == [[(0, 8, 10)]]


def test_a_damaged_folder_is_named(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    said = []
    for damaged in ("rows/r/train-stops.npy", "tokens/s0/tokens.bin"):
        path = make_prepared(tmp_path / damaged, [[[1, 2, 3]]], max_length=4)
        (path.parents[1] / damaged).unlink()
        if damaged.endswith(".npy"):
            (path.parents[1] / damaged).touch()
        said.append(explain(open_rows, path, "train", error=ValueError))
    assert said == snapshot
