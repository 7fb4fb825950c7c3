"""A value that rank 0 sends to each rank: nothing else arrives there."""

from __future__ import annotations

import torch
import torch.distributed as dist
from support.rank_pool import run_on_ranks

from ulysses_cli.train.processes.consistency import scatter_values


def receive_twice() -> tuple[object, object, int]:
    """Returns this rank's two values, and the largest buffer that it received, in bytes."""
    sizes, receive = [0], dist.recv

    def watch(tensor: torch.Tensor, *args: object, **options: object) -> object:
        sizes.append(tensor.nbytes)
        return receive(tensor, *args, **options)

    dist.recv = watch
    try:
        shared = ["the same object"]
        small = scatter_values([0, shared, shared] if dist.get_rank() == 0 else None, dist.group.WORLD)
        large = scatter_values(["", "", "x" * 100_000] if dist.get_rank() == 0 else None, dist.group.WORLD)
    finally:
        dist.recv = receive
    return small, large, max(sizes)


def test_each_rank_receives_its_own_value_alone() -> None:
    small, large, received = zip(*run_on_ranks(3, receive_twice), strict=True)
    assert small == (0, ["the same object"], ["the same object"])
    assert large == ("", "", "x" * 100_000)
    assert received[0] == 0, "rank 0 has all values"
    assert received[1] < 1000 < received[2]
