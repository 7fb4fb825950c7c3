"""Tests what is published: the sdist and the wheel, installed where no checkout is."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from support.paths import ROOT

from ulysses_cli import __version__

pytestmark = pytest.mark.check
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def call(*words: str | Path, cwd: Path) -> str:
    done = subprocess.run([*map(str, words)], cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(kind: str, source: Path, to: Path) -> Path:
    call(sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", to, cwd=source)
    return next(to.iterdir())


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("packages")
    return build("sdist", ROOT, folder / "sdist"), build("wheel", ROOT, folder / "wheel")


def test_the_sdist_builds_the_wheel_of_the_checkout(packages: tuple[Path, Path], tmp_path: Path) -> None:
    sdist, wheel = packages
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    again = build("wheel", tmp_path / f"ulysses_cli-{__version__}", tmp_path / "again")
    with zipfile.ZipFile(wheel) as first, zipfile.ZipFile(again) as second:
        assert sorted(first.namelist()) == sorted(second.namelist())
        for name in first.namelist():
            assert first.read(name) == second.read(name), name
        recipes = {Path(name).name for name in first.namelist() if name.startswith("ulysses_cli/recipes/")}
        data = {name for name in first.namelist() if name.endswith((".json", ".yaml", ".jinja"))}
    assert recipes == {file.name for file in (ROOT / "recipes").glob("*.yaml")}
    for file in (ROOT / "ulysses_cli").rglob("*"):
        if file.suffix in (".json", ".yaml", ".jinja"):
            assert file.relative_to(ROOT).as_posix() in data, "a file that the package reads is left out"


def test_the_wheel_works_in_a_fresh_environment(packages: tuple[Path, Path], tmp_path: Path) -> None:
    """The packages that it needs are those of this environment, behind the fresh one's own."""
    home = tmp_path / "fresh"
    venv.create(home, with_pip=False)
    python, ulysses = home / "bin" / "python", home / "bin" / "ulysses"
    own = Path(call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    words = ("install", "-q", "--no-deps", "--no-index", packages[1])
    call(sys.executable, "-m", "pip", "--python", python, *words, cwd=tmp_path)
    (own / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
    place = call(python, "-c", "import ulysses_cli; print(ulysses_cli.__file__)", cwd=tmp_path)
    assert place.startswith(str(own)), "the checkout was imported"
    assert call(ulysses, "--version", cwd=tmp_path) == f"ulysses {__version__}\n"
    assert call(python, "-m", "ulysses_cli", "--version", cwd=tmp_path) == f"ulysses {__version__}\n"
    call(ulysses, "recipes", "copy", "tiny-cpu", cwd=tmp_path)
    assert (tmp_path / "tiny-cpu.yaml").read_text().endswith((ROOT / "recipes" / "tiny-cpu.yaml").read_text())
    call(ulysses, "estimate-memory", "tiny-cpu.yaml", cwd=tmp_path)
    call(ulysses, "train", "tiny-cpu.yaml", "train.max_steps=2", "train.warmup_steps=1", cwd=tmp_path)
    assert list((tmp_path / "runs" / "tiny-cpu" / "model").glob("*.safetensors"))
