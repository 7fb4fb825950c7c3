"""The first half hour on a GPU: tests in the order of what would break everything, then measurements in the order of
worth, each beside its prediction. Each figure is written when it exists; a later call goes on where this one stopped.

    python benchmarks/gpu.py [--minutes 25] [--results FOLDER] [--only PART] [--again]
    python benchmarks/gpu.py --rehearse      every part in miniature on a CPU; measures nothing. --few: one of each kind

A machine that has the packages needs no installation: docs/benchmarks.md names them. All files go to the folder of
results. Exits with 0 when all parts are done or skipped, 1 when one has failed or time ran out, 2 without a GPU. It has
not been run on a GPU yet.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu_run import Part, PartFolders, Row, read_json_line, run_part
from paths import RESULTS, ROOT

PYTHON = sys.executable
ULYSSES = (PYTHON, "-m", "ulysses_cli")
LAYER = {  # Llama-3.1-8B's layer, with a small vocabulary, so that layers decide
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 8192, "max_position_embeddings": 1048576,
    "rope_theta": 500000.0, "tie_word_embeddings": False,
}  # fmt: skip
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
PLAIN = "train-plain"  # the folder of the run that others are compared with


def make_recipe(folder: Path, name: str, config: dict[str, Any], *, length: int, device: str) -> Path:
    """Writes a recipe of random weights."""
    content = {
        "model": {"config": config, "tokenizer": "bytes", "dtype": "bfloat16"},
        "data": {"datasets": [{"type": "synthetic"}], "max_length": length, "eval_split": 0.1},
        "train": {"max_steps": 6, "learning_rate": 1e-4, "max_grad_norm": 0},  # clipping undoes early steps
        "run": {"device": device, "output_dir": str(folder / name)},
    }
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps(content))
    return file


def make_tests(name: str, file: str, seconds: float, *words: str, is_variant: bool = True) -> Part:
    """The first of these parts reads all files in a rehearsal: without a GPU each test is skipped, and a file that
    cannot be imported fails. `words`: which tests of the file."""

    def make(folders: PartFolders) -> list[list[str]]:
        target = "tests/gpu" if folders.rehearses and not is_variant else str(Path("tests/gpu") / file)
        passed = [word for row in folders.earlier for word in ("--deselect", row["name"])]
        chosen = [] if folders.rehearses else [*words, *passed]
        return [[PYTHON, "-m", "pytest", "-o", "addopts=--strict-markers", "-v", "-rfE", target, *chosen]]

    return Part(name, make, seconds, read_test_line, judge=judge_tests, is_variant=is_variant)


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
    """A real run with the optimizer on the host, which steps while the backward goes on; a save, and a resume from it.
    Before it the same run without a break, whose optimizer steps after the backward."""
    layer = {**LAYER, "num_hidden_layers": 2}
    config, length, device = (SMALL, 256, "cpu") if folders.rehearses else (layer, 32768, "cuda")
    words = ["run.save_steps=3", "memory.offload_optimizer=cpu"]
    words += ["deepspeed.zero_optimization.sub_group_size=20000"] if folders.rehearses else []  # several steps early
    plain, broken = (
        [*ULYSSES, "train", str(make_recipe(folders.scratch, name, config, length=length, device=device)), *words]
        for name in (PLAIN, "train")
    )
    broken.append("memory.overlap_optimizer=true")
    return [
        [*plain, "memory.overlap_optimizer=false", "--overwrite"],
        [*broken, "train.max_steps=3", "--overwrite"],
        [*broken, "--resume", "auto"],
    ]


def read_training(output: str) -> list[Row]:
    """The steps of the resumed run, from the folder of the model that it prints, beside those of the plain one."""
    folder = Path(output.strip().rpartition("\n")[2]).parent
    steps, plain = read_steps(folder), read_steps(folder.with_name(PLAIN))
    if [step["step"] for step in steps] != [*range(1, 7)]:
        raise ValueError("the resumed run did not reach step 6")
    return [
        {"name": f"step {step['step']}", "loss": step["loss"], "plain_loss": other["loss"],
         "seconds": step["step_seconds"], "plain_seconds": other["step_seconds"],
         "early_share": step.get("early_optimizer_share")}
        for step, other in zip(steps, plain, strict=True)
    ]  # fmt: skip


def read_steps(folder: Path) -> list[Row]:
    metrics = folder / "metrics.jsonl"
    return [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.is_file() else []


def judge_training(rows: list[Row]) -> tuple[str, str]:
    """A resume and early steps of the optimizer change no value. A small model's backward may end before any."""
    far = [row for row in rows if not abs(row["loss"] / row["plain_loss"] - 1) <= LOSS_BAR]
    reasons = [f"{row['name']}: loss {row['loss']:.5g}, in the plain run {row['plain_loss']:.5g}" for row in far]
    if reasons:
        return "failed", "; ".join(reasons)
    has_early = any(row["early_share"] for row in rows)
    return "done", "" if has_early else "no group of the optimizer stepped before the backward's end"


def make_kernels(length: int, seconds: float, *, is_variant: bool = False) -> Part:
    def make(folders: PartFolders) -> list[list[str]]:
        words = ["--lengths", "256", "--device", "cpu"] if folders.rehearses else ["--lengths", str(length)]
        return [[PYTHON, "benchmarks/gpu_kernels.py", *words]]

    return Part(f"kernels at {length // 1024}Ki", make, seconds, read_json_line, is_variant=is_variant)


def make_model(seconds: float) -> Part:
    def make(folders: PartFolders) -> list[list[str]]:
        return [[PYTHON, "benchmarks/gpu_model.py", *(["--rehearse"] if folders.rehearses else [])]]

    return Part("a whole model of 0.5B, 8Ki and 64Ki", make, seconds, read_json_line)


def make_layers(
    title: str,
    length: int,
    seconds: float,
    *memory: str,
    levers: str = "auto",
    num_layers: int = 4,
    peer: bool = False,
    is_variant: bool = True,
) -> Part:
    """Measures one case, so that each is kept and tried again by itself. `memory`: settings of the recipe."""

    def make(folders: PartFolders) -> list[list[str]]:
        config, tokens, device = {**LAYER, "num_hidden_layers": num_layers}, length, "cuda"
        if folders.rehearses:
            config, tokens, device = SMALL, 256, "cpu"
        recipe = make_recipe(folders.scratch, "layers", config, length=tokens, device=device)
        steps = "1" if folders.rehearses else "3" if length > 65536 else "5"
        words = [*(f"memory.{each}" for each in memory), "--levers", levers, "--steps", steps]
        extra = ["--against", "trainer"] if peer else []
        return [[*ULYSSES, "bench", str(recipe), *words, *extra, "--format", "json"]]

    name = f"{title}, {length // 1024}Ki"
    return Part(name, make, seconds, read=read_findings, judge=judge_findings, is_variant=is_variant)


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


def make_peers(name: str, part: str, seconds: float) -> Part:
    """Goes on from its own file of results, which holds every measurement of earlier calls."""

    def make(folders: PartFolders) -> list[list[str]]:
        words = ["--part", part, "--minutes", str((folders.seconds - LAST_SECONDS) / 60), "--lengths", "8Ki,32Ki,128Ki"]
        file = ["--json", str(folders.results / f"levers-gpu-{part}.json")]
        return [[PYTHON, "benchmarks/gpu_levers.py", *words, *file, *(["--rehearse"] if folders.rehearses else [])]]

    return Part(name, make, seconds, read_json_line, judge=judge_peers, goes_on=True)


def judge_peers(rows: list[Row]) -> tuple[str, str]:
    failed = [f"{row['name']}: {row['failed']}" for row in rows if "failed" in row]
    return ("failed", "; ".join(failed)) if failed else ("done", "")


AUTO, HALF = "8B's layers, levers as chosen", "against the Trainer, two layers of 8B"
HOST = ("activation_offloading=true", "gradient_checkpointing=true")
TILES = ("tiled_mlp=true", "tiled_loss=true")
PARTS = [
    make_tests("attention on a GPU", "test_gpu_kernels.py", 200, "-k", "not flex and not flash", is_variant=False),
    make_tests("norms and gates on a GPU", "test_gpu_elementwise.py", 120),
    make_tests("levers on a GPU", "test_gpu_levers.py", 120),
    make_tests("attention by packages on a GPU", "test_gpu_kernels.py", 120, "-k", "flash"),  # one may end its process
    Part("a run, saved and resumed", run_training, 330, read=read_training, judge=judge_training),
    make_layers(AUTO, 32768, 120, is_variant=False),
    make_kernels(32768, 150),
    make_peers("against ALST's wiring", "speed", 270),
    make_layers(AUTO, 131072, 150),
    # nothing above needs what these test
    make_tests("training over NCCL", "test_gpu_training.py", 240),
    make_tests("more than 2^31 elements on a GPU", "test_gpu_indexing.py", 150),
    make_tests("recurrences on a GPU", "test_gpu_recurrence.py", 120),
    make_tests("attention by flex on a GPU", "test_gpu_kernels.py", 240, "-k", "flex"),
    make_model(150),
    make_layers(HALF, 32768, 120, num_layers=2, peer=True, is_variant=False),
    make_kernels(131072, 180, is_variant=True),
    make_layers("8B's layers, optimizer on the host", 32768, 150, "offload_optimizer=cpu"),
    make_layers("8B's layers, activations on the host", 131072, 180, *HOST),
    make_layers("8B's layers, large tiles", 131072, 150, *TILES, "large_tiles=true", "gradient_checkpointing=true"),
    make_layers("8B's layers, small tiles", 131072, 150, *TILES, "large_tiles=false", "gradient_checkpointing=true"),
    make_layers(HALF, 131072, 210, num_layers=2, peer=True),
    make_peers("the longest row", "longest", 240),
    make_layers(AUTO, 8192, 100),
    make_layers("8B's layers, layers' inputs alone", 32768, 120, "gradient_checkpointing=full"),
    make_layers("8B's layers, all levers", 131072, 240, levers="all", is_variant=False),
    make_layers(HALF, 8192, 100, num_layers=2, peer=True),
]


def describe_machine() -> dict[str, Any]:
    """Asked in a process of its own, which takes no memory of the GPU. What parts import is imported here: without it
    each would fail by itself, on rented time."""
    code = "from ulysses_cli.prove.results import describe_machine; print(json.dumps(describe_machine()))"
    code = f"import json, {', '.join(PACKAGES)}; {code}"
    done = subprocess.run([PYTHON, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
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
    parser.add_argument("--minutes", type=float, default=25.0, help="when to stop; a later call goes on")
    parser.add_argument("--results", type=Path, help="folder of all results; earlier ones there are continued")
    parser.add_argument("--only", action="append", help="the name of a part; may be given several times")
    parser.add_argument("--again", action="store_true", help="run parts that are done, too")
    parser.add_argument("--rehearse", action="store_true", help="in miniature on a CPU; keeps no result")
    parser.add_argument("--few", action="store_true", help="with --rehearse: one part of each kind")
    options = parser.parse_args()
    until = time.monotonic() + 60 * options.minutes - LAST_SECONDS
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends what runs, as Ctrl-C does
    machine = describe_machine()
    if not machine["gpus"] and not options.rehearse:
        print("there is no GPU here that torch sees; --rehearse runs every part in miniature", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="gpu-") as scratch:
        folder = options.results or (Path(scratch) / "results" if options.rehearse else RESULTS)
        folder.mkdir(parents=True, exist_ok=True)
        return run_parts(options, machine, Path(scratch), folder.resolve(), until)


def run_parts(options: argparse.Namespace, machine: dict[str, Any], scratch: Path, folder: Path, until: float) -> int:
    gpu = "none" if options.rehearse else machine["gpus"][0]
    file = folder / f"gpu-{re.sub('[^a-z0-9]+', '-', gpu.lower()).strip('-')}.json"
    results: dict[str, Any] = {"machine": machine, "parts": {}}
    if file.exists() and not options.again:
        results["parts"] = json.loads(file.read_text())["parts"]
    wanted = [part for part in PARTS if not options.only or part.name in options.only]
    if options.rehearse and options.few:
        wanted = [part for part in wanted if not part.is_variant]
    for part in order_parts(wanted, results["parts"]):
        earlier = list_passed(results["parts"].get(part.name, {}))
        left = until - time.monotonic()
        if left < find_least_seconds(part):  # a shorter part may still fit
            continue
        print(f"{part.name} ...", flush=True)
        keep = make_keeper(results, part.name, file)
        seconds = part.seconds if options.rehearse else min(part.seconds, left)
        folders = PartFolders(scratch, folder, options.rehearse, seconds, earlier)
        keep(run_part(part, folders, file.with_suffix(".log"), keep))
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


def make_keeper(results: dict[str, Any], name: str, file: Path) -> Callable[[dict[str, Any]], None]:
    """Writes a part's entry whenever it changes. Rows of an earlier try stay until the part is done."""
    rows = find_earlier_rows(results["parts"].get(name, {}))

    def keep(entry: dict[str, Any]) -> None:
        results["parts"][name] = {**entry, **({"earlier_rows": rows} if rows and entry["status"] not in ENDED else {})}
        unfinished = file.with_suffix(".new")
        unfinished.write_text(json.dumps(results, indent=1) + "\n")
        unfinished.replace(file)

    return keep


if __name__ == "__main__":
    sys.exit(main())
