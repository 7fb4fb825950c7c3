"""The first half hour on a GPU: tests in the order of what would break everything, then measurements in the order of
worth, each beside its prediction. Every result is written when it exists; a later call goes on where this one stopped.

    python benchmarks/gpu.py [--minutes 25] [--only PART] [--again] [--json FILE]
    python benchmarks/gpu.py --rehearse      every part in miniature on a CPU; measures nothing

Exits with 0 when all parts are done, 1 when one has failed or time ran out, 2 without a GPU. It has not been run on a
GPU yet.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paths import RESULTS, ROOT

PYTHON = sys.executable
ULYSSES = (PYTHON, "-m", "ulysses_cli")
LAYER = {  # Llama-3.1-8B's layer; four of them with a small vocabulary, so that layers decide
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 8192, "max_position_embeddings": 1048576,
    "rope_theta": 500000.0, "tie_word_embeddings": False,
}  # fmt: skip
SMALL = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}  # fmt: skip
LAST_SECONDS = 20.0  # kept for writing and for the table


@dataclass(frozen=True)
class Part:
    """`make_commands`: run in order; the output of the last is read. `codes`: exit codes with which they are done; a
    rehearsal must end with 0."""

    name: str
    make_commands: Callable[[Path, bool], list[list[str]]]
    read: Callable[[str], list[dict[str, Any]]]
    seconds: float
    codes: tuple[int, ...] = (0,)


def make_recipe(folder: Path, name: str, config: dict[str, Any], *, length: int, device: str) -> Path:
    """Writes a recipe of random weights."""
    content = {
        "model": {"config": config, "tokenizer": "bytes", "dtype": "bfloat16"},
        "data": {"datasets": [{"type": "synthetic"}], "max_length": length, "eval_split": 0.1},
        "train": {"max_steps": 6, "learning_rate": 1e-4},
        "run": {"device": device, "output_dir": str(folder / name)},
    }
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps(content))
    return file


def run_tests(file: str) -> Callable[[Path, bool], list[list[str]]]:
    def make(_: Path, rehearses: bool) -> list[list[str]]:
        return [
            [PYTHON, "-m", "pytest", "-q", "-rfEs", *(["--collect-only"] if rehearses else []), f"tests/gpu/{file}"]
        ]

    return make


def read_tests(output: str) -> list[dict[str, Any]]:
    counts = {what: int(number) for number, what in re.findall(r"(\d+) (passed|failed|skipped|error)", output)}
    failed = re.findall(r"^(?:FAILED|ERROR) (.*)", output, re.MULTILINE)
    return [{"name": "tests", **counts, "failures": failed}]


def run_kernels(_: Path, rehearses: bool) -> list[list[str]]:
    extra = ["--lengths", "256", "--device", "cpu"] if rehearses else []
    return [[PYTHON, "benchmarks/gpu_kernels.py", *extra]]


def run_training(folder: Path, rehearses: bool) -> list[list[str]]:
    """A real run with the optimizer on the host, a save, and a resume from it."""
    config, length, device = (SMALL, 256, "cpu") if rehearses else (LAYER, 32768, "cuda")
    recipe = make_recipe(folder, "train", config, length=length, device=device)
    words = ["run.save_steps=3", *([] if rehearses else ["memory.offload_optimizer=cpu"])]
    train = [*ULYSSES, "train", str(recipe), *words]
    return [[*train, "train.max_steps=3", "--overwrite"], [*train, "--resume", "auto"]]


def read_training(output: str) -> list[dict[str, Any]]:
    """The steps of both runs, from the folder of the model that the second one prints."""
    metrics = Path(output.strip().rpartition("\n")[2]).parent / "metrics.jsonl"
    steps = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.is_file() else []
    if [step["step"] for step in steps] != [*range(1, 7)]:
        raise ValueError("the resumed run did not reach step 6")
    return [{"name": f"step {step['step']}", "loss": step["loss"], "seconds": step["step_seconds"]} for step in steps]


def run_layers(levers: str, *, peer: bool = False) -> Callable[[Path, bool], list[list[str]]]:
    def make(folder: Path, rehearses: bool) -> list[list[str]]:
        config, lengths, device = (SMALL, "256", "cpu") if rehearses else (LAYER, "8Ki,32Ki,128Ki", "cuda")
        lengths = "32Ki" if peer and not rehearses else lengths
        recipe = make_recipe(folder, f"layers-{levers}", config, length=256 if rehearses else 8192, device=device)
        words = ["--max-length", lengths, "--levers", levers, "--steps", "1" if rehearses else "5"]
        extra = ["--against", "trainer"] if peer else []
        return [[*ULYSSES, "bench", str(recipe), *words, *extra, "--format", "json"]]

    return make


def read_findings(output: str) -> list[dict[str, Any]]:
    """Rows of a command's JSON; a measurement that failed keeps its reason."""
    found = json.loads(output[output.index("{") :])
    rows = [{"name": f"{row['group']}, {row['name']}", **row["values"], "text": row["text"]} for row in found["rows"]]
    if not rows or any(row["verdict"] == "FAIL" for row in found["rows"]):
        raise ValueError("; ".join(row["text"] for row in found["rows"] if row["verdict"] == "FAIL") or "no rows")
    return [*rows, {"name": "calibration", **found["calibration"]}] if found["calibration"] else rows


def run_peers(part: str) -> Callable[[Path, bool], list[list[str]]]:
    def make(_: Path, rehearses: bool) -> list[list[str]]:
        file = RESULTS / f"levers-gpu-{part}.json"
        command = [PYTHON, "benchmarks/gpu_levers.py", "--part", part, "--minutes", "8", "--json", str(file)]
        return [[*command, *(["--rehearse"] if rehearses else [])]]

    return make


def read_text(output: str) -> list[dict[str, Any]]:
    return [{"name": line.strip()} for line in output.splitlines() if line.strip()][-40:]


PARTS = [
    Part("attention on a GPU", run_tests("test_gpu_kernels.py"), read_tests, 420),
    Part("levers on a GPU", run_tests("test_gpu_levers.py"), read_tests, 180),
    Part("norms and gates on a GPU", run_tests("test_gpu_elementwise.py"), read_tests, 180),
    Part("a run, saved and resumed", run_training, read_training, 420),
    Part("kernels", run_kernels, lambda output: json.loads(output.splitlines()[-1])["rows"], 420),
    Part("layers of 8B, levers as chosen", run_layers("auto"), read_findings, 480),
    Part("layers of 8B, all levers", run_layers("all"), read_findings, 480),
    Part("against ALST's wiring", run_peers("speed"), read_text, 560, (0, 1)),
    Part("against the Trainer", run_layers("none", peer=True), read_findings, 420),
    Part("the longest row", run_peers("longest"), read_text, 560, (0, 1)),
    Part("more than 2^31 elements on a GPU", run_tests("test_gpu_indexing.py"), read_tests, 300),
    Part("recurrences on a GPU", run_tests("test_gpu_recurrence.py"), read_tests, 240),
]


def run_part(part: Part, folder: Path, *, rehearses: bool, seconds: float) -> dict[str, Any]:
    """Runs a part's commands, each in a session of its own that ends with its time. Returns its rows or its error."""
    start, output = time.monotonic(), ""
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "PYTHONUNBUFFERED": "1"}
    for command in part.make_commands(folder, rehearses):
        left = seconds - (time.monotonic() - start)
        with subprocess.Popen(
            command, cwd=ROOT, env=environ, text=True, errors="replace", start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        ) as process:  # fmt: skip
            try:
                output, errors = process.communicate(timeout=max(1.0, left))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                return {"error": f"took longer than {seconds:.0f} s", "seconds": time.monotonic() - start}
        if process.returncode not in ((0,) if rehearses else part.codes):
            tail = (errors.strip() or output.strip())[-1500:]
            rows = read_tests(output) if part.read is read_tests else []
            return {"error": f"exit code {process.returncode}: {tail}", "rows": rows}
    try:
        rows = part.read(output) if not (rehearses and part.read is read_tests) else read_text(output)[-1:]
    except (ValueError, KeyError, IndexError) as error:
        return {"error": f"its output cannot be read: {error}: {output[-500:]}"}
    return {"rows": rows, "seconds": round(time.monotonic() - start, 1)}


def describe_machine() -> dict[str, Any]:
    from ulysses_cli.prove.results import describe_machine as describe

    return describe()


def list_compared(results: dict[str, Any]) -> Iterator[str]:
    """Lines of the table: what was measured beside what was predicted."""
    pairs = (
        ("step_seconds", "predicted_step_seconds", "s"),
        ("seconds", "predicted_seconds", "s"),
        ("peak_memory_bytes", "predicted_memory_bytes", "bytes"),
    )
    for name, part in results["parts"].items():
        if "error" in part:
            yield f"{name}: FAILED: {part['error'].splitlines()[0][:120]}"
            continue
        yield f"{name}:"
        for row in part["rows"]:
            compared = [
                f"{row[measured]:,.4g} {unit} (predicted {row[predicted]:,.4g})"
                for measured, predicted, unit in pairs
                if row.get(measured) and row.get(predicted)
            ]
            mfu = [f"MFU {row['mfu']:.1%}"] if row.get("mfu") else []
            counts = [f"{row[key]} {key}" for key in ("passed", "failed", "skipped") if row.get(key)]
            yield f"  {row['name']:<40} {', '.join([*compared, *mfu, *counts])}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=25.0, help="when to stop; a later call goes on")
    parser.add_argument("--only", action="append", help="the name of a part; may be given several times")
    parser.add_argument("--again", action="store_true", help="run parts that are done, too")
    parser.add_argument("--rehearse", action="store_true", help="every part in miniature on a CPU; keeps no result")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    machine = describe_machine()
    if not machine["gpus"] and not options.rehearse:
        print("there is no GPU here that torch sees; --rehearse runs every part in miniature", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
        return run_parts(options, machine, Path(folder))


def run_parts(options: argparse.Namespace, machine: dict[str, Any], folder: Path) -> int:
    """`folder`: for what the parts write besides results."""
    gpu = machine["gpus"][0] if machine["gpus"] else "none"
    named = RESULTS / f"gpu-{re.sub('[^a-z0-9]+', '-', gpu.lower()).strip('-')}.json"
    file = options.json or (folder / "rehearsal.json" if options.rehearse else named)
    results: dict[str, Any] = {"machine": machine, "parts": {}}
    if file.exists() and not options.again:
        results["parts"] = json.loads(file.read_text())["parts"]
    until = time.monotonic() + 60 * options.minutes - LAST_SECONDS
    wanted = [part for part in PARTS if not options.only or part.name in options.only]
    for part in wanted:
        done = results["parts"].get(part.name)
        left = until - time.monotonic()
        if (done and "error" not in done) or left < LAST_SECONDS:
            continue
        print(f"{part.name} ...", flush=True)
        results["parts"][part.name] = run_part(
            part, folder, rehearses=options.rehearse, seconds=min(part.seconds, left)
        )
        file.write_text(json.dumps(results, indent=1) + "\n")
    print(*list_compared(results), sep="\n")
    missing = [part.name for part in wanted if part.name not in results["parts"]]
    failed = [name for name, part in results["parts"].items() if "error" in part]
    place = "a rehearsal" if options.rehearse else file
    print(f"{len(results['parts'])} parts in {place}; failed: {failed or 'none'}; left: {missing or 'none'}")
    for name in failed if options.rehearse else []:
        print(f"\n{name}: {results['parts'][name]['error']}", file=sys.stderr)
    return int(bool(missing or failed))


if __name__ == "__main__":
    sys.exit(main())
