"""Tests `columns` of a data set: the file's own names of columns, by the names that are expected.
How rows are read and refused: rows.txt."""

from pathlib import Path

from support.tokenizers_trained import train, wrap
from test_prepare import prepare, read_documents, write_rows

from ulysses_cli.data.tokenizing.encoder import Encoder
from ulysses_cli.readers.columns import read_sample

QA = [{"question": "2+2?", "answer": "four", "prompt": 7}, {"question": "3+3?", "answer": "six"}]
NAMED = "data.datasets.0.columns={prompt: question, completion: answer}"


def test_named_columns_are_read_as_if_the_file_had_these_names(tmp_path: Path) -> None:
    write_rows(tmp_path, *({"prompt": row["question"], "completion": row["answer"]} for row in QA))
    plain = prepare(tmp_path)
    write_rows(tmp_path, *QA)
    named = prepare(tmp_path, NAMED)
    assert read_documents(named) == read_documents(plain) == ["2+2?four<|end|>", "3+3?six<|end|>"]
    counts = [each.report["sources"][0] for each in (plain, named)]
    assert all(count["kind"] == "completion" for count in counts)
    assert counts[0]["num_targets"] == counts[1]["num_targets"] < counts[0]["num_tokens"]


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


def test_a_thought_has_the_name_that_the_template_reads() -> None:
    template = "{%- for m in messages %}{{- m.role + ':' + (m.thinking or '') + m.content }}{%- endfor %}"
    template += "{%- if add_generation_prompt %}{{- 'assistant:' }}{%- endif %}"
    encoder = Encoder(wrap(train("qwen"), chat_template=template))
    user = {"role": "user", "content": "q"}
    for name in ("reasoning_content", "reasoning", "thinking"):
        answer = {"role": "assistant", "content": "done", name: "hm "}
        ids, _ = encoder.encode(read_sample("chat", {"messages": [user, answer]}))
        assert encoder.tokenizer.decode(ids) == "user:qassistant:hm done</s>"
        assert not encoder.lost
