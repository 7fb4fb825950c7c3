"""Machines of one evaluation meet in a store, compare facts, and notice that one is lost. Here they are threads."""

import re
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from ulysses_cli.plan.problem import RecipeError
from ulysses_cli.prove import machines
from ulysses_cli.prove.machines import MachinePlace, Machines
from ulysses_cli.run.key import KEY
from ulysses_cli.train.processes.store import MeetingError


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "k" * 40)


def run_machines(work: Callable[[int, str], Any], count: int = 3) -> list[Any]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda rank: work(rank, endpoint), range(count)))


def meet(rank: int, endpoint: str, facts: dict[str, Any], count: int = 3, join_seconds: float = 30.0) -> Machines:
    return Machines(MachinePlace(count, rank, endpoint, "127.0.0.1", join_seconds), facts, lambda _: None)


def test_machines_with_the_same_facts_meet_and_part() -> None:
    def work(rank: int, endpoint: str) -> bool:
        met = meet(rank, endpoint, {"lengths": [4096]})
        time.sleep(0.5 * (3 - rank))  # number 0, which holds the store, is the first to part or the last
        met.check()
        met.leave()
        return True

    assert run_machines(work) == [True] * 3


def test_a_difference_is_named_on_all_machines(snapshot: SnapshotAssertion) -> None:
    def work(rank: int, endpoint: str) -> str:
        with pytest.raises(RecipeError) as caught:
            meet(rank, endpoint, {"lengths": [4096], "the tokenizer": "b" if rank == 2 else "a"})
        return caught.value.problems[0].message

    (said,) = set(run_machines(work))
    assert said.replace(socket.gethostname(), "HOST") == snapshot


@pytest.mark.check
def test_a_machine_without_signs_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("SILENT_SECONDS", 1.5), ("BEAT_SECONDS", 0.1), ("QUIET_SECONDS", 1.0)):
        monkeypatch.setattr(machines, name, seconds)

    def work(rank: int, endpoint: str) -> str:
        met = meet(rank, endpoint, {})
        if rank == 2:
            met.has_left.set()  # gives no more signs, and does not say that it leaves
            return ""
        end = time.monotonic() + 20
        while time.monotonic() < end:
            try:
                met.check()
            except MeetingError as error:
                met.leave()
                return str(error)
            time.sleep(0.05)
        return "nothing was noticed"

    first, second, _ = run_machines(work)
    assert "no sign" in first
    assert "no sign" in second or "has ended" in second


def test_a_machine_that_does_not_come_is_named(snapshot: SnapshotAssertion) -> None:
    def work(rank: int, endpoint: str) -> str:
        with pytest.raises(RecipeError) as caught:
            meet(rank, endpoint, {}, count=3, join_seconds=1.0)
        return caught.value.problems[0].message

    assert re.sub(r":\d+", ":PORT", run_machines(work, 2)[0]) == snapshot
