"""Makes the tables of docs/real-run.md from what benchmarks/real_run.py has stored of its two runs."""

import json
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

from support.paths import ROOT

RESULTS = ROOT / "benchmarks" / "results"
NAMES = {"first": "real-run-cpu.json", "again": "real-run-again-cpu.json"}
GIB = 2**30
Table = Callable[[Sequence[str], Iterable[Sequence[object]]], str]


@cache
def load_runs() -> dict[str, dict[str, Any]]:
    return {name: json.loads((RESULTS / file).read_text()) for name, file in NAMES.items()}


def _show(form: str, find: Callable[[dict[str, Any]], float]) -> list[str]:
    """A number of both runs."""
    return [format(find(run), form) for run in load_runs().values()]


def make_facts(table: Table) -> str:
    run = load_runs()["first"]
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    rows = [
        ("started", *(each["started"] for each in load_runs().values())),
        ("minutes, on two shared cores", *_show(".0f", lambda each: each["minutes"])),
        ("core hours at most", *_show(".1f", lambda each: each["minutes"] * each["cores"] / 60)),
    ]
    return f"{table(('', *NAMES), rows)}\n\nModel: `{run['package']}`. Versions: {versions}."


def make_data(table: Table) -> str:
    run = load_runs()["first"]
    rows = []
    for name, part in run["data"].items():
        texts = ", ".join(part["texts"])
        rows.append((f"`{name}`", len(part["texts"]), f"{part['chars']:,}", texts))
    train, held_out = run["prepared"]["train"], run["prepared"]["eval"]
    return (
        f"{table(('file', 'texts', 'characters', 'which'), rows)}\n\n`ulysses prepare` makes {train['num_rows']} rows "
        f"with {train['num_tokens']:,} tokens of the first two, and {held_out['num_rows']} rows with "
        f"{held_out['num_tokens']:,} tokens of the third."
    )


def make_recipe(_: Table) -> str:
    run = load_runs()["first"]
    return f"```yaml\n{run['recipe'].rstrip()}\n```\n\n```text\n{run['plan'].rstrip()}\n```"


def make_commands(table: Table) -> str:
    runs = load_runs()
    rows = [
        (f"`{each['command']}`", *(f"{run['commands'][at]['seconds']:,.0f}" for run in runs.values()))
        for at, each in enumerate(runs["first"]["commands"])
    ]
    return table(("command", *(f"{name}, seconds" for name in runs)), rows)


def make_layouts(table: Table) -> str:
    rows: list[Sequence[object]] = []
    for size in (1, 2):
        found = [run["layouts"][f"sp_{size}"] for run in load_runs().values()]
        rows += [
            (
                f"sp {size}: loss of steps 1, 2, 3",
                *(", ".join(f"{loss:.4f}" for loss in each["loss"]) for each in found),
            ),
            (f"sp {size}: gradient norm", *(", ".join(f"{norm:.3f}" for norm in each["grad_norm"]) for each in found)),
            (f"sp {size}: seconds of step 3", *(f"{each['step_seconds'][-1]:.1f}" for each in found)),
            (
                f"sp {size}: memory of the fullest rank, GiB",
                *(f"{max(each['host_peak_memory_bytes']) / GIB:.2f}" for each in found),
            ),
        ]
    rows.append(("largest difference of a loss", *_show(".4f", lambda run: run["layouts"]["loss_difference"])))
    return table(("", *NAMES), rows)


def make_prediction(table: Table) -> str:
    def peak(run: dict[str, Any]) -> float:
        return max(run["prediction"]["tensor_bytes"].values()) / GIB

    rows = [
        ("tensors of a rank, predicted, GiB", *_show(".2f", peak)),
        (
            "process of the fullest rank, measured, GiB",
            *_show(".2f", lambda r: r["measured"]["host_peak_memory_bytes"] / GIB),
        ),
        ("seconds of a step of 12Ki tokens, predicted", *_show(".0f", lambda r: r["prediction"]["step_seconds"])),
        (
            "seconds of each step, measured",
            *(", ".join(f"{seconds:.0f}" for seconds in run["step_seconds"]) for run in load_runs().values()),
        ),
        ("tokens per second, measured", *_show(".0f", lambda run: run["measured"]["median_tokens_per_second"])),
    ]
    return table(("", *NAMES), rows)


def make_positions(table: Table) -> str:
    runs = load_runs()
    names = {"base": "base, own positions", "stretched": "base, stretched, before step 1", "trained": "trained"}
    rows = []
    for key, title in names.items():
        for name, run in runs.items():
            rows.append((title, name, *(f"{loss:.3f}" for loss in run["loss_by_position"][key])))
    ends = ("0 to 2Ki", "2Ki to 8Ki", "8Ki to 12Ki")
    return table(("model", "run", *ends), rows)


def make_needles(table: Table) -> str:
    rows = []
    for name, run in load_runs().items():
        needles, number = run["needles"], run["needles"]["questions"]
        rows.append((name, *(f"{round(needles[model] * number)} of {number}" for model in ("base", "trained"))))
    return table(("run", "base finds, of questions of 12Ki tokens", "trained finds"), rows)


def make_short_texts(table: Table) -> str:
    rows = []
    for name, run in load_runs().items():
        for model in run["short_check"]["models"]:
            difference = ("", "")
            if "difference" in model:
                low, high = model["difference_low"], model["difference_high"]
                difference = f"{model['difference']:+.4f}", f"{low:+.4f} to {high:+.4f}"
            rows.append((model["model"], name, f"{model['loss']:.4f}", *difference))
    check = load_runs()["first"]["short_check"]
    head = ("model", "run", "loss", "difference to the base", "95 % interval")
    return f"{check['texts']} texts, {check['tokens']:,} tokens.\n\n{table(head, rows)}"


def make_answer(_: Table) -> str:
    (said,) = load_runs()["first"]["sample"]
    lines = "\n".join(f"> {line}".rstrip() for line in str(said["text"]).strip().splitlines())
    return f"`{said['prompt']}`\n\n{lines}"


def make_conclusions(table: Table) -> str:
    words = {True: "yes", False: "no"}
    first, again = load_runs().values()
    rows = [(name, words[said], words[again["conclusions"][name]]) for name, said in first["conclusions"].items()]
    found = [name for name in EQUAL if first[name] == again[name]]
    assert found == list(EQUAL), found
    return (
        f"{table(('', *NAMES), rows)}\n\nThese are equal in both runs, to the last digit: {', '.join(EQUAL.values())}."
    )


EQUAL = {
    "losses": "the loss of each step",
    "loss_by_position": "the losses by position",
    "short_check": "those of the short texts",
    "needles": "the needles that are found",
    "sample": "the answer",
}
PARTS: dict[str, Callable[[Table], str]] = {
    "facts": make_facts,
    "data": make_data,
    "recipe": make_recipe,
    "commands": make_commands,
    "layouts": make_layouts,
    "prediction": make_prediction,
    "positions": make_positions,
    "needles": make_needles,
    "short texts": make_short_texts,
    "answer": make_answer,
    "conclusions": make_conclusions,
}
