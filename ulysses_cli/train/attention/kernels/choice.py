"""Chooses a run's attention kernel: the fastest one that is exact for this model on this device, checked by running
it on a typical row of the run. Compares what the ranks' machines have of GPUs, libraries and packages first.

plan/attention.py lists what each kernel supports; a model that none supports is an error that names the reasons."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch

from ulysses_cli.plan.attention import BACK_ENDS, FLASH_CAPABILITY, Capability, format_capability, list_able
from ulysses_cli.plan.units import format_count
from ulysses_cli.train.attention.kernels.operators import KERNELS
from ulysses_cli.train.attention.kernels.trial import KernelSearch, try_kernel
from ulysses_cli.train.choosing import (
    UNKNOWN,
    Candidate,
    Choice,
    Outcome,
    choose_once,
    describe_error,
    find_version,
    try_candidates,
    try_in_child,
)
from ulysses_cli.train.processes.consistency import DisagreementError

# Distributions that bring kernels. Their versions may differ between machines without an error of any library.
PACKAGES = {
    "flash_attention_2": ("flash-attn",),
    "flash_attention_3": ("flash-attn-3", "flash_attn_3"),
    "flash_attention_4": ("flash-attn-4",),
}
SOURCES = Path(__file__).parent


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


@dataclass(frozen=True)
class KernelChoice(Choice[str]):
    """The kernel of a run. `by_head_dim`: where layers differ in the width of their heads, the kernel of each width."""

    by_head_dim: Mapping[int, str] = field(default_factory=dict)

    def pick(self, head_dim: int) -> str:
        return self.by_head_dim.get(head_dim, self.name)


class BrokenDeviceError(RuntimeError):
    """The GPU's context in this process is in an error that no later call would survive."""


def choose_kernel(
    wanted: str, search: KernelSearch, presence: CommonPresence | None = None, *, uses_cache: bool = False
) -> Choice[str]:
    """Returns the named kernel, or for `auto` a fast one that is exact here. Each candidate runs against the reference.
    One that fails or differs is passed over, with its reason; if the recipe named it, that is an error. `presence`:
    what all ranks have; None: what this process has."""
    presence = presence or join_presence([read_presence(search.device)])

    def choose() -> Choice[str]:
        return _choose_fastest(search, presence) if wanted == "auto" else _choose_named(wanted, search, presence)

    if search.kind == "cpu" or not uses_cache:
        return choose()
    facts = {"wanted": wanted, "need": asdict(search.need), "window": search.window_tokens, "work": asdict(search.work)}
    return choose_once(facts | {"presence": asdict(presence)}, SOURCES, choose, KERNELS.__contains__)


def _choose_fastest(search: KernelSearch, presence: CommonPresence) -> Choice[str]:
    """The kernels that were made for this GPU are the first class."""
    capability = presence.capabilities[0]
    candidates = []
    for name, back_end in BACK_ENDS.items():
        if search.kind in back_end.devices:
            obstacle = _find_obstacle(name, search, presence) or _find_absence(name, presence)
            obstacle = obstacle or _find_reluctance(name, search)
            try_out = partial(_try, name, search, is_timed=search.kind == "cuda")
            candidates.append(Candidate(name, try_out, obstacle, back_end.find_speed_class(capability)))
    tally = try_candidates(candidates)
    best, notes = tally.find_best(), "; ".join(tally.notes)
    if best is None:
        raise ValueError(f"no attention kernel is exact here: {notes}")
    if search.kind == "cpu":
        return Choice(best, "the only one that runs on a CPU")
    is_made_for_it = BACK_ENDS[best].find_speed_class(capability) == 0
    reason = "exact here, and made for this GPU; " if is_made_for_it else "fastest of those exact here, "
    timed = f"{sum(search.work.cut()):,} tokens, {format_count(search.work.num_heads, 'head')}"
    reason += f"forward and backward of {timed}: {tally.format_times()}"
    if capability is not None and capability < FLASH_CAPABILITY:
        reason += (
            f"; a GPU of compute capability {format_capability(capability)} has no flash kernel for bfloat16, so plain "
            "torch runs in blocks, many times slower"
        )
    return Choice(best, reason + (f"; passed over: {notes}" if notes else ""), tally.is_lasting)


def _choose_named(name: str, search: KernelSearch, presence: CommonPresence) -> Choice[str]:
    obstacle = _find_obstacle(name, search, presence) or presence.differing.get(name, "")
    obstacle = obstacle or _try(name, search, is_timed=False).obstacle
    if not obstacle:
        return Choice(name, "as the recipe says")
    able = [other for other in list_able(search.need, search.kind, presence.capabilities[0]) if other != name]
    able = [other for other in able if not _find_absence(other, presence)]
    others = f"for this model and device there are: {', '.join(able)}" if able else "nothing else serves here"
    raise ValueError(f"attention {name} {obstacle}; {others}")


def _find_obstacle(name: str, search: KernelSearch, presence: CommonPresence) -> str:
    """The first reason of any rank's GPU."""
    obstacles = (BACK_ENDS[name].find_obstacle(search.need, search.kind, each) for each in presence.capabilities)
    return next(filter(None, obstacles), "")


def _find_absence(name: str, presence: CommonPresence) -> str:
    return presence.missing.get(name) or presence.differing.get(name, "")


def _find_reluctance(name: str, search: KernelSearch) -> str:
    """Why `auto` does not take a kernel that would be exact."""
    if name == "cudnn" and not search.work.mix.has_few_lengths:
        return "builds a plan for each length, and this run's documents have many lengths"
    return ""


def _try(name: str, search: KernelSearch, *, is_timed: bool) -> Outcome:
    try_out = partial(try_kernel, name, search, search.work.cut() if is_timed else ())
    if search.kind == "cpu":
        return try_out()
    if KERNELS[name].is_foreign:
        return try_in_child(try_out)
    outcome = try_out()
    _check_device(name, outcome, search.device)
    return outcome


def _check_device(name: str, outcome: Outcome, device: torch.device) -> None:
    """An illegal access leaves an error in the context of this process, which every later call would meet."""
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise BrokenDeviceError(
            f"attention {name} broke this process's GPU context ({outcome.obstacle or describe_error(error)}): name "
            "another kernel with model.attn_implementation"
        ) from error


def join_choices(choices: Mapping[int, Choice[str]]) -> KernelChoice:
    """Takes the choice for each width of heads. One that serves all widths has one name."""
    names = {width: choice.name for width, choice in choices.items()}
    if len(names) == 1:
        return KernelChoice(**vars(next(iter(choices.values()))))
    reason = "; ".join(f"heads of {width}: {choice.reason}" for width, choice in choices.items())
    if len(set(names.values())) == 1:
        return KernelChoice(next(iter(names.values())), reason)
    name = " and ".join(f"{name} (heads of {width})" for width, name in names.items())
    return KernelChoice(name, reason, by_head_dim=names)
