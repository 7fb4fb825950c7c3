"""The store through which ranks connect. On one machine: a file in a folder that is the user's alone, so that nothing
listens and no other user can write what ranks read. On several: rank 0's store, which listens at its machine's address
alone.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

FOLDER = "ULYSSES_MEETING"
BACKLOG = 2048  # ranks that connect at once


def join_ranks(device: torch.device, timeout: timedelta) -> None:
    """Collective over all ranks: initializes torch's process group of the world."""
    on_gpu = device.type == "cuda"
    bound_device = device if on_gpu else None  # NCCL then need not guess it at its first collective
    store = list_store_options(timeout)
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timeout, device_id=bound_device, **store)


def list_store_options(timeout: timedelta) -> dict[str, Any]:
    """Arguments of torch's init_process_group for the ranks' own store. Empty where no agent has set the rank."""
    if "MASTER_ADDR" not in os.environ:
        return {}
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return {"store": _open_store(rank, world_size, timeout), "rank": rank, "world_size": world_size}


def _open_store(rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    if (file := _name_file("ranks")) is not None:
        return open_file_store(file, world_size)
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank == 0:
        return listen(host, port, timeout)
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


def open_file_store(file: str, world_size: int = -1) -> dist.Store:
    """Raises FileNotFoundError where the folder is gone: its owner has ended. torch itself would wait five minutes for
    the file and hold the interpreter's lock meanwhile, so that no thread of this rank could end it. The store opens the
    file again at each access, hence by a handle, which stays open as long as the process: it survives the folder."""
    handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    return dist.FileStore(f"/proc/self/fd/{handle}", world_size)


def connect(timeout: timedelta) -> dist.Store | None:
    """A new connection, separate from the process group's. None where there is no agent, or no longer one."""
    try:
        if (file := _name_file("words")) is not None:
            store = open_file_store(file)
            store.set_timeout(timeout)
            return store
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    except (KeyError, ValueError, RuntimeError, FileNotFoundError):
        return None


def listen(address: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """A store at one address; a socket of torch's own would listen on every interface. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, port), family=family, backlog=BACKLOG) as server:
        port, handle = server.getsockname()[1], os.dup(server.fileno())  # the store closes it
    options: dict[str, Any] = {"is_master": True, "wait_for_workers": False, "timeout": timeout}
    return dist.TCPStore(address, port, master_listen_fd=handle, **options)


def _name_file(name: str) -> str | None:
    """Each restart has files of its own: ranks do not read what earlier ones have left."""
    folder = os.environ.get(FOLDER)
    return str(Path(folder) / f"{name}-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}") if folder else None
