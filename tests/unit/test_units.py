"""Tests how numbers, money, parameters and counts with their nouns are written in every command."""

import pytest
from syrupy.assertion import SnapshotAssertion

from ulysses_cli.plan.units import format_count, format_parameters, format_plain, format_usd


def test_plain_numbers_and_parameters() -> None:
    plain = {1_000_000: "1,000,000", 1e9: "1,000,000,000", 0.05: "0.05", 0.0: "0", 1e-12: "1e-12", -2.0: "-2"}
    assert {number: format_plain(number) for number in plain} == plain
    rounded = {8_030_261_248: "8.03 B", 596_049_920: "596 M", 357_984: "358 k", 1.04e12: "1.04 T"}
    assert {count: format_parameters(count) for count in rounded} == rounded


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


def test_a_count_and_its_noun_agree(snapshot: SnapshotAssertion) -> None:
    counted = [(1, "GPU"), (2, "GPU"), (0, "bad row"), (1_024, "process"), (2, "copy"), (2, "key")]
    counted += [(number, "file that cannot be read (Permission denied)") for number in (1, 3)]
    more = ("machine like this one", "file named twice, read once", "text file beside files of rows, not read")
    assert [format_count(count, noun) for count, noun in (*counted, *((2, noun) for noun in more))] == snapshot
