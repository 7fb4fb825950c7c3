"""Tests what ledger and speed model know of a ring: keys held and traded, when it wins."""

import math
from dataclasses import replace

import pytest
from support.model_shapes import get_shape
from syrupy.assertion import SnapshotAssertion

from ulysses_cli.hardware_table import load_hardware
from ulysses_cli.plan.layout import Layout
from ulysses_cli.plan.ledger.job import Job, is_indexable
from ulysses_cli.plan.ledger.ledger import weigh_ledger
from ulysses_cli.plan.levers import Levers
from ulysses_cli.plan.planner import rings
from ulysses_cli.plan.planner.rings import BetterRing, explain_own_ring, find_better_ring
from ulysses_cli.plan.resolved import find_ring_size
from ulysses_cli.plan.rows.ring import NO_RING, Ring, measure_ring
from ulysses_cli.plan.speed import compute_exchange_bytes, compute_ring_bytes, compute_speed
from ulysses_cli.report.ledger import format_better_ring

LLAMA = get_shape("meta-llama/Llama-3.1-8B")
TILED = Levers(tiled_mlp=True, tiled_loss=True)
H100, B200 = (load_hardware().get_gpu(name) for name in ("h100-80gb", "b200"))
WIDE = Job(get_shape("Qwen/Qwen3-32B"), Layout(1, 1, 64), 2**20, TILED)


def test_one_document_needs_all_keys_and_short_ones_almost_none() -> None:
    whole = measure_ring(2**20, None, Ring(4), None)
    assert (whole.keys, whole.fetched, whole.num_parts) == (4.0, 3.0, 2)
    short = measure_ring(2**20, 2048, Ring(4), None)
    assert short == NO_RING, "512 documents of 2,048 tokens end at the bounds of chunks"
    assert 0 < measure_ring(2**20, 3000, Ring(4), None).fetched < 0.02
    assert math.isclose(measure_ring(2**20, None, Ring(4, ((4096, 1),)), 4096).fetched, 4095 / 2**18)
    assert measure_ring(2**20, None, Ring(1), None) == NO_RING


def test_bytes_follow_the_formula() -> None:
    """2 b S r (R - 1) for each layer in the forward, twice that in the backward; heads as on the ranks inside."""
    job = Job(LLAMA, Layout(1, 1, 16, 2), 2**20, Levers())
    tokens, width = 2**20 // 16, 8 * 128
    assert compute_ring_bytes(job) == 3 * 2 * 2 * tokens * width * 32
    inside = Job(LLAMA, Layout(1, 2, 8), 2**20, Levers())
    assert compute_exchange_bytes(job) == compute_exchange_bytes(inside) / 2  # of half as many tokens


def test_bytes_are_those_of_each_layer() -> None:
    """Latents become keys of 192 numbers and values of 128 for every head. Layers with a window may have other heads
    than those without: 16 of 256, and 4 of 512."""
    deepseek = Job(get_shape("deepseek-ai/DeepSeek-V3"), Layout(1, 1, 16, 2), 2**20, Levers())
    assert compute_ring_bytes(deepseek) == 3 * 2 * 2**16 * 128 * (192 + 128) * 61
    gemma = Job(get_shape("google/gemma-4-31b"), Layout(1, 1, 8, 2), 2**20, Levers())
    width = 0.0
    for window_tokens, num_layers in gemma.shape.window_counts:
        heads, dim = (16, 256) if window_tokens else (4, 512)
        share = measure_ring(2**20, None, gemma.make_ring(), window_tokens)
        width += num_layers * 2 * heads * dim * share.fetched
    assert math.isclose(compute_ring_bytes(gemma), 3 * 2 * 2**17 * width)


def test_a_ring_is_chosen_for_heads_and_for_machines(snapshot: SnapshotAssertion) -> None:
    qwen = get_shape("Qwen/Qwen3-8B")
    assert [find_ring_size(qwen, size) for size in (1, 8, 16, 32, 64)] == [1, 1, 2, 4, 8]
    assert [find_ring_size(qwen, size, gpus_per_node=4) for size in (4, 8)] == [1, 2]
    many = get_shape("deepseek-ai/DeepSeek-V3")
    assert many.num_kv_heads == many.num_heads
    assert find_ring_size(many, 32) == 1, "with as many key/value heads, keys of a ring are more bytes than heads"
    hybrid = get_shape("LiquidAI/LFM2-1.2B")
    assert hybrid.list_ring_sizes(16) == (1,)
    assert hybrid.ring_obstacle == snapshot


def test_a_share_of_a_row_stays_below_32_bits() -> None:
    """32 heads of 128 and a share of 2^19 tokens are 2^31 numbers, or 2^28 in 8 chunks; keys come in blocks."""
    job = Job(LLAMA, Layout(1, 1, 16, 16), 2**23, TILED)
    assert not is_indexable(job)
    assert is_indexable(replace(job, max_length=2**22))
    assert is_indexable(replace(job, levers=replace(job.levers, head_chunks=8)))


def test_the_ledger_counts_blocks_of_keys() -> None:
    """One fetch would hold the keys of a row and their gradients: 2 x 2 r for each of 8 shares. Rounds hold blocks."""

    def peak(layout: Layout, **options: int) -> int:
        levers = Levers(tiled_mlp=True, tiled_loss=True, offloaded_layers=30)
        return weigh_ledger(Job(LLAMA, layout, 2**21, levers, **options)).gpu_allocated_bytes

    heads, ring = Layout(1, 1, 8), Layout(1, 1, 8, 8)
    own_tokens, key_bytes = 2**21 // 8, 2 * 2 * 1024
    assert peak(heads) + 3 * key_bytes * own_tokens < peak(ring) < peak(heads) + 2 * 8 * key_bytes * own_tokens
    assert peak(ring, document_tokens=2048) < peak(heads) * 1.2


def test_keys_in_rounds_travel_while_others_are_computed() -> None:
    """Of keys that are fetched at once, as those of short documents, attention hides none."""
    job = Job(LLAMA, Layout(1, 1, 16, 2), 2**20, TILED)
    rounds, short = compute_speed(job, H100), compute_speed(replace(job, document_tokens=3000), H100)
    assert 0 < rounds.hidden["exchange"] <= rounds.parts["attention"] / 2
    assert short.hidden["exchange"] == 0 < compute_ring_bytes(replace(job, document_tokens=3000))
    assert compute_ring_bytes(job, in_rounds=True) == compute_ring_bytes(job)


def test_a_better_ring_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 ranks with heads over 8 machines, or with heads inside each."""
    better = find_better_ring(WIDE, B200)
    inside = replace(WIDE, layout=replace(WIDE.layout, ring_size=better.size))
    assert better.gain == 1 - compute_speed(inside, B200).step_seconds / compute_speed(WIDE, B200).step_seconds >= 0.01
    assert find_better_ring(inside, B200) is None
    assert find_better_ring(replace(WIDE, layout=Layout()), B200) is None, "one rank has no ring"
    for kernel, found in (("cudnn", None), ("flash_attention_2", better)):
        assert find_better_ring(replace(WIDE, kernel=kernel), B200) == found, "cuDNN serves no ring"
    monkeypatch.setattr(rings, "fits", lambda tried, _: tried.layout.ring_size == 2)
    assert find_better_ring(WIDE, B200) == BetterRing(2, None), "the own does not fit"


def test_a_ring_with_too_few_heads_for_the_chunks_is_named_with_as_many_as_it_takes(
    snapshot: SnapshotAssertion,
) -> None:
    """32 heads on 8 ranks of one machine: without a ring 4 on each, which 8 chunks do not divide. With as many
    key/value heads, a ring of short rows is slower."""
    levers = replace(TILED, head_chunks=8)
    job = Job(get_shape("allenai/Olmo-3-1025-7B"), Layout(1, 1, 8, 8), 2**14, levers)
    tried = {
        size: replace(job, layout=Layout(1, 1, 8, size), levers=replace(levers, head_chunks=chunks))
        for size, chunks in ((1, 4), (2, 8), (4, 8))
    }
    seconds = {size: compute_speed(each, H100).step_seconds for size, each in tried.items()}
    assert min(seconds, key=lambda size: seconds[size]) == 1
    gain = 1 - seconds[1] / compute_speed(job, H100).step_seconds
    assert find_better_ring(job, H100) == BetterRing(1, gain, head_chunks=4)
    assert format_better_ring(BetterRing(1, 0.05, 4)) == snapshot


def test_an_estimate_says_what_its_ring_gains(snapshot: SnapshotAssertion) -> None:
    job = replace(WIDE, layout=Layout(1, 1, 64, 8))
    gain = 1 - compute_speed(job, B200).step_seconds / compute_speed(WIDE, B200).step_seconds
    assert gain > 0
    said = explain_own_ring(job, B200)
    assert f"{gain:.1%}" in said
    assert explain_own_ring(WIDE, B200) == ""
    assert [
        said,
        explain_own_ring(job, replace(B200, memory_bytes=2**34)),
        explain_own_ring(replace(job, levers=replace(TILED, head_chunks=8)), B200),
        explain_own_ring(Job(get_shape("Qwen/Qwen2.5-7B"), Layout(1, 1, 8, 2), 2**20, TILED), B200),
    ] == snapshot
