"""Tests who is told of a run's end: a real program, a real server on loopback, and what is said when neither works."""

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from support.faults import wait_for_end
from syrupy.assertion import SnapshotAssertion

from ulysses_cli.plan.recipe.loader import parse_recipe
from ulysses_cli.run.notification import Patience, RunEnd, find_unset_webhook, notify

END = RunEnd("failed", "mine", "runs/mine", "rank 3 failed: out of memory", 1)
AT_ONCE = Patience(pauses=(0.0, 0.0))
SMALL = "model: {name_or_path: a/b}\ndata: {datasets: [{path: a.jsonl}], max_length: 64}\n"


class Hook(BaseHTTPRequestHandler):
    statuses: list[int]
    bodies: list[Any]
    place = ""

    def log_message(self, *_: Any) -> None:
        pass

    def do_POST(self) -> None:
        self.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(self.statuses.pop(0) if self.statuses else 200)
        self.send_header("Content-Length", "0")
        if self.place:
            self.send_header("Location", self.place)
        self.end_headers()


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, type[Hook]]]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    handler = type("OwnHook", (Hook,), {"statuses": [], "bodies": []})
    server = HTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/services/T0/B1/aSecretPathOfTheHook", handler
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_program_gets_the_facts(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    script = tmp_path / "notify.py"
    script.write_text(
        "import json, os, sys\n"
        "facts = json.load(sys.stdin)\n"
        "assert facts['message'] == os.environ['ULYSSES_MESSAGE']\n"
        "open(sys.argv[1], 'w').write(os.environ['ULYSSES_EVENT'] + ' ' + facts['text'])\n"
    )
    assert notify(END, f"{sys.executable} {script} '{tmp_path}/a file'", None) == []
    assert (tmp_path / "a file").read_text() == snapshot


def test_a_program_that_fails_fails_nothing_else(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """One that takes too long is ended with its own."""
    slow = f"sh -c 'sleep 60 & echo $! > {tmp_path}/pid; wait'"
    failing = (f"{sys.executable} -c 'raise SystemExit(\"no mail\")'", str(tmp_path / "none"))
    complaints = [notify(END, command, None) for command in failing]
    assert [*complaints, notify(END, slow, None, Patience(command=1))] == snapshot
    child = int((tmp_path / "pid").read_text())
    wait_for_end({child}, 10)  # a killed process is gone as soon as a core is free


def test_an_address_gets_json_also_after_failures(hook: tuple[str, type[Hook]]) -> None:
    address, handler = hook
    handler.statuses += [503, 500]
    assert notify(END, None, address, AT_ONCE) == []
    assert len(handler.bodies) == 3
    assert handler.bodies[-1] == {**vars(END), "text": END.text}


def test_an_address_that_refuses_is_not_asked_again_and_not_shown(
    hook: tuple[str, type[Hook]], snapshot: SnapshotAssertion
) -> None:
    """One that redirects was not told either: a client that follows a 302 sends no body."""
    address, handler = hook
    handler.place = address
    handler.statuses += [404, 301, 302, 303, 307, 308]
    complaints = [notify(END, None, address, AT_ONCE) for _ in range(6)]
    assert len(handler.bodies) == 6
    odd = ("http://127.0.0.1:1/aSecret", "http://127.0.0.1/aSecretPathOf TheHook", "https://[aSecret", "aSecret", "")
    assert [*complaints, *(notify(END, None, address, AT_ONCE) for address in odd)] == snapshot


def test_an_address_of_the_environment(
    hook: tuple[str, type[Hook]], monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    address, handler = hook
    monkeypatch.setenv("MY_HOOK", address)
    assert notify(END, None, "$MY_HOOK") == []
    assert handler.bodies[0]["event"] == "failed"
    loaded = parse_recipe(SMALL, "r.yaml", ["run.notify_webhook=$MY_HOOK"])
    assert find_unset_webhook(loaded, {"MY_HOOK": address}) == []
    unset: tuple[dict[str, str], ...] = ({}, {"MY_HOOK": "aSecret"})
    assert [str(problem) for environ in unset for problem in find_unset_webhook(loaded, environ)] == snapshot
    handler.statuses.append(404)
    assert address not in notify(END, None, "$MY_HOOK")[0]


def test_an_answer_that_comes_byte_by_byte_holds_no_end(snapshot: SnapshotAssertion) -> None:
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            each: list[socket.socket] = []
            while not ended.wait(0.05):
                server.setblocking(False)
                with suppress(OSError):
                    each.append(server.accept()[0])
                for one in each:
                    with suppress(OSError):
                        one.send(b"H")

        thread = threading.Thread(target=drip)
        thread.start()
        start = time.monotonic()
        patience = Patience(address=0.3, pauses=(0.0, 0.0))
        complaints = notify(END, None, f"http://127.0.0.1:{server.getsockname()[1]}/", patience)
        seconds = time.monotonic() - start
        ended.set()
        thread.join()
    assert complaints == snapshot
    assert seconds < 5


def test_a_name_that_is_looked_up_without_end_holds_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: ended.wait(60))
    assert "0.2 s" in notify(END, None, "http://hooks.example/", Patience(address=0.2, pauses=()))[0]
    ended.set()


def test_a_program_that_leaves_a_process_behind_has_ended(tmp_path: Path) -> None:
    start = time.monotonic()
    assert notify(END, f"sh -c 'sleep 40 & echo $! > {tmp_path}/pid'", None) == []
    assert time.monotonic() - start < 20
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)  # it lives
