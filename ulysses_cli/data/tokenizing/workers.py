"""Blocks -> batches of tokens, in this process or in several, in the order of the blocks either way."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from ulysses_cli.data.problems import BadRow, DataError, make_where
from ulysses_cli.data.sources.blocks import Block, count_blank, walk_rows
from ulysses_cli.data.sources.columns import Kind, PlainText, Sample, read_sample
from ulysses_cli.data.store import TARGET, Batch, Flags, Ids, hash_document
from ulysses_cli.data.tokenizing.encoder import Encoder, EncoderSettings
from ulysses_cli.data.tokenizing.renderer import EndlessTemplate
from ulysses_cli.data.tokenizing.tokenizer import load_tokenizer
from ulysses_cli.plan.problem import Problem
from ulysses_cli.plan.recipe.recipe import Data, Model

NUM_AHEAD = 2  # blocks in flight for each worker


@dataclass(frozen=True)
class TokenizingTask:
    """What a worker must know. Travels once."""

    model: Model
    data: Data
    kind: Kind
    settings: EncoderSettings


@dataclass
class Done:
    """A block's documents and what became of the rest of it."""

    batch: Batch
    num_bytes: int
    bad: list[tuple[str, int, str]] = field(default_factory=list)  # file, line, message
    num_blank: int = 0
    num_in_pieces: int = 0
    num_whole: int = 0


def encode_block(encoder: Encoder, kind: Kind, block: Block) -> Done:
    """Every row of a block, as a document or as a bad row."""
    texts: list[str] = []
    lines: list[int] = []
    encoded: list[tuple[Ids, Flags | None]] = []
    bad: list[tuple[str, int, str]] = []
    encoder.num_in_pieces = encoder.num_whole = 0
    samples = [(line, _read(kind, row, encoder)) for line, row in walk_rows(block)]
    encoder.announce([sample for _, sample in samples if not isinstance(sample, BadRow)])
    for line, sample in samples:
        try:
            if isinstance(sample, BadRow):
                raise sample
            if isinstance(sample, PlainText):
                texts.append(sample.text)
            else:
                encoded.append(encoder.encode(sample))
            lines.append(line)
        except (BadRow, EndlessTemplate) as error:
            if encoder.renderer.broken:
                hint = "name another template with data.chat_template, or look at what this row makes of this one"
                where = make_where(block.file, line, has_lines=block.kind == "lines")
                raise DataError([Problem("", encoder.renderer.broken, hint, where)]) from None
            bad.append((block.file, line, str(error)))
    encoded += [(ids, None) for ids in encoder.encode_texts(texts)] if texts else []
    ids = [found for found, _ in encoded]
    flags = None
    if any(found is not None for _, found in encoded):
        flags = np.concatenate([np.full(len(i), TARGET, np.uint8) if f is None else f for i, f in encoded])
    batch = Batch(
        np.concatenate(ids) if ids else np.empty(0, encoder.dtype),
        [len(found) for found in ids],
        [hash_document(found) for found in ids],
        [block.file] * len(ids),
        lines,
        flags,
    )
    return Done(batch, block.num_bytes, bad, count_blank(block), encoder.num_in_pieces, encoder.num_whole)


def _read(kind: Kind, row: dict[str, Any] | BadRow, encoder: Encoder) -> Sample | BadRow:
    try:
        return row if isinstance(row, BadRow) else read_sample(kind, row, has_template=encoder.has_template)
    except BadRow as error:
        return error


def encode_blocks(blocks: Iterator[Block], task: TokenizingTask, tokenizer: Any, num_workers: int) -> Iterator[Done]:
    """In the blocks' order. One block, or one worker, needs no other process."""
    first = [block for _, block in zip(range(2), blocks, strict=False)]
    if num_workers == 1 or len(first) < 2:
        encoder = Encoder(tokenizer, task.settings)
        for block in _chain(first, blocks):
            yield encode_block(encoder, task.kind, block)
        return
    context = multiprocessing.get_context("spawn")
    lifeline, hold = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(num_workers, context, _start_worker, (task, lifeline))
    waiting: deque[Future[Done]] = deque()
    try:
        for block in _chain(first, blocks):
            waiting.append(pool.submit(_work, block))
            if len(waiting) >= NUM_AHEAD * num_workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        hint = "it may have run out of memory; use fewer data.num_workers"
        raise DataError([Problem("data.num_workers", "a worker was killed while it tokenized", hint)]) from None
    finally:
        hold.close()  # workers stop at once, whatever they are at
        lifeline.close()
        pool.shutdown(wait=False, cancel_futures=True)


def _chain(first: list[Block], rest: Iterator[Block]) -> Iterator[Block]:
    yield from first
    yield from rest


_encoder: Encoder
_kind: Kind


def _start_worker(task: TokenizingTask, lifeline: Connection) -> None:
    global _encoder, _kind
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process answers for all
    threading.Thread(target=_follow, args=(lifeline,), daemon=True).start()
    _encoder, _kind = Encoder(load_tokenizer(task.model, task.data), task.settings), task.kind


def _follow(lifeline: Connection) -> None:
    """End when the first process lets go of its end, or is no more."""
    try:
        lifeline.recv_bytes()
    except (EOFError, OSError):
        os._exit(1)


def _work(block: Block) -> Done:
    return encode_block(_encoder, _kind, block)
