"""Tests that everything imports where only a GPU image's packages are, in its versions: on that machine nothing can be
installed."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.house import FILES, PACKAGE, ROOT, parse

LIST = ROOT / "tests" / "support" / "gpu_image.txt"
PACKAGES = dict(line.partition("==")[::2] for line in LIST.read_text().splitlines() if line[:1] not in ("", "#"))
NAMES = {name.replace("-", "_") for name in PACKAGES} | {"yaml"}
OWN = {"ulysses_cli", "support", "__future__", *(file.stem for file in (ROOT / "benchmarks").glob("*.py"))}
OWN |= {file.stem for file in (ROOT / "tests" / "gpu").glob("*.py")}
OPTIONAL = {"prove/quality/harness.py": {"lm_eval"}}  # imported where `evaluate --tasks` runs, after a check
ABSENT = (
    "bitsandbytes", "bm25s", "jieba", "rapidfuzz", "lm_eval", "s3fs", "gcsfs", "wandb", "mlflow", "trackio", "trl",
    "gguf", "flash_attn", "fla", "causal_conv1d", "mamba_ssm", "moto", "flask",
)  # fmt: skip
IMPORT_ALL = f"""
import importlib, json, pkgutil, sys
from importlib.machinery import PathFinder
class Image(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {ABSENT!r} else super().find_spec(name, path, target)
    @classmethod
    def find_distributions(cls, *args):
        return (each for each in super().find_distributions(*args) if each.name.replace("-", "_") not in {ABSENT!r})
sys.meta_path[sys.meta_path.index(PathFinder)] = Image
import ulysses_cli
problems, count = {{}}, 0
for module in pkgutil.walk_packages(ulysses_cli.__path__, "ulysses_cli."):
    if not module.name.endswith("__main__"):
        count += 1
        try:
            importlib.import_module(module.name)
        except Exception as error:
            problems[module.name] = str(error)
import importlib.metadata as metadata
versions = {{name: metadata.version(name) for name in sys.argv[1:]}}
print(json.dumps([problems, count, versions]))
"""


def list_first_imports(body: list[ast.stmt]) -> Iterator[str]:
    """Packages that are imported when a module is, and not where a function runs."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield from list_first_imports(node.orelse)
        elif isinstance(node, (ast.If, ast.With, ast.ClassDef, ast.For, ast.While)):
            yield from list_first_imports([*node.body, *getattr(node, "orelse", [])])
        elif isinstance(node, ast.Try):  # a missing package is foreseen where handlers are
            yield from list_first_imports([*node.orelse, *node.finalbody])


def test_no_module_imports_what_the_image_lacks() -> None:
    gpu = [*(ROOT / "tests" / "gpu").glob("*.py"), *(ROOT / "benchmarks").glob("gpu*.py")]
    missing = {}
    for file in [*FILES, *gpu]:
        name = str(file.relative_to(PACKAGE if file in FILES else ROOT))
        known = NAMES | OWN | set(sys.stdlib_module_names) | OPTIONAL.get(name, set())
        if found := set(list_first_imports(parse(file).body)) - known:
            missing[name] = found
    assert missing == {}


def test_what_a_package_needs_is_on_the_list() -> None:
    """pip would install it elsewhere; here a missing one ends the day."""
    assert {"annotated-types", "typing-inspection", "pydantic-core"} <= PACKAGES.keys(), "of pydantic"
    assert {"httpx", "httpcore", "h11", "anyio", "certifi", "idna"} <= PACKAGES.keys(), "of huggingface-hub 1"
    assert {"dill", "multiprocess", "xxhash", "pyarrow", "pandas"} <= PACKAGES.keys(), "of datasets"
    assert {"hjson", "py-cpuinfo", "msgpack", "einops", "ninja"} <= PACKAGES.keys(), "of deepspeed"


@pytest.mark.full
def test_all_modules_import_with_the_images_versions(tmp_path: Path) -> None:
    """In a folder before this environment's packages. The torch and the Python are those of this environment."""
    wanted = {name: version for name, version in PACKAGES.items() if version}
    words = [f"{name}=={version}" for name, version in wanted.items() if name != "deepspeed"]  # a build; the same here
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile", "--target", str(tmp_path)]
    done = subprocess.run([*install, *words], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no package index: {done.stderr[-200:]}")
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    environ = {**os.environ, "PYTHONPATH": path, "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL, *wanted], env=environ, capture_output=True, text=True)
    problems, count, versions = json.loads(done.stdout.splitlines()[-1])
    assert versions == wanted
    assert problems == {"ulysses_cli.prove.quality.harness": "No module named 'lm_eval'"}
    assert count > 400
