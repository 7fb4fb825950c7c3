"""The secret key of a run on several machines, and the seal that it makes of messages (HMAC-SHA256).

Anyone who reaches a port can send bytes, but only bytes from a process of the run are accepted. The seal proves the
origin and what a message is for; it does not hide the content. The key comes from the environment, or from a file in
the run's folder, which is on a disk that the machines share. It is never part of a command line."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ulysses_cli.plan.problem import Problem, RecipeError

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


FILE = "key"
MIN_LETTERS = 32
NUM_BYTES = 32
COMPLETE = re.compile(rf"[0-9a-f]{{{2 * NUM_BYTES}}}")
WRITE_SECONDS = 10.0


def read_given_key(environ: Mapping[str, str]) -> str | None:
    """None if the environment holds no key."""
    key = environ.get(KEY, "").strip()
    if key and len(key) < MIN_LETTERS:
        message = f"{KEY} has {len(key)} letters; {MIN_LETTERS} are needed"
        raise RecipeError([Problem("", message, "make one with: openssl rand -hex 32")])
    return key or None


def share_key(run_dir: Path, seconds: float = WRITE_SECONDS) -> str:
    """Makes or reads the key file. Machines that start at the same time agree, because only one can create it. The
    content of a file that another machine has created is waited for."""
    file = run_dir / FILE
    try:
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return _read(file, seconds)
    except OSError as error:
        raise _refuse(file, f"cannot be made: {error.strerror}") from None
    key = secrets.token_hex(NUM_BYTES)
    try:
        with os.fdopen(handle, "w") as stream:
            stream.write(key)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        file.unlink(missing_ok=True)
        raise _refuse(file, f"cannot be written: {error.strerror}") from None
    return key


def drop_key(run_dir: Path, key: str) -> None:
    """Deletes the key file at the end of the run, unless it holds another run's key."""
    file = run_dir / FILE
    try:
        if _read_private(file) == key:
            file.unlink()
    except (OSError, RecipeError):
        return


def _read(file: Path, seconds: float) -> str:
    end = time.monotonic() + seconds
    while not COMPLETE.fullmatch(key := _read_private(file)):  # after a crash a disk may hold zeros instead of it
        if time.monotonic() > end:
            raise _refuse(file, "is not complete", f"delete it, or set {KEY} to the same secret on every machine")
        time.sleep(0.05)
    return key


def _read_private(file: Path) -> str:
    """Reads the file. Raises RecipeError if other users own it or may read it, since it is then no secret."""
    try:
        handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise _refuse(file, f"cannot be read: {error.strerror}") from None
    with os.fdopen(handle, "rb") as stream:
        facts = os.fstat(handle)
        if not stat.S_ISREG(facts.st_mode):
            raise _refuse(file, "is not a file")
        if facts.st_uid != os.geteuid() or stat.S_IMODE(facts.st_mode) & 0o077:
            raise _refuse(file, "belongs to another user, or others may read it")
        return stream.read(4 * NUM_BYTES).decode("ascii", errors="replace")


def _refuse(file: Path, what: str, hint: str = f"set {KEY} to the same secret on every machine") -> RecipeError:
    return RecipeError([Problem("run.output_dir", f"{file}, the key of this run, {what}", hint)])
