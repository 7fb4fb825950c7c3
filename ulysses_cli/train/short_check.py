"""What a run costs on short texts: the same texts, which are not trained on, before step 1 and after. The base model
reads them with its own positions; where the recipe changes these, with them too. Differences are pair by pair.

The base is measured at each start, also of a run that resumes: its weights are built before a checkpoint is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
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
from ulysses_cli.train.loop import StopConditions, TrainState

KEY = "run.short_check"
MAX_TEXTS, MAX_TOKENS = 256, 1024
BASE, STRETCHED, TRAINED = "base", "base with the recipe's positions", "trained"


def read_short_texts(path: str, tokenizer: Any) -> tuple[CutDocument, ...]:
    """The first texts of a file or folder, each cut at MAX_TOKENS. Raises RecipeError."""
    texts: list[CutDocument] = []
    for ids, flags, source in walk_documents([{"path": path}], Encoder(tokenizer), KEY):
        tokens = np.asarray(ids, np.int64)[:MAX_TOKENS]
        targets = tokens if flags is None else np.where(flags[:MAX_TOKENS] & TARGET, tokens, IGNORE_INDEX)
        if (targets[1:] != IGNORE_INDEX).any():
            texts.append(CutDocument(len(tokens), len(texts), source, tokens.copy(), targets.copy()))
        if len(texts) == MAX_TEXTS:
            break
    if not texts:
        raise RecipeError([Problem(KEY, f"{path} holds no text of two tokens or more", "name another file")])
    return tuple(texts)


class ShortCheck:
    """A post-step hook. Without texts it does nothing. `own_positions`: inside, the model has those of its files; None
    where the recipe changes none."""

    def __init__(
        self,
        texts: Sequence[CutDocument],
        batching: Batching,
        own_positions: Callable[[], AbstractContextManager[None]] | None,
        write: Callable[[dict[str, Any]], None],
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

    def run(self, state: TrainState, stop: StopConditions | None = None) -> None:
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
