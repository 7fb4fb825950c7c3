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

from ulysses_cli.plan.recipe.loader import parse_recipe
from ulysses_cli.run import notification
from ulysses_cli.run.notification import RunEnd, find_unset_webhook, notify

END = RunEnd("failed", "mine", "runs/mine", "rank 3 failed: out of memory", 1)
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


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notification, "PAUSES", (0.0, 0.0))


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


def test_a_program_gets_the_facts(tmp_path: Path) -> None:
    script = tmp_path / "notify.py"
    script.write_text(
        "import json, os, sys\n"
        "facts = json.load(sys.stdin)\n"
        "assert facts['message'] == os.environ['ULYSSES_MESSAGE']\n"
        "open(sys.argv[1], 'w').write(os.environ['ULYSSES_EVENT'] + ' ' + facts['text'])\n"
    )
    assert notify(END, f"{sys.executable} {script} '{tmp_path}/a file'", None) == []
    assert (tmp_path / "a file").read_text() == "failed mine: failed: rank 3 failed: out of memory"


def test_a_program_that_fails_fails_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert notify(END, f"{sys.executable} -c 'raise SystemExit(\"no mail\")'", None) == [
        "run.notify_command ended with exit code 1: no mail"
    ]
    assert "cannot be run" in notify(END, str(tmp_path / "none"), None)[0]
    monkeypatch.setattr(notification, "COMMAND_SECONDS", 0.1)
    assert "did not end within" in notify(END, "sleep 30", None)[0]


def test_an_address_gets_json_also_after_failures(hook: tuple[str, type[Hook]]) -> None:
    address, handler = hook
    handler.statuses += [503, 500]
    assert notify(END, None, address) == []
    assert len(handler.bodies) == 3
    assert handler.bodies[-1] == {**vars(END), "text": "mine: failed: rank 3 failed: out of memory"}


def test_an_address_that_refuses_is_not_asked_again_and_not_shown(hook: tuple[str, type[Hook]]) -> None:
    address, handler = hook
    handler.statuses.append(404)
    (complaint,) = notify(END, None, address)
    assert "run.notify_webhook was not reached: HTTP Error 404" in complaint
    assert len(handler.bodies) == 1
    (complaint,) = notify(END, None, "http://127.0.0.1:1/aSecretPathOfTheHook")
    assert "was not reached" in complaint
    assert "aSecretPath" not in complaint


@pytest.mark.parametrize("address", ["http://127.0.0.1/aSecretPathOf TheHook", "https://[aSecret", "aSecret", ""])
def test_an_address_that_is_none_fails_nothing_and_is_not_shown(address: str) -> None:
    (complaint,) = notify(END, None, address)
    assert complaint.startswith("run.notify_webhook was not reached: ")
    assert "aSecret" not in complaint


def test_an_address_of_the_environment(hook: tuple[str, type[Hook]], monkeypatch: pytest.MonkeyPatch) -> None:
    address, handler = hook
    monkeypatch.setenv("MY_HOOK", address)
    assert notify(END, None, "$MY_HOOK") == []
    assert handler.bodies[0]["event"] == "failed"
    loaded = parse_recipe(SMALL, "r.yaml", ["run.notify_webhook=$MY_HOOK"])
    assert find_unset_webhook(loaded, {"MY_HOOK": address}) == []
    assert "MY_HOOK is not set" in str(find_unset_webhook(loaded, {})[0])
    assert "MY_HOOK holds no web address" in str(find_unset_webhook(loaded, {"MY_HOOK": "aSecret"})[0])
    handler.statuses.append(404)
    assert address not in notify(END, None, "$MY_HOOK")[0]


def test_an_address_that_redirects_was_not_told(hook: tuple[str, type[Hook]]) -> None:
    """A client that follows a 302 sends no body."""
    address, handler = hook
    for status in (301, 302, 303, 307, 308):
        handler.statuses.append(status)
        handler.place = address
        (complaint,) = notify(END, None, address)
        assert f"HTTP Error {status}: " in complaint
        assert "it redirects: write the address that it leads to" in complaint
    assert len(handler.bodies) == 5


def test_an_answer_that_comes_byte_by_byte_holds_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notification, "ADDRESS_SECONDS", 0.3)
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
        (complaint,) = notify(END, None, f"http://127.0.0.1:{server.getsockname()[1]}/")
        seconds = time.monotonic() - start
        ended.set()
        thread.join()
    assert complaint == "run.notify_webhook was not reached: no answer within 0.3 s"
    assert seconds < 5


def test_a_name_that_is_looked_up_without_end_holds_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notification, "PAUSES", ())
    monkeypatch.setattr(notification, "ADDRESS_SECONDS", 0.2)
    ended = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: ended.wait(60))
    assert "no answer within 0.2 s" in notify(END, None, "http://hooks.example/")[0]
    ended.set()


def test_a_program_that_leaves_a_process_behind_has_ended(tmp_path: Path) -> None:
    start = time.monotonic()
    assert notify(END, f"sh -c 'sleep 40 & echo $! > {tmp_path}/pid'", None) == []
    assert time.monotonic() - start < 20
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)  # it lives


def test_a_program_that_takes_too_long_is_ended_with_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notification, "COMMAND_SECONDS", 1)
    command = f"sh -c 'sleep 60 & echo $! > {tmp_path}/pid; wait'"
    assert notify(END, command, None) == ["run.notify_command did not end within 1 s"]
    child = int((tmp_path / "pid").read_text())
    wait_for_end({child}, 10)  # a killed process is gone as soon as a core is free
