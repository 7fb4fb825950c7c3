"""Tests files that never end, never begin or are cut while they are read: each is one problem with its place."""

import glob
import json
import os
from contextlib import chdir
from pathlib import Path

import pytest
from support.recipes import load
from support.refusals import explain
from syrupy.assertion import SnapshotAssertion

from ulysses_cli.data.sources import open_source
from ulysses_cli.data.transaction import FileHashes
from ulysses_cli.hub import find_model_shape
from ulysses_cli.plan.files import expand_pattern
from ulysses_cli.plan.models.model_files import find_weight_problem
from ulysses_cli.plan.rules.files import check_datasets
from ulysses_cli.readers.files import list_files, walk_blocks
from ulysses_cli.readers.problems import DataError

pytestmark = pytest.mark.usefixtures("alarm")


def make_tree(folder: Path) -> None:
    (folder / "a" / "b").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    for name in ("x.jsonl", "a/y.jsonl", "a/b/z.jsonl", ".hidden/no.jsonl", "a/b/other.bin"):
        (folder / name).write_text("{}")


def test_patterns_match_as_in_a_shell(tmp_path: Path) -> None:
    make_tree(tmp_path)
    patterns = ["**/*.jsonl", "**", "a/**", "*/**/*.jsonl", "**/b/*", "a/*", "**/a/**/z.jsonl", "*.jsonl", "no/**/x"]
    for pattern in patterns:
        expected = {os.path.normpath(values) for values in glob.glob(str(tmp_path / pattern), recursive=True)}
        values = {os.path.normpath(values) for values in expand_pattern(str(tmp_path / pattern))}
        assert values - {str(tmp_path), str(tmp_path / "a")} == expected - {str(tmp_path), str(tmp_path / "a")}, pattern
    with chdir(tmp_path):
        assert expand_pattern("**/*.jsonl") == sorted(glob.glob("**/*.jsonl", recursive=True))


def test_links_that_lead_in_circles(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """Two links to a folder above make 2^40 paths."""
    make_tree(tmp_path)
    for name in ("one", "two", "a/three"):
        (tmp_path / name).symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    names = {Path(name).name for name in expand_pattern(str(tmp_path / "**" / "*.jsonl"))}
    assert names == {"x.jsonl", "y.jsonl", "z.jsonl"}
    assert {file.name for file in list_files(str(tmp_path), ["**/*.jsonl"]).files} == names
    recipe = load(f"data.datasets=[{{path: {tmp_path}, data_files: ['**/*.nothing']}}]").recipe
    assert str(next(iter(check_datasets(recipe)))) == snapshot


def test_special_files_are_named_and_not_opened(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    model = tmp_path / "model"
    model.mkdir()
    config, weights = model / "config.json", model / "model.safetensors"
    recipe = load(f"model.name_or_path={model}").recipe
    os.mkfifo(config)
    said = [explain(find_model_shape, recipe)]
    config.unlink()
    config.symlink_to("/dev/zero")
    said.append(explain(find_model_shape, recipe))
    os.mkfifo(weights)
    said.append(find_weight_problem(model))
    weights.unlink()
    os.mkfifo(model / "model.safetensors.index.json")
    said.append(find_weight_problem(model))
    os.mkfifo(tmp_path / "d.jsonl")
    (tmp_path / "e.jsonl").write_text('{"text": "a"}\n')
    hashes = FileHashes(tmp_path / "hashes.json")
    for name in ("d.jsonl", "/dev/zero"):
        dataset = load(f"data.datasets=[{{path: {tmp_path / name}}}]").recipe.data.datasets[0]
        said.append(explain(open_source, dataset, "data.datasets.0", 0, hashes))
    assert said == snapshot
    dataset = load(f"data.datasets=[{{path: {tmp_path}, data_files: ['*.jsonl']}}]").recipe.data.datasets[0]
    source = open_source(dataset, "data.datasets.0", 0, hashes)
    assert source.facts["left_out"] == {"special file": {"count": 1, "example": str(tmp_path / "d.jsonl")}}


@pytest.mark.parametrize("is_stream", [True, False])
def test_an_arrow_file_that_is_truncated_while_it_is_read(tmp_path: Path, is_stream: bool) -> None:
    """Mapped into memory, it would end this process with SIGBUS."""
    import pyarrow

    file = tmp_path / "d.arrow"
    table = pyarrow.table({"text": ["x" * 1000] * 20_000})
    opener = pyarrow.ipc.new_stream if is_stream else pyarrow.ipc.new_file
    with opener(str(file), table.schema) as writer:
        writer.write_table(table, max_chunksize=1000)
    hashes = FileHashes(tmp_path / "hashes.json")
    hashes.hash_file(file)
    blocks = walk_blocks([file])
    assert next(blocks).num_bytes
    os.truncate(file, 4096)
    assert hashes.find_changed() == str(file)  # prepare reports it too
    if is_stream:  # a file that ends between two parts is complete by its format
        assert not any("x" in str(block.content) for block in blocks)
        return
    with pytest.raises(DataError) as caught:
        list(blocks)
    assert str(caught.value.problems[0].where) == str(file)


HEADERS = {
    "nested": b"[" * 100_000,
    "infinite offset": b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 2e80992]}}',
    "one offset": b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0]}}',
    "kind": b'{"a": {"dtype": 1, "shape": [2], "data_offsets": [0, 8]}}',
    "negative shape": b'{"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}',
    "metadata": json.dumps({"__metadata__": 3}).encode(),
}


def test_a_header_that_makes_no_sense(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    said = {}
    for name, header in HEADERS.items():
        (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
        said[name] = find_weight_problem(tmp_path)
    assert said == snapshot
