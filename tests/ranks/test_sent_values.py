"""Plain values that ranks send each other. Of a value that rank 0 sends to each rank, nothing else arrives there. What
was sent elsewhere or before, and what was changed on its way, is refused: rank 0 receives what an attacker sends.
"""

from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.rank_pool import run_on_ranks
from syrupy.assertion import SnapshotAssertion

from ulysses_cli.run.key import ForgedError
from ulysses_cli.train.processes import consistency
from ulysses_cli.train.processes.consistency import gather_values, scatter_values

Received = list[list[torch.Tensor]]  # of each call, from each rank
Tamper = Callable[[Received], None]


def receive_twice() -> tuple[object, object, int]:
    """Returns this rank's two values, and the largest buffer that it received, in bytes."""
    sizes, receive = [0], dist.recv

    def watch(tensor: torch.Tensor, *args: object, **options: object) -> object:
        sizes.append(tensor.nbytes)
        return receive(tensor, *args, **options)

    with mock.patch.object(dist, "recv", watch):
        shared = ["the same object"]
        small = scatter_values([0, shared, shared] if dist.get_rank() == 0 else None, dist.group.WORLD)
        large = scatter_values(["", "", "x" * 100_000] if dist.get_rank() == 0 else None, dist.group.WORLD)
    return small, large, max(sizes)


def test_each_rank_receives_its_own_value_alone() -> None:
    small, large, received = zip(*run_on_ranks(3, receive_twice), strict=True)
    assert small == (0, ["the same object"], ["the same object"])
    assert large == ("", "", "x" * 100_000)
    assert received[0] == 0, "rank 0 has all values"
    assert received[1] < 1000 < received[2]


def replay(received: Received) -> None:
    """What rank 1 has sent in the call before."""
    received[-1][1].copy_(received[-3][1])


def swap(received: Received) -> None:
    """The messages of ranks 1 and 2, in each other's place."""
    mine, other = received[-1][1].clone(), received[-1][2].clone()
    received[-1][1].copy_(other)
    received[-1][2].copy_(mine)


def copy_own(received: Received) -> None:
    received[-1][1].copy_(received[-1][0])


def alter(received: Received) -> None:
    if received[-1][1].dtype == torch.uint8:
        received[-1][1][-1] ^= 1


def cut(received: Received) -> None:
    if received[-1][1].dtype == torch.int64:
        received[-1][1] -= 1


def leave(received: Received) -> None:
    pass


def gather_under_attack(tamper: Tamper) -> str:
    """Three calls; rank 0 receives the last one tampered with. Returns its error, or what it took."""
    received: Received = []
    gather = dist.all_gather

    def receive(outputs: list[torch.Tensor], own: torch.Tensor, **options: object) -> None:
        gather(outputs, own, **options)
        received.append([output.clone() for output in outputs])
        if is_attacked:
            tamper(received)
            for output, changed in zip(outputs, received[-1], strict=True):
                output.copy_(changed)

    with mock.patch.object(dist, "all_gather", receive):
        try:
            for call in range(3):
                is_attacked = call == 2 and dist.get_rank() == 0
                result = str(gather_values((call, dist.get_rank()), dist.group.WORLD))
        except ForgedError as error:
            result = str(error)
    return result


@pytest.mark.parametrize("tamper", [leave, replay, swap, copy_own, alter, cut], ids=lambda each: each.__name__)
def test_a_message_of_another_call_or_rank_is_refused(tamper: Tamper, snapshot: SnapshotAssertion) -> None:
    first, *others = run_on_ranks(3, gather_under_attack, tamper)
    right = "[(2, 0), (2, 1), (2, 2)]"
    assert first == (right if tamper is leave else snapshot)
    assert others == [right] * 2


def gather_in_two_sessions() -> tuple[bool, str]:
    """What a rank of an earlier run with the same key has sent, sent again as the same call of this run. Returns
    whether the two runs' messages differ."""
    group, sent = dist.group.WORLD, []
    gather = dist.all_gather

    def receive(outputs: list[torch.Tensor], own: torch.Tensor, **options: object) -> None:
        gather(outputs, own, **options)
        sent.append([output.clone() for output in outputs])
        if len(sent) > 3 and dist.get_rank() == 0:  # the later run
            for output, earlier in list(zip(outputs, sent[len(sent) - 4], strict=True))[1:]:
                output.copy_(earlier)

    with mock.patch.object(dist, "all_gather", receive), mock.patch.dict(consistency.SESSIONS):
        try:
            for _ in range(2):
                consistency.SESSIONS.pop(group, None)
                result = str(gather_values("a value", group))
        except ForgedError as error:
            result = str(error)
    return not torch.equal(sent[2][1], sent[5][1]), result


def test_a_message_of_an_earlier_run_with_the_same_key_is_refused(snapshot: SnapshotAssertion) -> None:
    first, *_ = run_on_ranks(3, gather_in_two_sessions)
    assert first == (True, snapshot)


def scatter_under_attack(how: str) -> list[str]:
    """Rank 0 sends rank 2's message to rank 1 and the reverse, an earlier message, or other content."""
    send, sent, results = dist.send, [], []

    def misdirect(tensor: torch.Tensor, group: object = None, group_dst: int = 0) -> None:
        sent.append(tensor.clone())
        if call and how == "replay":
            tensor = sent[len(sent) - 5]
        elif call and how == "alter" and len(sent) % 2 == 0:
            tensor = tensor ^ 1
        send(tensor, group=group, group_dst=3 - group_dst if call and how == "swap" else group_dst)

    with mock.patch.object(dist, "send", misdirect):
        try:
            for call in range(2):
                values = [(call, rank) for rank in range(3)] if dist.get_rank() == 0 else None
                results.append(str(scatter_values(values, dist.group.WORLD)))
        except ForgedError as error:
            results.append(str(error))
            if "it was not sent here" in results[-1]:
                dist.recv(torch.empty(200, dtype=torch.uint8), group_src=0)  # the content, which was not even read
    return results


@pytest.mark.parametrize("how", ["replay", "swap", "alter"])
def test_what_rank_0_sent_to_another_rank_or_before_is_refused(how: str, snapshot: SnapshotAssertion) -> None:
    results = run_on_ranks(3, scatter_under_attack, how)
    assert [first for first, _ in results] == [str((0, rank)) for rank in range(3)]
    assert [second for _, second in results] == snapshot
