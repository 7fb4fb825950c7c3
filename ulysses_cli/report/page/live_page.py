"""Serves a page on this machine's loopback interface, made anew for each request; browsers ask again by themselves."""

from __future__ import annotations

from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ADDRESS = "127.0.0.1"
REFRESH_SECONDS = 5


class LivePage:
    """`make` returns the page, or raises ValueError with what to show instead. Port 0 takes a free one. Requests for
    another host name are refused: a page elsewhere must not read this one through a name that it moved here."""

    def __init__(self, make: Callable[[], str], port: int = 0, refresh_seconds: int = REFRESH_SECONDS) -> None:
        handler = type("PageHandler", (_Handler,), {"make": staticmethod(make), "refresh_seconds": refresh_seconds})
        self.server = ThreadingHTTPServer((ADDRESS, port), handler)
        self.server.daemon_threads = True

    @property
    def address(self) -> str:
        return f"http://{ADDRESS}:{self.server.server_address[1]}/"

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


class _Handler(BaseHTTPRequestHandler):
    make: Callable[[], str]
    refresh_seconds: int

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        host = (self.headers.get("Host") or "").rpartition(":")[0]
        if host not in (ADDRESS, "localhost"):
            self._answer(403, "this page is served to this machine only")
        elif self.path.partition("?")[0] not in ("/", "/index.html"):
            self._answer(404, "there is one page: /")
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
        if status in (200, 503):
            self.send_header("Refresh", str(self.refresh_seconds))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)
