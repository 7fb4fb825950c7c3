"""Tests memory levers on one process: they change no value in float64, run attention and MLP once, and bound host
memory."""

import dataclasses
import errno
import gc
import itertools
import json
import mmap
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.families import make_config
from support.hybrids import HYBRIDS, make_hybrid, make_hybrid_config
from support.levers import (
    LENGTHS,
    SHAPES,
    Case,
    Levers,
    count_attention,
    make_loss_model,
    make_row,
    measure_difference,
    run_alone,
)
from support.other_thread import backward_in_another_thread
from support.refusals import explain
from support.tiers import count_examples, mark_by, sample, sample_every
from syrupy.assertion import SnapshotAssertion
from torch import Tensor, nn

from ulysses_cli.plan.levers import SWAP_CHUNK_BYTES, SWAP_THREADS
from ulysses_cli.plan.models.families import FAMILIES
from ulysses_cli.plan.models.shape import read_model_shape
from ulysses_cli.train.attention.documents import make_documents
from ulysses_cli.train.failure import describe_failure
from ulysses_cli.train.memory import tiling
from ulysses_cli.train.memory.checkpointing import checkpoint_layers, list_layers
from ulysses_cli.train.memory.offload import LEFT_FREE_BYTES, DiskFile, Extents, HostPool, OffloadDiskError, Offloader
from ulysses_cli.train.memory.tiled_mlp import TiledBlock, tile_mlps
from ulysses_cli.train.memory.tiling import split_tokens
from ulysses_cli.train.model.loading import BuildError
from ulysses_cli.train.model.loss_model import open_disk
from ulysses_cli.train.model.parts import make_thread
from ulysses_cli.train.processes.groups import make_sequence_axis

ALL = Levers(loss_tile=9, mlp_tiles=5, checkpointing="save_attention", offloaded=1, chunks=2)
# Some models compute parts of their float64 path in float32 (norms, the router's softmax). Rounding there depends on
# the shapes that are computed together, which tiles change.
TOLERANCE = 1e-6
LEVERS = [
    Levers(loss_tile=1),
    Levers(loss_tile=1000),
    Levers(mlp_tiles=64),
    Levers(mlp_tiles=1000),
    Levers(checkpointing="save_attention"),
    Levers(checkpointing="save_attention", mlp_tiles=3),
    Levers(checkpointing="full", mlp_tiles=3),
    Levers(checkpointing="save_attention", offloaded=2, chunks=4),
]


def compare(case: Case, **changes: Any) -> float:
    expected = run_alone(dataclasses.replace(case, levers=Levers()))
    return max(measure_difference(run_alone(case), expected).values())


@pytest.mark.parametrize(
    "levers",
    [ALL, pytest.param(Levers(checkpointing="full", offloaded=9, mlp_tiles=500), marks=pytest.mark.check)],
    ids=["all", "full"],
)
@pytest.mark.parametrize("kind", sample(SHAPES, quick=["llama", "gemma2", "phi3", "gpt_oss", "gemma4_text"]))
def test_a_family(kind: str, levers: Levers) -> None:
    assert compare(Case(kind, levers)) < TOLERANCE


QUICK = [("llama", ALL), ("qwen3_moe", Levers(checkpointing="full", mlp_tiles=3))]


@pytest.mark.parametrize(
    ("kind", "levers"),
    [
        pytest.param(kind, levers, marks=mark_by((kind, levers) in QUICK, kind == "llama" or levers == ALL))
        for kind in SHAPES
        for levers in [ALL, *LEVERS]
    ],
    ids=str,
)
def test_a_backward_in_another_thread_changes_no_bit(kind: str, levers: Levers) -> None:
    """On a GPU a backward and its recomputations run in a thread of their own."""
    case = Case(kind, levers)
    expected = run_alone(case)
    with backward_in_another_thread() as count:
        result = run_alone(case)
    assert count == [1]
    assert max(measure_difference(result, expected).values()) == 0


@settings(max_examples=count_examples(32))
@given(
    st.sampled_from(["llama", "gemma3_text", "qwen3_moe"]),
    st.lists(st.integers(1, 20), min_size=1, max_size=4),
    st.builds(
        Levers,
        st.sampled_from([None, 1, 6, 1000]),
        st.sampled_from([None, 2, 7, 64, 1000]),
        st.sampled_from(["save_attention", "full"]),
        st.sampled_from([None, 0, 1, 2]),
        st.sampled_from([1, 2]),
    ),
)
def test_any_combination(kind: str, lengths: list[int], levers: Levers) -> None:
    difference = compare(Case(kind, levers, tuple(lengths), z_loss_weight=0.01))
    assert difference < (1e-12 if kind == "llama" else TOLERANCE)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gemma4_text"])
def test_adapters(kind: str) -> None:
    """Adapters are also on the head, and on an MLP whose own weights are frozen."""
    case = Case(kind, ALL, lora=("q_proj", "gate_proj", "down_proj", *(["lm_head"] if kind == "llama" else [])))
    assert compare(case) < TOLERANCE


@pytest.mark.parametrize("levers", [ALL, Levers(mlp_tiles=50, loss_tile=1)], ids=["all", "many tiles"])
def test_bfloat16_is_bounded(levers: Levers) -> None:
    """Against float64, the levers may add at most half of the error that bfloat16 itself has."""

    def measure(case: Case, exact: dict[str, Tensor]) -> float:
        result = run_alone(case)
        errors = [(result[name].double() - expected).norm() / expected.norm() for name, expected in exact.items()]
        return torch.stack(errors).mean().item()

    case = Case("llama", levers, dtype=torch.bfloat16)
    plain = dataclasses.replace(case, levers=Levers())
    exact = make_loss_model(plain, make_sequence_axis(None)).double()  # the rounded weights, computed exactly
    exact(**make_row(LENGTHS), documents=make_documents(LENGTHS)).backward()
    expected = {name: p.grad for name, p in exact.named_parameters() if p.grad is not None}
    assert measure(case, expected) < 1.5 * measure(plain, expected) < 0.1


class CountedMlps:
    """Counts how often each layer's MLP runs over all of its tokens, by the tokens that reach its down projection."""

    def __init__(self, model: nn.Module) -> None:
        self.tokens = [0 for _ in list_layers(model)]
        for index, layer in enumerate(list_layers(model)):
            layer.mlp.down_proj.register_forward_pre_hook(self.make_hook(index))

    def make_hook(self, index: int) -> Any:
        def count(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            self.tokens[index] += args[0].shape[:-1].numel()

        return count


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize(
    ("kind", "mode", "tiles", "attention", "mlps"),
    [
        ("llama", "save_attention", 5, 1, 2), ("llama", "full", 5, 2, 2), ("llama", "save_attention", None, 1, 2),
        ("gemma2", "save_attention", 5, 1, 2), ("gemma3_text", "save_attention", 5, 1, 2),
        ("olmo2", "save_attention", 5, 1, 2), ("phi3", "save_attention", 5, 1, 2),
    ],
)  # fmt: skip
def test_work_is_done_once(kind: str, mode: str, tiles: int | None, attention: int, mlps: int, chunks: int) -> None:
    levers = Levers(checkpointing=mode, mlp_tiles=tiles, chunks=chunks)
    model = make_loss_model(Case(kind, levers), make_sequence_axis(None))
    counted = CountedMlps(model)
    with count_attention() as calls:
        model(**make_row(LENGTHS), documents=make_documents(LENGTHS)).backward()
    num_layers = len(counted.tokens)
    assert calls[0] == attention * num_layers * chunks
    assert counted.tokens == [mlps * sum(LENGTHS)] * num_layers


@pytest.mark.check
@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
@pytest.mark.parametrize(("mode", "passes"), [("save_attention", 2), ("full", 3), (None, 2)])
def test_experts_beside_an_mlp_get_tiles_alone(
    mode: str | None, passes: int, experts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tokens pass them once in the forward and once in the backward; also in a recomputation, where the forward has
    saved no result for it."""
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextExperts

    forward, sizes = Gemma4TextExperts.forward, []

    def count(block: nn.Module, *inputs: Tensor) -> Tensor:
        sizes.append({each.size(0) for each in inputs})
        return forward(block, *inputs)

    monkeypatch.setattr(Gemma4TextExperts, "forward", count)
    case = Case("gemma4_text", Levers(mlp_tiles=5, checkpointing=mode), dtype=torch.float32)
    case.changes["experts_implementation"] = experts
    model = make_loss_model(case, make_sequence_axis(None))
    model(**make_row(LENGTHS), documents=make_documents(LENGTHS)).backward()
    tokens = [len(range(sum(LENGTHS))[part]) for part in split_tokens(sum(LENGTHS), 5)]
    expected = [{size} for size in tokens] * passes * len(list_layers(model))
    assert sorted(sizes, key=max) == sorted(expected, key=max)


@pytest.mark.parametrize("kind", sample_every(8, list(FAMILIES)))
def test_every_mlp_of_every_family_is_tiled(kind: str) -> None:
    """Layers that have one have a block, and no experts are outside of all blocks."""
    from transformers import AutoModelForCausalLM

    own = SHAPES.get(kind, {})
    config = make_hybrid_config(kind) if kind in HYBRIDS else make_config(kind, num_hidden_layers=3, **own)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = read_model_shape(json.loads(config.to_json_string(use_diff=False)), "tiny")
    whole: list[nn.Module] = []
    assert tile_mlps(model, lambda _: 2, whole.append) == len(set(whole))
    for layer, facts in zip(list_layers(model), shape.layers, strict=True):
        assert bool(set(layer.modules()) & set(whole)) == (facts.mlp is not None)
    inside = {weight for block in whole for weight in block.parameters()}
    experts = {weight for weight in model.parameters() if weight.dim() == 3 and weight.size(0) == shape.num_experts}
    assert bool(experts) == (shape.num_experts > 0)
    assert experts <= inside


class Noisy(nn.Module):
    """An MLP that drops in the middle, and on request after its last linear layer."""

    def __init__(self, has_end: bool) -> None:
        super().__init__()
        self.first, self.down_proj, self.drop, self.has_end = nn.Linear(4, 16), nn.Linear(16, 4), nn.Dropout(), has_end

    def forward(self, tokens: Tensor) -> Tensor:
        out = self.down_proj(nn.functional.silu(self.drop(self.first(tokens))))
        return self.drop(out) if self.has_end else out


@pytest.mark.parametrize("has_end", [False, True])
def test_dropout_is_the_same_in_backward_and_forward(has_end: bool) -> None:
    """Compares the slope along a direction with finite differences at the same seed."""
    torch.manual_seed(0)
    block = Noisy(has_end).double()
    TiledBlock(block, lambda _: 3)
    hidden, along = torch.randn(1, 10, 4, dtype=torch.float64), torch.randn(1, 10, 4, dtype=torch.float64)

    def run(tokens: Tensor) -> Tensor:
        torch.manual_seed(5)
        return block(tokens).square().sum()

    leaf = hidden.clone().requires_grad_()
    total = run(leaf)
    torch.manual_seed(99)
    total.backward()
    state = torch.get_rng_state()
    slope = (run(hidden + 1e-6 * along) - run(hidden - 1e-6 * along)) / 2e-6
    torch.testing.assert_close((leaf.grad * along).sum(), slope, rtol=1e-6, atol=1e-8)
    torch.manual_seed(99)
    assert torch.equal(torch.get_rng_state(), state), "the backward leaves the generator as it was"


def test_sums_are_added_in_the_product_where_a_device_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU does: no gradient of a matrix is made apart from its sum."""
    apart: list[int] = []
    take = tiling.WeightSums._take_gradient

    def count(sums: tiling.WeightSums, weight: Tensor) -> None:
        apart.append(weight.dim())
        take(sums, weight)

    monkeypatch.setattr(tiling, "adds_in_product", lambda *_: True)
    monkeypatch.setattr(tiling.WeightSums, "_take_gradient", count)
    assert compare(Case("llama", Levers(mlp_tiles=5, loss_tile=9, checkpointing="save_attention"))) < TOLERANCE
    assert 2 not in apart


def test_a_tile_without_an_expert_leaves_its_gradient_zero() -> None:
    """Every weight gets a gradient on every rank, also an adapter or expert that no token reached."""

    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(4, 4), nn.Parameter(torch.ones(2, 3))

        def forward(self, tokens: Tensor) -> Tensor:
            return self.used(tokens)

    block = Idle()
    TiledBlock(block, lambda _: 2)
    block(torch.randn(1, 6, 4)).sum().backward()
    assert torch.equal(block.idle.grad, torch.zeros(2, 3))  # type: ignore[arg-type]


@given(st.integers(1, 50), st.integers(1, 60))
def test_tiles_cover_all_tokens(tokens: int, tiles: int) -> None:
    parts = split_tokens(tokens, tiles)
    assert [at for part in parts for at in range(tokens)[part]] == list(range(tokens))
    assert len(parts) == min(tiles, tokens)
    sizes = [part.stop - part.start for part in parts]
    assert max(sizes) - min(sizes) <= 1


def test_evaluation_saves_no_tensor() -> None:
    model = make_loss_model(Case("llama", ALL), make_sequence_axis(None))
    expected = make_loss_model(Case("llama"), make_sequence_axis(None))
    row, documents = make_row(LENGTHS), make_documents(LENGTHS)
    with torch.no_grad():
        for is_training in (True, False):
            model.train(is_training)
            torch.testing.assert_close(model(**row, documents=documents), expected(**row, documents=documents))


def test_models_that_no_lever_serves_are_refused(snapshot: SnapshotAssertion) -> None:
    noisy = make_loss_model(Case("mixtral", changes={"router_jitter_noise": 0.1}), make_sequence_axis(None)).model
    said = [explain(tile_mlps, noisy, lambda _: 2, error=ValueError)]
    said.append(explain(checkpoint_layers, nn.Linear(2, 2), "full", error=ValueError))
    assert said == snapshot


def run_with_offload(offloaded: int, num_layers: int = 4, disk: DiskFile | None = None) -> tuple[Offloader, int]:
    """Runs two steps of a model. Returns the offloader, and the bytes that one step keeps in host memory."""
    offloader = Offloader(torch.device("cpu"), offloaded, disk)
    model = make_loss_model(Case("llama", changes={"num_hidden_layers": num_layers}), make_sequence_axis(None))
    checkpoint_layers(model.model, "save_attention", offloader.make_storage)
    held = []
    for _ in range(2):
        model(**make_row(LENGTHS), documents=make_documents(LENGTHS)).backward()
        held.append(offloader.pool.num_bytes)
    assert disk or held[0] == held[1], "buffers are used again"
    return offloader, held[0]


KEPT = [8 * sum(LENGTHS) * width for width in (32, 4 * 16, 4)]  # input, attention's output, log-sum-exp
KEPT_PER_LAYER = sum(-(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE for num_bytes in KEPT)


def test_host_memory_holds_what_layers_save() -> None:
    assert [run_with_offload(n)[1] for n in (0, 1, 3, 9)] == [n * KEPT_PER_LAYER for n in (0, 1, 3, 4)]


def test_what_all_layers_read_stays_on_the_device_and_is_copied_once() -> None:
    """Zamba2 gives each layer the embedding beside its own input."""
    offloader = Offloader(torch.device("cpu"), 9)
    model = make_hybrid("zamba2", "sdpa").train()
    checkpoint_layers(model, "full", offloader.make_storage)
    ids = torch.randint(3, 64, (1, 16), generator=torch.Generator().manual_seed(1))
    held = []
    for _ in range(2):
        loss = model(ids, use_cache=False).logits.square().sum()
        held.append(offloader.pool.num_bytes)
        loss.backward()
    num_layers, page = model.config.num_hidden_layers, 8 * ids.numel() * model.config.hidden_size
    assert page == mmap.PAGESIZE
    assert held == [(num_layers + 1) * page] * 2  # each layer's input, and the embedding from the first


def test_a_disk_holds_what_layers_save_and_host_memory_a_chunk_for_each_thread(tmp_path: Path) -> None:
    """The file has no name, and two steps keep the same places in it."""
    disk = DiskFile(tmp_path)
    offloader, _ = run_with_offload(9, 6, disk)
    assert offloader.pool.num_bytes <= SWAP_THREADS * SWAP_CHUNK_BYTES
    assert disk.num_bytes == 6 * KEPT_PER_LAYER
    assert list(tmp_path.iterdir()) == []


def test_two_forwards_before_their_backwards(tmp_path: Path) -> None:
    """Each backward gets the tensors of its own forward, in both orders; a disk gives them back with every bit."""
    rows, lengths = [make_row((9, 4)), make_row((5, 11, 2))], [(9, 4), (5, 11, 2)]
    for order in ((0, 1), (1, 0)):
        grads = []
        for disk, num_offloaded in ((None, None), (None, 3), (DiskFile(tmp_path), 3)):
            model = make_loss_model(Case("llama", changes={"num_hidden_layers": 3}), make_sequence_axis(None))
            if num_offloaded:
                offloader = Offloader(torch.device("cpu"), num_offloaded, disk)
                checkpoint_layers(model.model, "save_attention", offloader.make_storage)
            losses = [model(**row, documents=make_documents(lengths[at])) for at, row in enumerate(rows)]
            for at in order:
                (losses[at] * (1 + at)).backward()
            grads.append([p.grad for p in model.parameters()])
        torch.testing.assert_close(grads[1], grads[0], rtol=1e-12, atol=1e-14)
        assert all(map(torch.equal, grads[2], grads[1]))


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite"])
def test_a_full_disk_is_an_error_that_says_so(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    """Also where a file system has promised too much."""

    def fill(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, fill)
    with pytest.raises(OffloadDiskError) as full:
        run_with_offload(4, disk=DiskFile(tmp_path))
    assert str(full.value) == snapshot


def test_a_missing_disk_is_a_foreseen_end_of_a_run(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """A restart in place would meet the same disk."""
    with pytest.raises(OffloadDiskError) as gone:
        DiskFile(tmp_path / "gone")
    failure = describe_failure(gone.value)
    assert (failure["is_cause"], failure["is_final"]) == (True, True)
    assert failure["message"] == snapshot
    assert explain(open_disk, torch.device("cpu"), None, error=BuildError) == snapshot(name="no folder")


def test_threads_begin_on_their_ranks_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps the current GPU for each thread, and a new one begins at GPU 0."""
    entered: list[tuple[str, torch.device]] = []

    def enter(device: torch.device) -> None:
        entered.append((threading.current_thread().name.partition("_")[0], device))

    monkeypatch.setattr(torch.cuda, "set_device", enter)
    for device in (torch.device("cuda", 3), torch.device("cpu")):
        with make_thread(device) as executor:
            executor.submit(int).result()
        open_disk(device, tmp_path).start(lambda: None).result()
    assert entered == [("early-steps", torch.device("cuda", 3)), ("offload", torch.device("cuda", 3))]


def end_in_time(function: Callable[[], object]) -> bool:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(10)
    return not thread.is_alive()


def test_a_finalizer_never_waits(tmp_path: Path) -> None:
    """A garbage collection may run it inside of `take` or `reserve`, by the thread that holds the lock, or by the
    thread that writes the tensor."""
    pool, disk, never = HostPool(is_pinned=False), DiskFile(tmp_path), Future[None]()
    buffer, offset = pool.take(1), disk.reserve(4096)

    def collect() -> None:
        with pool._lock, disk._lock:
            pool.give_back(buffer)
            disk.release(offset, 4096, [never])

    assert end_in_time(collect)
    assert pool.take(1) is buffer
    assert disk.reserve(4096) != offset, "it is still written to"
    never.set_result(None)
    assert disk.reserve(4096) == offset


def test_a_file_grows_where_the_c_library_reserves_by_writing_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a file system that cannot reserve. Direct transfers take whole blocks alone."""

    def write_bytes(handle: int, offset: int, size: int) -> None:
        for block in range(offset, offset + size, 4096):
            os.pwrite(handle, b"\0", block)

    monkeypatch.setattr(os, "posix_fallocate", write_bytes)
    _, held = run_with_offload(4, disk=DiskFile(tmp_path))
    assert held > 0


def test_a_file_is_closed_with_its_last_user(tmp_path: Path) -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    disk = DiskFile(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before + 2
    del disk
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=40))
def test_places_of_a_file_never_overlap(moves: list[tuple[bool, int]]) -> None:
    extents, taken = Extents(), list[tuple[int, int]]()
    for is_taken, size in moves:
        if is_taken or not taken:
            offset = extents.find(size)
            taken.append((extents.append(size) if offset is None else offset, size))
        else:
            extents.release(*taken.pop(size % len(taken)))
        ordered = sorted(taken)
        assert all(sum(one) <= other[0] for one, other in itertools.pairwise(ordered))
        assert not ordered or sum(ordered[-1]) <= extents.end
    for place in taken:
        extents.release(*place)
    assert extents.find(extents.end) in (0, None if extents.end == 0 else 0), "all of it is one place again"


@pytest.mark.check
def test_a_forward_without_backward_frees_its_buffers() -> None:
    offloader, held = run_with_offload(4)
    model = make_loss_model(Case("llama", changes={"num_hidden_layers": 4}), make_sequence_axis(None))
    checkpoint_layers(model.model, "save_attention", offloader.make_storage)
    for _ in range(3):
        model(**make_row(LENGTHS), documents=make_documents(LENGTHS))
        gc.collect()
    assert offloader.pool.num_bytes == held
    offloader.pool.close()
    assert offloader.pool.num_bytes == 0


def test_the_pool_is_bounded_and_grows_with_rows(snapshot: SnapshotAssertion) -> None:
    page = mmap.PAGESIZE
    pool = HostPool(is_pinned=False, count_free=lambda: LEFT_FREE_BYTES + 10 * page - pool.num_bytes, patience=0.0)
    small, large = pool.take(10), pool.take(4 * page - 9)
    assert (small.numel(), large.numel()) == (page, 4 * page), "whole pages, which can be locked one by one"
    assert small.data_ptr() % page == large.data_ptr() % page == 0
    assert explain(pool.take, 6 * page, error=MemoryError) == snapshot
    pool.give_back(small)
    pool.give_back(large)
    assert pool.take(3 * page) is large
    assert pool.take(5) is small
    pool.give_back(small)
    assert pool.take(5 * page).numel() == 5 * page
    assert pool.num_bytes == 9 * page, "a buffer that is too small makes room"


@pytest.mark.parametrize(("grows_by", "fits"), [(4, True), (0, False)])
def test_memory_that_a_machine_shows_only_when_it_is_used(grows_by: int, fits: bool) -> None:
    """A machine that shows 2 pieces, and as many more with each look where its memory grows."""
    piece, shown = 16 * mmap.PAGESIZE, [2]

    def count_free() -> int:
        shown[0] += grows_by
        return LEFT_FREE_BYTES + shown[0] * piece - count_used()

    def count_used() -> int:
        status = Path("/proc/self/smaps_rollup").read_text()
        return max(0, 1024 * int(status.split("Anonymous:")[1].split()[0]) - before)

    before = 0
    before = count_used()
    pool = HostPool(is_pinned=False, count_free=count_free, piece_bytes=piece, patience=0.05)
    with nullcontext() if fits else pytest.raises(MemoryError):
        assert pool.take(20 * piece).numel() == 20 * piece
    assert pool.num_bytes == (20 * piece if fits else 0)


def test_host_buffers_are_private_and_ask_for_huge_pages() -> None:
    """Shared mappings have pages of 4 KiB each to lock. A private page that a fork shares moves when it is written."""
    buffer = HostPool(is_pinned=False).take(8 << 20)
    text = Path("/proc/self/smaps").read_text()
    places = [line.split("-")[0] for line in text.splitlines() if "-" in line.split(" ")[0]]
    place = max((each for each in places if int(each, 16) <= buffer.data_ptr()), key=lambda each: int(each, 16))
    head, *lines = text[text.index(f"{place}-") :].splitlines()
    flags = next(line for line in lines if line.startswith("VmFlags:")).split()
    assert head.split()[1] == "rw-p"
    assert "dc" in flags, "no child has it"
    if Path("/sys/kernel/mm/transparent_hugepage/enabled").exists():
        assert "hg" in flags


def test_a_second_backward_through_a_layer_is_refused(snapshot: SnapshotAssertion) -> None:
    model = make_loss_model(Case("llama", Levers(checkpointing="save_attention")), make_sequence_axis(None))
    loss = model(**make_row(LENGTHS), documents=make_documents(LENGTHS))
    loss.backward(retain_graph=True)
    assert explain(loss.backward, error=RuntimeError) == snapshot
