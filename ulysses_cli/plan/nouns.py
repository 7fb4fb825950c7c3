"""Counts with their nouns: `1 file`, `3 files`, `2 bad rows`, `1,024 processes`. The only place that makes plurals."""

from __future__ import annotations

import re

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
