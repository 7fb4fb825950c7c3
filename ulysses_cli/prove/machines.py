"""Ranks of one world on several machines: who meets where, and how the world ends on all of them when one machine
fails. The machines' store is opened as for a run of training; each machine starts ranks of its own. Nothing is
restarted in place, so torch's agent is not needed."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ulysses_cli.plan.problem import Problem, RecipeError
from ulysses_cli.run.key import find_seal
from ulysses_cli.train.processes.rendezvous import SILENT_SECONDS, SealedStore, open_store
from ulysses_cli.train.processes.store import (
    Heartbeats,
    MeetingError,
    SharedEnd,
    StoreCalls,
    name_missing,
    report_waiting,
)

BEAT_SECONDS = 1.0
LOST_SECONDS = 40.0  # a call to the store takes milliseconds
LEAVE_SECONDS = 60.0  # for the other machines to end, before the store is gone
QUIET_SECONDS = 10.0  # without a sign, a machine that has not left is taken for lost
PREFIX = "ulysses/world"


@dataclass(frozen=True)
class MachinePlace:
    """Which machine of how many this is. `endpoint`: of the store, which machine 0 holds at its own `address`."""

    count: int
    rank: int
    endpoint: str
    address: str
    join_seconds: float


class Machines:
    """This machine's part in the meeting. Opened with all machines present, and the same `facts` on all of them; else
    it raises RecipeError."""

    def __init__(self, place: MachinePlace, facts: Mapping[str, Any], say: Callable[[str], object]) -> None:
        self.place, seal = place, find_seal()
        own_address = None if place.rank else place.address
        try:
            self.store = open_store(place.endpoint, seal, own_address, place.join_seconds, say)
        except MeetingError as error:
            raise RecipeError([Problem("", str(error), error.hint)]) from None
        self.end = SharedEnd(self.store, seal, place.rank)
        self.calls, self.heartbeats = StoreCalls(), Heartbeats()
        self.trouble = ""
        self.silence = 0.0
        self.has_left = threading.Event()
        sealed = SealedStore(self.store, seal, PREFIX)
        sealed.set(_name("facts", place.rank), json.dumps([socket.gethostname(), facts], sort_keys=True))
        self._meet(say)
        try:
            compare_facts([json.loads(sealed.get(_name("facts", rank))) for rank in range(place.count)])
        except RecipeError:
            self.leave()
            raise
        threading.Thread(target=self._beat, name="the machines' store", daemon=True).start()

    def _meet(self, say: Callable[[str], object]) -> None:
        """Returns when all machines have written their facts."""
        keys = [_name("facts", rank) for rank in range(self.place.count)]
        end = time.monotonic() + self.place.join_seconds

        def name() -> str:
            missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
            return name_missing(missing, self.place.count)

        with report_waiting(name, say):
            while not self.store.check(keys):
                if time.monotonic() > end:
                    message = f"{name()} at {self.place.endpoint} within {self.place.join_seconds:g} s"
                    hint = "start the command on each with its own --node-rank; a machine that is refused says why"
                    raise RecipeError([Problem("", message, hint)])
                time.sleep(0.2)

    def _beat(self) -> None:
        """Gives a sign in the store and looks for the others', in a thread: a store that is cut off does not answer."""
        own, count = self.place.rank, self.place.count
        while not self.has_left.wait(BEAT_SECONDS):
            try:
                with self.calls.timed():
                    self.store.add(_name("beat", own), 1)
                    beats: dict[Hashable, object] = {
                        rank: self.store.add(_name("beat", rank), 0) for rank in range(count) if rank != own
                    }
                    self.end.check()
                self.silence = self.heartbeats.find_longest(beats)
            except MeetingError as error:
                self.trouble = str(error)
            except Exception:  # noqa: BLE001 - the store's host has ended; torch raises many kinds
                self.trouble = self.trouble or "machine number 0, which holds the machines' store, has ended"
            if self.trouble:
                return

    def check(self) -> None:
        """Called while this machine's ranks run. Raises MeetingError once another machine is gone."""
        trouble = self.trouble
        if not trouble and self.silence >= SILENT_SECONDS:
            trouble = f"another machine has given no sign for {self.silence:.0f} s"
        if not trouble and (seconds := self.calls.find_longest()) >= LOST_SECONDS:
            trouble = f"machine number 0 has not answered for {seconds:.0f} s"
        if trouble:
            raise MeetingError(trouble, "look at what it says, and start the command on all machines again")

    def tell_failure(self) -> None:
        """This machine's ranks have failed: the others' end too."""
        try:
            self.end.tell()
        except RuntimeError:
            return  # the store is gone, and with it all machines

    def leave(self) -> None:
        """The machine that holds the store waits for those that still use it, as long as they give signs."""
        self.has_left.set()
        heartbeats, end = Heartbeats(), time.monotonic() + LEAVE_SECONDS
        try:
            self.store.add(_name("left", self.place.rank), 1)
            while not self.place.rank and time.monotonic() < end:
                left = [rank for rank in range(self.place.count) if not self.store.add(_name("left", rank), 0)]
                beats: dict[Hashable, object] = {rank: self.store.add(_name("beat", rank), 0) for rank in left}
                if not left or heartbeats.find_longest(beats) >= QUIET_SECONDS:
                    return
                time.sleep(0.1)
        except RuntimeError:
            return


def _name(what: str, rank: int) -> str:
    return f"{PREFIX}/{what}/{rank}"


def compare_facts(machines: list[tuple[str, dict[str, Any]]]) -> None:
    """Raises RecipeError, on all machines alike, for the first fact in which machines differ."""
    first_host, first = machines[0]
    for rank, (host, facts) in enumerate(machines):
        for name in sorted({*first, *facts}):
            own, other = facts.get(name), first.get(name)
            if own != other:
                message = f"machine number {rank} ({host}) and number 0 ({first_host}) differ in {name}"
                hint = f"it is {json.dumps(own)} there, and {json.dumps(other)} on number 0: make it the same"
                raise RecipeError([Problem("", message, hint)])


def open_rank_store(endpoint: str, name: str, timeout: timedelta) -> dist.Store:
    """The store through which the ranks of one world connect: a part of the machines' store."""
    host, _, port = endpoint.rpartition(":")
    store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)
    return dist.PrefixStore(f"{PREFIX}/ranks/{name}", store)
