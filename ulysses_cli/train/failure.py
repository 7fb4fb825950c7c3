"""An exception of a rank -> what the person is shown: one line, a hint, the exit code."""

from __future__ import annotations

from typing import Any

import torch

from ulysses_cli.plan.problem import RecipeError
from ulysses_cli.train.agreement import DisagreementError
from ulysses_cli.train.archive import CheckpointError
from ulysses_cli.train.bad_steps import BadStepsError
from ulysses_cli.train.device import StartError
from ulysses_cli.train.life import Life
from ulysses_cli.train.loading import BuildError
from ulysses_cli.train.record import MissingTrackerError
from ulysses_cli.train.resume import ResumeError
from ulysses_cli.train.run_lock import LostFolderError

FAILED, USAGE = 1, 2
ANTICIPATED = (BadStepsError, CheckpointError, DisagreementError, LostFolderError)


def describe_failure(error: BaseException, life: Life) -> dict[str, Any]:
    """`is_cause`: what was anticipated is why the run ended, while anything else may be another rank's death, seen from
    here. It would happen again (`is_final`): a restart in its place is of no use."""
    told = _describe(error, life)
    is_anticipated = "is_unforeseen" not in told
    return {**told, "is_cause": is_anticipated, "is_final": is_anticipated}


def _describe(error: BaseException, life: Life) -> dict[str, Any]:
    if isinstance(error, RecipeError):
        text = "; ".join(f"{problem.key}: {problem.message}" if problem.key else problem.message
                         for problem in error.problems)  # fmt: skip
        return {"message": text, "hint": error.problems[0].hint, "exit_code_wanted": USAGE}
    if isinstance(error, BuildError | StartError | MissingTrackerError | ResumeError):
        return {"message": str(error), "exit_code_wanted": USAGE}
    if isinstance(error, torch.OutOfMemoryError):
        return {**life.explain_out_of_memory(error), "exit_code_wanted": FAILED}
    if isinstance(error, ANTICIPATED):
        return {"message": str(error), "exit_code_wanted": FAILED}
    lines = str(error).strip().splitlines() or [""]
    return {"message": f"{type(error).__name__}: {lines[0][:400]}", "exit_code_wanted": FAILED, "is_unforeseen": True}
