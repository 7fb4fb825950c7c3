"""Tests sources of every kind: the same rows from every format, folders as git reads them, and files that cannot be
read. How rows are read and refused: rows.txt."""

import gzip
import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet
from support.refusals import explain
from syrupy.assertion import SnapshotAssertion

from ulysses_cli.data.sources import HubSet, Source, open_source, walk_tree
from ulysses_cli.data.transaction import FileHashes
from ulysses_cli.plan.recipe.sections import Dataset
from ulysses_cli.readers.blocks import Block, count_blank, walk_rows
from ulysses_cli.readers.columns import read_sample
from ulysses_cli.readers.problems import BadRow, DataError

ROWS = [{"text": f"row {number}\nä"} for number in range(5)]


def open_one(tmp_path: Path, path: object, **settings: Any) -> Source:
    settings.setdefault("data_files", None)
    hashes = FileHashes(tmp_path / "hashes.json")
    return open_source(Dataset(path=str(path), **settings), "data.datasets.0", 0, hashes)


def read_all(source: Source) -> list[tuple[int, Any]]:
    results = [pair for block in source.walk_blocks() for pair in walk_rows(block)]
    return [(line, str(row) if isinstance(row, BadRow) else row) for line, row in results]


def encode_rows() -> dict[str, bytes]:
    """The rows by a file's ending."""
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()
    quoted = "text\n" + "".join(f'"{row["text"]}"\n' for row in ROWS)
    table = pyarrow.Table.from_pylist(ROWS)
    streams = {name: pyarrow.BufferOutputStream() for name in ("parquet", "arrow", "stream.arrow")}
    parquet.write_table(table, streams["parquet"], row_group_size=2)
    for name, open_writer in (("arrow", pyarrow.ipc.new_file), ("stream.arrow", pyarrow.ipc.new_stream)):
        with open_writer(streams[name], table.schema) as writer:
            writer.write_table(table)
    return {
        "jsonl": lines,
        "crlf.jsonl": lines.replace(b"\n", b"\r\n"),
        "bom.jsonl": b"\xef\xbb\xbf" + lines,
        "jsonl.gz": gzip.compress(lines),
        "jsonl.zst": pyarrow.compress(lines, "zstd", asbytes=True),
        "json": json.dumps(ROWS, indent=1).encode(),
        "lines.json": lines,
        "csv": quoted.encode(),
        "tsv": quoted.encode(),
        **{name: stream.getvalue().to_pybytes() for name, stream in streams.items()},
    }


@pytest.mark.parametrize(("kind", "content"), encode_rows().items(), ids=encode_rows())
def test_every_format_holds_the_same_rows(kind: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / f"rows.{kind}").write_bytes(content)
    source = open_one(tmp_path, tmp_path / f"rows.{kind}")
    assert [row for _, row in read_all(source)] == ROWS
    assert source.find_kind() == "text"


def test_files_patterns_and_folders(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "c/d.txt", ".hidden.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert [row["text"] for _, row in read_all(open_one(tmp_path, tmp_path))] == ["a.txt", "b.txt", "c/d.txt"]
    assert [row["text"] for _, row in read_all(open_one(tmp_path, tmp_path / "*.txt"))] == ["a.txt", "b.txt"]
    picked = open_one(tmp_path, tmp_path, data_files=("c/*.txt", "a.txt"))
    assert [row["text"] for _, row in read_all(picked)] == ["c/d.txt", "a.txt"]


def test_a_folder_without_data_or_without_text_says_why(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    (tmp_path / "a").mkdir()
    without_data = explain(open_one, tmp_path, tmp_path / "a")
    (tmp_path / "a" / "b.bin").write_bytes(b"\0")
    assert [without_data, explain(open_one, tmp_path, tmp_path / "a", type="folder")] == snapshot


def test_a_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a"}\n')
    first = open_one(tmp_path, file).fingerprint
    os.utime(file, (1, 1))
    assert open_one(tmp_path, file).fingerprint == first
    stat = file.stat()
    file.write_text('{"text": "b"}\n')
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # same size and time: only the content differs
    assert open_one(tmp_path, file).fingerprint != first


def test_hashes_are_cached_until_a_file_changes(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("old")
    cache = tmp_path / "hashes.json"
    hashes = FileHashes(cache)
    first = hashes.hash_file(file)
    hashes.save()
    assert not cache.exists()  # too recent to be trusted
    assert hashes.find_changed() is None
    stat = file.stat()
    facts = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev]
    cache.write_text(json.dumps({str(file): [facts, "remembered"]}))
    assert FileHashes(cache).hash_file(file) == "remembered"
    file.write_text("new")
    assert FileHashes(cache).hash_file(file) not in ("remembered", first)
    assert hashes.find_changed() == str(file)


@pytest.mark.parametrize(
    "content", ["[]", "null", '{"FILE": 5}', '{"FILE": []}', '{"FILE": ["a", 1]}', "{", "[" * 99999]
)
def test_a_damaged_cache_of_hashes_is_ignored(content: str, tmp_path: Path) -> None:
    file, cache = tmp_path / "a.jsonl", tmp_path / "hashes.json"
    file.write_text("a")
    expected = FileHashes(cache).hash_file(file)
    cache.write_text(content.replace("FILE", str(file)))
    assert FileHashes(cache).hash_file(file) == expected


def test_hashes_that_cannot_be_cached_are_computed(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("a")
    os.utime(tmp_path / "a.jsonl", (1, 1))
    (tmp_path / "file").write_text("")
    hashes = FileHashes(tmp_path / "file" / "hashes.json")
    hashes.hash_file(tmp_path / "a.jsonl")
    hashes._is_changed = True  # whatever the clock shows
    hashes.save()


def make_tree(root: Path) -> None:
    files = {
        ".gitignore": "*.log\n!keep.log\n/build/\ndocs/*.md\n!docs/README.md\n# no\n\\#odd\n**/deep/*.tmp\n",
        "a.py": "a = 1\n",
        "B.py": "b = 2",
        "x.log": "x",
        "keep.log": "kept",
        "build/out.py": "o",
        "sub/build/in.py": "i",
        "docs/a.md": "a",
        "docs/README.md": "r",
        "#odd": "o",
        "sub/.gitignore": "!x.log\n*.py\n!/build\n",
        "sub/x.log": "sx",
        "sub/y.py": "y",
        "sub/deep/z.tmp": "z",
        "ümlaut dir/ß.txt": "u",
        "empty/__init__.py": "",
    }
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    (root / "binary.dat").write_bytes(b"a\0b")
    (root / "loop").symlink_to(root)
    (root / "link.py").symlink_to(root / "a.py")
    os.mkfifo(root / "pipe")


def ask_git(folder: Path) -> set[str]:
    command = ["git", "-c", "core.quotePath=false", "-c", "core.excludesFile=/dev/null"]
    listed = subprocess.run(
        [*command, "ls-files", "-oz", "--exclude-standard"], cwd=folder, capture_output=True, check=True
    )
    return set(filter(None, listed.stdout.decode().split("\0")))


def test_a_folder_gives_the_files_that_git_would_add(tmp_path: Path) -> None:
    root = tmp_path / "repository"
    make_tree(root)
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    odd = {"binary.dat", "loop", "link.py", "empty/__init__.py"}
    tree = walk_tree(root)
    assert set(tree.files) == ask_git(root) - odd
    assert tree.files == sorted(tree.files, key=lambda path: [part.encode() for part in path.split("/")])
    counts = {"link": 2, "binary file": 1, "empty file": 1, "special file": 1}
    assert {why: tree.left_out[why] for why in counts} == counts
    whole = read_all(open_one(tmp_path, root, type="folder"))
    assert len(whole) == 1
    text = whole[0][1]["text"]
    assert [line[4:-4] for line in text.split("\n") if line.startswith("=== ")] == tree.files
    assert "=== B.py ===\nb = 2\n=== " in text
    single = read_all(open_one(tmp_path, root, type="folder", join_files=False))
    assert [row["text"].split(" ===")[0][4:] for _, row in single] == tree.files


NAMES = ["a", "b", "build", "foo.py", "x.log", "[z]", "!k", "#h", "te st"]
PATTERNS = ["build/", "!build/", "*.log", "!x.log", "/a", "!a", "!a/", "a/b", "a/**", "**/foo.py", "!foo.py", "*.py"]
PATTERNS += [
    "b/*", "!b/foo.py", "\\[z\\]", "\\!k", "\\#h", "#c", "te st ", "*", "!*/", "/*", "**/b/", "!**/b/", "a/**/b",
    "b/**", "!a/b",
]  # fmt: skip


@pytest.mark.check
def test_random_folders_give_the_files_that_git_would_add(tmp_path: Path) -> None:
    rng = random.Random(3)
    for number in range(60):
        top = tmp_path / str(number)
        folders = [top]
        for folder in folders:
            folder.mkdir()
            if rng.random() < 0.6:
                (folder / ".gitignore").write_text("\n".join(rng.sample(PATTERNS, rng.randint(1, 4))) + "\n")
            for name in rng.sample(NAMES, rng.randint(2, 5)):
                if rng.random() < 0.45 and len(folder.relative_to(top).parts) < 3:
                    folders.append(folder / name)
                else:
                    (folder / name).write_text("x")
        subprocess.run(["git", "init", "-q", str(top)], check=True)
        with open(top / ".git" / "info" / "exclude", "a") as exclude:
            exclude.write(rng.choice(PATTERNS) + "\n")
        taken = ask_git(top)
        assert set(walk_tree(top).files) == taken
        inside = {path.partition("/")[0] for path in taken if "/" in path}
        for name in inside:  # the rules of the outer repository apply to a folder inside it
            below = {path.removeprefix(f"{name}/") for path in taken if path.startswith(f"{name}/")}
            assert set(walk_tree(top / name).files) == below


def turn(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def test_numbers_and_nesting_without_end_are_refused() -> None:
    for line in (b"[" * 100_000, b'{"n": ' + b"9" * 5000 + b"}"):
        ((_, bad),) = walk_rows(Block("f", "lines", [line], 0, 7))
        assert "malformed JSON" in str(bad)


def test_a_file_of_another_format_is_named(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    texts = []
    for name in ("a.parquet", "a.arrow", "a.jsonl.gz", "a.jsonl.zst"):
        (tmp_path / name).write_bytes(b"PAR1 no")
        text = explain(read_all, open_one(tmp_path, tmp_path / name), error=DataError)
        texts.append(text.split(": ")[:2])  # without a library's words
    assert texts == snapshot


def test_mappings_of_a_table_equal_those_of_json_lines(tmp_path: Path) -> None:
    """Arrow fills mappings to the union of their keys; nulls that a template would show are removed again."""
    call = [{"type": "function", "function": {"name": name, "arguments": {name: 1}}} for name in "fg"]
    tool = [
        {"type": "function", "function": {"name": name, "parameters": {"properties": {name: {"type": "integer"}}}}}
        for name in "fg"
    ]
    rows = [
        {"messages": [turn("user", "a"), {**turn("assistant", ""), "tool_calls": [call[at]]}], "tools": tool}
        for at in range(2)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table, lines = (
        [read_sample("chat", row) for _, row in read_all(open_one(tmp_path, tmp_path / name))]
        for name in ("a.parquet", "a.jsonl")
    )
    assert table == lines
    import datasets

    result = HubSet("a", datasets.Dataset.from_list(rows), "", None)
    hub = [read_sample("chat", row) for block in result.walk_blocks() for _, row in walk_rows(block)]  # type: ignore[arg-type]
    assert hub == lines


def test_bad_rows_of_csv_and_json_can_be_skipped(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """So that on_bad_row: skip leaves out only them. A blank row is none, and is counted."""
    found = {}
    for name, content in (
        ("a.csv", b'text,id\n"a\nb",1\nc\nd,2,3\n'),
        ("a.tsv", b'text\nhello\n\n"a"b\nc\xff\nworld\n'),
        ("a.json", '[{"text": "ä"},\n{"text":\n"'.encode() + b'\xff"},\n{"text": "b"}]'),
    ):
        (tmp_path / name).write_bytes(content)
        source = open_one(tmp_path, tmp_path / name)
        found[name] = (read_all(source), sum(count_blank(block) for block in source.walk_blocks()))
    assert found == snapshot


def test_rows_and_files_not_read_are_counted(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    for name in ("a.jsonl", "b.jsonl", "c.txt", "d.rst"):
        (tmp_path / name).write_text('{"text": "a"}\n')
    source = open_one(tmp_path, tmp_path)
    twice = open_one(tmp_path, tmp_path, data_files=("*.jsonl", "a.jsonl", "./b.jsonl"))
    assert len(read_all(source)) == len(read_all(twice)) == source.facts["num_files"] == 2
    assert [each.facts["left_out"] for each in (source, twice)] == snapshot
