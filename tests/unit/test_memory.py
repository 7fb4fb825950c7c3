"""Tests the ledger: figures of a trace of the real engine, sums, and how bytes change with length, ranks and levers."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.model_shapes import LLAMA, QWEN, SHAPES
from support.recipes import load, make_shape
from support.tiers import count_examples

from ulysses_cli.hardware_table import load_hardware
from ulysses_cli.plan.layout import Layout
from ulysses_cli.plan.ledger import states
from ulysses_cli.plan.ledger.job import Job, make_job, read_engine
from ulysses_cli.plan.ledger.ledger import PHASES, measure_ledger, weigh_ledger
from ulysses_cli.plan.ledger.machine import list_host_phases
from ulysses_cli.plan.ledger.states import count_largest_group, list_sub_groups
from ulysses_cli.plan.ledger.weights import get_weights, read_weights
from ulysses_cli.plan.levers import Levers
from ulysses_cli.plan.models.shape import read_model_shape
from ulysses_cli.plan.planner.fit import find_max_length, fits, judge
from ulysses_cli.plan.problem import RecipeError
from ulysses_cli.plan.recipe.sections import Lora

GIB = 1 << 30
FULL = Levers(gradient_checkpointing="full")
H200 = load_hardware().get_gpu("h200")


@pytest.mark.parametrize(
    ("sp_size", "max_length", "levers", "traced"),
    [
        (1, 8_192, FULL, 76.35),
        (4, 32_768, FULL, 33.29),
        (4, 65_536, FULL, 48.77),
        (4, 98_304, FULL, 64.25),
        (4, 131_072, FULL, 79.7),
        (4, 98_304, Levers(gradient_checkpointing=False), 207.0),
    ],
)
def test_figures_equal_a_trace_of_the_real_engine(sp_size: int, max_length: int, levers: Levers, traced: float) -> None:
    """Holds allocated GiB of Qwen3-4B under DeepSpeed 0.19.8 with bfloat16 reduction, every allocation counted without
    a GPU."""
    ledger = measure_ledger(Job(QWEN, Layout(1, 1, sp_size), max_length, levers))
    seen = ledger.gpu_allocated_bytes - ledger.peak.lines["cublas_workspace"]
    assert seen / GIB == pytest.approx(traced, abs=0.1)
    assert (ledger.peak.phase, ledger.peak.name) == ("backward", "backward of the loss")


def test_the_optimizer_on_the_host_takes_14_bytes_per_weight() -> None:
    job = Job(LLAMA, Layout(1, 1, 8), 4096, replace(FULL, offload_optimizer="cpu", offload_param="cpu"))
    lines = list_host_phases(job, ["forward"])["forward"]
    taken = lines["optimizer_pinned"] + lines["optimizer_pageable"]
    largest = count_largest_group(job)
    assert 0 < largest < 0.14e9 * 8, "one group's gradient is float32 at a time"
    assert taken == pytest.approx(14 * 8.03e9 + 8 * 4 * largest, rel=1e-3)
    assert lines["parameters_pinned"] == pytest.approx(2 * 8.03e9, rel=1e-3)


def test_models_that_differ_in_biases_alone_are_not_mixed_up() -> None:
    biased = read_model_shape({**LLAMA.config, "attention_bias": True}, LLAMA.name)
    hidden, kv = 4096, 1024
    assert read_weights(biased, None).num_elements == read_weights(LLAMA, None).num_elements + 32 * (
        2 * hidden + 2 * kv
    )
    peaks = [measure_ledger(Job(shape, Layout(), 4096, Levers())).gpu_peak_bytes for shape in (LLAMA, biased)]
    assert peaks[0] < peaks[1]


def test_adapters_train_little_and_freeze_the_rest() -> None:
    weights = read_weights(LLAMA, Lora(r=16))
    hidden, kv, inner = 4096, 1024, 14336
    pairs = [(hidden, hidden), (hidden, kv), (hidden, kv), (hidden, hidden)] + 2 * [(hidden, inner)] + [(inner, hidden)]
    assert weights.num_trained == 32 * 16 * sum(a + b for a, b in pairs)
    assert weights.num_elements - weights.num_trained == read_weights(LLAMA, None).num_elements
    assert read_weights(LLAMA, Lora(r=16, target_modules=("q_proj",))).num_trained == 32 * 16 * 2 * hidden


@st.composite
def make_jobs(draw: Any) -> Job:
    on = st.booleans()
    shape, stage = draw(st.sampled_from(list(SHAPES.values()))), draw(st.sampled_from([1, 2, 3]))
    sp_size, shards = draw(st.sampled_from([1, 2, 4, 8])), draw(st.sampled_from([1, 2, 4, 8]))
    recomputes, chunks = draw(st.sampled_from([True, "full", False])), draw(st.sampled_from([1, 2, 4]))
    levers = Levers(
        gradient_checkpointing=recomputes,
        head_chunks=chunks if (shape.num_heads // sp_size) % chunks == 0 else 1,
        offloaded_layers=draw(st.integers(0, 40)) if recomputes else 0,
        tiled_mlp=draw(on),
        tiled_loss=draw(on),
        offload_optimizer=draw(st.sampled_from(["none", "cpu"])),
        offload_param=draw(st.sampled_from(["none", "cpu"])) if stage == 3 else "none",
    )
    return Job(
        shape,
        Layout(1, shards, sp_size),
        4096 * draw(st.integers(1, 64)),
        levers,
        zero_stage=stage,
        lora=draw(st.sampled_from([None, Lora(r=8)])),
        dtype_bytes=draw(st.sampled_from([2, 4])),
        optim=draw(st.sampled_from(["adamw", "adamw_8bit"])),
        batch=draw(st.integers(1, 3)),
    )


@given(make_jobs())
@settings(max_examples=count_examples(8))
def test_parts_add_up_and_none_is_negative(job: Job) -> None:
    ledger = weigh_ledger(job)
    assert list(ledger.phases) == [phase for phase in PHASES if phase in ledger.phases]
    for moment in ledger.phases.values():
        assert moment.num_bytes == sum(moment.lines.values())
        assert min(moment.lines.values()) >= 0
        assert all(isinstance(size, int) for size in moment.lines.values())
    assert ledger.gpu_peak_bytes == max(moment.num_bytes for moment in ledger.phases.values())
    assert ledger.host_peak_bytes == max(sum(lines.values()) for lines in ledger.host_phases.values())
    assert 0 < ledger.gpu_allocated_bytes < ledger.gpu_peak_bytes


@given(make_jobs(), st.integers(1, 96))
@settings(max_examples=count_examples(8))
def test_memory_never_falls_with_length(job: Job, more: int) -> None:
    longer = replace(job, max_length=job.max_length + 128 * job.layout.sp_size * more)
    ours, reference = weigh_ledger(job), weigh_ledger(longer)
    # One tile more makes each tile smaller: memory may fall by at most one tile.
    slack = 0.05 if job.levers.tiled_mlp or job.levers.tiled_loss else 0.0
    assert reference.gpu_peak_bytes >= ours.gpu_peak_bytes * (1 - slack)
    assert reference.host_peak_bytes >= ours.host_peak_bytes


@given(make_jobs())
@settings(max_examples=count_examples(8))
def test_memory_never_rises_with_sp_at_the_same_length(job: Job) -> None:
    """Except what sharing a row costs by itself: communicators, gathering, float32 sums, and exchange buffers."""
    sp_size = job.layout.sp_size
    if sp_size == 1 or job.shape.num_heads % (2 * sp_size * job.levers.head_chunks):
        return
    wider = replace(job, layout=Layout(1, job.layout.dp_shard_size, 2 * sp_size))
    ours, reference = weigh_ledger(job), weigh_ledger(wider)
    kv_heads = job.shape.num_kv_heads
    repeats = kv_heads % (2 * sp_size * job.levers.head_chunks) != 0  # then keys are sent more than once
    slack = 0.25 if repeats or job.levers.tiled_mlp else 0.01
    assert reference.gpu_peak_bytes <= ours.gpu_peak_bytes * (1 + slack)


@pytest.mark.check
@given(make_jobs())
@settings(max_examples=count_examples(8))
def test_every_lever_has_the_right_sign(job: Job) -> None:
    """A lever that is on frees GPU memory where it is meant to, and elsewhere takes at most what it needs itself."""
    base = replace(job, levers=Levers(gradient_checkpointing=True), zero_stage=3)

    def measure(**levers: Any) -> dict[str, int]:
        ledger = weigh_ledger(replace(base, levers=replace(base.levers, **levers)))
        return {"gpu": ledger.gpu_peak_bytes, "host": ledger.host_peak_bytes}

    none, most = measure(), job.shape.num_layers - 1
    assert measure(gradient_checkpointing=False)["gpu"] >= none["gpu"]
    assert measure(offloaded_layers=most)["gpu"] <= none["gpu"]
    assert measure(offloaded_layers=most)["host"] > none["host"]
    assert measure(offload_optimizer="cpu")["gpu"] < none["gpu"]
    assert measure(offload_optimizer="cpu")["host"] > none["host"]
    assert measure(gradient_checkpointing="full")["gpu"] <= 1.1 * none["gpu"]


def test_levers_remove_most_of_their_line() -> None:
    """Where its line is the largest, a lever removes most of it."""
    long = Job(LLAMA, Layout(1, 1, 8), 2**20, Levers())

    def peak(**levers: Any) -> float:
        return weigh_ledger(replace(long, levers=replace(Levers(), **levers))).gpu_peak_bytes / GIB

    assert peak() - peak(tiled_loss=True) > 100  # 12 bytes x 128,256 x 131,072 tokens
    tiled = peak(tiled_loss=True)
    offloaded = peak(tiled_loss=True, offloaded_layers=31)
    kept = 30 * 131_072 * (2 * 4096 + 2 * 4096 + 4 * 32) / GIB  # two of 32 layers stay
    assert tiled - offloaded == pytest.approx(kept, rel=0.02)
    assert peak(tiled_loss=True, tiled_mlp=True, offloaded_layers=31) < offloaded


def test_sub_groups_end_with_the_weight_that_fills_them() -> None:
    weights = get_weights(Job(LLAMA, Layout(1, 1, 4), 4096, Levers()))
    groups = list_sub_groups(weights, 4, 10**9)
    assert len(groups) == 2
    assert sum(groups) == -(-weights.num_trained // 4)
    assert all(10**9 <= group < 10**9 + weights.largest // 4 for group in groups)
    assert list_sub_groups(weights, 16, 10**9) == (-(-weights.num_trained // 16),)


def test_replicas_keep_a_second_shard() -> None:
    job = Job(LLAMA, Layout(2, 1, 8), 4096, Levers())
    whole = 2 * read_weights(LLAMA, None).num_elements / 8  # type: ignore[operator]
    assert states.compute_secondary_shard(job) == pytest.approx(whole, rel=1e-4)  # norms are never released
    assert states.compute_secondary_shard(replace(job, layout=Layout(1, 2, 8))) == 0


def test_a_recipe_becomes_a_job() -> None:
    words = ("deepspeed.zero_optimization.reduce_bucket_size=100M", "lora.r=8", "train.gradient_accumulation_steps=3")
    job = make_job(load(*words).recipe, make_shape(), Levers(tiled_loss=True))
    assert (job.local_tokens, job.accumulation, job.lora) == (2048, 3, Lora(r=8))
    assert (job.engine.reduce_bucket, job.engine.communication_bytes) == (100_000_000, 4)
    assert read_engine({}, 2).communication_bytes == 2
    assert read_engine({"communication_data_type": "fp32"}, 2).communication_bytes == 4
    assert read_engine({"data_types": {"grad_accum_dtype": "fp32"}}, 2).gradient_bytes == 4
    assert read_engine({"zero_optimization": {"stage3_max_live_parameters": 5}}, 2).max_live == 5


def test_a_model_of_unknown_weights_is_refused() -> None:
    with pytest.raises(RecipeError, match="novel"):
        make_job(load().recipe, make_shape(model_type="novel"), Levers())


def test_the_host_is_judged_with_a_margin_too() -> None:
    job = Job(LLAMA, Layout(1, 1, 8), 4096, Levers(tiled_loss=True, offload_optimizer="cpu"))
    ledger = weigh_ledger(job)
    peak, unsure = ledger.host_peak_bytes, ledger.host_uncertainty_bytes
    assert unsure == pytest.approx(0.03 * (peak - 24 * GIB) + 12 * GIB, rel=1e-6)

    def look(capacity: int) -> tuple[str, str]:
        fit = judge(job, ledger, replace(H200, host_bytes_per_gpu=capacity // 8))
        return fit.verdict, fit.wall

    assert look(peak + 2 * unsure) == ("fits", "")
    assert look(peak + unsure // 2) == look(peak - unsure // 2) == ("too_close", "host")
    assert look(peak - 2 * unsure) == ("does_not_fit", "host")


def test_the_longest_row_fits_and_a_longer_one_does_not() -> None:
    """The levers leave memory as the only wall."""
    job = Job(LLAMA, Layout(1, 1, 8), 4096, Levers(tiled_loss=True, tiled_mlp=True))
    longest = find_max_length(job, H200)
    assert [fits(replace(job, max_length=length), H200) for length in (longest, round(longest * 1.02))] == [True, False]
