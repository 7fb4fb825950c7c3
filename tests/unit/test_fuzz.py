"""Whatever a file holds, its reader takes it or refuses it in words: no other exception, no hang, no memory without
bound. A small sample always; many more bytes and structures in `make test-full`."""

from __future__ import annotations

import json
import os
import signal
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint, make_state, write_contents
from hypothesis import given, settings
from hypothesis import strategies as st

from ulysses_cli.plan.changes import list_changes
from ulysses_cli.train.archive import find_damage, find_newest_valid

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
    """An error where the code within takes too long or too much memory."""

    def stop(number: int, frame: Any) -> None:
        raise AssertionError(f"not done in {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MAX_BYTES
    finally:
        tracemalloc.stop()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@st.composite
def damage(draw: st.DrawFn, valid: bytes) -> bytes:
    """A valid file with a few bytes replaced, cut out or put in; or bytes of any kind."""
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
    """One value somewhere inside is another."""
    if isinstance(value, dict) and value and draw(st.integers(0, 4)):
        name = draw(st.sampled_from(sorted(value)))
        new = draw(st.sampled_from([name] * 9 + ["another"]))
        return {new if key == name else key: _replace(draw, one) if key == name else one for key, one in value.items()}
    if isinstance(value, list) and value and draw(st.integers(0, 4)):
        at = draw(st.integers(0, len(value) - 1))
        return [*value[:at], _replace(draw, value[at]), *value[at + 1 :]]
    return draw(VALUES)


def read_manifest(folder: Path, content: bytes) -> None:
    """A damaged newest checkpoint never keeps an older one from being found."""
    good, bad = (folder / "checkpoints" / name for name in ("step-3", "step-6"))
    if not good.exists():
        make_checkpoint(folder, 3), make_checkpoint(folder, 6)
    (bad / "manifest.json").write_bytes(content)
    said: list[str] = []
    found = find_newest_valid(folder, said.append)
    assert found == bad or (found == good and len(said) == 1 and said[0].startswith(f"{bad} is passed over: "))
    assert all(len(text) < len(str(bad)) + 300 for text in said)


def read_state(folder: Path, content: bytes) -> None:
    """Whoever wrote it gave it its right hash."""
    path = folder / "checkpoints" / "step-6"
    if not path.exists():
        make_checkpoint(folder, 6)
    contents = {file.name: file.read_bytes() for file in path.iterdir() if file.name != "manifest.json"}
    write_contents(path, contents | {"state.json": content})
    if not find_damage(path):
        list_changes(json.loads(content)["recipe"], make_state(3)["recipe"])


MANIFEST_TEXT = json.dumps(
    {"files": {name: {"bytes": 700, "sha256": "0" * 64} for name in ("rank-00000.safetensors", "state.json")}}
)
READERS: dict[str, tuple[bytes, Callable[[Path, bytes], None]]] = {
    "manifest": (MANIFEST_TEXT.encode(), read_manifest),
    "state": (json.dumps(make_state(6)).encode(), read_state),
}


def fuzz(name: str, folder: Path, num_examples: int) -> None:
    valid, read = READERS[name]

    @settings(max_examples=num_examples)
    @given(damage(valid))
    def look(content: bytes) -> None:
        with bounded():
            read(folder, content)

    read(folder, valid)
    look()


@pytest.mark.parametrize("name", READERS)
def test_a_sample_of_damage(tmp_path: Path, name: str) -> None:
    fuzz(name, tmp_path, 10)


@pytest.mark.full
@pytest.mark.parametrize("name", READERS)
def test_much_damage(tmp_path: Path, name: str) -> None:
    fuzz(name, tmp_path, int(os.environ.get("ULYSSES_FUZZ_EXAMPLES", "1500")))


def test_a_masked_setting_is_compared_in_linear_time() -> None:
    """A checkpoint may hold any number of masks."""
    old, new = {"run": {"seed": 0}, "model": {"a": "***x" * 400 + "***y"}}, "x" * 399 + "z" * 4000
    with bounded():
        assert list_changes(old, {"run": {"seed": 0}, "model": {"a": new}}) != []
    for text, is_same in (("ab", True), ("a-b", True), ("a", False), ("b", False), ("a--c", False)):
        found = list_changes({"run": {"seed": 0}, "model": {"a": "a***b"}}, {"run": {"seed": 0}, "model": {"a": text}})
        assert (found == []) is is_same, text
