"""Ranks compare what they are about to do. A collective that some ranks would enter with other sizes, or not at all,
becomes an error that names the rank and the field.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from ulysses_cli.run_folder.seal import find_seal

GATHERED = "a value gathered from all ranks"


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
    """Collective over all ranks: everyone's plain value, in the order of ranks. torch's own unpickles what arrives,
    whoever sent it; here only a rank of this run is believed."""
    seal, device = find_seal(), _find_device(group)
    content = bytearray(seal.close(GATHERED, pickle.dumps(value)))
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, torch.tensor([len(content)], device=device), group=group)
    widths = [int(length) for length in lengths]
    mine = torch.frombuffer(content.ljust(max(widths), b"\0"), dtype=torch.uint8).to(device)
    found = [torch.empty_like(mine) for _ in widths]
    dist.all_gather(found, mine, group=group)
    told = [each.cpu().numpy()[:width].tobytes() for each, width in zip(found, widths, strict=True)]
    return [pickle.loads(seal.open(GATHERED, each)) for each in told]  # noqa: S301 - sealed by a rank of this run


def _find_device(group: dist.ProcessGroup) -> torch.device:
    """Where the group's tensors are."""
    return (
        torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else torch.device("cpu")
    )


def compare_machines(told: list[tuple[str, Mapping[str, Any]]]) -> None:
    """(name of the machine, facts) of every rank. All see the same difference, so all stop with the same words."""
    first_name, first = told[0]
    for name, facts in told[1:]:
        for key, value in facts.items():
            if value != first[key]:
                raise DisagreementError(f"{name} and {first_name} differ in {key}: {value} and {first[key]}")


def _fold(value: Any) -> int:
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:8], "big", signed=True)
