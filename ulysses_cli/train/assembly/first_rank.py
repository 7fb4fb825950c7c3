"""A choice that rank 0 makes for all ranks, or the error with which it failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from ulysses_cli.train.assembly.loading import BuildError
from ulysses_cli.train.attention.kernels.choice import BrokenDeviceError
from ulysses_cli.train.processes.consistency import gather_values
from ulysses_cli.train.processes.groups import Groups

_T = TypeVar("_T")


def choose_on_first(groups: Groups, choose: Callable[[], _T]) -> _T:
    """Collective over all ranks. Rank 0 chooses, and all get its choice or its error: none waits for a rank that has
    failed."""
    choice: _T | None = None
    error: Exception | None = None
    if groups.is_first:
        try:
            choice = choose()
        except (ValueError, BrokenDeviceError) as refusal:
            error = BuildError(str(refusal))
        except Exception as unforeseen:  # noqa: BLE001 - the other ranks wait for this one
            error = unforeseen
    told = None if error is None else (isinstance(error, BuildError), str(error) or type(error).__name__)
    choice, told = gather_values((choice, told), groups.host_group)[0]
    if error is not None:
        raise error
    if told is not None:
        is_refusal, text = told
        raise BuildError(text) if is_refusal else RuntimeError(f"rank 0: {text}")
    return cast(_T, choice)
