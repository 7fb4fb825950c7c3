"""Greedy decoding and scores of given answers, for prompts that begin alike, on an engine: between steps of training
or without an optimizer, with the same weights and ranks.

All prompts are at the same position at all times: one whose prompt ends earlier begins to generate while the others
still read. Takes no recipe. Every method that runs the model is collective over all ranks of the forward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ulysses_cli.data.tokenizing.tokenizer import list_stop_tokens
from ulysses_cli.plan.rows.ring import Ring, count_shared_out, cut_runs, deal_row
from ulysses_cli.train.attention.documents import Documents, make_documents
from ulysses_cli.train.engine import Engine, release_gathered
from ulysses_cli.train.generation.cache import GenerationCache
from ulysses_cli.train.processes.consistency import gather_values
from ulysses_cli.train.processes.groups import NO_AXIS, Groups, SequenceAxis

Tokens = Sequence[int]


class GenerationStopped(Exception):
    """Raised by `take_turn`, in all groups of ranks at the same turn."""


class Forward(Protocol):
    """The model. Takes tokens and positions [B, S] and returns logits [N, vocabulary] in float32, at `wanted`: indices
    [N] of a sequence and [N] of a token in it. A forward of a prefix wants none, and `documents` describes it."""

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: GenerationCache,
        wanted: tuple[Tensor, Tensor],
        documents: Documents | None,
    ) -> Tensor: ...


@dataclass(frozen=True)
class AnswerScore:
    """A given answer's log-probability, and whether each of its tokens is the most likely one: greedy decoding then
    gives this answer."""

    log_probability: float
    is_greedy: bool


class Generator:
    """Generates on the ranks of `axis`, which share what all prompts begin with. `heads`: those of them that have heads
    of their own, all by default; `ring`: those that have the same heads.

    `take_turn(has_work)` is called before each forward, with True, and by `finish`, with False. It returns whether any
    group of ranks has work. Where weights are gathered by all ranks, groups run the same number of forwards by it; the
    default is for a model that each group holds by itself. `is_stopped`: a turn has ended the generation early.
    """

    def __init__(
        self,
        forward: Forward,
        axis: SequenceAxis,
        device: torch.device | str = "cpu",
        take_turn: Callable[[bool], bool] = lambda has_work: has_work,
        *,
        heads: SequenceAxis | None = None,
        ring: SequenceAxis = NO_AXIS,
    ) -> None:
        self.forward = forward
        self.axis = axis
        self.device = torch.device(device)
        self.take_turn = take_turn
        self.heads, self.ring, self.is_stopped = heads or axis, ring, False
        self.cache = self._make_cache()
        self.prompts: list[Tokens] = []

    @torch.no_grad()
    def read(self, prompts: Sequence[Tokens]) -> int:
        """Reads the tokens that all prompts begin with, split over the ranks, and keeps their keys and values. Returns
        how many. What the ranks cannot share evenly, and each prompt's own end, are read by `generate` and `score`."""
        if not prompts or not all(prompts):
            raise ValueError("a prompt has at least one token")
        self.prompts, self.cache = list(prompts), self._make_cache()
        num_read = count_shared_out(count_shared_tokens(prompts), self.axis.size, self.ring.size)
        if num_read:
            order = deal_row((num_read,), Ring(self.ring.size))
            first = self.heads.rank * (num_read // self.axis.size)
            own = cut_runs(order[self.ring.rank], first, first + num_read // self.axis.size)
            at = [position for run in own for position in range(*run)]
            tokens, positions = self._move([[prompts[0][position] for position in at]]), self._move([at])
            documents = make_documents([num_read], self.device, order=order if self.ring.size > 1 else ())
            self.cache.start_prefix(documents, max(map(len, prompts)))
            self._run(tokens, positions, [], documents)
        return num_read

    @torch.no_grad()
    def generate(
        self,
        max_new_tokens: int,
        stop_tokens: Collection[int] = (),
        report: Callable[[int], None] = lambda _: None,
        has_ended: Callable[[list[int]], bool] = lambda _: False,
    ) -> list[list[int]]:
        """Returns each prompt's next tokens, at most `max_new_tokens`, without the stop token that ended them. The
        prompts are those of the last `read`. `report` is told the tokens of the longest answer so far. `has_ended`:
        whether these tokens are a whole answer; it says the same on all ranks, since they have the same tokens."""
        prompts, begin = self.prompts, self.cache.prefix_tokens
        lengths = [len(prompt) for prompt in prompts]
        answers: list[list[int]] = [[] for _ in prompts]
        is_done = [max_new_tokens < 1] * len(prompts)
        self.cache.start_sequences(len(prompts), max(lengths) + max_new_tokens - begin)
        position, block = begin, [list(prompt[begin : min(lengths)]) for prompt in prompts]
        while not all(is_done):
            logits = self._run_block(block, position, [(at, len(block[0]) - 1) for at in range(len(prompts))])
            position += len(block[0])
            block = []
            for at, token in enumerate(self._choose(logits)):
                if position < lengths[at]:
                    block.append([prompts[at][position]])
                    continue
                if not is_done[at] and token not in stop_tokens:
                    answers[at].append(token)
                    is_done[at] = len(answers[at]) == max_new_tokens or has_ended(answers[at])
                is_done[at] = is_done[at] or token in stop_tokens
                block.append([token])
            report(max(map(len, answers)))
        return answers

    @torch.no_grad()
    def score(self, answers: Sequence[Tokens]) -> list[AnswerScore]:
        """Scores an answer for each prompt of the last `read`, in one forward: the answer's own tokens are read after
        the prompt."""
        begin = self.cache.prefix_tokens
        rows = [[*prompt[begin:], *answer] for prompt, answer in zip(self.prompts, answers, strict=True)]
        longest = max(map(len, rows))
        self.cache.start_sequences(len(rows), longest)
        wanted = [
            (at, len(prompt) - begin + step - 1)
            for at, (prompt, answer) in enumerate(zip(self.prompts, answers, strict=True))
            for step in range(len(answer))
        ]
        logits = self._run_block([row + [row[-1]] * (longest - len(row)) for row in rows], begin, wanted)
        targets = self._move([[token for answer in answers for token in answer]])[0]
        log_probabilities = torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0].tolist()
        is_highest = (logits.argmax(-1) == targets).tolist()
        scores = []
        for answer in answers:
            of_answer = [(log_probabilities.pop(0), is_highest.pop(0)) for _ in answer]
            scores.append(AnswerScore(sum(each for each, _ in of_answer), all(each for _, each in of_answer)))
        return scores

    @torch.no_grad()
    def finish(self) -> None:
        """Runs forwards of one token, whose result nobody reads, until all groups have finished. Call it once, after
        the last prompt; nothing happens where groups do not wait for each other."""
        idle = self._make_cache()
        while self.take_turn(False):
            idle.start_sequences(1, 1)
            idle.start_tokens(1)
            tokens = self._move([[0]])
            self.forward(tokens, tokens, idle, self._index([(0, 0)]), None)

    def _make_cache(self) -> GenerationCache:
        return GenerationCache(self.heads, self.ring)

    def _run_block(self, block: list[list[int]], position: int, wanted: Sequence[tuple[int, int]]) -> Tensor:
        """Reads the same number of tokens of each sequence, from `position` on."""
        num_new = len(block[0])
        end = position + num_new
        positions = torch.arange(position, end, device=self.device).expand(len(block), -1)
        self.cache.start_tokens(max(end, *map(len, self.prompts)))
        logits = self._run(self._move(block), positions, wanted, None)
        self.cache.end_tokens(num_new)
        return logits

    def _run(
        self, tokens: Tensor, positions: Tensor, wanted: Sequence[tuple[int, int]], documents: Documents | None
    ) -> Tensor:
        self.take_turn(True)
        logits = self.forward(tokens, positions, self.cache, self._index(wanted), documents)
        if not self.cache.num_layers:
            raise RuntimeError("no layer of the model used the cache: its attention is not the one of this tool")
        return logits

    def _choose(self, logits: Tensor) -> list[int]:
        """The most likely tokens. Those of the axis' first rank go to its other ranks, so that rounding cannot part
        them. One collective on the axis: all its ranks generate the same sequences."""
        tokens = logits.argmax(-1)
        if self.axis.group is not None:
            dist.broadcast(tokens, group=self.axis.group, group_src=0)
        chosen: list[int] = tokens.tolist()
        return chosen

    def _index(self, wanted: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        rows, columns = self._move([[row for row, _ in wanted], [column for _, column in wanted]])
        return rows, columns

    def _move(self, values: list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.long).to(self.device)


def count_shared_tokens(prompts: Sequence[Tokens]) -> int:
    """Counts the tokens that all prompts begin with. One at least of each prompt is left: its logits are wanted."""
    ordered = sorted(map(list, prompts))  # its two ends differ first
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ordered[0], ordered[-1], strict=False)))
    return min(same, min(map(len, prompts)) - 1)


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
