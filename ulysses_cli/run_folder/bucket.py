"""Reads and writes objects below a remote address (s3, gs, hf, file) through fsspec's own packages, several at a time,
with retries.

A call that fails is tried again; a missing object is not. No object is renamed, since buckets cannot do that.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from ulysses_cli.plan.files.addresses import SCHEMES, get_scheme
from ulysses_cli.plan.secrets import collect_secrets, mask_text

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


def _open_files(address: str) -> tuple[Any, str]:
    """Returns fsspec's file system of an address, and the address as that file system names it."""
    if get_scheme(address) == "file":
        from ulysses_cli.run_folder.whole_disk import WholeDisk

        return WholeDisk(), WholeDisk._strip_protocol(address)
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
