"""Writes numbers as people read them: plain numbers, money, parameters, prefixes of units, and counts with their
nouns (`1 file`, `3 files`). No other file makes a plural. report/quantities.py writes what only reports show."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

SI_SUFFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
BINARY_SUFFIXES = ((2.0**40, "Ti"), (2.0**30, "Gi"), (2.0**20, "Mi"), (2.0**10, "Ki"))


def pick_scale(size: float, suffixes: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """The largest prefix with which a number is at least 1 when it is rounded; without one, 1 and ''."""
    return next(((scale, suffix) for scale, suffix in suffixes if size >= scale * 0.9995), (1.0, ""))


def format_bytes(value: float) -> str:
    scale, suffix = pick_scale(abs(value), BINARY_SUFFIXES)
    if scale == 1:
        return f"{value:,.0f} B"
    return f"{value / scale:,.{2 if abs(value) / scale < 10 else 1}f} {suffix}B"


def format_plain(number: float) -> str:
    """1,000,000 for a whole number of either type; 0.05, 1e-12."""
    is_whole = math.isfinite(number) and number == int(number) and abs(number) < 1e15
    return f"{int(number):,}" if is_whole else f"{number:,}"


def format_parameters(count: float) -> str:
    """8.03 B, 596 M, 358 k."""
    scale, suffix = pick_scale(count, SI_SUFFIXES)
    return f"{count / scale:.3g} {suffix.replace('G', 'B')}".rstrip()


def format_range(low: float, high: float) -> str:
    """Two numbers to two digits: 22,000 to 30,000; 0.95 to 1.3."""
    return " to ".join(dict.fromkeys(_format_amount(end, 2) for end in (low, high)))


def format_usd(low: float, high: float | None = None, *, digits: int | None = None) -> str:
    """An amount, or a range. `digits`: as many as the amount is known to; None: to the cent."""
    high = low if high is None else high
    if 0 < high < 0.01:
        return "less than USD 0.01"
    if low < high and low < 0.01:
        return f"up to USD {_format_amount(high, digits)}"
    parts = dict.fromkeys(_format_amount(end, digits) for end in (low, high))
    return f"USD {' to '.join(parts)}"


def _format_amount(usd: float, digits: int | None) -> str:
    if digits is None or usd == 0:
        return f"{usd:,.2f}"
    usd = float(f"{usd:.{digits}g}")
    return f"{usd:,.{max(0, digits - 1 - math.floor(math.log10(abs(usd))))}f}"


# A noun's head ends where one of these begins: `file that cannot be read` -> `files that cannot be read`.
TAIL = re.compile(r"( (that|of|in|on|by|with|without|beside|named|ignored|per|for|like)\b|,).*")
HISSES = ("s", "x", "z", "ch", "sh")


def format_count(count: int, noun: str) -> str:
    """`noun` is the singular, for every count."""
    return f"{count:,} {noun if count == 1 else make_plural(noun)}"


def make_plural(noun: str) -> str:
    head = TAIL.sub("", noun)
    if head.endswith("y") and head[-2:-1] not in "aeiou":
        return f"{head[:-1]}ies{noun[len(head) :]}"
    return f"{head}{'es' if head.endswith(HISSES) else 's'}{noun[len(head) :]}"
