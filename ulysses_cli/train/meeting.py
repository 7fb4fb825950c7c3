"""Where ranks meet. On one machine: a file in a folder that is the user's alone, so that nothing listens and nobody
else can write what ranks read. On several: the store of rank 0 at the master's address, in a network that is trusted.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

FOLDER = "ULYSSES_MEETING"


def list_store_options() -> dict[str, Any]:
    """For torch's init_process_group: the ranks' own store, or nothing where the environment names an address."""
    file = _name_file("ranks")
    if file is None:
        return {}
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return {"store": dist.FileStore(file, world_size), "rank": rank, "world_size": world_size}


def connect(timeout: timedelta) -> dist.Store | None:
    """A connection of its own, beside the ranks'. None: there is no launcher."""
    file = _name_file("words")
    if file is not None:
        store = dist.FileStore(file, -1)
        store.set_timeout(timeout)
        return store
    try:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    except (KeyError, ValueError, RuntimeError):
        return None


def _name_file(name: str) -> str | None:
    """Ranks that are started again do not meet at what the dead have left."""
    folder = os.environ.get(FOLDER)
    return str(Path(folder) / f"{name}-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}") if folder else None
