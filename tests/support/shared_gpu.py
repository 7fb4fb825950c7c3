"""Starts ranks that share one GPU, each of which NCCL takes for a host of its own. On a CPU they are ranks of gloo."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ulysses_cli.run_folder.seal import KEY

SECONDS = 240


def run_sharing_ranks(script: Path, num_ranks: int, words: Sequence[str] = ()) -> None:
    """Returns when all have ended well, and raises with what they have printed otherwise."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": "0"}
    here[KEY] = secrets.token_hex(16)
    # ranks of one GPU cannot reach each other's memory, and their sockets need no network
    here |= {"NCCL_P2P_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), *words],
            env={**os.environ, **here, "RANK": str(rank), "NCCL_HOSTID": f"rank-{rank}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        outputs = [rank.communicate(timeout=SECONDS)[0] for rank in ranks]
    finally:
        for rank in ranks:  # one that waits for others would hold the GPU
            rank.kill()
            rank.wait()
    if any(rank.returncode for rank in ranks):
        raise AssertionError("\n".join(outputs))
