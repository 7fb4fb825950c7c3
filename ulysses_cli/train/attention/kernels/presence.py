"""What a rank's machine has for attention: its GPU, its libraries, the packages of kernels. Joins what all ranks have.
Loads no kernel.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata

import torch

from ulysses_cli.plan.attention import Capability
from ulysses_cli.train.attention.kernels.operators import KERNELS
from ulysses_cli.train.processes.consistency import DisagreementError

# Distributions that bring kernels. Their versions may differ between machines without an error of any library.
PACKAGES = {
    "flash_attention_2": ("flash-attn",),
    "flash_attention_3": ("flash-attn-3", "flash_attn_3"),
    "flash_attention_4": ("flash-attn-4",),
}
UNKNOWN = "unknown"


@dataclass(frozen=True)
class Presence:
    """Facts of one rank. `missing`: why each kernel cannot be loaded, or ''."""

    machine: str
    gpu: str
    capability: Capability | None
    libraries: Mapping[str, str]
    kernels: Mapping[str, str]
    missing: Mapping[str, str]


@dataclass(frozen=True)
class CommonPresence:
    """What all ranks have. `missing`: kernels that no rank has; `differing`: those that only some have, or in several
    versions; with the reason."""

    capabilities: tuple[Capability | None, ...]
    missing: Mapping[str, str] = field(default_factory=dict)
    differing: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)


def read_presence(device: torch.device) -> Presence:
    is_gpu = device.type == "cuda"
    capability = torch.cuda.get_device_capability(device) if is_gpu and torch.version.hip is None else None
    return Presence(
        machine=socket.gethostname(),
        gpu=torch.cuda.get_device_name(device) if is_gpu else "CPU",
        capability=capability,
        libraries=_list_libraries() if is_gpu else {"torch": torch.__version__},
        kernels={name: find_version(names) for name, names in PACKAGES.items()},
        missing={name: kernel.find_missing() for name, kernel in KERNELS.items()},
    )


def join_presence(ranks: Sequence[Presence]) -> CommonPresence:
    """Raises DisagreementError where machines have libraries that must be the same for collectives or torch."""
    first = ranks[0]
    missing = {name: why for name, why in first.missing.items() if why and all(rank.missing[name] for rank in ranks)}
    differing: dict[str, str] = {}
    for rank, other in enumerate(ranks):
        for name, version in other.libraries.items():
            if version != first.libraries.get(name):
                raise DisagreementError(
                    f"{other.machine} (rank {rank}) has {name} {version}, {first.machine} (rank 0) has "
                    f"{first.libraries.get(name, 'none')}: install the same on all machines"
                )
        for name, why in other.missing.items():
            if why and name not in missing:
                differing.setdefault(name, f"{why} on {other.machine} (rank {rank})")
            elif other.kernels.get(name) != first.kernels.get(name):
                versions = f"{other.kernels[name]} on {other.machine} and {first.kernels[name]} on {first.machine}"
                differing.setdefault(name, f"has several versions: {versions}")
    facts = {"gpu": " + ".join(dict.fromkeys(rank.gpu for rank in ranks)), **first.libraries, **first.kernels}
    capabilities = tuple(dict.fromkeys(rank.capability for rank in ranks))
    return CommonPresence(capabilities, missing, differing, facts)


def _list_libraries() -> dict[str, str]:
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else UNKNOWN
    return {
        "torch": torch.__version__,
        "CUDA": str(torch.version.cuda or torch.version.hip),
        "cuDNN": str(torch.backends.cudnn.version()),
        "NCCL": nccl,
    }


def find_version(names: Sequence[str]) -> str:
    """Of the first of these distributions that is installed."""
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return UNKNOWN
