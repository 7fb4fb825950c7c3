"""Tests the choice of levers: each is on only where it is needed, in the order of cost, with a reason; suggestions
fit."""

from dataclasses import replace
from pathlib import Path

import pytest
from support.model_shapes import get_shape
from support.recipes import VALID, load, make_shape
from support.tiers import sample, sample_every

from ulysses_cli.hardware_table import load_hardware
from ulysses_cli.plan.hardware import Gpu
from ulysses_cli.plan.layout import Layout
from ulysses_cli.plan.ledger.job import Job, is_indexable, make_job
from ulysses_cli.plan.ledger.ledger import measure_ledger, weigh_ledger
from ulysses_cli.plan.ledger.machine import compute_node_disk_bytes
from ulysses_cli.plan.ledger.states import list_sub_groups
from ulysses_cli.plan.ledger.weights import get_weights
from ulysses_cli.plan.levers import ALL_GROUPS, Levers, compute_loss_tile_tokens, compute_num_mlp_tiles
from ulysses_cli.plan.planner.candidates import write_levers
from ulysses_cli.plan.planner.estimate import compute_estimate, explain_memory
from ulysses_cli.plan.planner.fit import find_max_length, fits, judge
from ulysses_cli.plan.planner.lever_choice import (
    COSTS,
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


def choose(*overrides: str):
    return choose_levers(load(*EIGHT, *overrides).recipe, LLAMA_8B, H100)


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
    most, _ = read_levers(load("memory.activation_offloading=true", "memory.overlap_optimizer=true").recipe, LLAMA_8B)
    assert (most.offloaded_layers, most.early_groups) == (30, ALL_GROUPS)


def test_none_is_on_where_none_is_needed() -> None:
    choice = choose("data.max_length=16Ki")
    assert choice.levers == Levers(gradient_checkpointing=False, leaf_layers=True)
    reasons = dict(choice.reasons)
    assert reasons.pop("gradient_checkpointing").startswith("the GPU has room for all that layers save: the peak is ")
    assert reasons.pop("large_tiles") == "nothing is tiled"
    assert reasons.pop("saved_layers") == "no layer is computed again"
    assert reasons.pop("early_groups") == "the optimizer is not in host memory"
    assert reasons.pop("leaf_layers") == "the GPU would wait for the processor"
    assert reasons.pop("overlap_exchange") == "the exchange takes 2.5% of a step"
    assert set(reasons) == {
        "head_chunks", "offloaded_layers", "tiled_mlp", "tiled_loss", "offload_optimizer", "offload_param",
        "offloaded_to",
    }  # fmt: skip
    assert all(reason.startswith("not needed: the peak is ") for reason in reasons.values())


@pytest.mark.parametrize(
    ("words", "gpu", "why"),
    [
        ((), H100, "the GPU would wait for the processor"),
        (("memory.leaf_layers=false",), H100, None),
        (("parallel.zero_stage=2",), H100, "ZeRO stage 2 gathers no weights"),
        (("lora.r=8",), H100, "the GPU would wait for the processor"),
        (("parallel.sp_size=1", "parallel.dp_shard_size=1"), H100, "one rank gathers nothing"),
        (("data.max_length=64Ki",), H100, "the GPU does not wait for the processor"),
    ],
)
def test_layers_are_gathered_at_once_where_the_gpu_would_wait(
    words: tuple[str, ...], gpu: Gpu, why: str | None
) -> None:
    """Of a small model with short rows."""
    recipe = load("parallel.sp_size=1", "parallel.dp_shard_size=8", "data.max_length=4Ki", *words).recipe
    choice = choose_levers(recipe, get_shape("Qwen/Qwen3-0.6B"), gpu)
    assert choice.fit is not None
    assert choice.fit.verdict == "fits"
    assert choice.levers.leaf_layers is (why == "the GPU would wait for the processor")
    assert choice.reasons.get("leaf_layers", "").startswith(why or "")


WAITS = "all weights fit, and the GPU would wait for the processor"


@pytest.mark.parametrize(
    ("words", "gpu", "stage", "why"),
    sample_every(
        4,
        [
            ((), H100, 1, WAITS),
            (("lora.r=8",), H100, 1, WAITS),
            (("train.gradient_accumulation_steps=4", "memory.leaf_layers=false"), H100, 2, WAITS),
            (("train.gradient_accumulation_steps=4",), H100, 3, "with a lower one a step would take about as long"),
            (("train.gradient_accumulation_steps=4", "model.dtype=float32"), H100, 1, WAITS),
            (("data.max_length=64Ki",), H100, 3, "the GPU does not wait for the processor"),
            ((), replace(H100, memory_bytes=2 << 30), 3, "not all weights and gradients would fit"),
            ((), replace(H100, memory_bytes=5 << 30), 3, "not all weights and gradients would fit"),
            (("parallel.dp_shard_size=1",), H100, 3, "one process gathers nothing"),
            (("memory.offload_param=cpu",), H100, 3, "other settings need stage 3"),
            (("train.optim=muon",), H100, 3, "other settings need stage 3"),
            (("parallel.dp_shard_size=4", "parallel.dp_replicate_size=2"), H100, 3, "other settings need stage 3"),
            (("memory.leaf_layers=true",), H100, 3, "memory.leaf_layers and memory.overlap_optimizer need stage 3"),
            (("lora.r=8", "lora.quantize_base=nf4"), H100, 2, "each GPU holds the whole base"),
            (("lora.r=8", "lora.use_dora=true"), H100, 2, "each GPU holds the whole base"),
            (("parallel.zero_stage=3",), H100, 3, "as the recipe says"),
            ((), None, 3, "no GPU is named"),
        ],
    ),
)
def test_a_stage_that_is_auto_is_the_fastest_that_fits(
    words: tuple[str, ...], gpu: Gpu | None, stage: int, why: str
) -> None:
    """Of a small model with short rows. What was chosen is what a recipe gets in which it is written."""
    common = ("parallel.sp_size=1", "parallel.dp_shard_size=8", "data.max_length=4Ki")
    loaded = load(*common, "parallel.zero_stage=auto", *words)
    small = get_shape("Qwen/Qwen3-0.6B")
    assert [problem for problem in check_recipe(loaded, small) if problem.key != "data.max_length"] == []
    recipe = loaded.recipe
    choice = choose_levers(recipe, small, gpu)
    assert (choice.zero_stage, choice.stage_reason) == (stage, why)
    settled = choice.settle_stage(recipe)
    assert settled == load(*common, *words, f"parallel.zero_stage={stage}").recipe
    if gpu is None:
        return
    estimate = compute_estimate(recipe, small, gpu)
    assert estimate.job == make_job(settled, small, choice.levers)
    assert (estimate.choice, estimate.fit) == (choice, choice.fit)
    if why == WAITS:
        assert choice.fit is not None
        assert choice.fit.verdict == "fits"
        sharded = compute_estimate(load(*common, *words).recipe, small, gpu)
        assert estimate.speed.step_seconds < sharded.speed.step_seconds
        assert estimate.max_length == sharded.max_length


def test_a_layer_is_not_gathered_at_once_where_its_gradients_have_no_room() -> None:
    words = ("data.max_length=4Ki", "memory.gradient_checkpointing=true")
    without = choose(*words, "memory.leaf_layers=false").fit
    assert without is not None
    room = replace(H100, memory_bytes=without.gpu_peak_bytes + without.uncertainty_bytes + (64 << 20))
    found = choose_levers(load(*EIGHT, *words).recipe, LLAMA_8B, room)
    assert (found.levers.leaf_layers, found.reasons["leaf_layers"]) == (False, "the GPU has no room for them")


L40S = load_hardware().get_gpu("l40s")


def overlap(*words: str, gpu: Gpu = L40S):
    return choose_levers(load("parallel.sp_size=4", "data.max_length=64Ki", *words).recipe, LLAMA_8B, gpu)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((), "the exchange would take "),
        (("memory.attention_head_chunks=2",), "the exchange would take "),
        (("memory.attention_head_chunks=1",), "all heads are exchanged at once"),
        (("parallel.ring_size=4",), "no heads of attention are exchanged"),
        (("parallel.sp_size=32", "parallel.ring_size=1"), "a rank has one head"),
        (("data.max_length=8Ki",), "chunks would be too small"),
        (("data.max_length=1Mi",), "the exchange takes 1.4% of a step"),
    ],
)
def test_chunks_overlap_where_the_exchange_costs_more_than_3_percent(words: tuple[str, ...], why: str) -> None:
    """On GPUs that PCIe joins. The chosen number of chunks is the fastest of those that are large enough."""
    choice = overlap(*words)
    levers = choice.levers
    assert choice.reasons["overlap_exchange"].startswith(why)
    assert levers.overlap_exchange is (why == "the exchange would take ")
    if not levers.overlap_exchange:
        assert levers == overlap(*words, "memory.overlap_exchange=false").levers
        return
    assert choice.fit is not None
    assert choice.fit.verdict == "fits"
    job = make_job(load("parallel.sp_size=4", "data.max_length=64Ki", *words).recipe, LLAMA_8B, levers)
    own = compute_speed(job, L40S).step_seconds
    in_turn = compute_speed(replace(job, levers=replace(levers, overlap_exchange=False)), L40S)
    assert in_turn.parts["exchange"] > 0.03 * in_turn.step_seconds
    if "head_chunks" in choice.reasons:
        others = [replace(job, levers=replace(levers, head_chunks=chunks)) for chunks in (2, 4)]
        at_once = replace(levers, head_chunks=1, overlap_exchange=False)
        assert own == min(compute_speed(each, L40S).step_seconds for each in others)
        assert own < 0.99 * compute_speed(replace(job, levers=at_once), L40S).step_seconds
        assert choice.reasons["head_chunks"] == "the next one is exchanged while one attends"


def test_chunks_overlap_where_the_recipe_says_so() -> None:
    """Also where the exchange costs little; then their number is still open."""
    for length in ("8Ki", "512Ki"):
        few = overlap("memory.overlap_exchange=true", f"data.max_length={length}").levers
        assert few.overlap_exchange
        assert few.head_chunks > 1
    off = overlap("memory.overlap_exchange=false").levers
    assert (off.overlap_exchange, off.head_chunks) == (False, 1)


def test_chunks_do_not_overlap_where_two_have_no_room() -> None:
    """A GPU that just holds a run whose attention needs most."""
    words = [f"memory.{name}=false" for name in ("large_tiles", "leaf_layers")]
    words += [f"memory.{name}=true" for name in ("tiled_mlp", "tiled_loss", "gradient_checkpointing")]
    words += ["data.max_length=256Ki", "memory.attention_head_chunks=2", "memory.offload_optimizer=cpu"]
    words += ["memory.activation_offloading=true", "memory.offload_param=none", "memory.overlap_optimizer=false"]
    without, with_it = (overlap(*words, f"memory.overlap_exchange={value}") for value in ("false", "true"))
    assert without.fit is not None
    assert with_it.fit is not None
    assert with_it.fit.gpu_peak_bytes > without.fit.gpu_peak_bytes + (1 << 30)
    room = replace(L40S, memory_bytes=without.fit.gpu_peak_bytes + without.fit.uncertainty_bytes + (256 << 20))
    found = overlap(*words, gpu=room)
    assert found.levers == without.levers
    assert found.reasons["overlap_exchange"] == "the GPU has no room for them"


def test_no_layer_is_computed_twice_where_the_gpu_has_room() -> None:
    """At 64Ki it has if the loss is in tiles, at 128Ki it has for half of the layers."""
    chosen = {length: choose(f"data.max_length={length}").levers for length in ("32Ki", "64Ki", "128Ki")}
    saves = {length: (levers.gradient_checkpointing, levers.tiled_loss) for length, levers in chosen.items()}
    assert saves == {"32Ki": (False, False), "64Ki": (False, True), "128Ki": (True, True)}
    half = make_job(load(*EIGHT, "data.max_length=128Ki").recipe, LLAMA_8B, chosen["128Ki"])
    assert 12 <= half.levers.saved_layers <= 20
    assert judge(half, measure_ledger(half), H100).verdict == "fits"
    none = replace(half, levers=Levers())
    assert compute_speed(none, H100).step_seconds > 1.03 * compute_speed(half, H100).step_seconds
    one_more = replace(half, levers=replace(half.levers, saved_layers=half.levers.saved_layers + 1))
    assert judge(one_more, weigh_ledger(one_more), H100).verdict != "fits"
    for length, least_gain in (("32Ki", 1.3), ("64Ki", 1.09)):
        words = (*EIGHT, f"data.max_length={length}")
        job = make_job(load(*words).recipe, LLAMA_8B, chosen[length])
        recomputed = make_job(load(*words).recipe, LLAMA_8B, Levers())
        gain = compute_speed(recomputed, H100).step_seconds / compute_speed(job, H100).step_seconds
        assert gain >= least_gain
    at_once = replace(chosen["64Ki"], tiled_loss=False)
    job = make_job(load(*EIGHT, "data.max_length=64Ki").recipe, LLAMA_8B, at_once)
    assert judge(job, measure_ledger(job), H100).verdict != "fits"
    given = choose("data.max_length=16Ki", "memory.gradient_checkpointing=true", "memory.leaf_layers=false").levers
    assert given == Levers()


def test_every_lever_that_is_on_is_needed() -> None:
    for length in ("512Ki", "1Mi", "1536Ki"):
        recipe = load(*EIGHT, f"data.max_length={length}").recipe
        choice = choose_levers(recipe, LLAMA_8B, H100)
        assert choice.fit.verdict == "fits"
        job = make_job(recipe, LLAMA_8B, choice.levers)
        for name in choice.reasons:
            off = getattr(Levers(), name)
            if getattr(choice.levers, name) != off and name not in SPENDING:
                without = replace(job, levers=replace(choice.levers, **{name: off}))
                fit = judge(without, weigh_ledger(without), H100)
                assert fit.verdict != "fits" or not is_indexable(without), (length, name)
                assert "without it" in choice.reasons[name]


@pytest.mark.parametrize("length", sample(["832Ki", "1Mi", "1280Ki", "3Mi"], quick=["1Mi"], checked=()))
def test_no_more_layers_are_offloaded_than_needed(length: str) -> None:
    """Compares with every number, tried one by one: the smallest that fits."""
    recipe = load(*EIGHT, f"data.max_length={length}").recipe
    choice = choose_levers(recipe, LLAMA_8B, H100)
    job = make_job(recipe, LLAMA_8B, choice.levers)

    def judge_with(num_layers: int) -> str:
        tried = replace(job, levers=replace(choice.levers, offloaded_layers=num_layers))
        return judge(tried, weigh_ledger(tried), H100).verdict

    verdicts = [judge_with(num_layers) for num_layers in range(33)]
    assert verdicts[choice.levers.offloaded_layers] == "fits"
    assert verdicts.index("fits") == choice.levers.offloaded_layers > 0
    assert choice.reasons["offloaded_layers"].startswith(f"{choice.levers.offloaded_layers} of 32 layers; without it ")


def test_layers_stay_where_the_host_has_no_room_for_them() -> None:
    """Neither memory holds what all layers save; both together do."""
    recipe = load(*EIGHT, "data.max_length=1Mi", "memory.offload_optimizer=none").recipe
    all_levers = make_job(recipe, LLAMA_8B, Levers(offloaded_layers=31, tiled_loss=True, tiled_mlp=True))
    ledger = weigh_ledger(all_levers)
    tight = replace(H100, host_bytes_per_gpu=ledger.host_peak_bytes * 7 // 8 // 8)
    assert judge(all_levers, ledger, tight).wall == "host"
    choice = choose_levers(recipe, LLAMA_8B, tight)
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
    recipe = load(*EIGHT, "data.max_length=1Mi", "memory.gradient_checkpointing=true").recipe
    tight = replace(H100, host_bytes_per_gpu=10 << 30)
    choice = choose_levers(recipe, LLAMA_8B, tight)
    assert choice.fit.wall == "host"
    fewer = replace(choice.levers, offloaded_layers=choice.levers.offloaded_layers - 1)
    job = make_job(recipe, LLAMA_8B, fewer)
    assert choice.fit.spare_bytes >= 0 > judge(job, weigh_ledger(job), tight).spare_bytes


@pytest.mark.parametrize(
    ("value", "num_layers"), [("true", 30), ("false", 0), ("0", 0), ("1", 1), ("12", 12), ("32", 32)]
)
def test_layers_to_offload_are_all_or_a_number(value: str, num_layers: int) -> None:
    levers, open_names = read_levers(load(f"memory.activation_offloading={value}").recipe, LLAMA_8B)
    assert levers == Levers(offloaded_layers=num_layers)
    assert "offloaded_layers" not in open_names
    rest = ["data: {datasets: [{path: a}], max_length: 8}", "model: {name_or_path: a/b}"]
    assert read_levers(parse_recipe("\n".join([*write_levers(levers), *rest])).recipe, LLAMA_8B)[0] == levers


def test_the_recipes_levers_are_not_changed() -> None:
    choice = choose("data.max_length=1Mi", "memory.tiled_mlp=false", "memory.offload_optimizer=cpu")
    assert (choice.levers.tiled_mlp, choice.levers.offload_optimizer) == (False, "cpu")
    assert "tiled_mlp" not in choice.reasons


def test_kernels_that_count_in_32_bits_turn_levers_on() -> None:
    """All 4 heads of 5 Mi tokens pass 2^31 elements long before they pass this GPU's memory. Whole logits do so at
    128 Ki tokens and may, if the recipe says so."""
    huge = replace(H100, memory_bytes=10**15, host_bytes_per_gpu=10**15)
    choice = choose_levers(load(*EIGHT, "data.max_length=5Mi").recipe, LLAMA_8B, huge)
    assert (choice.levers.head_chunks, choice.levers.tiled_loss, choice.levers.tiled_mlp) == (2, True, True)
    assert choice.reasons["head_chunks"] == "without it a kernel would see 2^31 elements"
    assert choice.reasons["tiled_loss"].endswith("2^31 elements, which no run has shown to be right")
    whole = choose_levers(load(*EIGHT, "data.max_length=256Ki", "memory.tiled_loss=false").recipe, LLAMA_8B, huge)
    assert (whole.fit.verdict, whole.levers) == ("fits", Levers())


def test_weights_leave_the_gpu_last() -> None:
    """On one GPU of 20 GB, states on the host are not enough for 8 B parameters; with weights there too they are."""
    small = replace(H100, memory_bytes=20 << 30, host_bytes_per_gpu=400 << 30)
    recipe = load("data.max_length=4Ki", "parallel.sp_size=1").recipe
    choice = choose_levers(recipe, LLAMA_8B, small)
    assert (choice.fit.verdict, choice.levers.offload_param) == ("fits", "cpu")
    assert choice.reasons["offload_param"].startswith("without it the peak would be ")
    kept = choose_levers(
        load("data.max_length=4Ki", "parallel.sp_size=1", "memory.offload_param=none").recipe, LLAMA_8B, small
    )
    assert (kept.fit.verdict, kept.levers.offload_optimizer) == ("too_close", "cpu")


def test_without_a_gpu_nothing_is_on() -> None:
    choice = choose_levers(load("data.max_length=1Mi").recipe, LLAMA_8B, None)
    assert choice.levers == Levers()
    assert choice.fit is None


def test_a_suggestion_fits_when_it_is_followed() -> None:
    never = [f"memory.{name}=false" for name in ("tiled_mlp", "tiled_loss", "activation_offloading")]
    overrides = [*EIGHT, "data.max_length=128Ki", "memory.offload_optimizer=none", "memory.attention_head_chunks=1"]
    small = replace(H100, memory_bytes=40 << 30)
    assert load().recipe
    estimate = compute_estimate(load(*overrides, *never).recipe, LLAMA_8B, small)
    assert estimate.fit.verdict == "does_not_fit"
    assert estimate.suggestion.startswith("memory:\n")
    lines = [line.strip().replace(": ", "=") for line in estimate.suggestion.splitlines()[1:]]
    followed = compute_estimate(load(*overrides, *never, *(f"memory.{line}" for line in lines)).recipe, LLAMA_8B, small)
    assert followed.fit.verdict == "fits"
    assert parse_recipe(
        estimate.suggestion + "data: {datasets: [{path: a}], max_length: 8}\nmodel: {name_or_path: a/b}"
    )


def test_a_suggestion_ends_large_tiles_first_and_leaves_early_steps() -> None:
    """Also where the recipe asks for them, and after memory ran out."""
    words = [*EIGHT, "data.max_length=256Ki", "memory.tiled_loss=true", "memory.tiled_mlp=true"]
    words += ["memory.offload_optimizer=cpu", "memory.offload_param=none", "memory.activation_offloading=0"]
    words += ["memory.overlap_optimizer=1", "memory.attention_head_chunks=1", "memory.gradient_checkpointing=true"]
    peaks = []
    for value in ("true", "false"):
        recipe = load(*words, f"memory.large_tiles={value}").recipe
        job = make_job(recipe, LLAMA_8B, read_levers(recipe, LLAMA_8B)[0], gpus_per_node=8)
        ledger = weigh_ledger(job)
        peaks.append(ledger.gpu_peak_bytes + ledger.uncertainty_bytes)
    between = replace(H100, memory_bytes=sum(peaks) // 2)
    recipe = load(*words, "memory.large_tiles=true").recipe
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
    assert match is not None
    order = {"tiled_loss": True, "tiled_mlp": True, "offloaded_layers": 31}
    for flags in range(8):
        tried = replace(levers, **{name: order[name] * (flags >> bit & 1) for bit, name in enumerate(order)})
        attempt = replace(job, levers=tried)
        if is_indexable(attempt) and judge(attempt, weigh_ledger(attempt), H100).verdict == "fits":
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

    def peak(is_on: bool) -> int:
        return weigh_ledger(replace(job, levers=replace(strongest, tiled_mlp=is_on))).gpu_peak_bytes

    strongest = Levers("full", 1, 31, False, True, "cpu")
    assert peak(True) > peak(False)
    for memory_bytes in (peak(False) * 2, peak(False) * 11 // 10, peak(False) // 2):
        choice, _ = choose_for_job(
            job, replace(H100, memory_bytes=memory_bytes, host_bytes_per_gpu=10**13), list(COSTS)
        )
        without = replace(job, levers=replace(choice.levers, tiled_mlp=False))
        with_them = replace(job, levers=choice.levers)
        assert weigh_ledger(with_them).gpu_peak_bytes <= weigh_ledger(without).gpu_peak_bytes


H200 = load_hardware().get_gpu("h200")
ONE_GPU = ("parallel.sp_size=1", "parallel.dp_shard_size=1", "data.max_length=32Ki", "memory.offload_optimizer=cpu")


def test_as_many_groups_step_early_as_the_host_has_room_for() -> None:
    recipe, gpu = load(*ONE_GPU).recipe, replace(H200, host_bytes_per_gpu=200 << 30)
    choice = choose_levers(recipe, LLAMA_8B, gpu)
    job = make_job(recipe, LLAMA_8B, choice.levers)
    groups = list_sub_groups(get_weights(job), 1, job.engine.sub_group)
    assert 0 < choice.levers.early_groups < len(groups) - 1
    assert fits(job, gpu)
    assert not fits(replace(job, levers=replace(job.levers, early_groups=job.levers.early_groups + 1)), gpu)
    plain = replace(job, levers=replace(job.levers, early_groups=0))
    copies = weigh_ledger(job).host_peak_bytes - weigh_ledger(plain).host_peak_bytes
    assert copies == 12 * sum(groups[-job.levers.early_groups :])
    assert f"of {len(groups)} groups" in choice.reasons["early_groups"]


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (("memory.offload_optimizer=none",), "the optimizer is not in host memory"),
        (("parallel.zero_stage=2",), "stage 2 steps all weights at once"),
        (("lora.r=8",), "a rank's weights are one group"),
    ],
)
def test_no_group_steps_early_where_none_can(overrides: tuple[str, ...], reason: str) -> None:
    choice = choose_levers(load(*ONE_GPU, *overrides).recipe, LLAMA_8B, H200)
    assert (choice.levers.early_groups, choice.reasons["early_groups"]) == (0, reason)


def test_tiles_are_large_where_there_is_room() -> None:
    words = (*ONE_GPU[:3], "train.optim=adamw_8bit")
    recipe = load(*words).recipe
    choice = choose_levers(recipe, LLAMA_8B, H200)
    assert choice.levers.tiled_loss
    assert choice.levers.large_tiles
    small = replace(make_job(recipe, LLAMA_8B, choice.levers), levers=replace(choice.levers, large_tiles=False))
    short = replace(small, max_length=4096, levers=replace(small.levers, tiled_mlp=True))
    ledgers = [weigh_ledger(replace(short, levers=replace(short.levers, large_tiles=each))) for each in (False, True)]
    assert ledgers[1].gpu_peak_bytes > ledgers[0].gpu_peak_bytes + (1 << 30)
    no_room = replace(H200, memory_bytes=ledgers[0].gpu_peak_bytes + ledgers[0].uncertainty_bytes)
    full, _ = choose_for_job(short, no_room, ["large_tiles"])
    assert (full.levers.large_tiles, full.reasons["large_tiles"]) == (False, "the GPU has no room for them")
    assert not choose_levers(load(*words, "memory.large_tiles=false").recipe, LLAMA_8B, H200).levers.large_tiles


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


def test_a_host_that_is_too_small_drops_results_before_it_is_a_wall() -> None:
    """The fewest bytes of the host, though attention is computed twice; a reason says what it would take."""
    roomy, tight = (replace(H100, host_bytes_per_gpu=gib << 30) for gib in (240, 40))
    recipe = load(*EIGHT, "data.max_length=2Mi").recipe
    kept, dropped = (choose_levers(recipe, LLAMA_8B, gpu) for gpu in (roomy, tight))
    assert (kept.fit.verdict, kept.levers.gradient_checkpointing) == ("fits", True)
    assert (dropped.fit.verdict, dropped.levers.gradient_checkpointing) == ("fits", "full")
    assert "GiB of host memory of 320" in dropped.reasons["gradient_checkpointing"]


@pytest.mark.check
@pytest.mark.parametrize("disk_gb_s", sample([5.0, 0.05], quick=[0.05], checked=()))
def test_a_disk_is_weighed_against_computing_attention_twice(disk_gb_s: float, tmp_path: Path) -> None:
    """With a slow disk, the second pass of attention is faster; the choice is the faster of all that fit."""
    disk = f"memory.nvme_path={tmp_path}"
    job = make_job(load(*EIGHT, "data.max_length=2Mi", disk).recipe, LLAMA_8B, Levers())
    gpu = replace(H100, host_bytes_per_gpu=40 << 30, efficiency=replace(H100.efficiency, disk_gb_s=disk_gb_s))
    names = list(COSTS)
    levers = find_cheapest(job, gpu, names)
    assert fits(replace(job, levers=levers), gpu)
    assert (levers.offloaded_to == "nvme") == (disk_gb_s == 5.0)
    assert (levers.gradient_checkpointing == "full") == (disk_gb_s != 5.0)
    chosen = compute_speed(replace(job, levers=levers), gpu).step_seconds
    for measure in list_last_measures(job, names):
        given = replace(job, levers=replace(job.levers, **measure))
        other = find_cheapest(replace(given, has_disk=False), gpu, [name for name in names if name not in measure])
        if other is not None and fits(replace(job, levers=other), gpu):
            assert chosen <= compute_speed(replace(job, levers=other), gpu).step_seconds


@pytest.mark.check
@pytest.mark.parametrize(("accumulation", "on_disk"), [(1, ("cpu", "nvme")), (16, ("nvme", "cpu"))])
def test_states_or_saved_results_go_to_the_disk(accumulation: int, on_disk: tuple[str, str], tmp_path: Path) -> None:
    """One host of 200 GiB holds one of the two. States pass the disk once per step, results once per row: of many rows
    in a step, the states are the faster to put there."""
    gpu = replace(H100, host_bytes_per_gpu=200 << 30)
    words = ("parallel.sp_size=1", "data.max_length=256Ki", f"memory.nvme_path={tmp_path}",
             f"train.gradient_accumulation_steps={accumulation}")  # fmt: skip

    def measure(*others: str) -> tuple[tuple[str, str], float, str]:
        recipe = load(*words, *others).recipe
        choice = choose_levers(recipe, LLAMA_8B, gpu)
        levers = choice.levers
        seconds = compute_speed(make_job(recipe, LLAMA_8B, levers), gpu).step_seconds
        kept = (levers.offload_optimizer, levers.offloaded_to)
        return (
            kept,
            seconds if choice.fit.verdict == "fits" else float("inf"),
            choice.reasons.get("offload_optimizer", ""),
        )

    chosen, seconds, reason = measure()
    assert chosen == on_disk
    times = {
        (states, saved): measure(f"memory.offload_optimizer={states}", f"memory.activation_offload_device={saved}")[1]
        for states in ("none", "cpu", "nvme")
        for saved in ("cpu", "nvme")
    }
    assert min(times, key=lambda kept: times[kept]) == on_disk
    assert seconds == min(times.values()) < times["cpu", "cpu"], times
    assert ("on the host a node would need " in reason) == (on_disk[0] == "nvme")


@pytest.mark.check
def test_one_gpu_trains_on_a_row_past_2_to_the_31_with_a_disk(tmp_path: Path) -> None:
    """1.2 Mi tokens of 8B on one H200: what no host of 240 GiB holds waits on the disk. Without one the estimate says
    how much host memory it takes, and what a disk would hold."""
    with_disk = compute_estimate(load(*LONG_ROW, f"memory.nvme_path={tmp_path}").recipe, LLAMA_8B, H200)
    assert (with_disk.fit.verdict, with_disk.job.levers.offloaded_to) == ("fits", "nvme")
    assert compute_node_disk_bytes(with_disk.job) > 500 << 30
    without = compute_estimate(load(*LONG_ROW).recipe, LLAMA_8B, H200)
    assert (without.fit.verdict, without.fit.wall) == ("does_not_fit", "host")
    assert without.fit.host_peak_bytes > 300 << 30
    assert "activation_offload_device: nvme" in without.suggestion
    assert "a folder on a local disk with " in without.suggestion
    changed = load(*LONG_ROW, text=VALID + without.suggestion).recipe
    assert compute_estimate(changed, LLAMA_8B, H200).fit.verdict == "fits"
