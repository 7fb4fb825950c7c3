"""Opens files of unknown origin, writes files whole, locks them, expands patterns of names, and knows addresses of
disks that other machines hold. A file to read is a regular one of a bounded size, or an OSError says what it is
instead: opening a FIFO could wait without end. A file is written beside its place and renamed. Nothing here asks a
network."""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import shutil
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
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


def write_whole(file: Path, content: str | bytes) -> None:
    """Until the rename, readers see the old content. A process that dies leaves a hidden temporary file."""
    data = content.encode() if isinstance(content, str) else content
    _replace(file, lambda temporary: _write(temporary, data))


def copy_whole(source: Path, file: Path) -> None:
    """As write_whole, with another file's content."""
    _replace(file, lambda temporary: _copy(source, temporary))


def _write(file: Path, data: bytes) -> None:
    with open(file, "wb", opener=open_own) as stream:
        stream.write(data)


def _copy(source: Path, file: Path) -> None:
    with open_regular(source) as content, open(file, "wb", opener=open_own) as stream:
        shutil.copyfileobj(content, stream)


def _replace(file: Path, write: Callable[[Path], object]) -> None:
    temporary = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        write(temporary)
        os.replace(temporary, file)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


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


def expand_pattern(pattern: str) -> list[str]:
    """Everything that matches, sorted. `**` stands for any number of folders whose names begin with no dot."""
    parts = pattern.split(os.sep)
    if "**" not in parts:
        return sorted(glob.glob(pattern))
    at = parts.index("**")
    head, tail = os.sep.join(parts[:at]) or (os.sep if pattern.startswith(os.sep) else ""), parts[at + 1 :] or ["*"]
    paths: set[str] = set()
    for top in sorted(glob.glob(os.path.join(head, ""))) if head else [""]:
        for folder in _walk_folders(top):
            paths.update(expand_pattern(os.path.join(glob.escape(folder), *tail)))
    return sorted(paths)


def _walk_folders(top: str) -> Iterator[str]:
    """The folder itself, and all folders below it."""
    seen: set[tuple[int, int]] = set()
    waiting = [top]
    while waiting:
        folder = waiting.pop()
        try:
            status = os.stat(folder or os.curdir)
            entries = sorted(os.scandir(folder or os.curdir), key=lambda entry: entry.name)
        except OSError:
            continue  # not readable, or a link that leads nowhere
        if (status.st_dev, status.st_ino) in seen:
            continue
        seen.add((status.st_dev, status.st_ino))
        yield folder
        inside = [entry.name for entry in entries if not entry.name.startswith(".") and os.path.isdir(entry.path)]
        waiting += [os.path.join(folder, name) for name in reversed(inside)]


ROW_SUFFIXES = (".jsonl", ".json", ".parquet")
FACTS_FILES = ("dataset_infos.json", "dataset_dict.json")  # facts about a data set


def list_row_files(folder: Path, left_out: Collection[str] = ()) -> list[Path]:
    """Those below a folder, without files of the names that are left out."""
    names = {*FACTS_FILES, *left_out}
    return sorted(each for each in folder.rglob("*") if each.suffix in ROW_SUFFIXES and each.name not in names)


@dataclass(frozen=True)
class Scheme:
    """`package` opens addresses of this kind, and `extra` of this tool installs it; '' where nothing is needed.
    `writes_in_turn`: each write is a commit, and one that meets another is refused."""

    package: str
    extra: str
    credentials: str  # where that package reads them
    writes_in_turn: bool = False


SCHEMES = {
    "s3": Scheme(
        "s3fs", "s3", "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; AWS_ENDPOINT_URL elsewhere"
    ),
    "gs": Scheme("gcsfs", "gs", "GOOGLE_APPLICATION_CREDENTIALS"),
    "hf": Scheme("huggingface_hub", "", "HF_TOKEN", writes_in_turn=True),
    "file": Scheme("fsspec", "", ""),
}
ADDRESS_EXAMPLES = "s3://bucket/folder, gs://bucket/folder, hf://owner/model/folder or file:///folder"


ADDRESS_CACHE = "~/.cache/ulysses"  # what recipes name by an address is downloaded below it, once


def get_scheme(address: str) -> str:
    return address.partition("://")[0] if "://" in address else ""


def find_address_problem(address: str) -> tuple[str, str]:
    """Returns what is wrong with an address and what to write instead, or two empty texts."""
    name = get_scheme(address)
    if name not in SCHEMES:
        what = "is of a kind that is not supported" if name else "has no scheme, such as s3://"
        return what, f"write {ADDRESS_EXAMPLES}; s3 and gs need pip install ulysses-cli[s3] or ulysses-cli[gs]"
    rest = address.removeprefix(f"{name}://")
    host, _, path = rest.partition("/")
    if set("?#") & set(rest) or (name != "hf" and "@" in host):
        needs = f"it is read from the environment: {SCHEMES[name].credentials}" if SCHEMES[name].credentials else ""
        return "holds a key or other options, which recipes must not", needs or f"write {ADDRESS_EXAMPLES}"
    if name == "file":
        if host or not path.strip("/"):
            return "does not name a folder from the root on", "write file:///folder, with three slashes"
    elif not host:
        return "does not name a bucket", f"write {ADDRESS_EXAMPLES}"
    if ".." in path.split("/"):
        return "leads out of its folder with ..", "write the folder itself"
    return "", ""


def name_local_copy(address: str) -> str:
    """The path of the copy that is made of a model or of data. What is not the address of one stays as it is."""
    if "://" not in address or find_address_problem(address)[0] or set("*[]") & set(address):
        return address
    scheme, rest = get_scheme(address), address.partition("://")[2].rstrip("/")
    return rest if scheme == "file" else f"{ADDRESS_CACHE}/{scheme}/{rest}"


def find_address(path: str | None) -> str:
    """The address of which `path` is the copy, or ''."""
    scheme, _, rest = (path or "").removeprefix(f"{ADDRESS_CACHE}/").partition("/")
    return f"{scheme}://{rest}" if path and path.startswith(f"{ADDRESS_CACHE}/") and scheme in SCHEMES else ""
