"""Rows whose targets have weights: columns of data sets, stores, rows and what steps are divided by."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ulysses_cli.data.prepare import Prepared, prepare_data
from ulysses_cli.data.steps import Batching, plan_step, read_micro_batch
from ulysses_cli.data.store import open_rows
from ulysses_cli.plan.recipe.loader import parse_recipe
from ulysses_cli.readers.problems import DataError

RECIPE = """\
model:
  config: {model_type: llama}
  tokenizer: bytes
data:
  datasets: [{path: PATH}]
  max_length: 64
  store_dir: STORE
"""


def prepare(folder: Path, rows: list[dict[str, Any]], *overrides: str) -> Prepared:
    (folder / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = RECIPE.replace("PATH", str(folder / "d.jsonl")).replace("STORE", str(folder / "store"))
    return prepare_data(parse_recipe(text, "r.yaml", overrides).recipe, 8, lambda _: None)


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


def test_a_weight_of_0_trains_nothing(tmp_path: Path) -> None:
    rows = [{"text": "abc", "weight": 0}, {"text": "xyz", "weight": 2}]
    with pytest.raises(DataError, match=r"d.jsonl:1:1.*no supervised token"):
        prepare(tmp_path, rows)
    found = read_weights(prepare(tmp_path, rows, "data.skip_untrainable=true"))
    assert [chr(token) for token, _ in found if token < 256] == ["y", "z"]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"weight": -0.5}, "column `weight` is -0.5: a weight is 0 or more"),
        ({"weight": float("nan")}, "column `weight` is nan, not a finite number"),
        ({"weight": float("inf")}, "column `weight` is inf, not a finite number"),
        ({"weight": "2"}, "column `weight` is '2', not a number"),
        ({"weight": True}, "column `weight` is True, not a number"),
        ({"weights": [1, 1]}, "column `weights` has 2 elements for 3 input_ids"),
        ({"weights": 1}, "column `weights` has no list for 3 input_ids"),
        ({"weights": [1, -1, 1]}, "element 1 of column `weights` is -1: a weight is 0 or more"),
        ({"weights": [1, 1, 1], "weight": 1}, "a row has `weight` or `weights`, not both"),
    ],
)
def test_other_weights_are_refused(tmp_path: Path, columns: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as caught:
        prepare(tmp_path, [{"input_ids": [1, 2, 3]}, {"input_ids": [1, 2, 3], **columns}])
    assert f"d.jsonl:2:1: {message}" in str(caught.value)
    assert "hint: fix the rows, or" in str(caught.value)
    prepared = prepare(tmp_path, [{"text": "a"}, {"text": "bc", "weight": -1}], "data.on_bad_row=skip")
    assert prepared.report["sources"][0]["num_bad"] == 1


def test_the_report_says_how_much_targets_weigh(tmp_path: Path) -> None:
    report = prepare(tmp_path, [{"text": "abc", "weight": 0.25}, {"text": "xyz"}]).report
    # as in num_targets, first tokens and end marks count
    assert report["sources"][0]["num_targets"] == 8
    assert report["sources"][0]["target_weight"] == 5.0
    assert any("8 targets with a weight of 5 together" in note for note in report["notes"])
    report = prepare(tmp_path, [{"text": "abc"}]).report
    assert report["sources"][0]["target_weight"] is None
    assert not any("weight of" in note for note in report["notes"])
