"""Tests that GPUs are counted by NVIDIA's driver. A small C library stands in for it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from support.recipes import load, make_plan
from support.small_run import CONFIG

from ulysses_cli.commands.children import proving
from ulysses_cli.commands.options import Format
from ulysses_cli.plan.models.shape import read_model_shape
from ulysses_cli.run import launcher
from ulysses_cli.run.host import DriverFacts, ask_driver

SOURCE = """
#include <stdlib.h>
static int number(const char *name) { const char *text = getenv(name); return text ? atoi(text) : 0; }
int cuInit(unsigned flags) { return number("FAKE_ERROR"); }
int cuDeviceGetCount(int *count) { *count = number("FAKE_GPUS"); return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute != 102 || !number("FAKE_OLD"); return 0;
}
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> str:
    if not shutil.which("cc"):
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "fake.c").write_text(SOURCE)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "libcuda.so.1", folder / "fake.c"], check=True)
    return str(folder / "libcuda.so.1")


@pytest.fixture
def devices(tmp_path: Path) -> Path:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    return tmp_path


def test_device_files_count_where_the_driver_fails(driver: str, devices: Path, tmp_path: Path) -> None:
    """So that torch gets to say what is wrong with it. A driver that answers knows better than device files."""
    (tmp_path / "none").mkdir()
    assert ask_driver({"FAKE_GPUS": "3"}, driver, tmp_path / "none") == DriverFacts(3)
    old = {"FAKE_GPUS": "3", "FAKE_OLD": "1"}
    assert ask_driver(old, driver, tmp_path / "none") == DriverFacts(3, maps_memory=False)
    assert ask_driver({"FAKE_GPUS": "1"}, driver, devices).num_gpus == 1, "as CUDA_VISIBLE_DEVICES says"
    assert ask_driver({"FAKE_ERROR": "100"}, driver, devices).num_gpus == 0, "CUDA_ERROR_NO_DEVICE"
    assert ask_driver({"FAKE_ERROR": "803", "FAKE_GPUS": "5"}, driver, devices).num_gpus == 2
    assert ask_driver({}, "libcuda-is-not-here.so.1", devices).num_gpus == 2


def test_commands_ask_the_driver(driver: str) -> None:
    """A proof without GPUs would run on the CPU in silence."""
    code = "from ulysses_cli.run import launcher; import os; print(launcher.count_rank_slots('cuda'), "
    code += "launcher.make_environment(os.environ, 'cuda', 1).get('PYTORCH_ALLOC_CONF'))"
    for fakes, expected in (({}, "4 expandable_segments:True"), ({"FAKE_OLD": "1"}, "4 None")):
        environ = {**os.environ, "LD_LIBRARY_PATH": str(Path(driver).parent), "FAKE_GPUS": "4", **fakes}
        environ.pop("PYTORCH_ALLOC_CONF", None)
        done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == expected


COMPILED = "TORCHINDUCTOR_CACHE_DIR"


def test_ranks_keep_what_torch_compiles_where_other_runs_find_it(tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    folders = {launcher.make_environment(environ, "cuda", count)[COMPILED] for count in (1, 8)}
    assert [Path(each).is_relative_to(tmp_path / "cache") for each in folders] == [True]
    assert launcher.make_environment({**environ, COMPILED: "mine"}, "cuda", 1)[COMPILED] == "mine"
    (tmp_path / "cache").write_text("")
    assert COMPILED not in launcher.make_environment(environ, "cuda", 1)


def test_the_environment_of_ranks() -> None:
    """The user's own wins."""
    made = launcher.make_environment({}, "cuda", 1)
    assert (made["GLOO_SOCKET_IFNAME"], made["NCCL_SOCKET_IFNAME"]) == ("lo", "=lo"), "a proof's ranks are all here"
    assert (made["NCCL_LAUNCH_ORDER_IMPLICIT"], made["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"]) == ("1", "1")
    assert made["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert "DS_ACCELERATOR" not in made
    on_cpu = launcher.make_environment({}, "cpu", 10**6)
    assert {"NCCL_LAUNCH_ORDER_IMPLICIT", COMPILED}.isdisjoint(on_cpu)
    assert (on_cpu["OMP_NUM_THREADS"], on_cpu["DS_ACCELERATOR"]) == ("1", "cpu")
    names = ("GLOO_SOCKET_IFNAME", "NCCL_LAUNCH_ORDER_IMPLICIT", "PYTORCH_ALLOC_CONF", "OMP_NUM_THREADS")
    own = dict.fromkeys(names, "theirs")
    assert own.items() <= launcher.make_environment(own, "cuda", 1).items()
    assert "PYTORCH_ALLOC_CONF" not in launcher.make_environment({"PYTORCH_CUDA_ALLOC_CONF": "x"}, "cuda", 1)
    path = launcher.make_environment({"PATH": "p"}, "cuda", 1)["PATH"]
    assert path.endswith("p"), "behind the folder of this environment's ninja"


@pytest.mark.parametrize(
    ("command", "trusts", "offline"), [("bench", False, "1"), ("bench", True, None), ("doctor", False, None)]
)
def test_a_proof_waits_for_no_hub(
    command: str, trusts: bool, offline: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its task holds config.json. Code of a model may lie on the hub, and doctor tries the network."""
    environs: list[dict[str, str]] = []
    monkeypatch.setattr(proving, "run_child", lambda _, environ: environs.append(environ) or ({}, 1))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    plan = make_plan(load(f"model.trust_remote_code={str(trusts).lower()}", "run.device=cpu"))
    subject = proving.Subject(plan, CONFIG, read_model_shape(CONFIG, "test"))
    with pytest.raises(typer.Exit):
        proving.prove(command, subject, {}, Format.json, None)
    assert [environ.get("HF_HUB_OFFLINE") for environ in environs] == [offline]
