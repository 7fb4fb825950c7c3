"""The loss of documents that are cut to a length, by position, with training's sharded forward: of an evaluation, and
of a run's short texts.

What a run costs on short texts (`run.short_check`): the same texts, which are not trained on, before step 1 and after.
The base model reads them with its own positions; where the recipe changes these, with them too. Differences are pair by
pair. The base is measured at each start, also of a run that resumes: its weights are built before a checkpoint is
loaded."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ulysses_cli.data.steps import Batching, plan_step, read_micro_batch
from ulysses_cli.data.store import TARGET, RowSlice
from ulysses_cli.data.tokenizing.encoder import Encoder
from ulysses_cli.data.tokenizing.workers import walk_documents
from ulysses_cli.evaluate.prompts import name_prompt
from ulysses_cli.evaluate.summary import TASK, compare_models, describe_document, list_bounds
from ulysses_cli.plan.problem import Problem, RecipeError
from ulysses_cli.plan.rows.packing import IGNORE_INDEX
from ulysses_cli.train.engine import Engine
from ulysses_cli.train.loop import TrainState
from ulysses_cli.train.processes.consistency import gather_values

Numbers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class CutDocument:
    """A document cut to exactly `length` tokens. `targets`: its tokens, with -100 where one is no target."""

    length: int
    index: int  # among those of this length
    source: str
    tokens: Numbers
    targets: Numbers

    @property
    def name(self) -> str:
        return name_prompt(TASK, self.length, self.index)

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.tokens.tobytes() + self.targets.tobytes()).hexdigest()[:16]


class DocumentRows:
    """Documents as rows that training's batching reads: one document is one row."""

    def __init__(self, documents: Sequence[CutDocument]) -> None:
        self.documents = documents

    def __len__(self) -> int:
        return len(self.documents)

    def get_lengths(self, row: int) -> tuple[int, ...]:
        return (self.documents[row].length,)

    def count_targets(self, row: int) -> int:
        return int((self.documents[row].targets[1:] != IGNORE_INDEX).sum())

    def read(self, row: int, start: int, stop: int) -> RowSlice:
        """Tokens [start, stop), with padding behind the document. The label of a token is the next one's target."""
        document, size = self.documents[row], stop - start
        positions = np.arange(start, stop, dtype=np.int64)
        positions[max(0, document.length - start) :] -= document.length
        labels = _fill(document.targets[start + 1 : stop + 1], size, IGNORE_INDEX)
        return RowSlice(_fill(document.tokens[start:stop], size, 0), labels, positions)


def _fill(values: Numbers, size: int, filler: int) -> Numbers:
    filled = np.full(size, filler, np.int64)
    filled[: len(values)] = values
    return filled


def measure_documents(
    engine: Engine,
    batching: Batching,
    documents: Sequence[CutDocument],
    done: Collection[str],
    record: Callable[[dict[str, Any]], None],
) -> None:
    """Collective over all ranks, which pass the same documents and the same `done`: the names of those that are
    measured already. `batching`: of whole documents. `record` gets the line of each document; every rank has them."""
    groups = engine.groups
    rows = DocumentRows([document for document in documents if document.name not in done])
    position = 0
    while position < len(rows):
        started = time.monotonic()
        plan = plan_step(rows, batching, position, len(rows))
        batch = read_micro_batch(rows, plan, groups.dp_index, 0, groups.sp_axis.rank, groups.sp_axis.size)
        losses, positions = engine.evaluate_micro_batch(batch)
        step = [rows.documents[row] for row in plan.rows]
        width = max(len(list_bounds(document.length)) for document in step)
        sums = torch.zeros(len(step), width, 2, dtype=torch.float64, device=engine.device)
        own = next(iter(batch.rows), -1)
        if own >= 0:
            at = plan.rows.index(own)
            bounds = torch.tensor(list_bounds(step[at].length), device=positions.device)
            buckets = torch.bucketize(positions, bounds, right=True)
            sums[at, :, 0].index_add_(0, buckets, losses.double())
            sums[at, :, 1].index_add_(0, buckets, torch.ones_like(losses, dtype=torch.float64))
        totals = engine.sum_over_ranks(sums).cpu().tolist()
        seconds = (time.monotonic() - started) / len(step)
        for document, parts in zip(step, totals, strict=True):
            kept = [{"sum": total, "tokens": int(count)} for total, count in parts[: len(list_bounds(document.length))]]
            line = describe_document(
                document.name, document.source, document.digest, document.length, document.index, kept
            )
            record({**line, "seconds": round(seconds, 4)})
        position = plan.next_position


KEY = "run.short_check"
MAX_TEXTS, MAX_TOKENS = 256, 1024
BASE, STRETCHED, TRAINED = "base", "base with the recipe's positions", "trained"


def read_short_texts(path: str, tokenizer: Any) -> tuple[CutDocument, ...]:
    """The first texts of a file or folder, each cut at MAX_TOKENS. Raises RecipeError."""
    texts: list[CutDocument] = []
    try:
        for ids, flags, source in walk_documents([{"path": path}], Encoder(tokenizer), KEY):
            tokens = np.array(ids[:MAX_TOKENS], np.int64)
            targets = tokens if flags is None else np.where(flags[:MAX_TOKENS] & TARGET, tokens, IGNORE_INDEX)
            if (targets[1:] != IGNORE_INDEX).any():
                texts.append(CutDocument(len(tokens), len(texts), source, tokens, targets))
            if len(texts) == MAX_TEXTS:
                break
    except RecipeError as error:
        raise RecipeError(
            [replace(each, hint=each.hint.replace(f"{KEY}.path", KEY)) for each in error.problems]
        ) from None
    if not texts:
        raise RecipeError([Problem(KEY, f"{path} holds no text with a target", "name another file")])
    return tuple(texts)


Positions = Callable[[], AbstractContextManager[None]]
Write = Callable[[dict[str, Any]], None]


def make_short_check(
    texts: Sequence[CutDocument], state: TrainState, batching: Batching, own_positions: Positions | None, write: Write
) -> ShortCheck:
    """Collective over all ranks: rank 0 has read the texts. `own_positions`: inside, the model has those of its files;
    None where the recipe changes none."""
    return ShortCheck(gather_values(texts, state.groups.host_group)[0], batching, own_positions, write)


class ShortCheck:
    """A post-step hook. Without texts it does nothing."""

    def __init__(
        self, texts: Sequence[CutDocument], batching: Batching, own_positions: Positions | None, write: Write
    ) -> None:
        self.texts, self.batching, self.own_positions, self.write = texts, batching, own_positions, write
        self.before: dict[str, list[float]] = {}

    def measure_base(self, state: TrainState) -> None:
        """Collective over all ranks, before a checkpoint is loaded."""
        if not self.texts:
            return
        if self.own_positions is not None:
            with self.own_positions():
                self.before[BASE] = self._measure(state)
        self.before[STRETCHED if self.before else BASE] = self._measure(state)

    def run(self, state: TrainState) -> None:
        """Collective over all ranks."""
        if not self.texts:
            return
        state.phase = "measuring the texts of run.short_check"
        models = compare_models({**self.before, TRAINED: self._measure(state)})
        tokens = sum(text.length for text in self.texts)
        trained = {name: models[-1][name] for name in ("loss", "difference")}
        self.write({"step": state.step, "texts": len(self.texts), "tokens": tokens, **trained, "models": models})
        state.last_eval_step = state.step  # also of a run without held-out rows

    def _measure(self, state: TrainState) -> list[float]:
        """The loss of each text, in their order."""
        lines: list[dict[str, Any]] = []
        measure_documents(state.engine, self.batching, self.texts, (), lines.append)
        return [line["loss"] for line in sorted(lines, key=lambda line: line["index"])]
