"""Results of runs on sizes, by what they were made of. A command keeps those of a model in a file for the commands
after it. The file is not used after a change of anything that runs execute: this package's own files, versions of the
others, and each of their files that ran."""

from __future__ import annotations

import hashlib
import json
import os
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

if TYPE_CHECKING:
    from ulysses_cli.plan.ledger.job import Job
    from ulysses_cli.plan.models.shape import ModelShape

T = TypeVar("T")


class Kept(Generic[T]):
    """The last values that were made, in memory."""

    def __init__(self, most: int) -> None:
        self.most, self.values = most, OrderedDict[Hashable, T]()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        if key not in self.values:
            self.values[key] = make()
            while len(self.values) > self.most:
                self.values.popitem(last=False)
        self.values.move_to_end(key)
        return self.values[key]


class KeptOnDisk(Generic[T]):
    """The same, and in a file of the model. `pack` makes plain lists and tables of a value, as JSON has them."""

    def __init__(self, name: str, most: int, pack: Callable[[T], Any], unpack: Callable[[Any], T]) -> None:
        self.name, self.pack, self.unpack, self.memory = name, pack, unpack, Kept[T](most)

    def get(self, of: Job | ModelShape, others: Hashable, make: Callable[[], T]) -> T:
        return self.memory.get((of, others), lambda: self._read_or_make(of, others, make))

    def _read_or_make(self, of: Job | ModelShape, others: Hashable, make: Callable[[], T]) -> T:
        if (file := find_file(of)) is None:
            return make()
        key = hash_text(f"{self.name} {describe(of)} {others!r}")
        if key in file.values:
            with suppress(TypeError, ValueError, KeyError, AttributeError):  # another program wrote it
                return self.unpack(file.values[key])
        value = make()
        file.add(key, self.pack(value))
        return value


def describe(of: Job | ModelShape) -> str:
    """All that a result may depend on."""
    if not hasattr(of, "levers"):
        return hash_shape(of)
    parts = {field.name: getattr(of, field.name) for field in fields(of)}
    shapes = [hash_shape(shape) for shape in (parts.pop("shape"), parts.pop("model")) if shape is not None]
    return f"{shapes} {parts}"


@lru_cache(maxsize=64)
def hash_shape(shape: Any) -> str:
    return hash_text(f"{shape!r} {json.dumps(dict(shape.config), sort_keys=True, default=repr)}")


def hash_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


DEPENDS_ON = ("torch", "transformers", "deepspeed", "peft", "bitsandbytes")
ROOMS = ("train", "prove", "plan")


@cache
def hash_code() -> str:
    """Of the code that runs execute, of this package and by the versions of others."""
    digest = hashlib.sha256()
    for package in DEPENDS_ON:
        try:
            digest.update(f"{package} {version(package)}".encode())
        except PackageNotFoundError:
            digest.update(package.encode())
    root = Path(__file__).parents[2]
    for room in ROOMS:
        for file in sorted((root / room).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:32]


MOST_FILES, MOST_VALUES = 64, 4096


class KeptFile:
    """Of one model. It is written when the command ends, with what others have written meanwhile."""

    def __init__(self, path: Path) -> None:
        self.path, self.added = path, dict[str, Any]()
        self.values = self.read()[1]

    def read(self) -> tuple[set[str], dict[str, Any]]:
        """The files that were executed, and what they gave. Nothing, where it is damaged, or one has changed since."""
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            content = json.loads(self.path.read_text(encoding="utf-8"))
            if all(list_facts(name) == facts for name, facts in content["executed"].items()):
                return set(content["executed"]), dict(content["values"])
        return set(), {}

    def add(self, key: str, value: Any) -> None:
        self.values[key] = self.added[key] = value

    def write(self) -> None:
        """Without a file the next command only takes longer."""
        from ulysses_cli.plan.sizes.sources import EXECUTED

        executed, values = self.read()
        values = dict([*{**values, **self.added}.items()][-MOST_VALUES:])
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            content = {"executed": {name: list_facts(name) for name in sorted(executed | EXECUTED)}, "values": values}
            part = self.path.with_suffix(f".{os.getpid()}.part")
            part.write_text(json.dumps(content), encoding="utf-8")
            part.replace(self.path)
            files = sorted(self.path.parent.glob("*.json"), key=lambda file: file.stat().st_mtime)
            for file in files[:-MOST_FILES]:
                file.unlink()


def list_facts(file: str) -> list[int]:
    facts = os.stat(file)
    return [facts.st_size, facts.st_mtime_ns]


class Disk:
    folder: ClassVar[Path | None] = None  # None: nothing is kept there
    files: ClassVar[dict[Path, KeptFile]] = {}


@contextmanager
def keep_on_disk(folder: Path) -> Iterator[None]:
    """Commands after this one have what is made inside. Nothing is kept where a user has no home folder."""
    Disk.folder = folder if folder.is_absolute() else None
    try:
        yield
    finally:
        files, Disk.folder, Disk.files = Disk.files, None, {}
        for file in files.values():
            if file.added:
                file.write()


def find_file(of: Any) -> KeptFile | None:
    """Of the whole model of a job."""
    if Disk.folder is None:
        return None
    shape = getattr(of, "model", None) or getattr(of, "shape", None) or of
    path = Disk.folder / f"{hash_text(hash_code() + hash_shape(shape))}.json"
    if path not in Disk.files:
        Disk.files[path] = KeptFile(path)
    return Disk.files[path]
