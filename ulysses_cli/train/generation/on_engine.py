"""Generation on an engine, between steps of training or without an optimizer: the same weights, the same ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ulysses_cli.data.tokenizing.tokenizer import list_stop_tokens
from ulysses_cli.train.attention.documents import Documents
from ulysses_cli.train.engine import Engine, release_gathered
from ulysses_cli.train.generation.cache import GenerationCache
from ulysses_cli.train.generation.decoding import GenerationStopped, Generator
from ulysses_cli.train.processes.consistency import gather_values
from ulysses_cli.train.processes.groups import Groups

MAX_SHARE = 0.4  # of a device's free memory: gathered weights leave the rest to the cache and to activations
# DeepSpeed's hooks around each module, which fetch and release weights and record their order.
COORDINATION = ("fetch_sub_module", "release_sub_module", "trace_prologue", "record_module", "reset_step")


@contextmanager
def generating(
    engine: Engine, *, gathers_once: bool | None = None, should_stop: Callable[[], bool] | None = None
) -> Iterator[Generator]:
    """Collective over all ranks of the engine: enter and leave it on all of them. Inside, every group of sequence ranks
    may read other prompts and run as many forwards as it needs.

    Under ZeRO-3, weights are gathered once where they fit, else in each forward. `gathers_once` decides it instead.
    Outside, the engine trains as if nothing had happened. With `should_stop` all groups run the same number of
    forwards. Before each one all ranks hear whether it holds on any of them; the block then ends early on all, and
    `is_stopped` of the generator says so.
    """
    wrapped, groups = engine.wrapped, engine.groups
    is_sharded = wrapped.zero_optimization_stage() == 3
    if gathers_once is None:
        gathers_once = is_sharded and _fits(wrapped, engine.device, groups)
    is_shared = is_sharded and not gathers_once and groups.layout.world_size > groups.sp_axis.size
    with ExitStack() as stack:
        if is_sharded and gathers_once:
            stack.enter_context(_gathered(wrapped))
        wrapped.eval()
        stack.callback(wrapped.train)
        forward = partial(_run, wrapped)
        is_in_step = is_shared or should_stop is not None
        take_turn = partial(_take_turn, groups, should_stop) if is_in_step else _wait_for_none
        heads, ring = groups.ulysses_axis, groups.ring_axis
        generator = Generator(forward, groups.sp_axis, engine.device, take_turn, heads=heads, ring=ring)
        try:
            yield generator
            generator.finish()
        except GenerationStopped:
            generator.is_stopped = True
        if is_sharded and not gathers_once:
            release_gathered(wrapped)


def agree_on_stop_tokens(engine: Engine, tokenizer: Any, turn_ends: Sequence[str] = ()) -> set[int]:
    """Collective over all ranks of the engine: rank 0's. They decide how many forwards a generation takes, and each
    machine reads them from files of its own, where a generation config may be missing. `turn_ends`: of the data."""
    own = list_stop_tokens(tokenizer, engine.wrapped.module.model)
    own |= {tokenizer.convert_tokens_to_ids(end) for end in turn_ends}
    agreed: set[int] = gather_values(own, engine.groups.host_group)[0]
    return agreed


def _run(
    wrapped: Any,
    tokens: Tensor,
    positions: Tensor,
    cache: GenerationCache,
    wanted: tuple[Tensor, Tensor],
    documents: Documents | None,
) -> Tensor:
    logits: Tensor = wrapped(
        input_ids=tokens, positions=positions, documents=documents, generation=cache, wanted=wanted
    )
    return logits


def _take_turn(groups: Groups, should_stop: Callable[[], bool] | None, has_work: bool) -> bool:
    """Collective over all ranks, on the host: each is about to run a forward or has finished."""
    facts = torch.tensor([has_work, should_stop is not None and should_stop()], dtype=torch.int)
    dist.all_reduce(facts, op=dist.ReduceOp.MAX, group=groups.host_group)
    is_any_working, is_any_stopping = facts.tolist()
    if is_any_stopping:
        raise GenerationStopped
    return bool(is_any_working)


def _wait_for_none(has_work: bool) -> bool:
    return has_work


def _list_sharded(wrapped: Any) -> list[Any]:
    """Weights that this rank does not hold whole."""
    return [
        each for each in wrapped.module.parameters() if hasattr(each, "ds_id") and each.ds_status.name != "AVAILABLE"
    ]


def _fits(wrapped: Any, device: torch.device, groups: Groups) -> bool:
    """Whether all ranks have room for all weights. Collective over all ranks, on the host. Weights that are offloaded
    stay offloaded."""
    sharded = _list_sharded(wrapped)
    num_bytes = sum(each.ds_numel * each.dtype.itemsize for each in sharded)
    is_offloaded = any(
        each.ds_tensor.final_location is not None or each.ds_tensor.device.type != device.type for each in sharded
    )
    fits = not is_offloaded and num_bytes <= MAX_SHARE * _measure_free_bytes(device)
    answer = torch.tensor(int(fits))
    dist.all_reduce(answer, op=dist.ReduceOp.MIN, group=groups.host_group)
    return bool(answer.item())


def _measure_free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + cached
    import psutil

    return float(psutil.virtual_memory().available) / dist.get_world_size()


@contextmanager
def _gathered(wrapped: Any) -> Iterator[None]:
    """Inside, this rank holds all weights, and DeepSpeed's hooks neither fetch nor release any."""
    import deepspeed

    # without an optimizer DeepSpeed has only what shards the weights
    coordinator = getattr(wrapped.optimizer, "parameter_offload", wrapped.optimizer).get_param_coordinator()
    coordinator._clean_inflight_param_registry()
    before = {name: coordinator.__dict__.get(name) for name in COORDINATION}
    with deepspeed.zero.GatheredParameters(_list_sharded(wrapped)):
        for name in COORDINATION:
            setattr(coordinator, name, _do_nothing)
        try:
            with _without_hooks(wrapped.module):
                yield
        finally:
            for name, method in before.items():
                if method is None:
                    delattr(coordinator, name)
                else:
                    setattr(coordinator, name, method)


@contextmanager
def _without_hooks(model: Any) -> Iterator[None]:
    """Inside, modules have no hooks of DeepSpeed, which fetch weights and release them. They run several autograd
    functions per module, and took a third of a decoded token's time."""
    tables = [hooks for each in model.modules() for hooks in (each._forward_pre_hooks, each._forward_hooks)]
    before = [dict(hooks) for hooks in tables]
    for hooks, own in zip(tables, before, strict=True):
        for key, hook in own.items():
            if str(getattr(hook, "__module__", "")).startswith("deepspeed."):
                del hooks[key]
    try:
        yield
    finally:
        for hooks, own in zip(tables, before, strict=True):
            hooks.clear()
            hooks.update(own)


def _do_nothing(*_: Any, **__: Any) -> None:
    return None
