"""Tests who is told of a run's end: a real program, a real server on loopback, and what is said when neither works."""

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from ulysses_cli.launch import notification
from ulysses_cli.launch.notification import RunEnd, notify

END = RunEnd("failed", "mine", "runs/mine", "rank 3 failed: out of memory", 1)


class Hook(BaseHTTPRequestHandler):
    statuses: list[int]
    bodies: list[Any]

    def log_message(self, *_: Any) -> None:
        pass

    def do_POST(self) -> None:
        self.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(self.statuses.pop(0) if self.statuses else 200)
        self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, type[Hook]]]:
    monkeypatch.setattr(notification, "PAUSES", (0.0, 0.0))
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
    assert handler.bodies[-1] == {
        **vars(END),
        "text": "mine: failed: rank 3 failed: out of memory",
    }


def test_an_address_that_refuses_is_not_asked_again_and_not_shown(hook: tuple[str, type[Hook]]) -> None:
    address, handler = hook
    handler.statuses.append(404)
    (complaint,) = notify(END, None, address)
    assert "run.notify_webhook was not reached: HTTP Error 404" in complaint
    assert len(handler.bodies) == 1
    (complaint,) = notify(END, None, "http://127.0.0.1:1/aSecretPathOfTheHook")
    assert "was not reached" in complaint
    assert "aSecretPath" not in complaint


def test_an_address_that_is_none_fails_nothing_and_is_not_shown() -> None:
    assert notify(END, None, "http://127.0.0.1/aSecretPathOf TheHook") == [
        "run.notify_webhook was not reached: InvalidURL"
    ]
