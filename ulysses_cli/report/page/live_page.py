"""Serves a page on this machine's loopback interface, made anew for each request; browsers ask again by themselves.

Every user of the machine reaches that interface. Only who knows the token in the page's address gets the page.
"""

from __future__ import annotations

import hmac
import re
import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ADDRESS = "127.0.0.1"
HOST = re.compile(r"(?:127\.0\.0\.1|localhost)(?::[0-9]{1,5})?", re.I)
REFRESH_SECONDS = 5
MAX_CONNECTIONS = 16
ASK_SECONDS = 10  # from a connection to the end of its request
TOKEN_BYTES = 16


class LivePage:
    """`make` returns the page, or raises ValueError with what to show instead. Port 0 takes a free one. Requests for
    another host name are refused: a page elsewhere must not read this one through a name that it moved here."""

    def __init__(self, make: Callable[[], str], port: int = 0, refresh_seconds: int = REFRESH_SECONDS) -> None:
        self.token = secrets.token_hex(TOKEN_BYTES)
        own = {"make": staticmethod(make), "refresh_seconds": refresh_seconds, "token": self.token}
        self.server = _BoundedServer((ADDRESS, port), type("PageHandler", (_Handler,), own))

    @property
    def address(self) -> str:
        return f"http://{ADDRESS}:{self.server.server_address[1]}/{self.token}"

    def serve(self) -> None:
        """Returns when another thread calls stop, or at Ctrl-C."""
        try:
            self.server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            pass
        finally:
            self.server.server_close()

    def stop(self) -> None:
        self.server.shutdown()


class _BoundedServer(ThreadingHTTPServer):
    """Each connection has a thread; one that finds no place is closed at once."""

    daemon_threads = True

    def __init__(self, *arguments: Any) -> None:
        self.places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self.places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.places.release()

    def handle_error(self, *_: Any) -> None:
        """A browser that goes away is no error."""


class _Handler(BaseHTTPRequestHandler):
    make: Callable[[], str]
    refresh_seconds: int
    token: str
    timeout = 60  # of one read or write

    def log_message(self, *_: Any) -> None:
        pass

    def setup(self) -> None:
        super().setup()
        self.limit = threading.Timer(ASK_SECONDS, self._cut)
        self.limit.daemon = True
        self.limit.start()

    def finish(self) -> None:
        self.limit.cancel()
        super().finish()

    def _cut(self) -> None:
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def do_GET(self) -> None:
        self.limit.cancel()
        given = self.path.partition("?")[0].strip("/")
        if not HOST.fullmatch(self.headers.get("Host") or ""):
            self._answer(403, "this page is served to this machine only")
        elif not hmac.compare_digest(given.encode(), self.token.encode()):
            self._answer(403, "open the whole address that ulysses report --live has printed: it ends with a token")
        else:
            try:
                self._answer(200, self.make())
            except ValueError as error:
                self._answer(503, str(error))

    do_HEAD = do_GET

    def _answer(self, status: int, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"text/{'html' if status == 200 else 'plain'}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        if status in (200, 503):
            self.send_header("Refresh", str(self.refresh_seconds))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)
