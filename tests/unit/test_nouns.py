"""Tests that a noun agrees with its count."""

import pytest

from ulysses_cli.plan.units import format_count


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [
        (1, "GPU", "1 GPU"),
        (2, "GPU", "2 GPUs"),
        (0, "bad row", "0 bad rows"),
        (1_024, "process", "1,024 processes"),
        (2, "copy", "2 copies"),
        (2, "key", "2 keys"),
        (1, "file that cannot be read (Permission denied)", "1 file that cannot be read (Permission denied)"),
        (3, "file that cannot be read (Permission denied)", "3 files that cannot be read (Permission denied)"),
        (2, "machine like this one", "2 machines like this one"),
        (2, "file named twice, read once", "2 files named twice, read once"),
        (2, "text file beside files of rows, not read", "2 text files beside files of rows, not read"),
    ],
)
def test_a_count_and_its_noun_agree(count: int, noun: str, text: str) -> None:
    assert format_count(count, noun) == text
