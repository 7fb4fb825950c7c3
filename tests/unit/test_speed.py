"""Tests seconds by part: published rows, brute-force counts of work, and settings that must not speed a step up."""

import sys
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.model_shapes import LLAMA, QWEN, SHAPES, get_shape
from support.paths import ROOT
from support.tiers import count_examples
from syrupy.assertion import SnapshotAssertion
from test_memory import make_jobs

from ulysses_cli.commands.estimate_memory import draft_and_validate
from ulysses_cli.hardware_table import load_hardware
from ulysses_cli.plan.layout import Layout
from ulysses_cli.plan.ledger.job import Job, is_indexable
from ulysses_cli.plan.ledger.states import list_sub_groups
from ulysses_cli.plan.ledger.weights import get_weights, read_weights
from ulysses_cli.plan.levers import ALL_GROUPS, Levers
from ulysses_cli.plan.planner.candidates import FAR, NEAR, judge_speed
from ulysses_cli.plan.planner.estimate import compute_estimate
from ulysses_cli.plan.speed import (
    HOST,
    PARTS,
    compute_attention_flops,
    compute_exchange_bytes,
    compute_mlp_flops,
    compute_optimizer_host_seconds,
    compute_projection_flops,
    compute_reference_seconds,
    compute_speed,
    compute_sum_bytes,
    count_row_pairs,
)

sys.path.append(str(ROOT / "benchmarks"))
import published

TABLE = load_hardware()
H100 = TABLE.get_gpu("h100-80gb")
TILED = Levers("full", 1, 32, True, True)


@pytest.mark.parametrize(
    ("kibi_tokens", "chunks", "published"),
    [(128, 1, 2320.47), (512, 1, 878.63), (3072, 1, 162.41), (128, 4, 2281.05), (1024, 4, 472.53), (5120, 4, 98.25)],
)
def test_published_rows(kibi_tokens: int, chunks: int, published: float) -> None:
    """Published tokens/s of Llama3-8B on 8 H100: arXiv 2602.21196. All rows stand in benchmarks/estimate.py."""
    llama_3 = Job(LLAMA, Layout(1, 1, 8), kibi_tokens * 1024, replace(TILED, head_chunks=chunks), fused_norms=True)
    assert compute_speed(llama_3, H100).tokens_per_second / 8 == pytest.approx(published, rel=0.15)


@pytest.mark.check
@pytest.mark.parametrize("row", ["1 x H100, 128Ki", "8 x H100, 32Ki", "8 x H100, 128Ki", "8 x H100, 5Mi"])
def test_speeds_beside_published_ones_are_those_of_estimates(row: str) -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    (line,) = (line for line in page.splitlines() if line.startswith(f"| {row} |"))
    number, length = int(row[0]), row.rpartition(" ")[2]
    valid, _ = draft_and_validate("meta-llama/Llama-3.1-8B", length, number, [], online=False)
    speed = compute_estimate(valid.loaded.recipe, valid.shape, H100).speed
    assert line.split("|")[3].strip().startswith(f"{speed.tokens_per_second / number:,.0f}")


def test_the_range_of_a_speed_is_that_of_its_errors_for_published_runs() -> None:
    """Rows of one machine without another program's ring, and all others; to whole percents, no wider than needed."""
    rows = [*published.list_speed(), *published.list_later_speed()]
    near = [row.error for row in rows if row.bar is not None]
    far = [*near, *(row.error if row.unit == "tokens/s" else 1 / (1 + row.error) - 1 for row in rows)]
    assert (len(near), len(rows)) == (23, 38)
    for errors, (too_low, too_high) in ((near, NEAR), (far, FAR)):
        assert too_low <= min(errors) < too_low + 0.01
        assert too_high - 0.01 < max(errors) <= too_high


def test_a_kind_or_a_network_that_no_published_run_names_has_the_wider_range(snapshot: SnapshotAssertion) -> None:
    job = Job(LLAMA, Layout(1, 1, 8), 2**17, Levers())
    two = replace(job, layout=Layout(1, 2, 8))
    near = judge_speed(job, H100, compute_speed(job, H100))
    far = judge_speed(two, H100, compute_speed(two, H100))
    other = judge_speed(job, TABLE.get_gpu("h200"), compute_speed(job, TABLE.get_gpu("h200")))
    assert (near.low, near.high) == (1 / (1 + NEAR[1]), 1 / (1 + NEAR[0]))
    assert (far.low, far.high) == (other.low, other.high) == (1 / (1 + FAR[1]), 1 / (1 + FAR[0]))
    assert [each.reason for each in (near, far, other)] == snapshot


@given(st.integers(1, 60), st.integers(1, 60), st.none() | st.integers(1, 80))
def test_pairs_against_brute_force(document: int, copies: int, window: int | None) -> None:
    length = document * copies
    pairs = sum(
        sum(1 for key in range(query + 1) if window is None or query - key < window) for query in range(document)
    )
    assert count_row_pairs(length, document, window) == pytest.approx(copies * pairs)


def test_documents_make_rows_cheaper_and_windows_too() -> None:
    row = Job(LLAMA, Layout(1, 1, 8), 2**20, Levers())
    packed = replace(row, document_tokens=2**14)
    assert compute_attention_flops(packed) == pytest.approx(compute_attention_flops(row) / 64, rel=1e-3)
    gemma = Job(SHAPES["google/gemma-2-9b"], Layout(1, 1, 8), 2**20, Levers())
    full = 4 * gemma.query_width * 42 * 2**39 / 8
    assert compute_attention_flops(gemma) == pytest.approx(full / 2, rel=0.01)  # every other layer sees 4,096 tokens


def test_matrix_products_take_two_flops_per_weight_and_token_that_meet() -> None:
    """Those of all but the embedding, the head and norms, and of experts that are routed to."""
    job = Job(LLAMA, Layout(1, 1, 8), 2**17, Levers())
    matrices = read_weights(LLAMA, None).num_elements - 2 * 128_256 * 4096 - 65 * 4096
    assert compute_projection_flops(job) + compute_mlp_flops(job) == 2 * matrices * 2**17 / 8
    experts = Job(SHAPES["Qwen/Qwen3-30B-A3B"], Layout(1, 1, 4), 2**17, Levers())
    routed = 48 * (8 * 3 * 2048 * 768 + 2048 * 128)  # of 128 experts 8, and the router
    assert compute_mlp_flops(experts) == 2 * routed * experts.local_tokens


def test_bytes_that_an_exchange_moves() -> None:
    """In the forward q, k, v go out and the result comes back; one part in sp of it stays where it is."""
    job = Job(QWEN, Layout(1, 1, 4), 2**16, Levers(gradient_checkpointing=False))
    q, kv = 4096, 1024
    forward = 2 * (q + 2 * kv + q)
    assert compute_exchange_bytes(job) == pytest.approx((forward + (2 * (q + q + 2 * kv))) * 2**14 * 36 * 3 / 4)
    assert compute_exchange_bytes(replace(job, layout=Layout(1, 4, 1))) == 0


def test_only_what_goes_to_another_machine_waits_for_the_network() -> None:
    """Of 16 ranks on two machines, each sends to 15, 8 of them over the network."""
    job = Job(LLAMA, Layout(1, 1, 16), 2**21, Levers())
    beyond = compute_exchange_bytes(job) * 8 / 15 / (H100.network_gb_s * 1e9 * H100.efficiency.network)
    endless = replace(H100, memory_gb_s=1e12)
    assert compute_speed(job, endless).parts["exchange"] == pytest.approx(beyond, rel=1e-6)
    slow = replace(endless, network_gb_s=H100.network_gb_s / 2)
    assert compute_speed(job, slow).parts["exchange"] == pytest.approx(2 * beyond, rel=1e-6)
    inside = replace(job, layout=Layout(1, 2, 8))
    assert compute_speed(inside, slow).parts["exchange"] == compute_speed(inside, endless).parts["exchange"]


@pytest.mark.parametrize("layout", [Layout(1, 1, 8), Layout(1, 1, 16)], ids=["one machine", "two machines"])
@pytest.mark.parametrize("chunks", [1, 2])
def test_attention_hides_chunks_under_way(layout: Layout, chunks: int) -> None:
    """Not the first chunk that comes and the last that returns, nor copies, and no more than attention takes."""
    job = Job(LLAMA, layout, 2**18, Levers(head_chunks=chunks))
    overlapped = replace(job, levers=replace(job.levers, overlap_exchange=True))
    endless = replace(H100, memory_gb_s=1e12)
    is_near = layout.sp_size == 8
    beyond = compute_exchange_bytes(job) * (1 if is_near else 8 / 15) / 1e9
    for gpu in (H100, endless, replace(H100, link_gb_s=1.0, network_gb_s=1.0)):
        before, after = (compute_speed(each, gpu) for each in (job, overlapped))
        gain = before.parts["exchange"] - after.parts["exchange"]
        assert gain == pytest.approx(after.hidden["exchange"])
        rate = gpu.link_gb_s * gpu.efficiency.link if is_near else gpu.network_gb_s * gpu.efficiency.network
        most = min(0.8 * beyond / rate, before.parts["attention"])
        assert gain == pytest.approx(most * (chunks - 1) / chunks)
        assert before.hidden["exchange"] == 0


@given(make_jobs(), st.sampled_from(list(TABLE.gpus.values())))
@settings(max_examples=count_examples(20))
def test_parts_add_up_to_the_step(job: Job, gpu: object) -> None:
    speed = compute_speed(job, gpu)  # type: ignore[arg-type]
    assert tuple(speed.parts) == (*PARTS, HOST)
    assert min(speed.parts.values()) >= 0
    assert min(speed.hidden.values()) >= 0
    assert sum(speed.parts.values()) == pytest.approx(speed.step_seconds)
    assert 0 < speed.mfu < 1
    assert speed.tokens_per_second == pytest.approx(speed.tokens_per_step / speed.step_seconds)


BUSY = Job(LLAMA, Layout(1, 64, 1), 4096, Levers(offloaded_layers=31, offload_param="cpu"))


@given(make_jobs(), st.integers(1, 8), st.sampled_from(list(TABLE.gpus.values())))
@settings(max_examples=count_examples(20))
@example(BUSY, 1, TABLE.get_gpu("rtx-4090"))
def test_a_second_of_compute_hides_a_second_of_transfer(job: Job, more: int, gpu: object) -> None:
    """So more work is never faster, whatever travels meanwhile."""
    speed = compute_speed(job, gpu)  # type: ignore[arg-type]
    moving = ("gather_reduce", "offload", "optimizer")
    computing = sum(seconds for part, seconds in speed.parts.items() if part not in moving)
    assert sum(speed.hidden.values()) <= computing * (1 + 1e-9)
    longer = compute_speed(replace(job, max_length=job.max_length + 4096 * more), gpu)  # type: ignore[arg-type]
    assert longer.step_seconds >= speed.step_seconds * (1 - 1e-9)


@given(make_jobs())
def test_no_memory_lever_saves_time(job: Job) -> None:
    def check_rising(name: str, *values: object, **others: object) -> None:
        sets = [replace(job.levers, **{name: value}, **others) for value in values]  # type: ignore[arg-type]
        changed = [replace(job, levers=each) for each in sets]
        if not all(is_indexable(each) for each in changed):  # what no kernel takes has no speed
            return
        seconds = [compute_speed(each, H100).step_seconds for each in changed]
        assert all(more >= less * (1 - 1e-12) for less, more in pairwise(seconds)), (name, seconds)

    # more saved bytes go to the host
    check_rising("gradient_checkpointing", False, True, "full", offloaded_layers=0)
    check_rising("offload_optimizer", "none", "cpu")
    check_rising("offloaded_layers", 0, 5, 12)
    check_rising("tiled_mlp", False, True)


def test_accumulation_repeats_all_but_the_optimizer() -> None:
    once = compute_speed(Job(LLAMA, Layout(1, 1, 8), 2**17, Levers()), H100)
    four = compute_speed(Job(LLAMA, Layout(1, 1, 8), 2**17, Levers(), accumulation=4), H100)
    assert four.tokens_per_step == 4 * once.tokens_per_step
    for part in PARTS:
        assert four.parts[part] == pytest.approx(once.parts[part] * (1 if part == "optimizer" else 4))


def test_a_reference_is_a_forward_of_each_step() -> None:
    """Where products take all the time: a third of a step, a quarter of one that computes its forward twice."""
    for levers, share in ((Levers(gradient_checkpointing=False), 1 / 3), (Levers("full"), 1 / 4)):
        job = Job(LLAMA, Layout(1, 1, 1), 8192, levers)
        seconds, many = compute_reference_seconds(job, H100), replace(job, accumulation=32)
        assert compute_reference_seconds(many, H100) == pytest.approx(32 * seconds)
        assert 32 * seconds / compute_speed(many, H100).step_seconds == pytest.approx(share, rel=0.1)
        far = replace(job, layout=Layout(1, 16, 1))  # two machines: weights come over the network, once
        rate = H100.network_gb_s * 1e9 * H100.efficiency.network * 8
        assert compute_reference_seconds(far, H100) >= 2 * read_weights(LLAMA, None).num_elements / rate


def test_an_8b_step_at_32ki_is_a_tenth_faster_in_fewer_passes() -> None:
    """On one H200 with 8-bit moments: one pass for each norm, rotation and gate, and sums inside products."""
    before = Job(LLAMA, Layout(1, 1, 1), 2**15, Levers(True, 1, 0, True, True), optim="adamw_8bit")
    after = replace(before, fused_norms=True, fused_gates=True, sums_in_product=True)
    h200 = TABLE.get_gpu("h200")
    assert compute_speed(before, h200).step_seconds / compute_speed(after, h200).step_seconds >= 1.10
    # by hand: the sums of 8 tiles of an MLP and of 64 tiles of the head
    tiles = 8 * 32 * 3 * 4096 * 14336 + 64 * 4096 * 128256
    assert compute_sum_bytes(before) == 12 * tiles
    assert compute_sum_bytes(after) == 0


def test_muon_adds_newton_schulz_of_a_ranks_matrices() -> None:
    """By hand, of Llama-3.1-8B on 8 H100: q and o are square, k and v a quarter of that, three matrices in the MLP."""
    job = Job(LLAMA, Layout(1, 1, 8), 2**15, Levers(tiled_loss=True))
    before, after = (compute_speed(replace(job, optim=name), H100).parts["optimizer"] for name in ("adamw", "muon"))
    sides = 2 * [(4096, 4096)] + 2 * [(1024, 4096)] + 3 * [(4096, 14336)]
    flops = 32 * sum(5 * (4 * n * n * m + 2 * n**3) for n, m in sides) / 8
    elements = 32 * sum(n * m for n, m in sides) / 8
    exchanged = 2 * 2 * elements * 7 / 8 / (H100.link_gb_s * 1e9 * H100.efficiency.link)
    seconds = flops / (H100.tflops * 1e12 * H100.efficiency.matmul) + exchanged
    assert after - before == pytest.approx(seconds, rel=0.01)
    assert 0.1 < after - before < 0.2


def test_early_steps_hide_adam_behind_the_backward() -> None:
    """By hand: copies cost 24 bytes on top of Adam's 34, and four fifths of the backward are theirs at most."""
    h200 = TABLE.get_gpu("h200")
    plain = Job(LLAMA, Layout(1, 1, 1), 2**15, Levers(tiled_loss=True, offload_optimizer="cpu"))
    all_early = replace(plain, levers=replace(plain.levers, early_groups=ALL_GROUPS))
    before, after = compute_speed(plain, h200), compute_speed(all_early, h200)
    hidden = before.step_seconds - after.step_seconds
    assert hidden == pytest.approx(after.hidden["optimizer"])
    backward = sum(before.parts[part] for part in ("projections", "attention", "mlp", "head_loss", "other"))
    assert 0.5 < hidden / (0.8 * backward * 34 / 58) < 0.8  # of a forward and a backward that computes layers again
    long_row, on_host = replace(all_early, max_length=2**18), compute_optimizer_host_seconds(plain, h200.host)
    groups = list_sub_groups(get_weights(plain), 1, plain.engine.sub_group)
    assert compute_speed(long_row, h200).parts["optimizer"] == pytest.approx(34 * groups[0] / 30e9 + on_host)
    few = replace(long_row, levers=replace(plain.levers, early_groups=3))
    assert compute_speed(few, h200).hidden["optimizer"] == pytest.approx(34 * sum(groups[-3:]) / 30e9)


def test_recurrences_are_a_part_of_their_own() -> None:
    """Only models that have them spend time there, in proportion to the tokens."""
    hybrid = Job(get_shape("Qwen/Qwen3.5-9B"), Layout(1, 1, 8), 2**17, Levers())
    once, twice = (compute_speed(replace(hybrid, max_length=n * 2**17), H100).parts for n in (1, 2))
    assert 0 < once["recurrence"] == pytest.approx(twice["recurrence"] / 2)
    assert compute_speed(replace(hybrid, shape=LLAMA), H100).parts["recurrence"] == 0
