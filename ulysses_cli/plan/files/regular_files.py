"""Opens files of unknown origin: a regular file of a bounded size, or an OSError that says what the path is instead.
Opens files of a run's folder, whose names are known, without following a link in their place, and removes folders.

Opening a FIFO could wait without end; a device may never end, and reading one may have side effects.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

CHUNK_BYTES = 1 << 20
KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}


def describe_special(path: str | Path) -> str:
    """What a path is if it is not a regular file, such as `a FIFO`; '' for a file or a missing path."""
    try:
        return KINDS.get(stat.S_IFMT(os.stat(path).st_mode), "")
    except (OSError, ValueError):
        return ""


def open_regular(path: str | Path) -> BinaryIO:
    """Opens for reading. Never waits, not even if a FIFO replaces the file between the check and the opening."""
    if special := describe_special(path):
        raise OSError(errno.EINVAL, f"it is {special}, not a file", str(path))
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:  # a NUL in the name
        raise OSError(errno.EINVAL, str(error), str(path)) from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is not a file", str(path))
    return os.fdopen(handle, "rb")


def open_own(path: str | Path, flags: int, mode: int = 0o666) -> int:
    """Opens a file that this tool writes, also as the opener of open(). A link in its place is refused: what it leads
    to is another's file, which would be cut or overwritten."""
    try:
        handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        what = "a link" if error.errno == errno.ELOOP else describe_special(path)
        raise OSError(errno.EINVAL, f"it is {what}, not a file", str(path)) if what else error from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is not a file", str(path))
    return handle


def write_own(path: str | Path, content: str) -> None:
    with open(path, "w", encoding="utf-8", opener=open_own) as stream:
        stream.write(content)


def remove_own(folder: Path) -> None:
    """Removes a folder with its content, as far as it can be removed. Of a link in its place only the link goes."""
    if folder.is_symlink():
        with suppress(OSError):
            folder.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=True)


def find_foreign_link(folder: Path) -> Path | None:
    """A link in the folder that neither this user nor root has made: others decide what it leads to."""
    links = (entry for entry in sorted(folder.iterdir()) if entry.is_symlink())
    return next((link for link in links if link.lstat().st_uid not in (0, os.geteuid())), None)


def read_regular(path: str | Path, max_bytes: int) -> bytes:
    """The whole content."""
    parts, num_bytes = list[bytes](), 0
    with open_regular(path) as stream:
        while part := stream.read(CHUNK_BYTES):  # read(n) takes n bytes of memory, however small the file is
            parts.append(part)
            num_bytes += len(part)
            if num_bytes > max_bytes:
                raise OSError(errno.EFBIG, f"it is larger than {max_bytes:,} bytes", str(path))
    return b"".join(parts)


def find_special(folder: Path) -> str:
    """Names the first entry of a folder that is neither a file nor a folder, with its kind; '' if there is none.
    Libraries that read the folder would wait for such an entry."""
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            special = "" if entry.is_dir() else describe_special(entry.path)
            if special:
                return f"{entry.path} is {special}, not a file"
    return ""
