"""Chooses a run's attention kernel: the fastest one that is exact for this model on this device, checked by running
it on a typical row of the run. Compares what the ranks' machines have of GPUs, libraries and packages first.

plan/attention.py lists what each kernel supports; a model that none supports is an error that names the reasons.
Reads the lengths of rows, never their tokens."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from itertools import groupby
from pathlib import Path

import torch

from ulysses_cli.data.steps import Rows
from ulysses_cli.plan.attention import (
    BACK_ENDS,
    FLASH_CAPABILITY,
    MAX_CUDNN_LENGTHS,
    Capability,
    Device,
    Need,
    format_capability,
    list_able,
)
from ulysses_cli.plan.units import format_count
from ulysses_cli.train.attention.kernels.operators import KERNELS
from ulysses_cli.train.attention.kernels.trial import TrialRequest, TrialResult, describe_error, try_kernel
from ulysses_cli.train.attention.kernels.trial_process import try_in_process
from ulysses_cli.train.processes.compiling import ChoiceCache, get_folder
from ulysses_cli.train.processes.consistency import DisagreementError

MAX_TIMED_TOKENS = 32 * 1024  # with more tokens the fastest kernel stays the same
NUM_SAMPLED_ROWS = 64


@dataclass(frozen=True)
class LengthMix:
    """`lengths`: of the documents in a typical row. `has_few_lengths`: all rows of the run have the same few."""

    lengths: tuple[int, ...] = (4096, 1500, 1, 2595)
    has_few_lengths: bool = False


ANY_MIX = LengthMix()


@dataclass(frozen=True)
class KernelWorkload:
    """What one rank's kernel gets: documents of the mix, and the rank's heads."""

    mix: LengthMix = ANY_MIX
    num_heads: int = 8
    num_kv_heads: int = 2

    def cut(self) -> tuple[int, ...]:
        """At most MAX_TIMED_TOKENS of the mix. Long and short documents keep their shares of the tokens; only documents
        longer than a quarter of it are shortened."""
        lengths = sorted(filter(None, self.mix.lengths), reverse=True)
        total = sum(lengths)
        if total <= MAX_TIMED_TOKENS:
            return tuple(length for length in self.mix.lengths if length)
        quarter, kept, due = MAX_TIMED_TOKENS // 4, list[int](), 0.0
        for length in lengths:
            due += length * MAX_TIMED_TOKENS / total
            left = MAX_TIMED_TOKENS - sum(kept)
            if left > 0 and due >= min(length, quarter) / 2:
                kept.append(min(length, left, max(quarter, int(due))))
                due -= kept[-1]
        return tuple(kept)


ANY_WORK = KernelWorkload()


def measure_mix(rows: Rows, eval_rows: Rows | None = None, *, generates: bool = False) -> LengthMix:
    """Takes the row of median work among a sample that is spread over all rows. Kernels get the lengths of evaluation
    too. `generates`: and those of prompts, of which there are many."""
    num_rows = len(rows)
    if not num_rows:
        return ANY_MIX
    step = -(-num_rows // NUM_SAMPLED_ROWS)
    sampled = sorted((rows.get_lengths(row) for row in range(0, num_rows, step)), key=_measure_work)
    all_rows = [rows] if eval_rows is None else [rows, eval_rows]
    return LengthMix(tuple(sampled[len(sampled) // 2]), not generates and _has_few_lengths(all_rows))


def _measure_work(lengths: tuple[int, ...]) -> int:
    return sum(length * length for length in lengths)


def _has_few_lengths(all_rows: Iterable[Rows]) -> bool:
    """What fills up a row is a document too, of a length that follows from the row's tokens: their number counts."""
    found: set[int] = set()
    for lengths in (rows.get_lengths(row) for rows in all_rows for row in range(len(rows))):
        found.update(lengths)
        found.add(sum(lengths))
        if len(found) > MAX_CUDNN_LENGTHS:
            return False
    return True


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


SOURCES = Path(__file__).parent


@dataclass(frozen=True)
class KernelChoice:
    """The kernel of a run, and why it was chosen. `by_head_dim`: where layers differ in the width of their heads, the
    kernel of each width. `is_lasting`: no kernel failed when it was tried, which a full GPU or a busy machine may
    explain, so a later run may use the choice."""

    name: str
    reason: str
    by_head_dim: Mapping[int, str] = field(default_factory=dict)
    is_lasting: bool = True

    def pick(self, head_dim: int) -> str:
        return self.by_head_dim.get(head_dim, self.name)


class BrokenDeviceError(RuntimeError):
    """The GPU's context in this process is in an error that no later call would survive."""


@dataclass(frozen=True, eq=False)
class KernelSearch:
    """Where and for what a kernel is sought. `presence`: what all ranks have; None: what this process has."""

    need: Need
    device: torch.device
    window_tokens: int | None = None
    work: KernelWorkload = ANY_WORK
    presence: CommonPresence | None = None

    @property
    def kind(self) -> Device:
        return "cuda" if self.device.type == "cuda" else "cpu"

    def find_presence(self) -> CommonPresence:
        return self.presence or join_presence([read_presence(self.device)])


def choose_kernel(wanted: str, search: KernelSearch, *, uses_cache: bool = False) -> KernelChoice:
    """Returns the named kernel, or for `auto` a fast one that is exact here. Each candidate runs against the reference.
    One that fails or differs is passed over, with its reason; if the recipe named it, that is an error."""
    if search.kind == "cpu" or not uses_cache:
        return _choose(wanted, search)
    facts = {"wanted": wanted, "need": asdict(search.need), "window": search.window_tokens, "work": asdict(search.work)}
    cache = ChoiceCache(get_folder(os.environ), SOURCES, facts | {"presence": asdict(search.find_presence())})
    if (found := cache.read()) and found[0] in KERNELS:
        return KernelChoice(found[0], f"{found[1]} (found in an earlier run: {cache.file})")
    choice = _choose(wanted, search)
    if choice.is_lasting:
        cache.write(choice.name, choice.reason)
    return choice


def _choose(wanted: str, search: KernelSearch) -> KernelChoice:
    if wanted != "auto":
        return _choose_named(wanted, search)
    passed, notes, has_failure = _try_candidates(search)
    if not passed:
        raise ValueError("no attention kernel is exact here: " + "; ".join(notes))
    best = min(passed, key=lambda name: passed[name])
    if search.kind == "cpu":
        return KernelChoice(best, "the only one that runs on a CPU")
    times = ", ".join(f"{name} {passed[name] * 1e3:.2f} ms" for name in sorted(passed, key=lambda n: passed[n]))
    timed = f"{sum(search.work.cut()):,} tokens, {format_count(search.work.num_heads, 'head')}"
    capability = search.find_presence().capabilities[0]
    if BACK_ENDS[best].find_speed_class(capability) == 0:
        reason = f"exact here, and made for this GPU; forward and backward of {timed}: {times}"
    else:
        reason = f"fastest of those exact here, forward and backward of {timed}: {times}"
    if capability is not None and capability < FLASH_CAPABILITY:
        reason += (
            f"; a GPU of compute capability {format_capability(capability)} has no flash kernel for bfloat16, so plain "
            "torch runs in blocks, many times slower"
        )
    reason += f"; passed over: {'; '.join(notes)}" if notes else ""
    return KernelChoice(best, reason, is_lasting=not has_failure)


def _choose_named(name: str, search: KernelSearch) -> KernelChoice:
    presence = search.find_presence()
    obstacle = _find_obstacle(name, search, presence) or presence.differing.get(name, "")
    obstacle = obstacle or _try(name, search, is_timed=False).obstacle
    if not obstacle:
        return KernelChoice(name, "as the recipe says")
    able = [other for other in list_able(search.need, search.kind, presence.capabilities[0]) if other != name]
    able = [other for other in able if not _find_absence(other, presence)]
    others = f"for this model and device there are: {', '.join(able)}" if able else "nothing else serves here"
    raise ValueError(f"attention {name} {obstacle}; {others}")


def _try_candidates(search: KernelSearch) -> tuple[dict[str, float], list[str], bool]:
    """Returns the seconds of exact kernels, all of one speed class, why others were passed over, and whether one of
    them failed when it was tried. A class ends the search when one of its kernels is exact; the kernels that were made
    for this GPU are the first class."""
    presence = search.find_presence()
    passed: dict[str, float] = {}
    notes: list[str] = []
    has_failure = False
    for names in _list_classes(presence):
        for name in names:
            obstacle = _find_obstacle(name, search, presence) or _find_absence(name, presence)
            obstacle = obstacle or _find_reluctance(name, search)
            result = TrialResult(obstacle) if obstacle else _try(name, search, is_timed=search.kind == "cuda")
            has_failure |= bool(result.obstacle) and not obstacle
            if not result.obstacle:
                passed[name] = result.seconds
            elif search.kind in BACK_ENDS[name].devices:
                notes.append(f"{name} {result.obstacle}")
        if passed:
            break
    return passed, notes, has_failure


def _list_classes(presence: CommonPresence) -> Iterator[list[str]]:
    def find_class(name: str) -> int:
        return BACK_ENDS[name].find_speed_class(presence.capabilities[0])

    for _, names in groupby(sorted(BACK_ENDS, key=find_class), find_class):
        yield list(names)


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


def _try(name: str, search: KernelSearch, *, is_timed: bool) -> TrialResult:
    request = TrialRequest(
        name,
        replace(search.need, call=None),
        str(search.device),
        search.window_tokens,
        search.work.cut() if is_timed else (),
        search.work.num_heads,
        search.work.num_kv_heads,
    )
    if search.kind == "cuda" and KERNELS[name].is_foreign:
        return try_in_process(request)
    result = try_kernel(request)
    if search.kind == "cuda":
        _check_device(name, result, search.device)
    return result


def _check_device(name: str, result: TrialResult, device: torch.device) -> None:
    """An illegal access leaves an error in the context of this process, which every later call would meet."""
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise BrokenDeviceError(
            f"attention {name} broke this process's GPU context ({result.obstacle or describe_error(error)}): name "
            "another kernel with model.attn_implementation"
        ) from error


def join_choices(choices: Mapping[int, KernelChoice]) -> KernelChoice:
    """Takes the choice for each width of heads. One that serves all widths has one name."""
    names = {width: choice.name for width, choice in choices.items()}
    if len(names) == 1:
        return next(iter(choices.values()))
    reason = "; ".join(f"heads of {width}: {choice.reason}" for width, choice in choices.items())
    if len(set(names.values())) == 1:
        return KernelChoice(next(iter(names.values())), reason)
    name = " and ".join(f"{name} (heads of {width})" for width, name in names.items())
    return KernelChoice(name, reason, names)
