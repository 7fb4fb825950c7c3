"""Counts elements of weights whose gather starts only when their module needs them, and of gradients that are reduced
together: the ledger's engine and DeepSpeed's own are asked the same."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from ulysses_cli.plan.ledger import moments
from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.ledger.stage3 import ShardedEngine, Status, Weight
from ulysses_cli.plan.sizes.tensor import Storage


class Starts:
    """Elements that were gathered in the last micro-step, `late` and in `all`, and those of each reduction."""

    def __init__(self) -> None:
        self.late = self.all = 0
        self.reduced: list[int] = []

    def add(self, num_elements: int, *, is_late: bool) -> None:
        self.all += num_elements
        self.late += num_elements if is_late else 0


class CountingEngine(ShardedEngine):
    starts = Starts()
    needed: Iterable[Weight] = ()

    def begin_step(self) -> None:
        super().begin_step()
        CountingEngine.starts = Starts()

    def fetch(self, module: str, *, is_forward: bool) -> None:
        self.needed = self.fetched[module]
        super().fetch(module, is_forward=is_forward)

    def _gather(self, weights: Iterable[Weight]) -> None:
        every = list(weights)
        for weight in every:
            if weight.status is Status.AWAY:
                self.starts.add(weight.numel, is_late=weight in self.needed)
        super()._gather(every)

    def _scatter(self, weights: list[Weight]) -> list[Storage]:
        self.starts.reduced.append(sum(weight.numel for weight in weights))
        return super()._scatter(weights)


def predict_starts(job: Job, *, runs_all: bool = False) -> tuple[Starts, int]:
    """Of a step that all later ones are like; and the peak of its forward or backward in bytes."""
    walks, engine = moments.Kept(1), mock.patch.object(moments, "ShardedEngine", CountingEngine)
    with engine, mock.patch.object(moments, "WALKS", walks):
        found = moments.run_step(job, 0, runs_all=runs_all)
    return CountingEngine.starts, max(found[phase].num_bytes for phase in ("forward", "backward"))


@contextmanager
def count_starts() -> Iterator[list[Starts]]:
    """DeepSpeed's own in this process; the last one is that of the step that runs."""
    from deepspeed.runtime.zero import stage3
    from deepspeed.runtime.zero.parameter_offload import ZeroParamStatus
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator as Coordinator
    from deepspeed.runtime.zero.partitioned_param_coordinator import iter_params

    gather = "_PartitionedParameterCoordinator__all_gather_params"
    found, needed = [Starts()], set[Any]()
    own_fetch, own_gather, own_reset = (
        Coordinator._fetch_sub_module_impl,
        getattr(Coordinator, gather),
        Coordinator.reset_step,
    )

    def fetch(self: Any, module: Any, forward: bool, is_leaf: bool) -> None:
        needed.clear()
        needed.update(iter_params(module, recurse=is_leaf))
        own_fetch(self, module, forward, is_leaf)

    def start(self: Any, params: Any, forward: bool) -> None:
        for param in params:
            if param.ds_status == ZeroParamStatus.NOT_AVAILABLE:
                found[-1].add(param.ds_numel, is_late=param in needed)
        own_gather(self, params, forward)

    def reset(self: Any) -> None:
        own_reset(self)
        found.append(Starts())

    def reduce(tensors: Any, group: Any = None) -> Any:
        found[-1].reduced.append(sum(tensor.numel() for tensor in tensors))
        return own_reduce(tensors, group)

    own_reduce = stage3.reduce_scatter_coalesced
    changed = {"_fetch_sub_module_impl": fetch, gather: start, "reset_step": reset}
    with mock.patch.multiple(Coordinator, **changed), mock.patch.object(stage3, "reduce_scatter_coalesced", reduce):
        yield found
