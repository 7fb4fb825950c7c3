"""Chooses a run's attention kernel: the fastest one that is exact for this model on this device, checked by running it.

plan/attention.py lists what each kernel supports; a model that none supports is an error that names the reasons.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from pathlib import Path

import torch

from ulysses_cli.plan.attention import BACK_ENDS, FLASH_CAPABILITY, Device, Need, format_capability, list_able
from ulysses_cli.plan.nouns import format_count
from ulysses_cli.train.attention.kernels.operators import KERNELS
from ulysses_cli.train.attention.kernels.presence import CommonPresence, join_presence, read_presence
from ulysses_cli.train.attention.kernels.trial import TrialRequest, TrialResult, describe_error, try_kernel
from ulysses_cli.train.attention.kernels.trial_process import try_in_process
from ulysses_cli.train.attention.kernels.workload import ANY_WORK, KernelWorkload
from ulysses_cli.train.processes.choice_cache import ChoiceCache, get_folder

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
