"""Tests what ranks say of their host: its memory, its processor, and a slow attention kernel."""

import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.recipes import load
from support.training import make_recipe
from syrupy.assertion import SnapshotAssertion

from ulysses_cli.hardware_table import load_hardware
from ulysses_cli.hub import find_model_shape
from ulysses_cli.plan.hardware import GIB
from ulysses_cli.plan.levers import Levers
from ulysses_cli.plan.models.shape import read_model_shape
from ulysses_cli.plan.planner.lever_choice import LeverChoice
from ulysses_cli.plan.resolved import settle
from ulysses_cli.prove import doctor
from ulysses_cli.prove.results import CheckTarget, Finding
from ulysses_cli.train import inputs
from ulysses_cli.train.inputs import Forecast, Yardstick, measure_core_milliseconds
from ulysses_cli.train.processes import device, host

LLAMA = ("model.name_or_path=meta-llama/Llama-3.1-8B", "data.max_length=8192", "parallel.sp_size=1")


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree of memory controllers in which this process is at the root."""
    monkeypatch.setattr(host, "CGROUP", tmp_path)
    monkeypatch.setattr(host, "OWN_GROUPS", tmp_path / "own")
    return tmp_path


@pytest.fixture
def large(groups: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with one H100 and 2 TiB of free memory, of which a container may take 200 GiB."""
    monkeypatch.setattr(host, "count_host_bytes", lambda: 2048 * GIB)
    monkeypatch.setattr(host, "_read_table", lambda _: {"MemAvailable:": 2 << 30, "RssAnon:": 1 << 20})
    monkeypatch.setattr(doctor, "count_host_bytes", host.count_host_bytes)
    facts = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=80 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: facts)
    (groups / "memory.max").write_text(str(200 * GIB))
    return groups


def test_a_container_has_what_is_left_of_its_limit(groups: Path) -> None:
    assert 0 < host.count_free_bytes() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    (groups / "memory.max").write_text("max\n")
    assert host.read_memory_limit() == 1 << 60
    (groups / "memory.max").write_text("1000000\n")
    (groups / "memory.current").write_text("900000\n")
    (groups / "memory.stat").write_text("anon 600000\ninactive_file 250000\n")
    assert host.count_free_bytes() == host.count_usable_bytes() == 350_000
    assert host.count_usable_bytes(1) == 1_000_000  # what this process holds is the run's


@pytest.mark.parametrize(
    ("line", "folder", "limit", "use", "cache"),
    [
        ("0::/slurm/job_7/step_0\n", "", "memory.max", "memory.current", "inactive_file"),
        ("5:cpu,cpuacct:/\n4:memory:/slurm/job_7/step_0\n0::/\n", "memory", "memory.limit_in_bytes",
         "memory.usage_in_bytes", "total_inactive_file"),
    ],
)  # fmt: skip
def test_a_job_has_what_is_left_of_its_own_limits(
    groups: Path, line: str, folder: str, limit: str, use: str, cache: str
) -> None:
    (groups / "own").write_text(line)
    job = groups / folder / "slurm/job_7"
    (job / "step_0").mkdir(parents=True)
    (job / "step_0" / limit).write_text("900000")
    (job / limit).write_text("500000")
    (job / use).write_text("400000")
    (job / "memory.stat").write_text(f"{cache} 30000\n")
    assert host.read_memory_limit() == 500_000
    assert host.count_free_bytes() == 130_000


def test_levers_are_chosen_within_the_limit_of_a_container(large: Path) -> None:
    gpu, _ = device.recognise_gpu(torch.device("cuda", 0), load_hardware())
    assert gpu.host_bytes_per_gpu == 200 * GIB


def test_all_ranks_choose_levers_for_the_least_memory_of_any(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load(*LLAMA, "memory.offload_optimizer=cpu")
    shape, gpu = find_model_shape(loaded.recipe).shape, load_hardware().get_gpu("h100-80gb")
    roomy, small = (replace(gpu, host_bytes_per_gpu=size * GIB) for size in (2048, 200))
    gpus = iter([[roomy, small], None, [small, roomy], None])
    monkeypatch.setattr(inputs, "gather_values", lambda value, _: next(gpus) or [value])
    launch: Any = SimpleNamespace(recipe=loaded.recipe)
    ranks: list[Any] = [SimpleNamespace(gpu=own, shape=shape, is_known_gpu=True) for own in (roomy, small)]
    hosts: Any = SimpleNamespace(host_group=None)
    first, second = (inputs.settle_levers(launch, each, hosts) for each in ranks)
    assert first == second
    fit = first.choice.fit
    assert (fit.verdict, fit.host_capacity_bytes) == ("fits", 200 * GIB)
    assert device.find_least([None, None]) is None


def test_doctor_says_when_early_steps_take_too_much(large: Path) -> None:
    def look(*words: str) -> Finding:
        recipe = load(*LLAMA, "memory.offload_optimizer=cpu", *words).recipe
        target = CheckTarget(recipe, find_model_shape(recipe).shape, load_hardware(), 1)
        return next(doctor.check_memory(target))

    assert look().verdict == "PASS"  # as many early steps as the container has room for
    much = look("memory.overlap_optimizer=true")
    assert (much.verdict, much.fix) == ("FAIL", "memory.overlap_optimizer=0")


H100 = load_hardware().get_gpu("h100-80gb")


def make_plan() -> Any:
    recipe = make_recipe()
    return settle(recipe, read_model_shape(recipe.model.config, "test"), Levers())


def test_ranks_count_with_their_own_core(snapshot: SnapshotAssertion) -> None:
    plan, said = make_plan(), []
    for milliseconds in (H100.host.yardstick, 3 * H100.host.yardstick):
        forecast = Forecast(LeverChoice(Levers(), {}, None), H100, True, lambda found=milliseconds: found)
        said.append("; ".join(forecast.explain_host(plan)))
    first, second = (float(text.split("about ")[1].split(" ms")[0].replace(",", "")) for text in said)
    assert second / first == pytest.approx(3, rel=0.1)
    assert re.sub(r"\d[\d.,]*", "NUMBER", said[0]) == snapshot


def test_nothing_is_said_where_the_gpu_is_unknown_or_the_limit() -> None:
    plan, choice = make_plan(), LeverChoice(Levers(), {}, None)
    for gpu, is_known in ((None, False), (replace(H100, tflops=1e-3), True), (H100, False)):
        forecast = Forecast(choice, gpu, is_known, lambda: 1e-6 * H100.host.yardstick)
        assert forecast.explain_host(plan) == []


def test_a_slow_attention_kernel_is_named_with_its_cost(snapshot: SnapshotAssertion) -> None:
    """By the lengths of the run's documents: short ones leave attention little to do."""
    plan, said = make_plan(), Forecast(LeverChoice(Levers(), {}, None), H100, True)
    assert said.explain_attention(plan, ["torch_varlen"], [plan.resolved.max_length]) == []
    recipe = make_recipe("data.max_length=1048576", "model.dtype=bfloat16")
    long = settle(
        recipe, read_model_shape({**recipe.model.config, "max_position_embeddings": 1 << 20}, "test"), Levers()
    )
    (line,) = said.explain_attention(long, ["torch_varlen"], [1 << 20])
    assert re.sub(r"[\d.]+ times", "NUMBER times", line) == snapshot
    assert 1.3 < float(line.partition(" times")[0].rpartition(" ")[2]) < 1.75
    assert said.explain_attention(long, ["flash_attention_3"], [1 << 20]) == []
    assert said.explain_attention(long, ["torch_varlen"], [256] * 4096) == []
    unknown = Forecast(said.choice, replace(H100, packed_attention=None), True)
    assert unknown.explain_attention(long, ["torch_varlen"], [1 << 20]) == []


def test_a_core_is_measured_in_milliseconds() -> None:
    assert 0.05 < measure_core_milliseconds() < 50
    yardstick = Yardstick()
    yardstick.measure()
    assert yardstick.module.weight.grad is None, "nothing is kept from call to call"
