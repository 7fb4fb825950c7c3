"""What 15 minutes on a GPU give, in two calls: does it run, and how fast. Each figure is beside its prediction and is
written when it exists; a later call goes on where an earlier one stopped, of another day too. In the first, what is no
run goes on beside the runs, since no figure of it counts; in the second nothing runs beside a measurement.

    python benchmarks/gpu.py --suite proof|measure|more [--minutes 7] [--results FOLDER] [--only PART] [--again]
    python benchmarks/gpu.py --suite proof --rehearse      in miniature on a CPU; measures nothing

`more` runs one part a call. A machine that has the packages needs no installation: docs/benchmarks.md names them. Exit
codes: 0 when all parts are done or skipped, 1 when one has failed or time ran out, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu_run import Part, PartFolders, Row, end_marked, make_environ, read_json_line, run_part
from paths import RESULTS, ROOT

PYTHON = sys.executable
ULYSSES = (PYTHON, "-m", "ulysses_cli")
LAYER = {  # Llama-3.1-8B's layer, with a small vocabulary, so that layers decide
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 8192, "max_position_embeddings": 1048576,
    "rope_theta": 500000.0, "tie_word_embeddings": False,
}  # fmt: skip
HALF = {  # Qwen2.5-0.5B's shape
    "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}  # fmt: skip
SHALLOW = {**HALF, "num_hidden_layers": 6}  # two runs of the whole model take more than four minutes
SMALL = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}  # fmt: skip
PACKAGES = ("datasets", "deepspeed", "hypothesis", "peft", "pytest", "transformers")
LAST_SECONDS = 15.0  # kept for writing and for the table
LEAST_SHARE = 0.7  # of its seconds: no part starts with less, but one that a later call continues
LEAST_SECONDS = 45.0  # nor any with less
MEMORY_BAR = 0.05
LOSS_BAR = 0.01  # between two runs of the same steps: sums in bfloat16 have another order each time
TEST_LINE = re.compile(r"^(\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED)(?: \((.*)\))?\s+\[\s*\d+%\]$")
ENDED = ("done", "skipped")
PLAIN, AGAIN = "train-plain", "train-again"  # folders of the run that another one is compared with, and of that one
KEPT = "gradient_checkpointing=true"
ACTIVATIONS = ("activation_offloading=true", KEPT)
HOST = ("memory.offload_optimizer=cpu", "memory.overlap_optimizer=true", "memory.tiled_mlp=true")
HOST += tuple(f"memory.{each}" for each in ACTIVATIONS)
IMPORT_SECONDS = 45.0  # of the proof's first step: every package and module is imported
IMPORT_ALL = """
import importlib, pkgutil, ulysses_cli
for module in pkgutil.walk_packages(ulysses_cli.__path__, "ulysses_cli."):
    try:
        module.name.endswith("__main__") or importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] != "lm_eval":  # an extra, of which no part asks anything
            raise
"""
ROOM_BYTES = 48 << 30  # for checkpoints of the run


def make_recipe(folder: Path, name: str, config: dict[str, Any], *, length: int, device: str) -> Path:
    """Writes a recipe of random weights. A rehearsal evaluates a few rows."""
    share = 0.1 if device == "cuda" else 0.005
    content = {
        "model": {"config": config, "tokenizer": "bytes", "dtype": "bfloat16"},
        "data": {"datasets": [{"type": "synthetic"}], "max_length": length, "eval_split": share},
        "train": {"max_steps": 6, "learning_rate": 1e-4, "max_grad_norm": 0},  # clipping undoes early steps
        "run": {"device": device, "output_dir": str(folder / name)},
    }
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps(content))
    return file


def make_tests(
    name: str, file: str, seconds: float, *words: str, lane: int = 0, environ: dict[str, str] | None = None
) -> Part:
    """`words`: which tests of the file. In a rehearsal each test is skipped, and a file that cannot be imported
    fails."""

    def make(folders: PartFolders) -> list[list[str]]:
        passed = [word for row in folders.earlier for word in ("--deselect", row["name"])]
        chosen = [] if folders.rehearses else [*words, *passed]
        target = str(Path("tests/gpu") / file)
        return [[PYTHON, "-m", "pytest", "-o", "addopts=--strict-markers", "-v", "-rfE", target, *chosen]]

    return Part(name, make, seconds, read_test_line, judge=judge_tests, lane=lane, environ=environ or {})


def read_test_line(line: str) -> Iterator[Row]:
    found = TEST_LINE.match(line)
    if found:
        yield {"name": found[1], "outcome": found[2].lower(), **({"reason": found[3]} if found[3] else {})}


def judge_tests(rows: list[Row]) -> tuple[str, str]:
    outcomes = Counter(row["outcome"] for row in rows)
    if outcomes["failed"] or outcomes["error"] or not rows:
        return "failed", "no test has run" if not rows else "tests have failed"
    if not outcomes["passed"]:
        return "skipped", "; ".join(dict.fromkeys(row.get("reason", "no reason is given") for row in rows))
    return "done", ""


def run_training(folders: PartFolders) -> list[list[str]]:
    """A real run, saved, exported and read again. Then its step 3 is resumed in another folder, with the optimizer on
    the host, which steps while the backward goes on, activations on the host, and tiles."""
    config, length, device = (SMALL, 256, "cpu") if folders.rehearses else (SHALLOW, 32768, "cuda")
    plain = make_recipe(folders.scratch, PLAIN, config, length=length, device=device)
    again = make_recipe(folders.scratch, AGAIN, config, length=length, device=device)
    small = ["deepspeed.zero_optimization.sub_group_size=20000"] if folders.rehearses else []  # several steps early
    saved = folders.scratch / PLAIN / "checkpoints" / "step-3"
    keys = ["run.rehearsal=false"]
    return [
        [*ULYSSES, "train", str(plain), *keys, "run.save_steps=3", "run.save_total_limit=null", "--overwrite"],
        [*ULYSSES, "train", str(again), *keys, "--resume", str(saved), *HOST, *small],
    ]


def run_half(folders: PartFolders) -> list[list[str]]:
    """As a user runs it: rehearsed, saved twice, exported and loaded again."""
    config, length, device = (SMALL, 256, "cpu") if folders.rehearses else (HALF, 32768, "cuda")
    recipe = make_recipe(folders.scratch, PLAIN, config, length=length, device=device)
    return [[*ULYSSES, "train", str(recipe), "run.save_steps=3", "run.save_total_limit=null", "--overwrite"]]


def read_half(output: str) -> list[Row]:
    kept = ("loss", "tokens", "peak_memory_bytes", "host_peak_memory_bytes", "mfu")
    return [
        {"name": f"step {step['step']}", "seconds": step["step_seconds"], **{key: step.get(key) for key in kept},
         **({"part_seconds": step["step_parts"]} if step.get("step_parts") else {})}
        for step in read_steps(Path(output.strip().rpartition("\n")[2]).parent)
    ]  # fmt: skip


def read_training(output: str) -> list[Row]:
    """The steps of the resumed run, from the folder of the model that it prints, beside those of the plain one."""
    folder = Path(output.strip().rpartition("\n")[2]).parent
    steps, plain = read_steps(folder), {step["step"]: step for step in read_steps(folder.with_name(PLAIN))}
    if [step["step"] for step in steps] != [4, 5, 6]:
        raise ValueError("the resumed run did not go from step 4 to step 6")
    return [
        {"name": f"step {step['step']}", "loss": step["loss"], "plain_loss": plain[step["step"]]["loss"],
         "seconds": step["step_seconds"], "plain_seconds": plain[step["step"]]["step_seconds"],
         "early_share": step.get("early_optimizer_share")}
        for step in steps
    ]  # fmt: skip


def read_steps(folder: Path) -> list[Row]:
    metrics = folder / "metrics.jsonl"
    return [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.is_file() else []


def judge_training(rows: list[Row]) -> tuple[str, str]:
    """A resume and levers change no value. A small model's backward may end before any early step."""
    far = [row for row in rows if not abs(row["loss"] / row["plain_loss"] - 1) <= LOSS_BAR]
    reasons = [f"{row['name']}: loss {row['loss']:.5g}, in the plain run {row['plain_loss']:.5g}" for row in far]
    if reasons:
        return "failed", "; ".join(reasons)
    has_early = any(row["early_share"] for row in rows)
    return "done", "" if has_early else "no group of the optimizer stepped before the backward's end"


def make_kernels(seconds: float) -> Part:
    def make(folders: PartFolders) -> list[list[str]]:
        words = ["--lengths", "256", "--device", "cpu"] if folders.rehearses else ["--lengths", "32768,131072"]
        return [[PYTHON, "benchmarks/gpu_kernels.py", *words]]

    return Part("attention kernels, 32Ki and 128Ki", make, seconds, read_json_line)


def make_model(seconds: float, *settings: str) -> Part:
    """Its last step is profiled. `settings`: of the recipe."""

    def make(folders: PartFolders) -> list[list[str]]:
        return [[PYTHON, "benchmarks/gpu_model.py", *settings, *(["--rehearse"] if folders.rehearses else [])]]

    return Part(", ".join(("a whole model of 0.5B, 8Ki and 32Ki", *settings)), make, seconds, read_json_line)


def make_layers(
    title: str,
    lengths: str,
    seconds: float,
    *memory: str,
    levers: str = "auto",
    num_layers: int = 4,
    peer: bool = False,
) -> Part:
    """Measures all lengths in one process. `memory`: settings of the recipe."""

    def make(folders: PartFolders) -> list[list[str]]:
        config, tokens, device = {**LAYER, "num_hidden_layers": num_layers}, lengths, "cuda"
        if folders.rehearses:
            config, tokens, device = SMALL, "128,256", "cpu"
        recipe = make_recipe(
            folders.scratch, "layers", config, length=256 if folders.rehearses else 8192, device=device
        )
        steps = "1" if folders.rehearses else "3" if "128Ki" in lengths else "5"
        words = [*(f"memory.{each}" for each in memory), "--levers", levers, "--steps", steps]
        extra = ["--against", "trainer"] if peer else []
        return [[*ULYSSES, "bench", str(recipe), *words, *extra, "--max-length", tokens, "--format", "json"]]

    return Part(f"{title}, {lengths.replace(',', ' and ')}", make, seconds, read=read_findings, judge=judge_findings)


def read_findings(output: str) -> list[Row]:
    """Rows of a command's JSON."""
    found = json.loads(output[output.index("{") :])
    rows = [
        {"name": f"{row['group']}, {row['name']}", "verdict": row["verdict"], **row["values"], "text": row["text"]}
        for row in found["rows"]
    ]
    if not rows:
        raise ValueError("no rows")
    return [*rows, {"name": "calibration", **found["calibration"]}] if found["calibration"] else rows


def judge_findings(rows: list[Row]) -> tuple[str, str]:
    """What the plan says fits must run. The peer may fail."""
    own = [row for row in rows if "the Trainer" not in row["name"]]
    bad = [row for row in own if row.get("verdict") in ("FAIL", "OOM")]
    if bad:
        return "failed", "; ".join(row["text"] for row in bad)
    far = [row for row in own if abs(row.get("memory_error") or 0.0) > MEMORY_BAR]
    return "done", "; ".join(
        f"{row['name']}: predicted memory {row['memory_error']:+.1%} of what was used" for row in far
    )


def make_peers(name: str, part: str, lengths: str, seconds: float) -> Part:
    """Goes on from its own file of results, which holds every measurement of earlier calls."""

    def make(folders: PartFolders) -> list[list[str]]:
        words = ["--part", part, "--minutes", str((folders.seconds - LAST_SECONDS) / 60), "--lengths", lengths]
        file = ["--json", str(folders.results / f"levers-gpu-{part}.json")]
        return [[PYTHON, "benchmarks/gpu_levers.py", *words, *file, *(["--rehearse"] if folders.rehearses else [])]]

    return Part(name, make, seconds, read_json_line, judge=judge_peers, goes_on=True)


def judge_peers(rows: list[Row]) -> tuple[str, str]:
    failed = [f"{row['name']}: {row['failed']}" for row in rows if "failed" in row]
    return ("failed", "; ".join(failed)) if failed else ("done", "")


AUTO, PEER = "8B's layers, levers as chosen", "against the Trainer, two layers of 8B"
TILES = ("tiled_mlp=true", "tiled_loss=true")
FREE = {"TORCH_CUDA_SANITIZER": "1"}
SUITES: dict[str, tuple[Part, ...]] = {
    # Does it run? No figure of it counts: what is no run goes on beside the runs, on other cores.
    "proof": (
        Part("a run, saved, exported and resumed", run_training, 195, read=read_training, judge=judge_training),
        make_tests("levers on a GPU", "test_gpu_levers.py", 90, lane=1),
        make_tests("attention on a GPU", "test_gpu_kernels.py", 100, "-k", "not flex and not flash", lane=1),
        make_tests("offload without races", "test_gpu_levers.py", 90, "-k", "offload and 5", lane=2, environ=FREE),
        make_tests("two ranks over NCCL", "test_gpu_training.py", 100, "-k", "bfloat16", lane=2),
    ),
    # How fast? In the order of worth, nothing beside them.
    "measure": (
        make_layers(AUTO, "8Ki,32Ki", 125),
        make_layers(AUTO, "128Ki", 110),
        make_peers("against ALST's wiring", "speed", "32Ki,128Ki", 140),
        make_kernels(80),
        make_layers(PEER, "32Ki", 90, num_layers=2, peer=True),
    ),
    # What 15 minutes do not hold: one part a call.
    "more": (
        Part("a run of 0.5B, rows of 32Ki", run_half, 160, read=read_half),
        make_tests("norms and gates on a GPU", "test_gpu_elementwise.py", 120),
        make_tests("experts on a GPU", "test_gpu_experts.py", 120),
        make_tests("attention by packages on a GPU", "test_gpu_kernels.py", 120, "-k", "flash"),  # may end its process
        make_tests("training over NCCL", "test_gpu_training.py", 240),
        make_tests("more than 2^31 elements on a GPU", "test_gpu_indexing.py", 150),
        make_tests("recurrences on a GPU", "test_gpu_recurrence.py", 120),
        make_tests("attention by flex on a GPU", "test_gpu_kernels.py", 240, "-k", "flex"),
        make_model(100),
        make_model(100, "parallel.zero_stage=1"),
        make_layers("8B's layers, optimizer on the host", "32Ki", 150, "offload_optimizer=cpu"),
        make_layers("8B's layers, activations on the host", "128Ki", 180, *ACTIVATIONS),
        make_layers("8B's layers, large tiles", "128Ki", 150, *TILES, "large_tiles=true", KEPT),
        make_layers("8B's layers, small tiles", "128Ki", 150, *TILES, "large_tiles=false", KEPT),
        make_layers("8B's layers, layers' inputs alone", "32Ki", 120, "gradient_checkpointing=full"),
        make_layers("8B's layers, all levers", "128Ki", 240, levers="all"),
        make_layers(PEER, "8Ki,128Ki", 300, num_layers=2, peer=True),
        make_peers("against ALST's wiring, shorter", "speed", "8Ki", 120),
        make_peers("the longest row", "longest", "8Ki,32Ki,128Ki", 240),
    ),
}


def describe_machine(*, imports_all: bool = False) -> dict[str, Any]:
    """Asked in a process of its own, which takes no memory of the GPU. What parts import is imported here: without it
    each would fail by itself, on rented time. `imports_all`: every module of the tool, too."""
    code = f"import json, {', '.join(PACKAGES)}\n{IMPORT_ALL if imports_all else ''}"
    code += "from ulysses_cli.prove.results import describe_machine\n"
    code += "from ulysses_cli.train.inputs import measure_core_milliseconds\n"
    code += "print(json.dumps({**describe_machine(), 'core_milliseconds': measure_core_milliseconds()}))"
    command = [PYTHON, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=make_environ(""), capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise SystemExit(f"this tool cannot be imported here: {done.stderr.strip()[-1500:]}")
    machine: dict[str, Any] = json.loads(done.stdout.strip().rpartition("\n")[2])
    return machine


def list_compared(results: dict[str, Any]) -> Iterator[str]:
    """Lines of the table: what was measured beside what was predicted."""
    for name, part in results["parts"].items():
        reason = f": {part['reason'].strip().splitlines()[0][:160]}" if part.get("reason") else ""
        yield f"{name}: {part['status'].upper() if part['status'] == 'failed' else part['status']}{reason}"
        outcomes = Counter(row["outcome"] for row in part["rows"] if "outcome" in row)
        if outcomes:
            yield "  " + ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
        for row in part["rows"]:
            if row.get("outcome") in ("failed", "error"):
                yield f"  {row['outcome'].upper()} {row['name']}"
            elif "outcome" not in row:
                yield f"  {row['name']:<48} {', '.join(describe_row(row))}"


def describe_row(row: Row) -> Iterator[str]:
    pairs = (
        ("step_seconds", "predicted_step_seconds", "s"),
        ("seconds", "predicted_seconds", "s"),
        ("peak_memory_bytes", "predicted_memory_bytes", "bytes"),
        ("device_memory_bytes", "predicted_device_memory_bytes", "bytes of the GPU in use"),
    )
    for measured, predicted, unit in pairs:
        if row.get(measured):
            beside = f" (predicted {row[predicted]:,.4g})" if row.get(predicted) else ""
            yield f"{row[measured]:,.4g} {unit}{beside}"
    if row.get("mfu"):
        yield f"MFU {row['mfu']:.1%}"
    if row.get("speed_ratio"):
        yield f"{row['speed_ratio']:.3g} times as fast"
    predicted_parts = row.get("predicted_part_seconds", {})
    for part, seconds in row.get("part_seconds", {}).items():
        yield f"{part} {seconds:.3g} ({predicted_parts.get(part, 0.0):.3g})"
    for key in ("obstacle", "out_of_memory", "index_limit", "failed"):
        if row.get(key):
            yield f"{key.replace('_', ' ')}: {str(row[key])[:120]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=tuple(SUITES), default="proof")
    parser.add_argument("--minutes", type=float, help="when to stop; a later call goes on. Default: the suite's own")
    parser.add_argument("--results", type=Path, help="folder of all results; earlier ones there are continued")
    parser.add_argument("--only", action="append", help="the name of a part; may be given several times")
    parser.add_argument("--again", action="store_true", help="run parts that are done, too")
    parser.add_argument("--rehearse", action="store_true", help="in miniature on a CPU; keeps no result")
    options = parser.parse_args()
    minutes = options.minutes or (count_seconds(options.suite) + 2 * LAST_SECONDS) / 60
    until = time.monotonic() + (3600.0 if options.rehearse else 60 * minutes - LAST_SECONDS)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends what runs, as Ctrl-C does
    machine = describe_machine(imports_all=options.suite == "proof")
    if not machine["gpus"] and not options.rehearse:
        print("there is no GPU here that torch sees; --rehearse runs the suite in miniature", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="gpu-", dir=find_roomy_folder()) as scratch:
        folder = options.results or (Path(scratch) / "results" if options.rehearse else RESULTS)
        folder.mkdir(parents=True, exist_ok=True)
        return run_parts(options, machine, Path(scratch), folder.resolve(), until)


def count_seconds(suite: str) -> float:
    """What a suite takes at most: its first lane, and the check of imports before it."""
    return (IMPORT_SECONDS if suite == "proof" else 0.0) + sum(part.seconds for part in SUITES[suite] if not part.lane)


def find_roomy_folder() -> str | None:
    """Memory where it has room: a run writes tens of gigabytes. None: the usual place of temporary files."""
    shared = "/dev/shm"
    return shared if os.path.isdir(shared) and shutil.disk_usage(shared).free > ROOM_BYTES else None


def take_up(folder: Path, file: Path) -> dict[str, Any]:
    """Results of earlier calls: those of the folder, or those that came with the checkout."""
    for earlier in (file, *RESULTS.glob("levers-gpu-*.json")):
        if not (folder / earlier.name).exists() and (RESULTS / earlier.name).exists():
            shutil.copyfile(RESULTS / earlier.name, folder / earlier.name)
    parts: dict[str, Any] = json.loads(file.read_text())["parts"] if file.exists() else {}
    return parts


def run_parts(options: argparse.Namespace, machine: dict[str, Any], scratch: Path, folder: Path, until: float) -> int:
    gpu = "none" if options.rehearse else machine["gpus"][0]
    file = folder / f"gpu-{re.sub('[^a-z0-9]+', '-', gpu.lower()).strip('-')}.json"
    found = {} if options.rehearse else take_up(folder, file)
    results: dict[str, Any] = {"machine": machine, "parts": {} if options.again else found}
    wanted = [part for part in SUITES[options.suite] if not options.only or part.name in options.only]
    ordered = order_parts(wanted, results["parts"])
    if options.suite == "more" and not (options.rehearse or options.only):
        ordered = ordered[:1]
    keeper = Keeper(results, file)

    def run_lane(lane: int) -> None:
        for part in (part for part in ordered if part.lane == lane):
            earlier = list_passed(results["parts"].get(part.name, {}))
            left = until - time.monotonic()
            if left < find_least_seconds(part):  # a shorter part may still fit
                continue
            print(f"{part.name} ...", flush=True)
            keep = keeper.open(part.name)
            seconds = left if options.rehearse else min(part.seconds, left)
            folders = PartFolders(scratch, folder, options.rehearse, seconds, earlier)
            keep(run_part(part, folders, file.with_suffix(f".{lane}.log"), keep))

    others = [threading.Thread(target=run_lane, args=(lane,), daemon=True) for lane in {p.lane for p in ordered} - {0}]
    try:
        for thread in others:
            thread.start()
        run_lane(0)
        for thread in others:
            thread.join()
    finally:
        end_marked()
    print(*list_compared(results), sep="\n")
    states = {part.name: results["parts"].get(part.name, {}).get("status", "left") for part in wanted}
    missing = [name for name, status in states.items() if status not in (*ENDED, "failed")]
    failed = [name for name, status in states.items() if status == "failed"]
    place = "a rehearsal" if options.rehearse else file
    print(f"{len(wanted)} parts in {place}; failed: {failed or 'none'}; left: {missing or 'none'}")
    for name in failed if options.rehearse else []:
        print(f"\n{name}: {results['parts'][name]['reason']}", file=sys.stderr)
    return int(bool(missing or failed))


def find_least_seconds(part: Part) -> float:
    """A part that is cut off begins anew in the next call, so it does not start without enough time."""
    return min(part.seconds, LEAST_SECONDS if part.goes_on else max(LEAST_SECONDS, LEAST_SHARE * part.seconds))


def order_parts(parts: list[Part], found: dict[str, Any]) -> list[Part]:
    """Those that are not done: first what was never tried, then what was cut off, which gets twice the time unless it
    goes on where it was, last what has failed."""
    turns = {"out of time": 1, "failed": 2}
    states = {part.name: found.get(part.name, {}).get("status", "left") for part in parts}
    ordered = sorted(
        (part for part in parts if states[part.name] not in ENDED), key=lambda part: turns.get(states[part.name], 0)
    )
    return [
        replace(part, seconds=2 * part.seconds) if states[part.name] == "out of time" and not part.goes_on else part
        for part in ordered
    ]


def list_passed(entry: dict[str, Any]) -> tuple[Row, ...]:
    """Tests that need not run again."""
    return tuple(row for row in find_earlier_rows(entry) if row.get("outcome") == "passed")


def find_earlier_rows(entry: dict[str, Any]) -> list[Row]:
    rows: list[Row] = entry.get("rows") or entry.get("earlier_rows") or []
    return rows


class Keeper:
    """Writes a part's entry whenever it changes; parts of several lanes change at once. Rows of an earlier try stay
    until the part is done."""

    def __init__(self, results: dict[str, Any], file: Path) -> None:
        self.results, self.file, self.lock = results, file, threading.Lock()

    def open(self, name: str) -> Callable[[dict[str, Any]], None]:
        rows = find_earlier_rows(self.results["parts"].get(name, {}))

        def keep(entry: dict[str, Any]) -> None:
            earlier = {"earlier_rows": rows} if rows and entry["status"] not in ENDED else {}
            with self.lock:
                self.results["parts"][name] = {**entry, **earlier}
                unfinished = self.file.with_suffix(".new")
                unfinished.write_text(json.dumps(self.results, indent=1) + "\n")
                unfinished.replace(self.file)

        return keep


if __name__ == "__main__":
    sys.exit(main())
