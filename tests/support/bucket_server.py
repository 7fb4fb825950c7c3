"""Starts an S3 server on loopback, for tests of remote disks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec

IS_INSTALLED = find_spec("moto") is not None and find_spec("s3fs") is not None
REASON = "moto[server] and s3fs are not installed: pip install ulysses-cli[s3] 'moto[server]'"
BUCKET = "runs"
START_SECONDS = 60


@contextmanager
def serve_bucket() -> Iterator[Mapping[str, str]]:
    """Yields the environment in which s3://runs is an empty bucket."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    try:
        end = time.monotonic() + START_SECONDS
        while True:
            try:
                request = urllib.request.Request(f"{address}/{BUCKET}", method="PUT", headers={"Content-Length": "0"})
                urllib.request.urlopen(request, timeout=5).close()
                break
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                assert server.poll() is None, "the server ended"
                assert time.monotonic() < end, "the server does not answer"
                time.sleep(0.1)
        yield {
            "AWS_ENDPOINT_URL": address,
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "NO_PROXY": "127.0.0.1",
        }
    finally:
        server.kill()
        server.wait()
