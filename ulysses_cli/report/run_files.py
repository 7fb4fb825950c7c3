"""Loads a run directory: run.json, metrics.jsonl, eval.jsonl, results of `ulysses evaluate`. Accepts files that a crash
cut off, and notes it.

Masks secrets here, so that no later code can show them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ulysses_cli.plan.files.regular_files import read_regular
from ulysses_cli.plan.files.whole_files import write_whole
from ulysses_cli.plan.nouns import format_count
from ulysses_cli.plan.problem import Problem, RecipeError
from ulysses_cli.plan.secrets import mask_secrets, mask_text
from ulysses_cli.report.quantities import is_number

Line = dict[str, Any]
EVALUATIONS = "evaluations"  # the folder where `ulysses evaluate` leaves what it found on a run's model
MAX_EVALUATION_BYTES = 64 << 20
NEEDED = {"subject", "scores", "mean", "heat_map", "effective_length", "seconds", "num_ranks", "has_all_ruler_tasks"}


@dataclass(frozen=True)
class RecordedRun:
    """`metrics` and `evals` are sorted by step. `spent_seconds` counts every attempt at a step that a resume
    repeated."""

    folder: Path
    facts: dict[str, Any]
    metrics: list[Line]
    evals: list[Line]
    samples: list[Line]
    quality: list[Line]
    told: list[Line]
    evaluations: list[Line]  # what `ulysses evaluate` found, by name
    spent_seconds: float
    notes: tuple[str, ...]

    def get_part(self, name: str) -> dict[str, Any]:
        """A section of run.json; empty if it is missing or not a mapping."""
        part = self.facts.get(name)
        return part if isinstance(part, dict) else {}


def load_run(folder: Path) -> RecordedRun:
    """Raises RecipeError if the folder is not a run directory."""
    files = [folder / name for name in ("run.json", "metrics.jsonl", "eval.jsonl")]
    hint = "name the directory that run.output_dir of the recipe names; it holds run.json and metrics.jsonl"
    if not folder.is_dir():
        what = "is a file, not a run directory" if folder.exists() else "does not exist"
        raise RecipeError([Problem("", f"{folder} {what}", hint)])
    if not any(file.is_file() for file in files):
        raise RecipeError(
            [Problem("", f"{folder} is not a run directory: it has none of run.json, metrics.jsonl", hint)]
        )
    notes: list[str] = []
    try:
        facts = _load_facts(files[0], notes)
        lines, evals = _load_lines(files[1], notes), _load_lines(files[2], notes)
        told = _load_told(folder / "told.jsonl")
        evaluations = _load_evaluations(folder / EVALUATIONS, notes)
        samples, quality = (_load_lines(folder / f"{name}.jsonl", notes) for name in ("samples", "quality"))
    except OSError as error:
        raise RecipeError([Problem("", f"{error.filename} cannot be read: {error.strerror}")]) from None
    spent = [line["step_seconds"] for line in lines if is_number(line.get("step_seconds")) and line["step_seconds"] > 0]
    metrics = _drop_redone(lines)
    if len(metrics) < len(lines):
        redone = format_count(len(lines) - len(metrics), "step")
        notes.append(f"The run resumed from an older checkpoint and repeated {redone}. The last attempt is shown.")
    if not metrics:
        notes.append("No optimizer step is recorded: metrics.jsonl is missing or empty. There is nothing to plot yet.")
    notes += _describe_rises(metrics)
    evals, samples, quality = (_drop_redone(each) for each in (evals, samples, quality))
    return RecordedRun(
        folder, facts, metrics, evals, samples, quality, told, evaluations, float(sum(spent)), tuple(notes)
    )


def _load_facts(file: Path, notes: list[str]) -> dict[str, Any]:
    if not file.is_file():
        notes.append("run.json is missing: recipe, layout and versions are not known.")
        return {}
    try:
        facts = json.loads(file.read_text(encoding="utf-8", errors="replace"))
    except (ValueError, RecursionError):
        facts = None
    if not isinstance(facts, dict):
        notes.append("run.json is damaged: recipe, layout and versions are not known.")
        return {}
    masked: dict[str, Any] = mask_secrets(facts)
    return masked


def _load_lines(file: Path, notes: list[str]) -> list[Line]:
    """All lines that are objects with a step. A crash may have cut off the last line."""
    if not file.is_file():
        return []
    lines: list[Line] = []
    bad: list[int] = []
    number, text = 0, ""
    with open(file, encoding="utf-8", errors="replace") as stream:
        for number, text in enumerate(stream, 1):
            line = _parse_line(text)
            if line is not None:
                lines.append(line)
            elif text.strip():
                bad.append(number)
    if bad and bad[-1] == number and not text.endswith("\n"):
        notes.append(f"The last line of {file.name} is cut off, as a crash leaves it; it is not shown.")
        bad.pop()
    if bad:
        notes.append(f"{format_count(len(bad), 'line')} of {file.name} cannot be read, the first is line {bad[0]}.")
    return lines


def _describe_rises(metrics: list[Line]) -> list[str]:
    """Where the run has found its loss far above its past, and where it came back."""
    words = "The loss diverged: it is far above its past from step"
    marks = [(line["step"], bool(line["diverged"])) for line in metrics if "diverged" in line]
    starts = [step for step, is_high in marks if is_high]
    ends = [next((later for later, is_high in marks if later > step and not is_high), None) for step in starts]
    return [
        f"{words} {start:,} on." if end is None else f"{words} {start:,} to step {end:,}."
        for start, end in zip(starts, ends, strict=True)
    ]


def _load_told(file: Path) -> list[Line]:
    """What went to trackers, to the hub and to whom the recipe names. Lines have a time and no step."""
    if not file.is_file():
        return []
    lines: list[Line] = []
    for text in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict):
            lines.append({name: mask_text(str(line.get(name, ""))) for name in ("time", "kind", "name", "text")})
    return lines


def _load_evaluations(folder: Path, notes: list[str]) -> list[Line]:
    found = []
    for file in sorted(folder.glob("*.json")):
        try:
            findings = json.loads(read_regular(file, MAX_EVALUATION_BYTES).decode(errors="replace"))
        except (OSError, ValueError, RecursionError):  # a FIFO would hold the report without end
            findings = None
        if isinstance(findings, dict) and findings.keys() >= NEEDED:
            found.append(mask_secrets(findings))
        else:
            notes.append(f"{EVALUATIONS}/{file.name} is damaged, and is not shown.")
    return found


def _parse_line(text: str) -> Line | None:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or not is_number(line.get("step")):
        return None
    for name in ("step_parts", "by_position", "by_class", "by_turn"):
        if isinstance(line.get(name), dict):
            line[name] = {mask_text(part): value for part, value in line[name].items()}
    return line


def _drop_redone(lines: list[Line]) -> list[Line]:
    """If a step is recorded again, as after a resume, its new line replaces the old ones from that step on."""
    kept: list[Line] = []
    for line in lines:
        while kept and kept[-1]["step"] >= line["step"]:
            kept.pop()
        kept.append(line)
    return kept


def save_page(target: Path, page: str) -> Path:
    """Writes the page atomically, so that no reader sees a part of it. Returns its path."""
    if target.is_dir():
        target = target / "report.html"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, page)
    except OSError as error:
        hint = "name a place that can be written with --output"
        raise RecipeError([Problem("", f"{target} cannot be written: {error.strerror}", hint)]) from None
    return target
