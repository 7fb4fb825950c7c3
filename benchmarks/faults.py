"""Real runs on two CPU ranks, struck by faults from a fixed list of seeds: injected, survived, refused, lost.

A chain is one run: it is struck, resumed with --resume auto, struck again, and at last left alone. Its losses and its
model must be those of a run that was never touched, to the last bit; then all of its faults are survived. A refusal is
an error in words with exit code 1 or 2. Anything else is lost.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from faults import RECIPE, Workshop, damage_newest, find_ranks, strike, wait_until  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "faults-cpu.json"
NUM_KILLS, CHAIN = 30, 5
NUM_STEPS = RECIPE["train"]["max_steps"]
MOMENTS = ("step", "writing", "manifest", "removal", "any")
DAMAGES = ("truncated file", "flipped byte", "missing shard", "missing manifest", "torn metrics")
TIME_LIMIT = 300


class Tally:
    def __init__(self) -> None:
        self.counts: dict[str, Counter[str]] = {}

    def add(self, fault: str, end: str) -> None:
        self.counts.setdefault(fault, Counter()).update({"injected": 1, end: 1})
        print(f"  {fault}: {end}", flush=True)


def is_moment(folder: Path, moment: str) -> bool:
    """A save is being written, is nearly finished, or an older checkpoint is being removed."""
    try:
        names = os.listdir(folder / "checkpoints")
    except FileNotFoundError:
        return False
    if moment == "writing":
        return any(name.endswith(".writing") for name in names)
    if moment == "manifest":
        return any((folder / "checkpoints" / name / "state.json").exists() for name in names if "writing" in name)
    return any(name.endswith(".gone") for name in names)


def strike_once(shop: Workshop, run: str, process: subprocess.Popen[str], seed: int) -> str:
    """Waits for a moment and kills one rank or all -> what was done; '' when the run ended before."""
    generator = random.Random(seed)
    moment = MOMENTS[seed % len(MOMENTS)]
    ranks = generator.choice([[0], [1], [0, 1]])
    before = max([int(name[5:]) for name in shop.list_checkpoints(run) if name[5:].isdecimal()], default=0)
    ahead = generator.randint(1, 3)

    def is_ahead() -> bool:
        steps = [int(name[5:]) for name in shop.list_checkpoints(run) if name[5:].isdecimal()]
        return max(steps, default=0) >= before + ahead

    if moment == "any":  # also while it starts, loads or resumes
        if not wait_until(process, lambda: len(find_ranks(run)) == 2):
            return ""
        time.sleep(generator.uniform(0, 10))
    elif not wait_until(process, is_ahead):
        return ""
    elif moment == "step":
        time.sleep(generator.uniform(0, 0.5))
    elif not wait_until(process, lambda: is_moment(shop.folder / run, moment), pause=0):
        return ""
    if process.poll() is not None:
        return ""
    strike(run, ranks)
    return f"SIGKILL of {'all ranks' if len(ranks) == 2 else 'one rank'}, {moment}"


def run_chain(shop: Workshop, run: str, seeds: list[int], extra: list[str], tally: Tally) -> None:
    struck: list[str] = []
    for seed in seeds:
        process = shop.start(run, *extra, "--resume", "auto")
        done = strike_once(shop, run, process, seed)
        process.communicate(timeout=TIME_LIMIT)
        struck += [done] if done else []
    settle(shop, run, struck, extra, tally)


def settle(shop: Workshop, run: str, struck: list[str], extra: list[str], tally: Tally) -> None:
    code, said = shop.train(run, *extra, "--resume", "auto")
    is_same = code == 0 and shop.read_losses(run) == shop.read_losses("whole")
    is_same = is_same and shop.read_model(run) == shop.read_model("whole")
    end = "survived" if is_same else "refused" if code in (1, 2) and "Traceback" not in said else "lost"
    if end != "survived":
        print(said[-600:])
    for fault in struck:
        tally.add(fault, end)


def damage(shop: Workshop, kinds: tuple[str, ...], tally: Tally) -> None:
    """A run that was stopped, what it left damaged, and resumed."""
    for at, kind in enumerate(kinds):
        run = f"damaged-{at}"
        process = shop.start(run)
        wait_until(process, lambda run=run: shop.count_steps(run) >= 4)  # type: ignore[misc]
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=TIME_LIMIT)
        tally.add("SIGTERM", "survived" if process.returncode == 0 else "lost")
        damage_newest(shop.folder / run, kind, random.Random(at))
        settle(shop, run, [kind], [], tally)


def hang(shop: Workshop, tally: Tally) -> None:
    """A rank that stands still is named and ended; the run goes on from its checkpoint."""
    process = shop.start("hanging", "run.step_timeout=10")
    wait_until(process, lambda: shop.count_steps("hanging") >= 2)
    strike("hanging", [1], signal.SIGSTOP)
    _, said = process.communicate(timeout=TIME_LIMIT)
    if process.returncode != 1 or "rank 1 does not answer" not in said:
        print(said[-600:])
        tally.add("SIGSTOP of one rank", "lost")
        return
    settle(shop, "hanging", ["SIGSTOP of one rank"], [], tally)


def restart(shop: Workshop, tally: Tally) -> None:
    """run.max_restarts: no person is needed."""
    process = shop.start("restarted", "run.max_restarts=2")
    wait_until(process, lambda: shop.count_steps("restarted") >= 3)
    strike("restarted", [1])
    _, said = process.communicate(timeout=TIME_LIMIT)
    is_same = process.returncode == 0 and shop.read_losses("restarted") == shop.read_losses("whole")
    is_same = is_same and shop.read_model("restarted") == shop.read_model("whole")
    if not is_same:
        print(said[-600:])
    tally.add("SIGKILL of one rank, max_restarts", "survived" if is_same else "lost")


def fill_disk(shop: Workshop, tally: Tally) -> None:
    """A small tmpfs, where this process may mount one."""
    place = shop.folder / "small"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)], capture_output=True).returncode:
        print("  no disk can be mounted here: a full one is not tested")
        return
    try:
        process = shop.start("small/run", "run.save_total_limit=1")
        wait_until(process, lambda: shop.count_steps("small/run") >= 3)
        try:
            (place / "ballast").write_bytes(b"\0" * 2**21)
        except OSError:
            pass
        _, said = process.communicate(timeout=TIME_LIMIT)
        is_clear = process.returncode == 1 and "No space left on device" in said
        (place / "ballast").unlink()
        if is_clear:
            settle(shop, "small/run", ["full disk"], ["run.save_total_limit=1"], tally)
        else:
            print(said[-600:])
            tally.add("full disk", "lost")
    finally:
        subprocess.run(["umount", "-l", str(place)], check=False)


def main() -> None:
    num_kills = int(sys.argv[1]) if len(sys.argv) > 1 else NUM_KILLS
    tally = Tally()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        shop = Workshop(Path(folder))
        code, said = shop.train("whole")
        assert code == 0, said
        for at in range(0, num_kills, CHAIN):
            seeds = list(range(at, min(at + CHAIN, num_kills)))
            extra = ["run.async_save=true"] if at // CHAIN % 2 else []
            print(f"chain {at // CHAIN + 1}, seeds {seeds[0]} to {seeds[-1]} {' '.join(extra)}", flush=True)
            run_chain(shop, f"chain-{at}", seeds, extra, tally)
        damage(shop, DAMAGES, tally)
        hang(shop, tally)
        restart(shop, tally)
        fill_disk(shop, tally)
    total = sum((count for count in tally.counts.values()), Counter())
    columns = ("injected", "survived", "refused", "lost")
    print(f"\n{'':<40}" + "".join(f"{name:>10}" for name in columns))
    for fault, count in [*sorted(tally.counts.items()), ("all", total)]:
        print(f"{fault:<40}" + "".join(f"{count[name]:>10}" for name in columns))
    result = {
        "faults": {fault: {name: count[name] for name in columns} for fault, count in tally.counts.items()},
        "all": {name: total[name] for name in columns},
        "steps": NUM_STEPS,
        "seconds": round(time.monotonic() - started),
    }
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(1 if total["lost"] else 0)


if __name__ == "__main__":
    main()
