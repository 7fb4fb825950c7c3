"""Locks on files, which the system lets go when their holder ends. Some file systems have none: Lustre without its
flock option, and many mounted buckets."""

from __future__ import annotations

import errno
import fcntl

WITHOUT_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


def take_lock(handle: int, *, shares: bool = False, waits: bool = False) -> bool:
    """Returns False where the file system has no locks. Raises BlockingIOError where another process holds the file and
    this one does not wait for it."""
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if shares else fcntl.LOCK_EX) | (0 if waits else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise
        return False
    return True
