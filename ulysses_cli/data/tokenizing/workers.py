"""Tokenizes blocks into batches of documents, in this process or in several. The order of the blocks stays. Of two
answers to one prompt, finds how many tokens both can read from one copy.

Each branch is rendered and tokenized whole, then their tokens are compared: a prompt tokenized alone may end in a
token that the answer would merge with."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ulysses_cli.data.sources import open_source
from ulysses_cli.data.store import TARGET, WANTED, Batch, Flags, Ids, Weights, count_shared, hash_document
from ulysses_cli.data.tokenizing.encoder import Encoder, EncoderSettings
from ulysses_cli.data.tokenizing.lost_parts import LostCounts
from ulysses_cli.data.tokenizing.renderer import TemplateOutOfBounds
from ulysses_cli.data.tokenizing.tokenizer import get_variables, load_tokenizer
from ulysses_cli.data.transaction import FileHashes
from ulysses_cli.plan.problem import Problem, RecipeError
from ulysses_cli.plan.recipe.recipe import Model
from ulysses_cli.plan.recipe.sections import Data, Dataset, RowType
from ulysses_cli.plan.rules.files import CHAT_TYPES
from ulysses_cli.readers.blocks import Block, count_blank, walk_rows
from ulysses_cli.readers.columns import PLAIN, PlainText, Reading, Sample, has_field, list_columns, rename
from ulysses_cli.readers.pairs import Answers, AnySample, Judged, Pair, Weighted, read_row, swap_answers
from ulysses_cli.readers.problems import BadRow, DataError, NoTemplate, make_where


@dataclass(frozen=True, eq=False)
class Branch:
    """Tokens of prompt and answer, and their flags."""

    ids: Ids
    flags: Flags

    @property
    def is_target(self) -> NDArray[np.bool_]:
        return (self.flags & TARGET) > 0


@dataclass(frozen=True, eq=False)
class TokenPair:
    """`num_shared`: the first tokens of both, which one copy can serve. The token before the first target is not one of
    them, since it predicts another token in each branch."""

    chosen: Branch
    rejected: Branch
    num_shared: int


def encode_pair(encoder: Encoder, pair: Pair) -> TokenPair:
    """Raises BadRow if an answer has no target of its own. The encoder's `lost` and `counts` are those of both."""
    encoded, lost, counts = [], [], Counter[str]()
    for sample in (pair.chosen, pair.rejected):
        encoded.append(encoder.encode(sample))
        lost += encoder.lost
        counts.update(encoder.counts)
    (first, first_flags), (second, second_flags) = encoded
    if np.array_equal(first, second):
        raise BadRow("chosen and rejected answers have the same tokens: there is nothing to prefer")
    if first_flags is None or second_flags is None:  # texts: what differs is the answer
        shortest = min(len(first), len(second))
        is_other = first[:shortest] != second[:shortest]
        num_common = int(np.argmax(is_other)) if is_other.any() else shortest
        first_flags, second_flags = (
            np.where(np.arange(len(ids)) >= num_common, TARGET, 0).astype(np.uint8) for ids in (first, second)
        )
    branches = Branch(first, first_flags), Branch(second, second_flags)
    for name, branch in zip(("chosen", "rejected"), branches, strict=True):
        if not branch.is_target[1:].any():
            raise BadRow(f"the {name} answer has no target")
    both = (first, first_flags), (second, second_flags)
    num_shared = min(count_shared(*both), count_shared(*both[::-1]))
    encoder.lost, encoder.counts = lost, {**counts, "shared tokens": num_shared}
    return TokenPair(*branches, num_shared)


def encode_judged(encoder: Encoder, judged: Judged) -> tuple[Branch, Branch]:
    """The answer, whose targets say whether it is wanted, and the other one. Raises BadRow if one has no target."""
    other = encoder.encode(judged.answer if judged.other is None else judged.other)
    branches = []
    for name, (ids, flags) in (("answer", encoder.encode(judged.answer)), ("answer of the row before", other)):
        if flags is None or not (flags[1:] & TARGET).any():
            raise BadRow(f"the {name} has no target")
        branches.append(Branch(ids, flags))
    answer, rest = branches
    if judged.is_wanted:
        answer = Branch(answer.ids, answer.flags | np.where(answer.is_target, WANTED, 0).astype(np.uint8))
    return answer, rest


Document = tuple[Ids, Flags | None, Weights | None]  # its tokens, their flags, and their weights as targets
BLOCKS_PER_WORKER = 2  # submitted at a time, so that no worker waits for its next block


@dataclass(frozen=True)
class TokenizingTask:
    """The settings of a worker process, sent to it once, when it starts."""

    model: Model
    data: Data
    kind: RowType
    settings: EncoderSettings
    reading: Reading = PLAIN
    stops: tuple[str, ...] = ()


@dataclass
class EncodedBlock:
    """A block's documents as tokens, its bad rows, the number of its blank rows, what its template did not show, and
    `counts` of its chats' turns. All documents of a chat have one hash, and so have pairs of one prompt.
    `seen`: which of the columns that the recipe names its rows have; `columns`: those of a row."""

    batch: Batch
    num_bytes: int
    bad: list[tuple[str, int, str]] = field(default_factory=list)  # file, line, message
    remedies: list[str] = field(default_factory=list)  # of the bad rows, each once
    num_blank: int = 0
    num_in_pieces: int = 0
    num_whole: int = 0
    lost: LostCounts = field(default_factory=LostCounts)
    counts: dict[str, int] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)
    columns: str = ""


def encode_block(encoder: Encoder, kind: RowType, block: Block, reading: Reading = PLAIN) -> EncodedBlock:
    """Encodes every row of a block as a document, or reports it as a bad row."""
    texts: list[str] = []
    lines: list[int] = []
    encoded: list[Document] = []
    hashes: list[int] = []
    bad: list[tuple[str, int, str]] = []
    remedies: dict[str, None] = {}
    lost, counts = LostCounts(), Counter[str]()
    encoder.num_in_pieces = encoder.num_whole = 0
    seen, columns = set[str](), ""
    samples: list[tuple[int, AnySample | BadRow]] = []
    for line, row in walk_rows(block):
        if not isinstance(row, BadRow):
            if kind in CHAT_TYPES and isinstance(row, dict) and rename(row, reading.names).get("text"):
                counts["unread text"] += 1
            if reading.names:
                seen.update(name for name, given in reading.names.items() if given in row)
                columns = columns or list_columns(row)
            if reading.named_field not in ("", *seen) and has_field(row, reading.named_field):
                seen.add(reading.named_field)
        samples.append((line, _read(kind, row, encoder, reading)))
    swapped = iter(swap_answers([sample for _, sample in samples if isinstance(sample, Judged)]))
    samples = [(line, next(swapped) if isinstance(sample, Judged) else sample) for line, sample in samples]
    encoder.announce([branch for _, sample in samples for branch in _list_branches(sample)])
    for line, sample in samples:
        try:
            if isinstance(sample, BadRow):
                raise sample
            if isinstance(sample, PlainText):
                texts.append(sample.text)
                lines.append(line)
                continue
            with _naming(encoder, block, line):
                made, key = _encode_sample(encoder, sample)
            lost.add_chat(block.file, line, encoder.lost)
            counts.update(encoder.counts)
            encoded += made
            lines += [line] * len(made)
            hashes += [hash_document(key)] * len(made)
        except (BadRow, TemplateOutOfBounds) as error:
            if encoder.renderer.failure:
                hint = "name another template with data.chat_template, or check what the template does with this row"
                where = make_where(block.file, line, has_lines=block.kind == "lines")
                raise DataError([Problem("", encoder.renderer.failure, hint, where)]) from None
            bad.append((block.file, line, str(error)))
            if remedy := getattr(error, "remedy", ""):
                remedies[remedy] = None
    for ids in _encode_texts(encoder, texts, block, lines) if texts else ():
        encoded.append((ids, None, None))
        hashes.append(hash_document(ids))
    documents = [ids for ids, *_ in encoded]
    flags, weights = None, None
    if any(mask is not None for _, mask, _ in encoded):
        flags = np.concatenate([np.full(len(i), TARGET, np.uint8) if f is None else f for i, f, _ in encoded])
    if any(given is not None for *_, given in encoded):
        weights = np.concatenate([np.ones(len(i), np.float32) if w is None else w for i, _, w in encoded])
    batch = Batch(
        np.concatenate(documents) if documents else np.empty(0, encoder.dtype),
        [len(ids) for ids in documents],
        hashes,
        [block.file] * len(documents),
        lines,
        flags,
        weights,
    )
    numbers = (count_blank(block), encoder.num_in_pieces, encoder.num_whole)
    return EncodedBlock(batch, block.num_bytes, bad, list(remedies), *numbers, lost, dict(counts), seen, columns)


def _weigh(ids: Ids, flags: Flags | None, weight: float | list[float]) -> Document:
    """Of a token without weight nothing is learned."""
    flags = np.full(len(ids), TARGET, np.uint8) if flags is None else flags
    weights = np.broadcast_to(np.asarray(weight, np.float32), len(ids))
    return ids, np.where(weights > 0, flags, flags & ~np.uint8(TARGET)), weights


def _list_branches(sample: AnySample | BadRow) -> list[Sample]:
    if isinstance(sample, BadRow):
        return []
    if isinstance(sample, Weighted):
        return [sample.sample]
    if isinstance(sample, Answers):
        return [each.sample for each in sample.samples]
    if isinstance(sample, Judged):
        return [each for each in (sample.other, sample.answer) if each is not None]
    return [sample.chosen, sample.rejected] if isinstance(sample, Pair) else [sample]


def _encode_sample(encoder: Encoder, sample: AnySample) -> tuple[list[Document], Ids]:
    """The documents of a sample, and the tokens by which equal ones are known: of several answers those that they
    share, since a prompt that is trained on is not evaluated with other answers."""
    if isinstance(sample, Judged):
        judged = encode_judged(encoder, sample)
        answer = judged[0]
        return [(each.ids, each.flags, None) for each in judged], answer.ids[: int(np.argmax(answer.is_target))]
    if isinstance(sample, Pair):
        pair = encode_pair(encoder, sample)
        branches = (pair.chosen, pair.rejected)
        key = pair.chosen.ids[: pair.num_shared] if pair.num_shared else np.concatenate([each.ids for each in branches])
        return [(each.ids, each.flags, None) for each in branches], key
    if isinstance(sample, Answers):
        return _encode_answers(encoder, sample)
    made = encoder.encode_documents(sample.sample if isinstance(sample, Weighted) else sample)
    key = np.concatenate([ids for ids, _ in made])
    if isinstance(sample, Weighted):
        return [_weigh(*each, sample.weight) for each in made], key
    return [(*each, None) for each in made], key


def _encode_answers(encoder: Encoder, answers: Answers) -> tuple[list[Document], Ids]:
    """The encoder's `lost` and `counts` are those of all."""
    documents, lost, counts = list[Document](), [], Counter[str]()
    for each in answers.samples:
        documents += [_weigh(*made, each.weight) for made in encoder.encode_documents(each.sample)]
        lost += encoder.lost
        counts.update(encoder.counts)
    (first, flags, _), stem = documents[0], documents[-1]
    assert flags is not None
    assert stem[1] is not None
    shared = (count_shared((stem[0], stem[1]), (ids, own)) for ids, own, _ in documents[:-1] if own is not None)
    counts["shared tokens"] = sum(shared)
    encoder.lost, encoder.counts = lost, dict(counts)
    num_asked = int(np.argmax((flags & TARGET) > 0))
    return documents, first[:num_asked] if num_asked else np.concatenate([ids for ids, *_ in documents])


def _encode_texts(encoder: Encoder, texts: list[str], block: Block, lines: list[int]) -> list[Ids]:
    try:
        return encoder.encode_texts(texts)
    except BaseException as error:  # the library's panics are no Exceptions
        if not _is_failure(error):
            raise
    documents = []
    for text, line in zip(texts, lines, strict=True):
        with _naming(encoder, block, line):
            documents += encoder.encode_texts([text])
    return documents


@contextmanager
def _naming(encoder: Encoder, block: Block, line: int) -> Iterator[None]:
    """Says at which row a tokenizer fails: a pattern of its own may give up on a text, and its library may panic."""
    try:
        yield
    except BaseException as error:
        if not _is_failure(error):
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        message = f"the tokenizer of {encoder.tokenizer.name_or_path or 'this model'} fails at this row: {reason}"
        where = make_where(block.file, line, has_lines=block.kind == "lines")
        raise DataError([Problem("", message, "name another tokenizer, or leave this row out", where)]) from None


def _is_failure(error: BaseException) -> bool:
    ours = (BadRow, DataError, NoTemplate, RecipeError, TemplateOutOfBounds)
    is_panic = type(error).__name__ == "PanicException"
    return is_panic or (isinstance(error, Exception) and not isinstance(error, ours))


def _read(kind: RowType, row: dict[str, Any] | BadRow, encoder: Encoder, reading: Reading) -> AnySample | BadRow:
    try:
        if isinstance(row, BadRow):
            return row
        return read_row(kind, row, has_template=encoder.has_template, reading=reading)
    except BadRow as error:
        return error


def encode_blocks(
    blocks: Iterator[Block], task: TokenizingTask, tokenizer: Any, num_workers: int
) -> Iterator[EncodedBlock]:
    """Encodes blocks in their order. Starts no other process for one block or one worker."""
    first = [block for _, block in zip(range(2), blocks, strict=False)]
    if num_workers == 1 or len(first) < 2:
        encoder = Encoder(tokenizer, task.settings, task.stops)
        for block in _chain(first, blocks):
            yield encode_block(encoder, task.kind, block, task.reading)
        return
    context = multiprocessing.get_context("spawn")
    lifeline, parent_end = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(num_workers, context, _start_worker, (task, lifeline))
    waiting: deque[Future[EncodedBlock]] = deque()
    try:
        for block in _chain(first, blocks):
            waiting.append(pool.submit(_encode, block))
            if len(waiting) >= BLOCKS_PER_WORKER * num_workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        hint = "it may have run out of memory; use fewer data.num_workers"
        raise DataError([Problem("data.num_workers", "a worker was killed while it tokenized", hint)]) from None
    finally:
        parent_end.close()  # workers see the end of the pipe and stop at once
        lifeline.close()
        pool.shutdown(wait=False, cancel_futures=True)


def _chain(first: list[Block], rest: Iterator[Block]) -> Iterator[Block]:
    yield from first
    yield from rest


_encoder: Encoder
_task: TokenizingTask


def _start_worker(task: TokenizingTask, lifeline: Connection) -> None:
    global _encoder, _task
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process handles Ctrl-C for all
    threading.Thread(target=_exit_with_parent, args=(lifeline,), daemon=True).start()
    _encoder, _task = Encoder(load_tokenizer(task.model, task.data), task.settings, task.stops), task


def _exit_with_parent(lifeline: Connection) -> None:
    """Ends this worker when the main process closes its end of the pipe or ends."""
    try:
        lifeline.recv_bytes()
    except (EOFError, OSError):
        os._exit(1)


def _encode(block: Block) -> EncodedBlock:
    return encode_block(_encoder, _task.kind, block, _task.reading)


def walk_documents(
    sets: Sequence[Mapping[str, Any]], encoder: Encoder, key: str
) -> Iterator[tuple[Ids, Flags | None, str]]:
    """Reads data sets, as a recipe writes them, in this process and without a token store. Yields each document's
    tokens, their flags, and where it stands. Raises RecipeError for `key`."""
    hashes = FileHashes(Path(os.devnull))  # hashes are not kept
    try:
        for number, settings in enumerate(sets):
            source = open_source(Dataset(**settings), key, number, hashes)
            variables = {**get_variables(encoder.tokenizer), **source.variables}
            kind, reading = source.find_kind(), Reading(source.columns, source.train_field, variables)
            for block in source.walk_blocks():
                encoded = encode_block(encoder, kind, block, reading)
                if encoded.bad:
                    file, line, message = encoded.bad[0]
                    hint = "mend the row, or take it out"
                    raise RecipeError([Problem(key, f"{file}, row {line}: {message}", hint)])
                batch, end = encoded.batch, 0
                for size, file, line in zip(batch.lengths, batch.files, batch.lines, strict=True):
                    flags = None if batch.flags is None else batch.flags[end : end + size]
                    yield batch.ids[end : end + size], flags, f"{file}:{line}" if source.has_lines else file
                    end += size
    except DataError as error:
        raise RecipeError([Problem(key, each.message, each.hint, each.where) for each in error.problems]) from None
