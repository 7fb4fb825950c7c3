"""Ends a run on all machines when it fails on one of them. Their ranks may hang and notice nothing."""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousStateError
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

from ulysses_cli.run_folder.seal import ForgedError, Seal

FAILED = "ulysses/failed"  # a key of the machines' store, and a purpose of the seal
ASK_SECONDS = 1.0
END_SECONDS = 30.0  # for ranks to notice a lost peer, and to write down what they did


class MeetingError(RendezvousStateError):
    """Machines cannot join one run, or go on with it. `hint` says what to do."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


@contextmanager
def asking_the_store() -> Iterator[None]:
    """Around a call of the machines' store. The machine that holds it may have ended."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        raise RendezvousConnectionError("the machines' store is gone") from error


@dataclass
class SharedEnd:
    """The end of a run in the store of its machines. `clock` counts seconds."""

    store: dist.Store
    seal: Seal
    node_rank: int
    clock: Callable[[], float] = time.monotonic
    asked: float = field(default=float("-inf"), init=False)
    known_since: float | None = field(default=None, init=False)

    def tell(self) -> None:
        """The run has failed on this machine, and no restart follows. The first machine that says so is named."""
        content = self.seal.close(FAILED, str(self.node_rank).encode())
        self.store.compare_set(FAILED, "", base64.b64encode(content).decode("ascii"))

    def check(self) -> None:
        """Called while ranks of this machine run. Raises MeetingError some time after another machine has failed; until
        then ranks may end by themselves, and with a better message."""
        now = self.clock()
        if self.known_since is None and now - self.asked >= ASK_SECONDS:
            self.asked = now
            with asking_the_store():
                self.known_since = now if self.store.check([FAILED]) else None
        if self.known_since is not None and now - self.known_since >= END_SECONDS:
            raise MeetingError(
                f"the run has failed on machine number {self._read_number()}, and ranks of this machine did not end "
                f"by themselves within {END_SECONDS:g} s",
                "look at the logs of both: a rank that is stopped, or hangs outside of Python, cannot say so",
            )

    def _read_number(self) -> str:
        with asking_the_store():
            text = self.store.get(FAILED)
        try:
            return self.seal.open(FAILED, base64.b64decode(text, validate=True)).decode()
        except (ForgedError, binascii.Error):
            raise MeetingError(
                "an end of the run that no machine of this run has written is in their store",
                "let no other machine reach the master's port",
            ) from None
