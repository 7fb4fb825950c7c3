"""What a run costs on short texts: the same texts, which are not trained on, before step 1 and after. The base model
reads them with its own positions; where the recipe changes these, with them too. Differences are pair by pair.

The base is measured at each start, also of a run that resumes: its weights are built before a checkpoint is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np

from ulysses_cli.data.steps import Batching
from ulysses_cli.data.store import TARGET
from ulysses_cli.data.tokenizing.encoder import Encoder
from ulysses_cli.data.tokenizing.workers import walk_documents
from ulysses_cli.evaluate.summary import compare_models
from ulysses_cli.plan.problem import Problem, RecipeError
from ulysses_cli.plan.rows.packing import IGNORE_INDEX
from ulysses_cli.train.document_losses import CutDocument, measure_documents
from ulysses_cli.train.loop import TrainState
from ulysses_cli.train.processes.consistency import gather_values

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

    def _measure(self, state: TrainState) -> list[float]:
        """The loss of each text, in their order."""
        lines: list[dict[str, Any]] = []
        measure_documents(state.engine, self.batching, self.texts, (), lines.append)
        return [line["loss"] for line in sorted(lines, key=lambda line: line["index"])]
