"""What a run on sizes holds at the fullest moment of a phase, as lines that add up, and where that moment is."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ulysses_cli.plan.sizes.autograd import GRADIENT
from ulysses_cli.plan.sizes.meter import Tag
from ulysses_cli.plan.sizes.tensor import Running

# Kinds of work. What an engine holds has its line's name in place of a module's path.
ENGINE, FORWARD, AGAIN = "engine", "forward", "again"
PARAMETERS, GATHERED, SECOND = (
    (ENGINE, line) for line in ("parameters", "parameters_gathered", "parameters_second_shard")
)
GRADIENTS, BUCKET, FLUSHED = ((ENGINE, line) for line in ("gradients", "reduce_bucket", "reduce_flush"))
MASTER, MOMENTS, STEPPED = ((ENGINE, line) for line in ("optimizer_master", "optimizer_adam", "optimizer_transients"))
INPUTS, TRANSIENTS = (ENGINE, "inputs"), (ENGINE, "engine_transients")
PASSES = ("forward", "evaluation")
ALIKE = {
    **dict.fromkeys(("self_attn", "attention", "attn", "linear_attn"), "attention"),
    **dict.fromkeys(("mlp", "block_sparse_moe", "feed_forward"), "mlp"),
}
RESIDUAL, LOGITS = "residual", "logits"
AFTER_NUMBER = re.compile(r"\.\d+(?:\.(\w+))?")


@contextmanager
def tagged(kind: str, path: str) -> Iterator[None]:
    """What is made inside belongs to this work."""
    meter = Running.meter
    before, meter.tag = meter.tag, (kind, path)
    try:
        yield
    finally:
        meter.tag = before


def find_part(path: str) -> str:
    """The part of a model that a path leads to: of a layer, the module right below it."""
    in_layer = AFTER_NUMBER.search(path)
    if in_layer:
        return ALIKE.get(in_layer[1], in_layer[1]) if in_layer[1] else RESIDUAL
    last = path.rpartition(".")[2]
    return LOGITS if last in ("", "model", "lm_head", "loss") else last


def name_line(tag: Tag, phase: str) -> str:
    kind, path = tag
    if kind == ENGINE:
        return path
    part = find_part(path)
    if kind == FORWARD and phase not in PASSES:
        return "saved_layer_inputs" if part == RESIDUAL else f"saved_by_{part}"
    return {AGAIN: f"recomputed_{part}", GRADIENT: f"gradients_of_{part}"}.get(kind, part)


def name_moment(tag: Tag) -> str:
    kind, path = tag
    if kind == ENGINE:
        return path.replace("_", " ")
    passes = {AGAIN: "backward of {}, recomputed", GRADIENT: "backward of {}"}
    return passes.get(kind, "{}").format(path.removeprefix("model.") or "the loss")


def join_lines(alive: Mapping[Tag, int], phase: str) -> dict[str, int]:
    lines: Counter[str] = Counter()
    for tag, num_bytes in alive.items():
        lines[name_line(tag, phase)] += num_bytes
    return {name: num_bytes for name, num_bytes in lines.items() if num_bytes}
