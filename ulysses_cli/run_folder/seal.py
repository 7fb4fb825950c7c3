"""What processes of one run tell each other, under a code of the run's key (HMAC-SHA256): whoever reaches a port can
send bytes, and only a process of the run can send bytes that are read. It proves where something comes from, and
neither hides it nor says when it was sent.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from dataclasses import dataclass, field

KEY = "ULYSSES_RUN_KEY"
CODE_BYTES = hashlib.sha256().digest_size
LONE = secrets.token_hex(32)  # of a process that nobody has launched, and its forks


class ForgedError(RuntimeError):
    """Bytes that no process of this run has sent."""


@dataclass(frozen=True)
class Seal:
    """`purpose`: where something may be read. What was sealed for one place is no good in another."""

    key: str = field(repr=False)

    def close(self, purpose: str, content: bytes) -> bytes:
        return self._compute_code(purpose, content) + content

    def open(self, purpose: str, sealed: bytes) -> bytes:
        code, content = sealed[:CODE_BYTES], sealed[CODE_BYTES:]
        if not hmac.compare_digest(code, self._compute_code(purpose, content)):
            raise ForgedError(f"{purpose}: what stands there comes from no process of this run")
        return content

    def name_run(self) -> str:
        """A name that tells nothing of the key: it is seen in `ps`."""
        return self._compute_code("name", b"").hex()[:16]

    def _compute_code(self, purpose: str, content: bytes) -> bytes:
        head = len(purpose.encode()).to_bytes(4, "big") + purpose.encode()
        return hmac.digest(self.key.encode(), head + content, "sha256")


def find_seal() -> Seal:
    """This process's, from its environment."""
    return Seal(os.environ.get(KEY) or LONE)
