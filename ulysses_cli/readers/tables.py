"""Reads Parquet and Arrow files as blocks.

Does not trust a file's metadata: batches are decoded in bounded memory and are small enough for Python lists.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ulysses_cli.readers.blocks import BLOCK_BYTES, Block
from ulysses_cli.readers.compressed_files import PACKED, open_file
from ulysses_cli.readers.expansion import Expansion

ROWS_PER_BLOCK = 1000
VALUE_BYTES = 8  # of any value in a Python list


def walk_parquet(file: Path) -> Iterator[Block]:
    from pyarrow import parquet

    def open_batches() -> Iterator[Any]:
        with parquet.ParquetFile(_open(file)) as opened:
            expansion.check(VALUE_BYTES * opened.metadata.num_rows)
            yield from opened.iter_batches(batch_size=ROWS_PER_BLOCK, use_threads=False)

    expansion = Expansion(file)
    yield from _walk_batches(expansion, open_batches)


def walk_arrow(file: Path) -> Iterator[Block]:
    import pyarrow

    def open_batches() -> Iterator[Any]:
        options = pyarrow.ipc.IpcReadOptions(use_threads=False)
        source = _open(file)
        try:
            opened = pyarrow.ipc.open_file(source, options=options)
            batches: Iterator[Any] = (opened.get_batch(index) for index in range(opened.num_record_batches))
        except pyarrow.ArrowInvalid:
            source.seek(0)
            batches = iter(pyarrow.ipc.open_stream(source, options=options))
        for batch in batches:
            # the offsets of texts come from the file: a wrong one would read memory outside of the batch
            batch.validate(full=True)
            yield batch

    yield from _walk_batches(Expansion(file), open_batches)


def _open(file: Path) -> Any:
    """Opens a file without a memory map: a map of a file that is truncated meanwhile would kill this process."""
    import pyarrow

    with open_file(file) as raw:
        if file.name.lower().endswith(PACKED):
            return io.BytesIO(raw.read())
    return pyarrow.OSFile(str(file))


def _walk_batches(expansion: Expansion, open_batches: Callable[[], Iterator[Any]]) -> Iterator[Block]:
    import pyarrow

    # Other pools reserve address space in advance, which limit_memory would count.
    pyarrow.set_memory_pool(pyarrow.system_memory_pool())
    batches, number = open_batches(), 1
    while True:
        with expansion.limit_memory():
            batch = next(batches, None)
            if batch is None:
                return
            size = measure(pyarrow.StructArray.from_arrays(batch.columns, fields=list(batch.schema)))
        expansion.add(size)
        rows = max(1, min(ROWS_PER_BLOCK, BLOCK_BYTES * batch.num_rows // max(1, size)))
        for first in range(0, batch.num_rows, rows):
            part = batch.slice(first, rows)
            table = pyarrow.Table.from_batches([part])
            yield Block(str(expansion.file), "table", table, part.nbytes, number + first)
        number += batch.num_rows


def measure(array: Any) -> int:
    """The bytes of an array's values as Python objects. A dictionary entry counts each time it is used."""
    import pyarrow
    from pyarrow import compute, types

    kind, value_bytes = array.type, VALUE_BYTES * len(array)
    if types.is_struct(kind):
        return value_bytes + sum(measure(part) for part in array.flatten())
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind) or types.is_map(kind):
        return value_bytes + measure(array.flatten())
    if types.is_dictionary(kind):
        whole = measure(array.dictionary)
        if not (types.is_string(kind.value_type) or types.is_large_string(kind.value_type)):
            return value_bytes + whole * len(array)
        lengths = compute.take(compute.binary_length(array.dictionary), array.indices)
        return value_bytes + int(compute.sum(lengths).as_py() or 0)
    if types.is_string_view(kind) or types.is_binary_view(kind):
        views = memoryview(array.buffers()[1]).cast("i")[::4][array.offset : array.offset + len(array)]
        return value_bytes + sum(max(0, length) for length in views)  # 16 bytes each, of which the first 4 are a length
    if types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind):
        return value_bytes + int(compute.sum(compute.binary_length(array)).as_py() or 0)
    if types.is_run_end_encoded(kind) or types.is_list_view(kind) or types.is_large_list_view(kind):
        raise pyarrow.ArrowNotImplementedError(f"columns of type {str(kind)[:40]} are not read")
    return value_bytes
