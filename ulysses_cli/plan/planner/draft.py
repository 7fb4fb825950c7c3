"""Writes a recipe from a few facts: for estimates without a recipe, and for the planner's candidates."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from ulysses_cli.plan.layout import GPUS_PER_NODE, Layout
from ulysses_cli.plan.levers import Levers, get_key
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.rules.positions import REPLACEABLE

PLAIN = re.compile(r"[A-Za-z][\w./-]*", re.ASCII)


@dataclass(frozen=True)
class Draft:
    """What decides a recipe's memory and speed. `levers` None leaves them to be chosen."""

    model: str
    max_length: int
    layout: Layout
    is_lora: bool = False
    lora_targets: tuple[str, ...] = ()  # none: all linear layers
    quantize_base: str | None = None
    levers: Levers | None = None
    accumulation: int = 1
    needs_stretch: bool = False
    dataset: str = "owner/texts"
    max_steps: int = 1
    zero_stage: int = 3
    is_packed: bool = True
    nvme_path: str | None = None
    gpu: str | None = None  # its kind


def find_obstacle(shape: ModelShape) -> str:
    """Why a row of this model cannot be split over ranks, or ''."""
    return shape.inexact


def find_sp_size(shape: ModelShape, num_processes: int, max_length: int, gpus_per_node: int = GPUS_PER_NODE) -> int:
    """The largest legal sp_size inside a node: it divides the processes and the row; a ring serves heads that it does
    not divide."""
    if find_obstacle(shape):
        return 1
    legal = [
        size
        for size in range(1, gpus_per_node + 1)
        if num_processes % size == 0 and max_length % size == 0 and shape.list_ring_sizes(size)
    ]
    return max(legal)


def needs_stretch(shape: ModelShape, max_length: int) -> bool:
    """Whether rows exceed the pretrained positions of a model whose positions can be stretched."""
    return max_length > shape.max_position_embeddings and shape.rope_type in REPLACEABLE


def write_draft(draft: Draft, header: tuple[str, ...] = ()) -> str:
    """The recipe as YAML; settings at their default are left out."""
    layout = draft.layout
    lines = [f"# {line}".rstrip() for line in header] + ([""] if header else [])
    lines += ["model:", f"  name_or_path: {quote(draft.model)}"]
    if draft.needs_stretch:
        lines += ["  rope_scaling:", "    type: yarn"]
    sizes = {
        "sp_size": layout.sp_size,
        "dp_shard_size": layout.dp_shard_size,
        "dp_replicate_size": layout.dp_replicate_size,
    }
    parallel = [f"  {name}: {size}" for name, size in sizes.items() if size > 1]
    if layout.ring_size > 1 or layout.sp_size > GPUS_PER_NODE:  # auto may choose another
        parallel.append(f"  ring_size: {layout.ring_size}")
    parallel += [f"  zero_stage: {draft.zero_stage}"] if draft.zero_stage != 3 else []
    lines += ["", "parallel:", *parallel] if parallel else []
    lines += ["", "data:", "  datasets:", f"    - path: {draft.dataset}", f"  max_length: {draft.max_length}"]
    lines += [] if draft.is_packed else ["  packing: off"]
    lines += ["", "train:", f"  max_steps: {draft.max_steps}"]
    if draft.accumulation > 1:
        lines.append(f"  gradient_accumulation_steps: {draft.accumulation}")
    if draft.levers is not None:
        lines += ["", *write_levers(draft.levers)]
        lines += [f"  nvme_path: {quote(draft.nvme_path)}"] if draft.nvme_path is not None else []
    if draft.is_lora:
        lines += ["", "lora:", "  r: 16", "  alpha: 32"]
        lines += [f"  target_modules: [{', '.join(draft.lora_targets)}]"] if draft.lora_targets else []
        lines += [f"  quantize_base: {draft.quantize_base}"] if draft.quantize_base is not None else []
    lines += ["", "run:", f"  gpu: {quote(draft.gpu)}"] if draft.gpu is not None else []
    return "\n".join(lines) + "\n"


def quote(text: str) -> str:
    """As YAML reads it: plain where that is safe, otherwise in JSON's quotes."""
    return text if PLAIN.fullmatch(text) else json.dumps(text)


def write_levers(levers: Levers, base: Levers | None = None) -> list[str]:
    """The memory section; only what differs from `base`, if given."""
    before = vars(base) if base is not None else {}
    values = vars(levers).items()
    changed = {get_key(name): value for name, value in values if name not in before or before[name] != value}
    spelled = {name: str(value).lower() if isinstance(value, bool) else value for name, value in changed.items()}
    return ["memory:", *(f"  {name}: {value}" for name, value in spelled.items())] if changed else []
