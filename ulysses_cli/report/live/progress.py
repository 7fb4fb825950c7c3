"""A training run while it goes on: live on a terminal, else one plain `key=value` line per event, made to be grepped.

Fed by plain events; decides nothing about the run. Also the progress of long work that counts, such as preparing data.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TextIO

from ulysses_cli.plan.hardware import GIB
from ulysses_cli.report.live.screen import Piece, Row, Screen
from ulysses_cli.report.quantities import format_number, format_quantity, format_seconds, is_number

MAX_LOSSES = 2_000
SPARK_WIDTH = 24
PLAIN_SECONDS = 10  # between two plain lines of counted work
GAP: Piece = ("  ", "")
Clock = Callable[[], float]


def make_display(
    stream: TextIO,
    num_steps: int,
    price_per_gpu_hour: float | None = None,
    num_gpus: int = 1,
    *,
    logging_steps: int = 1,
    clock: Clock = time.monotonic,
) -> RunDisplay:
    """Money counts from now: GPUs cost while a model loads, too."""
    price = price_per_gpu_hour * num_gpus if price_per_gpu_hour else None
    return RunDisplay(stream, num_steps, price, logging_steps, clock)


class RunDisplay:
    """What the last events said. `emit` only notes and queues; the screen draws in its own time."""

    def __init__(
        self, stream: TextIO, num_steps: int, price_per_hour: float | None, logging_steps: int, clock: Clock
    ) -> None:
        self._num_steps = num_steps
        self._price_per_hour = price_per_hour
        self._logging_steps = max(1, logging_steps)
        self._clock = clock
        self._start = clock()
        self._phase, self._phase_start = "starting", self._start
        self._step: dict[str, Any] = {}
        self._first: tuple[float, float] | None = None  # step and time of the first one, for the rate
        self._last_time = self._start
        self._eval: dict[str, Any] = {}
        self._losses: deque[float] = deque(maxlen=MAX_LOSSES)
        self._shown_step: Any = None
        self._screen = Screen(stream, self._draw)

    def emit(self, event: Mapping[str, Any]) -> None:
        name = str(event.get("event", "event"))
        rest = {key: value for key, value in event.items() if key != "event"}
        match name:
            case "step":
                self._note_step(rest)
            case "eval":
                self._eval = rest
                self._screen.say(f"eval {_pair(rest, ('step', 'loss', 'perplexity', 'tokens'))}", "bold")
            case "phase":
                self._phase, self._phase_start = _join(rest.get("name"), rest.get("detail")), self._clock()
                if not self._screen.is_live:
                    self._screen.say(f"phase {self._phase}")
            case "plan":
                for line in _list_lines(rest):
                    self._screen.say(line)
            case "warning":
                details = rest.pop("details", ())
                self._screen.say(f"warning: {rest.pop('message', '')}{_tail(rest)}", "yellow")
                for line in details:  # indented, so that no value can look like an event of its own
                    self._screen.say(f"  {line}", "yellow")
            case "saved":
                took = f" in {format_seconds(rest['seconds'])}" if is_number(rest.get("seconds")) else ""
                self._screen.say(f"saved {rest.get('path', '')}{took}", "green")
            case "stopped":
                self._screen.say(f"stopped: {rest.pop('reason', '')}{_tail(rest)}", "yellow")
            case "done":
                self._say_last_step()
                self._screen.say(f"done{_tail(rest)}{self._write_cost(' cost_usd=')}", "bold green")
            case _:
                self._screen.say(f"{name}{_tail(rest)}")

    def close(self) -> None:
        self._say_last_step()
        self._screen.close()

    def _note_step(self, line: dict[str, Any]) -> None:
        self._step, self._last_time = line, self._clock()
        step = line.get("step")
        if is_number(line.get("loss")):
            self._losses.append(line["loss"])
        if self._first is None and is_number(step):
            self._first = (step, self._last_time)
        self._phase = ""
        is_due = not is_number(step) or step % self._logging_steps == 0 or step in (1, self._num_steps)
        if not self._screen.is_live and is_due:
            self._say_last_step()

    def _say_last_step(self) -> None:
        """On a terminal only the end: where the run stood is worth a line that stays."""
        step = self._step.get("step")
        if self._step and step != self._shown_step:
            self._shown_step = step
            self._screen.say(self._write_step(), "" if is_number(self._step.get("loss", 0)) else "red")

    def _write_step(self) -> str:
        line = self._step
        of = f"/{self._num_steps}" if self._num_steps > 0 else ""
        keys = ("loss", "grad_norm", "learning_rate", "tokens_per_second", "step_seconds")
        parts = [f"step={line.get('step')}{of}", *(f"{key}={_write_number(line[key])}" for key in keys if key in line)]
        if is_number(line.get("peak_memory_bytes")):
            parts.append(f"peak_memory_gib={line['peak_memory_bytes'] / GIB:.2f}")
        if is_number(line.get("communication_share")):
            parts.append(f"communication={line['communication_share']:.1%}")
        left = self._compute_left()
        if left is not None:
            parts.append(f"eta_seconds={left:.0f}")
        return " ".join(parts) + self._write_cost(" cost_usd=")

    def _compute_left(self) -> float | None:
        """Seconds to the last step, by the pace so far, evaluations and saves included; at first by one step's."""
        step = self._step.get("step")
        if not is_number(step) or self._num_steps <= 0 or self._first is None:
            return None
        done, seconds = step - self._first[0], self._last_time - self._first[1]
        pace = seconds / done if done > 0 else self._step.get("step_seconds")
        return max(0.0, (self._num_steps - step) * pace) if pace is not None and is_number(pace) else None

    def _write_cost(self, head: str, more_seconds: float = 0) -> str:
        if self._price_per_hour is None:
            return ""
        return f"{head}{self._price_per_hour * (self._clock() - self._start + more_seconds) / 3600:.2f}"

    def _draw(self, width: int) -> list[Row]:
        line, left = self._step, self._compute_left()
        rows: list[Row] = []
        if self._phase:
            spent = format_seconds(round(self._clock() - self._phase_start))
            rows.append([(f"{self._screen.pick_spinner()} ", "cyan"), (self._phase, "bold"), GAP, (spent, "dim")])
        if not line:
            return rows
        step, total = line.get("step"), self._num_steps
        if is_number(step) and total > 0:
            share = step / total
            texts = [f"step {step:,}/{total:,}", f"{share:.0%}"]
            texts += [f"{format_seconds(round(left))} left"] if left is not None else []
            room = min(40, width - sum(len(text) + 2 for text in texts))
            bar = [*self._screen.make_bar(share, room), GAP] if room >= 6 else []
            rows.append([*bar, *(piece for text in texts for piece in ((text, ""), GAP))])
        else:
            rows.append([(f"step {step}", "")])
        loss = line.get("loss")
        row = [(f"loss {_write_number(loss)}", "bold" if is_number(loss) else "bold red")]
        if len(self._losses) > 1:
            row += [GAP, (self._screen.make_sparks(tuple(self._losses), SPARK_WIDTH), "cyan")]
        for name, found in (("eval", self._eval.get("loss")), ("grad norm", line.get("grad_norm"))):
            if found is not None:
                row += [GAP, (f"{name} {_write_number(found)}", "")]
        rows += [row, self._list_rates(line, left)]
        return rows

    def _list_rates(self, line: Mapping[str, Any], left: float | None) -> list[Piece]:
        parts: list[str] = []
        if is_number(line.get("tokens_per_second")):
            parts.append(f"{format_number(line['tokens_per_second'])} tokens/s")
        if is_number(line.get("peak_memory_bytes")):
            parts.append(format_quantity(line["peak_memory_bytes"], "bytes"))
        if is_number(line.get("communication_share")):
            parts.append(f"communication {line['communication_share']:.0%}")
        if self._price_per_hour is not None:
            end = self._write_cost(" of about $", left) if left is not None else ""
            parts.append(f"{self._write_cost('$')}{end}")
        return [piece for part in parts for piece in ((part, ""), GAP)]


class CountedSteps:
    """Long work that counts: `with show_steps(stream, "tokenizing") as steps: steps.update(5, 100)`."""

    def __init__(self, stream: TextIO, title: str, unit: str, clock: Clock) -> None:
        self._title, self._unit, self._clock = title, unit, clock
        self._start = clock()
        self._said = self._start
        self._count, self._total, self._detail = 0.0, 0.0, ""
        self._screen = Screen(stream, self._draw)

    def __enter__(self) -> CountedSteps:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def update(self, count: float, total: float = 0, detail: str = "") -> None:
        """`total` 0: not known."""
        self._count, self._total, self._detail = count, total, detail
        if not self._screen.is_live and self._clock() - self._said >= PLAIN_SECONDS:
            self._said = self._clock()
            self._screen.say(self._write())

    def say(self, text: str) -> None:
        self._screen.say(text)

    def close(self) -> None:
        self._screen.say(f"{self._write()} in {format_seconds(self._clock() - self._start)}")
        self._screen.close()

    def _write(self) -> str:
        of = f"/{self._total:,.0f}" if self._total else ""
        return _join(f"{self._title}: {self._count:,.0f}{of} {self._unit}, {self._write_rate()}", self._detail)

    def _write_rate(self) -> str:
        seconds = self._clock() - self._start
        return f"{format_number(self._count / seconds) if seconds > 0 else 0}/s"

    def _draw(self, width: int) -> list[Row]:
        of = f"/{self._total:,.0f}" if self._total else ""
        text = f"{self._count:,.0f}{of} {self._unit}  {self._write_rate()}"
        room = min(40, width - len(self._title) - len(text) - 6)
        bar = self._screen.make_bar(self._count / self._total, room) if self._total and room >= 6 else []
        head: Row = [(f"{self._screen.pick_spinner()} ", "cyan"), (self._title, "bold"), GAP]
        return [[*head, *bar, *([GAP] if bar else []), (text, ""), GAP, (self._detail, "dim")]]


def show_steps(stream: TextIO, title: str, unit: str = "", *, clock: Clock = time.monotonic) -> CountedSteps:
    return CountedSteps(stream, title, unit, clock)


def _write_number(value: Any) -> str:
    """For a line that programs may read: no separators, and `nan` for what is no number."""
    if not is_number(value):
        return "nan" if value is None or value != value else str(value)
    return f"{value:.5g}" if abs(value) < 1e5 else f"{value:.0f}"


def _pair(values: Mapping[str, Any], keys: Iterable[str]) -> str:
    return " ".join(
        f"{key}={_write_number(values[key]) if not isinstance(values[key], str | int) else values[key]}"
        for key in keys
        if key in values
    )


def _tail(rest: Mapping[str, Any]) -> str:
    return f" {_pair(rest, rest)}" if rest else ""


def _join(head: Any, detail: Any) -> str:
    return f"{head} ({detail})" if detail else str(head)


def _list_lines(rest: Mapping[str, Any]) -> list[str]:
    """The lines of a plan, however they are packed."""
    lines: list[str] = []
    for value in rest.values():
        for text in value if isinstance(value, list | tuple) else [value]:
            lines += str(text).splitlines() or [""]
    return lines
