"""Measures what saves and a resume cost.

A save is compared with torch.save + fsync of the same bytes, a resume with a fresh start. It also measures how long an
async save stalls training. All sides alternate on one rank in one process; the medians of several rounds are compared.
A save is measured with and without its hashes, so that hashing is shown apart.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from unittest import mock

from paths import RESULTS

os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
os.environ.setdefault("OMP_NUM_THREADS", "1")
NUM_ROUNDS, NUM_STARTS = 7, 5
SAVE_BAR, STALL_BAR, RESUME_BAR = 1.3, 0.10, 1.5
CONFIG = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}


class NoHash:
    def update(self, _: object) -> None: ...

    def hexdigest(self) -> str:
        return ""


@contextlib.contextmanager
def without_hashes() -> Iterator[None]:
    with mock.patch.object(hashlib, "sha256", return_value=NoHash()):
        yield


def measure(call: Callable[[], object]) -> float:
    os.sync()  # a save does not wait here for what other programs have written
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    import torch
    import torch.distributed as dist
    from support.run_harness import RunHarness
    from support.training import MemoryRows, make_recipe

    from ulysses_cli.train.checkpoint.format import save_checkpoint, take_share
    from ulysses_cli.train.checkpoint.saves import SavePolicy
    from ulysses_cli.train.loop import train

    folder = Path(tempfile.mkdtemp())
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(folder / "store"), 1), rank=0, world_size=1, timeout=timedelta(minutes=5)
    )
    recipe = make_recipe("data.max_length=128", config=CONFIG)
    rows = MemoryRows([[(128, 0)]] * 4, 8192)

    def start() -> RunHarness:
        return RunHarness(recipe, rows, 10**6, str(folder), policy=SavePolicy(total_limit=1, is_async=True))

    def step(harness: RunHarness) -> None:
        harness.train_state.num_steps = harness.train_state.step + 1
        train(harness.train_state)

    harness = start()
    step(harness)
    states = dict(take_share(harness.context).tensors)
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in states.values())

    def save_plainly() -> None:
        with open(folder / "plain.pt", "wb") as stream:
            torch.save(states, stream)
            stream.flush()
            os.fsync(stream.fileno())

    def save_ours() -> None:
        save_checkpoint(harness.context, folder / "ours", 1, {"world_size": 1})

    def save_unhashed() -> None:
        with without_hashes():
            save_ours()

    stalls = []

    def save_beside() -> None:
        began = time.perf_counter()
        harness.saves.save(harness.train_state)
        stalls.append(time.perf_counter() - began)
        harness.saves.wait_for_pending()

    sides = {
        "torch.save + fsync": save_plainly,
        "ours": save_ours,
        "ours, no hash": save_unhashed,
        "async": save_beside,
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for at in range(NUM_ROUNDS + 1):
        for name, call in sides.items():
            harness.train_state.step += 1
            answer = measure(call)
            if at:  # the first round fills caches and makes buffers
                seconds[name].append(answer)
    stall = statistics.median(stalls[1:])
    medians = {name: statistics.median(answer) for name, answer in seconds.items()}

    def pair(name: str) -> float:
        return statistics.median(a / b for a, b in zip(seconds[name], seconds["torch.save + fsync"], strict=True))

    newest = harness.saves.get_last_path()

    def begin() -> None:
        step(start())

    def resume() -> None:
        from ulysses_cli.run.resume import find_resume_point

        beginning = find_resume_point(folder, "auto", 0, print)
        assert beginning.path == newest
        made = start()
        made.saves.resume(made.train_state, beginning)
        step(made)

    starts = [(measure(begin), measure(resume)) for _ in range(NUM_STARTS)]
    ratios = {
        "save, without hashing": pair("ours, no hash"),
        "save, with hashing": pair("ours"),
        "stall of an async save, of torch.save + fsync": stall / medians["torch.save + fsync"],
        "resume to first step, of a fresh start": statistics.median(b / a for a, b in starts),
    }
    print(f"{num_bytes / 1e6:,.0f} MB of states, medians of {NUM_ROUNDS} rounds")
    for name, value in [*medians.items(), ("stall of async", stall)]:
        print(f"  {name:<22}{value:8.3f} s")
    bars = (SAVE_BAR, None, STALL_BAR, RESUME_BAR)
    for (name, ratio), bar in zip(ratios.items(), bars, strict=True):
        print(f"  {name:<48}{ratio:6.3f}  {f'(bar {bar})' if bar else ''}")
    result = {"bytes": num_bytes, "seconds": medians | {"stall": stall}, "ratios": ratios}
    (RESULTS / "checkpoint-cpu.json").write_text(json.dumps(result, indent=1) + "\n")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
