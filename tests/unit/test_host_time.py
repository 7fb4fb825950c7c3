"""Tests the seconds that a processor takes to launch a step's work, and what is said where the GPU waits for it, or for
the weights of experts."""

import json
import re
import sys
from dataclasses import replace

import pytest
import yaml
from support.model_shapes import LLAMA, get_shape
from support.paths import ROOT
from support.refusals import explain
from syrupy.assertion import SnapshotAssertion

from ulysses_cli.hardware_table import SHIPPED, load_hardware
from ulysses_cli.plan.hardware import HostCosts, read_hardware
from ulysses_cli.plan.layout import Layout
from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.levers import Levers
from ulysses_cli.plan.planner.candidates import HOST_FACTOR, judge_speed
from ulysses_cli.plan.planner.estimate import LEAST_GAIN, explain_gathers, find_host_bound
from ulysses_cli.plan.recipe.sections import Lora
from ulysses_cli.plan.speed import HOST, compute_host_seconds, compute_optimizer_host_seconds, compute_speed

sys.path.append(str(ROOT / "benchmarks"))
import host

H100 = load_hardware().get_gpu("h100-80gb")
NOTHING = replace(H100, host=HostCosts())
SMALL = get_shape("Qwen/Qwen3-0.6B")
SHORT = Job(SMALL, Layout(1, 2, 4), 4096, Levers(), accumulation=3)


@pytest.mark.parametrize("row_tokens", [2**15, 2**17, 2**20])
@pytest.mark.parametrize("sp_size", [1, 8])
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("levers", [Levers(False), Levers(), Levers("full", 2, 30, True, True), Levers(tiled_mlp=True)])
def test_long_rows_are_predicted_as_without_a_host(row_tokens: int, sp_size: int, stage: int, levers: Levers) -> None:
    job = Job(LLAMA, Layout(1, 8 // sp_size, sp_size), row_tokens * sp_size, levers, zero_stage=stage)
    with_host, without = (compute_speed(job, gpu) for gpu in (H100, NOTHING))
    assert with_host.step_seconds == pytest.approx(without.step_seconds, rel=0.01)
    assert without.host_seconds == 0
    assert find_host_bound(job, H100) is None


def test_a_step_lasts_as_long_as_the_slower_of_gpu_and_host() -> None:
    speed, without = compute_speed(SHORT, H100), compute_speed(SHORT, NOTHING)
    assert speed.is_host_bound
    assert speed.limit == HOST
    assert not without.is_host_bound
    assert sum(speed.parts.values()) == pytest.approx(speed.step_seconds)
    assert speed.step_seconds == pytest.approx(3 * compute_host_seconds(SHORT, H100.host) + speed.parts["optimizer"])
    expected = {**without.parts, HOST: speed.parts[HOST]}
    expected["optimizer"] += compute_optimizer_host_seconds(SHORT, H100.host)
    assert speed.parts == pytest.approx(expected)


def test_what_costs_the_host_time_and_what_saves_it() -> None:
    seconds = compute_host_seconds(SHORT, H100.host)
    for slower in (
        replace(SHORT, levers=Levers("full")),
        replace(SHORT, levers=Levers(tiled_mlp=True)),
        replace(SHORT, levers=Levers(tiled_loss=True)),
        replace(SHORT, levers=Levers(head_chunks=2)),
        replace(SHORT, levers=Levers(offloaded_layers=20)),
        replace(SHORT, levers=Levers(offload_optimizer="cpu")),
        replace(SHORT, layout=Layout(1, 16, 4)),
        replace(SHORT, lora=Lora(r=8)),
    ):
        assert compute_host_seconds(slower, H100.host) > seconds, slower
    for faster in (
        replace(SHORT, levers=Levers(False)),
        replace(SHORT, layout=Layout(1, 8, 1)),
        replace(SHORT, zero_stage=1),
    ):
        assert compute_host_seconds(faster, H100.host) < seconds, faster
    assert compute_host_seconds(SHORT, replace(H100.host, core_speed=2.0)) == pytest.approx(seconds / 2)


def test_each_change_that_is_named_gives_what_it_says(snapshot: SnapshotAssertion) -> None:
    bound = find_host_bound(SHORT, H100)
    assert bound.host_seconds > bound.device_seconds
    keys = [remedy.change.partition(":")[0] for remedy in bound.remedies]
    assert len(keys) == len(set(keys)), "the best value of each key"
    gains = {remedy.change: remedy.gain for remedy in bound.remedies}
    rate = compute_speed(SHORT, H100).tokens_per_second
    for change, changed in (
        ("train.per_device_train_batch_size: 4", replace(SHORT, batch=4, accumulation=1)),
        ("parallel.zero_stage: 2", replace(SHORT, zero_stage=2)),  # micro-steps are added up in float32
        ("parallel.sp_size: 1", replace(SHORT, layout=Layout(1, 8, 1))),
    ):
        assert gains[change] == pytest.approx(compute_speed(changed, H100).tokens_per_second / rate)
        assert gains[change] >= LEAST_GAIN
    assert list(gains.values()) == sorted(gains.values(), reverse=True)
    assert bound.explain() == snapshot


def test_a_change_that_does_not_fit_is_not_named() -> None:
    """Of 8B, stage 1 needs 16 GB of weights and as much of gradients."""
    job = Job(LLAMA, Layout(1, 8, 1), 1024, Levers(), batch=1)
    for gpu, is_named in ((H100, True), (replace(H100, memory_bytes=24 << 30), False)):
        assert any("zero_stage" in remedy.change for remedy in find_host_bound(job, gpu).remedies) is is_named


def test_the_range_counts_slower_and_faster_processors() -> None:
    speed = compute_speed(SHORT, H100)
    accuracy = judge_speed(SHORT, H100, speed)
    slow, fast = (
        compute_speed(SHORT, replace(H100, host=replace(H100.host, core_speed=each)))
        for each in (1 / HOST_FACTOR, HOST_FACTOR)
    )
    assert accuracy.low * speed.tokens_per_second == pytest.approx(slow.tokens_per_second)
    assert accuracy.high * speed.tokens_per_second == pytest.approx(fast.tokens_per_second)


def test_a_user_says_how_fast_a_core_is(snapshot: SnapshotAssertion) -> None:
    shipped = ("shipped", yaml.safe_load(SHIPPED.read_text()))
    faster = read_hardware(shipped, ("own.yaml", {"host": {"core_speed": 2}})).get_gpu("h100-80gb")
    assert faster.host == replace(H100.host, core_speed=2.0)
    assert explain(read_hardware, shipped, ("own.yaml", {"host": {"core_sped": 2}})) == snapshot


def test_the_costs_are_those_that_were_measured() -> None:
    """And what levers cost adds up: combinations that no cost was derived from are predicted within 30 %."""
    result = json.loads((ROOT / "benchmarks" / "results" / "host-cpu.json").read_text())
    costs = HostCosts(**host.derive_costs(result))
    # not by this script
    on_gpu = {name: getattr(H100.host, name) for name in ("on_gpu", "optimizer", "optimizer_layer")}
    assert replace(costs, **on_gpu) == H100.host
    errors = host.list_errors(result, costs)
    assert len(errors) == 8
    assert max(map(abs, errors.values())) < 0.3, errors


EXPERTS = get_shape("Qwen/Qwen3-30B-A3B")


def test_a_model_with_experts_is_told_what_hides_its_gathers(snapshot: SnapshotAssertion) -> None:
    """A row of 32Ki on 32 GPUs: each change hides them, and half of it does not."""
    job = Job(EXPERTS, Layout(1, 1, 32), 2**15, Levers(), fused_norms=True)
    said, now = explain_gathers(job, H100), compute_speed(job, H100)
    assert now.gather_over_compute > 3
    assert f"{now.gather_over_compute:.2g} times" in said
    changes = {key: int(size) for key, size in re.findall(r"(\w+): (\d+)", said)}
    ranks, rows, tokens = (changes[key] for key in ("sp_size", "per_device_train_batch_size", "max_length"))
    for factor, hides in ((1, True), (2, False)):
        fewer = Layout(1, 32 // (ranks * factor), ranks * factor)
        tried = [replace(job, layout=fewer), replace(job, batch=rows // factor)]
        for each in [*tried, replace(job, max_length=tokens // factor)]:
            assert (compute_speed(each, H100).gather_over_compute <= 1) == hides
    assert [said, explain_gathers(replace(job, max_length=2**20), H100)] == snapshot
    on_eight = replace(job, layout=Layout(1, 8, 1))
    assert explain_gathers(on_eight, H100)
    for other in ({"shape": LLAMA}, {"layout": Layout()}, {"zero_stage": 1}):
        assert not explain_gathers(replace(on_eight, **other), H100), other
