"""Shows the progress of a training run and of data preparation on stderr: rows that are redrawn on a terminal, one
`key=value` line per event or every 10 s elsewhere. A thread of its own draws, so that a new line costs the caller
microseconds, and a terminal that is closed does not stop a run. Receives plain events and decides nothing."""

from __future__ import annotations

import atexit
import itertools
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TextIO

from ulysses_cli.plan.hardware import GIB
from ulysses_cli.plan.units import format_count, format_usd
from ulysses_cli.report.printing import clean_text, hide_secrets, print_message, write_to
from ulysses_cli.report.quantities import format_number, format_quantity, format_seconds, is_number

REFRESH_SECONDS = 0.25
BARS, ASCII_BARS = "\u2501\u2500", "#-"
SPARKS, ASCII_SPARKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588", "_.-=+*#@"
SPINNER, ASCII_SPINNER = "\u280b\u2819\u2839\u2838\u283c\u2834\u2826\u2827\u2807\u280f", "|/-\\"
Piece = tuple[str, str]  # text and style
Row = Sequence[Piece]


class Screen:
    """`draw(width)` returns the rows of the part that is redrawn. It is called from another thread."""

    def __init__(self, stream: TextIO, draw: Callable[[int], Sequence[Row]]) -> None:
        self._stream = stream
        self._draw = draw
        self._waiting: deque[Piece] = deque()
        self._closing = threading.Event()
        self._is_closed = False
        self.is_live = _is_terminal(stream)
        self.has_unicode = _can_show(stream, BARS + SPARKS + SPINNER)
        if self.is_live:
            self._thread = threading.Thread(target=self._run, name="display", daemon=True)
            self._thread.start()
            atexit.register(self.close)

    def print_line(self, text: str, style: str = "") -> None:
        """Prints a line that stays."""
        if self._is_closed:
            return
        text = clean_text(" ".join(text.splitlines())).rstrip()
        if self.is_live:
            self._waiting.append((text, style))
            return
        try:
            write_to(self._stream, text)
        except (OSError, ValueError):  # the reader has gone, or the stream is closed; the run continues
            self._is_closed = True

    def close(self) -> None:
        """Prints the lines that wait, and removes the part that is redrawn."""
        if self.is_live and not self._is_closed:
            self._closing.set()
            self._thread.join(timeout=5)
            atexit.unregister(self.close)
        self._is_closed = True

    def make_bar(self, share: float, width: int) -> list[Piece]:
        letters = BARS if self.has_unicode else ASCII_BARS
        done = max(0, min(width, int(share * width)))
        return [(letters[0] * done, "cyan"), (letters[1] * (width - done), "dim")]

    def make_sparks(self, values: Sequence[float], width: int) -> str:
        """A sparkline of at most `width` letters, each for the mean of an equal share of the values."""
        count = min(width, len(values))
        edges = [place * len(values) // count for place in range(count + 1)] if count else []
        means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
        low, high = min(means, default=0), max(means, default=0)
        letters = SPARKS if self.has_unicode else ASCII_SPARKS
        return "".join(letters[round((mean - low) / (high - low or 1) * (len(letters) - 1))] for mean in means)

    def pick_spinner(self) -> str:
        letters = SPINNER if self.has_unicode else ASCII_SPINNER
        return letters[int(time.monotonic() / REFRESH_SECONDS) % len(letters)]

    def _run(self) -> None:
        try:
            self._show()
        except (OSError, ValueError):  # the terminal was closed
            pass
        finally:
            self._is_closed = True

    def _show(self) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        console = Console(file=self._stream, highlight=False, markup=False, emoji=False, soft_wrap=True)

        def make_text() -> Text:
            rows = [fit_row(row, console.width - 1) for row in self._draw(console.width - 1)]
            text = Text(no_wrap=True, overflow="crop")
            for place, row in enumerate(rows):
                text.append("\n" if place else "")
                for piece, style in row:
                    text.append(self._escape(piece), style or None)
            return text

        is_stderr = self._stream is sys.stderr  # then rich prints the libraries' messages above the redrawn part
        with Live(
            console=console,
            get_renderable=make_text,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,  # stdout is data
            redirect_stderr=is_stderr,
        ) as live:
            console.show_cursor(True)  # a killed process must not leave the cursor hidden
            is_last = False
            while not is_last:
                is_last = self._closing.wait(REFRESH_SECONDS)
                while self._waiting:
                    text, style = self._waiting.popleft()
                    console.print(Text(self._escape(text), style=style))
                live.refresh()

    def _escape(self, text: str) -> str:
        encoding = self._stream.encoding or "utf-8"
        return clean_text(text).encode(encoding, "backslashreplace").decode(encoding)


def fit_row(row: Row, width: int) -> list[Piece]:
    """The pieces of a row that fit. A piece that does not fit is left out with all after it; a first piece is cut."""
    fitting: list[Piece] = []
    left = width
    for text, style in row:
        if len(text) > left:
            return fitting or [(text[: max(0, left)], style)]
        fitting.append((text, style))
        left -= len(text)
    return fitting


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
    except ValueError:
        return False


def _can_show(stream: TextIO, letters: str) -> bool:
    try:
        letters.encode(stream.encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


MAX_LOSSES = 2_000
SPARK_WIDTH = 24
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
    """The cost counts from now on: GPUs cost money while a model loads, too."""
    price = price_per_gpu_hour * num_gpus if price_per_gpu_hour else None
    return RunDisplay(stream, num_steps, price, logging_steps, clock)


class RunDisplay:
    """Holds the values of the last events. `emit` only stores and queues them; the screen draws from its own thread."""

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
        self._first: tuple[float, float] | None = None  # number and time of the first step, for the rate
        self._last_time = self._start
        self._eval: dict[str, Any] = {}
        self._losses: deque[float] = deque(maxlen=MAX_LOSSES)
        self._shown_step: Any = None
        self._screen = Screen(stream, self._draw)

    def emit(self, event: Mapping[str, Any]) -> None:
        name = str(event.get("event", "event"))
        values = {key: value for key, value in event.items() if key != "event"}
        match name:
            case "step":
                self._note_step(values)
            case "eval":
                self._eval = values
                names = ("step", "loss", "perplexity", "rewards/accuracies", "tokens")
                self._screen.print_line(f"eval {_format_pairs(values, names)}", "bold")
            case "short_check":
                self._screen.print_line(f"short texts {_format_pairs(values, ('step', 'loss', 'difference'))}", "bold")
            case "samples":
                for sample in values.get("samples", ()):
                    said = f"{sample['prompt']!r} continues {sample['text']!r}"
                    self._screen.print_line(f"sample step={values.get('step')} {said}", "cyan")
            case "phase":
                self._phase, self._phase_start = _join(values.get("name"), values.get("detail")), self._clock()
                if not self._screen.is_live:
                    self._screen.print_line(f"phase {self._phase}")
            case "plan":
                for line in _list_lines(values):
                    self._screen.print_line(line)
            case "warning":
                details = values.pop("details", ())
                self._screen.print_line(f"warning: {values.pop('message', '')}{_tail(values)}", "yellow")
                for line in details:  # indented, so that no detail looks like an event of its own
                    self._screen.print_line(f"  {line}", "yellow")
            case "saved":
                took = f" in {format_seconds(values['seconds'])}" if is_number(values.get("seconds")) else ""
                self._screen.print_line(f"saved {values.get('path', '')}{took}", "green")
            case "stopped":
                self._screen.print_line(f"stopped: {values.pop('reason', '')}{_tail(values)}", "yellow")
            case "done":
                self._print_last_step()
                has_diverged = values.pop("diverged", False)
                said, style = ("done, but the loss diverged:", "bold red") if has_diverged else ("done", "bold green")
                self._screen.print_line(f"{said}{_tail(values)}{self._write_cost()}", style)
            case _:
                self._screen.print_line(f"{name}{_tail(values)}")

    def close(self) -> None:
        self._print_last_step()
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
            self._print_last_step()

    def _print_last_step(self) -> None:
        """Prints the last step once. On a terminal this happens only at the end, so that one line of it stays."""
        step = self._step.get("step")
        if self._step and step != self._shown_step:
            self._shown_step = step
            self._screen.print_line(self._write_step(), "" if is_number(self._step.get("loss", 0)) else "red")

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
        return " ".join(parts) + self._write_cost()

    def _compute_left(self) -> float | None:
        """Seconds to the last step, at the average pace so far, with evaluations and saves. After the first step: at
        that step's own pace."""
        step = self._step.get("step")
        if not is_number(step) or self._num_steps <= 0 or self._first is None:
            return None
        done, seconds = step - self._first[0], self._last_time - self._first[1]
        pace = seconds / done if done > 0 else self._step.get("step_seconds")
        return max(0.0, (self._num_steps - step) * pace) if pace is not None and is_number(pace) else None

    def _write_cost(self) -> str:
        return "" if self._price_per_hour is None else f" cost_usd={self._compute_cost(self._price_per_hour):.2f}"

    def _compute_cost(self, price_per_hour: float, more_seconds: float = 0) -> float:
        return price_per_hour * (self._clock() - self._start + more_seconds) / 3600

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
        for name, value in (("eval", self._eval.get("loss")), ("grad norm", line.get("grad_norm"))):
            if value is not None:
                row += [GAP, (f"{name} {_write_number(value)}", "")]
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
            whole = self._compute_cost(self._price_per_hour, left) if left is not None else None
            end = f" of about {format_usd(whole)}" if whole is not None else ""
            parts.append(f"{format_usd(self._compute_cost(self._price_per_hour))}{end}")
        return [piece for part in parts for piece in ((part, ""), GAP)]


def _write_number(value: Any) -> str:
    """Formats a number for programs: without separators, and `nan` for a value that is not a number."""
    if not is_number(value):
        return "nan" if value is None or value != value else str(value)
    return f"{value:.5g}" if abs(value) < 1e5 else f"{value:.0f}"


def _format_pairs(values: Mapping[str, Any], keys: Iterable[str]) -> str:
    return " ".join(
        f"{key}={_write_number(values[key]) if not isinstance(values[key], str | int) else values[key]}"
        for key in keys
        if key in values
    )


def _tail(values: Mapping[str, Any]) -> str:
    return f" {_format_pairs(values, values)}" if values else ""


def _join(head: Any, detail: Any) -> str:
    return f"{head} ({detail})" if detail else str(head)


def _list_lines(values: Mapping[str, Any]) -> list[str]:
    """The lines of a plan event, whose values are texts or lists of texts."""
    lines: list[str] = []
    for value in values.values():
        for text in value if isinstance(value, list | tuple) else [value]:
            lines += str(text).splitlines() or [""]
    return lines


TERMINAL_SECONDS, FILE_SECONDS = 0.2, 10.0
BAR_CELLS = 24
STAGES = {"tokenizer": "loading the tokenizer", "rows": "packing rows"}


class ProgressLine:
    """Shows events of data preparation."""

    def __init__(self) -> None:
        self.is_terminal = sys.stderr.isatty()
        self._shown = 0.0
        self._started: dict[str, float] = {}
        self._is_open = False

    def show(self, event: Mapping[str, Any]) -> None:
        kind = event["event"]
        if kind == "wait":
            self.end()
            print_message(clean_text(f"another process is making {event['what']}; waiting for it"))
        elif kind == "stage" and self.is_terminal and event["stage"] in STAGES:
            self._write(STAGES[event["stage"]])
        elif kind == "progress":
            self._show_progress(event)

    def _show_progress(self, event: Mapping[str, Any]) -> None:
        now = time.monotonic()
        start = self._started.setdefault(event["source"], now)
        is_done = event.get("is_done", False)
        interval = TERMINAL_SECONDS if self.is_terminal else FILE_SECONDS
        self._shown = self._shown or now
        if not is_done and now - self._shown < interval:
            return
        self._shown = now
        self._write(format_progress(event, now - start))
        if is_done:
            self.end()

    def _write(self, text: str) -> None:
        text = clean_text(hide_secrets(text))
        if not self.is_terminal:
            print_message(text)
            return
        sys.stderr.write(f"\r\x1b[2K{text}")
        sys.stderr.flush()
        self._is_open = True

    def end(self) -> None:
        """Ends the changing line, so that the next output starts on a line of its own."""
        if self._is_open:
            sys.stderr.write("\n")
            sys.stderr.flush()
            self._is_open = False


def format_progress(event: Mapping[str, Any], seconds: float) -> str:
    """One line: name, bar, tokens, speed, time left."""
    done, total = event["bytes"], event["total_bytes"]
    parts = [f"tokenizing {event['name']}"]
    if total:
        share = min(1.0, done / total)
        filled = int(share * BAR_CELLS)
        parts.append(f"[{'#' * filled}{'.' * (BAR_CELLS - filled)}] {share:4.0%}")
    parts.append(format_count(event["tokens"], "token"))
    if seconds > 0.5:
        parts.append(f"{done / 1e6 / seconds:.1f} MB/s")
        if total and 0 < done < total:
            parts.append(f"{format_seconds(round(seconds * (total - done) / done))} left")
    return "  ".join(parts)
