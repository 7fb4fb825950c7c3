"""Tests the page that is served while a run goes on: its content, who may read it, and that a real browser refreshes
it."""

import json
import shutil
import socket
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.commands import run
from support.run_directory import write_run
from syrupy.assertion import SnapshotAssertion

from ulysses_cli.report import run_summary
from ulysses_cli.report.page import live_page
from ulysses_cli.report.page.live_page import LivePage
from ulysses_cli.report.page.run_page import make_run_page

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next((path for name in NAMES if (path := shutil.which(name))), None)


class Served:
    """A page in a thread, which counts how often it was made."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.times, self.changed = folder, 0, threading.Condition()
        self.page = LivePage(self.make, refresh_seconds=1)
        self.thread = threading.Thread(target=self.page.serve, daemon=True)
        self.thread.start()

    def make(self) -> str:
        with self.changed:
            self.times += 1
            self.changed.notify_all()
        try:
            loaded = run_summary.load_run(self.folder)
        except run_summary.RecipeError as error:
            raise ValueError(str(error)) from None
        return make_run_page(loaded, run_summary.summarize_run(loaded))

    def wait_for(self, times: int, seconds: float) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: self.times >= times, seconds)


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    served = Served(tmp_path / "mine")
    yield served
    served.page.stop()
    served.thread.join()


def get(address: str, **headers: str) -> tuple[int, str, str | None]:
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=20) as answer:
            return answer.status, answer.read().decode(), answer.headers["Refresh"]
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), error.headers["Refresh"]


def test_each_request_gets_the_run_as_it_is_now(served: Served, snapshot: SnapshotAssertion) -> None:
    status, text, refresh = get(served.page.address)
    assert (status, refresh, text) == (503, "1", snapshot)  # the run has not begun
    write_run(served.folder)
    status, page, refresh = get(served.page.address)
    assert (status, refresh) == (200, "1")
    last = json.loads((served.folder / "metrics.jsonl").read_text().splitlines()[-1])
    with open(served.folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({**last, "step": 987_654}) + "\n")
    assert "987,654" not in page
    assert "987,654" in get(served.page.address)[1].replace("987654", "987,654")


def test_only_this_machine_reads_the_page(served: Served, snapshot: SnapshotAssertion) -> None:
    write_run(served.folder)
    assert served.page.server.server_address[0] == "127.0.0.1"
    address, port = served.page.address, served.page.server.server_address[1]
    other_hosts = "elsewhere.example:80 localhost.example 127.0.0.1.example localhost:80:80 x@localhost"
    for host in (*other_hosts.split(), ""):
        assert get(address, Host=host)[0] == 403, host
    root = f"http://127.0.0.1:{port}/"
    for path in ("", "index.html", "run.json", address.rpartition("/")[2][:-1], "x" * 22, "%00", "fc"):
        status, text, _ = get(root + path)
        assert (status, text) == (403, snapshot(name="of another path")), path
    assert served.times == 0
    for host in ("LOCALHOST", "LocalHost:8000", "127.0.0.1", "localhost"):
        assert get(address, Host=host)[0] == 200, host
    assert get(f"{address}/?x=1")[0] == 200


def test_two_pages_have_different_tokens() -> None:
    pages = [LivePage(lambda: "") for _ in range(2)]
    assert pages[0].token != pages[1].token
    assert min(len(page.token) for page in pages) >= 22
    for page in pages:
        page.server.server_close()


def test_connections_are_bounded_and_do_not_last(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_page, "ASK_SECONDS", 0.5)
    write_run(served.folder)
    served.page.server.socket.listen(60)  # where more wait than it takes at once, the kernel has them try again later
    threads = threading.active_count()
    idle = [socket.create_connection(served.page.server.server_address[:2], 10) for _ in range(60)]
    try:
        assert all(_is_closed(each) for each in idle[live_page.MAX_CONNECTIONS + 4 :])
        assert threading.active_count() <= threads + 2 * live_page.MAX_CONNECTIONS  # each has a thread and a timer
        assert all(_is_closed(each) for each in idle)  # when their time is over the others, too
        assert get(served.page.address)[0] == 200
    finally:
        for each in idle:
            each.close()


def _is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.check
@pytest.mark.skipif(BROWSER is None, reason="no chromium: apt-get install chromium")
def test_a_browser_shows_the_page_and_refreshes_it(served: Served, tmp_path: Path) -> None:
    write_run(served.folder)
    flags = [
        "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]  # fmt: skip
    browser = subprocess.Popen(
        [str(BROWSER), *flags, "--remote-debugging-port=0", served.page.address],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert served.wait_for(3, 90), f"{served.times} requests"
    finally:
        browser.kill()
        browser.wait()


def test_ports_that_cannot_be_used_are_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    write_run(tmp_path)
    page = LivePage(lambda: "")
    port = str(page.server.server_address[1])
    shown = run("report", str(tmp_path), "--live", "--port", port)
    page.server.server_close()
    assert (shown.returncode, shown.stderr.replace(port, "PORT")) == (2, snapshot)
    monkeypatch.setattr(live_page, "LivePage", refuse)
    shown = run("report", str(tmp_path), "--live", "--port", "80")
    assert (shown.returncode, shown.stderr) == (2, snapshot)
