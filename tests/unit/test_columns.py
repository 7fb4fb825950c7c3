"""Tests `columns` of a data set: the file's own names of columns, by the names that are expected.
How rows are read and refused: rows.txt."""

from pathlib import Path

from test_prepare import prepare, read_documents, write_rows


def test_other_names_make_other_tokens(tmp_path: Path) -> None:
    write_rows(tmp_path, *({"title": "a", "body": f"b{n}"} for n in range(3)))
    first = prepare(tmp_path, "data.datasets.0.columns={text: title}")
    second = prepare(tmp_path, "data.datasets.0.columns={text: body}")
    assert first.path != second.path
    assert read_documents(first)[0] == "a<|end|>"
    assert read_documents(second)[0] == "b0<|end|>"
    assert prepare(tmp_path, "data.datasets.0.columns={text: title}") == first


def test_nulls_of_a_table_reach_no_template_under_another_name(tmp_path: Path) -> None:
    from pyarrow import Table, parquet

    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "extra": {"x": 1}}]
    parquet.write_table(Table.from_pylist([{"dialog": turns}]), tmp_path / "d.parquet")
    words = (f"data.datasets.0.path={tmp_path / 'd.parquet'}", "data.datasets.0.columns={messages: dialog}")
    assert prepare(tmp_path, *words).report["sources"][0]["kind"] == "chat"
