"""Tests files that are small and expand to much: bounded memory, one problem with the file's name."""

import gzip
import resource
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from support.refusals import explain
from syrupy.assertion import SnapshotAssertion

from ulysses_cli.readers import blocks
from ulysses_cli.readers.blocks import walk_rows
from ulysses_cli.readers.files import measure, walk_blocks
from ulysses_cli.readers.problems import DataError

SMALL = 1 << 20


def write_arrow(file: Path, table: Any, compression: str | None = None) -> None:
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_file(file, table.schema, options=options) as writer:
        writer.write_table(table)


def name_often(num_rows: int, num_letters: int) -> Any:
    """Makes one text to which many rows refer."""
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(num_rows, np.int32)), pa.array(["x" * num_letters]))


def write_dictionary(file: Path) -> None:
    table = pa.table({"text": name_often(5000, 5000)})
    if file.suffix == ".parquet":
        parquet.write_table(table, file)
    else:
        write_arrow(file, table)


def write_list(file: Path) -> None:
    values = pa.ListArray.from_arrays(pa.array([0, 10 * SMALL], pa.int32()), pa.array(np.zeros(10 * SMALL, np.int8)))
    parquet.write_table(pa.table({"input_ids": values}), file)


def write_nulls(file: Path) -> None:
    parquet.write_table(pa.table({"text": pa.nulls(SMALL, pa.string())}), file)


def write_page(file: Path) -> None:
    parquet.write_table(pa.table({"text": ["x" * 10 * SMALL]}), file, compression="zstd", write_statistics=False)


def write_false_header(file: Path) -> None:
    """Makes a buffer whose header announces a tebibyte."""
    write_arrow(file, pa.table({"text": ["a b c d" * 1000]}), "zstd")
    content, header = file.read_bytes(), struct.pack("<q", 7000)
    assert header + b"\x28\xb5" in content
    file.write_bytes(content.replace(header + b"\x28\xb5", struct.pack("<q", 1 << 40) + b"\x28\xb5"))


def write_views(file: Path) -> None:
    """Makes views of one text, each of it all."""
    views = np.tile(np.array([5000, int.from_bytes(b"xxxx", "little"), 0, 0], np.int32), 5000)
    buffers = [None, pa.py_buffer(views.tobytes()), pa.py_buffer(b"x" * 5000)]
    write_arrow(file, pa.table({"text": pa.Array.from_buffers(pa.string_view(), 5000, buffers)}))


def write_packed(file: Path) -> None:
    content = b'{"text": "' + b" " * (8 << 20) + b'"}\n'
    file.write_bytes(pa.compress(content, "zstd", asbytes=True) if file.suffix == ".zst" else gzip.compress(content))


KINDS = ("jsonl.gz", "json.gz", "csv.gz", "txt.gz", "parquet.gz", "arrow.gz", "jsonl.zst")
BOMBS: dict[str, Callable[[Path], None]] = {
    "dictionary.parquet": write_dictionary, "dictionary.arrow": write_dictionary, "list.parquet": write_list,
    "nulls.parquet": write_nulls, "page.parquet": write_page, "lie.arrow": write_false_header,
    "views.arrow": write_views, **{f"d.{kind}": write_packed for kind in KINDS},
}  # fmt: skip
NUM_ROWS = {"list.parquet": 1, "page.parquet": 1, "nulls.parquet": SMALL, "d.jsonl.gz": 1, "d.jsonl.zst": 1}
NUM_ROWS |= dict.fromkeys(("dictionary.parquet", "dictionary.arrow", "views.arrow"), 5000)


def test_a_file_that_expands_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_AS)
    for name, write in BOMBS.items():
        file = tmp_path / name
        write(file)
        monkeypatch.setattr(blocks, "FREE_BYTES", SMALL)
        said = explain(lambda file: list(walk_blocks([file])), file, error=DataError)
        is_lie = name == "lie.arrow"  # its header promises more than it holds: reading it fails for want of memory
        limit = f" {max(SMALL, 200 * file.stat().st_size) / 2**20:,.0f} MiB"
        assert said.replace(name, "FILE").replace(limit, " LIMIT") == snapshot(name="lie" if is_lie else "others")
        assert resource.getrlimit(resource.RLIMIT_AS) == limits
        monkeypatch.setattr(blocks, "FREE_BYTES", 1 << 30)
        if name in NUM_ROWS:
            assert sum(len(block.content) for block in walk_blocks([file])) == NUM_ROWS[name]


def test_rows_of_a_table_arrive_as_they_are(tmp_path: Path) -> None:
    texts = [f"text {at} " * (at % 50) or None for at in range(3000)]
    table = pa.table({"text": texts, "turns": [[{"role": "user", "content": str(at)}] for at in range(3000)]})
    parquet.write_table(table, tmp_path / "d.parquet")
    write_arrow(tmp_path / "d.arrow", table, "lz4")
    for name in ("d.parquet", "d.arrow"):
        results = [row for block in walk_blocks([tmp_path / name]) for row in walk_rows(block)]
        assert results == list(enumerate(table.to_pylist(), 1))


def test_values_are_measured_as_python_holds_them() -> None:
    words = ["ab", None, "abcd"]
    for kind in (pa.string(), pa.large_string(), pa.string_view()):
        assert measure(pa.array(words, kind)) == 3 * 8 + 6
        assert measure(pa.array(words, kind).slice(1)) == 2 * 8 + 4
    assert measure(pa.array(words).dictionary_encode()) == 3 * 8 + 6
    assert measure(pa.array([[1, 2], None, [3]])) == 3 * 8 + 3 * 8
    assert measure(pa.array([{"a": "xy", "b": 1}, None])) == 2 * 8 + (2 * 8 + 2) + 2 * 8
    assert measure(pa.nulls(7)) == 56
    with pytest.raises(pa.ArrowNotImplementedError, match="run_end_encoded"):
        measure(pa.RunEndEncodedArray.from_arrays(pa.array([3], pa.int32()), pa.array(["x"])))
