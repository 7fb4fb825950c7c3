"""Measures how accurate the ledger and the speed model are.

The rows and their sources are in published.py. No constant is fitted to a row. A row that is off by more than its bar
says why.

    python benchmarks/estimate.py [--ranks [--remember FILE]] [--json FILE]
    python benchmarks/estimate.py --commands [--json FILE]

`--commands` times `estimate-memory` and `plan`. `--ranks` adds real steps on 1, 2 and 4 CPU ranks, against the ledger
and against a trace. `--remember` saves what was measured, so that an interrupted run continues where it was.
"""

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from paths import ROOT
from published import (
    Claim,
    Row,
    list_claims,
    list_later_claims,
    list_later_memory,
    list_later_speed,
    list_memory,
    list_speed,
)

AGAIN = ", again"  # with what the first such command has kept
BARS = {"estimate-memory": 0.5, "plan": 5.0, "plan, one kind": 2.5}  # seconds of a command
BARS |= {"estimate-memory, again": 0.5, "plan, again": 1.0, "plan, one kind, again": 0.5}


def list_real(memory: Path | None) -> Iterator[Row]:
    """Yields real steps of DeepSpeed's engine on CPU ranks, every byte counted, against the ledger and a trace. Counts
    are exact: those of an earlier run are valid as long as nothing but the ledger changes."""
    from support.rank_pool import run_on_ranks
    from support.real_steps import make_case, measure_step, predict_step, trace_step

    known = json.loads(memory.read_text()) if memory is not None and memory.is_file() else {}
    for what, num_ranks, config, overrides in walk_real_cases():
        recipe = make_case(config, *overrides)
        if what not in known:
            known[what] = [max(run_on_ranks(num_ranks, measure_step, recipe)), trace_step(recipe)]
            if memory is not None:
                memory.write_text(json.dumps(known))
        (real, traced), here = known[what], "real steps on CPU ranks"
        yield Row(f"ledger: {what}", real / 2**20, predict_step(recipe) / 2**20, "MiB", here, 0.03)
        yield Row(f"trace: {what}", real / 2**20, traced / 2**20, "MiB", here, 0.03)


def walk_real_cases() -> Iterator[tuple[str, int, dict[str, object], tuple[str, ...]]]:
    """Yields every model with every way to train it and every number of ranks, and each lever switched on."""
    experts = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
    models: dict[str, dict[str, object]] = {
        "all keys": {"num_key_value_heads": 8},
        "grouped keys": {},
        "tied": {"tie_word_embeddings": True},
        "experts": experts,
    }
    tiles = ("memory.tiled_loss=true",)
    for name, config in models.items():
        for ranks in (1, 2, 4):
            yield f"{name}, {ranks} ranks", ranks, config, (f"parallel.sp_size={ranks}", *tiles)
    levers = {
        "plain loss": (),
        "tiled MLP": (*tiles, "memory.tiled_mlp=true"),
        "no recomputation": (*tiles, "memory.gradient_checkpointing=false"),
        "full recomputation": (*tiles, "memory.gradient_checkpointing=full"),
        "chunks of heads": (*tiles, "memory.attention_head_chunks=2"),
        "bfloat16": (*tiles, "model.dtype=bfloat16"),
    }
    for name, words in levers.items():
        for ranks in (1, 2):
            yield f"{name}, {ranks} ranks", ranks, {}, (f"parallel.sp_size={ranks}", *words)
    for ranks in (1, 2, 4):
        yield f"adapters, {ranks} ranks", ranks, {}, (f"parallel.sp_size={ranks}", *tiles, "lora.r=8")
    yield "sp 2 x dp 2", 4, {}, ("parallel.sp_size=2", "parallel.dp_shard_size=2", *tiles)
    yield from walk_stages(tiles)


def walk_stages(tiles: tuple[str, ...]) -> Iterator[tuple[str, int, dict[str, object], tuple[str, ...]]]:
    """Yields ZeRO-1 and 2 with one micro-step and two, and what else changes where gradients and shards live."""
    twice, narrow = "train.gradient_accumulation_steps=2", "model.dtype=bfloat16"
    lower = {f"ZeRO-{stage}": f"parallel.zero_stage={stage}" for stage in (1, 2)}
    for ranks in (2, 4):
        for name, stage in lower.items():
            words = (f"parallel.sp_size={ranks}", *tiles, stage)
            yield f"{name}, {ranks} ranks", ranks, {}, words
            yield f"{name}, two micro-steps, {ranks} ranks", ranks, {}, (*words, twice)
            yield f"{name}, bfloat16, {ranks} ranks", ranks, {}, (*words, narrow)
            yield f"{name}, bfloat16, two micro-steps, {ranks} ranks", ranks, {}, (*words, narrow, twice)
        yield f"ZeRO-2, adapters, {ranks} ranks", ranks, {}, (*words, "lora.r=8")
        host = (*tiles, f"parallel.sp_size={ranks}", "memory.offload_optimizer=cpu")
        yield f"optimizer on the host, {ranks} ranks", ranks, {}, host
        yield f"optimizer on the host, bfloat16, {ranks} ranks", ranks, {}, (*host, narrow)
        yield f"ZeRO-2, optimizer on the host, {ranks} ranks", ranks, {}, (*host, lower["ZeRO-2"])
    yield "ZeRO-2, one rank", 1, {}, (*tiles, lower["ZeRO-2"])
    yield "ZeRO-2, tied", 2, {"tie_word_embeddings": True}, (*tiles, "parallel.sp_size=2", lower["ZeRO-2"])
    replicas = (*tiles, "parallel.sp_size=2", "parallel.dp_replicate_size=2")
    yield "two replicas", 4, {}, replicas
    yield "two replicas, bfloat16", 4, {}, (*replicas, narrow)
    yield "two replicas, two micro-steps", 4, {}, (*replicas, twice)


def time_commands() -> dict[str, float]:
    """Returns the least CPU seconds of three starts, which other programs on the machine change little; each with
    nothing kept, and again. `plan` is the command as a user types it, without --gpus: every kind of GPU; and with one
    kind."""
    recipe = str(ROOT / "recipes" / "llama-3.1-8b-128k-8gpu.yaml")
    model = ["--model", "meta-llama/Llama-3.1-70B", "--max-length", "128Ki"]
    commands = {
        "estimate-memory": ["estimate-memory", recipe],
        "plan": ["plan", *model],
        "plan, one kind": ["plan", *model, "--gpus", "h100-80gb:512"],
    }
    seconds: dict[str, float] = {}
    for name, words in commands.items():
        for _ in range(3):
            with tempfile.TemporaryDirectory() as folder:
                for at in (name, f"{name}{AGAIN}"):
                    seconds[at] = min(seconds.get(at, math.inf), measure_cpu_seconds(*words, kept_in=folder))
    return seconds


def measure_cpu_seconds(*words: str, kept_in: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command, environ = [sys.executable, "-m", "ulysses_cli", *words], {**os.environ, "XDG_CACHE_HOME": kept_in}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT, env=environ)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def time_alone(file: Path | None) -> int:
    seconds = time_commands()
    if file is not None:
        known = json.loads(file.read_text()) if file.is_file() else {}
        file.write_text(json.dumps({**known, "seconds": seconds}, indent=1) + "\n")
    for name, value in seconds.items():
        print(f"{name}: {value:.2f} CPU seconds of {BARS[name]}{'  MISSED' if value > BARS[name] else ''}")
    return int(any(value > BARS[name] for name, value in seconds.items()))


def print_rows(title: str, rows: list[Row]) -> None:
    print(f"\n{title}")
    for row in rows:
        mark = "" if row.bar is not None and row.is_good else "  MISSED" if row.bar is not None else f"  ({row.note})"
        values = f"{row.published:>9,.2f} {row.predicted:>9,.2f} {row.unit:<9}"
        print(f"  {row.what:<62} {values} {row.error:+7.1%}  {row.source}{mark}")


def print_claims(title: str, claims: list[Claim]) -> None:
    print(f"\n{title}")
    for claim in claims:
        output, ok = "fits" if claim.fits else "OOM", "" if claim.is_good else "  OFF"
        room = f"{claim.peak_gib:6.1f} of {claim.capacity_gib:.1f}"
        print(f"  {claim.what:<62} {output:<5} {room}  {claim.source}{ok}{f'  ({claim.note})' if claim.note else ''}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", action="store_true")
    parser.add_argument("--commands", action="store_true", help="time the commands alone; --json keeps the other rows")
    parser.add_argument("--remember", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.commands:
        return time_alone(options.json)
    seconds = time_commands()  # before the ranks start, which then stay
    groups = {
        "memory: published, predicted": list(list_memory()),
        "memory: published, predicted; rows found after the model was made": list(list_later_memory()),
        "speed: published, predicted": list(list_speed()),
        "speed: published, predicted; rows found after the model was made": list(list_later_speed()),
    }
    if options.ranks:
        groups["a real step's peak: counted, predicted"] = list(list_real(options.remember))
    for title, rows in groups.items():
        print_rows(title, rows)
    claims, later = list(list_claims()), list(list_later_claims())
    print_claims("fits or not, GiB", claims)
    print_claims("fits or not, GiB; found after the model was made", later)
    claims += later
    for name, value in seconds.items():
        print(f"{name}: {value:.2f} CPU seconds of {BARS[name]}{'  MISSED' if value > BARS[name] else ''}")
    held = [row for rows in groups.values() for row in rows if row.bar is not None]
    missed = [row for row in held if not row.is_good]
    missed += [claim for claim in claims if not claim.is_good and not claim.note]
    num_off = sum(not claim.is_good for claim in claims)
    is_slow = any(value > BARS[name] for name, value in seconds.items())
    print(
        f"\n{len(held)} rows held to their bars; {len(claims)} claims, {num_off} off with a note; {len(missed)} missed"
    )
    summary = {title: [{**asdict(row), "error": row.error} for row in rows] for title, rows in groups.items()}
    result = {**summary, "claims": [asdict(claim) for claim in claims], "seconds": seconds}
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(bool(missed) or is_slow)


if __name__ == "__main__":
    sys.exit(main())
