"""Starts servers of S3 and of Google Cloud Storage on loopback, for tests of remote disks."""

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec

IS_INSTALLED = all(find_spec(name) is not None for name in ("moto", "flask_cors", "s3fs"))
REASON = "moto's server and s3fs are not installed: pip install 'ulysses-cli[dev]'"
GOOGLE_IS_INSTALLED = find_spec("gcp_storage_emulator") is not None and find_spec("gcsfs") is not None
GOOGLE_REASON = "gcsfs and its server are not installed: pip install ulysses-cli[gs] gcp-storage-emulator"
BUCKET = "runs"
START_SECONDS = 60


@contextmanager
def serve_bucket() -> Iterator[Mapping[str, str]]:
    """Yields the environment in which s3://runs is an empty bucket."""

    def make_bucket(address: str) -> None:
        request = urllib.request.Request(f"{address}/{BUCKET}", method="PUT", headers={"Content-Length": "0"})
        urllib.request.urlopen(request, timeout=5).close()

    with _serve(["moto.server", "-H", "127.0.0.1", "-p"], make_bucket) as address:
        yield {
            "AWS_ENDPOINT_URL": address, "AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1", "NO_PROXY": "127.0.0.1",
        }  # fmt: skip


@contextmanager
def serve_google_bucket() -> Iterator[Mapping[str, str]]:
    """Yields the environment in which gs://runs is an empty bucket."""
    words = ["gcp_storage_emulator", "start", "--host=127.0.0.1", "--in-memory", f"--default-bucket={BUCKET}", "--port"]

    def ask(address: str) -> None:
        urllib.request.urlopen(f"{address}/storage/v1/b/{BUCKET}", timeout=5).close()

    with _serve(words, ask) as address:
        yield {
            "STORAGE_EMULATOR_HOST": address,
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # asks Google for the bucket's kind
            "NO_PROXY": "127.0.0.1",
        }


@contextmanager
def _serve(words: Sequence[str], begin: Callable[[str], None]) -> Iterator[str]:
    """Starts `python -m WORDS PORT`. Yields its address once `begin` succeeds there."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    server = subprocess.Popen(
        [sys.executable, "-m", *words, str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    try:
        end = time.monotonic() + START_SECONDS
        while True:
            try:
                begin(address)
                break
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                assert server.poll() is None, "the server ended"
                assert time.monotonic() < end, "the server does not answer"
                time.sleep(0.1)
        yield address
    finally:
        server.kill()
        server.wait()
