"""The file of an evaluation's results: one line per question, after a line that says what was evaluated. A killed
evaluation goes on where it was.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ulysses_cli.plan.problem import Problem, RecipeError

KIND = "evaluation"


class ResultsFile:
    """Results are appended and written through at once."""

    def __init__(self, file: Path, settings: Mapping[str, Any]) -> None:
        self.file, self.results = file, list[dict[str, Any]]()
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = _read_lines(file)
        if lines:
            _compare(lines[0].get(KIND), dict(settings), file)
            self.results = [line for line in lines[1:] if "score" in line or "loss" in line]
        self.stream = open(file, "a", encoding="utf-8")  # noqa: SIM115 - open as long as the evaluation runs
        if not lines:
            self._write({KIND: dict(settings)})

    @property
    def done(self) -> set[str]:
        return {result["id"] for result in self.results}

    def add(self, result: dict[str, Any]) -> None:
        self.results.append(result)
        self._write(result)

    def _write(self, line: Mapping[str, Any]) -> None:
        self.stream.write(json.dumps(line, ensure_ascii=False) + "\n")
        self.stream.flush()


def _read_lines(file: Path) -> list[dict[str, Any]]:
    """The whole lines. A line that a killed evaluation left unfinished is cut off."""
    if not file.exists():
        return []
    content = file.read_bytes()
    end = content.rfind(b"\n") + 1
    if end < len(content):
        with open(file, "r+b") as stream:
            stream.truncate(end)
    return [json.loads(line) for line in content[:end].splitlines()]


def _compare(before: Any, settings: dict[str, Any], file: Path) -> None:
    """Results of another model or other samples are not mixed."""
    if before == settings:
        return
    changed = sorted(key for key in {*settings, *(before or {})} if (before or {}).get(key) != settings.get(key))
    message = f"{file} holds the results of another evaluation: {', '.join(changed)} differ"
    raise RecipeError([Problem("--output", message, "name another folder, or remove this one")])
