"""Tests what is said of wrong recipes, rows and commands, and what is read and trained of rows: the questions and
answers of messages.txt, rows.txt, prepared.txt and commands.txt (support/messages.py). `make snapshots` writes the
answers anew."""

from pathlib import Path

import pytest
from support.messages import COMMANDS, PREPARED, ROWS, RULES, Snapshot
from support.tiers import sample

BLOCKS = [(snapshot, text) for snapshot in (RULES, ROWS) for text in snapshot.blocks.values()]
TRAINED = [(PREPARED, text) for text in PREPARED.blocks.values()]
ASKED = [(COMMANDS, text) for text in COMMANDS.list_questions()]
QUICK = [(snapshot, text) for snapshot, text in ASKED[::8] if " plan " not in text]
QUESTIONS = sample([*TRAINED, *ASKED], [*TRAINED[-1:], *QUICK])


@pytest.mark.parametrize(("snapshot", "text"), [*BLOCKS, *QUESTIONS], ids=lambda value: str(value).partition("\n")[0])
def test_answers_are_those_of_the_snapshot(snapshot: Snapshot, text: str, tmp_path: Path) -> None:
    given = text.rstrip("\n") + "\n"
    assert snapshot.answer(given, snapshot.make_folder(tmp_path)) == given, "see make snapshots"
