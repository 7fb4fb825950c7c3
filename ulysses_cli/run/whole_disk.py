"""The file system of file:// addresses. Readers never see a half-written file, as a bucket has no half objects.
Imports fsspec, so it is imported only when such an address is used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from ulysses_cli.plan.files import copy_whole, write_whole


class WholeDisk(LocalFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Files are written beside their name and then renamed. Folders are made as they are needed."""

    cachable = False  # a cached instance would be one of LocalFileSystem's settings

    def put_file(self, path1: str, path2: str, callback: Any = None, **_: Any) -> None:
        target = Path(self._strip_protocol(path2))
        target.parent.mkdir(parents=True, exist_ok=True)
        copy_whole(Path(path1), target)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        target = Path(self._strip_protocol(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, value)
