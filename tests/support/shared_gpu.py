"""Starts ranks that share one GPU, each of which NCCL takes for a host of its own. On a CPU they are ranks of gloo."""

import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from ulysses_cli.run.key import KEY

SECONDS, AFTER_FAILURE = 240, 5


def run_sharing_ranks(script: Path, num_ranks: int, words: Sequence[str] = (), python: str = sys.executable) -> None:
    """Returns when all have ended well, and raises with what they have printed otherwise."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": "0"}
    here[KEY] = secrets.token_hex(16)
    # ranks of one GPU cannot reach each other's memory, and their sockets need no network
    here |= {"NCCL_P2P_DISABLE": "1", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as folder:  # a pipe that nobody reads would stop a rank that prints much
        files = [Path(folder) / f"rank-{rank}" for rank in range(num_ranks)]
        ranks = [
            subprocess.Popen(
                [python, str(script), *words],
                env={**os.environ, **here, "RANK": str(rank), "NCCL_HOSTID": f"rank-{rank}"},
                stdout=file.open("w", encoding="utf-8"),
                stderr=subprocess.STDOUT,
            )
            for rank, file in enumerate(files)
        ]
        try:
            has_ended = wait_for(ranks, time.monotonic() + SECONDS)
        finally:
            for rank in ranks:  # one that waits for others would hold the GPU
                rank.kill()
                rank.wait()
        if not has_ended or any(rank.returncode for rank in ranks):
            codes = [rank.returncode for rank in ranks]
            outputs = [file.read_text(encoding="utf-8", errors="replace") for file in files]
            raise AssertionError("\n".join([f"exit codes {codes}, -9 where this ended a rank", *outputs]))


def wait_for(ranks: Sequence[subprocess.Popen[bytes]], until: float) -> bool:
    """Waits until all have ended, or a while after one has failed: then others wait for it in a collective."""
    while None in (codes := [rank.poll() for rank in ranks]):
        if any(codes):
            until = min(until, time.monotonic() + AFTER_FAILURE)
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True
