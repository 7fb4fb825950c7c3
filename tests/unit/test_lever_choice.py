"""Tests the choice of levers: each is on only where it is needed, in the order of cost, with a reason; suggestions
fit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.model_shapes import get_shape
from support.recipes import VALID, load, make_shape
from support.tiers import sample, sample_every
from syrupy.assertion import SnapshotAssertion

from ulysses_cli.hardware_table import load_hardware
from ulysses_cli.plan.hardware import Gpu
from ulysses_cli.plan.layout import Layout
from ulysses_cli.plan.ledger.job import Job, make_job
from ulysses_cli.plan.ledger.ledger import measure_ledger, weigh_ledger
from ulysses_cli.plan.ledger.machine import compute_node_disk_bytes
from ulysses_cli.plan.ledger.states import list_sub_groups
from ulysses_cli.plan.ledger.weights import get_weights
from ulysses_cli.plan.levers import ALL_GROUPS, Levers, compute_loss_tile_tokens, compute_num_mlp_tiles
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.planner.candidates import write_levers
from ulysses_cli.plan.planner.estimate import compute_estimate, explain_memory
from ulysses_cli.plan.planner.fit import find_max_length, fits, judge
from ulysses_cli.plan.planner.lever_choice import (
    COSTS,
    LeverChoice,
    choose_for_job,
    choose_levers,
    find_cheapest,
    find_longest,
    list_last_measures,
    list_strongest,
    read_levers,
)
from ulysses_cli.plan.planner.spending import SPENDING
from ulysses_cli.plan.recipe.loader import parse_recipe
from ulysses_cli.plan.recipe.sections import Lora
from ulysses_cli.plan.rules.check import check_recipe
from ulysses_cli.plan.speed import compute_speed

H100 = load_hardware().get_gpu("h100-80gb")
LLAMA_8B = make_shape(num_hidden_layers=32, max_position_embeddings=2**24)
EIGHT = ("parallel.sp_size=8",)
GIVEN = [Levers(), Levers(False, tiled_mlp=True), Levers("full", 2, 7, True, True, "cpu")]


def settle(
    *overrides: str, shape: ModelShape = LLAMA_8B, gpu: Gpu = H100, common: tuple[str, ...] = EIGHT
) -> tuple[LeverChoice, Job]:
    """What is chosen for a recipe, and the job that it becomes."""
    recipe = load(*common, *overrides).recipe
    choice = choose_levers(recipe, shape, gpu)
    return choice, choice.make_job(recipe, shape, gpu)


def change(job: Job, **levers: Any) -> Job:
    return replace(job, levers=replace(job.levers, **levers))


def make_room(job: Job, gpu: Gpu = H100, spare_bytes: int = 0) -> Gpu:
    """A GPU that just holds the job."""
    ledger = measure_ledger(job)
    return replace(gpu, memory_bytes=ledger.gpu_peak_bytes + ledger.uncertainty_bytes + spare_bytes)


def test_each_lever_is_what_the_recipe_says() -> None:
    """A lever without a setting of its own would be read from nowhere."""
    words = {
        "attention_head_chunks": 2, "activation_offloading": 3, "activation_offload_device": "nvme",
        "gradient_checkpointing": "full", "tiled_mlp": "true", "tiled_loss": "true", "offload_optimizer": "cpu",
        "offload_param": "cpu", "large_tiles": "true", "overlap_optimizer": 5, "nvme_path": "/tmp",
        "leaf_layers": "true", "overlap_exchange": "true", "saved_layers": 2,
    }  # fmt: skip
    levers, open_names = read_levers(
        load(*(f"memory.{name}={value}" for name, value in words.items())).recipe, LLAMA_8B
    )
    assert open_names == []
    assert [name for name, value in vars(levers).items() if value == getattr(Levers(), name)] == []
    _, open_names = read_levers(load().recipe, LLAMA_8B)
    assert open_names == [*vars(Levers())]
    most, _ = read_levers(load("memory.overlap_optimizer=true").recipe, LLAMA_8B)
    assert most.early_groups == ALL_GROUPS


def test_none_is_on_where_none_is_needed(snapshot: SnapshotAssertion) -> None:
    choice, _ = settle("data.max_length=16Ki")
    assert choice.levers == Levers(gradient_checkpointing=False, leaf_layers=True)
    assert choice.reasons == snapshot


SMALL = get_shape("Qwen/Qwen3-0.6B")
SHORT = ("parallel.sp_size=1", "parallel.dp_shard_size=8", "data.max_length=4Ki")


def test_layers_are_gathered_at_once_where_the_gpu_would_wait(snapshot: SnapshotAssertion) -> None:
    reasons = {}
    for word, is_gathered in (
        ("run.seed=1", True),
        ("lora.r=8", True),
        ("memory.leaf_layers=false", False),
        ("parallel.zero_stage=2", False),
        ("parallel.dp_shard_size=1", False),
        ("data.max_length=64Ki", False),
    ):
        choice, _ = settle(word, shape=SMALL, common=SHORT)
        assert (choice.fit.verdict, choice.levers.leaf_layers) == ("fits", is_gathered), word
        reasons[word] = choice.reasons.get("leaf_layers")
    assert reasons == snapshot


@pytest.mark.parametrize(
    ("words", "gpu", "stage"),
    sample_every(
        4,
        [
            ((), H100, 1),
            (("lora.r=8",), H100, 1),
            (("train.gradient_accumulation_steps=4", "memory.leaf_layers=false"), H100, 2),
            (("train.gradient_accumulation_steps=4",), H100, 3),
            (("train.gradient_accumulation_steps=4", "model.dtype=float32"), H100, 1),
            (("data.max_length=64Ki",), H100, 3),
            ((), replace(H100, memory_bytes=2 << 30), 3),
            ((), replace(H100, memory_bytes=5 << 30), 3),
            (("parallel.dp_shard_size=1",), H100, 3),
            (("memory.offload_param=cpu",), H100, 3),
            (("train.optim=muon",), H100, 3),
            (("parallel.dp_shard_size=4", "parallel.dp_replicate_size=2"), H100, 3),
            (("memory.leaf_layers=true",), H100, 3),
            (("lora.r=8", "lora.quantize_base=nf4"), H100, 2),
            (("lora.r=8", "lora.use_dora=true"), H100, 2),
            (("parallel.zero_stage=3",), H100, 3),
            ((), None, 3),
        ],
    ),
)
def test_a_stage_that_is_auto_is_the_fastest_that_fits(
    words: tuple[str, ...], gpu: Gpu | None, stage: int, snapshot: SnapshotAssertion
) -> None:
    """What was chosen is what a recipe gets in which it is written."""
    loaded = load(*SHORT, "parallel.zero_stage=auto", *words)
    assert [problem for problem in check_recipe(loaded, SMALL) if problem.key != "data.max_length"] == []
    recipe = loaded.recipe
    choice = choose_levers(recipe, SMALL, gpu)
    assert (choice.zero_stage, choice.stage_reason) == (stage, snapshot)
    settled = choice.settle_stage(recipe)
    assert settled == load(*SHORT, *words, f"parallel.zero_stage={stage}").recipe
    if gpu is None:
        assert (choice.levers, choice.fit) == (Levers(), None)
        return
    estimate = compute_estimate(recipe, SMALL, gpu)
    assert estimate.job == make_job(settled, SMALL, choice.levers)
    assert (estimate.choice, estimate.fit) == (choice, choice.fit)
    if stage < recipe.zero_stage:
        assert choice.fit.verdict == "fits"
        sharded = compute_estimate(load(*SHORT, *words).recipe, SMALL, gpu)
        assert estimate.speed.step_seconds < sharded.speed.step_seconds
        assert estimate.max_length == sharded.max_length


def test_a_layer_is_not_gathered_at_once_where_its_gradients_have_no_room(snapshot: SnapshotAssertion) -> None:
    words = ("data.max_length=4Ki", "memory.gradient_checkpointing=true")
    _, without = settle(*words, "memory.leaf_layers=false")
    choice, _ = settle(*words, gpu=make_room(without, spare_bytes=64 << 20))
    assert (choice.levers.leaf_layers, choice.reasons["leaf_layers"]) == (False, snapshot)


L40S = load_hardware().get_gpu("l40s")
FOUR = ("parallel.sp_size=4", "data.max_length=64Ki")


def overlap(*words: str, gpu: Gpu = L40S) -> tuple[LeverChoice, Job]:
    """On GPUs that PCIe joins."""
    return settle(*words, gpu=gpu, common=FOUR)


@pytest.mark.parametrize(
    ("words", "overlaps"),
    [
        ((), True),
        (("memory.attention_head_chunks=2",), True),
        (("memory.attention_head_chunks=1",), False),
        (("parallel.ring_size=4",), False),
        (("parallel.sp_size=32", "parallel.ring_size=1"), False),
        (("data.max_length=8Ki",), False),
        (("data.max_length=1Mi",), False),
    ],
)
def test_chunks_overlap_where_the_exchange_costs_more_than_3_percent(
    words: tuple[str, ...], overlaps: bool, snapshot: SnapshotAssertion
) -> None:
    """The chosen number of chunks is the fastest of those that are large enough."""
    choice, job = overlap(*words)
    assert choice.levers.overlap_exchange is overlaps
    assert [choice.reasons.get(name) for name in ("overlap_exchange", "head_chunks")] == snapshot
    if not overlaps:
        assert choice.levers == overlap(*words, "memory.overlap_exchange=false")[0].levers
        return
    assert choice.fit.verdict == "fits"
    own = compute_speed(job, L40S).step_seconds
    in_turn = compute_speed(change(job, overlap_exchange=False), L40S)
    assert in_turn.parts["exchange"] > 0.03 * in_turn.step_seconds
    if "head_chunks" in choice.reasons:
        assert own == min(compute_speed(change(job, head_chunks=chunks), L40S).step_seconds for chunks in (2, 4))
        at_once = change(job, head_chunks=1, overlap_exchange=False)
        assert own < 0.99 * compute_speed(at_once, L40S).step_seconds


def test_chunks_overlap_where_the_recipe_says_so() -> None:
    """Also where the exchange costs little; then their number is still open."""
    for length in ("8Ki", "512Ki"):
        few = overlap("memory.overlap_exchange=true", f"data.max_length={length}")[0].levers
        assert few.overlap_exchange
        assert few.head_chunks > 1
    off = overlap("memory.overlap_exchange=false")[0].levers
    assert (off.overlap_exchange, off.head_chunks) == (False, 1)


def test_chunks_do_not_overlap_where_two_have_no_room(snapshot: SnapshotAssertion) -> None:
    """A GPU that just holds a run whose attention needs most."""
    words = [f"memory.{name}=false" for name in ("large_tiles", "leaf_layers", "overlap_optimizer")]
    words += [f"memory.{name}=true" for name in ("tiled_mlp", "tiled_loss", "gradient_checkpointing")]
    words += ["data.max_length=256Ki", "memory.attention_head_chunks=2", "memory.offload_optimizer=cpu"]
    words += ["memory.activation_offloading=true", "memory.offload_param=none"]
    without, with_it = (overlap(*words, f"memory.overlap_exchange={value}")[1] for value in ("false", "true"))
    assert weigh_ledger(with_it).gpu_peak_bytes > weigh_ledger(without).gpu_peak_bytes + (1 << 30)
    found, job = overlap(*words, gpu=make_room(without, L40S, 256 << 20))
    assert (job, found.reasons["overlap_exchange"]) == (without, snapshot)


def test_no_layer_is_computed_twice_where_the_gpu_has_room() -> None:
    """At 64Ki it has if the loss is in tiles, at 128Ki it has for half of the layers."""
    jobs = {length: settle(f"data.max_length={length}")[1] for length in ("32Ki", "64Ki", "128Ki")}
    saves = {length: (job.levers.gradient_checkpointing, job.levers.tiled_loss) for length, job in jobs.items()}
    assert saves == {"32Ki": (False, False), "64Ki": (False, True), "128Ki": (True, True)}
    half = jobs["128Ki"].levers.saved_layers
    assert 12 <= half <= 20
    assert judge(jobs["128Ki"], measure_ledger(jobs["128Ki"]), H100).verdict == "fits"
    for too_much in (change(jobs["128Ki"], saved_layers=half + 1), change(jobs["64Ki"], tiled_loss=False)):
        assert judge(too_much, weigh_ledger(too_much), H100).verdict != "fits"
    for length, least_gain in (("32Ki", 1.3), ("64Ki", 1.09), ("128Ki", 1.03)):
        recomputed = replace(jobs[length], levers=Levers())
        gain = compute_speed(recomputed, H100).step_seconds / compute_speed(jobs[length], H100).step_seconds
        assert gain >= least_gain
    given = settle("data.max_length=16Ki", "memory.gradient_checkpointing=true", "memory.leaf_layers=false")[0]
    assert given.levers == Levers()


def test_every_lever_that_is_on_is_needed(snapshot: SnapshotAssertion) -> None:
    reasons = {}
    for length in ("512Ki", "1Mi", "1536Ki"):
        choice, job = settle(f"data.max_length={length}")
        assert fits(job, H100)
        for name, reason in choice.reasons.items():
            off = getattr(Levers(), name)
            if getattr(choice.levers, name) != off and name not in SPENDING:
                assert not fits(change(job, **{name: off}), H100), (length, name)
                reasons[f"{length} {name}"] = reason
    assert reasons == snapshot


@pytest.mark.parametrize("length", sample(["832Ki", "1Mi", "1280Ki", "3Mi"], quick=["1Mi"], checked=()))
def test_no_more_layers_are_offloaded_than_needed(length: str) -> None:
    """Compares with every number, tried one by one: the smallest that fits."""
    choice, job = settle(f"data.max_length={length}")
    tried = [change(job, offloaded_layers=num_layers) for num_layers in range(33)]
    verdicts = [judge(each, weigh_ledger(each), H100).verdict for each in tried]
    assert verdicts.index("fits") == choice.levers.offloaded_layers > 0
    assert choice.reasons["offloaded_layers"].startswith(f"{choice.levers.offloaded_layers} of 32 ")


def test_layers_stay_where_the_host_has_no_room_for_them() -> None:
    """Neither memory holds what all layers save; both together do."""
    words = ("data.max_length=1Mi", "memory.offload_optimizer=none")
    all_levers = make_job(
        load(*EIGHT, *words).recipe, LLAMA_8B, Levers(offloaded_layers=31, tiled_loss=True, tiled_mlp=True)
    )
    ledger = weigh_ledger(all_levers)
    tight = replace(H100, host_bytes_per_gpu=ledger.host_peak_bytes * 7 // 8 // 8)
    assert judge(all_levers, ledger, tight).wall == "host"
    choice, _ = settle(*words, gpu=tight)
    assert choice.fit.verdict == "fits"
    assert 0 < choice.levers.offloaded_layers < 30
    assert choice.levers.gradient_checkpointing is True
    assert find_longest(replace(all_levers, levers=Levers()), tight)[0] > 1 << 20


@pytest.mark.check
@pytest.mark.parametrize(
    ("name", "kind", "lora"),
    sample(
        [("Qwen/Qwen3-30B-A3B", "a100-80gb", Lora(r=16)), ("google/gemma-2-9b", "h200", None)],
        quick=[("google/gemma-2-9b", "h200", None)],
        checked=(),
    ),
)
def test_the_longest_row_offloads_what_the_host_has_room_for(name: str, kind: str, lora: Lora | None) -> None:
    """Where host memory ends first, with some layers and with none, no number of them reaches farther."""
    shape, gpu = get_shape(name), load_hardware().get_gpu(kind)
    job = Job(shape, Layout(), 4096, Levers(), lora=lora)
    longest, _ = find_longest(job, gpu)
    beyond = replace(job, max_length=round(longest * 1.02 / 128) * 128)
    for levers in list_strongest(beyond):
        for num_layers in range(0, shape.num_layers, 4) if levers.offloaded_layers else (0,):
            tried = replace(beyond, levers=replace(levers, offloaded_layers=num_layers))
            assert not fits(tried, gpu), tried.levers


@pytest.mark.check
def test_a_suggestion_leaves_a_number_that_fits() -> None:
    off = ("tiled_mlp=false", "tiled_loss=false", "offload_optimizer=none", "offload_param=none")
    overrides = (*EIGHT, "data.max_length=128Ki", "memory.attention_head_chunks=1", *(f"memory.{each}" for each in off))
    gpu = load_hardware().get_gpu("rtx-5090")
    estimate = compute_estimate(load(*overrides, "memory.activation_offloading=true").recipe, LLAMA_8B, gpu)
    assert estimate.fit.verdict == "does_not_fit"
    assert estimate.suggestion == "memory:\n  tiled_loss: true\n"


def test_where_nothing_fits_no_more_is_offloaded_than_the_gpu_needs() -> None:
    tight = replace(H100, host_bytes_per_gpu=10 << 30)
    choice, job = settle("data.max_length=1Mi", "memory.gradient_checkpointing=true", gpu=tight)
    assert choice.fit.wall == "host"
    fewer = change(job, offloaded_layers=job.levers.offloaded_layers - 1)
    assert choice.fit.spare_bytes >= 0 > judge(fewer, weigh_ledger(fewer), tight).spare_bytes


@pytest.mark.parametrize(
    ("value", "num_layers"), [("true", 30), ("false", 0), ("0", 0), ("1", 1), ("12", 12), ("32", 32)]
)
def test_layers_to_offload_are_all_or_a_number(value: str, num_layers: int) -> None:
    levers, open_names = read_levers(load(f"memory.activation_offloading={value}").recipe, LLAMA_8B)
    assert levers == Levers(offloaded_layers=num_layers)
    assert "offloaded_layers" not in open_names
    rest = ["data: {datasets: [{path: a}], max_length: 8}", "model: {name_or_path: a/b}"]
    assert read_levers(parse_recipe("\n".join([*write_levers(levers), *rest])).recipe, LLAMA_8B)[0] == levers


def test_kernels_that_count_in_32_bits_turn_levers_on(snapshot: SnapshotAssertion) -> None:
    """All 4 heads of 5 Mi tokens pass 2^31 elements long before they pass this GPU's memory. Whole logits do so at
    128 Ki tokens and may, if the recipe says so."""
    huge = replace(H100, memory_bytes=10**15, host_bytes_per_gpu=10**15)
    choice, _ = settle("data.max_length=5Mi", gpu=huge)
    assert (choice.levers.head_chunks, choice.levers.tiled_loss, choice.levers.tiled_mlp) == (2, True, True)
    assert [choice.reasons[name] for name in ("head_chunks", "tiled_loss")] == snapshot
    whole, _ = settle("data.max_length=256Ki", "memory.tiled_loss=false", gpu=huge)
    assert (whole.fit.verdict, whole.levers) == ("fits", Levers())


def test_weights_leave_the_gpu_last(snapshot: SnapshotAssertion) -> None:
    """On one GPU of 20 GB, states on the host are not enough for 8 B parameters; with weights there too they are."""
    small = replace(H100, memory_bytes=20 << 30, host_bytes_per_gpu=400 << 30)
    choice, kept = (
        settle("parallel.sp_size=1", "data.max_length=4Ki", f"memory.offload_param={value}", gpu=small)[0]
        for value in ("auto", "none")
    )
    assert (choice.fit.verdict, choice.levers.offload_param, choice.reasons["offload_param"]) == (
        "fits",
        "cpu",
        snapshot,
    )
    assert (kept.fit.verdict, kept.levers.offload_optimizer) == ("too_close", "cpu")


def test_a_suggestion_fits_when_it_is_followed() -> None:
    words = [f"memory.{name}=false" for name in ("tiled_mlp", "tiled_loss", "activation_offloading")]
    words += [*EIGHT, "data.max_length=128Ki", "memory.offload_optimizer=none", "memory.attention_head_chunks=1"]
    small = replace(H100, memory_bytes=40 << 30)
    estimate = compute_estimate(load(*words).recipe, LLAMA_8B, small)
    assert estimate.fit.verdict == "does_not_fit"
    name, *lines = estimate.suggestion.splitlines()
    assert name == "memory:"
    changes = [f"memory.{line.strip().replace(': ', '=')}" for line in lines]
    assert compute_estimate(load(*words, *changes).recipe, LLAMA_8B, small).fit.verdict == "fits"
    assert parse_recipe(
        estimate.suggestion + "data: {datasets: [{path: a}], max_length: 8}\nmodel: {name_or_path: a/b}"
    )


def test_a_suggestion_ends_large_tiles_first_and_leaves_early_steps() -> None:
    """Also where the recipe asks for them, and after memory ran out."""
    words = [*EIGHT, "data.max_length=256Ki", "memory.tiled_loss=true", "memory.tiled_mlp=true"]
    words += ["memory.offload_optimizer=cpu", "memory.offload_param=none", "memory.activation_offloading=0"]
    words += ["memory.overlap_optimizer=1", "memory.attention_head_chunks=1", "memory.gradient_checkpointing=true"]
    recipe = load(*words, "memory.large_tiles=true").recipe
    job = make_job(recipe, LLAMA_8B, read_levers(recipe, LLAMA_8B)[0], gpus_per_node=8)
    rooms = [make_room(change(job, large_tiles=is_large)).memory_bytes for is_large in (True, False)]
    between = replace(H100, memory_bytes=sum(rooms) // 2)
    assert compute_estimate(recipe, LLAMA_8B, between).suggestion == "memory:\n  large_tiles: false\n"
    levers = choose_levers(recipe, LLAMA_8B, H100).levers
    assert explain_memory(recipe, LLAMA_8B, levers, H100).endswith("  large_tiles: false\n")


@pytest.mark.full
def test_no_suggestion_where_none_helps() -> None:
    estimate = compute_estimate(load("data.max_length=8Mi").recipe, LLAMA_8B, H100)
    assert estimate.fit.verdict == "does_not_fit"
    assert estimate.suggestion == ""
    assert 0 < estimate.max_length <= estimate.max_length_all_levers < 8 << 20


@pytest.mark.parametrize("length", sample(["256Ki", "2Mi"], quick=["256Ki"], checked=()))
def test_the_choice_is_the_cheapest_that_fits(length: str) -> None:
    """Compares with every combination, tried one by one."""
    recipe = load(*EIGHT, f"data.max_length={length}").recipe
    levers, open_names = read_levers(recipe, LLAMA_8B)
    job = make_job(recipe, LLAMA_8B, levers)
    match = find_cheapest(job, H100, open_names)
    order = {"tiled_loss": True, "tiled_mlp": True, "offloaded_layers": 31}
    for flags in range(8):
        if fits(change(job, **{name: order[name] * (flags >> bit & 1) for bit, name in enumerate(order)}), H100):
            assert sum(bool(getattr(match, name)) << bit for bit, name in enumerate(order)) <= flags
            break


@pytest.mark.parametrize("kind", sample(["h100-80gb", "rtx-4090", "b300"], quick=["h100-80gb"], checked=()))
@pytest.mark.parametrize(
    "name",
    sample(["Qwen/Qwen3-4B", "openai/gpt-oss-20b", "google/gemma-2-9b"], quick=["openai/gpt-oss-20b"], checked=()),
)
@pytest.mark.parametrize("levers", sample(GIVEN, quick=(), checked=GIVEN[2:]))
def test_all_levers_reach_at_least_as_far_as_the_given_ones(name: str, kind: str, levers: Levers) -> None:
    gpu = load_hardware().get_gpu(kind)
    for layout in (Layout(1, 8, 1), Layout(1, 2, 4), Layout()):
        job = Job(get_shape(name), layout, 4096, levers)
        assert find_longest(job, gpu)[0] >= find_max_length(job, gpu)


@pytest.mark.check
def test_tiles_of_the_mlp_are_not_chosen_where_they_take_more() -> None:
    """With experts, the float32 sums of gradients are larger than what a short row saves."""
    job = Job(get_shape("openai/gpt-oss-120b"), Layout(1, 8, 1), 8192, Levers())
    strongest = replace(job, levers=Levers("full", 1, 31, False, True, "cpu"))

    def peak(job: Job, is_on: bool) -> int:
        return weigh_ledger(change(job, tiled_mlp=is_on)).gpu_peak_bytes

    assert peak(strongest, True) > peak(strongest, False)
    for share in (2, 1.1, 0.5):
        gpu = replace(H100, memory_bytes=int(peak(strongest, False) * share), host_bytes_per_gpu=10**13)
        levers = choose_for_job(job, gpu, list(COSTS))[0].levers
        chosen = replace(job, levers=levers)
        assert weigh_ledger(chosen).gpu_peak_bytes <= peak(chosen, False)


H200 = load_hardware().get_gpu("h200")
ONE_GPU = ("parallel.sp_size=1", "parallel.dp_shard_size=1", "data.max_length=32Ki", "memory.offload_optimizer=cpu")


def test_as_many_groups_step_early_as_the_host_has_room_for(snapshot: SnapshotAssertion) -> None:
    gpu = replace(H200, host_bytes_per_gpu=200 << 30)
    choice, job = settle(gpu=gpu, common=ONE_GPU)
    early = choice.levers.early_groups
    groups = list_sub_groups(get_weights(job), 1, job.engine.sub_group)
    assert 0 < early < len(groups) - 1
    assert fits(job, gpu)
    assert not fits(change(job, early_groups=early + 1), gpu)
    copies = weigh_ledger(job).host_peak_bytes - weigh_ledger(change(job, early_groups=0)).host_peak_bytes
    assert copies == 12 * sum(groups[-early:])
    assert (len(groups), choice.reasons["early_groups"]) == snapshot


def test_no_group_steps_early_where_none_can(snapshot: SnapshotAssertion) -> None:
    reasons = {}
    for word in ("memory.offload_optimizer=none", "parallel.zero_stage=2", "lora.r=8"):
        choice, _ = settle(word, gpu=H200, common=ONE_GPU)
        assert choice.levers.early_groups == 0
        reasons[word] = choice.reasons["early_groups"]
    assert reasons == snapshot


def test_tiles_are_large_where_there_is_room(snapshot: SnapshotAssertion) -> None:
    words = (*ONE_GPU[:3], "train.optim=adamw_8bit")
    choice, job = settle(gpu=H200, common=words)
    assert choice.levers.tiled_loss
    assert choice.levers.large_tiles
    short = change(replace(job, max_length=4096), tiled_mlp=True, large_tiles=False)
    large = change(short, large_tiles=True)
    assert weigh_ledger(large).gpu_peak_bytes > weigh_ledger(short).gpu_peak_bytes + (1 << 30)
    full, _ = choose_for_job(short, make_room(short, H200), ["large_tiles"])
    assert (full.levers.large_tiles, full.reasons["large_tiles"]) == (False, snapshot)
    assert not settle("memory.large_tiles=false", gpu=H200, common=words)[0].levers.large_tiles


def test_sizes_of_tiles() -> None:
    vocabulary = 128_256
    assert compute_loss_tile_tokens(1 << 20, vocabulary, 4096) == 512
    assert compute_loss_tile_tokens(1 << 20, vocabulary, 4096, is_large=True) == 2048
    assert compute_loss_tile_tokens(1 << 20, vocabulary, 2048, is_large=True) == 4096
    assert compute_loss_tile_tokens(1000, vocabulary, 2048, is_large=True) == 1000
    assert compute_loss_tile_tokens(1 << 20, 4096, 1024, is_large=True) == 16_384  # as without: it is larger
    assert compute_num_mlp_tiles(1 << 20, 1024) == 1024
    assert compute_num_mlp_tiles(1 << 20, 1024, is_large=True) == 256
    assert compute_num_mlp_tiles(1 << 20, 8192, is_large=True) == compute_num_mlp_tiles(1 << 20, 8192) == 128


LONG_ROW = ("data.max_length=1200Ki", "parallel.sp_size=1", "model.rope_scaling.type=yarn")


def test_a_host_that_is_too_small_drops_results_before_it_is_a_wall(snapshot: SnapshotAssertion) -> None:
    """The fewest bytes of the host, though attention is computed twice; a reason says what it would take."""
    for gib, recomputes in ((240, True), (40, "full")):
        choice, _ = settle("data.max_length=2Mi", gpu=replace(H100, host_bytes_per_gpu=gib << 30))
        assert (choice.fit.verdict, choice.levers.gradient_checkpointing) == ("fits", recomputes)
    assert choice.reasons["gradient_checkpointing"] == snapshot


@pytest.mark.check
@pytest.mark.parametrize("disk_gb_s", sample([5.0, 0.05], quick=[0.05], checked=()))
def test_a_disk_is_weighed_against_computing_attention_twice(disk_gb_s: float, tmp_path: Path) -> None:
    """With a slow disk, the second pass of attention is faster; the choice is the faster of all that fit."""
    disk = f"memory.nvme_path={tmp_path}"
    job = make_job(load(*EIGHT, "data.max_length=2Mi", disk).recipe, LLAMA_8B, Levers())
    gpu = replace(H100, host_bytes_per_gpu=40 << 30, efficiency=replace(H100.efficiency, disk_gb_s=disk_gb_s))
    names = list(COSTS)
    found = replace(job, levers=find_cheapest(job, gpu, names))
    assert fits(found, gpu)
    assert (found.levers.offloaded_to == "nvme") == (disk_gb_s == 5.0)
    assert (found.levers.gradient_checkpointing == "full") == (disk_gb_s != 5.0)
    for measure in list_last_measures(job, names):
        given = replace(change(job, **measure), has_disk=False)
        other = find_cheapest(given, gpu, [name for name in names if name not in measure])
        if other is not None and fits(replace(job, levers=other), gpu):
            other_seconds = compute_speed(replace(job, levers=other), gpu).step_seconds
            assert compute_speed(found, gpu).step_seconds <= other_seconds


@pytest.mark.check
@pytest.mark.parametrize(("accumulation", "on_disk"), [(1, ("cpu", "nvme")), (16, ("nvme", "cpu"))])
def test_states_or_saved_results_go_to_the_disk(
    accumulation: int, on_disk: tuple[str, str], tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    """One host of 200 GiB holds one of the two. States pass the disk once per step, results once per row: of many rows
    in a step, the states are the faster to put there."""
    gpu = replace(H100, host_bytes_per_gpu=200 << 30)
    words = ("parallel.sp_size=1", "data.max_length=256Ki", f"memory.nvme_path={tmp_path}",
             f"train.gradient_accumulation_steps={accumulation}")  # fmt: skip

    def measure(*others: str) -> tuple[LeverChoice, float]:
        choice, job = settle(*others, gpu=gpu, common=words)
        return choice, compute_speed(job, gpu).step_seconds if choice.fit.verdict == "fits" else float("inf")

    choice, seconds = measure()
    assert (choice.levers.offload_optimizer, choice.levers.offloaded_to) == on_disk
    times = {
        (states, saved): measure(f"memory.offload_optimizer={states}", f"memory.activation_offload_device={saved}")[1]
        for states in ("none", "cpu", "nvme")
        for saved in ("cpu", "nvme")
    }
    assert min(times, key=lambda kept: times[kept]) == on_disk
    assert seconds == min(times.values()) < times["cpu", "cpu"], times
    assert choice.reasons["offload_optimizer"] == snapshot


@pytest.mark.check
def test_one_gpu_trains_on_a_row_past_2_to_the_31_with_a_disk(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """1.2 Mi tokens of 8B on one H200: what no host of 240 GiB holds waits on the disk. Without one the estimate says
    how much host memory it takes, and what a disk would hold."""
    with_disk = compute_estimate(load(*LONG_ROW, f"memory.nvme_path={tmp_path}").recipe, LLAMA_8B, H200)
    assert (with_disk.fit.verdict, with_disk.job.levers.offloaded_to) == ("fits", "nvme")
    assert compute_node_disk_bytes(with_disk.job) > 500 << 30
    without = compute_estimate(load(*LONG_ROW).recipe, LLAMA_8B, H200)
    assert (without.fit.verdict, without.fit.wall) == ("does_not_fit", "host")
    assert without.fit.host_peak_bytes > 300 << 30
    assert without.suggestion == snapshot
    changed = load(*LONG_ROW, text=VALID + without.suggestion).recipe
    assert compute_estimate(changed, LLAMA_8B, H200).fit.verdict == "fits"
