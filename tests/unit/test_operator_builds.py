"""Tests where operators are built, that builds are waited for with a word, and that those of dead builders are taken
over."""

import os
import queue
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from ulysses_cli.run import host
from ulysses_cli.run.host import (
    BuildTimes,
    BuildWatch,
    find_write_problem,
    get_builds_folder,
    read_cpu_kind,
    watch_builds,
)
from ulysses_cli.run.launcher import make_environment


@contextmanager
def elsewhere(name: str, value: object) -> Iterator[None]:
    """Another CPU, or another place of the packages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, name, lambda *_: value)
        host._name_environment.cache_clear()
        yield
    host._name_environment.cache_clear()


def test_the_folder_is_of_one_environment_and_kind_of_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = get_builds_folder({"XDG_CACHE_HOME": "/c"})
    assert folder.parent == Path("/c/ulysses/operators")
    assert get_builds_folder({"XDG_CACHE_HOME": "/c", "TORCH_EXTENSIONS_DIR": "/t"}) == Path("/t") / folder.name
    assert get_builds_folder({"TORCH_EXTENSIONS_DIR": f"/t/{folder.name}"}) == Path("/t") / folder.name
    assert len({get_builds_folder({}, has_gpu=has_gpu) for has_gpu in (False, True, None)}) == 2
    monkeypatch.setenv("HOME", "/me")
    assert get_builds_folder({}) == Path("/me/.cache/ulysses/operators") / folder.name
    for name, other in (("read_cpu_kind", ("an older CPU",)), ("_find_place", "/another/environment/torch")):
        with elsewhere(name, other):
            assert get_builds_folder({}).name != folder.name


def test_an_image_has_one_folder_for_all_cpus_with_avx2() -> None:
    flags, names = "abm avx avx2 bmi1 bmi2 f16c fma movbe xsave", []
    for cpu in (f"{flags} avx512f", f"{flags} sha_ni", "sse avx"):
        with elsewhere("read_cpu_kind", ("a maker", cpu)):
            names.append([get_builds_folder({key: "1"}).name for key in ("ULYSSES_PORTABLE_OPERATORS", "OTHER")])
    (first, first_own), (second, second_own), (old, old_own) = names
    assert first == second
    assert first.endswith("-x86-64-v3")
    assert len({first, first_own, second_own, old_own}) == 4
    assert old == old_own, "it cannot run what is built for the others"


def test_a_cpu_is_known_by_its_instructions(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    text = "processor\t: {}\nvendor_id\t: X\nflags\t\t: {}\ncpu MHz\t: {}\n\nprocessor : 1\nflags : other\n"
    file.write_text(text.format(0, "sse avx", "2000.1"))
    first = read_cpu_kind(file)
    file.write_text(text.format(0, "avx sse", "3111.9"))
    assert read_cpu_kind(file) == first
    file.write_text(text.format(0, "sse avx avx512f", "2000.1"))
    assert read_cpu_kind(file) != first


def make_locks(environ: dict[str, str], *names: str) -> list[Path]:
    locks = [get_builds_folder(environ) / name / "lock" for name in names]
    for lock in locks:
        lock.parent.mkdir(parents=True)
        lock.touch()
    return locks


def test_dead_locks_are_removed_and_live_ones_are_reported(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    environ = {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    old, new, held, early = locks = make_locks(environ, "old", "new", "held", "early")
    for lock, when in ((old, 0), (held, 0), (early, 1 << 40)):  # the clock jumped forwards, or back
        os.utime(lock, (when, when))
    said: list[str] = []
    watch = BuildWatch(environ, said.append)
    with open(held, "rb"):  # by the process that builds
        watch.look(0.0)
        assert [lock for lock in locks if lock.exists()] == [new, held]
        assert said == snapshot(name="dead")
        assert held.stat().st_mtime > 1000.0, "no sign was given of a builder here"
        said.clear()
        watch.look(9.0)
        assert not said
        watch.look(11.0)
        watch.look(12.0)
    assert said == snapshot(name="alive")


def test_a_builder_elsewhere_gives_signs(tmp_path: Path) -> None:
    """Its open files are not visible here. A lock without a new sign for 30 s is removed."""
    environ = {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    alive, dead = make_locks(environ, "alive", "dead")
    watch = BuildWatch(environ, lambda _: None)
    start = alive.stat().st_mtime
    for now in range(0, 29, 2):
        os.utime(alive, (start + now, start + now))
        watch.look(float(now))
    assert alive.exists()
    assert dead.exists()
    watch.look(31.0)
    assert alive.exists()
    assert not dead.exists()


def test_builds_are_settled_before_a_block_and_watched_while_it_runs(
    tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    said: queue.Queue[str] = queue.Queue()
    environ = {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    (dead,) = make_locks(environ, "cpu_adam")
    with watch_builds(environ, said.put, BuildTimes(look=0.01, sign=0.2, first_word=0.0)):
        assert not dead.exists(), "the block's ranks would wait for it"
        begun, *_, gone = [said.get() for _ in range(said.qsize())]
        dead.touch()
        with open(dead, "rb"):
            built = said.get(timeout=60).rpartition(": ")[0]
        while (word := said.get(timeout=60)) != gone:
            assert word.startswith(built)
    assert not dead.exists()
    assert [begun, gone, built] == snapshot


def test_a_folder_that_cannot_be_written_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    environ = {"TORCH_EXTENSIONS_DIR": str(tmp_path / "a" / "b")}
    assert not find_write_problem(environ)
    assert not (tmp_path / "a").exists()
    refused = {tmp_path}
    monkeypatch.setattr(os, "access", lambda path, mode: path not in refused)  # root may write anywhere
    problems = [find_write_problem(environ)]
    (tmp_path / "a").touch()
    problems.append(find_write_problem(environ))
    environ = {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    folder = get_builds_folder(environ)
    folder.mkdir()
    refused.add(folder)
    problems.append(find_write_problem(environ))
    assert [problem.replace(folder.name, "ENVIRONMENT") for problem in problems] == snapshot


def test_another_path_does_not_build_again(tmp_path: Path) -> None:
    """Of two ninjas, each takes what the other has built for out of date. The second here builds nothing at all."""
    other = tmp_path / "other/ninja"
    other.parent.mkdir()
    other.write_text("#!/bin/sh\necho building all again\n")
    other.chmod(0o755)
    own = str(Path(sys.executable).parent)
    paths = (os.defpath, f"{own}:{os.defpath}", f"{other.parent}:{os.defpath}", f"{other.parent}:{own}:{os.defpath}")
    rule = "rule compile\n  command = echo built > $out\nbuild operator.so: compile\n"
    (tmp_path / "build.ninja").write_text(rule)
    said = []
    for path in paths:
        environ = make_environment({**os.environ, "PATH": path}, "cpu", 1)
        ran = subprocess.run(["ninja"], cwd=tmp_path, env=environ, capture_output=True, text=True, check=True)
        said.append(ran.stdout.strip().splitlines()[-1])
        assert environ["PATH"].endswith(path), "everything else is found where it was"
    assert said == ["[1/1] echo built > operator.so", *["ninja: no work to do."] * 3]
