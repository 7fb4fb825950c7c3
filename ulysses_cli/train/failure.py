"""Turns an exception of a rank into what the user is shown: one line, a hint, the exit code."""

from __future__ import annotations

from typing import Any

from ulysses_cli.plan.problem import FAILED, USAGE, RecipeError
from ulysses_cli.run.checkpoints import CheckpointError
from ulysses_cli.run.lock import LostFolderError
from ulysses_cli.run.resume import ResumeError
from ulysses_cli.train.attention.interface import UnservedError
from ulysses_cli.train.memory.offload import OffloadDiskError
from ulysses_cli.train.metrics import BadStepsError
from ulysses_cli.train.model.loading import BuildError
from ulysses_cli.train.processes.consistency import DisagreementError
from ulysses_cli.train.processes.device import GpuMemoryError, StartError
from ulysses_cli.train.record import TrackerError
from ulysses_cli.train.reference import ReferenceMismatchError

ANTICIPATED = (
    BadStepsError, CheckpointError, DisagreementError, LostFolderError, OffloadDiskError, ReferenceMismatchError,
)  # fmt: skip


def describe_failure(error: BaseException) -> dict[str, Any]:
    """`is_cause`: an anticipated error is why the run ended; any other may follow from another rank's death.
    `is_final`: an anticipated error would happen again, so a restart in place is of no use."""
    failure = _describe(error)
    is_anticipated = "is_unforeseen" not in failure
    return {**failure, "is_cause": is_anticipated, "is_final": is_anticipated}


def _describe(error: BaseException) -> dict[str, Any]:
    if isinstance(error, RecipeError):
        text = "; ".join(f"{problem.key}: {problem.message}" if problem.key else problem.message
                         for problem in error.problems)  # fmt: skip
        return {"message": text, "hint": error.problems[0].hint, "exit_code_wanted": USAGE}
    if isinstance(error, BuildError | StartError | TrackerError | ResumeError | UnservedError):
        return {"message": str(error), "exit_code_wanted": USAGE}
    if isinstance(error, GpuMemoryError):
        return {"message": str(error), "hint": error.hint, "exit_code_wanted": FAILED}
    if isinstance(error, ANTICIPATED):
        return {"message": str(error), "exit_code_wanted": FAILED}
    lines = str(error).strip().splitlines() or [""]
    return {"message": f"{type(error).__name__}: {lines[0][:400]}", "exit_code_wanted": FAILED, "is_unforeseen": True}
