"""Texts of a split chat in rows that hold what they begin with once: tokens and targets are those of texts alone."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.prepared import prepare_rows, walk_alone
from support.refusals import explain
from support.templates import LAST_ROUND
from syrupy.assertion import SnapshotAssertion

from ulysses_cli.data.prepare import Prepared
from ulysses_cli.data.store import open_rows
from ulysses_cli.plan.rows.ring import MAX_BRANCHES, list_dearest
from ulysses_cli.readers.problems import DataError
from ulysses_cli.report.data_report import format_report

Row = dict[str, Any]


def make_chat(number: int, num_rounds: int) -> list[Row]:
    """Each round has a thought, of which the template shows that of the last round alone; every third has none."""
    messages = []
    for at in range(num_rounds):
        thought = {} if at % 3 == 2 else {"reasoning_content": f"Hm, {at}."}
        messages += [{"role": "user", "content": f"Question {number}.{at}?" * (1 + at % 2)},
                     {"role": "assistant", "content": f"Answer {at}.", **thought}]  # fmt: skip
    return messages


CHATS = [make_chat(number, num_rounds) for number, num_rounds in enumerate([1, 5, 2, 5, 4])]


def prepare(folder: Path, chats: list[Any], *overrides: str, can_share: bool = True) -> Prepared:
    rows = [chat if isinstance(chat, dict) else {"messages": chat} for chat in chats]
    (folder / "t.jinja").write_text(LAST_ROUND)
    words = ("data.max_length=1024", "data.assistant_only_loss=true", "data.on_rewritten_turns=split")
    words += (f"data.chat_template={folder}/t.jinja", 'data.added_tokens=["<|im_start|>", "<|im_end|>"]')
    return prepare_rows(folder, rows, *words, *overrides, can_share=can_share)


def read_documents(prepared: Prepared) -> list[tuple[list[int], list[int], list[float], list[int]]]:
    """Tokens, labels, weights and turns of every document, as if it stood alone: a branch behind its stem's tokens."""
    found = []
    for tokens, part, shared in walk_alone(prepared):
        labels = np.concatenate([np.full(shared, -100), part.labels])
        weights = np.ones(len(part.labels)) if part.weights is None else part.weights
        targets = part.labels >= 0
        found.append((tokens.tolist(), labels.tolist(), weights[targets].tolist(), part.classes[targets].tolist()))
    return sorted(found)


WEIGHED = [{"messages": chat, "weight": (at + 1) / 4} for at, chat in enumerate(CHATS)]


@pytest.mark.parametrize(
    ("chats", "words", "copies"),
    [
        (CHATS, (), 1),
        (WEIGHED, (), 1),
        (CHATS, ("data.packing=off",), 1),
        (CHATS, ("data.max_length=400",), 2),  # no row holds a long chat: its texts hang on several stems
        (CHATS, ("data.max_length=250", "data.excess_length_strategy=split"), 3),  # and the longest are cut
        (CHATS, ("data.datasets.0.weight=2",), 1),
    ],
)
def test_texts_on_one_copy_are_those_that_stand_alone(
    tmp_path: Path, chats: list[Any], words: tuple[str, ...], copies: int
) -> None:
    alone, shared = (prepare(tmp_path, chats, *words, can_share=can_share) for can_share in (False, True))
    assert read_documents(shared) == read_documents(alone)
    rows = [open_rows(each.path, "train") for each in (alone, shared)]
    walked = [sorted(ids.tolist() for ids, _ in each.walk_documents()) for each in rows]
    assert walked[0] == walked[1]
    weights = [sum(each.weigh_targets(row) or 0 for row in range(len(each))) for each in rows]
    assert weights[0] == weights[1]
    tokens = [sum(each.count_tokens(row) for row in range(len(each))) for each in rows]
    counted = [each.report["splits"]["train"]["num_tokens"] for each in (alone, shared)]
    assert tokens == counted
    assert not any(any(rows[0].get_shared(row)) for row in range(len(rows[0])))
    num_branches = sum(sum(each > 0 for each in rows[1].get_shared(row)) for row in range(len(rows[1])))
    assert num_branches > 3
    assert tokens[1] < 0.9 * tokens[0]
    if copies == 1:
        repeated = sum(sum(rows[1].get_shared(row)) for row in range(len(rows[1])))
        assert tokens[1] + repeated == tokens[0]
        kept = shared.report["splits"]["train"]["sources"][0]
        assert kept["documents"] == len(CHATS)
    assert max(map(rows[1].count_tokens, range(len(rows[1])))) <= rows[1].max_length


def test_the_report_counts_what_rows_hold(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """Bytes are tokens here."""
    alone, shared = (prepare(tmp_path, CHATS, can_share=can_share) for can_share in (False, True))
    kept = [open_rows(each.path, "train") for each in (alone, shared)]
    tokens = [sum(rows.count_tokens(row) for row in range(len(rows))) for rows in kept]
    whole = prepare(tmp_path, CHATS, "data.on_rewritten_turns=keep").report["splits"]["train"]["num_tokens"]
    told = [re.findall(r".* texts, \S+ x the .*", format_report(each.report)) for each in (alone, shared)]
    assert told == snapshot
    for (line,), number in zip(told, tokens, strict=True):
        assert f" {number / whole:.1f} x " in line
    assert tokens[0] > 2.5 * whole
    assert tokens[1] < 1.5 * whole
    # before it is done only special tokens are known to be shared, not the role that follows one
    for can_share, number, most in ((False, tokens[0], 0), (True, tokens[1], 12 * len("assistant\n."))):
        words = (tmp_path, CHATS, "data.on_rewritten_turns=raise")
        (growth,) = re.findall(r"for (\S+) x the", explain(prepare, *words, can_share=can_share, error=DataError))
        assert number / whole - 0.05 <= float(growth) <= (number + most) / whole + 0.05


def test_copied_keys_are_no_more_than_plans_count(tmp_path: Path) -> None:
    """A chat of many rounds hangs on several stems, since each of its texts would copy the keys of nearly all of it."""
    prepared = prepare(tmp_path, [make_chat(0, 60)], "data.max_length=8192")
    rows = open_rows(prepared.path, "train")
    whole = prepare(tmp_path, [make_chat(0, 60)], "data.max_length=8192", "data.on_rewritten_turns=keep")
    growth = sum(map(rows.count_tokens, range(len(rows)))) / whole.report["splits"]["train"]["num_tokens"]
    assert f" texts, {growth:.1f} x the " in format_report(prepared.report)
    copied = [sum(rows.get_shared(row)) for row in range(len(rows))]
    _, most = list_dearest(8192, 1, MAX_BRANCHES)
    assert 0 < max(copied) <= sum(most)
    for row in range(len(rows)):
        assert copied[row] <= MAX_BRANCHES * rows.count_tokens(row)
    assert sum(copied) > 0.5 * sum(int(length) for length in rows.stores[0].lengths)
