"""Doctor's reading of a machine, on machines that are not here; a check that breaks is a finding and not an end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from training import make_recipe

from ulysses_cli.hardware_table import load_hardware
from ulysses_cli.prove import machine, software, wires
from ulysses_cli.prove.checkup import Finding, Patient, run_checks
from ulysses_cli.prove.results import Findings

ROOT = Path(__file__).parents[2]
# Two NVLink islands of two GPUs, as nvidia-smi draws them.
TOPOLOGY = """\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity
GPU0\t X \tNV12\tSYS\tSYS\tPIX\t0-31
GPU1\tNV12\t X \tSYS\tSYS\tSYS\t0-31
GPU2\tSYS\tSYS\t X \tNV12\tSYS\t32-63
GPU3\tSYS\tSYS\tNV12\t X \tSYS\t32-63
NIC0\tPIX\tSYS\tSYS\tSYS\t X
"""


def make_patient(*overrides: str) -> Patient:
    return Patient(make_recipe(*overrides) if overrides else None, None, load_hardware(), 0)


def test_sp_groups_that_leave_their_island_are_named() -> None:
    links = machine.read_topology(TOPOLOGY)
    assert [len(row) for row in links] == [4] * 4
    assert machine.find_slow_pairs(links, 2) == []
    assert [(a, b) for a, b, _ in machine.find_slow_pairs(links, 4)] == [(0, 2), (0, 3), (1, 2), (1, 3)]
    assert machine.read_topology("nvidia-smi: command not found") == []


@pytest.mark.parametrize(
    ("world", "gpus", "verdict"), [(8, 8, "PASS"), (16, 8, "PASS"), (8, 4, "PASS"), (6, 4, "FAIL"), (2, 4, "WARN")]
)
def test_processes_against_gpus(world: int, gpus: int, verdict: str) -> None:
    assert [found.verdict for found in machine._judge_count(world, gpus)] == [verdict]


def test_pairs_of_versions() -> None:
    entries = yaml.safe_load(software.BAD_VERSIONS.read_text())
    assert not [entry for entry in entries if software.clashes(entry, {"torch": "2.13.0+cpu", "numpy": "2.4"}.get)]
    bad = [entry for entry in entries if software.clashes(entry, {"torch": "2.2.1+cu121", "numpy": "2.0.1"}.get)]
    assert [entry["with"] for entry in bad] == ["numpy"]
    assert software.clashes(entries[1], {"peft": "0.17.1", "transformers": "5.0.0"}.get)
    assert not software.clashes(entries[1], {"peft": "0.17.1"}.get)


def test_a_stale_lock_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    for age, name in ((3600, "old"), (1, "new")):
        (tmp_path / name).mkdir()
        lock = tmp_path / name / "lock"
        lock.touch()
        os.utime(lock, (time.time() - age,) * 2)
    found = list(software.check_locks(make_patient()))
    assert [(each.verdict, each.fix) for each in found] == [("WARN", f"rm {tmp_path / 'old' / 'lock'}")]


def test_a_check_that_breaks_does_not_end_the_others_and_failures_come_first() -> None:
    def breaks(_: Patient) -> Iterator[Finding]:
        yield Finding("first", "WARN", "slow", "later")
        raise OSError("no such device")

    def fails(_: Patient) -> Iterator[Finding]:
        yield Finding("second", "FAIL", "missing", "now")

    findings = Findings("doctor", "test")
    run_checks(make_patient(), [("a", breaks), ("b", fails)], findings, lambda _: None)
    assert [row.verdict for row in findings.rows] == ["WARN", "WARN", "FAIL"]
    assert "no such device" in findings.rows[1].text
    assert [how for _, how in findings.fixes] == ["now", "later"]
    assert not findings.passed


def test_a_recipe_for_gpus_fails_without_them() -> None:
    found = list(machine.check_gpus(make_patient("run.device=auto")))
    assert [each.verdict for each in found] == ["FAIL"]
    assert "run.device=cpu" in found[0].fix


def test_a_kernel_that_is_wrong_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from ulysses_cli.train import kernels

    assert {each.name: each.verdict for each in wires.check_kernels(make_patient())}["sdpa"] == "PASS"
    right = kernels.KERNELS["sdpa"]

    def wrong(*args: object, **more: object) -> object:
        out, lse = right.forward(*args, **more)  # type: ignore[arg-type]
        return out * 1.5, lse

    monkeypatch.setitem(kernels.KERNELS, "sdpa", right._replace(forward=wrong))
    found = {each.name: each for each in wires.check_kernels(make_patient())}
    assert found["sdpa"].verdict == "SKIP"
    assert "differs from the reference" in found["sdpa"].text
    assert found["attention"].verdict == "FAIL"


@pytest.mark.full
def test_the_command_examines_and_says_what_to_fix() -> None:
    words = ["doctor", "recipes/llama-3.1-8b-128k-8gpu.yaml", "--format", "json"]
    done = subprocess.run(
        [sys.executable, "-m", "ulysses_cli", *words], cwd=ROOT, capture_output=True, text=True, timeout=500
    )
    found = json.loads(done.stdout)
    exchanged = [row for row in found["rows"] if row["name"] == "all-to-all"]
    assert all(row["values"]["gb_per_second"] > 0 for row in exchanged)
    assert exchanged
    import torch

    if not torch.cuda.is_available():
        assert done.returncode == 1
        assert "torch sees none" in found["fixes"][0]["what"]
