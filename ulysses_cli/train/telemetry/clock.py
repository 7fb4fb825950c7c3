"""Where the time of a step goes, by the parts that prediction uses too. Runs on sampled steps; off, it costs one look.

Marks are exclusive: time belongs to the part that was entered last. On a GPU they are events on the current stream, so
that work and waiting count where they happen and nothing is waited for until the step is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ulysses_cli.plan.step_parts import PARTS

_running: Clock | None = None


class Clock:
    """Marks of one step."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.part = "other"
        self.marks: list[tuple[Any, str]] = []

    def enter(self, part: str) -> str:
        """Time from here on belongs to `part` -> the part that it belonged to before."""
        before, self.part = self.part, part
        self.marks.append((self._now(), part))
        return before

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
    """What runs inside belongs to this part, except for what enters another."""
    clock = _running
    if clock is None:
        yield
        return
    before = clock.enter(part)
    try:
        yield
    finally:
        clock.enter(before)


def count_as(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        if _running is None:
            return function(*args, **kwargs)
        with part_of_step(part):
            return function(*args, **kwargs)

    return timed


def watch_module(module: nn.Module, part: str) -> None:
    """Count a module's forward, and its backward: from its output's gradient to its input's."""
    befores: list[str] = []

    def start_forward(*_: Any) -> None:
        if _running is not None:
            befores.append(_running.enter(part))

    def end_forward(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if _running is None:
            return
        if befores:
            _running.enter(befores.pop())
        result = output[0] if isinstance(output, tuple) else output
        inputs = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.requires_grad]
        if inputs:
            watch_backward(part, result, inputs[0])

    module.register_forward_pre_hook(start_forward)
    module.register_forward_hook(end_forward, with_kwargs=True)


def watch_backward(part: str, output: Tensor, given: Tensor) -> None:
    """Count the backward between two tensors of the graph."""
    if _running is not None and output.requires_grad and given.requires_grad:
        output.register_hook(lambda _: _enter(part))
        given.register_hook(lambda _: _enter("other"))


def _enter(part: str) -> None:
    if _running is not None:
        _running.enter(part)
