"""Compares the bytes that the speed model gives to the exchange of heads and to a ring with those that ranks trade,
counts the collectives of a layer, and shows that keys of the next round travel while those of one are computed."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, Literal, NamedTuple

import pytest
import torch.distributed as dist
from support.attention import Problem
from support.model_shapes import get_shape
from support.rank_pool import run_on_ranks
from support.split_attention import ALWAYS, NEVER, attend, make_local_rows
from torch.utils.checkpoint import checkpoint

from ulysses_cli.plan.layout import Layout
from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.levers import Levers
from ulysses_cli.plan.rows.ring import MAX_SHARES
from ulysses_cli.plan.speed import compute_exchange_bytes, compute_ring_bytes
from ulysses_cli.train.attention import ring
from ulysses_cli.train.attention.kernels import operators
from ulysses_cli.train.memory.checkpointing import DeviceStorage, SavedResults

LLAMA = get_shape("meta-llama/Llama-3.1-8B")
Checkpointing = Literal[False, True, "full"]


class Event(NamedTuple):
    """A call of a kernel, or a collective with the numbers that this rank gives and gets."""

    name: str
    sent: int = 0
    received: int = 0


class LoggedWork:
    def __init__(self, work: Any, name: str, events: list[Event]) -> None:
        self._work, self._name, self._events = work, name, events

    def wait(self) -> None:
        self._work.wait()
        self._events.append(Event(f"{self._name} has arrived"))


@contextmanager
def log_events() -> Iterator[list[Event]]:
    """Logs what this rank does, in order."""
    events, names, trade, kernel = list[Event](), ["heads"], dist.all_to_all_single, operators.KERNELS["sdpa"]

    def log_trade(received: Any, send: Any, *splits: Any, **options: Any) -> Any:
        events.append(Event(names[-1], send.numel(), received.numel()))
        work = trade(received, send, *splits, **options)
        return LoggedWork(work, names[-1], events) if options.get("async_op") else work

    def log_kernel(function: Callable[..., Any], *arguments: Any) -> Any:
        events.append(Event("kernel"))
        return function(*arguments)

    def name_trades(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            names.append(name)
            result = function(*arguments)
            names.pop()
            return result

        return call

    places: list[tuple[Any, str, str]] = [
        (ring, "fetch_keys", "fetch"),
        (ring, "return_gradients", "return"),
        (ring, "_start_fetch", "fetch"),
        (ring.ReturningGradients, "send", "return"),
    ]
    logged = kernel._replace(forward=partial(log_kernel, kernel.forward), backward=partial(log_kernel, kernel.backward))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", log_trade)
        patch.setitem(operators.KERNELS, "sdpa", logged)
        for place, attribute, name in places:
            patch.setattr(place, attribute, name_trades(name, getattr(place, attribute)))
        yield events


def log_step(
    problem: Problem, ring_size: int, max_shares: float, checkpointing: Checkpointing = False
) -> tuple[list[Event], list[Event]]:
    """The events of a layer's forward and of its backward."""
    leaves = make_local_rows(problem)

    def run(*rows: Any) -> Any:
        return attend(rows, problem, ring_size, max_shares)

    layer: Callable[..., Any] = run
    if checkpointing is True:
        layer = partial(SavedResults(DeviceStorage()).call, run)
    with log_events() as events:
        out = checkpoint(layer, *leaves, use_reentrant=False) if checkpointing else layer(*leaves)
        num_forward = len(events)
        out.sum().backward()
    return events[:num_forward], events[num_forward:]


def list_names(events: Sequence[Event]) -> list[str]:
    return [event.name for event in events]


def make_job(problem: Problem, layout: tuple[int, int], checkpointing: Checkpointing = False) -> Job:
    """One layer of that many heads, with numbers of one byte. With values of another width it has latents."""
    (kind,) = LLAMA.layer_kinds
    sizes = {"num_heads": problem.heads, "num_kv_heads": problem.kv_heads, "head_dim": problem.dim}
    mixer = replace(
        kind.attention,
        **sizes,
        value_head_dim=problem.width,
        is_latent=bool(problem.value_dim),
        window_tokens=problem.window,
    )
    shape = replace(LLAMA, **sizes, layers=(replace(kind, mixers=(mixer,)),), num_layers=1)
    levers = Levers(gradient_checkpointing=checkpointing, head_chunks=problem.chunks)
    return Job(
        shape,
        Layout(1, 1, layout[0] * layout[1], layout[0]),
        problem.tokens,
        levers,
        dtype_bytes=1,
        document_tokens=problem.lengths[0],
    )


class Case(NamedTuple):
    problem: Problem
    checkpointing: Checkpointing = False
    max_shares: float = MAX_SHARES


def count_all(cases: Sequence[Case], ring_size: int) -> list[tuple[int, list[tuple[int, int]]]]:
    """For each case the numbers of all exchanges of heads, and for a forward's fetches, the backward's, and the
    gradients that return, what this rank sends and gets."""
    counts = []
    for problem, checkpointing, max_shares in cases:
        forward, backward = log_step(problem, ring_size, max_shares, checkpointing)
        traded = [
            (
                sum(each.sent for each in events if each.name == name),
                sum(each.received for each in events if each.name == name),
            )
            for events, name in ((forward, "fetch"), (backward, "fetch"), (backward, "return"))
        ]
        counts.append((sum(each.sent for each in forward + backward if each.name == "heads"), traded))
    return counts


def check_bytes(layout: tuple[int, int], cases: Sequence[Case]) -> None:
    """All ranks exchange as many heads. All wait for the rank that sends or gets most keys, or gradients of keys."""
    ring_size, ulysses_size = layout
    by_rank = run_on_ranks(ring_size * ulysses_size, count_all, cases, ring_size)
    for case, counts in zip(cases, zip(*by_rank, strict=True), strict=True):
        job = make_job(case.problem, layout, case.checkpointing)
        of_others = (ulysses_size - 1) / ulysses_size  # what a rank keeps is no traffic
        assert {heads * of_others for heads, _ in counts} == {compute_exchange_bytes(job)}, case
        busiest = [max(map(max, traded)) for traded in zip(*(traded for _, traded in counts), strict=True)]
        assert sum(busiest) == pytest.approx(compute_ring_bytes(job)), case


PLAIN, LATENT = Problem(16, 2, 8, (96,)), Problem(16, 16, 12, (96,), value_dim=8)
CHUNKS = [1, pytest.param(2, marks=pytest.mark.full), 4]


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("layout", [(2, 2), pytest.param((3, 2), marks=pytest.mark.full)], ids=str)
def test_bytes_are_those_of_the_speed_model(layout: tuple[int, int], chunks: int) -> None:
    """Each chunk of heads exchanges and fetches the keys and values of its own heads, so that several chunks bring a
    shared one several times. Latents are expanded to keys of every head, which no two chunks share."""
    problems = [replace(PLAIN, chunks=chunks), replace(LATENT, chunks=chunks)]
    check_bytes(layout, [Case(problem, max_shares=way) for problem in problems for way in (MAX_SHARES, NEVER)])


LENGTHS: list[tuple[int, ...]] = [(96,), (40, 40, 16), (5,) * 19 + (1,), (12,) * 8]


@pytest.mark.parametrize(
    ("layout", "documents"),
    [
        pytest.param((4, 1), LENGTHS[:1], marks=pytest.mark.check),
        *(pytest.param(layout, LENGTHS, marks=pytest.mark.full) for layout in [(4, 1), (1, 4), (2, 2), (3, 2), (2, 4)]),
    ],
    ids=lambda value: str(value) if isinstance(value, tuple) else f"{len(value)} mixes",
)
def test_bytes_of_any_row_are_those_of_the_speed_model(
    layout: tuple[int, int], documents: list[tuple[int, ...]]
) -> None:
    """Keys come in rounds, at once, or not at all, as the rows and the window have it; full recomputation brings them
    once more."""
    modes: tuple[Checkpointing, ...] = (False, True, "full")
    grid = product((PLAIN, LATENT), documents, (None, 9, 24), (1, 2), modes)
    check_bytes(
        layout,
        [
            Case(replace(problem, lengths=lengths, window=window, chunks=chunks), mode)
            for problem, lengths, window, chunks, mode in grid
        ],
    )


def count_by_mode(problem: Problem, ring_size: int, way: float) -> dict[Checkpointing, tuple[list[str], list[str]]]:
    modes: tuple[Checkpointing, ...] = (False, True, "full")
    steps = {mode: log_step(problem, ring_size, way, mode) for mode in modes}

    def list_collectives(events: list[Event]) -> list[str]:
        return [name for name in list_names(events) if name in ("heads", "fetch", "return")]

    return {
        mode: (list_collectives(forward), list_collectives(backward)) for mode, (forward, backward) in steps.items()
    }


@pytest.mark.parametrize("way", [ALWAYS, NEVER], ids=["in rounds", "at once"])
@pytest.mark.parametrize("lengths", [(96,), (8,) * 12], ids=["one document", "short documents"])
def test_collectives_of_a_checkpointed_layer(lengths: tuple[int, ...], way: float) -> None:
    """Ring 2 x Ulysses 2. A layer that keeps attention's result exchanges rows and results again in the backward, and
    runs nothing of the forward; full recomputation repeats it. Keys are fetched again in both. Where nobody needs keys
    of another rank there are none."""
    fetch, back = (["fetch"], ["return"]) if lengths == (96,) else ([], [])
    forward, backward = ["heads", *fetch, "heads"], ["heads", *fetch, *back, "heads"]
    for counts in run_on_ranks(4, count_by_mode, Problem(4, 2, 8, lengths), 2, way):
        assert counts[False] == (forward, backward)
        assert counts[True] == (forward, ["heads", *backward])
        assert counts["full"] == (forward, [*forward, *backward])
    assert not fetch or (len(forward), len(backward) + 1) == (3, 5)


@pytest.mark.check
def test_collectives_of_a_checkpointed_layer_in_rounds() -> None:
    """Ring 4: three rounds have keys of other ranks."""
    forward, backward = ["fetch"] * 3, ["fetch", "fetch", "return", "fetch", "return", "return"]
    for counts in run_on_ranks(4, count_by_mode, Problem(4, 2, 8, (96,)), 4, ALWAYS):
        assert counts[False] == counts[True] == (forward, backward)
        assert counts["full"] == (forward, forward + backward)


def list_steps(problem: Problem, ring_size: int) -> tuple[list[str], list[str]]:
    """What this rank does in rounds, with the kernel calls of a round as one."""
    runs = []
    for events in log_step(problem, ring_size, ALWAYS):
        names = [name for name in list_names(events) if "heads" not in name]
        runs.append([name for at, name in enumerate(names) if at == 0 or name != "kernel" or names[at - 1] != "kernel"])
    return runs[0], runs[1]


@pytest.mark.parametrize(
    "layout", [(2, 2), *(pytest.param(layout, marks=pytest.mark.check) for layout in [(4, 1)])], ids=str
)
def test_the_next_block_travels_while_one_is_computed(layout: tuple[int, int]) -> None:
    """The fetch of round t + 1 starts before the kernels of round t and ends after them, forward and backward. The
    gradients of a block return while the next is computed."""
    ring_size, ulysses_size = layout
    forward, backward = list[str](), list[str]()
    for at in range(ring_size):
        is_last = at == ring_size - 1
        coming, arrived = ([], []) if is_last else (["fetch"], ["fetch has arrived"])
        forward += [*coming, "kernel", *arrived]
        before = ["return has arrived"] if at > 1 else []
        returning = [*before, "return"] if at else []
        backward += [*coming, "kernel", *returning, *arrived]
    backward += ["return has arrived"]
    for steps in run_on_ranks(ring_size * ulysses_size, list_steps, Problem(8, 2, 8, (96,)), ring_size):
        assert steps == (forward, backward)
