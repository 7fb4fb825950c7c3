"""Settles layouts of a request, the most promising first, until the plans that are listed are known. A layout's memory
is the same on every kind of GPU, so it is computed once for all kinds.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property, partial

from ulysses_cli.plan.hardware import Gpu
from ulysses_cli.plan.layout import Layout
from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.ledger.ledger import Ledger, compute_ledger
from ulysses_cli.plan.levers import Levers, uses_disk
from ulysses_cli.plan.planner.candidates import Candidate, PlanRequest
from ulysses_cli.plan.planner.fit import Fit, is_indexable, is_tried, judge
from ulysses_cli.plan.planner.lever_choice import (
    COSTS,
    find_cheapest,
    list_smallest,
    offload_least,
    screen_levers,
    walk_fits,
)
from ulysses_cli.plan.planner.rings import forget_ring, keep_rings_that_win
from ulysses_cli.plan.planner.spending import spend_what_is_left
from ulysses_cli.plan.planner.walls import count_distance, find_excess
from ulysses_cli.plan.speed import compute_speed

Order = Callable[[Candidate], tuple[float, ...]]


class Contest:
    """Settles layouts, the most promising first: no lever makes a step faster, so a layout's time without any lever is
    a bound for its plan, and a layout whose bound lies behind the plans that are listed is never settled."""

    def __init__(self, request: PlanRequest, layouts: Sequence[tuple[Job, list[Gpu]]]) -> None:
        self.request = request
        self._settled: dict[int, list[Candidate | None]] = {}
        self._ledgers: dict[int, LedgersOfJob] = {}
        groups: dict[tuple[str, Layout], list[tuple[Job, Gpu]]] = {}
        for job, gpus in layouts:
            for gpu in gpus:
                groups.setdefault((gpu.key, forget_ring(job.layout)), []).append((job, gpu))
        self.groups = list(groups.values())  # of one kind of GPU, layouts that differ in their ring alone
        self.bounds = [[self._find_bound(job, gpu) for job, gpu in group] for group in self.groups]

    def rank(self, order: Order, limit: int) -> list[Candidate]:
        """The best plan of each kind inside all bounds, the best kinds first, at most `limit`. A kind whose plans all
        have more GPUs than the work needs comes after the others, with the fewest GPUs that fit."""
        heap: list[tuple[tuple[float, ...], int, Candidate | None]] = [
            (min(map(order, bounds)), number, None)
            for number, bounds in enumerate(self.bounds)
            if not all(find_excess(self.request, bound) for bound in bounds)
        ]
        heapq.heapify(heap)
        found: dict[str, Candidate] = {}
        others: dict[str, list[Candidate]] = {}
        while heap and len(found) < limit:
            _, number, plan = heapq.heappop(heap)
            kind = self.groups[number][0][1].key
            if kind in found:
                continue
            if plan is None:
                plan = self._choose(number)
                if plan is not None:
                    heapq.heappush(heap, (order(plan), number, plan))
            elif plan.is_justified:
                found[kind] = plan
            else:
                others.setdefault(kind, []).append(plan)
        fewest = [
            min(plans, key=lambda plan: (plan.job.world_size, order(plan)))
            for kind, plans in others.items()
            if kind not in found
        ]
        return [*found.values(), *sorted(fewest, key=order)][:limit]

    def list_tried(self, gpu: Gpu | None = None) -> list[Candidate]:
        """The plan or the nearest miss of every layout; of one kind of GPU if one is given."""
        numbers = [number for number, group in enumerate(self.groups) if gpu is None or group[0][1].key == gpu.key]
        return [plan for number in numbers for plan in self._list_tried(number)]

    def list_rivals(self, plans: Iterable[Candidate]) -> list[Candidate]:
        """What was tried of the layouts that differ from those of these plans in their ring alone."""
        shown = {(plan.gpu.key, forget_ring(plan.job.layout)) for plan in plans}
        firsts = [(gpu.key, forget_ring(job.layout)) for job, gpu in (group[0] for group in self.groups)]
        return [plan for number, first in enumerate(firsts) if first in shown for plan in self._list_tried(number)]

    def _list_tried(self, number: int) -> list[Candidate]:
        missed = (
            plan or find_nearest(self.request, self._get_ledgers(job), gpu)
            for plan, (job, gpu) in zip(self._settle(number), self.groups[number], strict=True)
        )
        return [plan for plan in missed if plan is not None]

    def _choose(self, number: int) -> Candidate | None:
        plans = [plan for plan in self._settle(number) if plan is not None]
        kept = keep_rings_that_win([plan for plan in plans if not find_excess(self.request, plan)])
        return kept[0] if kept else None

    def _settle(self, number: int) -> list[Candidate | None]:
        if number not in self._settled:
            fits = [find_fit(self.request, self._get_ledgers(job), gpu) for job, gpu in self.groups[number]]
            self._settled[number] = fits
        return self._settled[number]

    def _get_ledgers(self, job: Job) -> LedgersOfJob:
        return self._ledgers.setdefault(id(job), LedgersOfJob(job))  # whose layouts keep the job alive

    def _find_bound(self, job: Job, gpu: Gpu) -> Candidate:
        return Candidate(gpu, job, UNKNOWN, compute_speed(job, gpu), self.request.num_tokens)


UNKNOWN = Fit("fits", "", 0, 0, 0, 0, 0, 0)


class LedgersOfJob:
    """Ledgers of a layout by levers. They are the same for every kind of GPU."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.measured: dict[Levers, Ledger | None] = {}

    @cached_property
    def smallest(self) -> list[Levers]:
        return list_smallest(self.job)

    def judge(self, gpu: Gpu, levers: Levers) -> Fit | None:
        tried = replace(self.job, levers=levers)
        if levers not in self.measured:
            self.measured[levers] = compute_ledger(tried) if is_indexable(tried) else None
        ledger = self.measured[levers]
        return judge(tried, ledger, gpu) if ledger is not None else None


def find_fit(request: PlanRequest, ledgers: LedgersOfJob, gpu: Gpu) -> Candidate | None:
    """The cheapest levers that fit; where none fit without a last measure, the fastest that fit with one."""
    job, judge_levers = ledgers.job, partial(ledgers.judge, gpu)
    plain = judge_levers(job.levers)
    levers: Levers | None = job.levers
    if plain is None or plain.verdict != "fits" or not is_tried(job):
        levers = find_cheapest(job, gpu, list(COSTS), judge_levers, screen_levers(job, judge_levers))
    fit = judge_levers(levers) if levers is not None else None
    if levers is None or fit is None or fit.verdict != "fits":
        return None
    levers = spend_what_is_left(job, gpu, levers)
    return _make_candidate(request, job, gpu, levers, judge_levers(levers) or fit)


def find_nearest(request: PlanRequest, ledgers: LedgersOfJob, gpu: Gpu) -> Candidate | None:
    """The nearest miss of a layout that fits with no levers; None where no kernel can index its row."""
    job, judge_levers = ledgers.job, partial(ledgers.judge, gpu)
    misses = walk_fits(job, [*ledgers.smallest, *ledgers.measured], judge_levers, is_open=False)
    nearest = min(misses, key=lambda miss: count_distance(miss[1]), default=None)
    if nearest is None:
        return None
    if nearest[1].spare_bytes >= 0:  # the host is the wall: offload only what must leave
        nearest = offload_least(*nearest, judge_levers)
    return _make_candidate(request, job, gpu, *nearest)


def _make_candidate(request: PlanRequest, job: Job, gpu: Gpu, levers: Levers, fit: Fit) -> Candidate:
    settled = replace(job, levers=levers, has_disk=uses_disk(levers))
    return Candidate(gpu, settled, fit, compute_speed(settled, gpu), request.num_tokens)
