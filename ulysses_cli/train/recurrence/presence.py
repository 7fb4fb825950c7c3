"""The packages that bring kernels of recurrences and convolutions: what a rank's machine has of them, and what all
ranks have alike. A rank without a package would run transformers' torch code where the others run a kernel.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ulysses_cli.train.attention.kernels.presence import find_version
from ulysses_cli.train.recurrence.kernels import find_missing

# Distributions: those that have kernels, what they are built on, and the compiler of kernels that come as source code.
PACKAGES = ("flash-linear-attention", "fla-core", "mamba-ssm", "causal-conv1d", "triton")


@dataclass(frozen=True)
class RecurrencePresence:
    """Facts of one rank. `missing`: why each of transformers' functions has no kernel, or ''."""

    machine: str
    versions: Mapping[str, str]
    missing: Mapping[str, str]


def read_recurrence_presence(functions: Mapping[str, Callable[..., Any]]) -> RecurrencePresence:
    return RecurrencePresence(
        machine=socket.gethostname(),
        versions={name: find_version([name]) for name in PACKAGES},
        missing={name: find_missing(function) for name, function in functions.items()},
    )


def find_differences(ranks: Sequence[RecurrencePresence]) -> dict[str, str]:
    """Says for each function why not all ranks can run a kernel alike, or why none can. Says nothing of the others."""
    first = ranks[0]
    differing: dict[str, str] = {}
    for rank, other in enumerate(ranks):
        place = f"{other.machine} (rank {rank})"
        unlike = [name for name in PACKAGES if other.versions[name] != first.versions[name]]
        for name, why in other.missing.items():
            if why:
                is_everywhere = all(each.missing[name] for each in ranks)
                differing.setdefault(name, first.missing[name] if is_everywhere else f"{why} on {place}")
            elif unlike:
                package = unlike[0]
                versions = f"{other.versions[package]} on {place} and {first.versions[package]} on {first.machine}"
                differing.setdefault(name, f"{package} has several versions: {versions}")
    return differing
