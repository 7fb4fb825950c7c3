"""Tests how doctor reads machines from recorded output, and that a check that raises is a finding and stops no
other."""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from support.commands import run
from support.paths import RECIPES, ROOT
from support.small_run import CONFIG
from support.training import make_recipe
from syrupy.assertion import SnapshotAssertion

from ulysses_cli.hardware_table import load_hardware
from ulysses_cli.hub import find_model_shape
from ulysses_cli.plan.models.shape import read_model_shape
from ulysses_cli.plan.planner.estimate import compute_estimate
from ulysses_cli.plan.recipe.loader import load_recipe
from ulysses_cli.prove import device_checks, doctor
from ulysses_cli.prove.results import CheckTarget, Finding, Findings, run_checks
from ulysses_cli.run.host import get_builds_folder
from ulysses_cli.train import record
from ulysses_cli.train.processes import host

# Two NVLink islands of two GPUs, as nvidia-smi draws them: the header is underlined, the legend follows.
TOPOLOGY = """\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV12\tSYS\tSYS\tPIX\t0-31\t0\t\tN/A
GPU1\tNV12\t X \tSYS\tSYS\tSYS\t0-31\t0\t\tN/A
GPU2\tSYS\tSYS\t X \tNV12\tSYS\t32-63\t1\t\tN/A
GPU3\tSYS\tSYS\tNV12\t X \tSYS\t32-63\t1\t\tN/A
NIC0\tPIX\tSYS\tSYS\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
"""
SMI = """| NVIDIA-SMI 535.183.01             Driver Version: 535.183.01   CUDA Version: 12.2     |
|   0  NVIDIA A100-SXM4-80GB          On  | 00000000:07:00.0 Off |                    0 |
"""


def draw_topology(kinds: list[list[str]]) -> str:
    names = [f"GPU{at}" for at in range(len(kinds))]
    return "\n".join(["\t" + "\t".join(names), *("\t".join([n, *row]) for n, row in zip(names, kinds, strict=True))])


def make_target(*overrides: str) -> CheckTarget:
    return CheckTarget(make_recipe(*overrides) if overrides else None, None, load_hardware(), 0)


@pytest.mark.parametrize(
    ("link", "other", "sp_size", "num_slow"),
    [("NV18", "NV18", 8, 0), ("PIX", "NODE", 2, 4), ("PHB", "SYS", 8, 28), ("NV4", "PXB", 2, 0), ("NV4", "PXB", 4, 8)],
)
def test_machines_of_eight(link: str, other: str, sp_size: int, num_slow: int) -> None:
    """Pairs of neighbours are joined by one kind of link, all else by another. nvidia-smi's colours, network cards and
    legend are left out."""
    four = doctor.read_topology(TOPOLOGY)
    assert [(a, b) for a, b, _ in doctor.find_slow_pairs(four, 4)] == [(0, 2), (0, 3), (1, 2), (1, 3)]
    assert doctor.find_slow_pairs(four, 2) == doctor.read_topology("nvidia-smi: command not found") == []
    kinds = [["X" if a == b else link if a // 2 == b // 2 else other for b in range(8)] for a in range(8)]
    links = doctor.read_topology(draw_topology(kinds))
    assert links == kinds
    assert len(doctor.find_slow_pairs(links, sp_size)) == num_slow


def test_why_torch_sees_no_gpu(snapshot: SnapshotAssertion) -> None:
    cases = (("", "2.13.0+cu128"), (SMI, "2.13.0+cpu"), (SMI, "2.13.0+cu128"))
    assert [doctor.explain_no_gpus(*case) for case in cases] == snapshot


def test_errors_and_limits_that_a_gpu_reports(snapshot: SnapshotAssertion) -> None:
    alarms = doctor.read_alarms("0, Not Active, 0\n1, Active, [N/A]\n2, Not Active, 3\n")
    facts = dict.fromkeys(doctor.QUERY, "0") | {"index": "1", "name": "H100", "driver_version": "570.1"}
    judged = [doctor._judge_gpu(facts, alarms[number]) for number in "012"]
    judged.append(doctor._judge_gpu(facts | {"temperature.gpu": "91"}, ""))
    assert [(each.verdict, each.text) for each in judged] == snapshot


def test_an_operator_that_cannot_be_built_fails_only_where_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))

    class Builder:
        name = "async_io"
        error_log = "libaio.h is not there"
        is_able = False

        def absolute_name(self) -> str:
            return "nowhere"

        def is_compatible(self, verbose: bool) -> bool:
            return self.is_able

    monkeypatch.setattr(doctor, "OPERATORS", {"AsyncIOBuilder": "offload to nvme"})
    monkeypatch.setattr("deepspeed.ops.op_builder.AsyncIOBuilder", Builder)

    def look(*overrides: str) -> Finding:
        return next(iter(doctor.check_operators(make_target(*overrides))))

    assert look().verdict == "SKIP"
    needed = look("memory.offload_optimizer=nvme", f"memory.nvme_path={tmp_path}")
    assert (needed.verdict, needed.fix) == ("FAIL", doctor.INGREDIENTS["async_io"])
    assert Builder.error_log in needed.text
    Builder.is_able = True
    assert "it().load()" in look().text
    built = get_builds_folder(os.environ) / "async_io"
    built.mkdir(parents=True)
    (built / "async_io.so").touch()
    assert (look().verdict, look().text[:5]) == ("PASS", "built")


def test_checks_that_only_a_recipe_asks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    target = make_target("run.report_to=[wandb]")
    assert [(each.name, each.verdict) for each in doctor._check_recipe_needs(target)] == [("wandb", "FAIL")]
    assert list(doctor._check_recipe_needs(make_target())) == []


def test_disks_and_memory_against_the_need(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    recipe = make_recipe(f"run.output_dir={tmp_path}/run", f"data.store_dir={tmp_path}/store")
    wide = {"vocab_size": 10**9, "hidden_size": 10**6}
    small, huge = (
        CheckTarget(recipe, read_model_shape({**CONFIG, **sizes}, "test"), load_hardware(), 0) for sizes in ({}, wide)
    )
    assert {each.verdict for each in doctor.check_disks(small)} == {"PASS"}
    values = {each.name: each for each in doctor.check_disks(huge)}
    assert (values[f"{tmp_path}/run"].verdict, values[f"{tmp_path}/run"].fix) == ("FAIL", snapshot)
    assert next(doctor.check_memory(huge)).verdict == "FAIL"


@pytest.mark.parametrize(
    ("world", "gpus", "verdict"), [(8, 8, "PASS"), (16, 8, "PASS"), (8, 4, "PASS"), (6, 4, "FAIL"), (2, 4, "WARN")]
)
def test_processes_against_gpus(world: int, gpus: int, verdict: str) -> None:
    assert [result.verdict for result in doctor._judge_count(world, gpus)] == [verdict]


def test_all_ranks_of_a_recipe_are_counted(snapshot: SnapshotAssertion) -> None:
    ranks = {("parallel.sp_size=2", "parallel.dp_shard_size=4"): 8, ("parallel.sp_size=2",): 2}
    for sizes, count in ranks.items():
        assert doctor.count_ranks_here(make_target(*sizes)) == count
    eight = ("parallel.sp_size=2", "parallel.dp_shard_size=4", "run.device=auto")
    assert doctor.count_ranks_here(replace(make_target(*eight), num_gpus=4)) == 4
    assert doctor.count_ranks_here(replace(make_target(), recipe=None, num_gpus=0)) == 1
    (cores,) = [each for each in doctor.check_limits(make_target("parallel.sp_size=2")) if each.name == "cores"]
    assert cores.text.partition(" for the ")[2] == snapshot


def test_pairs_of_versions_that_clash() -> None:
    entries = yaml.safe_load(doctor.BAD_VERSIONS.read_text())
    assert not [entry for entry in entries if doctor.clashes(entry, {"torch": "2.13.0+cpu", "numpy": "2.4"}.get)]
    bad = [entry for entry in entries if doctor.clashes(entry, {"torch": "2.2.1+cu121", "numpy": "2.0.1"}.get)]
    assert [entry["with"] for entry in bad] == ["numpy"]
    peft = next(entry for entry in entries if entry["package"] == "peft")
    assert doctor.clashes(peft, {"peft": "0.17.1", "transformers": "5.0.0"}.get)
    assert not doctor.clashes(peft, {"peft": "0.17.1"}.get)
    assert all(set(entry) >= {"package", "versions", "because", "fix"} for entry in entries)
    assert all(entry["source"].startswith("https://github.com/") for entry in entries)
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    tested = dict(line.split("==") for line in lines if line.count("==") == 1)
    assert {"torch", "deepspeed", "transformers"} <= tested.keys()
    assert not [entry for entry in entries if doctor.clashes(entry, tested.get)]


def test_a_stale_lock_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    folder = get_builds_folder(os.environ)
    for age, name in ((3600, "old"), (1, "new")):
        (folder / name).mkdir(parents=True)
        lock = folder / name / "lock"
        lock.touch()
        os.utime(lock, (time.time() - age,) * 2)
    results = list(doctor.check_locks(make_target()))
    adam = folder / "old" / "cpu_adam"
    adam.mkdir()
    (folder / "old" / "lock").rename(adam / "lock")
    (waiting,) = doctor.check_cpu_adam(make_target("memory.offload_optimizer=cpu"))
    assert (waiting.verdict, waiting.fix) == ("FAIL", f"rm {adam / 'lock'}")
    assert [(each.verdict, each.fix) for each in results] == [("WARN", f"rm {folder / 'old' / 'lock'}")]


def test_a_check_that_raises_stops_no_other_and_failures_come_first(snapshot: SnapshotAssertion) -> None:
    def raises(_: CheckTarget) -> Iterator[Finding]:
        yield Finding("first", "WARN", "slow", "later")
        raise OSError("no such device")

    def fails(_: CheckTarget) -> Iterator[Finding]:
        yield Finding("second", "FAIL", "missing", "now")

    findings = Findings("doctor", "test")
    run_checks(make_target(), [("a", raises), ("b", fails)], findings, lambda _: None)
    assert [(row.verdict, row.text) for row in findings.rows] == snapshot
    assert [how for _, how in findings.fixes] == ["now", "later"]
    assert not findings.passed


def test_where_there_is_a_gpu_its_command_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "CHECKS", ())
    for num_gpus in (0, 2):
        monkeypatch.setattr(doctor, "count_gpus", lambda num_gpus=num_gpus: num_gpus)
        notes = doctor.examine(None, None, load_hardware(), "", lambda _: None).notes
        assert (doctor.GPU_HINT in notes) == bool(num_gpus)


def test_a_recipe_for_gpus_fails_without_them() -> None:
    (found,) = doctor.check_gpus(make_target("run.device=auto"))
    assert (found.verdict, "run.device=cpu" in found.fix) == ("FAIL", True)


def test_a_wrong_kernel_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from ulysses_cli.train.attention.kernels import operators

    assert {each.name: each.verdict for each in device_checks.check_kernels(make_target())}["sdpa"] == "PASS"
    expected = operators.KERNELS["sdpa"]

    def wrong(*args: object, **more: object) -> object:
        out, lse = expected.forward(*args, **more)  # type: ignore[arg-type]
        return out * 1.5, lse

    monkeypatch.setitem(operators.KERNELS, "sdpa", expected._replace(forward=wrong))
    values = {each.name: each for each in device_checks.check_kernels(make_target())}
    assert (values["sdpa"].verdict, "differs " in values["sdpa"].text) == ("WARN", True)
    assert values["attention"].verdict == "FAIL"


def test_what_packed_rows_cost_without_a_fast_kernel_is_named(snapshot: SnapshotAssertion) -> None:
    """As the recipe's estimate says it, for GPUs that a package has a kernel for."""
    hardware, recipe = load_hardware(), load_recipe(RECIPES / "llama-3.1-8b-128k-8gpu.yaml").recipe
    shape = find_model_shape(recipe).shape
    target = CheckTarget(recipe, shape, hardware, 8)
    (found,) = device_checks.find_slow_rows(target, hardware.get_gpu("h100-80gb"))
    said = compute_estimate(recipe, shape, hardware.get_gpu("h100-80gb")).slow_attention
    assert (found.verdict, f"{found.text}: {found.fix}") == ("WARN", said)
    assert found.fix == snapshot
    assert list(device_checks.find_slow_rows(target, hardware.get_gpu("a100-80gb"))) == []


@pytest.mark.full
def test_the_command_examines_and_says_what_to_fix() -> None:
    words = ["doctor", str(RECIPES / "llama-3.1-8b-128k-8gpu.yaml"), "--format", "json"]
    done = run(*words)
    answer = json.loads(done.stdout)
    exchanged = [row for row in answer["rows"] if row["name"] == "all-to-all"]
    assert all(row["values"]["gb_per_second"] > 0 for row in exchanged)
    assert exchanged
    import torch

    if not torch.cuda.is_available():
        assert done.returncode == 1
        assert "torch" in answer["fixes"][0]["what"]


def test_a_checkout_on_the_path_need_not_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing can be installed, the code runs from a folder on PYTHONPATH."""
    find = metadata.version

    def miss(package: str) -> str:
        if package == "ulysses-cli":
            raise metadata.PackageNotFoundError(package)
        return find(package)

    monkeypatch.setattr(metadata, "version", miss)
    assert record.list_versions()["ulysses"] == record.get_own_version()
    monkeypatch.setattr(metadata, "requires", miss)
    first = next(iter(doctor.check_packages(CheckTarget(None, None, load_hardware(), 0))))
    assert (first.name, first.verdict) == ("ulysses-cli", "WARN")


def test_files_that_another_package_has_overwritten_are_named(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """As after `pip install flash-attn-4` and then `pip install flash-attn`."""
    cute, record = tmp_path / "flash_attn" / "cute", tmp_path / "flash_attn_4-4.0.dist-info"
    cute.mkdir(parents=True)
    record.mkdir()
    lines = []
    for name in ("interface.py", "mask.py"):
        (cute / name).write_text(f"# {name}")
        lines.append(f"flash_attn/cute/{name},sha256={doctor._hash_file(cute / name)},9")
    (record / "RECORD").write_text("\n".join(lines))
    (record / "METADATA").write_text("Name: flash-attn-4\nVersion: 4.0\n")
    distribution = metadata.Distribution.at(record)
    assert list(doctor.check_overwritten(lambda _: distribution)) == []
    (cute / "interface.py").write_text("# of flash-attn 2")
    (finding,) = doctor.check_overwritten(lambda _: distribution)
    assert vars(finding) == snapshot


def test_offload_without_a_compiler_is_found_before_loading(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    environ = {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    assert host.find_missing_compiler(environ) == snapshot
    (tmp_path / "cpu_adam.so").touch()
    assert host.find_missing_compiler(environ) == ""
    for program in ("g++", "ninja"):
        (tmp_path / program).touch(mode=0o755)
    assert host.find_missing_compiler({}) == ""
