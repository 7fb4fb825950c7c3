"""The time that an evaluation still takes, against a clock that knows what each question costs."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ulysses_cli.prove.quality.evaluation import FROM_FILES, TimeLeft


def take(length: int) -> float:
    """Seconds of a question: a part for each token and a part for each pair of tokens."""
    return 1e-3 * length + 1e-8 * length * length


@given(st.lists(st.sampled_from([4096, 32768, 131072]), min_size=2, max_size=40), st.data())
def test_long_questions_are_foreseen(lengths: list[int], data: st.DataObject) -> None:
    """From any number of answers, in rising order."""
    lengths.sort()
    number = data.draw(st.integers(1, len(lengths) - 1))
    left = TimeLeft(Counter(lengths), take)
    for length in lengths[:number]:
        left.note(length, take(length))
    assert left.estimate() == pytest.approx(sum(map(take, lengths[number:])))


def test_what_was_answered_before_is_not_left() -> None:
    left = TimeLeft({4096: 3, 8192: 1}, take)
    left.drop(4096)
    left.note(4096, 2.0)
    assert left.estimate() == pytest.approx(2.0 + 2.0 * take(8192) / take(4096))


def test_questions_of_files_take_what_those_before_them_took() -> None:
    left = TimeLeft({FROM_FILES: 4}, take)
    left.note(FROM_FILES, 1.0)
    left.note(FROM_FILES, 3.0)
    assert left.estimate() == 4.0
    left.drop(FROM_FILES)  # it is too long
    assert left.estimate() == 2.0
    assert TimeLeft({4096: 2}, take).estimate() == 0.0, "nothing is known yet"
