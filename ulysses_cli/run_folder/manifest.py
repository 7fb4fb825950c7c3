"""Reads and checks manifest.json and state.json of a checkpoint. Any other content raises a ValueError that says what
is wrong. No other code may read these files unchecked.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ulysses_cli.plan.files.regular_files import read_regular
from ulysses_cli.plan.models.model_choice import SCORE, invert_score
from ulysses_cli.plan.rules.files import CHECKPOINT_MANIFEST

MANIFEST, STATE = CHECKPOINT_MANIFEST, "state.json"
FORMAT = 1  # of a checkpoint
SHARE = re.compile(r"rank-(\d{5,})\.safetensors", re.ASCII)
MODEL_FACTS = "ulysses.json"  # in an exported model
MAX_BYTES = 16 << 20  # a manifest names a file for each rank; a state contains a recipe
SHOWN_CHARS = 120
Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Several = Annotated[int, Field(ge=1, lt=1 << 31)]


class _Part(BaseModel):
    """Strict types; keys that other versions add are kept."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow")


class FileEntry(_Part):
    num_bytes: Count = Field(alias="bytes")
    sha256: str


class Manifest(_Part):
    """Sizes and hashes of the checkpoint's files, by name."""

    format: Count
    files: dict[str, FileEntry]


class _Train(_Part):
    per_device_train_batch_size: Several
    gradient_accumulation_steps: Several


class _Run(_Part):
    seed: int


class _Recipe(_Part):
    model: dict[str, Any]
    data: dict[str, Any]
    train: _Train
    run: _Run
    lora: dict[str, Any] | None = None


class State(_Part):
    """A run's progress, and its recipe."""

    world_size: Several
    step: Count
    position: Count
    optimizer_steps: Count
    bad_steps: Count
    hours: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    rows_per_step: Several
    data: str
    recipe: _Recipe
    eval_losses: dict[str, float | None] = {}
    eval_scores: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = {}


def name_share(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def load_manifest(path: Path) -> dict[str, FileEntry]:
    """Size and hash by name: of state.json and of the files of ranks 0 to n - 1, no more and no less."""
    manifest = _load(path / MANIFEST, Manifest)
    if manifest.format != FORMAT:
        raise ValueError(f"{MANIFEST} has format {manifest.format}, and this version of ulysses reads format {FORMAT}")
    entries = manifest.files
    for name in entries:
        if name != STATE and not SHARE.fullmatch(name):
            raise ValueError(f"{MANIFEST} names {shorten(name)}, which is outside the checkpoint")
    if STATE not in entries:
        raise ValueError(f"{MANIFEST} does not name {STATE}")
    missing = next((name for rank in range(len(entries) - 1) if (name := name_share(rank)) not in entries), None)
    if missing:
        raise ValueError(f"{MANIFEST} does not name {missing}")
    return entries


class ModelFacts(_Part):
    """The checkpoint that an exported model was made from, and the step that its run had done by then."""

    step: Count
    run_step: Count | None = None  # left out: the same

    @property
    def steps(self) -> tuple[int, int]:
        return self.step, self.step if self.run_step is None else self.run_step


def read_model_steps(model: Path) -> tuple[int, int] | None:
    """(step of the weights, step that the run had done) of an exported model. None: there is no model, or this tool did
    not export it."""
    try:
        return ModelFacts.model_validate_json(read_regular(model / MODEL_FACTS, MAX_BYTES)).steps
    except (OSError, ValueError):
        return None


def load_state(path: Path) -> dict[str, Any]:
    """The checked content of state.json, as plain data."""
    return _load(path / STATE, State).model_dump()


def read_losses(state: Mapping[str, Any]) -> dict[int, float]:
    """Returns the evaluation losses by step that a checkpoint's state holds; infinity stands for one that is not
    finite."""
    losses = state.get("eval_losses", {})
    return {int(step): math.inf if loss is None else loss for step, loss in losses.items() if step.isdecimal()}


def read_lacks(state: Mapping[str, Any]) -> dict[int, float]:
    """Returns what the scores of run.eval_suite lack to 1, by step, that a checkpoint's state holds."""
    scores = state.get("eval_scores", {})
    return {int(step): invert_score(score) for step, score in scores.items() if step.isdecimal()}


def read_measured(state: Mapping[str, Any]) -> dict[int, float]:
    """Returns what the run's own run.keep_best goes by."""
    return read_lacks(state) if state["recipe"]["run"].get("keep_best") == SCORE else read_losses(state)


def dump_scores(lacks: Mapping[int, float]) -> dict[str, float]:
    return {str(step): invert_score(lack) for step, lack in lacks.items()}


def dump_losses(losses: Mapping[int, float]) -> dict[str, float | None]:
    """Returns the losses as a checkpoint's state holds them; JSON has no infinity."""
    return {str(step): loss if math.isfinite(loss) else None for step, loss in losses.items()}


_M = TypeVar("_M", bound=BaseModel)


def _load(file: Path, model: type[_M]) -> _M:
    if file.is_symlink():
        raise ValueError(f"{file.name} is a link, which leads outside the checkpoint")
    try:
        return model.model_validate_json(read_regular(file, MAX_BYTES))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"{file.name} cannot be read: {shorten(f'{place}: ' * bool(place) + first['msg'])}") from None


def shorten(text: str) -> str:
    return text if len(text) <= SHOWN_CHARS else f"{text[: SHOWN_CHARS - 3]}..."
