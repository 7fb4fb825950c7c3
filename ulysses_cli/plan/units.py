"""Prefixes of units: thousands, and powers of 1,024."""

from __future__ import annotations

from collections.abc import Sequence

SI_SUFFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
BINARY_SUFFIXES = ((2.0**40, "Ti"), (2.0**30, "Gi"), (2.0**20, "Mi"), (2.0**10, "Ki"))


def pick_scale(size: float, suffixes: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """The largest prefix with which a number is at least 1 when it is rounded; without one, 1 and ''."""
    return next(((scale, suffix) for scale, suffix in suffixes if size >= scale * 0.9995), (1.0, ""))
