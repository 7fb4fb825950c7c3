"""Compares memory levers on one GPU with DeepSpeed's own, in the same run.

The model is an 8-layer slice of Llama-3.1-8B's shape in bfloat16, on one rank, forward and backward without an
optimizer. Measured are tokens/s, model FLOPs per second and MFU, peak memory and the share of offload that compute does
not hide, by length; the longest row under a memory cap; and a picture of copies against compute. Side (b) is TiledMLP,
TiledFusedLogitsLoss and reentrant checkpointing with hidden states in host memory, around the same attention kernel. It
is also run without offload, and its faster result counts. Results are written after every measurement; a failed
measurement says why. A later call with the same file keeps what was measured and goes on. Each row is also printed, as
a line of JSON. Exits with 0, with 1 after a failure, 3 where a bar is missed, 4 where time ran out.

    python benchmarks/gpu_levers.py [--part all|speed|longest] [--lengths 32Ki,64Ki,128Ki,256Ki] [--cap-gb 80]
    [--minutes 9] [--json FILE]
    python benchmarks/gpu_levers.py --rehearse    all of it in miniature on a CPU; measures nothing
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as the command sets it, for both sides

import torch
from gpu_device import OutOfMemoryError
from gpu_run import MISSED, UNFINISHED
from gpu_sides import FULL, MINIATURE, Run, Scale

from ulysses_cli.plan.attention import Need
from ulysses_cli.train.attention.documents import IndexLimitError
from ulysses_cli.train.attention.kernels.choice import choose_kernel
from ulysses_cli.train.attention.kernels.trial import KernelSearch, KernelWorkload, LengthMix

FASTEST = ("flash_attention_3", "flash_attention_4")  # from which half of the peak is expected, 40 % from others
SETUP_SECONDS = 10.0  # for making a model
# dense bfloat16, by the maker's data sheet
PEAK_TFLOPS = {"H100": 989, "H200": 989, "A100": 312, "B200": 2250, "L40S": 362}


class Side(NamedTuple):
    is_ours: bool
    offloads: bool


SIDES = {
    "ours": Side(is_ours=True, offloads=True),
    "(b)": Side(is_ours=False, offloads=True),
    "ours, no offload": Side(is_ours=True, offloads=False),
    "(b), no offload": Side(is_ours=False, offloads=False),
}


class Report:
    """The results so far, written after each measurement: a machine that disappears loses no finished measurement.
    Those that failed, or for which there was no time, are measured again. `kernel`: of this call's steps. Rows of
    another kernel, which an earlier call chose, stay; they are compared with none of this one's."""

    def __init__(self, path: Path, kernel: str, **facts: Any) -> None:
        self.path, self.kernel, self.results = path, kernel, {**facts, "speed": [], "longest_row": {}}
        earlier = json.loads(path.read_text()) if path.exists() else {}
        if earlier.get("conditions") != facts["conditions"]:
            return
        self.results["speed"] = [row for row in earlier["speed"] if is_measured(row)]
        for name, values in earlier["longest_row"].items():
            trials = [trial for trial in values["trials"] if is_measured(trial)]
            self.results["longest_row"][name] = {**values, "trials": trials}
        for row in list_rows(self.results):
            self.print_row(row)

    @property
    def speed(self) -> list[dict[str, Any]]:
        """Rows of this call's kernel."""
        return [row for row in self.results["speed"] if row["kernel"] == self.kernel]

    def write(self, row: dict[str, Any], **result: Any) -> None:
        self.results |= result
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.results, indent=1) + "\n")
        self.print_row(row)

    def print_row(self, row: dict[str, Any]) -> None:
        if row:
            print(json.dumps(row), flush=True)


def is_measured(row: dict[str, Any]) -> bool:
    return any(key in row for key in ("seconds", "out_of_memory", "index_limit"))


def try_run(
    row: dict[str, Any], scale: Scale, side: Side, kernel: str, use: Callable[[Run], None], **options: Any
) -> None:
    """Runs a measurement. Its error becomes part of the row and stops no other measurement."""
    run = None
    try:
        run = Run(scale, kernel, is_ours=side.is_ours, offloads=side.offloads, **options)
        use(run)
    except OutOfMemoryError as error:
        row["out_of_memory"] = str(error)[:200]
    except IndexLimitError as error:
        row["index_limit"] = str(error)[:200]
    except Exception as error:  # noqa: BLE001 - after any error, the others are measured
        row["failed"] = f"{type(error).__name__}: {error}"[:300]
    if run is not None:
        run.close()


def measure_speed(
    report: Report, scale: Scale, lengths: list[int], names: Sequence[str], deadline: float, peak: float | None
) -> None:
    for tokens in lengths:
        for name in names:
            if any((row["tokens"], row["side"]) == (tokens, name) for row in report.speed):
                continue
            row: dict[str, Any] = {
                "name": f"{name}, {tokens:,} tokens, {report.kernel}", "tokens": tokens, "side": name,
                "kernel": report.kernel,
            }  # fmt: skip
            if time.monotonic() + estimate_seconds(report.speed, tokens) > deadline:
                row["skipped"] = "no time is left for it"
            else:
                use = partial(time_steps, row, tokens, peak)
                try_run(row, scale, SIDES[name], report.kernel, use, num_layers=scale.num_layers)
            report.results["speed"].append(row)
            report.write(row)


def time_steps(row: dict[str, Any], tokens: int, peak: float | None, run: Run) -> None:
    is_short = tokens <= 2**16
    if not is_short:  # a later call may begin here: two lengths compile backwards, the second for any length
        for few in (2**12, 2**13):
            run.step(min(few, tokens))
    run.step(tokens, backward=is_short)  # the first step chooses kernels and locks host memory
    run.scale.device.forget_peak()
    row["seconds"] = statistics.median(run.step(tokens) for _ in range(3 if is_short else 1))
    row["tokens_per_second"] = tokens / row["seconds"]
    row["model_tflops"] = run.compute_model_flops(tokens) / row["seconds"] / 1e12
    row["mfu"] = row["model_tflops"] / peak if peak else None
    row["peak_gb"] = run.scale.device.read_peak() / 1e9
    row["host_gb"] = run.offloader.pool.num_bytes / 1e9 if run.offloader else None


def estimate_seconds(rows: list[dict[str, Any]], tokens: int) -> float:
    """Estimates the seconds of all steps of a row from the slowest row measured, as attention grows with the square."""
    known = [row["seconds"] * max(1.0, tokens / row["tokens"]) ** 2 for row in rows if "seconds" in row]
    return SETUP_SECONDS + (4.0 if tokens <= 2**16 else 1.4) * max(known, default=0.0)


def find_exposed_shares(rows: list[dict[str, Any]], link: float) -> dict[int, float]:
    """Returns by how much a step with offload is longer, as a share of the time that copies out and back take."""
    values = {}
    by_key = {(row["tokens"], row["side"]): row for row in rows if "seconds" in row}
    for tokens in sorted({row["tokens"] for row in rows}):
        on, off = by_key.get((tokens, "ours")), by_key.get((tokens, "ours, no offload"))
        if on and off and on["host_gb"]:
            values[tokens] = max(0.0, on["seconds"] - off["seconds"]) / (2 * on["host_gb"] * 1e9 / link)
    return values


def find_longest(report: Report, scale: Scale, name: str, cap: float, deadline: float) -> None:
    """Finds the two rows between which memory ends, or the indices of the attention kernel. The model has 2 layers and
    a small window, so that time is linear in the length and memory is that of a deep model. Two short rows give the
    first estimate."""
    values: dict[str, Any] = report.results["longest_row"].get(name) or {"runs": 0, "does_not": None, "trials": []}
    trials = values["trials"]
    if values.get("is_found"):
        return

    def attempt(tokens: int) -> bool:
        if any(row["tokens"] == tokens for row in trials):
            return True
        row: dict[str, Any] = {
            "name": f"longest row, {name}, {tokens:,} tokens", "tokens": tokens, "kernel": scale.window_kernel
        }  # fmt: skip

        def use(run: Run) -> None:
            scale.device.forget_peak()
            row["seconds"] = run.step(tokens)
            row["peak_bytes"] = scale.device.read_peak()

        try_run(row, scale, SIDES[name], scale.window_kernel, use, num_layers=2, chunks=4, window=True)
        trials.append(row)
        if "seconds" in row:
            values["runs"] = max(values["runs"], tokens)
        elif "failed" not in row:  # memory ends, or the kernel's indices
            values["does_not"] = min(values["does_not"] or tokens, tokens)
        report.write(row, longest_row={**report.results["longest_row"], name: values})
        return "failed" not in row

    short, step_tokens = scale.short_row, scale.step_tokens
    if not (attempt(short) and attempt(2 * short)):
        return
    if values["runs"] < 2 * short:
        values["is_found"] = True
        return
    slope = (trials[1]["peak_bytes"] - trials[0]["peak_bytes"]) / short
    tokens = int(2 * short + (cap - trials[1]["peak_bytes"]) / slope)
    while True:
        tokens = max(step_tokens, tokens // step_tokens * step_tokens)
        second = max(row["seconds"] / row["tokens"] for row in trials if "seconds" in row)
        if time.monotonic() + SETUP_SECONDS + 1.2 * second * tokens > deadline or not attempt(tokens):
            return
        low, high = values["runs"], values["does_not"]
        if high is not None and high - low <= max(step_tokens, 0.02 * low):
            values["is_found"] = True
            return
        tokens = int(1.05 * low) + step_tokens if high is None else max(int(0.95 * high), (low + high) // 2)


def draw_copies(tokens: int, path: Path, run: Run) -> None:
    """Draws the compute and the copies of one step as bars over time, from the profiler."""
    from torch.profiler import profile

    run.step(tokens)
    with profile(activities=[run.scale.device.activity]) as seen:
        run.step(tokens)
    lanes: dict[str, list[tuple[float, float]]] = {"compute": [], "to host": [], "from host": []}
    for event in seen.events():
        if event.device_type == run.scale.device.event_type:
            name = event.name.lower()
            lane = "to host" if "dtoh" in name else "from host" if "htod" in name else "compute"
            lanes[lane].append((event.time_range.start, event.time_range.end))
    first = min(start for lane in lanes.values() for start, _ in lane)
    last = max(end for lane in lanes.values() for _, end in lane)
    scale = 1000 / (last - first)
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1100 110" font-family="sans-serif" font-size="12">']
    for at, (name, spans) in enumerate(lanes.items()):
        parts.append(f'<text x="2" y="{28 + 30 * at}">{name}</text>')
        parts += [
            f'<rect x="{80 + (start - first) * scale:.2f}" y="{14 + 30 * at}" height="20" fill="#36c" '
            f'width="{max(0.1, (end - start) * scale):.2f}"/>'
            for start, end in spans
        ]
    path.write_text("".join([*parts, "</svg>\n"]))


def judge(results: dict[str, Any], speed: list[dict[str, Any]]) -> dict[str, bool | None]:
    """Judges each bar as met, not met, or None where it was not decided. `speed`: rows of one kernel."""
    ours, reference = (results["longest_row"].get(name) for name in ("ours", "(b)"))
    bars: dict[str, bool | None] = {}
    if ours and reference:
        is_met = reference["does_not"] is not None and ours["runs"] >= 1.4 * reference["does_not"]
        is_short = ours["does_not"] is not None and ours["does_not"] < 1.4 * reference["runs"]
        bars["longest row at least 1.4x (b)'s"] = True if is_met else False if is_short else None
    by_key = {(row["tokens"], row["side"]): row for row in speed}
    for tokens in sorted({row["tokens"] for row in speed if row["tokens"] >= 2**17}):
        row, peers = (
            by_key.get((tokens, "ours"), {}),
            [by_key.get((tokens, name), {}) for name in ("(b)", "(b), no offload")],
        )
        seconds = [peer["seconds"] for peer in peers if "seconds" in peer]
        is_known = "seconds" in row and bool(seconds)
        bars[f"{tokens} tokens: at least 1.2x (b)'s speed, with offload or without"] = (
            row["seconds"] <= min(seconds) / 1.2 if is_known else None
        )
        mfu = row.get("mfu")
        least = 0.5 if row.get("kernel") in FASTEST else 0.4
        bars[f"{tokens} tokens: at least {100 * least:.0f} % of peak"] = None if mfu is None else mfu >= least
    return bars


def parse_length(text: str) -> int:
    return int(text[:-2]) * 1024 if text.endswith("Ki") else int(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("all", "speed", "longest"), default="all")
    parser.add_argument("--lengths", default="32Ki,64Ki,128Ki,256Ki")
    parser.add_argument("--cap-gb", type=float, default=FULL.cap_gb)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "levers-gpu.json")
    parser.add_argument("--rehearse", action="store_true", help="in miniature on a CPU; keeps no result")
    options = parser.parse_args()
    if options.rehearse:
        options.lengths, options.cap_gb = "64,128", MINIATURE.cap_gb
        with tempfile.TemporaryDirectory() as folder:
            options.json = Path(folder) / "levers.json"  # keeps no result
            return end(measure(options, MINIATURE))
    if not torch.cuda.is_available():
        print("this benchmark needs a GPU; benchmarks/levers.py counts without one", file=sys.stderr)
        return 2
    return end(measure(options, FULL))


def end(results: dict[str, Any]) -> int:
    """Prints how the bars were met, and returns the exit code."""
    for name, is_met in results["bars"].items():
        verdict = "met" if is_met else "missed" if is_met is False else "not known"
        print(json.dumps({"name": f"bar: {name}", "bar": verdict}), flush=True)
    rows = list_rows(results)
    if any("failed" in row for row in rows):
        return 1
    searches = results["longest_row"].values()
    if any("skipped" in row for row in rows) or not all(search.get("is_found") for search in searches):
        return UNFINISHED
    return 0 if all(results["bars"].values()) else MISSED


def list_rows(results: dict[str, Any]) -> list[dict[str, Any]]:
    """All measurements of a report."""
    trials = [row for values in results["longest_row"].values() for row in values["trials"]]
    return [*results["speed"], *trials, results.get("picture", {})]


def measure(options: argparse.Namespace, scale: Scale) -> dict[str, Any]:
    """Runs the parts that are asked for, and returns the results."""
    start, seconds = time.monotonic(), 60 * options.minutes
    device, facts = scale.device.torch_device, scale.device.read_facts()
    peak = next((value for key, value in PEAK_TFLOPS.items() if key in facts.name), None)
    link, cap = scale.device.measure_link(), options.cap_gb * 1e9
    lengths = [parse_length(text) for text in options.lengths.split(",")]
    heads = scale.shape["num_attention_heads"], scale.shape["num_key_value_heads"]
    work = KernelWorkload(LengthMix((lengths[0],), has_few_lengths=True), *heads)
    choice = choose_kernel("auto", KernelSearch(Need(scale.head_dim), device, work=work))
    conditions = {
        "gpu": facts.name, "torch": torch.__version__, "cuda": torch.version.cuda, "cap_gb": options.cap_gb,
    }  # fmt: skip
    measured = {"memory_gb": facts.total_memory / 1e9, "host_link_gb_per_second": link / 1e9, "why": choice.reason}
    report = Report(options.json, choice.name, conditions=conditions, machine=measured)
    report.write({"name": f"attention by {choice.name}: {choice.reason}", **measured})
    scale.device.limit(cap)
    if options.part != "longest":
        share = 0.6 if options.part == "all" else 0.75
        measure_speed(report, scale, lengths, ("ours", "(b)"), start + share * seconds, peak)
    if options.part != "speed":
        for name, share in (("ours", 0.78 if options.part == "all" else 0.5), ("(b)", 0.95)):
            find_longest(report, scale, name, 0.98 * cap, start + share * seconds)
    if options.part != "longest":
        shorter = [tokens for tokens in lengths if tokens <= 2**17]
        measure_speed(report, scale, shorter, ("ours, no offload", "(b), no offload"), start + seconds, peak)
        exposed = find_exposed_shares(report.speed, link)
        report.write({"name": "of offload, not hidden", "shares": exposed}, offload_not_hidden=exposed)
        picture: dict[str, Any] = {"name": "copies beside compute", "file": options.json.with_suffix(".svg").name}
        draw = partial(draw_copies, lengths[0], options.json.with_suffix(".svg"))
        try_run(picture, scale, SIDES["ours"], choice.name, draw, num_layers=scale.num_layers)
        report.write(picture, picture=picture)
    report.write({}, bars=judge(report.results, report.speed))
    return report.results


if __name__ == "__main__":
    sys.exit(main())
