"""Tests how a layout becomes an agent's command line: which machine this is, and what failed when a run ends."""

import errno
import fcntl
import json
import os
import re
import shutil
import signal
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from support.refusals import explain
from syrupy.assertion import SnapshotAssertion

from ulysses_cli.data import transaction
from ulysses_cli.report.recipe import explain_resume, format_failure, format_interruption, format_missing_lock
from ulysses_cli.run import folder, key, launcher, nodes
from ulysses_cli.run import nodes as rendezvous
from ulysses_cli.run.checkpoints import find_newest_valid, list_checkpoints
from ulysses_cli.run.key import KEY, Seal
from ulysses_cli.run.launcher import make_agent_args, make_environment
from ulysses_cli.run.lock import LostFolderError, RunLock
from ulysses_cli.run.nodes import LOST_SECONDS, Nodes
from ulysses_cli.run.records import SPARE, MachineLogs, find_first_failure, write_failure_record, write_failures


def test_the_agents_command_line(tmp_path: Path) -> None:
    alone_here = Nodes(processes_here=2)
    with rendezvous.open_rendezvous(alone_here, tmp_path, {}, 9.0) as place:
        folder = place.folder
        assert folder.stat().st_mode & 0o777 == 0o700
        alone = make_agent_args(alone_here, 0, place, ["--log-dir=x"])
        environ = make_environment({}, "cpu", 2, place)
    assert not folder.exists()
    assert list(tmp_path.iterdir()) == []
    assert alone[:3] == ["--nnodes=1", "--nproc-per-node=2", "--max-restarts=0"]
    place_of_all = "--rdzv-conf=store_type=file,node_rank=0,join_seconds=600.0,lost_seconds=inf"
    assert {f"--rdzv-endpoint={folder}/agent", place_of_all} < set(alone)
    assert alone[-1] == "--log-dir=x"
    assert (environ["GLOO_SOCKET_IFNAME"], environ["NCCL_SOCKET_IFNAME"]) == ("lo", "=lo")
    assert len(environ[KEY]) == 64


def test_the_key_of_several_machines_is_on_no_command_line(tmp_path: Path) -> None:
    both = [Nodes(2, rank, "127.0.0.1", 1234, 8) for rank in range(2)]
    open_rendezvous = rendezvous.open_rendezvous
    with open_rendezvous(both[1], tmp_path, {}, 9, 5) as second, open_rendezvous(both[0], tmp_path, {}, 9, 5) as first:
        args = [make_agent_args(node, 3, each) for node, each in zip(both, (first, second), strict=True)]
        environ = make_environment({"NCCL_SOCKET_IFNAME": "ib0"}, "cuda", 8, first)
        assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    assert first.key == second.key
    assert not (tmp_path / "key").exists(), "it ends with the run"
    assert "--rdzv-endpoint=127.0.0.1:1234" in args[0]
    for rank, each in enumerate(args):
        assert f"--rdzv-conf=store_type=tcp,node_rank={rank},join_seconds=9,lost_seconds={5 + LOST_SECONDS}" in each
    assert "--max-restarts=3" in args[0]
    assert len({word for each in args for word in each if word.startswith("--rdzv-id=")}) == 1
    assert not any(first.key[at : at + 8] in word for word in args[0] for at in range(56))
    assert (environ["GLOO_SOCKET_IFNAME"], environ["NCCL_SOCKET_IFNAME"]) == ("lo", "ib0")
    given = {KEY: "g" * 40}
    with rendezvous.open_rendezvous(both[0], tmp_path, given, 9.0) as place:
        assert make_environment(given, "cpu", 8, place)[KEY] == "g" * 40
        assert not (tmp_path / "key").exists()
    assert f"--rdzv-id={Seal('g' * 40).name_run()}" not in args[0]


def test_a_bad_key_is_refused(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    file = tmp_path / "key"

    def enter(**environ: str) -> None:
        with rendezvous.open_rendezvous(Nodes(2, 0, "localhost"), tmp_path, environ, 9.0):
            pass

    problems = [explain(enter, **{KEY: "hush"})]
    file.write_text("a" * 64)
    file.chmod(0o644)
    problems.append(explain(enter))
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    problems.append(explain(enter))
    file.unlink()
    os.mkfifo(file, 0o600)
    problems.append(explain(enter))
    assert problems == snapshot


def test_a_key_is_read_once_it_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    """Zeros, which some disks show for a file that was not written out, would be a key that everybody knows."""
    file = tmp_path / "key"
    file.touch(0o600)
    with monkeypatch.context() as patch:
        patch.setattr(key.time, "sleep", lambda _: file.write_text("b" * 64))
        assert key.share_key(tmp_path) == "b" * 64
    key.drop_key(tmp_path, "another run's")
    said = set()
    for text in ("", "\0" * 64, "a" * 63, "a" * 65, "A" * 64, "\ufffd" * 64, " " * 64):
        file.write_text(text, encoding="utf-8")
        said.add(explain(key.share_key, tmp_path, seconds=0.0))
    file.unlink()
    monkeypatch.setattr(os, "fsync", refuse_with(errno.ENOSPC))
    said.add(explain(key.share_key, tmp_path))
    assert said == snapshot
    assert list(tmp_path.iterdir()) == [], "a disk without room keeps no part of a key"


def refuse_with(number: int) -> Callable[..., None]:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return refuse


def test_machines_that_start_at_once_share_one_key(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        for number in range(20):
            folder = tmp_path / str(number)
            folder.mkdir()
            assert len(set(pool.map(key.share_key, [folder] * 8))) == 1


def test_a_master_that_only_this_machine_reaches_is_refused(
    monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    """/etc/hosts may give 127.0.1.1 for the machine's own name."""
    assert nodes.find_route("127.0.0.1") == nodes.Route("127.0.0.1", "lo")
    assert nodes.find_route("localhost").interface == "lo"
    meanings = iter(("127.0.1.1", "nothing"))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: mean(next(meanings)))
    assert [explain(nodes.find_route, "gpu01", seconds=0.0) for _ in range(2)] == snapshot


def mean(address: str) -> list[object]:
    if address == "nothing":
        raise socket.gaierror(-2, "Name or service not known")
    return [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", (address, 9))]


@pytest.mark.parametrize("meaning", ["127.0.1.1", "nothing"])
def test_a_master_that_knows_itself_by_a_loopback_address_takes_its_own(
    meaning: str, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    """SLURM gives the master by name. The others reach it by another address than it does itself."""
    entries = {"lo": ["127.0.0.1", "::1"], "docker0": ["172.17.0.1"], "eth0": ["10.0.0.7", "fe80::1%eth0", "fd00::7"]}
    state = SimpleNamespace(isup=True)

    def list_addresses() -> dict[str, list[SimpleNamespace]]:
        families = {True: socket.AF_INET6, False: socket.AF_INET}
        return {
            name: [SimpleNamespace(address=each, family=families[":" in each]) for each in known]
            for name, known in entries.items()
        }

    monkeypatch.setattr(psutil, "net_if_addrs", list_addresses)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: dict.fromkeys(entries, state))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: mean(meaning))
    monkeypatch.setattr(socket, "gethostname", lambda: "zeta.cluster")
    assert nodes.find_route("zeta", is_here=True) == nodes.Route("10.0.0.7", "eth0")
    asked = {"zeta": False, "alpha": True}
    problems = [explain(nodes.find_route, host, is_here=is_here, seconds=0.0) for host, is_here in asked.items()]
    for added in ({"ib0": ["10.1.0.7"]}, {"ib0": [], "eth0": []}):
        entries |= added
        problems.append(explain(nodes.find_route, "zeta", is_here=True))
    assert problems == snapshot


STOPPED = {"phase": "reading inputs", "is_interruption": True, "exit_code_wanted": 143}
LATER = [
    {"rank": rank, "time": when, "message": f"ValueError: of {rank}", "phase": "training, step 3", "boot": "b",
     "uptime": uptime}
    for rank, when, uptime in ((0, 3.0, 9.5), (1, 104.0, 9.4), (2, 105.0, 9.6))  # the clock was set back
]  # fmt: skip
LOST_PEER = {"rank": 0, "message": "connection reset", "time": 11}  # before the agent has noticed the peer's death
CAUSE = {"rank": 2, "message": "bad data", "time": 13, "is_cause": True}
# Records of ranks, what the agent wrote of their ends, and its exit code.
FAILURES: dict[str, tuple[list[Any], Any, int]] = {
    "first": (LATER, None, 1),
    "killed": ([], [{"rank": 3, "exit_code": -9, "time": 5}], 1),
    "torn": ([], "{", 1),
    "interrupted others": (  # its own record found no room on a disk
        [{"rank": 0, **STOPPED}], [{"rank": 1, "exit_code": 1, "time": 5}, {"rank": 0, "exit_code": 143, "time": 5}], 1
    ),
    "all interrupted": ([{"rank": 0, **STOPPED}], [{"rank": 0, "exit_code": 143}, {"rank": 1, "exit_code": -15}], 1),
    "all interrupted, and no ends": ([{"rank": 0, **STOPPED}], None, 1),
    "agent": ([{"rank": 1, **STOPPED}], None, -9),
    "agent and a cause": ([{"rank": 1, **STOPPED}, CAUSE], None, -9),
    "ended by the agent": ([{"rank": 0, "time": 1.0, **STOPPED}, LATER[1]], None, 1),
    "lost its peer": ([LOST_PEER], [{"rank": 1, "exit_code": -9, "time": 12}], 1),
    "a cause": ([LOST_PEER, CAUSE], [{"rank": 1, "exit_code": -9, "time": 12}], 1),
}  # fmt: skip


def test_the_first_failure_is_the_one_that_is_shown(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    said = {}
    for name, (records, ends, code) in FAILURES.items():
        folder = tmp_path / name
        folder.mkdir()
        for record in records:
            (folder / f"rank-{record['rank']}.error.json").write_text(json.dumps(record))
        if ends is not None:
            (folder / "failure.json").write_text(ends if isinstance(ends, str) else json.dumps(ends))
        failure = find_first_failure(MachineLogs(folder), code)
        is_early = failure.get("is_interruption")
        said[name] = format_interruption(failure, None) if is_early else format_failure(failure, folder)
    assert said == snapshot


def test_a_rank_that_ends_without_a_record_is_explained_by_its_log(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """As one whose imports fail."""
    (tmp_path / "failure.json").write_text(json.dumps([{"rank": 0, "exit_code": 1, "time": 5}]))
    log = tmp_path / "rank-0.log"
    log.write_text("Traceback (most recent call last):\n  import x\nImportError: cannot import name 'x'\n\n")
    logs, now = MachineLogs(tmp_path), log.stat().st_mtime
    with_log, of_earlier_run = (format_failure(find_first_failure(logs, 1, at), tmp_path) for at in (now, now + 1))
    log.unlink()
    assert of_earlier_run == format_failure(find_first_failure(logs, 1), tmp_path)
    assert [with_log, of_earlier_run] == snapshot


def test_a_disk_that_takes_no_record_hides_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that is read-only by then. A file in the place of the folder refuses root, too."""
    spare = tmp_path / "spare"
    spare.mkdir()
    (tmp_path / "logs").write_text("")
    monkeypatch.setenv(SPARE, str(spare))
    write_failure_record(tmp_path / "logs", 1, {"rank": 1, "message": "Read-only file system"})
    write_failures(tmp_path / "logs" / "failure.json", [{"rank": 1, "exit_code": 1}])
    logs = MachineLogs(tmp_path / "logs", spare=spare)
    assert find_first_failure(logs, 1)["message"] == "Read-only file system"
    assert logs.read_failures() == [{"rank": 1, "exit_code": 1}]
    monkeypatch.delenv(SPARE)
    with pytest.raises(OSError, match=r"Not a directory|File exists"):
        write_failure_record(tmp_path / "logs", 1, {})


def test_a_folder_is_locked_as_long_as_a_process_of_its_run_lives(tmp_path: Path) -> None:
    lock = folder.lock_run(tmp_path / "run", 0)
    rank = RunLock(lock.file)
    for end in (lambda: os.close(lock.handle), lambda: os.close(rank.handle)):
        explain(folder.lock_run, tmp_path / "run", 0)
        end()
    os.close(folder.lock_run(tmp_path / "run", 0).handle)


@pytest.mark.parametrize(
    "number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL, errno.EIO, errno.EACCES, errno.EPERM]
)
def test_a_disk_without_locks_is_used_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """As Lustre without its flock option and mounted buckets are."""
    monkeypatch.setattr(fcntl, "flock", refuse_with(number))
    lock = folder.lock_run(tmp_path / "run", 0)
    assert not lock.is_locked
    rank = RunLock(lock.file)
    shutil.rmtree(tmp_path / "run")
    rank.put_back()
    assert lock.file.exists()
    with transaction.lock(tmp_path / "store", lambda: pytest.fail("nobody else has it")):
        assert (tmp_path / "store").exists()


def test_a_lock_that_was_removed_with_its_folder_is_put_back(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    rank = RunLock(folder.lock_run(run_dir, 0, {"run": {"seed": 3}}).file)
    rank.put_back()
    shutil.rmtree(run_dir)
    rank.put_back()
    assert str(os.getpid()) in explain(folder.lock_run, run_dir, 0), "with its content"
    shutil.rmtree(run_dir)
    second = folder.lock_run(run_dir, 0)
    with pytest.raises(LostFolderError):
        rank.put_back()
    os.close(second.handle)
    rank.put_back()
    explain(folder.lock_run, run_dir, 0)


def test_a_second_run_is_refused_and_names_the_first(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    start = {"resume_from_checkpoint": "auto"}
    first = {"model": {"hub_token": "hf_abcdefghijkl"}, "train": {"max_steps": 6, "learning_rate": 1e-4}}
    second = {"model": {"hub_token": "hf_mnopqrstuvwx"}, "train": {"max_steps": 9, "learning_rate": 1e-4}}
    first["run"], second["run"] = dict.fromkeys(start), start
    lock = folder.lock_run(tmp_path, 0, first)
    problems = [explain(folder.lock_run, tmp_path, 0, recipe) for recipe in (second, first)]
    assert "hf_" not in lock.file.read_text()
    lock.file.write_text("[]")
    problems += [explain(folder.lock_run, path, 0, first) for path in (tmp_path, lock.file / "run")]
    process = f"(process {os.getpid()} on {socket.gethostname()}, since "
    assert [re.sub(rf"{re.escape(process)}[-\d]+ [:\d]+\)", "(PROCESS)", problem) for problem in problems] == snapshot


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_first_signal_asks_and_a_second_kills(first: signal.Signals) -> None:
    heard, now = list[int](), [0.0]
    agent: Any = SimpleNamespace(send_signal=heard.append, kill=lambda: heard.append(signal.SIGKILL))
    signals = launcher.StopSignals(agent, lambda: now[0])
    signals.handle(first, None)
    assert heard == [signal.SIGTERM]
    now[0] = 0.1
    signals.handle(signal.SIGTERM, None)
    assert heard == [signal.SIGTERM], "to the process and then to its group: one signal"
    now[0] = 1.0
    signals.handle(first, None)
    assert signal.alarm(0) == launcher.AGENT_SECONDS
    assert heard == [signal.SIGTERM, signal.SIGINT]
    signals.handle(signal.SIGALRM, None)
    assert heard[-1] == signal.SIGKILL
    assert signals.first == first


def test_an_earlier_run_is_deleted_only_with_overwrite(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """A model without checkpoints is not continued: the run would start anew, and the old model would pass for the new
    run's."""
    folder.check_run_dir(tmp_path, [], overwrite=False)
    for name, own in (("checkpoints", "step-1/mine.pt"), ("model", "weights.bin")):
        (tmp_path / name).mkdir()
        folder.check_continued_dir(tmp_path)
        (tmp_path / name / own).parent.mkdir(exist_ok=True)
        (tmp_path / name / own).touch()
        inputs = ["owner/name", str(tmp_path / name / "base")]
        problems = [
            explain(folder.check_run_dir, tmp_path, [], overwrite=False),
            explain(folder.check_run_dir, tmp_path, inputs, overwrite=True),
            explain(folder.check_continued_dir, tmp_path) if name == "model" else folder.check_continued_dir(tmp_path),
        ]
        assert problems == snapshot(name=name)
        folder.check_run_dir(tmp_path, [], overwrite=True)
        assert (tmp_path / name / own).exists()
        folder.set_results_aside(tmp_path)
        assert (tmp_path / "replaced" / "1" / name / own).exists()
        folder.drop_replaced_results(tmp_path)
        assert list(tmp_path.iterdir()) == []


def test_an_earlier_run_stays_until_the_new_model_is_complete(tmp_path: Path) -> None:
    assert folder.set_results_aside(tmp_path) is None
    (tmp_path / "model").mkdir()
    assert folder.set_results_aside(tmp_path) is None, "an empty folder is nothing to keep"
    (tmp_path / "model" / "weights").write_text("old")
    for name in folder.RECORDS:
        (tmp_path / name).write_text("old")

    aside = folder.set_results_aside(tmp_path)
    assert aside == tmp_path / "replaced" / "1"
    (tmp_path / "metrics.jsonl").write_text("new")
    (tmp_path / "checkpoints").mkdir()
    assert folder.restore_results(tmp_path, aside), "the new run has left nothing"
    assert (tmp_path / "model" / "weights").read_text() == "old"
    assert {(tmp_path / name).read_text() for name in folder.RECORDS} == {"old"}
    assert "quality.jsonl" in folder.RECORDS

    for number in (1, 2):
        aside = folder.set_results_aside(tmp_path)
        assert aside == tmp_path / "replaced" / str(number)
        (tmp_path / "checkpoints" / "step-1").mkdir(parents=True)
        assert not folder.restore_results(tmp_path, aside), "the new run's checkpoint stays"
    assert (tmp_path / "replaced" / "1" / "model" / "weights").read_text() == "old"


def test_the_newest_checkpoint_by_name(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    assert list_checkpoints(tmp_path) == []
    for name in ("step-9", "step-10", "step-11.writing"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    match = list_checkpoints(tmp_path)[0]
    assert match == tmp_path / "checkpoints" / "step-10"
    assert find_newest_valid(tmp_path, lambda _: None, is_quick=True) is None, "none has a manifest"
    phases = ("loading the model", "a step at 1,024 tokens per row, step 1, micro-step 1 of 1")
    assert [
        format_interruption({}, match),
        *(format_interruption({"is_interruption": True, "phase": phase}, None) for phase in phases),
        *(explain_resume(match, why) for why in ("a signal", "run.max_cost")),
        format_missing_lock(tmp_path),
    ] == snapshot


def test_machines_on_one_disk_leave_each_others_files_alone(tmp_path: Path) -> None:
    first, second = (MachineLogs(tmp_path, rank, 2, 4) for rank in range(2))
    for rank in (0, 3, 4, 12):
        (tmp_path / f"rank-{rank}.error.json").write_text(json.dumps({"rank": rank, "time": 1.0}))
    began = first.clear()
    assert sorted(file.name for file in tmp_path.glob("rank-*")) == ["rank-12.error.json", "rank-4.error.json"]
    assert {first.agent_log, first.failure_file, first.stop_file}.isdisjoint(
        {second.agent_log, second.failure_file, second.stop_file}
    )
    assert {record["rank"] for record in first.list_rank_failures(began)} == {4, 12}
    os.utime(tmp_path / "rank-4.error.json", (began - 3600, began - 3600))
    assert {record["rank"] for record in first.list_rank_failures(began)} == {12}, "that one is an earlier run's"
