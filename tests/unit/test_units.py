"""Tests how numbers, money, parameters and counts with their nouns are written in every command."""

import pytest

from ulysses_cli.plan.units import format_count, format_parameters, format_plain, format_usd


@pytest.mark.parametrize(
    ("number", "text"),
    [(1_000_000, "1,000,000"), (1e9, "1,000,000,000"), (0.05, "0.05"), (0.0, "0"), (1e-12, "1e-12"), (-2.0, "-2")],
)
def test_plain_numbers(number: float, text: str) -> None:
    assert format_plain(number) == text


@pytest.mark.parametrize(
    ("count", "text"), [(8_030_261_248, "8.03 B"), (596_049_920, "596 M"), (357_984, "358 k"), (1.04e12, "1.04 T")]
)
def test_parameters(count: int, text: str) -> None:
    assert format_parameters(count) == text


@pytest.mark.parametrize(
    ("ends", "digits", "text"),
    [
        ((5e-5,), None, "less than USD 0.01"), ((0,), None, "USD 0.00"), ((1234.5,), None, "USD 1,234.50"),
        ((2e-5, 5e-5), 2, "less than USD 0.01"), ((2e-5, 0.0521), 2, "up to USD 0.052"),
        ((0.2812, 0.534), 2, "USD 0.28 to 0.53"), ((3.24, 12.4), 2, "USD 3.2 to 12"),
        ((12_345.0, 98_765.0), 2, "USD 12,000 to 99,000"), ((2.0, 2.0), None, "USD 2.00"),
        ((3.2149,), 3, "USD 3.21"),
    ],
)  # fmt: skip
def test_money_is_written_without_exponents(ends: tuple[float, ...], digits: int | None, text: str) -> None:
    assert format_usd(*ends, digits=digits) == text


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
