"""Reads and writes objects below a remote address (s3, gs, hf, file) through fsspec's own packages, several at a
time, with retries, and says how far the bytes have come.

A call that fails is tried again; a missing object is not. No object is renamed, since buckets cannot do that."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from ulysses_cli.plan.files import SCHEMES, copy_whole, get_scheme, write_whole
from ulysses_cli.plan.secrets import collect_secrets, mask_text
from ulysses_cli.plan.units import BINARY_SUFFIXES, pick_scale

REPORT_SECONDS = 10.0


def format_transfer(num_bytes: int, total_bytes: int, seconds: float) -> str:
    """`1.20 of 8.00 GiB, 105 MiB/s, 66 s left`. The rate is that of all `seconds` so far."""
    scale, prefix = pick_scale(total_bytes, BINARY_SUFFIXES)
    decimals = 2 if prefix else 0
    text = f"{num_bytes / scale:.{decimals}f} of {total_bytes / scale:.{decimals}f} {prefix}B"
    if not num_bytes or seconds <= 0:
        return text
    rate = num_bytes / seconds
    scale, prefix = pick_scale(rate, BINARY_SUFFIXES)
    left = f", {(total_bytes - num_bytes) / rate:.0f} s left" if num_bytes < total_bytes else ""
    return f"{text}, {rate / scale:.3g} {prefix}B/s{left}"


@contextmanager
def watch_download(address: str, place: Path, total_bytes: int, say: Callable[[str], object]) -> Iterator[None]:
    """Says every few seconds how many bytes a file, or the files below a folder, have by now: that is known of every
    kind of remote disk."""
    is_over, began = threading.Event(), time.monotonic()

    def report() -> None:
        while not is_over.wait(REPORT_SECONDS):
            say(f"{address}: {format_transfer(count_bytes(place), total_bytes, time.monotonic() - began)}")

    thread = threading.Thread(target=report, name="bytes that have come", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def count_bytes(place: Path) -> int:
    files = place.rglob("*") if place.is_dir() else [place]
    return sum(_measure(file) for file in files)


def _measure(file: Path) -> int:
    try:
        return file.stat().st_size if file.is_file() else 0
    except OSError:
        return 0  # it was renamed or deleted just now


PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0)  # seconds before each further attempt
NUM_STREAMS = 4  # objects in transit at a time
MISSING = "EntryNotFound"  # in a header of the Hugging Face hub's answers
FINAL_ERRORS = (FileNotFoundError, PermissionError)
_T = TypeVar("_T")


class BucketError(RuntimeError):
    """A remote disk did not do what was asked, however often."""


class Bucket:
    """The objects below one address. `pauses` are the seconds before each further attempt."""

    def __init__(self, address: str, pauses: tuple[float, ...] = PAUSES) -> None:
        self.address, self.pauses = address.rstrip("/"), pauses
        with _told(self.address):
            self.files, root = _open_files(self.address)
        self.root = str(root).rstrip("/")
        self.num_writers = 1 if SCHEMES[get_scheme(self.address)].writes_in_turn else NUM_STREAMS

    def locate(self, name: str) -> str:
        return f"{self.root}/{name}" if name else self.root

    def put_file(self, file: Path, name: str, callback: Any = None) -> None:
        """Uploads a file. Its size is compared afterwards."""
        options = {"callback": callback} if callback is not None else {}

        def put() -> None:
            self.files.put_file(str(file), self.locate(name), **options)
            self.files.invalidate_cache()
            if (size := self.files.size(self.locate(name))) != (expected := file.stat().st_size):
                raise OSError(f"{name} has {size:,} bytes there instead of {expected:,}")

        self._try(put)

    def put_bytes(self, content: bytes, name: str) -> None:
        self._try(lambda: self.files.pipe_file(self.locate(name), content))

    def read(self, name: str) -> bytes:
        """Raises FileNotFoundError where there is no such object."""
        return bytes(self._try(lambda: self.files.cat_file(self.locate(name))))

    def get_file(self, name: str, file: Path) -> None:
        """Raises FileNotFoundError where there is no such object."""
        self._try(lambda: self.files.get_file(self.locate(name), str(file)))

    def list_names(self, folder: str) -> list[str]:
        """Names of all objects below a folder, as other methods take them."""
        return sorted(self.list_sizes(folder))

    def list_sizes(self, folder: str) -> dict[str, int]:
        """Bytes of all objects below a folder, by name."""

        def find() -> dict[str, int]:
            self.files.invalidate_cache()
            try:
                found = self.files.find(self.locate(folder), detail=True)
            except FileNotFoundError:
                return {}
            return {str(path): int(facts.get("size") or 0) for path, facts in found.items()}

        return {path[path.index(self.root) + len(self.root) + 1 :]: size for path, size in self._try(find).items()}

    def get_size(self, name: str) -> int:
        return int(self._try(lambda: self.files.size(self.locate(name))) or 0)

    def delete(self, name: str) -> None:
        """A missing object counts as deleted."""
        try:
            self._try(lambda: self.files.rm_file(self.locate(name)))
        except FileNotFoundError:
            pass

    def is_object(self) -> bool:
        """Whether the address is that of one object, which the methods then take as ''."""
        return bool(self._try(lambda: self.files.isfile(self.root)))

    def is_there(self, name: str) -> bool:
        return name in self.list_names(name.rpartition("/")[0])

    def _try(self, call: Callable[[], _T]) -> _T:
        for pause in (*self.pauses, None):
            try:
                with _told(self.address):
                    return call()
            except BucketError as error:
                if pause is None or isinstance(error.__cause__, FINAL_ERRORS):
                    raise
            time.sleep(pause)
        raise AssertionError("the last attempt returns or raises")


def _make_whole_disk() -> Any:
    """The file system of file:// addresses. Readers never see a half-written file, as a bucket has no half objects."""
    from fsspec.implementations.local import LocalFileSystem

    class WholeDisk(LocalFileSystem):  # type: ignore[misc]  # fsspec has no types
        """Files are written beside their name and then renamed. Folders are made as they are needed."""

        cachable = False  # a cached instance would be one of LocalFileSystem's settings

        def put_file(self, path1: str, path2: str, callback: Any = None, **_: Any) -> None:
            copy_whole(Path(path1), self._find(path2))

        def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
            write_whole(self._find(path), value)

        def _find(self, path: str) -> Path:
            target = Path(self._strip_protocol(path))
            target.parent.mkdir(parents=True, exist_ok=True)
            return target

    return WholeDisk()


def _open_files(address: str) -> tuple[Any, str]:
    """Returns fsspec's file system of an address, and the address as that file system names it."""
    if get_scheme(address) == "file":
        disk = _make_whole_disk()
        return disk, disk._strip_protocol(address)
    import fsspec

    files, root = fsspec.core.url_to_fs(address)
    return files, str(root)


@contextmanager
def _told(address: str) -> Iterator[None]:
    """Every package has exceptions of its own. They become one, in words and without secrets."""
    try:
        yield
    except (FileNotFoundError, BucketError):
        raise
    except Exception as error:
        if getattr(getattr(error, "response", None), "headers", {}).get("X-Error-Code") == MISSING:
            raise FileNotFoundError(address) from error
        text = (str(error).strip().splitlines() or [""])[0][:300]
        message = f"{address}: {type(error).__name__}: {text}" if text else f"{address}: {type(error).__name__}"
        raise BucketError(mask_text(message, collect_secrets({}, os.environ))) from error


def each(call: Callable[[_T], object], values: list[_T], num_streams: int = NUM_STREAMS) -> None:
    """Calls for every value, some at a time. The first error is raised when none is in progress any more."""
    with ThreadPoolExecutor(num_streams) as pool:
        for future in [pool.submit(call, value) for value in values]:
            future.result()
