"""Rows whose targets have weights: columns of data sets, stores, rows and what steps are divided by."""

from pathlib import Path

import numpy as np
import pytest
from support.prepared import prepare_rows as prepare
from support.refusals import explain
from syrupy.assertion import SnapshotAssertion

from ulysses_cli.data.prepare import Prepared
from ulysses_cli.data.steps import Batching, plan_step, read_micro_batch
from ulysses_cli.data.store import open_rows
from ulysses_cli.readers.problems import DataError


def read_weights(prepared: Prepared, pad_to: int = 0) -> list[tuple[int, float]]:
    """Each label of each row, with its weight."""
    rows = open_rows(prepared.path, "train")
    found = []
    for row in range(len(rows)):
        size = rows.count_tokens(row) + pad_to
        parts = [rows.read(row, at, min(at + 7, size)) for at in range(0, size, 7)]  # as ranks read their slices
        labels, weights = (np.concatenate([getattr(part, name) for part in parts]) for name in ("labels", "weights"))
        own = list(zip(labels[labels >= 0].tolist(), weights[labels >= 0].tolist(), strict=True))
        assert rows.count_targets(row) == len(own)
        assert rows.weigh_targets(row) == pytest.approx(sum(weight for _, weight in own), rel=1e-12)
        found += own
    return found


@pytest.mark.parametrize("packing", ["documents", "stream", "off"])
def test_targets_have_the_weights_of_their_rows(tmp_path: Path, packing: str) -> None:
    rows = [
        {"prompt": "1? ", "completion": "a", "weight": 0.25},
        {"prompt": "2? ", "completion": "bb", "weight": 3},
        {"prompt": "3? ", "completion": "c"},
        {"prompt": "4? ", "completion": "d", "weight": None},
    ]
    found = read_weights(prepare(tmp_path, rows, f"data.packing={packing}"), pad_to=3)
    assert {(chr(token), weight) for token, weight in found if token < 256} == {
        ("a", 0.25), ("b", 3.0), ("c", 1.0), ("d", 1.0),
    }  # fmt: skip
    assert len(found) == 9  # with an end mark each


def test_tokens_have_weights_of_their_own_and_one_without_is_no_target(tmp_path: Path) -> None:
    ids = [5, 6, 7, 8, 9]
    rows = [
        {"input_ids": ids, "weights": [9, 0.5, 0, 2, 1e-60]},
        {"input_ids": ids, "labels": [-100, -100, 7, 8, -100], "weights": [1, 1, 4, 0.125, 1]},
        {"input_ids": ids, "weight": 0.75},
    ]
    expected = [(6, 0.5), (8, 2.0), (7, 4.0), (8, 0.125), *((token, 0.75) for token in ids[1:])]
    assert sorted(read_weights(prepare(tmp_path, rows))) == sorted(expected)
    joined = prepare(tmp_path, rows[:1] * 2, "data.packing=stream", "data.attend_across_documents=true")
    assert read_weights(joined) == [(6, 0.5), (8, 2.0), (5, 9.0), (6, 0.5), (8, 2.0)]


def test_a_step_is_divided_by_the_sum_of_the_weights_of_its_targets(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "completion": "x" * n, "weight": n / 8} for n in range(1, 9)]
    packed = open_rows(prepare(tmp_path, rows, "data.packing=off").path, "train")
    plan = plan_step(packed, Batching(2, 1, 2, 8), 0, 4)
    taken = [packed.count_targets(row) - 1 for row in plan.rows]  # without the end mark
    assert plan.target_weight == sum((n + 1) * n / 8 for n in taken)
    held = 0.0
    for group in range(2):
        for micro_step in range(2):
            for rank in range(2):
                batch = read_micro_batch(packed, plan, group, micro_step, rank, 2)
                assert batch.weights is not None
                held += float(batch.weights[batch.labels >= 0].sum())
    assert held == plan.target_weight
    plain = open_rows(prepare(tmp_path, [{"text": "no weight"}]).path, "train")
    plan = plan_step(plain, Batching(1, 1, 1, 8), 0, 1)
    assert plan.target_weight is None
    assert read_micro_batch(plain, plan, 0, 0, 0, 1).weights is None


def test_sources_with_and_without_weights_stand_in_one_row(tmp_path: Path) -> None:
    (tmp_path / "plain.txt").write_text("no weight")
    second = f"data.datasets=[{{path: {tmp_path}/d.jsonl}}, {{path: {tmp_path}/plain.txt}}]"
    found = read_weights(prepare(tmp_path, [{"text": "xyz", "weight": 0.5}], second))
    assert sorted({weight for _, weight in found}) == [0.5, 1.0]
    assert [chr(token) for token, weight in found if weight == 0.5 and token < 256] == ["y", "z"]


SAMPLED = [
    {"prompt": f"Is {n} large? ", "completions": [f"no, {n} is not", f"no {n}", f"yes {n}"], "weights": [1, 0.25, 0]}
    for n in range(8)
]


def read_answers(prepared: Prepared) -> list[tuple[str, str, float]]:
    """Prompt, answer and weight of each document, the prompt also where it stands before another answer."""
    rows, found = open_rows(prepared.path, "train"), []
    for row in range(len(rows)):
        start, stem = 0, np.empty(0, np.int64)
        for length, shared in zip(rows.get_lengths(row), rows.get_shared(row), strict=True):
            part = rows.read(row, start, start + length)
            tokens, is_target = np.concatenate([stem[:shared], part.input_ids]), part.labels >= 0
            asked = tokens[: shared + int(np.argmax(is_target)) + 1]
            assert part.weights is not None
            (weight,) = set(part.weights[is_target].tolist())
            found.append((bytes(asked.tolist()).decode(), bytes(part.labels[is_target][:-1].tolist()).decode(), weight))
            start, stem = start + length, stem if shared else tokens
    return sorted(found)


@pytest.mark.parametrize("can_share", [False, True])
def test_answers_to_one_prompt_have_weights_and_read_one_copy_of_it(
    tmp_path: Path, can_share: bool, snapshot: SnapshotAssertion
) -> None:
    prepared = prepare(tmp_path, SAMPLED, "data.datasets.0.type=answers", can_share=can_share)
    expected = [(row["prompt"], row["completions"][at], (1.0, 0.25)[at]) for row in SAMPLED for at in range(2)]
    assert read_answers(prepared) == sorted(expected)
    texts = sum(len(row["prompt"]) + len(answer) + 1 for row in SAMPLED for answer in row["completions"][:2])
    # the last token of a prompt predicts another one in each answer
    repeated = sum(len(row["prompt"]) - 1 for row in SAMPLED)
    assert prepared.report["splits"]["train"]["num_tokens"] == texts - can_share * repeated
    (note,) = [note for note in prepared.report["notes"] if "16 answers" in note]
    assert f" {repeated / texts:.0%} " in note
    assert note == snapshot


def test_answers_are_found_by_their_columns_and_a_prompt_is_trained_on_or_evaluated(
    tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    rows = [dict(row, weights=None) for row in SAMPLED]
    rows += [dict(row, completions=["other"], weights=[2]) for row in SAMPLED]
    prepared = prepare(tmp_path, rows, "data.eval_split=0.4", can_share=True)
    assert prepared.report["sources"][0]["kind"] == "answers"
    assert [note for note in prepared.report["notes"] if "data.datasets.0.type" in note] == snapshot
    trained = {prompt for prompt, *_ in read_answers(prepared)}
    assert 0 < len(trained) < 8
    assert prepared.report["leaked_documents"] == 0
    assert len(read_answers(prepared)) == 4 * len(trained)


def test_answers_that_repeat_a_prompt_too_often_are_refused(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """A row of 300 kB would become tokens of 2 GB."""
    row = {"prompt": "p" * 100_000, "completions": ["a"] * 20_000}
    assert explain(prepare, tmp_path, [row], "data.datasets.0.type=answers", error=DataError) == snapshot


def test_answers_may_be_turns(tmp_path: Path) -> None:
    ask = [{"role": "user", "content": "Is it?"}]
    row = {"prompt": ask, "completions": ["No.", [{"role": "assistant", "content": "Yes."}]], "rewards": [0.5, 2]}
    words = ("data.chat_template=chatml", "data.added_tokens=['<|im_start|>', '<|im_end|>']", "data.max_length=256")
    columns = "data.datasets.0.columns={weights: rewards}"
    prepared = prepare(tmp_path, [row], *words, columns, "data.datasets.0.type=answers", can_share=True)
    rows = open_rows(prepared.path, "train")
    assert rows.get_shared(0)[1] > 10
    assert {weight for _, weight in read_weights(prepared)} == {0.5, 2.0}
