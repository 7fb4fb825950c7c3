"""Ranks of two machines of one evaluation, which are threads here: each starts its own, and rank 0 alone has the
questions and the answers."""

import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.training import save_bytes_model

from ulysses_cli.commands.children.evaluating import FoundModel, ModelQuestion, prepare_model
from ulysses_cli.data.tokenizing.tokenizer import make_bytes_tokenizer
from ulysses_cli.evaluate.suites import Amount, Sources
from ulysses_cli.prove.machines import MachinePlace, Machines
from ulysses_cli.prove.quality.evaluation import ModelEvaluation, run_evaluation
from ulysses_cli.prove.ranks import RankFailureError, run_on_ranks, start_process
from ulysses_cli.run.key import KEY


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "k" * 40)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # both machines are this one


def run_machines(work: Callable[[Machines], Any]) -> list[Any]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"

    def start(rank: int) -> Any:
        met = Machines(MachinePlace(2, rank, endpoint, "127.0.0.1", 60.0), {}, lambda _: None)
        try:
            return work(met)
        finally:
            met.leave()

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(start, range(2)))


def tell_places(_: object) -> list[tuple[int, str, str]]:
    own = torch.tensor([dist.get_rank(), int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])])
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    return [tuple(each.tolist()) for each in found]


def fail_on_the_last(_: object) -> None:
    if dist.get_rank() == 3:
        raise ValueError("this rank fails")
    dist.barrier()


def end_with_3() -> None:
    os._exit(3)


@pytest.mark.full
def test_all_threads_learn_how_a_rank_has_ended() -> None:
    """Each process that starts asks how all others have ended, and so do threads that wait for theirs."""

    def watch(process: Any) -> int:
        while process.exitcode is None:
            pass
        return int(process.exitcode)

    with ThreadPoolExecutor(8) as pool:
        for _ in range(20):
            process = start_process(end_with_3, ())
            assert {each.result() for each in [pool.submit(watch, process) for _ in range(8)]} == {3}


def test_a_failure_of_a_rank_passes_through_a_context() -> None:
    @contextmanager
    def enter() -> Iterator[None]:
        yield

    with pytest.raises(RankFailureError, match="rank 1: ValueError: why"), enter():
        raise RankFailureError(1, "ValueError", "why", "")


@pytest.mark.check
def test_each_machine_starts_its_own_ranks() -> None:
    """A second world of the same machines does not meet the first one's."""

    def work(met: Machines) -> list[Any]:
        return [run_on_ranks(4, tell_places, machines=met, name=name) for name in ("first", "second")]

    places = [(0, 0, 2), (1, 1, 2), (2, 0, 2), (3, 1, 2)]
    assert run_machines(work) == [[places, places], [None, None]]


@pytest.mark.full
def test_a_failure_ends_the_ranks_of_both_machines() -> None:
    def work(met: Machines) -> str:
        try:
            run_on_ranks(4, fail_on_the_last, machines=met, name="first")
        except RankFailureError as failure:
            met.tell_failure()
            return str(failure)
        return ""

    first, second = run_machines(work)
    assert first.startswith("rank 0:") or first.startswith("rank 1:")
    assert "this rank fails" in second


@pytest.mark.full
def test_two_machines_answer_as_one_does(tmp_path: Path) -> None:
    """Machine 1 names no suite and has a copy of the model in another folder."""
    question = ModelQuestion(2, 2, 1600, "float32", "bytes", "cpu", trust_remote_code=False)
    texts = []
    for number in range(2):
        folder = tmp_path / str(number)
        save_bytes_model(folder, max_position_embeddings=4096)
        texts.append(prepare_model(FoundModel(str(folder)), None, question, online=False)[0])
    whole = ModelEvaluation(
        texts[0], ("niah_single_1", "vt"), Amount((1600,), 2), Sources(), 2, str(tmp_path / "whole")
    )
    expected = run_evaluation(whole, "cpu", lambda _: None)
    mine = replace(whole, output=str(tmp_path / "both"))
    other = replace(mine, model=texts[1], suites=(), output=str(tmp_path / "none"))
    facts = [each.list_facts(make_bytes_tokenizer()) for each in (mine, other)]
    assert facts[0] == facts[1]

    def work(met: Machines) -> dict[str, Any]:
        return run_evaluation((mine, other)[met.place.rank], "cpu", lambda _: None, met, "subject")

    found, nothing = run_machines(work)
    assert nothing == {}
    assert not (tmp_path / "none").exists()
    kept = [[{**each, "seconds": 0, "spent": 0} for each in findings["results"]] for findings in (expected, found)]
    assert kept[0] == kept[1]
    assert len(kept[0]) == 4
