"""Ranks compare what they are about to do. A collective that some ranks would enter with other sizes, or not at all,
becomes an error that names the rank and the field.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist


class DisagreementError(RuntimeError):
    """Ranks hold different facts."""


def compare_facts(facts: Mapping[str, Any], group: dist.ProcessGroup, *flags: int) -> list[int]:
    """Collective over all ranks, on the host. -> for each flag the largest value that any rank brings.

    Called once per step by every rank, before anything else of the step.
    """
    names = sorted(facts)
    mine = torch.tensor([*(_fold(facts[name]) for name in names), *flags], dtype=torch.int64)
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, mine, group=group)
    table = torch.stack(found)
    for at, name in enumerate(names):
        column = table[:, at]
        common = column.mode().values
        odd = (column != common).nonzero().flatten().tolist()
        if odd:
            who = f"rank {odd[0]}" if len(odd) == 1 else f"ranks {', '.join(map(str, odd[:8]))}"
            raise DisagreementError(f"{who} differ{'s' if len(odd) == 1 else ''} from the others in {name}")
    return [int(value) for value in table[:, len(names) :].amax(0)] if flags else []


def gather_values(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Collective over all ranks: everyone's plain value, in the order of ranks."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def compare_machines(told: list[tuple[str, Mapping[str, Any]]]) -> None:
    """(name of the machine, facts) of every rank. All see the same difference, so all stop with the same words."""
    first_name, first = told[0]
    for name, facts in told[1:]:
        for key, value in facts.items():
            if value != first[key]:
                raise DisagreementError(f"{name} and {first_name} differ in {key}: {value} and {first[key]}")


def _fold(value: Any) -> int:
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:8], "big", signed=True)
