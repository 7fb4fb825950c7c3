"""Leaves out what takes time in each process of a test and changes no result."""

import os
from functools import cache

import typer.main
import typer.testing

from support.tiers import FULL, TIER


def take_shortcuts() -> None:
    """Typer makes all commands anew at each call, which takes a quarter of a second. A disk's confirmation takes
    milliseconds, and matters where a machine loses its power: only `make test-full` waits for it."""
    typer.main.get_command = typer.testing._get_command = cache(typer.main.get_command)
    if TIER < FULL:
        os.fsync = os.fdatasync = confirm


def confirm(file: int) -> None:
    os.fstat(file)  # an open file, or it raises as fsync does
