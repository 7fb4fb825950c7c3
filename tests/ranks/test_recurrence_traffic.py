"""Compares the bytes that the speed model gives to sequence parallelism with those that ranks send in a forward and a
backward of tiny models with convolutions and recurrences: halos, what a recurrence exchanges, and heads of attention.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from support.hybrids import HYBRIDS, describe_hybrid, make_hybrid_config
from support.rank_pool import run_on_ranks
from support.tiers import mark_by
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from ulysses_cli.plan.layout import Layout
from ulysses_cli.plan.ledger.job import Job, is_known
from ulysses_cli.plan.levers import Levers
from ulysses_cli.plan.models.layers import DeltaNetMixer, Mamba2Mixer
from ulysses_cli.plan.models.shape import read_model_shape
from ulysses_cli.plan.speed import compute_exchange_bytes
from ulysses_cli.plan.work import count_halos, count_shared
from ulysses_cli.train.attention.documents import make_documents
from ulysses_cli.train.attention.interface import register_attention
from ulysses_cli.train.memory.checkpointing import Mode, checkpoint_layers
from ulysses_cli.train.processes.groups import make_sequence_axis
from ulysses_cli.train.recurrence.interface import serve_recurrent_layers

LENGTHS = (50, 1, 2, 60, 15)  # of a row of 128 tokens
Checkpointing = Literal[False, True, "full"]
MODES: dict[Checkpointing, Mode | None] = {False: None, True: "save_attention", "full": "full"}


class SentBytes(TorchDispatchMode):
    """Counts what this rank sends to others, by operator. It sees torch's operators of communication themselves,
    whichever function called them; one that it cannot count is an error."""

    def __init__(self) -> None:
        super().__init__()
        self.by_operator: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op.namespace == "c10d":
            name = op._schema.name.removeprefix("c10d::")
            self.by_operator[name] += count_sent(name, args)
        return op(*args, **(kwargs or {}))


def count_sent(name: str, args: Any) -> int:
    num_others, rank = dist.get_world_size() - 1, dist.get_rank()
    if name == "alltoall_base_":
        _, send, _, _, splits, *_ = args
        kept = splits[rank] if splits else send.size(0) // (num_others + 1)
        return (send.size(0) - kept) * (send[:1].numel() * send.itemsize)
    if name == "allgather_":
        return num_others * sum(part.numel() * part.itemsize for part in args[1])
    if name == "send":
        return sum(part.numel() * part.itemsize for part in args[0])
    if name == "recv_":
        return 0
    raise AssertionError(f"{name} is not counted")


def count_step(model_type: str, batch: int, checkpointing: Checkpointing, dtype: torch.dtype) -> Counter[str]:
    axis = make_sequence_axis(dist.group.WORLD)
    attention = register_attention(axis, "sdpa")
    config = make_hybrid_config(model_type, attn_implementation=attention, experts_implementation="eager")
    model = AutoModelForCausalLM.from_config(config).to(dtype).train()
    assert serve_recurrent_layers(model, axis) > 0
    if mode := MODES[checkpointing]:
        checkpoint_layers(model, mode)
    tokens = sum(LENGTHS) // axis.size
    ids, positions = torch.ones(batch, tokens, dtype=torch.long), torch.arange(tokens).expand(batch, -1)
    with SentBytes() as sent:
        documents = make_documents(LENGTHS * batch)
        out: Tensor = model(ids, position_ids=positions, use_cache=False, documents=documents).logits
        out.float().square().mean().backward()
    return sent.by_operator


def has_formula(model_type: str) -> bool:
    return is_known(read_model_shape(describe_hybrid(model_type), model_type))


def list_cases() -> Iterator[Any]:
    one_of_each = ("kimi_linear", "lfm2")
    modes: tuple[Checkpointing, ...] = (True, False, "full")
    for model_type in filter(has_formula, HYBRIDS):
        for num_ranks in (2, 4):
            for mode in modes:
                is_checked = model_type in one_of_each and num_ranks == 2 and mode is True
                yield pytest.param(model_type, num_ranks, mode, marks=mark_by(False, is_checked))


@pytest.mark.parametrize(("model_type", "num_ranks", "checkpointing"), [*list_cases()])
def test_bytes_are_those_of_the_speed_model(model_type: str, num_ranks: int, checkpointing: Checkpointing) -> None:
    """In bfloat16, where a decay travels in float32. transformers' own code of a scan returns float32 whatever it gets,
    which mamba-ssm's kernel does not, so that scans are compared in float32."""
    shape = read_model_shape(describe_hybrid(model_type), model_type)
    scans = any(isinstance(mixer, Mamba2Mixer) for kind in shape.layers for mixer in kind.mixers)
    dtype = torch.float32 if scans else torch.bfloat16
    batch, levers = 2, Levers(gradient_checkpointing=checkpointing)
    job = Job(shape, Layout(1, 1, num_ranks), sum(LENGTHS), levers, batch=batch, dtype_bytes=dtype.itemsize)
    halos, total = sum(count_halos(job, kind) for kind in shape.layers), compute_exchange_bytes(job)
    for sent in run_on_ranks(num_ranks, count_step, model_type, batch, checkpointing, dtype):
        assert sent == {"allgather_": halos, "alltoall_base_": total - halos}
    assert 0 < halos < total


@pytest.mark.parametrize("sizes", [(48, 16, 3), (48, 16, 24), (12, 3, 4), (8, 2, 4), (8, 1, 8), (8, 8, 2)], ids=str)
def test_shared_heads_count_as_on_the_rank_that_gets_most(sizes: tuple[int, int, int]) -> None:
    """48 heads of values in 16 groups are Qwen3.5-27B's, for which 3 and 24 are legal."""
    heads, groups, num_ranks = sizes
    local, in_group = heads // num_ranks, heads // groups
    most = max(len({head // in_group for head in range(rank * local, (rank + 1) * local)}) for rank in range(num_ranks))
    assert count_shared(DeltaNetMixer(groups, heads, 10, 20, 4), num_ranks) == num_ranks * most * 10
    assert count_shared(Mamba2Mixer(heads, 20, groups, 10, 4, 8), num_ranks) == num_ranks * most * 10
