"""Reads hub data sets, and data sets saved by the datasets library, as blocks. Uses the library's cache if it can.

Next to the tokenizer, the only code in data/ that uses the network, by the library's rules (HF_HUB_OFFLINE, HF_TOKEN).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ulysses_cli.data.hub_access import explain_absence, find_obstacle
from ulysses_cli.data.sources.fingerprint import hash_parts
from ulysses_cli.plan.problem import Problem, RecipeError, Where
from ulysses_cli.plan.recipe.data_section import Dataset
from ulysses_cli.readers.blocks import Block, drop_nulls
from ulysses_cli.readers.problems import DataError

ROWS_PER_BLOCK = 200


@dataclass(frozen=True)
class HubSet:
    """A loaded split. `rows` is a datasets.Dataset or IterableDataset."""

    name: str
    rows: Any
    fingerprint: str
    num_bytes: int | None

    def walk_blocks(self) -> Iterator[Block]:
        try:
            yield from self._walk()
        except OSError as error:
            hint = "check the connection and the library's cache, and run again"
            raise DataError([Problem("", f"cannot be read: {error}", hint, Where(self.name))]) from None

    def _walk(self) -> Iterator[Block]:
        first = 1
        for columns in self.rows.iter(batch_size=ROWS_PER_BLOCK):
            names = list(columns)
            count = len(columns[names[0]]) if names else 0
            rows = [(first + at, drop_nulls({name: columns[name][at] for name in names})) for at in range(count)]
            yield Block(self.name, "rows", rows, self._share(count))
            first += count

    def _share(self, count: int) -> int:
        return self.num_bytes * count // max(1, len(self.rows)) if self.num_bytes else 0


def is_saved(path: Path) -> bool:
    """A folder that Dataset.save_to_disk or DatasetDict.save_to_disk wrote."""
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()


def load_hub_set(dataset: Dataset, key: str) -> HubSet:
    """Raises RecipeError when there is no such data set, configuration or split."""
    path = str(dataset.path)
    local = Path(os.path.expanduser(path))
    obstacle = "" if is_saved(local) else find_obstacle()
    import datasets

    name = f"{path}{f' ({dataset.name})' if dataset.name else ''} [{dataset.split}]"
    try:
        if is_saved(local):
            saved = datasets.load_from_disk(str(local))
            rows = saved[dataset.split] if isinstance(saved, dict) else saved
            return HubSet(name, rows, hash_parts("saved", rows._fingerprint, len(rows)), rows.data.nbytes)
        files = [os.path.expanduser(file) for file in dataset.data_files or ()] or None
        builder = datasets.load_dataset_builder(path, dataset.name, data_files=files)
        parts = (path, dataset.name, dataset.split, builder.hash, builder.config_id, files)
        if dataset.streaming:
            rows = datasets.load_dataset(path, dataset.name, data_files=files, split=dataset.split, streaming=True)
            return HubSet(name, rows, hash_parts("stream", *parts), None)
        rows = datasets.load_dataset(path, dataset.name, data_files=files, split=dataset.split)
        return HubSet(name, rows, hash_parts("hub", *parts, len(rows)), rows.data.nbytes)
    except Exception as error:  # noqa: BLE001 - the library raises many kinds; the user needs a place and a remedy
        raise RecipeError([_explain(error, dataset, key, obstacle)]) from None


def _explain(error: Exception, dataset: Dataset, key: str, obstacle: str) -> Problem:
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    kind = type(error).__name__
    if "split" in reason.lower() and isinstance(error, ValueError | KeyError):
        return Problem(f"{key}.split", f"{dataset.path} has no split {dataset.split}: {reason}", "name one that it has")
    if isinstance(error, KeyError):
        return Problem(f"{key}.split", f"{dataset.path} has no split {dataset.split}", "name one that it has")
    if isinstance(error, ValueError) and "config" in reason.lower():
        return Problem(f"{key}.name", reason, "write the configuration as data.datasets.N.name")
    if obstacle and isinstance(error, OSError):
        return explain_absence(f"{key}.path", str(dataset.path), obstacle, f"{dataset.path} --repo-type dataset")
    if kind == "DatasetNotFoundError" or isinstance(error, FileNotFoundError):
        hint = "check the name; a private or gated one needs HF_TOKEN; a local file or folder must exist"
        return Problem(f"{key}.path", reason, hint)
    if isinstance(error, ConnectionError):
        hint = "check the connection, or copy the files here"
        return Problem(f"{key}.path", f"the hub cannot be reached for {dataset.path}: {reason}", hint)
    return Problem(f"{key}.path", f"{dataset.path} cannot be loaded: {kind}: {reason}", "try again, or copy the files")
