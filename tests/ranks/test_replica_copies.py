"""Tests that copies of weights inside replicas (hpZ) are gathered after they were made, without a wait of the host: on
CPU ranks whose device pretends to be asynchronous and notes what each stream waits for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed.accelerator as accelerators
import pytest
import torch
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.runtime.zero import partition_parameters
from support.rank_pool import TIME_LIMIT, Pool
from support.run_harness import RunHarness
from support.training import MemoryRows, make_recipe

from ulysses_cli.train.engine import OrderedCopies
from ulysses_cli.train.loop import train

ROWS = [[(40, 0), (20, 0)], [(64, 0)], [(50, 40)], [(30, 0), (30, 0)]] * 2
NUM_STEPS = 2
ZERO = "deepspeed.zero_optimization"


class Notes:
    """Counts copies, gathers and waits of the host. `finished`: when the host has last waited for the device."""

    def __init__(self) -> None:
        self.now = self.finished = self.num_waits = self.num_made = self.num_gathered = 0
        self.too_early: list[int] = []


class Stream:
    """`reached`: until when this stream has waited for the others. The stream that computes runs at once."""

    def __init__(self, notes: Notes, *, gathers: bool = True) -> None:
        self.notes, self.gathers, self.reached = notes, gathers, 0

    def wait_stream(self, _: Stream) -> None: ...  # DeepSpeed's only one lets the stream that computes wait

    def wait_event(self, event: Event) -> None:
        self.reached = max(self.reached, event.time)

    def synchronize(self) -> None:
        if not self.gathers:
            self.notes.num_waits += 1
            self.notes.finished = self.notes.now

    def record_event(self, event: Any = None) -> Any:
        return event or Event(self.notes)


class Event:
    def __init__(self, notes: Notes) -> None:
        self.notes, self.time = notes, 0

    def record(self, _: Any = None) -> None:
        self.notes.now += 1
        self.time = self.notes.now

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class Asynchronous(CPU_Accelerator):
    def __init__(self, notes: Notes) -> None:
        super().__init__()
        self.notes, self.streams = notes, [Stream(notes, gathers=False)]

    def is_synchronized_device(self) -> bool:
        return False

    @property
    def Stream(self) -> Any:
        return lambda *_, **__: Stream(self.notes)

    @property
    def Event(self) -> Any:
        return lambda *_, **__: Event(self.notes)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.streams.append(stream)
        yield
        self.streams.pop()

    def current_stream(self, device_index: Any = None) -> Any:
        return self.streams[-1]

    default_stream = current_stream

    def pin_memory(self, tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return tensor


def watch(notes: Notes, accelerator: Asynchronous) -> None:
    own_copy, own_gather = partition_parameters.Init._partition_param_sec, partition_parameters._dist_allgather_fn
    copies: dict[int, int] = {}  # by their storage

    def copy(self: Any, parameter: Any, **options: Any) -> None:
        before = parameter.ds_secondary_tensor
        notes.now += 1
        own_copy(self, parameter, **options)
        if parameter.ds_secondary_tensor is not before:
            notes.num_made += 1
            copies[parameter.ds_secondary_tensor.data_ptr()] = notes.now

    def gather(source: torch.Tensor, *arguments: Any) -> Any:
        made = copies.get(source.data_ptr())
        notes.num_gathered += made is not None
        if made is not None and max(accelerator.current_stream().reached, notes.finished) < made:
            notes.too_early.append(made)
        return own_gather(source, *arguments)

    partition_parameters.Init._partition_param_sec = copy
    partition_parameters._dist_allgather_fn = gather


def run(way: str) -> tuple[list[float], Notes]:
    """`way`: ours, DeepSpeed's own, or neither order."""
    notes = Notes()
    if way != "synchronous":
        accelerator = Asynchronous(notes)
        accelerators.set_accelerator(accelerator)
        torch.Tensor.record_stream = lambda *_: None  # type: ignore[method-assign]
        watch(notes, accelerator)
    if way == "DeepSpeed's":
        OrderedCopies.__init__ = lambda *_: None  # type: ignore[method-assign, assignment]
    if way == "neither":
        OrderedCopies.gather = lambda self, own, params, **options: own(list(params), **options)  # type: ignore[method-assign]
    words = ("parallel.sp_size=2", "parallel.dp_replicate_size=2", f"train.max_steps={NUM_STEPS}")
    zero = (
        f"{ZERO}.allgather_sequential=true",  # the gathered copy is the call's argument
        f"{ZERO}.param_persistence_threshold=0",  # small weights would never be released
        f"{ZERO}.max_reuse_distance=0",
    )
    harness = RunHarness(make_recipe(*words, *zero), MemoryRows(ROWS), NUM_STEPS)
    notes.num_waits = notes.num_made = notes.num_gathered = 0
    train(harness.train_state)
    return harness.losses, notes


def run_alone(way: str) -> tuple[list[float], Notes]:
    """On ranks of its own, which end with what it replaces. Returns what the first one notes."""
    pool = Pool(4)
    try:
        result: tuple[list[float], Notes] = pool.run(run, (way,), TIME_LIMIT)[0]
        return result
    finally:
        pool.kill()


@pytest.mark.full
def test_copies_are_gathered_in_order_without_a_wait_of_the_host() -> None:
    expected, _ = run_alone("synchronous")
    plain, plain_notes = run_alone("DeepSpeed's")
    losses, notes = run_alone("ours")
    assert losses == plain == expected
    assert notes.num_gathered == plain_notes.num_gathered > 0
    assert notes.too_early == plain_notes.too_early == []
    assert plain_notes.num_waits - notes.num_waits == plain_notes.num_made == notes.num_made > 0
    _, planted = run_alone("neither")
    assert planted.too_early, "a copy that is gathered too early is seen"
