"""Extends the context of a small chat model on two CPU cores by the documented commands, from an empty folder to an
answer: SmolLM2-135M-Instruct from 8Ki to 12Ki positions. docs/real-run.md shows what it writes, and nothing else.

    python benchmarks/real_run.py [--folder .real-run] [--name real-run]

The data is part of Python: sources of its standard library, and texts of its reference for the check on short texts
(PSF licence). Results: NAME-cpu.json with its figures, and the records of the run, from which its report is made again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from datetime import UTC, datetime
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from paths import RESULTS, ROOT
from support.real_model import PACKAGE, READY

from ulysses_cli.plan.flops import compute_model_flops
from ulysses_cli.plan.models.shape import read_model_shape
from ulysses_cli.report.run_summary import load_run, summarize_run

LENGTH, SHORT_LENGTH = "12Ki", "2Ki"
DOCUMENT_CHARS = 60_000  # more than 12Ki tokens
TRAINED_PACKAGES, HELD_OUT_PACKAGES = ("asyncio", "email"), ("importlib", "xml")
MODULE_BYTES, ALL_MODULE_BYTES = (1_500, 6_000), 80_000
TEXT_CHARS, NUM_TEXTS, NUM_NEEDLES = (600, 3_500), 24, 3
RECIPE = f"""\
model:
  name_or_path: model
  rope_theta: auto              # 100,000 x (12Ki / 8Ki)^1.65

parallel:
  sp_size: 2

data:
  datasets:
    - path: long.jsonl
    - path: short.jsonl
  eval_datasets:
    - path: held-out.jsonl
  max_length: {LENGTH}
  excess_length_strategy: truncate

train:
  learning_rate: 5e-5
  warmup_ratio: 0.1

memory:
  gradient_checkpointing: true
  tiled_loss: true

run:
  device: cpu
  output_dir: runs/extended
  short_check: short-texts.jsonl
  rehearsal: false
"""
CHECK = ("data.eval_datasets=[]", "run.short_check=null", f"data.max_length={SHORT_LENGTH}", "train.max_steps=3")
QUESTION = "What is a context manager in Python? Answer in one sentence."
RECORDS = ("run.json", "metrics.jsonl", "eval.jsonl", "short_check.jsonl")
NO_TENSORS = ("cuda_context", "nccl", "cublas_workspace", "allocator")  # of a GPU alone


class Commands:
    """Runs commands of `ulysses` in the folder, and notes what each took."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.taken = folder, list[dict[str, Any]]()

    def run(self, *words: str) -> str:
        shown = " ".join(["ulysses", *(f'"{word}"' if " " in word else word for word in words)])
        print(f"$ {shown}", flush=True)
        began = time.monotonic()
        environment = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", **os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "ulysses_cli", *words]
        done = subprocess.run(command, cwd=self.folder, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        self.taken.append({"command": shown, "seconds": round(time.monotonic() - began, 1)})
        return done.stdout

    def load(self, *words: str) -> Any:
        return json.loads(self.run(*words, "--format", "json"))


def write_data(folder: Path) -> dict[str, Any]:
    """Returns what was written, by file."""
    library = Path(sysconfig.get_paths()["stdlib"])
    low, high = MODULE_BYTES
    modules, total = [], 0
    for file in sorted(library.glob("*.py")):
        if low < file.stat().st_size < high and total < ALL_MODULE_BYTES:
            modules.append(file)
            total += file.stat().st_size
    low, high = TEXT_CHARS
    names = [name for name in sorted(topics) if low <= len(topics[name]) <= high][:NUM_TEXTS]
    files = {
        "long.jsonl": {name: _join_files(library / name) for name in TRAINED_PACKAGES},
        "short.jsonl": {file.name: file.read_text(encoding="utf-8") for file in modules},
        "held-out.jsonl": {name: _join_files(library / name) for name in HELD_OUT_PACKAGES},
        "short-texts.jsonl": {name: topics[name] for name in names},
    }
    for name, texts in files.items():
        (folder / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts.values()))
    return {name: {"texts": list(texts), "chars": sum(map(len, texts.values()))} for name, texts in files.items()}


def _join_files(package: Path) -> str:
    files = [file for file in sorted(package.rglob("*.py")) if not {"test", "tests"} & set(file.parts)]
    text = "".join(f"# {file.relative_to(package.parent)}\n{file.read_text(encoding='utf-8')}\n" for file in files)
    assert len(text) >= DOCUMENT_CHARS, f"{package} is too short"
    return text[:DOCUMENT_CHARS]


def compare_layouts(commands: Commands) -> dict[str, Any]:
    """The same three steps on one rank and on two that share each row."""
    found = {}
    for size in (1, 2):
        folder = f"runs/sp-{size}"
        commands.run("train", "extend.yaml", f"parallel.sp_size={size}", f"run.output_dir={folder}", *CHECK)
        lines = _read_lines(commands.folder / folder / "metrics.jsonl")
        names = ("loss", "grad_norm", "step_seconds", "host_peak_memory_bytes")
        found[f"sp_{size}"] = {name: [line[name] for line in lines] for name in names}
        shutil.rmtree(commands.folder / folder)
    pairs = zip(found["sp_1"]["loss"], found["sp_2"]["loss"], strict=True)
    return {**found, "loss_difference": max(abs(one - other) for one, other in pairs)}


def predict(commands: Commands, short_seconds: float, num_steps: int) -> dict[str, Any]:
    """Memory by estimate-memory, without what only a GPU holds. Time by the steps of short rows, times the operations
    of a long row over those of a short one."""
    (estimate,) = commands.load("estimate-memory", "extend.yaml", "memory.large_tiles=false")["results"]
    shape = read_model_shape(json.loads((commands.folder / "model" / "config.json").read_text()), "model")
    ratio = compute_model_flops(shape, [12 << 10]) / compute_model_flops(shape, [2 << 10])
    tensors = {
        phase: sum(size for name, size in parts.items() if name not in NO_TENSORS)
        for phase, parts in estimate["phases"].items()
    }
    return {
        "tensor_bytes": tensors,
        "levers": estimate["levers"],
        "flops_ratio": ratio,
        "num_steps": num_steps,
        "step_seconds": short_seconds * ratio,
    }


def join_buckets(rows: list[dict[str, Any]], bounds: list[int]) -> list[float]:
    """The loss of an evaluation's buckets of positions in larger ones. The first token of a document is no target."""
    sums = [[0.0, 0] for _ in bounds]
    for row in rows:
        if (row["from"], row["to"]) != (0, row["length"]):
            part = sums[next(at for at, bound in enumerate(bounds) if row["to"] <= bound)]
            number = row["to"] - row["from"] - (not row["from"])
            part[0], part[1] = part[0] + row["loss"] * number, part[1] + number
    return [total / number for total, number in sums]


def list_conclusions(result: dict[str, Any]) -> dict[str, bool]:
    """What both runs must say alike."""
    own, stretched, trained = (result["loss_by_position"][name][-1] for name in ("base", "stretched", "trained"))
    _, other, last = result["short_check"]["models"]
    needles = result["needles"]
    return {
        "past its positions the base loses more than 0.1 nats against the stretched base": own - stretched > 0.1,
        "training lowers the loss there further": trained < stretched,
        "stretching costs on short texts": other["difference_low"] > 0,
        "the trained model finds no fewer needles than the base": needles["trained"] >= needles["base"],
        "training does not cost more on short texts than stretching": last["difference"] <= other["difference"],
        "sp 2 has the losses of sp 1 to 0.01": result["layouts"]["loss_difference"] < 0.01,
    }


def _read_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=ROOT / ".real-run", help="an empty folder, or a new one")
    parser.add_argument("--name", default="real-run", help="of the results")
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        parser.error(f"{folder} is not empty")
    began, started = time.monotonic(), datetime.now(UTC).isoformat(timespec="minutes")
    os.symlink(READY, folder / "model")
    data, commands = write_data(folder), Commands(folder)
    (folder / "extend.yaml").write_text(RECIPE)
    plan = commands.run("validate-config", "extend.yaml").partition("\nsettings")[0]
    split = commands.load("prepare", "extend.yaml")["splits"]
    prepared = {name: {key: part[key] for key in ("num_rows", "num_tokens")} for name, part in split.items()}
    layouts = compare_layouts(commands)
    prediction = predict(commands, layouts["sp_2"]["step_seconds"][-1], prepared["train"]["num_rows"])
    commands.run("train", "extend.yaml")
    run = folder / "runs" / "extended"
    at_length = ("--max-length", LENGTH, "--sp-size", "2")
    base = commands.load(
        "evaluate", "model", "--suite", "loss", "--path", "held-out.jsonl", *at_length, "--samples", "2"
    )
    against = ("evaluate", "runs/extended/model", "--against", "model")
    asked = commands.load(*against, "--suite", "niah_single_1", *at_length, "--samples", str(NUM_NEEDLES))
    commands.run("report", "runs/extended")
    said = commands.load("sample", "runs/extended", QUESTION, "--chat", "--max-new-tokens", "60", "--device", "cpu")
    evals, summary = _read_lines(run / "eval.jsonl"), summarize_run(load_run(run))
    measured = ("median_step_seconds", "median_tokens_per_second", "host_peak_memory_bytes", "tokens", "last_step")
    result: dict[str, Any] = {
        "started": started,
        "minutes": round((time.monotonic() - began) / 60, 1),
        "cores": os.cpu_count(),
        "versions": json.loads((run / "run.json").read_text())["versions"],
        "package": PACKAGE,
        "data": data,
        "prepared": prepared,
        "recipe": RECIPE,
        "plan": plan,
        "commands": commands.taken,
        "layouts": layouts,
        "prediction": prediction,
        "measured": {name: summary[name] for name in measured},
        "step_seconds": [line["step_seconds"] for line in _read_lines(run / "metrics.jsonl")],
        "losses": [line["loss"] for line in _read_lines(run / "metrics.jsonl")],
        "positions": list(evals[-1]["by_position"]),
        "loss_by_position": {
            "base": join_buckets(base["losses"], [2 << 10, 8 << 10, 12 << 10]),
            "stretched": [part["loss"] for part in evals[0]["by_position"].values()],
            "trained": [part["loss"] for part in evals[-1]["by_position"].values()],
        },
        "short_check": _read_lines(run / "short_check.jsonl")[-1],
        "needles": {
            "questions": NUM_NEEDLES,
            "base": asked["against"]["scores"][0]["score"],
            "trained": asked["scores"][0]["score"],
        },
        "sample": said,
    }
    result["conclusions"] = list_conclusions(result)
    (RESULTS / f"{options.name}-cpu.json").write_text(json.dumps(result, indent=1) + "\n")
    kept = RESULTS / options.name
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir()
    for name in RECORDS:
        shutil.copy(run / name, kept)
    shutil.copytree(run / "evaluations", kept / "evaluations")
    print(json.dumps(result["conclusions"], indent=1))


if __name__ == "__main__":
    main()
