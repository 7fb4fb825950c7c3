"""Chooses which tests run where, skips GPU tests without a GPU, and keeps tests out of folders that hold real runs."""

import gc
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from support import rank_pool
from support.forked import PRELOADED
from support.paths import ROOT
from support.shortcuts import take_shortcuts
from support.tiers import CHECK, FULL, QUICK, TIER, count_examples, get_turn
from syrupy.assertion import SnapshotAssertion

from ulysses_cli.prove import ranks
from ulysses_cli.run.environments import SCHEDULERS
from ulysses_cli.run.host import FOLDER, choose_path, get_builds_folder

settings.register_profile(
    "ulysses",
    max_examples=count_examples(100),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("ulysses")
os.environ[FOLDER] = str(get_builds_folder(os.environ))  # tests start ranks without the command, too
os.environ["PATH"] = choose_path(os.environ)
SERVER: Any = forkserver._forkserver  # type: ignore[attr-defined]
SHARED = ("_forkserver_address", "_forkserver_authkey")  # the second from Python 3.14 on
OWN_HOME = tempfile.TemporaryDirectory(prefix="ulysses-tests-")  # in place of a person's rates and caches
for place in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
    os.environ[place] = os.path.join(OWN_HOME.name, place.lower())
# For commands, which run in other folders. Packages may come from this path, too, and from relative places in it.
others = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *others])
os.environ.pop("PYTHONUNBUFFERED", None)  # commands keep their output in a buffer, as they do for users
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would ignore Ctrl-C
for scheduler in SCHEDULERS:  # a run that stops early exits with 75 in a scheduler's job
    os.environ.pop(scheduler, None)
# one server for ranks and for commands
ranks.PRELOADED[:] = ["support.uncollected", *ranks.PRELOADED, *PRELOADED]
gc.disable()  # until all tests are imported
take_shortcuts()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """One server for all workers of pytest-xdist, whose own imports run beside it. What ranks print goes nowhere."""
    kept = [os.dup(number) for number in (1, 2)]
    with open(os.devnull, "w") as nowhere:
        for number in (1, 2):
            os.dup2(nowhere.fileno(), number)
    ranks.warm_up()
    for number, file in enumerate(kept, 1):
        os.dup2(file, number)
        os.close(file)
    node.workerinput["server"] = {name: getattr(SERVER, name) for name in SHARED if hasattr(SERVER, name)}


def pytest_configure(config: pytest.Config) -> None:
    for name, value in getattr(config, "workerinput", {}).get("server", {}).items():
        setattr(SERVER, name, value)
        SERVER._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)  # it lives as long as the first process does
        SERVER.ensure_running = forkserver.ensure_running = lambda: None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept, left_out = [], []
    for item in items:
        tier = FULL if item.get_closest_marker("full") else CHECK if item.get_closest_marker("check") else QUICK
        (kept if tier <= TIER else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept
    items.sort(key=lambda item: get_turn(item.path))
    for item in items:
        for marker in item.iter_markers("operator"):
            if (name := marker.args[0]) and TIER < FULL and not _is_built(name):
                item.add_marker(pytest.mark.skip(reason=f"{name} is not built, which takes minutes: make test-full"))
        if item.get_closest_marker("gpu") and not _has_gpu():  # keywords would also hold names of folders
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def pytest_collection_finish() -> None:
    """What is alive by now stays. A test that collects garbage would search it for half a second each time."""
    gc.enable()
    gc.freeze()


def pytest_unconfigure() -> None:
    """A process of pytest-xdist runs no exit handlers. Ranks that are killed write down no coverage."""
    rank_pool.stop_pools()
    OWN_HOME.cleanup()


@pytest.fixture(autouse=True)
def go_elsewhere(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs each test in a folder of its own. What real runs left in the checkout is neither read nor written: relative
    paths in recipes lead into this folder."""
    folder = tmp_path_factory.getbasetemp() / "elsewhere"
    folder.mkdir(exist_ok=True)
    monkeypatch.chdir(folder)


@pytest.fixture
def snapshot(snapshot: SnapshotAssertion, tmp_path: Path, request: pytest.FixtureRequest) -> SnapshotAssertion:
    """What users are told, word for word: texts, or lists or tables of texts. `make snapshots` writes them anew; it
    runs no test that is `full`. The test's folder reads {folder}, that of the repository {root}."""
    assert request.node.get_closest_marker("full") is None

    def hide_folders(data: Any, **_: Any) -> Any:
        is_text = isinstance(data, str)
        return data.replace(str(tmp_path), "{folder}").replace(str(ROOT), "{root}") if is_text else data

    return snapshot.with_defaults(matcher=hide_folders)


@pytest.fixture
def alarm() -> Iterator[None]:
    """Ends a test that is not done in a minute."""

    def stop(number: int, frame: object) -> None:
        raise AssertionError("not done in 60 s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def refuse_runs(event: str, args: tuple[object, ...]) -> None:
    if event in ("open", "os.listdir", "os.scandir", "os.mkdir") and isinstance(args[0], str):
        assert not f"{args[0]}/".startswith(f"{RUNS}/"), f"a test looks at {args[0]}, which is a person's"


RUNS = str(ROOT / "runs")
sys.addaudithook(refuse_runs)


def _is_built(name: str) -> bool:
    """Returns whether DeepSpeed's operator is built. Operators are compiled at their first use and reused."""
    return bool(list(get_builds_folder(os.environ).rglob(f"{name}.so")))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
