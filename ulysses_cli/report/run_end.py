"""Formats the messages at the start and at the end of a run: plan, interruption, failure."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ulysses_cli.plan.layout import Placement
from ulysses_cli.plan.problem import Problem
from ulysses_cli.plan.recipe.loader import Loaded
from ulysses_cli.report import resolved_plan
from ulysses_cli.report.placement import list_warnings
from ulysses_cli.validate import Validated


def format_missing_lock(run_dir: Path) -> str:
    return f"warning     {run_dir} is on a disk without file locks: a second run in it will not be refused"


def format_start(valid: Validated, machines: str, num_machines: int = 1) -> str:
    plan = resolved_plan.format_plan(resolved_plan.describe_plan(valid), with_settings=False)
    lines = [plan, f"machines    {machines}"] if machines else [plan]
    if num_machines > 1 and valid.resolved is not None and valid.shape is not None:
        placement = Placement(valid.resolved.layout, num_machines)
        lines += [f"warning     {text}" for text in list_warnings(placement, None, valid.shape)]
    return "\n".join(lines)


def explain_tokens(loaded: Loaded, source: Mapping[str, Any], vocabulary: int) -> Problem:
    """The problem when the data holds a token id that the model's embedding does not have."""
    return Problem(
        "model.tokenizer",
        f"{source['name']} holds token {source['max_id']:,}, the model's embedding has {vocabulary:,}",
        "name the tokenizer that belongs to the model",
        loaded.locate("model.tokenizer"),
    )


def format_interruption(failure: Mapping[str, Any], checkpoint: Path | None) -> str:
    """What the run was doing when it was interrupted, and how to continue it."""
    head = f"interrupted during {failure['phase']}" if failure.get("is_interruption") else "interrupted"
    if checkpoint is None:
        return f"{head}, before a checkpoint was written: the same command starts from the beginning"
    return f"{head}; {explain_resume(checkpoint)}"


def explain_interrupted_start() -> str:
    return "interrupted before the ranks were started: the same command starts again"


def explain_interrupted_export(folder: Path) -> str:
    return f"interrupted: {folder} was not written"


def explain_interrupted_data() -> str:
    return "interrupted while data was prepared: sources that were done are kept; the same command prepares the rest"


def explain_resume(checkpoint: Path, stopped_by: str = "") -> str:
    """`stopped_by` names the setting whose limit ended the run: with the same one it would stop again at once."""
    words = "the same command and --resume auto"
    if stopped_by.startswith("run."):
        words = f"the same command, --resume auto and a larger {stopped_by}"
    return f"the newest checkpoint is {checkpoint}: continue from it with {words}"


SIGNALS = {
    signal.SIGKILL: ": most often the system ran out of host memory",
    signal.SIGBUS: ": a file that it had mapped into memory was truncated while it was read, or its disk failed",
}


def describe_end(code: int | None) -> str:
    """How a process ended that left no message. A code below 0 is minus the signal's number, as in subprocess."""
    if code is None or code >= 0:
        return f"ended with exit code {'unknown' if code is None else code}"
    number = signal.Signals(-code)
    return f"was killed by {number.name}{SIGNALS.get(number, '')}"


def format_failure(failure: Mapping[str, Any], logs: Path) -> str:
    """The error of the rank that failed first, in short, with the path of the log that holds the whole trace."""
    rank = failure.get("rank")
    who = f"rank {rank}" if rank is not None else failure.get("process", "the run")
    if failure.get("message"):
        at = f" ({failure['phase']})" if failure.get("phase") else ""
        first, *more = str(failure["message"]).splitlines() or [""]
        # Indented, so that no line of the message looks like a message of its own.
        text = "\n  ".join((f"{who} failed{at}: {first}", *map(str.strip, more)))
    else:
        text = f"{who} {describe_end(failure.get('exit_code'))}"
    is_of_rank = rank is not None and failure.get("message")
    trace = logs / (f"rank-{rank}.log" if is_of_rank else failure.get("log", "agent.log"))
    hint = f"\n\nhint: {failure['hint']}" if failure.get("hint") else ""
    return f"{text}{hint}\n\nthe whole trace: {trace}"
