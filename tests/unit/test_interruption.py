"""Tests what a rank does with a signal to stop, phase by phase; signals and a parent's death in real processes."""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from support.paths import ROOT
from syrupy.assertion import SnapshotAssertion

from ulysses_cli.train.processes.interruption import ORPHAN_SECONDS, ORPHANED, STOP_SHARE, UPLOAD_SHARE, Interruption


class Rank:
    """An interruption with a clock that tests set."""

    def __init__(self) -> None:
        self.now, self.ended, self.messages = 100.0, [], []
        self.interruption = Interruption(self.ended.append, self.messages.append, lambda: self.now)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.interruption.check()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, ORPHANED])
def test_a_rank_ends_at_once_while_nothing_can_be_lost(number: int) -> None:
    rank = Rank()
    rank.interruption.receive(number)
    assert (rank.ended, rank.messages) == ([number], [])
    saved = Rank()
    saved.interruption.wait_for_boundary(600.0)
    saved.interruption.receive(signal.SIGINT)
    assert saved.ended == []
    saved.interruption.end_at_once()
    assert saved.ended == [signal.SIGINT], "nothing is left to save"


def test_a_loop_is_asked_to_stop_and_has_a_time_limit(snapshot: SnapshotAssertion) -> None:
    """The rest of a minute is for the agent, which needs 10 s for a rank that does not answer."""
    rank = Rank()
    rank.interruption.wait_for_boundary(60.0)
    assert not rank.interruption.is_asked
    rank.interruption.receive(signal.SIGTERM)
    rank.interruption.receive(signal.SIGTERM)  # one from the agent, one from a scheduler that signals every process
    assert rank.interruption.is_asked
    assert rank.messages == snapshot
    rank.wait(STOP_SHARE * 60 - 1)
    assert rank.ended == []
    rank.wait(2)
    assert rank.ended == [signal.SIGTERM]
    assert STOP_SHARE * 60 + 10 < 60


def test_a_signal_leaves_less_time_to_uploads_than_to_a_save() -> None:
    rank = Rank()
    rank.interruption.wait_for_boundary(60.0)
    rank.wait(100)
    assert not rank.interruption.is_hurried, "nobody has asked"
    rank.interruption.receive(signal.SIGTERM)
    rank.wait(UPLOAD_SHARE * STOP_SHARE * 60 - 1)
    assert not rank.interruption.is_hurried
    rank.wait(2)
    assert rank.interruption.is_hurried
    assert rank.ended == []


def test_a_rank_without_a_parent_has_ten_seconds() -> None:
    rank = Rank()
    rank.interruption.wait_for_boundary(600.0)
    rank.interruption.receive(signal.SIGTERM)
    rank.interruption.receive(ORPHANED)
    rank.wait(ORPHAN_SECONDS - 0.1)
    assert rank.ended == []
    rank.wait(0.2)
    assert rank.ended == [signal.SIGTERM]


CHILD = """
    import os, sys, time
    from ulysses_cli.train.processes.interruption import SignalListener
    SignalListener(lambda number: os.write(1, f"{number}\\n".encode())).start()
    os.write(1, f"{os.getpid()}\\n".encode())
    (r, w) = os.pipe()
    os.read(r, 1)  # inside C, as in a collective: no handler of Python's runs
"""


@contextmanager
def start_child(*, through: bool = False) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a child; `through` is a process between them that ends when its stdin is closed."""
    script = textwrap.dedent(CHILD)
    if through:
        script = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {script!r}]); sys.stdin.read()"
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    environ.pop("ULYSSES_STARTED_BY", None)
    child = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ)
    with child:
        listener = int(child.stdout.readline())
        try:
            yield child
        finally:
            os.kill(listener, signal.SIGKILL)
            child.kill()


def test_signals_are_handled_while_the_main_thread_waits() -> None:
    with start_child() as child:
        for number in (signal.SIGTERM, signal.SIGINT):
            child.send_signal(number)
            assert child.stdout.readline() == f"{int(number)}\n".encode()


def test_the_death_of_the_parent_is_noticed() -> None:
    with start_child(through=True) as parent:
        parent.kill()
        heard = {parent.stdout.readline() for _ in range(2)}
        assert heard == {b"0\n", b"15\n"}, "it looks at its parent, and the system sends a signal"
