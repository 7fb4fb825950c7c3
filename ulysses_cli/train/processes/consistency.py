"""Compares facts between ranks. A collective that some ranks would enter with other sizes, or not at all, becomes an
error that names the rank and the field.
"""

from __future__ import annotations

import hashlib
import pickle
import secrets
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ulysses_cli.run.key import CODE_BYTES, ForgedError, Seal, find_seal

GATHERED = "a value gathered from all ranks"
SCATTERED = "a value that rank 0 sent"
MAX_NAMED = 10
KEY_BYTES = 32
NONCE_BYTES = 16
SIZE_BYTES = 8  # of a content's length
HEAD_BYTES = CODE_BYTES + SIZE_BYTES + hashlib.sha256().digest_size  # what comes before a scattered value


class DisagreementError(RuntimeError):
    """Ranks hold different facts."""


def compare_facts(facts: Mapping[str, Any], group: dist.ProcessGroup, *flags: int) -> list[int]:
    """Collective over all ranks, on the host. Returns, for each flag, the largest value of any rank.

    Every rank calls it once per step, before anything else of the step.
    """
    names = sorted(facts)
    local_row = torch.tensor([*(_hash(facts[name]) for name in names), *flags], dtype=torch.int64)
    rows = [torch.empty_like(local_row) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, local_row, group=group)
    table = torch.stack(rows)
    for index, name in enumerate(names):
        column = table[:, index]
        common = column.mode().values
        odd = (column != common).nonzero().flatten().tolist()
        if odd:
            ranks = f"rank {odd[0]}" if len(odd) == 1 else f"ranks {', '.join(map(str, odd[:8]))}"
            raise DisagreementError(f"{ranks} differ{'s' if len(odd) == 1 else ''} from the others in {name}")
    return [int(value) for value in table[:, len(names) :].amax(0)] if flags else []


def share_seal(group: dist.ProcessGroup) -> Seal:
    """Collective over all ranks. A new key, of rank 0, for ranks that `torchrun` started and that have none. It
    travels over the group's connection, which is as safe as torch makes it."""
    key = torch.frombuffer(bytearray(secrets.token_bytes(KEY_BYTES)), dtype=torch.uint8).to(_find_device(group))
    dist.broadcast(key, group=group, group_src=0)
    return Seal(bytes(key.tolist()).hex())


class Session:
    """What one group of ranks sends each other, from its first value on. Each rank has drawn a part of `name`, so no
    rank takes what was sent in another session, of this run or of an earlier one. All ranks count the same calls."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Collective over all ranks of the group."""
        own = torch.frombuffer(bytearray(secrets.token_bytes(NONCE_BYTES)), dtype=torch.uint8).to(device)
        self.world_size = dist.get_world_size(group)
        nonces = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(nonces, own, group=group)
        nonces[dist.get_rank(group)] = own  # whatever has arrived in its place
        self.name = hashlib.sha256(b"".join(bytes(nonce.tolist()) for nonce in nonces)).hexdigest()
        self.num_calls = 0

    def describe_place(self, sender: int, receiver: int | None = None) -> str:
        """`receiver`: left out, all ranks."""
        return f"session {self.name}, call {self.num_calls}, from rank {sender} of {self.world_size} to {receiver}"


SESSIONS: WeakKeyDictionary[dist.ProcessGroup, Session] = WeakKeyDictionary()


def _begin_call(group: dist.ProcessGroup, device: torch.device) -> Session:
    """Collective over all ranks of the group at its first call."""
    session = SESSIONS.get(group) or SESSIONS.setdefault(group, Session(group, device))
    session.num_calls += 1
    return session


def gather_values(value: Any, group: dist.ProcessGroup, seal: Seal | None = None) -> list[Any]:
    """Collective over all ranks. Returns every rank's plain value, in the order of ranks. torch's own function
    unpickles what arrives from any sender; this one unpickles only what that rank of this run has sealed for this call.
    `seal`: left out, that of the run's key."""
    seal, device = seal or find_seal(), _find_device(group)
    session = _begin_call(group, device)
    place = session.describe_place(dist.get_rank(group))
    content = bytearray(seal.close(GATHERED, pickle.dumps(value), place))
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(session.world_size)]
    dist.all_gather(lengths, torch.tensor([len(content)], device=device), group=group)
    widths = [int(length) for length in lengths]
    local_bytes = torch.frombuffer(content.ljust(max(widths), b"\0"), dtype=torch.uint8).to(device)
    buffers = [torch.empty_like(local_bytes) for _ in widths]
    dist.all_gather(buffers, local_bytes, group=group)
    contents = [buffer.cpu().numpy()[:width].tobytes() for buffer, width in zip(buffers, widths, strict=True)]
    is_alone = dist.get_backend(group) == "fake"  # a dry run, in which one process stands for all ranks
    senders = [dist.get_rank(group) if is_alone else rank for rank in range(session.world_size)]
    return [
        pickle.loads(seal.open(GATHERED, sealed, session.describe_place(rank)))  # noqa: S301 - sealed by a rank of this run
        for rank, sealed in zip(senders, contents, strict=True)
    ]


def scatter_values(values: Sequence[Any] | None, group: dist.ProcessGroup) -> Any:
    """Collective over all ranks. Rank 0 has a plain value for each rank; returns this rank's. No rank receives the
    others', and none is padded to their size. Ranks with the same object get the same bytes."""
    seal, device = find_seal(), _find_device(group)
    session = _begin_call(group, device)
    if values is None:
        head = torch.zeros(HEAD_BYTES, dtype=torch.uint8, device=device)
        dist.recv(head, group=group, group_src=0)
        place = session.describe_place(0, dist.get_rank(group))
        promise = seal.open(SCATTERED, bytes(head.tolist()), place)  # the content's size and digest
        buffer = torch.empty(int.from_bytes(promise[:SIZE_BYTES], "big"), dtype=torch.uint8, device=device)
        dist.recv(buffer, group=group, group_src=0)
        content = buffer.cpu().numpy().tobytes()
        if hashlib.sha256(content).digest() != promise[SIZE_BYTES:]:
            raise ForgedError(f"{SCATTERED}: the content is not what rank 0 promised")
        return pickle.loads(content)  # noqa: S301 - sealed by rank 0
    tensors: dict[int, tuple[bytes, Tensor]] = {}
    for rank, value in enumerate(values):
        if not rank:
            continue
        if id(value) not in tensors:
            content = pickle.dumps(value)
            promise = len(content).to_bytes(SIZE_BYTES, "big") + hashlib.sha256(content).digest()
            tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)
            tensors = {id(value): (promise, tensor)}  # the last one alone is kept
        ((promise, tensor),) = tensors.values()
        sealed = seal.close(SCATTERED, promise, session.describe_place(0, rank))
        dist.send(torch.frombuffer(bytearray(sealed), dtype=torch.uint8).to(device), group=group, group_dst=rank)
        dist.send(tensor, group=group, group_dst=rank)
    return values[0]


def _find_device(group: dist.ProcessGroup) -> torch.device:
    """The device on which the group's tensors must be."""
    return (
        torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else torch.device("cpu")
    )


def compare_machines(machines: list[tuple[str, Mapping[str, Any]]]) -> None:
    """Takes (name of the machine, facts) of every rank. All ranks raise the same error, since all hold the same
    facts. It names the first machine that differs from that of rank 0, and what differs."""
    first_name, first = machines[0]
    for name, facts in machines[1:]:
        pairs = [f"{key}: {value} and {first[key]}" for key, value in facts.items() if value != first[key]]
        if pairs:
            left = len(pairs) - MAX_NAMED
            end = f"; and {left} more" if left > 0 else ""
            raise DisagreementError(f"{name} and {first_name} differ in {'; '.join(pairs[:MAX_NAMED])}{end}")


def _hash(value: Any) -> int:
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:8], "big", signed=True)
