"""Locks on files, which the system lets go when their holder ends. Some file systems have none: Lustre without its
flock option, and many mounted buckets."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from ulysses_cli.plan.files.regular_files import open_own

HINT_WHILE_LIVE = (
    "choose another run.output_dir, or wait for that run to end: then `ulysses train` with --resume auto continues it, "
    "with --overwrite replaces it"
)


def take_lock(handle: int, *, shares: bool = False, waits: bool = False) -> bool:
    """Returns False where the file system has no locks. Raises BlockingIOError where another process holds the file and
    this one does not wait for it."""
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if shares else fcntl.LOCK_EX) | (0 if waits else fcntl.LOCK_NB))
    except BlockingIOError:
        raise
    except (
        OSError
    ) as error:  # ENOSYS, EOPNOTSUPP, ENOLCK; mounted buckets and servers have given EINVAL, EIO, EACCES, too
        if error.errno == errno.EBADF:
            raise
        return False
    return True


def find_holder(file: Path) -> bool | None:
    """Whether a process holds the file; None where that cannot be known. Takes the lock for a moment."""
    try:
        handle = open_own(file, os.O_RDWR)  # over NFS an exclusive lock needs a file that is open for writing
    except OSError:
        return None
    try:
        return False if take_lock(handle) else None
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(handle)
