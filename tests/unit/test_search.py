"""Tests the planner: its offers fit and are the best, and walls are named with their distance."""

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.model_shapes import LLAMA, SHAPES, get_shape
from support.tiers import sample, sample_every
from syrupy.assertion import SnapshotAssertion

from ulysses_cli.hardware_table import load_hardware
from ulysses_cli.plan.layout import Layout
from ulysses_cli.plan.ledger.job import Job, make_job
from ulysses_cli.plan.ledger.ledger import measure_ledger, weigh_ledger
from ulysses_cli.plan.ledger.machine import compute_activation_file_bytes, compute_node_disk_bytes
from ulysses_cli.plan.levers import Levers, uses_disk
from ulysses_cli.plan.planner.candidates import (
    MIN_STEPS,
    TOKENS_PER_STEP,
    Candidate,
    Offer,
    PlanRequest,
    find_excess,
    round_cost,
    write_draft,
)
from ulysses_cli.plan.planner.estimate import compute_estimate
from ulysses_cli.plan.planner.first_recipe import FirstAnswers, make_request
from ulysses_cli.plan.planner.fit import Verdict, fits, judge, try_levers
from ulysses_cli.plan.planner.lever_choice import COSTS, EVERY, find_cheapest, read_levers
from ulysses_cli.plan.planner.rings import explain_rings, keep_rings_that_win, list_sp_layouts
from ulysses_cli.plan.planner.search import Contest, _list_layouts, draft_candidate, search, search_longest
from ulysses_cli.plan.planner.spending import spend_what_is_left
from ulysses_cli.plan.recipe.loader import parse_recipe
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.plan.recipe.sections import RowType
from ulysses_cli.plan.rules.adapters import check_lora_targets
from ulysses_cli.plan.speed import compute_speed
from ulysses_cli.report.planner import describe_search, format_prices, format_search

TABLE = load_hardware()


def offer(*kinds: str) -> list[Offer]:
    return [Offer(TABLE.get_gpu(name), int(count)) for name, count in (kind.split(":") for kind in kinds)]


def read_plan(plan: Candidate, request: PlanRequest) -> tuple[Recipe, Job]:
    """The plan's recipe as it is written, and the job that a run reads from it."""
    recipe = parse_recipe(write_draft(*draft_candidate(plan, request, "owner/model", "planned.yaml"))).recipe
    levers, _ = read_levers(recipe, request.shape)
    return recipe, make_job(recipe, request.shape, levers, gpus_per_node=plan.gpu.gpus_per_node)


REQUEST = PlanRequest(LLAMA, 2**18, 10**8)
QWEN = get_shape("Qwen/Qwen2.5-7B")
SMALL = get_shape("Qwen/Qwen3-0.6B")


@pytest.mark.check
def test_every_offer_fits_and_is_valid() -> None:
    plan_results = search(REQUEST, offer("h100-80gb:16", "h200:8", "a100-80gb:8"))
    assert plan_results.by_cost
    assert not plan_results.walls
    for each in (*plan_results.by_cost, *plan_results.by_time):
        layout = each.job.layout
        assert judge(each.job, measure_ledger(each.job), each.gpu).verdict == "fits"
        assert LLAMA.num_heads % layout.sp_size == 0
        assert REQUEST.max_length % layout.sp_size == 0
        assert each.job.world_size <= {"h100-80gb": 16, "h200": 8, "a100-80gb": 8}[each.gpu.key]
        assert each.training_seconds == pytest.approx(REQUEST.num_tokens / each.speed.tokens_per_second)
        assert each.seconds == each.startup_seconds + each.training_seconds
        assert REQUEST.num_tokens / each.speed.tokens_per_step >= MIN_STEPS


@pytest.mark.check
@pytest.mark.parametrize(
    ("length", "num_tokens", "wish", "rows"),
    [
        (2**17, 10**9, None, 8),
        (2**18, 10**8, None, 2),  # a hundredth of all tokens is 3.8 rows
        (200_000, 10**9, None, 4),  # a power of two
        (2**21, 10**9, None, 1),
        (2**17, 10**9, 2**19, 4),
        (2**17, 10**9, 600_000, 5),  # rounded up to whole rows
        (2**17, 10**9, 1, 1),
    ],
)
def test_every_plan_is_the_same_training(length: int, num_tokens: int, wish: int | None, rows: int) -> None:
    """Whatever its GPUs, a plan has the same tokens in a step, by accumulation where its groups are few."""
    request = PlanRequest(LLAMA, length, num_tokens, tokens_per_step=wish)
    assert request.rows_per_step == rows
    found = search(request, offer("h100-80gb:64"))
    for each in (*found.by_cost, *found.by_time):
        assert each.speed.tokens_per_step == rows * length
        assert each.job.accumulation * each.job.layout.dp_size == rows
        draft, header = draft_candidate(each, request, LLAMA.name, "x.yaml")
        assert draft.accumulation == each.job.accumulation
        assert draft.max_steps == -(-num_tokens // (rows * length))
        assert any(f"{rows * length:,} tokens" in line for line in header)
    assert found.by_cost
    assert TOKENS_PER_STEP == 2**20


@pytest.mark.check
@pytest.mark.parametrize("num_tokens", [2 * 10**6, 10**8, 10**10])
def test_no_plan_has_more_gpus_than_its_work_needs(num_tokens: int) -> None:
    """A start is at most a fifth of the hours, if any number of GPUs allows that."""
    request = PlanRequest(SMALL, 2**14, num_tokens)
    found = search(request, offer("h100-80gb:512"))
    fastest = found.by_time[0]
    assert fastest.seconds == fastest.startup_seconds + fastest.training_seconds
    assert fastest.startup_seconds > 120 + fastest.speed.step_seconds
    if num_tokens == 2 * 10**6:  # not even one GPU trains for long
        assert fastest.job.world_size == 1
    else:
        assert fastest.startup_seconds <= 0.25 * fastest.training_seconds
    assert fastest.usd_middle == pytest.approx(
        fastest.seconds / 3600 * fastest.job.world_size * (fastest.gpu.usd_middle or 0)
    )


@pytest.mark.check
def test_a_gpu_that_is_left_out_has_a_reason(snapshot: SnapshotAssertion) -> None:
    request = replace(REQUEST, max_length=2**16, budget_usd=40.0)
    found = search(request, offer("h100-80gb:8", "l40s:1", "rtx-6000-ada:8", "a100-80gb:8"), limit=1)
    poor = replace(request, budget_usd=found.by_cost[0].usd_middle * 1.01)
    assert [found.left_out, search(poor, offer("h100-80gb:8", "a100-80gb:8")).left_out] == snapshot


def test_prices_are_named_with_their_source(snapshot: SnapshotAssertion) -> None:
    h100, bare = TABLE.get_gpu("H100 80GB"), TABLE.get_gpu("rtx6000ada")
    assert format_prices([h100, h100, bare]).splitlines() == snapshot


@pytest.mark.parametrize("length", sample([4096, 16_385, 50_001, 100_000, 2**17], quick=[50_001], checked=()))
@pytest.mark.parametrize("is_lora", sample_every(2, [True, False]))
@pytest.mark.parametrize(
    "kinds", sample([["h100-80gb:8", "rtx-4090:2"], ["h200:16", "l40s:1"]], [["h200:16", "l40s:1"]])
)
def test_a_plan_equals_its_recipe(length: int, is_lora: bool, kinds: tuple[str, ...]) -> None:
    """The written recipe, read again, is the job that was judged: the same engine, the same row."""
    request = PlanRequest(SHAPES["Qwen/Qwen3-4B"], length, 10**8, is_lora)
    plan_results = search(request, offer(*kinds))
    for each in (*plan_results.by_cost, *plan_results.by_time):
        _, job = read_plan(each, request)
        assert job == each.job
        assert judge(job, measure_ledger(job), each.gpu) == each.fit
    assert plan_results.by_cost or plan_results.walls


@pytest.mark.check
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param("openai/gpt-oss-120b", "b300:8", marks=pytest.mark.full),
        ("microsoft/phi-4", "b300:1"),
        ("Qwen/Qwen3-4B", "h100-80gb:1"),
    ],
)
def test_some_levers_let_a_row_fit_where_all_of_them_do_not(name: str, kind: str) -> None:
    """Of those with the optimizer or weights on the GPU, none reaches beyond the length called the longest."""
    (longest,) = search_longest([PlanRequest(get_shape(name), 0, 10**9)], offer(kind))
    job, gpu = longest.candidate.job, longest.candidate.gpu
    assert longest.candidate.fit.verdict == "fits"
    beyond = replace(job, max_length=round(job.max_length * 1.02 / 1024) * 1024)
    for tiles, optimizer, param, host in itertools.product(
        (False, True), ("none", "cpu"), ("none", "cpu"), (0, 5, 15, job.shape.num_layers - 1)
    ):
        for chunks, recomputes in itertools.product((1, 2, job.shape.num_heads // job.layout.sp_size), (True, "full")):
            levers = Levers(recomputes, chunks, host, tiles, True, optimizer, param)
            assert not fits(replace(beyond, levers=levers), gpu), levers


@pytest.mark.check
def test_no_plan_is_faster_than_its_bound() -> None:
    """Also where a processor launches for longer than a GPU computes, so that leaf layers save time."""
    request = PlanRequest(get_shape("meta-llama/Llama-3.1-70B"), 2**17, 10**9)
    layouts = [each for each in _list_layouts(request, offer("b300:512", "l40s:64")) if each[0].layout.dp_size == 8]
    contest = Contest(request, layouts)
    settled = [
        (bound, contest.settle(number, at))
        for number, bounds in enumerate(contest.bounds)
        for at, bound in enumerate(bounds)
    ]
    plans = [(bound, plan) for bound, plan in settled if bound is not None and plan is not None]
    assert all(bound.seconds <= plan.seconds for bound, plan in plans)
    assert len(plans) > 20
    fastest = search(request, offer("b300:512")).by_time[0]  # a load with ZeRO-1 would be too close
    assert (fastest.job.world_size, fastest.job.levers.leaf_layers, fastest.job.zero_stage) == (512, True, 3)


@pytest.mark.parametrize(("gpus", "stage"), [("h100-80gb:64", 1), ("rtx-4090:8", 3)])
def test_a_plan_gathers_no_weights_where_the_gpu_would_wait_for_the_processor(gpus: str, stage: int) -> None:
    """Of a small model, whose weights all fit, on fast GPUs."""
    request = PlanRequest(SMALL, 2**14, 2 * 10**10)
    plan = search(request, offer(gpus)).by_time[0]
    assert plan.job.zero_stage == stage
    assert judge(plan.job, measure_ledger(plan.job), plan.gpu).verdict == "fits"
    assert read_plan(plan, request)[0].parallel.zero_stage == stage
    if stage == 1:
        sharded = replace(plan.job, zero_stage=3, levers=replace(plan.job.levers, leaf_layers=True))
        assert plan.speed.step_seconds < compute_speed(sharded, plan.gpu).step_seconds


def search_everything(request: PlanRequest, offers: list[Offer]) -> tuple[list[Candidate], list[Candidate]]:
    """Every layout on every kind with every set of levers, and no bound: the best of each kind by cost and by time."""
    plans = []
    for job, kinds in _list_layouts(request, offers):
        for gpu in kinds:
            levers = find_cheapest(job, gpu, list(COSTS))
            fit = try_levers(job, gpu, levers) if levers is not None else None
            if levers is None or fit is None or fit.verdict != "fits":
                continue
            settled = replace(job, levers=spend_what_is_left(job, gpu, levers, EVERY))
            settled = replace(settled, has_disk=uses_disk(settled.levers))
            fit = judge(settled, weigh_ledger(settled), gpu)
            plans.append(Candidate(gpu, settled, fit, compute_speed(settled, gpu), request.num_tokens))
    plans = keep_rings_that_win([plan for plan in plans if not find_excess(request, plan)])

    def list_best(order: Callable[[Candidate], tuple[float, ...]]) -> list[Candidate]:
        best = []
        for kind in {plan.gpu.key for plan in plans}:
            own = sorted((plan for plan in plans if plan.gpu.key == kind), key=order)
            worth = [plan for plan in own if plan.is_justified]
            fewest = min(plan.job.world_size for plan in own)
            best.append(worth[0] if worth else next(plan for plan in own if plan.job.world_size == fewest))
        shown = sorted(best, key=lambda plan: (not plan.is_justified, *order(plan)))[:5]
        return [replace(plan, fit=judge(plan.job, measure_ledger(plan.job), plan.gpu)) for plan in shown]

    by_cost = list_best(lambda plan: (round_cost(plan.usd_middle), plan.job.num_nodes, plan.seconds))
    return by_cost, list_best(lambda plan: (plan.seconds, plan.usd_middle))


@pytest.mark.parametrize(
    ("model", "length", "kinds", "more"),
    sample(
        [
            ("Qwen/Qwen3-4B", 2**15, ("h100-80gb:16", "l40s:2", "rtx-4090:2", "b300:1"), {}),
            ("Qwen/Qwen3-4B", 2**17, ("h100-80gb:8", "a100-40gb:2"), {"budget_usd": 130.0, "num_tokens": 10**8}),
            ("Qwen/Qwen3-0.6B", 2**13, ("h100-80gb:8", "rtx-4090:4"), {"num_tokens": 2 * 10**6}),
            ("Qwen/Qwen3-30B-A3B", 2**16, ("h200:8", "h100-80gb:4"), {"is_lora": True}),
            ("Qwen/Qwen2.5-7B", 2**18, ("h100-80gb:64", "b200:8"), {}),
            ("meta-llama/Llama-3.1-70B", 2**17, ("h100-80gb:32", "rtx-4090:64", "b200:8"), {}),
            ("openai/gpt-oss-20b", 2**16, ("h200:4", "rtx-pro-6000:2"), {"is_lora": True}),
            ("Qwen/Qwen3.5-9B", 2**17, ("h100-80gb:8", "l40s:4"), {"deadline_seconds": 4e5}),
            ("meta-llama/Llama-3.1-8B", 2**16, ("rtx-4090:2", "l40s:1"), {"is_lora": True, "quantize_base": "nf4"}),
            ("meta-llama/Llama-3.1-8B", 1200 * 1024, ("h200:2",), {"nvme_path": "/disk"}),
        ],
        quick=[("Qwen/Qwen3-0.6B", 2**13, ("h100-80gb:8", "rtx-4090:4"), {"num_tokens": 2 * 10**6})],
        checked=[("Qwen/Qwen3-30B-A3B", 2**16, ("h200:8", "h100-80gb:4"), {"is_lora": True})],
    ),
)
def test_the_search_lists_what_an_exhaustive_one_would(
    model: str, length: int, kinds: tuple[str, ...], more: dict[str, Any]
) -> None:
    """It settles the most promising layouts alone, and leaves out sets of levers by their strongest."""
    request, offers = PlanRequest(get_shape(model), length, **{"num_tokens": 10**9, **more}), offer(*kinds)
    found = search(request, offers, explains=False)
    assert found.by_cost
    assert (list(found.by_cost), list(found.by_time)) == search_everything(request, offers)


@pytest.mark.parametrize("kind", sample(["chat", "preference", "unpaired"], ["preference"]))
def test_a_plan_for_pairs_has_memory_for_their_prompts_keys(kind: RowType) -> None:
    answers = FirstAnswers("pairs.jsonl", "meta-llama/Llama-3.1-8B", 2**18, False, num_tokens=10**8, kind=kind)
    best = search(make_request(LLAMA, answers), offer("h100-80gb:8")).by_cost[0]
    assert best.job.num_branches == (kind != "chat")


def test_a_kind_without_a_price_comes_last_by_cost() -> None:
    plan_results = search(REQUEST, offer("b300:8", "h100-80gb:8"))
    assert [each.gpu.key for each in plan_results.by_cost] == ["h100-80gb", "b300"]
    assert plan_results.by_cost[1].usd is None


@pytest.mark.full
def test_a_bound_is_kept_or_named() -> None:
    free = search(REQUEST, offer("h100-80gb:64"))
    cheapest, fastest = free.by_cost[0], free.by_time[0]
    inside = search(replace(REQUEST, budget_usd=cheapest.usd_middle * 1.2), offer("h100-80gb:64"))
    assert all(each.usd_middle <= cheapest.usd_middle * 1.2 for each in inside.by_cost)
    broke = search(replace(REQUEST, budget_usd=1.0), offer("h100-80gb:64"))
    assert [wall.kind for wall in broke.walls] == ["price"]
    price, factor, *_ = re.findall(r"[\d,]+\b", broke.walls[0].message.partition("USD ")[2])
    assert price == factor, "of a budget of USD 1"
    assert "--method" not in broke.walls[0].hint  # adapters would not be that much cheaper
    late = search(replace(REQUEST, deadline_seconds=fastest.seconds / 3), offer("h100-80gb:64"))
    assert [wall.kind for wall in late.walls] == ["deadline"]
    assert "3 times" in late.walls[0].message
    (unknown,) = search(replace(REQUEST, budget_usd=100.0), offer("b300:8")).walls
    assert "no price" in unknown.message


@pytest.mark.full
def test_walls_of_memory_and_heads() -> None:
    plan_results = search(replace(REQUEST, max_length=2**24 - 2**16), offer("a100-40gb:64"))
    assert "of 40.0" in plan_results.walls[0].message
    assert "sp_size 48" in plan_results.walls[0].message, "a ring passes the number of heads"
    assert [wall.kind for wall in plan_results.walls] == ["gpu", "host"]
    assert [wall.kind for wall in search(replace(REQUEST, max_length=2**28), offer("h100-80gb:8")).walls] == ["heads"]
    poor = replace(TABLE.get_gpu("h100-80gb"), host_bytes_per_gpu=1 << 30)
    assert [wall.kind for wall in search(REQUEST, [Offer(poor, 8)]).walls] == ["host"]


@pytest.mark.full
def test_the_longest_row_of_8b_on_8_gpus() -> None:
    """The stored length changes with the ledger alone. Arctic's long-sequence training publishes 3.7 million tokens."""
    (longest,) = search_longest([PlanRequest(get_shape("meta-llama/Llama-3.1-8B"), 0, 10**9)], offer("h100-80gb:8"))
    assert longest.candidate.fit.verdict == "fits"
    assert longest.max_length == 6_995_968 >= 1.4 * 3_700_000


@pytest.mark.check
def test_a_plan_for_experts_and_for_adapters() -> None:
    moe = PlanRequest(SHAPES["Qwen/Qwen3-30B-A3B"], 2**17, 10**8)
    assert search(moe, offer("h200:8")).by_cost
    adapted = replace(moe, is_lora=True)
    hybrid = replace(adapted, shape=get_shape("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"))
    for request in (adapted, hybrid):
        recipe, _ = read_plan(search(request, offer("h200:8")).by_cost[0], request)
        assert list(check_lora_targets(recipe, request.shape)) == []
    short = replace(REQUEST, max_length=2**15)
    full, lora = (search(replace(short, is_lora=is_lora), offer("l40s:2")).by_cost for is_lora in (False, True))
    assert lora[0].job.levers.offload_optimizer == "none"
    assert not full or full[0].usd_middle >= lora[0].usd_middle


def test_a_ring_is_searched_and_its_gain_is_said(snapshot: SnapshotAssertion) -> None:
    """28 heads on 8 GPUs: rings of 2, 4 and 8 are tried. Layouts that differ in the ring alone are listed once, with
    the ring of `auto` unless another gains more than 1 %."""
    assert [layout.ring_size for layout in list_sp_layouts(QWEN, 8, 8)] == [2, 4, 8]
    found = search(replace(REQUEST, shape=QWEN), offer("h100-80gb:64"))
    layouts = [(plan.gpu.key, plan.job.layout) for plan in (*found.by_cost, *found.by_time)]
    assert any(layout.ring_size > 1 for _, layout in layouts)
    assert len(found.rings) == len({layout for _, layout in layouts if layout.ring_size > 1})
    assert list(found.rings) == snapshot
    gains = [float(gain) for line in found.rings for gain in re.findall(r"([\d.]+)% \w+ time", line)]
    assert all(gain >= 1 for gain in gains), "less is not worth a word"


@cache
def find_base() -> Candidate:
    return search(REQUEST, offer("h100-80gb:8")).by_cost[0]


def make_ring(ring_size: int, step_seconds: float, verdict: Verdict = "fits") -> Candidate:
    base = find_base()
    job = replace(base.job, shape=QWEN, layout=Layout(1, 1, 8, ring_size))
    speed = replace(base.speed, step_seconds=step_seconds)
    return replace(base, job=job, speed=speed, fit=replace(base.fit, verdict=verdict))


def test_a_ring_is_compared_with_heads_alone(snapshot: SnapshotAssertion) -> None:
    """Also where another ring is the nearest rival, or heads alone do not fit."""
    two, four, alone = make_ring(2, 100.0), make_ring(4, 101.0), make_ring(1, 99.0)
    slower = make_ring(1, 110.0)
    assert [
        explain_rings([two], tried)
        for tried in (
            [two, slower, make_ring(4, 102.0)],
            [two, slower, four],
            [two, alone],
            [two, make_ring(1, 90.0, "does_not_fit")],
        )
    ] == snapshot
    assert explain_rings([alone], [alone, two, four]) == [], "no ring is shown, so none gains enough"


def test_another_ring_must_gain() -> None:
    """The one of `auto` is 2 where heads are 28."""
    for best, seconds in ((2, {4: 99.5, 2: 100.0, 8: 101.0}), (4, {4: 98.0, 2: 100.0, 8: 97.5})):
        kept = keep_rings_that_win([make_ring(ring_size, each) for ring_size, each in seconds.items()])
        assert [plan.job.layout.ring_size for plan in kept] == [best]


@pytest.mark.check
def test_a_disk_is_searched_where_one_is_named(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """1.2 Mi tokens of 8B on one H200, whose host of 240 GiB is the wall. The written recipe is the job that was
    judged, the levers are those of `auto`, and the disk's bytes and their time are in the plan."""
    request, offers = PlanRequest(LLAMA, 1200 * 1024, 10**9), offer("h200:1")
    (wall,) = search(request, offers).walls
    assert (wall.kind, "--nvme-path" in wall.hint) == ("host", True)
    request = replace(request, nvme_path=str(tmp_path))
    found = search(request, offers)
    (plan,) = found.by_cost
    job, saved = plan.job, compute_activation_file_bytes(plan.job)
    assert (plan.fit.verdict, job.levers.offloaded_to) == ("fits", "nvme")
    recipe, read = read_plan(plan, request)
    assert (recipe.memory.nvme_path, read) == (str(tmp_path), job)
    open_memory = recipe.memory.model_validate({"nvme_path": str(tmp_path)})
    alike = compute_estimate(recipe.model_copy(update={"memory": open_memory}), LLAMA, plan.gpu)
    assert (alike.job.levers, alike.speed.step_seconds) == (job.levers, plan.speed.step_seconds)
    moved = plan.speed.parts["offload"] + plan.speed.hidden["offload"]
    assert moved >= 2 * saved / (plan.gpu.efficiency.disk_gb_s * 1e9) > 0
    described, text = describe_search(found, []), format_search(found, "a plan", [])
    assert described["by_cost"][0]["disk_bytes_per_node"] == compute_node_disk_bytes(job) >= saved
    assert re.findall(r".*--nvme-path.*|\d+ layers on disk", text) == snapshot
    poor = [Offer(replace(plan.gpu, host_bytes_per_gpu=1 << 30), 1)]
    assert [("--nvme-path" in wall.hint, wall.kind) for wall in search(request, poor).walls] == [(False, "host")]


@pytest.mark.check
def test_a_disk_is_left_alone_where_the_host_has_room(tmp_path: Path) -> None:
    offers = offer("h100-80gb:8")
    assert search(replace(REQUEST, nvme_path=str(tmp_path)), offers) == search(REQUEST, offers)


@pytest.mark.check
def test_the_longest_row_is_longer_with_a_disk(tmp_path: Path) -> None:
    requests = [PlanRequest(LLAMA, 0, 10**9, nvme_path=path) for path in (None, str(tmp_path))]
    without, with_disk = (search_longest([request], offer("h200:1"))[0] for request in requests)
    assert with_disk.max_length > 1.2 * without.max_length
    assert with_disk.candidate.fit.verdict == "fits"
    assert compute_node_disk_bytes(with_disk.candidate.job) > 0
