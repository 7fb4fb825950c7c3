"""Tests how a GPU's attention kernel is chosen: what each GPU can run, which kernels are tried and in which order,
packages that end their process, machines that differ, and choices kept on disk. No GPU is needed: trials are replaced.
"""

import json
import shutil
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.refusals import explain
from support.tiers import count_examples
from syrupy.assertion import SnapshotAssertion

from ulysses_cli.plan.attention import BACK_ENDS, Capability, Need, list_able
from ulysses_cli.train import choosing
from ulysses_cli.train.attention.kernels import choice
from ulysses_cli.train.attention.kernels.choice import (
    BrokenDeviceError,
    CommonPresence,
    Presence,
    choose_kernel,
    join_presence,
)
from ulysses_cli.train.attention.kernels.trial import (
    MAX_TIMED_TOKENS,
    KernelSearch,
    KernelWorkload,
    LengthMix,
    measure_mix,
    try_kernel,
)
from ulysses_cli.train.choosing import Choice, Outcome, try_in_child
from ulysses_cli.train.model import build as assembling
from ulysses_cli.train.model.build import RunLength, assemble_run
from ulysses_cli.train.processes.consistency import DisagreementError

CPU = torch.device("cpu")
HOPPER: Capability = (9, 0)
FLASH = {"flash_attention_2", "flash_attention_3", "flash_attention_4"}


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((7, 5), set()),
        ((8, 0), {"flash_attention_2"}),
        ((8, 9), {"flash_attention_2"}),
        ((9, 0), FLASH),
        ((10, 0), {"flash_attention_2", "flash_attention_4"}),
        ((11, 0), {"flash_attention_2", "flash_attention_4"}),
        ((12, 0), {"flash_attention_2"}),
    ],
)
def test_packages_serve_the_gpus_that_they_were_built_for(capability: Capability, expected: set[str]) -> None:
    able = set(list_able(Need(128), "cuda", capability))
    assert able & FLASH == expected
    assert "sdpa" in able
    assert ("torch_varlen" in able) == (capability >= (8, 0))


TRIAL = partial(try_kernel, "sdpa", KernelSearch(Need(64, dtype="float32"), CPU))
ENDS = {
    "exit": "import sys; print('CUDA error: launch failed', file=sys.stderr); sys.exit(1)",
    "abort": "import os; os.abort()",
    "silence": "pass",
    "half an answer": 'print(\'{"obstacle": ""\')',
    "another answer": "print('[]')",
    "a part of an answer": 'print(\'{"obstacle": ""}\')',
    "raise": "raise ImportError('undefined symbol')",
}


@pytest.mark.parametrize("end", ENDS)
def test_a_package_may_end_its_own_process_only(end: str, snapshot: SnapshotAssertion) -> None:
    assert try_in_child(TRIAL, command=[sys.executable, "-c", ENDS[end]]).obstacle == snapshot


def test_a_package_that_hangs_is_ended_with_its_children(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    script = f"sleep 600 & echo $! > {tmp_path / 'pid'}; wait"
    assert try_in_child(TRIAL, 1.0, ["sh", "-c", script]).obstacle == snapshot
    grandchild = Path("/proc") / (tmp_path / "pid").read_text().strip() / "stat"
    until = time.monotonic() + 10
    while grandchild.exists() and grandchild.read_text().split()[2] != "Z" and time.monotonic() < until:
        time.sleep(0.01)  # the kernel delivers the signal
    assert not grandchild.exists() or grandchild.read_text().split()[2] == "Z"


@pytest.mark.full
def test_a_trial_in_a_process_gives_the_result_of_one_here() -> None:
    timed = try_in_child(partial(TRIAL, (40, 24)))
    assert timed.obstacle == ""
    assert timed.seconds > 0


def test_a_kernel_that_breaks_the_context_of_this_process_ends_the_search(
    monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    """Every later call would fail, and blame another kernel."""
    tried: list[str] = []

    def run(name: str, *_: Any) -> Outcome:
        tried.append(name)
        return Outcome("failed its probe: CUDA error: an illegal memory access")

    def synchronize(_: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr(choice, "try_kernel", run)
    monkeypatch.setattr(choice, "try_in_child", lambda _: Outcome("ended its process"))
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    said = [explain(choose, "auto", error=BrokenDeviceError)]
    assert tried == ["torch_varlen"], "nothing is tried after it"
    said.append(explain(choose, "sdpa", error=BrokenDeviceError))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    said.append(explain(choose, "auto", error=ValueError))
    assert said == snapshot


def choose(
    wanted: str, capability: Capability = HOPPER, need: Need | None = None, *, uses_cache: bool = False, **work: Any
) -> Choice[str]:
    """On one GPU that has every package."""
    presence = CommonPresence((capability,), facts={"gpu": f"GPU of {capability}"})
    work_of_rank = KernelWorkload(LengthMix((1000,), **work))
    search = KernelSearch(need or Need(128), torch.device("cuda"), work=work_of_rank)
    return choose_kernel(wanted, search, presence, uses_cache=uses_cache)


class Trials:
    """Replaces trials: kernels of `broken` fail, the others take the seconds of `seconds`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, broken: set[str], seconds: dict[str, float]) -> None:
        self.tried: list[str] = []
        self.broken, self.seconds = broken, seconds
        monkeypatch.setattr(choice, "_try", self.run)

    def run(self, name: str, search: KernelSearch, *, is_timed: bool) -> Outcome:
        self.tried.append(name)
        return Outcome("failed") if name in self.broken else Outcome("", self.seconds.get(name, 1.0))


ORDERS: dict[str, tuple[Capability, set[str], Need, dict[str, Any], list[str], str]] = {
    "made for Hopper": (HOPPER, set(), Need(128), {}, ["flash_attention_3"], "flash_attention_3"),
    "made for Blackwell": ((10, 0), set(), Need(128), {}, ["flash_attention_4"], "flash_attention_4"),
    "made for Ampere": ((8, 0), set(), Need(128), {}, ["flash_attention_2"], "flash_attention_2"),
    "the rest is timed": (
        HOPPER, {"flash_attention_3"}, Need(128), {},
        ["flash_attention_3", "flash_attention_4", "flash_attention_2", "torch_varlen"], "torch_varlen",
    ),
    "cuDNN with few lengths": (
        HOPPER, {"flash_attention_3"}, Need(128), {"has_few_lengths": True},
        ["flash_attention_3", "flash_attention_4", "flash_attention_2", "torch_varlen", "cudnn"], "cudnn",
    ),
    "flex after flash": (
        (8, 0), {"flash_attention_2"}, Need(128, has_softcap=True), {}, ["flash_attention_2", "flex_attention"],
        "flex_attention",
    ),
    "an old GPU": ((7, 5), set(), Need(128), {}, ["sdpa"], "sdpa"),
}  # fmt: skip


@pytest.mark.parametrize("case", ORDERS)
def test_kernels_are_tried_by_speed_until_one_is_exact(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    capability, broken, need, work, tried, chosen = ORDERS[case]
    trials = Trials(monkeypatch, broken, {"torch_varlen": 0.5, "cudnn": 0.4})
    assert (trials.tried, choose("auto", capability, need, **work).name) == (tried, chosen)


def test_a_reason_says_what_was_passed_over(monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion) -> None:
    Trials(monkeypatch, {"flash_attention_3"}, {})
    reasons = [choose("auto").reason]
    Trials(monkeypatch, set(), {})
    assert [*reasons, choose("auto").reason, choose("auto", (7, 5)).reason] == snapshot


def test_a_named_kernel_is_refused_on_a_gpu_that_cannot_run_it(snapshot: SnapshotAssertion) -> None:
    """By what it needs, exactly or at least. AMD numbers GPUs otherwise."""
    cases: list[tuple[str, Capability]] = [("flash_attention_3", (10, 0)), ("flash_attention_2", (7, 5))]
    assert [explain(choose, *case, error=ValueError) for case in cases] == snapshot
    assert not BACK_ENDS["flash_attention_3"].find_obstacle(Need(128), "cuda", None)


def make_presence(machine: str = "a", **changes: Any) -> Presence:
    values: dict[str, Any] = {
        "gpu": "H100", "capability": HOPPER, "libraries": {"torch": "2.13.0", "NCCL": "2.29.7"},
        "kernels": {"flash_attention_2": "2.8.3"}, "missing": {"flash_attention_2": "", "flash_attention_3": "absent"},
    }  # fmt: skip
    return Presence(machine, **{**values, **changes})


def test_machines_that_differ_in_kernels_use_none_of_them(snapshot: SnapshotAssertion) -> None:
    lacks = make_presence("b", missing={"flash_attention_2": "is not installed", "flash_attention_3": "absent"})
    joined = join_presence([make_presence(), make_presence(), lacks])
    assert joined.missing == {"flash_attention_3": "absent"}
    assert joined.differing == snapshot(name="one lacks it")
    joined = join_presence([make_presence(), make_presence("b", kernels={"flash_attention_2": "2.8.1"})])
    search = KernelSearch(Need(128), torch.device("cuda"))
    assert explain(choose_kernel, "flash_attention_2", search, joined, error=ValueError) == snapshot(name="versions")


def test_machines_with_other_libraries_stop_the_run(snapshot: SnapshotAssertion) -> None:
    other = make_presence("b", libraries={"torch": "2.13.0", "NCCL": "2.27.5"})
    assert explain(join_presence, [make_presence(), other], error=DisagreementError) == snapshot


def test_a_kernel_must_serve_every_ranks_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    joined = join_presence([make_presence(missing={}, kernels={}), make_presence("b", capability=(8, 0), missing={})])
    trials = Trials(monkeypatch, set(), {})
    choose_kernel("auto", KernelSearch(Need(128), torch.device("cuda")), joined)
    assert "flash_attention_3" not in trials.tried


def test_a_choice_is_kept_by_gpu_and_need(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    trials = Trials(monkeypatch, set(), {})

    def count_tried(*args: Any) -> int:
        before = len(trials.tried)
        choose("auto", *args, uses_cache=True)
        return len(trials.tried) - before

    assert [count_tried(), count_tried(), count_tried((10, 0)), count_tried(HOPPER, Need(64))] == [1, 0, 1, 1]
    assert choose("auto", uses_cache=True).reason.rpartition(": ")[0] == snapshot
    trials.broken.add("flash_attention_3")
    choose("auto", HOPPER, Need(96), uses_cache=True)
    assert not [file for file in tmp_path.rglob("*.json") if "96" in file.read_text()], (
        "a busy machine may be the cause"
    )


def test_what_was_chosen_serves_later_runs_with_the_same_facts_and_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sources, tried = tmp_path / "room", list[str]()
    sources.mkdir()

    def count_tried(gpu: str = "a", name: str = "fast", *, is_lasting: bool = True) -> int:
        before = len(tried)

        def decide() -> Choice[str]:
            tried.append(gpu)
            return Choice(name, "why", is_lasting)

        choosing.digest_code.cache_clear()
        assert choosing.choose_once({"gpu": gpu}, sources, decide, {"fast"}.__contains__).name == name
        return len(tried) - before

    assert [count_tried(is_lasting=False), count_tried(), count_tried(), count_tried("b")] == [1, 1, 0, 1]
    assert [count_tried("c", "gone"), count_tried("c", "gone")] == [1, 1], "a name that is not known is no choice"
    (sources / "trial.py").write_text("PROBE_LENGTHS = (1,)")
    assert [count_tried(), count_tried()] == [1, 0], "another version of the code tries again"
    files = [*tmp_path.rglob("*.json")]
    for file in files:
        assert json.loads(file.read_text())["facts"]["code"][1] == choosing.digest_code(Path(choosing.__file__))
        file.write_text("{")
    assert [count_tried(), count_tried()] == [1, 0]
    shutil.rmtree(files[0].parent)
    files[0].parent.touch()
    assert count_tried() == 1, "a folder that cannot be written stops nothing"


@settings(max_examples=count_examples(200))
@given(st.lists(st.integers(0, 60_000), min_size=1, max_size=80).filter(any))
def test_a_timed_row_keeps_the_mix_of_lengths(lengths: list[int]) -> None:
    kept = KernelWorkload(LengthMix(tuple(lengths))).cut()
    assert 0 < sum(kept) <= max(MAX_TIMED_TOKENS, 1)
    assert min(kept) > 0
    if sum(lengths) <= MAX_TIMED_TOKENS:
        assert kept == tuple(length for length in lengths if length)


def test_many_short_documents_are_not_timed_as_one_long_one() -> None:
    mix = LengthMix((65_536, *[512] * 128))  # half of the tokens are in short documents
    kept = KernelWorkload(mix).cut()
    assert kept.count(512) >= 16
    assert sum(kept) <= MAX_TIMED_TOKENS


class LengthRows:
    def __init__(self, rows: list[tuple[int, ...]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def get_lengths(self, row: int) -> tuple[int, ...]:
        return self.rows[row]


def measure(
    rows: list[tuple[int, ...]], eval_rows: list[tuple[int, ...]] | None = None, *, generates: bool = False
) -> LengthMix:
    held_out: Any = None if eval_rows is None else LengthRows(eval_rows)
    return measure_mix(LengthRows(rows), held_out, generates=generates)  # type: ignore[arg-type]


def test_the_mix_is_measured_over_all_rows() -> None:
    assert measure([(4096,)] * 100) == LengthMix((4096,), has_few_lengths=True)
    assert measure([(4096,)] * 100 + [(n,) for n in range(1, 20)]).has_few_lengths is False
    assert measure([(8,), *[(100, 28)] * 5, (128,)]).lengths == (100, 28)
    assert measure([]) == LengthMix()


@pytest.mark.parametrize(
    ("changes", "num_eval_rows", "has_few"),
    [({}, 3, True), ({}, 30, False), ({"sample_prompts": ("Who?",)}, 0, False), ({"eval_suite": ("ruler",)}, 0, False)],
)
def test_a_run_looks_at_all_lengths_that_its_kernels_get(
    changes: dict[str, Any], num_eval_rows: int, has_few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[LengthMix] = []

    def build(*_: Any, mix: LengthMix, **__: Any) -> None:
        built.append(mix)
        raise KeyboardInterrupt

    monkeypatch.setattr(assembling, "build", build)
    plan, rows, stand_in = mock.Mock(), LengthRows([(4096,)] * 3), mock.Mock()
    plan.recipe.run = mock.Mock(**{"seed": 0, "sample_prompts": (), "eval_suite": (), **changes})
    held_out: Any = LengthRows([(64 + row,) for row in range(num_eval_rows)])
    with pytest.raises(KeyboardInterrupt):
        assemble_run(plan, stand_in, CPU, rows, RunLength(1, 1), eval_rows=held_out, batching=stand_in)  # type: ignore[arg-type]
    assert built == [LengthMix((4096,), has_few)]
