"""Tests that a reader takes any file content or refuses it with a message.

It raises no other exception, does not hang and uses bounded memory. A small sample always runs; many more bytes and
structures run in `make test-full`.
"""

import gzip
import io
import json
import os
import signal
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from support.checkpoints import make_checkpoint, make_state, write_contents
from support.recipes import LLAMA, VALID, load
from support.tiers import sample

from ulysses_cli.data.tokenizing.chat import find_spans
from ulysses_cli.data.tokenizing.encoder import Encoder
from ulysses_cli.data.tokenizing.tokenizer import load_tokenizer, make_bytes_tokenizer
from ulysses_cli.data.tokenizing.workers import encode_block
from ulysses_cli.hub import find_model_shape, find_tokenizer
from ulysses_cli.plan.models.model_files import find_weight_problem, read_metadata
from ulysses_cli.plan.problem import RecipeError
from ulysses_cli.plan.recipe.changes import list_changes
from ulysses_cli.readers.files import walk_blocks
from ulysses_cli.readers.problems import BadRow, DataError
from ulysses_cli.report.page.run_page import make_run_page
from ulysses_cli.report.run_summary import format_summary, load_run, summarize_run
from ulysses_cli.run.checkpoints import find_damage, find_newest_valid
from ulysses_cli.validate import validate_recipe

SECONDS, MAX_BYTES = 10, 200 << 20
NUMBERS = st.sampled_from([2e80992, 1e400, -1, 0, 1 << 70, float("nan"), -0.0, 1.5, True])
TEXTS = st.sampled_from(["a\0b", "../x", "\ud800", "\x1b[2J", "[" * 500, "9" * 5000])
ODD = st.one_of(NUMBERS, TEXTS, st.none(), st.text(max_size=8))
VALUES = st.recursive(
    ODD,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@contextmanager
def bounded() -> Iterator[None]:
    """Raises where the code within takes too long or too much memory. Its own CPU time counts, since a machine may be
    busy. A wait that takes no CPU time may take six times as long."""

    def stop(number: int, frame: Any) -> None:
        raise AssertionError(f"not done in {SECONDS} s")

    before = {number: signal.signal(number, stop) for number in (signal.SIGPROF, signal.SIGALRM)}
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.setitimer(signal.ITIMER_REAL, 6 * SECONDS)
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MAX_BYTES
    finally:
        tracemalloc.stop()
        for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(timer, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


@st.composite
def damage(draw: st.DrawFn, valid: bytes) -> bytes:
    """Returns a valid file with a few bytes replaced, cut out or inserted; or any bytes."""
    kind = draw(st.sampled_from(["bytes", "splice", "json", "deep"]))
    if kind == "bytes":
        return draw(st.binary(max_size=200))
    if kind == "deep":
        return draw(st.sampled_from([b"[", b'{"a":', b"- ", b"a: {", b"("])) * draw(st.sampled_from([100, 100_000]))
    if kind == "json":
        try:
            value = json.loads(valid)
        except ValueError:
            kind = "splice"
        else:
            return json.dumps(_replace(draw, value), allow_nan=True).encode("utf-8", "surrogatepass")
    at = draw(st.integers(0, len(valid)))
    return valid[:at] + draw(st.binary(max_size=12)) + valid[at + draw(st.integers(0, 20)) :]


def _replace(draw: st.DrawFn, value: Any) -> Any:
    """Replaces one value somewhere inside."""
    if isinstance(value, dict) and value and draw(st.integers(0, 4)):
        name = draw(st.sampled_from(sorted(value)))
        new = draw(st.sampled_from([name] * 9 + ["another"]))
        return {new if key == name else key: _replace(draw, one) if key == name else one for key, one in value.items()}
    if isinstance(value, list) and value and draw(st.integers(0, 4)):
        at = draw(st.integers(0, len(value) - 1))
        return [*value[:at], _replace(draw, value[at]), *value[at + 1 :]]
    return draw(VALUES)


def put(folder: Path, name: str, content: bytes) -> Path:
    (folder / name).write_bytes(content)
    return folder / name


def read_manifest(folder: Path, content: bytes) -> None:
    """Checks that a damaged newest checkpoint does not hide an older one."""
    good, bad = (folder / "checkpoints" / name for name in ("step-3", "step-6"))
    if not good.exists():
        make_checkpoint(folder, 3), make_checkpoint(folder, 6)
    put(bad, "manifest.json", content)
    messages: list[str] = []
    match = find_newest_valid(folder, messages.append)
    assert match == bad or (match == good and len(messages) == 1 and messages[0].startswith(f"{bad} is skipped: "))
    assert all(len(text) < len(str(bad)) + 300 for text in messages)


def read_state(folder: Path, content: bytes) -> None:
    """Reads a state whose manifest has its right hash."""
    path = folder / "checkpoints" / "step-6"
    if not path.exists():
        make_checkpoint(folder, 6)
    contents = {file.name: file.read_bytes() for file in path.iterdir() if file.name != "manifest.json"}
    write_contents(path, contents | {"state.json": content})
    if not find_damage(path):
        list_changes(json.loads(content)["recipe"], make_state(3)["recipe"])


def read_recipe(folder: Path, content: bytes) -> None:
    result = validate_recipe(str(put(folder, "r.yaml", content)))
    assert result.problems or result.resolved
    assert all(problem.message and problem.where.file for problem in result.problems)


def read_config(folder: Path, content: bytes) -> None:
    put(folder, "config.json", content)
    with suppress(RecipeError):
        find_model_shape(load(f"model.name_or_path={folder}").recipe)


def read_tokenizer_files(folder: Path, content: bytes) -> None:
    put(folder, "config.json", json.dumps(LLAMA).encode())
    put(folder, "tokenizer.json", content)
    recipe = load(f"model.name_or_path={folder}").recipe
    with suppress(RecipeError):
        find_tokenizer(recipe)
    with suppress(RecipeError):
        load_tokenizer(recipe.model)


def read_weights(folder: Path, content: bytes) -> None:
    file = put(folder, "model.safetensors", content)
    assert isinstance(find_weight_problem(folder), str)
    with suppress(ValueError):
        read_metadata(file)


def read_index(folder: Path, content: bytes) -> None:
    put(folder, "model.safetensors.index.json", content)
    assert isinstance(find_weight_problem(folder), str)


def read_metrics(folder: Path, content: bytes) -> None:
    put(folder, "metrics.jsonl", content * 3)
    put(folder, "run.json", content)
    run = load_run(folder)
    summary = summarize_run(run)
    assert format_summary(summary)
    assert make_run_page(run, summary)


def read_rows(folder: Path, content: bytes) -> None:
    file = put(folder, "d.jsonl", content)
    for kind in ("chat", "text", "completion", "tokens", "instruction"):
        for block in walk_blocks([file]):
            encode_block(ENCODER, kind, block)


def read_chat_answer(folder: Path, content: bytes) -> None:
    """Checks that for any output of a template, spans are located in it or it is refused."""
    text = content.decode("utf-8", "replace")
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "an answer"}]

    def render(turns: Any, *, prompt: bool = False, thinks: bool | None = None) -> str:
        shown = "".join(f"<{turn['role']}>{turn['content']}<end>" for turn in turns)
        return shown.replace("<end>", text, 1) + ("<assistant>" if prompt else text[:3])

    with suppress(BadRow):
        spans = find_spans(render, messages, render(messages), ["<end>"])
        assert all(0 <= start < stop <= len(render(messages)) for start, stop in spans.answers)


def read_any_rows(suffix: str) -> Callable[[Path, bytes], None]:
    def read(folder: Path, content: bytes) -> None:
        file = put(folder, f"d{suffix}", content)
        with suppress(DataError):
            for block in walk_blocks([file]):
                encode_block(ENCODER, "text", block)

    return read


def make_table(write: Callable[[Any, Any], object]) -> bytes:
    sink = io.BytesIO()
    write(pyarrow.table({"text": ["a", "b"]}), sink)
    return sink.getvalue()


def write_arrow(table: Any, sink: Any) -> None:
    with pyarrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


ENCODER = Encoder(make_bytes_tokenizer())
RECIPE_TEXT = VALID.replace("owner/texts", "./texts.jsonl")
HASHED = {"bytes": 700, "sha256": "0" * 64}
MANIFEST_TEXT = json.dumps({"format": 1, "files": dict.fromkeys(("rank-00000.safetensors", "state.json"), HASHED)})
HEADER = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "__metadata__": {"b": "c"}}).encode()
ROW: dict[str, Any] = {"text": "t", "prompt": "p", "completion": "c", "instruction": "i", "output": "o"}
ROW |= {"input_ids": [1], "labels": [-100]}
ROW["messages"] = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "tool_calls": []}]
STEP = {"step": 1, "loss": 1.0, "step_seconds": 0.5, "step_parts": {"mlp": 0.1}, "by_position": {"0-2K": {"loss": 1}}}
READERS: dict[str, tuple[bytes, Callable[[Path, bytes], None]]] = {
    "manifest": (MANIFEST_TEXT.encode(), read_manifest),
    "state": (json.dumps(make_state(6)).encode(), read_state),
    "recipe": (RECIPE_TEXT.encode(), read_recipe),
    "config.json": (json.dumps(LLAMA).encode(), read_config),
    "tokenizer.json": (make_bytes_tokenizer().backend_tokenizer.to_str().encode(), read_tokenizer_files),
    "safetensors": (len(HEADER).to_bytes(8, "little") + HEADER + bytes(8), read_weights),
    "index": (b'{"weight_map": {"a": "model.safetensors"}}', read_index),
    "metrics": (json.dumps(STEP).encode() + b"\n", read_metrics),
    "JSONL": (json.dumps(ROW).encode() + b"\n", read_rows),
    "JSON": (json.dumps([{"text": "a"}, {"text": "b"}]).encode(), read_any_rows(".json")),
    "CSV": (b'text,more\n"a",1\nb,2\n', read_any_rows(".csv")),
    "gzip": (gzip.compress(b'{"text": "a"}\n' * 9), read_any_rows(".jsonl.gz")),
    "Parquet": (make_table(lambda table, sink: parquet.write_table(table, sink)), read_any_rows(".parquet")),
    "Arrow": (make_table(write_arrow), read_any_rows(".arrow")),
    "chat template output": (b"<end>", read_chat_answer),
}
NUM_EXAMPLES = int(os.environ.get("ULYSSES_FUZZ_EXAMPLES", "1000"))
SLOWNESS = {"tokenizer.json": 5, "metrics": 5, "config.json": 2, "JSONL": 2}  # transformers takes a second
SAMPLED = ("manifest", "state", "recipe", "safetensors", "JSONL", "chat template output")  # these are cheap


def fuzz(name: str, folder: Path, num_examples: int) -> None:
    valid, read = READERS[name]

    @settings(max_examples=num_examples)
    @given(damage(valid))
    def look(content: bytes) -> None:
        with bounded():
            read(folder, content)

    read(folder, valid)
    look()


@pytest.mark.parametrize("name", sample(SAMPLED, quick=SAMPLED[:2]))
def test_a_sample_of_damage(tmp_path: Path, name: str) -> None:
    fuzz(name, tmp_path, 10)


@pytest.mark.full
@pytest.mark.parametrize("name", READERS)
def test_much_damage(tmp_path: Path, name: str) -> None:
    fuzz(name, tmp_path, NUM_EXAMPLES // SLOWNESS.get(name, 1))


def test_a_masked_setting_is_compared_in_linear_time() -> None:
    """A checkpoint may hold any number of masks."""
    old, new = {"run": {"seed": 0}, "model": {"a": "***x" * 400 + "***y"}}, "x" * 399 + "z" * 4000
    with bounded():
        assert list_changes(old, {"run": {"seed": 0}, "model": {"a": new}}) != []
    for text, is_same in (("ab", True), ("a-b", True), ("a", False), ("b", False), ("a--c", False)):
        result = list_changes({"run": {"seed": 0}, "model": {"a": "a***b"}}, {"run": {"seed": 0}, "model": {"a": text}})
        assert (result == []) is is_same, text
