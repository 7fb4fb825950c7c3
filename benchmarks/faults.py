"""Real runs on two CPU ranks, struck by faults from a fixed list of seeds: injected, survived, refused, lost.

A chain is one run: it is struck, resumed with --resume auto, struck again, and at last left alone. Its losses and its
model must be those of a run that was never touched, to the last bit; then all of its faults are survived. A refusal is
an error in words with exit code 1 or 2. Anything else is lost. What is done stands in the results: called again, it
goes on with the rest (--minutes bounds one call, --anew begins again).
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
from paths import RESULTS
from support import forked, kill_points
from support.faults import Workshop, damage_newest, wait_until
from support.forked import Command, is_alive

from ulysses_cli.prove.ranks import rank_server

NUM_KILLS, CHAIN, NUM_STEPS = 30, 5, 24
DAMAGES = ("truncated file", "flipped byte", "missing shard", "missing manifest", "torn metrics")
COLUMNS = ("injected", "survived", "refused", "lost")
TIME_LIMIT = 300
WALKED_STEP = 8
WALKED = ["run.rehearsal=true", "data.eval_split=0.02", f"run.eval_steps={WALKED_STEP}"]
WHO = {"all": "all ranks", "one": "one rank", "agent": "the launcher", "command": "the command"}
WALKS = [("command", signal.SIGTERM), *((who, signal.SIGKILL) for who in WHO)]
Ends = list[tuple[str, str]]  # (fault, how it ended)


class Range(Workshop):
    """Runs of some length, beside one that was never touched."""

    def start(
        self, run: str, *words: str, plan: Mapping[str, Any] | None = None, beside: Command | None = None
    ) -> Command:
        return super().start(run, f"train.max_steps={NUM_STEPS}", *words, plan=plan, beside=beside)

    def is_whole(self, run: str, num_torn: int, whole: str = "whole") -> bool:
        ours, theirs = self.read_losses(run), self.read_losses(whole)
        is_same = ours.items() <= theirs.items() and len(theirs) - len(ours) <= num_torn
        return is_same and self.read_model(run) == self.read_model(whole)


def wait_for_steps(shop: Range, run: str, process: Command, count: int) -> None:
    wait_until(process, lambda: shop.count_steps(run) >= count)


def end(process: Command) -> tuple[int, str]:
    _, said = process.communicate(timeout=TIME_LIMIT)
    return process.wait(1), said


def settle(shop: Range, run: str, struck: list[str], *words: str) -> Ends:
    code, said = end(shop.start(run, *words, "--resume", "auto"))
    return judge(shop, run, struck, code, said)


def judge(shop: Range, run: str, struck: list[str], code: int, said: str) -> Ends:
    """A run that has ended: is it the one that was never touched?"""
    is_refused = code in (1, 2) and "Traceback" not in said
    num_torn = struck.count("torn metrics")  # lines of steps that are not done again
    how = "survived" if code == 0 and shop.is_whole(run, num_torn) else "refused" if is_refused else "lost"
    if how != "survived":
        print(f"{run}: exit code {code}\n{said[-1500:]}", flush=True)
    return [(fault, how) for fault in struck]


def lose(fault: str, said: str) -> Ends:
    print(f"{fault}\n{said[-1500:]}", flush=True)
    return [(fault, "lost")]


def kill(shop: Range, seeds: list[int]) -> Ends:
    """Every other chain saves beside its steps."""
    run, words = f"chain-{seeds[0]}", ["run.async_save=true"] if seeds[0] // CHAIN % 2 else []
    struck = []
    for seed in seeds:
        plan = kill_points.draw(seed)
        process = shop.start(run, *words, "--resume", "auto", plan=plan)
        end(process)
        if process.has_struck:
            who = "all ranks" if len(plan["ranks"]) == 2 else "one rank"
            struck.append(f"SIGKILL of {who}, {plan['moment']}{', async' if words else ''}")
    return settle(shop, run, struck, *words)


def walk(shop: Range, who: str, number: signal.Signals) -> Ends:
    """One run, struck at every event of its life in turn and resumed each time. Whatever a rank is about to do, the
    other one is, too; nothing outlives the launcher; resumed at its end, it has nothing left to do."""
    run, ends = f"walk-{who}-{number.name}", []
    for event, plan in kill_points.list_phases(NUM_STEPS, WALKED_STEP, WALKED_STEP + 2).items():
        process = shop.start(run, *WALKED, "--resume", "auto", plan={**plan, "who": who, "signal": int(number)})
        code, said = end(process)
        alive = wait_for_processes(process)
        fault = f"{number.name} of {WHO[who]}, {event}"
        if not process.has_struck or alive or "Traceback" in said or not agree(process):
            return [*ends, *lose(fault, f"{code}, alive: {alive}\n{said}")]
        ends.append((fault, "survived"))
    code, said = end(shop.start(run, *WALKED, "--resume", "auto"))
    if code or not shop.is_whole(run, 0, "walk"):
        return [(fault, "lost") for fault, _ in ends]
    code, said = end(shop.start(run, *WALKED, "--resume", "auto"))
    how = "survived" if code == 0 and "already finished" in said else "lost"
    return [*ends, (f"resumed after the end, {number.name} of {WHO[who]}", how)]


def agree(process: Command) -> bool:
    """As far as both ranks came, they came to the same collectives."""
    logs = kill_points.read_collectives(process.pids)
    return all(one == other for one, other in zip(*logs, strict=False))


def wait_for_processes(process: Command) -> list[int]:
    """Ranks that live on 15 seconds after their command."""
    limit = time.monotonic() + 15
    while alive := [rank for rank in process.list_ranks() if is_alive(rank)]:
        if time.monotonic() > limit:
            return alive
        time.sleep(0.1)
    return []


def damage(shop: Range, kind: str) -> Ends:
    """A run that was stopped, what it left damaged, and resumed."""
    run = kind.replace(" ", "-")
    process = shop.start(run)
    wait_for_steps(shop, run, process, 4)
    process.send_signal(signal.SIGTERM)
    code, said = end(process)
    if code or "stopped: by a signal" not in said:
        return lose("SIGTERM", said)
    damage_newest(shop.folder / run, kind, random.Random(kind))
    found = settle(shop, run, [kind])
    return [("SIGTERM", found[0][1]), *found]


def hang(shop: Range, name: str) -> Ends:
    """A rank that stands still is named and ended, and so are the others; the run goes on from its checkpoint."""
    run, seconds = f"hanging-{name}", 6
    process = shop.start(run, f"run.step_timeout={seconds}")
    wait_for_steps(shop, run, process, 2)
    number, words = {
        "stopped": (signal.SIGSTOP, "rank 1 does not answer, the others wait for it in "),
        "asleep": (signal.SIGUSR2, "rank 1 hangs in micro-step "),
    }[name]
    process.strike(1, number)
    code, said = end(process)
    if code != 1 or f"takes longer than run.step_timeout ({seconds} s): {words}" not in said:
        return lose(f"hang, {name}", said)
    return settle(shop, run, [f"hang, {name}"])


def restart(shop: Range) -> Ends:
    """run.max_restarts: no person is needed."""
    process = shop.start("restarted", "run.max_restarts=2")
    wait_for_steps(shop, "restarted", process, 3)
    process.strike(1)
    return judge(shop, "restarted", ["SIGKILL of one rank, max_restarts"], *end(process))


def restart_machines(shop: Range) -> Ends:
    """Two machines, each with a launcher of its own; a rank lost on one is started again with all others on both."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    words = ["run.max_restarts=2", "--nnodes", "2", "--master-addr", "localhost", "--master-port", str(port)]
    first = shop.start("machines", *words, "--node-rank", "0")
    second = shop.start("machines", *words, "--node-rank", "1", beside=first)
    wait_for_steps(shop, "machines", first, 3)
    first.strike(1)
    code, said = end(second)
    if code:
        return lose("SIGKILL of one rank, two machines", said)
    return judge(shop, "machines", ["SIGKILL of one rank, two machines"], *end(first))


def start_twice(shop: Range) -> Ends:
    """The second run in a folder is refused, and harms nothing; a dead one keeps no lock."""
    first = shop.start("twice")
    wait_for_steps(shop, "twice", first, 2)
    code, said = end(shop.start("twice", "--resume", "auto"))
    ends = [("two runs in one folder", "refused")]
    if code != 2 or "is in use by a run that is still going on" not in said:
        ends = lose(*ends[0][:1], said)
    for rank in range(2):
        first.strike(rank)
    first.kill()
    end(first)
    wait_until_free(shop.folder / "twice" / "lock-0")
    return ends + settle(shop, "twice", ["SIGKILL of all ranks and the command"])


def wait_until_free(lock: Path) -> None:
    """Until the launcher, too, has seen that its command is dead."""
    limit = time.monotonic() + 60
    with open(lock) as stream:
        while time.monotonic() < limit:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                time.sleep(0.1)


@contextmanager
def small_disk(place: Path, *options: str) -> Iterator[bool]:
    """A tmpfs, where this process may mount one."""
    place.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(place)]
    if subprocess.run(command, capture_output=True).returncode:
        print("  no disk can be mounted here: this fault is left out", flush=True)
        yield False
        return
    try:
        yield True
    finally:
        subprocess.run(["umount", "-l", str(place)], check=False)


def fill(file: Path) -> None:
    """To the last byte."""
    handle = os.open(file, os.O_WRONLY | os.O_CREAT)
    for size in (1 << 16, 1 << 12, 1):
        try:
            while os.write(handle, b"\0" * size) == size:
                pass
        except OSError:
            continue
    os.close(handle)


def fill_disk(shop: Range, on_save_error: str) -> Ends:
    """The run, its logs and its metrics stand on a disk that becomes full, and later has room again."""
    fault, run = f"full disk, on_save_error: {on_save_error}", f"small-{on_save_error}/run"
    words = ["run.save_total_limit=1", f"run.on_save_error={on_save_error}"]
    with small_disk(shop.folder / run.split("/")[0], "size=3m") as is_there:
        if not is_there:
            return []
        process = shop.start(run, *words)
        wait_for_steps(shop, run, process, 3)
        ballast = shop.folder / run.split("/")[0] / "ballast"
        fill(ballast)
        if on_save_error == "continue":  # room again once a save has failed, and before the last one
            wait_until(process, lambda: "No space left on device" in process.read_said())
            ballast.unlink()
        code, said = end(process)
        ballast.unlink(missing_ok=True)
        if "No space left on device" not in said or code != (on_save_error == "stop"):
            return lose(fault, said)
        if on_save_error == "stop":
            return settle(shop, run, [fault], *words)
        return judge(shop, run, [fault], code, said)


def forbid(shop: Range) -> Ends:
    """The checkpoints' disk can no longer be written."""
    process = shop.start("read-only")
    wait_for_steps(shop, "read-only", process, 3)
    with small_disk(shop.folder / "read-only" / "checkpoints", "ro") as is_there:
        if not is_there:
            end(process)
            return []
        code, said = end(process)
    if code != 1 or "was not written: " not in said:  # read-only, or its folder out of sight
        return lose("read-only disk", said)
    return settle(shop, "read-only", ["read-only disk"])


def list_pieces() -> dict[str, Callable[[Range], Ends]]:
    chains = [list(range(at, min(at + CHAIN, NUM_KILLS))) for at in range(0, NUM_KILLS, CHAIN)]
    pieces: dict[str, Callable[[Range], Ends]] = {
        f"seeds {seeds[0]} to {seeds[-1]}": lambda shop, seeds=seeds: kill(shop, seeds)  # type: ignore[misc]
        for seeds in chains
    }
    for who, number in WALKS:
        pieces[f"walk, {number.name} of {WHO[who]}"] = lambda shop, who=who, number=number: walk(shop, who, number)  # type: ignore[misc]
    pieces |= {kind: lambda shop, kind=kind: damage(shop, kind) for kind in DAMAGES}  # type: ignore[misc]
    pieces |= {f"hang, {name}": lambda shop, name=name: hang(shop, name) for name in ("stopped", "asleep")}  # type: ignore[misc]
    pieces |= {
        "restart": restart,
        "restart, two machines": restart_machines,
        "two runs": start_twice,
        "read-only disk": forbid,
    }
    for choice in ("stop", "continue"):
        pieces[f"full disk, {choice}"] = lambda shop, choice=choice: fill_disk(shop, choice)  # type: ignore[misc]
    return pieces


def summarize(done: dict[str, Any], num_pieces: int) -> dict[str, Any]:
    counts: dict[str, Counter[str]] = {}
    for piece in done.values():
        for fault, how in piece["ends"]:
            counts.setdefault(fault, Counter()).update({"injected": 1, how: 1})
    total = sum(counts.values(), Counter())
    return {
        "is_finished": len(done) == num_pieces,
        "all": {name: total[name] for name in COLUMNS},
        "faults": {fault: {name: count[name] for name in COLUMNS} for fault, count in sorted(counts.items())},
        "steps": NUM_STEPS,
        "seconds": round(sum(piece["seconds"] for piece in done.values())),
        "pieces": done,
    }


def read_done(pieces: dict[str, Any]) -> dict[str, Any]:
    """Pieces of a call that was not finished."""
    try:
        before = json.loads((RESULTS / "faults-cpu.json").read_text())
    except (OSError, ValueError):
        return {}
    return {} if before["is_finished"] else {name: one for name, one in before["pieces"].items() if name in pieces}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="no piece is begun after this time")
    parser.add_argument("--anew", action="store_true", help="forget what an earlier call has done")
    parser.add_argument("--only", default="", help="pieces whose name holds this; results are not written")
    options = parser.parse_args()
    pieces, limit = list_pieces(), time.monotonic() + 60 * options.minutes
    done = {} if options.anew or options.only else read_done(pieces)
    rank_server.PRELOADED.extend(forked.PRELOADED)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        shop = Range(Path(folder))
        for run, words in (("whole", []), ("walk", WALKED)):
            code, said = end(shop.start(run, *words))
            assert code == 0, said
        for name, piece in pieces.items():
            if name in done or options.only not in name or time.monotonic() > limit:
                continue
            started = time.monotonic()
            ends = piece(shop)
            done[name] = {"seconds": round(time.monotonic() - started, 1), "ends": ends}
            for fault, how in ends:
                print(f"  {fault}: {how}", flush=True)
            if not options.only:
                (RESULTS / "faults-cpu.json").write_text(json.dumps(summarize(done, len(pieces)), indent=1) + "\n")
    result = summarize(done, len(pieces))
    print(f"\n{'':<44}" + "".join(f"{name:>10}" for name in COLUMNS))
    for fault, count in [*result["faults"].items(), ("all", result["all"])]:
        print(f"{fault:<44}" + "".join(f"{count[name]:>10}" for name in COLUMNS))
    print(f"{len(done)} of {len(pieces)} pieces in {result['seconds']} s")
    sys.exit(1 if result["all"]["lost"] else 0)


if __name__ == "__main__":
    main()
