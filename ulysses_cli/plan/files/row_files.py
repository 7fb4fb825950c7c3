"""The files of a benchmark's folder that hold its rows."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

ROWS = (".jsonl", ".json", ".parquet")
NO_ROWS = ("dataset_infos.json", "dataset_dict.json")  # facts about a data set


def list_row_files(folder: Path, left_out: Collection[str] = ()) -> list[Path]:
    """Those below a folder, without files of the names that are left out."""
    names = {*NO_ROWS, *left_out}
    return sorted(each for each in folder.rglob("*") if each.suffix in ROWS and each.name not in names)
