"""Formats numbers with their units for people: 16Ki, 71.3 GiB, 4 min 12 s, 12.3%, 5e-6."""

from __future__ import annotations

from typing import TypeGuard

from ulysses_cli.plan.hardware import GIB
from ulysses_cli.plan.planner.candidates import Accuracy
from ulysses_cli.plan.units import BINARY_SUFFIXES, SI_SUFFIXES, format_bytes, format_usd, pick_scale

NO_VALUE = "\u2013"
LARGEST = 1e300  # a larger value is shown as infinite: arithmetic on a chart would overflow
UNITS = ("tokens", "bytes", "seconds", "share", "USD")


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value, of any type, is a finite number that a chart can show."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST


def split_unit(label: str) -> tuple[str, str]:
    """Splits `memory (bytes)` into `memory` and `bytes`. The unit at the end of a label decides how numbers are
    written."""
    text, _, unit = label.rstrip(") ").rpartition("(")
    if text and unit in UNITS:
        return text.rstrip(), unit
    return label, label if label in UNITS else ""


def format_quantity(value: float | None, unit: str = "") -> str:
    """A single value with its unit and about three digits."""
    if value is None or not is_number(value):
        return NO_VALUE if value is None or isinstance(value, bool) or value != value else format_infinite(value)
    match unit:
        case "bytes":
            return format_bytes(value)
        case "seconds":
            return format_seconds(value)
        case "tokens":
            return f"{value:,.0f}" if abs(value) < 1e6 else format_number(value).replace("G", "B")
        case "share":
            return format_share(value)
        case "USD":
            return format_usd(value)
    return format_number(value)


def format_infinite(value: float) -> str:
    return "infinite" if value > 0 else "minus infinite"


def format_share(share: float) -> str:
    """A percentage. Does not round a small share to 0%, or a share below 1 to 100%."""
    if 0 < share < 0.0005:
        return "<0.1%"
    if 0.9995 < share < 1:
        return ">99.9%"
    return f"{share:.1%}"


def format_number(value: float) -> str:
    """0.00213, 2.31, 1,234, 12.3k, 5e-6."""
    size = abs(value)
    if size == 0:
        return "0"
    if size < 1e-3 or size >= 1e15:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{trim_zeros(mantissa)}e{int(exponent)}"
    if size < 9_999.5:
        whole = f"{value:,.0f}"
        return whole if size >= 999.5 or value == int(value) else trim_zeros(f"{value:.3g}")
    scale, suffix = pick_scale(size, SI_SUFFIXES)
    return trim_zeros(f"{value / scale:.3g}" if size / scale < 999.5 else f"{value / scale:.0f}") + suffix


def format_gib(num_bytes: float, decimals: int = 1) -> str:
    """GiB without the unit, for tables and lines of text whose numbers share one scale."""
    return f"{num_bytes / GIB:,.{decimals}f}"


def format_binary(tokens: float) -> str:
    """8Ki, 512Ki, 1Mi for multiples of those units, and plain digits otherwise."""
    scale, suffix = pick_scale(tokens, BINARY_SUFFIXES)
    return f"{tokens / scale:,.0f}{suffix}" if tokens % scale == 0 else f"{tokens:,.0f}"


def format_seconds(value: float) -> str:
    if 0 < abs(value) < 1:
        return f"{format_number(value * 1e3)} ms"
    if abs(value) < 59.95:
        return f"{value:.3g} s"
    minutes, seconds = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {seconds} s" if seconds else f"{minutes} min"
    hours, minutes = divmod(round(value / 60), 60)
    return f"{hours:,} h {minutes} min" if minutes else f"{hours:,} h"


def format_step_seconds(seconds: float, accuracy: Accuracy) -> str:
    """A predicted time as a range, to two digits: 17 to 24 s, 58 s to 1 min 20 s."""
    ends = [format_seconds(float(f"{seconds / share:.2g}")) for share in (accuracy.high, accuracy.low)]
    amount, _, unit = ends[0].partition(" ")
    ends[0] = amount if ends[1].partition(" ")[2] == unit else ends[0]
    return " to ".join(dict.fromkeys(ends))


def trim_zeros(text: str) -> str:
    return text.rstrip("0").rstrip(".") if "." in text else text
