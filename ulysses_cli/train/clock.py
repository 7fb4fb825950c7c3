"""Measures the time of a step's parts, the same parts as the prediction's. Runs on sampled steps; otherwise it costs
one comparison.  Parts do not overlap: time belongs to the part that was entered last. On a GPU marks are events on
the current stream, so that work and waiting count where they happen, and the host waits for nothing until the step
is over."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ulysses_cli.plan.speed import PARTS

_running: Clock | None = None


class Clock:
    """The times at which one step entered its parts."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.part = "other"
        self.marks: list[tuple[Any, str]] = []

    def enter(self, part: str) -> str:
        """Time from here on belongs to `part`. Returns the part that it belonged to before."""
        previous, self.part = self.part, part
        self.marks.append((self._now(), part))
        return previous

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self) -> None:
        global _running
        _running = self
        self.enter("other")

    def stop(self) -> dict[str, float]:
        """Seconds of each part."""
        global _running
        self.enter("other")
        _running = None
        seconds = dict.fromkeys(PARTS, 0.0)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for (begin, part), (end, _) in zip(self.marks, self.marks[1:], strict=False):
            seconds[part] += begin.elapsed_time(end) / 1e3 if self.device.type == "cuda" else end - begin
        return seconds


@contextmanager
def part_of_step(part: str) -> Iterator[None]:
    """The time inside belongs to this part, except where code enters another part."""
    clock = _running
    if clock is None:
        yield
        return
    previous = clock.enter(part)
    try:
        yield
    finally:
        clock.enter(previous)


def count_as(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        if _running is None:
            return function(*args, **kwargs)
        with part_of_step(part):
            return function(*args, **kwargs)

    return timed


def watch_module(module: nn.Module, part: str) -> None:
    """Counts a module's forward, and its backward: from its output's gradient to its input's."""
    previous: list[str] = []

    def start_forward(*_: Any) -> None:
        if _running is not None:
            previous.append(_running.enter(part))

    def end_forward(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if _running is None:
            return
        if previous:
            _running.enter(previous.pop())
        result = output[0] if isinstance(output, tuple) else output
        inputs = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.requires_grad]
        if inputs:
            watch_backward(part, result, inputs[0])

    module.register_forward_pre_hook(start_forward)
    module.register_forward_hook(end_forward, with_kwargs=True)


def watch_backward(part: str, output: Tensor, source: Tensor, after: str = "other") -> None:
    """Counts the backward between two tensors of the graph. `after`: the part that follows it."""
    if _running is not None and output.requires_grad and source.requires_grad:
        output.register_hook(lambda _: _enter(part))
        source.register_hook(lambda _: _enter(after))


def _enter(part: str) -> None:
    if _running is not None:
        _running.enter(part)
