"""The user's documents as rows of exact lengths: reads and tokenizes them as training does, builds a rank's part of
the model without an optimizer, and measures loss by position with training's sharded forward."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ulysses_cli.data.sources import open_source
from ulysses_cli.data.steps import Batching, make_eval_batching, plan_step, read_micro_batch
from ulysses_cli.data.store import TARGET, Flags, Ids, RowSlice
from ulysses_cli.data.tokenizing.encoder import Encoder, EncoderSettings
from ulysses_cli.data.tokenizing.tokenizer import get_variables, load_tokenizer, read_stop_tokens
from ulysses_cli.data.tokenizing.workers import encode_block
from ulysses_cli.data.transaction import FileHashes
from ulysses_cli.evaluate.prompts import TaskPrompt, name_prompt
from ulysses_cli.evaluate.summary import TASK, describe_document, list_bounds
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.planner.lever_choice import choose_levers
from ulysses_cli.plan.problem import Problem, RecipeError
from ulysses_cli.plan.recipe.loader import parse_recipe
from ulysses_cli.plan.recipe.sections import Dataset
from ulysses_cli.plan.resolved import choose_layout, settle
from ulysses_cli.plan.rows.packing import IGNORE_INDEX
from ulysses_cli.plan.units import format_count
from ulysses_cli.readers.columns import Reading
from ulysses_cli.readers.problems import DataError
from ulysses_cli.train.engine import Engine
from ulysses_cli.train.generation.decoding import agree_on_stop_tokens
from ulysses_cli.train.model.build import build_for_answers
from ulysses_cli.train.model.loading import load_model_config, read_shape
from ulysses_cli.train.processes.groups import Groups, make_groups

GROUP_TIMEOUT = timedelta(days=1)


@dataclass(frozen=True, eq=False)
class EvaluatedModel:
    """What all ranks have. `max_length`: tokens of a prompt with its answer."""

    engine: Engine
    tokenizer: Any
    shape: ModelShape
    stop_tokens: set[int]
    batching: Batching  # of whole documents
    max_length: int

    @property
    def groups(self) -> Groups:
        return self.engine.groups


def load_for_evaluation(text: str, device: Any, report: Callable[[str], None]) -> EvaluatedModel:
    """Collective over all ranks. `text`: of a recipe; `report` is called on rank 0 alone."""
    recipe = parse_recipe(text, "evaluate", []).recipe
    tokenizer = load_tokenizer(recipe.model, recipe.data, is_finished=True)
    shape = read_shape(recipe, load_model_config(recipe), tokenizer)
    groups = make_groups(choose_layout(recipe, shape), GROUP_TIMEOUT)
    plan = settle(recipe, shape, choose_levers(recipe, shape, None).levers)
    told = report if groups.is_first else _ignore
    told("loading the model")
    engine = build_for_answers(plan, groups, device, told)
    stop_tokens = agree_on_stop_tokens(engine, tokenizer)
    batching = make_eval_batching(shape, plan.resolved)
    return EvaluatedModel(engine, tokenizer, shape, stop_tokens, batching, recipe.data.max_length)


def _ignore(_: str) -> None:
    return None


OPTION = "--path"
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


@dataclass(frozen=True)
class Found:
    """The documents of all lengths, the shortest length first, what is said of the rest, and the prompts of turns with
    calls."""

    documents: tuple[CutDocument, ...]
    notes: tuple[str, ...]
    prompts: tuple[TaskPrompt, ...] = ()


def read_documents(sets: Sequence[Mapping[str, Any]], tokenizer: Any, lengths: Sequence[int], number: int) -> Found:
    """For each length the first `number` documents that reach it, cut there. `sets`: data sets as a recipe writes
    them. Raises RecipeError where no document reaches any length, or a row cannot be read."""
    wanted: dict[int, list[CutDocument]] = {length: [] for length in sorted(lengths)}
    num_read = num_short = longest = 0
    for ids, flags, source in _walk(sets, Encoder(tokenizer)):
        tokens = np.asarray(ids, np.int64)
        targets = tokens if flags is None else np.where(flags & TARGET, tokens, IGNORE_INDEX)
        num_read, longest = num_read + 1, max(longest, len(tokens))
        num_short += len(tokens) < min(wanted)
        for length, found in wanted.items():
            if len(found) < number and len(tokens) >= length and (targets[1:length] != IGNORE_INDEX).any():
                found.append(CutDocument(length, len(found), source, tokens[:length].copy(), targets[:length].copy()))
        if all(len(found) == number for found in wanted.values()):
            break
    if not any(wanted.values()):
        message = f"no document has {min(wanted):,} tokens: the longest of {num_read:,} has {longest:,}"
        raise RecipeError([Problem(OPTION, message, "use a shorter --max-length, or name longer documents")])
    read = format_count(num_read, "document")
    notes = [
        f"the loss at {length:,} tokens is that of {len(found):,} of {read}"
        for length, found in wanted.items()
        if len(found) < number
    ]
    if num_short:
        short = format_count(num_short, "document")
        notes.append(f"no loss is measured on {short} shorter than {min(wanted):,} tokens")
    return Found(tuple(document for found in wanted.values() for document in found), tuple(notes))


def read_chats(sets: Sequence[Mapping[str, Any]], tokenizer: Any) -> Iterator[tuple[Ids, Flags | None]]:
    """The chats of data sets as they are trained where each turn stands behind the prompt that the model gets."""
    stops = read_stop_tokens(str(tokenizer.name_or_path), None, tokenizer)
    encoder = Encoder(tokenizer, EncoderSettings(assistant_only_loss=True, on_rewritten_turns="split"), stops)
    for tokens, flags, _ in _walk(sets, encoder):
        yield tokens, flags


def _walk(sets: Sequence[Mapping[str, Any]], encoder: Encoder) -> Iterator[tuple[Ids, Flags | None, str]]:
    """Yields each document's tokens, their flags, and where it stands."""
    hashes = FileHashes(Path(os.devnull))  # hashes are not kept
    try:
        for number, settings in enumerate(sets):
            source = open_source(Dataset(**settings), OPTION, number, hashes)
            variables = {**get_variables(encoder.tokenizer), **source.variables}
            kind, reading = source.find_kind(), Reading(source.columns, source.train_field, variables)
            for block in source.walk_blocks():
                encoded = encode_block(encoder, kind, block, reading)
                if encoded.bad:
                    file, line, message = encoded.bad[0]
                    hint = "mend the row, or take it out"
                    raise RecipeError([Problem(OPTION, f"{file}, row {line}: {message}", hint)])
                batch, end = encoded.batch, 0
                for size, file, line in zip(batch.lengths, batch.files, batch.lines, strict=True):
                    flags = None if batch.flags is None else batch.flags[end : end + size]
                    yield batch.ids[end : end + size], flags, f"{file}:{line}" if source.has_lines else file
                    end += size
    except DataError as error:
        raise RecipeError([Problem(OPTION, each.message, each.hint, each.where) for each in error.problems]) from None
    except RecipeError as error:
        raise RecipeError([_rename(problem) for problem in error.problems]) from None


def _rename(problem: Problem) -> Problem:
    hint = problem.hint.replace(f"{OPTION}.type", "a type in data.eval_datasets of the run")
    return Problem(OPTION, problem.message, hint, problem.where)


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
    model: EvaluatedModel,
    documents: Sequence[CutDocument],
    done: Collection[str],
    record: Callable[[dict[str, Any]], None],
) -> None:
    """Collective over all ranks, which pass the same documents and the same `done`: the names of those that are
    measured already. `record` gets the line of each document; every rank has them."""
    engine, groups, batching = model.engine, model.groups, model.batching
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
