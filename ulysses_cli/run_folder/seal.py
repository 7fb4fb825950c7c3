"""Authenticates messages between the processes of one run with a code of the run's key (HMAC-SHA256).

Anyone who reaches a port can send bytes, but only bytes from a process of the run are accepted. The code proves the
origin and what the message is for; it does not hide the content.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from dataclasses import dataclass, field

KEY = "ULYSSES_RUN_KEY"
CODE_BYTES = hashlib.sha256().digest_size
LONE = secrets.token_hex(32)  # the key of a process without an agent, and of its forks


class ForgedError(RuntimeError):
    """Received bytes that no process of this run has sent, or not for this place."""


@dataclass(frozen=True)
class Seal:
    """Seals and checks messages. `purpose`: what a message is for; it is refused for any other purpose. `place`:
    between which processes and when; it is refused at any other place, so it cannot be sent again."""

    key: str = field(repr=False)

    def close(self, purpose: str, content: bytes, place: str = "") -> bytes:
        return self._compute_code(purpose, place, content) + content

    def open(self, purpose: str, sealed: bytes, place: str = "") -> bytes:
        code, content = sealed[:CODE_BYTES], sealed[CODE_BYTES:]
        if not hmac.compare_digest(code, self._compute_code(purpose, place, content)):
            end = ", or it was not sent here and now" if place else ""
            raise ForgedError(f"{purpose}: the message comes from no process of this run{end}")
        return content

    def name_run(self) -> str:
        """A name that does not reveal the key, because `ps` shows it."""
        return self._compute_code("name", "", b"").hex()[:16]

    def _compute_code(self, purpose: str, place: str, content: bytes) -> bytes:
        words = [word.encode() for word in (purpose, place)]
        head = b"".join(len(word).to_bytes(4, "big") + word for word in words)
        return hmac.digest(self.key.encode(), head + content, "sha256")


def find_seal() -> Seal:
    """This process's seal, with the key from its environment."""
    return Seal(os.environ.get(KEY) or LONE)
