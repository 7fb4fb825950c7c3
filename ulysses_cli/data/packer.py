"""Chooses which documents train, which evaluate, and how often an epoch repeats each, by content and seed alone, and
packs them into rows on disk. Counts every document and token that was cut, dropped or skipped.  Documents of equal
content go to the same split: no copy of an evaluation document is trained on. Reads target flags, never token ids;
plan/rows/packing.py decides which rows there are."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ulysses_cli.data.store import TARGET, Split, TokenStore, UnitStore, save_rows
from ulysses_cli.plan.problem import Problem, RecipeError
from ulysses_cli.plan.rows.packing import (
    Piece,
    RowCost,
    RowPieces,
    cut_documents,
    pack_alone,
    pack_documents,
    pack_stream,
)
from ulysses_cli.plan.units import format_count
from ulysses_cli.readers.problems import DataError, shorten

Keys = NDArray[np.uint64]
Lengths = NDArray[np.int64]
MAX_COPIES = 4  # more repetitions teach little (arXiv 2305.16264)


@dataclass(frozen=True)
class Portion:
    """What an epoch takes of one source: copies of each document, or a share of the epoch's tokens; and between which
    lengths documents are taken."""

    weight: float = 1.0
    share: float | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None

    def allows(self, lengths: Lengths) -> NDArray[np.bool_]:
        return (lengths >= (self.min_tokens or 0)) & (lengths <= (self.max_tokens or np.iinfo(np.int64).max))


@dataclass(frozen=True)
class Selection:
    """How often each document stands in an epoch of training, which documents are held out for evaluation, and which
    have a length that their source allows. The arrays run over the documents of all training sources. `weights`:
    copies of each source's tokens."""

    copies: NDArray[np.int64]
    is_eval: NDArray[np.bool_]
    is_allowed: NDArray[np.bool_]
    weights: tuple[float, ...]


def select_documents(
    hashes: Sequence[Keys],
    lengths: Sequence[Lengths],
    usable: Sequence[Lengths],
    portions: Sequence[Portion],
    eval_share: float,
    seed: int,
    *,
    has_joined: bool = False,
) -> Selection:
    """`hashes`, `lengths` and `usable` hold one array per source: of documents' contents, of their tokens, and of those
    that rows will hold."""
    allowed = [portion.allows(each) for portion, each in zip(portions, lengths, strict=True)]
    for index, (portion, each) in enumerate(zip(portions, allowed, strict=True)):
        if len(each) and not each.any():
            raise RecipeError([_explain_bounds(index, portion, lengths[index])])
    together = np.concatenate([*hashes, np.empty(0, np.uint64)])
    is_allowed = np.concatenate([*allowed, np.empty(0, bool)])
    is_eval = np.zeros(len(together), bool)
    is_eval[is_allowed] = _hold_out(together[is_allowed], eval_share, seed, has_joined=has_joined)
    bounds = np.cumsum([0, *map(len, hashes)])
    places = [slice(first, last) for first, last in pairwise(bounds.tolist())]
    left = [is_allowed[at] & ~is_eval[at] for at in places]
    tokens = [int(each[is_left].sum()) for each, is_left in zip(usable, left, strict=True)]
    weights = _compute_weights(portions, tokens)
    copies = np.zeros(len(together), np.int64)
    for index, (at, is_left, weight) in enumerate(zip(places, left, weights, strict=True)):
        sizes = None if portions[index].share is None else usable[index]
        copies[at] = _count_copies(hashes[index], is_left, sizes, weight, seed)
        if not copies[at].any() and is_left.any():
            kind = "weight" if portions[index].share is None else "share"
            what = f"{weight:g} of {format_count(int(is_left.sum()), 'document')} is not one document"
            hint = f"use a larger {kind}, or leave the source out"
            raise RecipeError([Problem(f"data.datasets.{index}.{kind}", what, hint)])
    return Selection(copies, is_eval, is_allowed, tuple(weights))


def _explain_bounds(index: int, portion: Portion, lengths: Lengths) -> Problem:
    name = "min_tokens" if portion.min_tokens is not None and int(lengths.max()) < portion.min_tokens else "max_tokens"
    what = f"documents have {int(lengths.min()):,} to {int(lengths.max()):,} tokens, none is between the bounds"
    return Problem(f"data.datasets.{index}.{name}", what, "use other bounds, or leave the source out")


def _compute_weights(portions: Sequence[Portion], tokens: Sequence[int]) -> list[float]:
    """Copies of each source: as the recipe says, or those that give its share of an epoch, which has as many tokens as
    the sources together."""
    total, weights, problems = sum(tokens), [], []
    for index, (portion, own) in enumerate(zip(portions, tokens, strict=True)):
        if portion.share is None:
            weights.append(portion.weight)
            continue
        weights.append(portion.share * total / max(1, own))
        if weights[-1] > MAX_COPIES:
            what = f"{portion.share:g} of an epoch of {total:,} tokens is {weights[-1]:.3g} copies of {own:,} tokens"
            hint = f"write {MAX_COPIES * own / total:.2g} or less, since more than {MAX_COPIES} copies teach little"
            problems.append(Problem(f"data.datasets.{index}.share", what, f"{hint}; or name more documents"))
    if problems:
        raise RecipeError(problems)
    return weights


def _hold_out(hashes: Keys, share: float, seed: int, *, has_joined: bool) -> NDArray[np.bool_]:
    """Marks the documents to hold out: a share of them, rounded, and at least one. More if the last one chosen has
    copies."""
    if not share or not len(hashes):
        return np.zeros(len(hashes), bool)
    keys = mix(hashes, seed, salt=1)
    num_chosen = max(1, round(share * len(hashes)))
    chosen = keys <= np.partition(keys, num_chosen - 1)[num_chosen - 1]
    if chosen.all():
        count = f"are {len(hashes):,} documents of equal content" if len(hashes) > 1 else "is 1 document"
        hint = "set data.eval_split: 0 and name data.eval_datasets"
        hint += ", or join_files: false to make each file of a folder a document" if has_joined else ""
        raise RecipeError([Problem("data.eval_split", f"nothing is left to train on: there {count}", hint)])
    return chosen


def _count_copies(
    hashes: Keys, is_left: NDArray[np.bool_], sizes: Lengths | None, weight: float, seed: int
) -> NDArray[np.int64]:
    """Repeats every document by the weight's whole part, and the weight's fraction of the documents, or with `sizes` of
    their tokens, once more. `is_left` marks the documents that may be taken."""
    copies, fraction = is_left * int(weight), weight - int(weight)
    if not fraction:
        return copies
    left = np.flatnonzero(is_left)
    keys = mix(hashes ^ mix(np.arange(len(hashes), dtype=np.uint64), seed, salt=2), seed, salt=3)
    order = left[np.argsort(keys[left], kind="stable")]
    if sizes is None:
        num_more = round(fraction * len(left))
    else:
        sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes[order])])
        num_more = int(np.abs(sums - fraction * sums[-1]).argmin())
    copies[order[:num_more]] += 1
    return copies


def mix(keys: Keys, seed: int, salt: int) -> Keys:
    """A pseudo-random number for each key (splitmix64's finalizer)."""
    start = (seed * 4 + salt + 1) * 0x9E3779B97F4A7C15 % 2**64
    mixed: Any = keys + np.uint64(start)  # wraps modulo 2**64, as splitmix64 does
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return np.asarray(mixed ^ (mixed >> np.uint64(31)), np.uint64)


# Attention's share of the work at a hidden size of 4096 (per pair 12 x layers x hidden FLOPs, per token
# 72 x layers x hidden^2). Fixed for all models, so that rows depend on the seed and the data alone.
BANDS = tuple(4**power * 1024 for power in range(1, 5))  # 4Ki to 256Ki tokens
WORK = RowCost(per_token=1.0, per_pair=1 / (6 * 4096))


@dataclass(frozen=True)
class RowSettings:
    """The settings that decide the rows, next to the documents. All of them are part of the rows' hash."""

    max_length: int
    packing: Literal["documents", "stream", "off"] = "documents"
    strategy: Literal["auto", "split", "truncate", "drop", "raise"] = "auto"
    attend_across_documents: bool = False
    eval_share: float = 0.0
    seed: int = 0
    skip_untrainable: bool = False
    pad_id: int = 0
    shares_prompts: bool = False


@dataclass
class Counts:
    """How many documents, pieces and tokens of one source in one split were kept, cut or left out. Documents, tokens
    and `kept_*` are totals; the other fields explain the difference between them."""

    documents: int = 0
    tokens: int = 0
    copies: int = 0
    other_length_documents: int = 0  # shorter or longer than the source allows
    other_length_tokens: int = 0
    left_out_documents: int = 0
    left_out_tokens: int = 0
    split_documents: int = 0
    torn_turns: int = 0
    truncated_documents: int = 0
    truncated_tokens: int = 0
    dropped_documents: int = 0
    dropped_tokens: int = 0
    untrainable_pieces: int = 0  # of them cut_off_pieces: of a document that has targets elsewhere
    untrainable_tokens: int = 0
    cut_off_pieces: int = 0
    kept_pieces: int = 0
    kept_tokens: int = 0


@dataclass
class _SplitPieces:
    """The pieces of one split, source after source, the counts of each source, and the pieces without a target."""

    pieces: list[Piece] = field(default_factory=list)
    counts: list[Counts] = field(default_factory=list)
    untrainable: list[Problem] = field(default_factory=list)
    num_untrainable: int = 0


def make_rows(
    folder: Path,
    stores: Sequence[TokenStore],
    portions: Sequence[Portion],
    settings: RowSettings,
) -> dict[str, Any]:
    """Writes both splits and returns the facts of their manifest. The first len(portions) stores are training sources,
    the others evaluation sources. Documents of a unit stand in the same row, one after the other, with one copy of what
    they begin with where prompts are shared."""
    num_train, documents = len(portions), stores
    document_bases = np.cumsum([0, *(len(store) for store in stores)])
    is_paired = all(store.manifest.get("kind") in ("preference", "unpaired") for store in stores)
    units = list[UnitStore]()
    if is_paired or settings.shares_prompts:
        shares = settings.shares_prompts
        stores = units = [UnitStore(store.folder, settings.max_length, shares_prompts=shares) for store in stores]
    bases = np.cumsum([0, *(len(store) for store in stores)])
    has_joined = any(store.manifest.get("is_joined") for store in stores)
    chosen = select_documents(
        [store.hashes for store in stores[:num_train]],
        [np.asarray(store.lengths) for store in stores[:num_train]],
        [_count_usable(store, settings) for store in stores[:num_train]],
        portions,
        settings.eval_share,
        settings.seed,
        has_joined=has_joined,
    )
    num_more = int(bases[-1] - bases[num_train])
    copies: dict[Split, NDArray[np.int64]] = {
        "train": np.concatenate([chosen.copies, np.zeros(num_more, np.int64)]),
        "eval": np.concatenate([chosen.is_eval.astype(np.int64), np.ones(num_more, np.int64)]),
    }
    facts: dict[str, Any] = {}
    for split, split_copies in copies.items():
        part = _SplitPieces()
        for index, store in enumerate(stores):
            at = slice(int(bases[index]), int(bases[index + 1]))
            is_own = split == "train" and index < num_train
            is_member = ~chosen.is_eval[at] if is_own else split_copies[at] > 0
            is_allowed = chosen.is_allowed[at] if is_own else is_member
            _add_source(part, store, split_copies[at], (is_member, is_allowed), int(bases[index]), settings)
        if part.num_untrainable and not settings.skip_untrainable:
            raise DataError(_explain_untrainable(part))
        rows = _pack(part.pieces, settings)
        rows = _part_units(rows, units, bases, document_bases) if units else rows
        targets = _count_row_targets(rows, documents, document_bases, settings)
        rows, targets, skipped = _leave_out(rows, targets, settings, split)
        if split == "train" and not len(rows):
            raise DataError([_explain_nothing(part, skipped)])
        if split == "eval" and (settings.eval_share or num_more) and not len(rows):
            hint = "use a larger data.max_length, or evaluate on other documents"
            raise RecipeError([Problem("data.eval_split", "no row is left to evaluate on", hint)])
        has_weights = any(store.weights is not None for store in documents)
        weights = _weigh_rows(rows, documents, document_bases, settings) if has_weights else None
        shared = np.concatenate([unit.shared for unit in units])[rows.documents] if units else [0] * len(rows.documents)
        save_rows(folder, split, rows, shared, targets, weights)
        facts[split] = {
            "num_rows": len(rows),
            "num_tokens": rows.count_tokens(),
            "num_targets": int(targets.sum()),
            "efficiency": rows.compute_efficiency(),
            "cut_by_rows": sum(start > 0 for start in rows.starts) if settings.packing == "stream" else 0,
            "untrainable_rows": skipped[0],
            "untrainable_row_tokens": skipped[1],
            "sources": [vars(counts) for counts in part.counts],
        }
    places = pairwise(bases[: num_train + 1].tolist())
    bands = [count_bands(store, chosen.copies[slice(*at)], settings) for store, at in zip(stores, places, strict=False)]
    facts["train"]["bands"] = {"up_to": BANDS, "tokens": bands}
    return {
        "weights": list(chosen.weights),
        "splits": facts,
        "leaked_documents": _count_leaked(stores, num_train, chosen.copies),
    }


def _add_source(
    part: _SplitPieces,
    store: TokenStore,
    copies: NDArray[np.int64],
    belongs: tuple[NDArray[np.bool_], NDArray[np.bool_]],
    base: int,
    settings: RowSettings,
) -> None:
    """Cuts one source's documents into pieces that fit a row, and counts what is lost. `belongs`: which documents are
    of this split, and which have a length that the source allows."""
    lengths, members = store.lengths, np.flatnonzero(copies)
    is_member, is_allowed = belongs
    left_out, has_other_length = is_member & is_allowed & (copies == 0), is_member & ~is_allowed
    counts = Counts(
        documents=int(is_member.sum()),
        tokens=int(lengths[is_member].sum()),
        copies=int(copies.sum()),
        other_length_documents=int(has_other_length.sum()),
        other_length_tokens=int(lengths[has_other_length].sum()),
        left_out_documents=int(left_out.sum()),
        left_out_tokens=int(lengths[left_out].sum()),
    )
    part.counts.append(counts)
    strategy, capacity = _choose_strategy(store, settings), settings.max_length
    if settings.packing == "stream":
        capacity = max(1, int(lengths.max(initial=1)))  # cuts nothing here: pack_stream cuts
    if strategy == "raise":
        _refuse_long(store, members, settings)
    chosen = lengths[members].tolist()
    numbers = members.tolist()
    cut = cut_documents(
        chosen,
        capacity,
        strategy,
        (lambda at: store.find_turns(numbers[at])) if store.manifest.get("has_turns") else None,
    )
    times = copies[members].tolist()
    is_split = {piece.document for piece in cut.pieces if piece.start}
    counts.split_documents = len(is_split)
    counts.torn_turns = cut.num_torn
    shortened = [at for at, length in enumerate(chosen) if length > capacity]
    if strategy == "truncate":
        counts.truncated_documents = sum(times[at] for at in shortened)
        counts.truncated_tokens = sum(times[at] * (chosen[at] - capacity) for at in shortened)
    elif strategy == "drop":
        counts.dropped_documents = sum(times[at] for at in shortened)
        counts.dropped_tokens = sum(times[at] * chosen[at] for at in shortened)
    for piece in cut.pieces:
        number, repeats = numbers[piece.document], times[piece.document]
        tokens = piece.stop - piece.start
        if not _count_targets(store, number, piece, settings):
            counts.untrainable_pieces += repeats
            counts.untrainable_tokens += repeats * tokens
            whole = Piece(number, 0, int(lengths[number]))
            if strategy == "split" and tokens < whole.stop and _count_targets(store, number, whole, settings):
                counts.cut_off_pieces += repeats  # e.g. a piece of a long prompt: the targets are in other pieces
                continue
            part.num_untrainable += 1
            if len(part.untrainable) < 100:
                part.untrainable.append(_describe_untrainable(store, number, piece))
            continue
        counts.kept_pieces += repeats
        counts.kept_tokens += repeats * tokens
        part.pieces += [Piece(base + number, piece.start, piece.stop)] * repeats


def _choose_strategy(store: TokenStore, settings: RowSettings) -> Literal["split", "truncate", "drop", "raise"]:
    if settings.packing == "stream":
        return "split"
    if settings.strategy != "auto":
        return settings.strategy
    return "raise" if store.manifest.get("has_turns") else "split"


def _count_usable(store: TokenStore, settings: RowSettings) -> NDArray[np.int64]:
    """How many tokens of each document rows will hold."""
    lengths, strategy = np.asarray(store.lengths, np.int64), _choose_strategy(store, settings)
    if strategy == "truncate":
        return np.minimum(lengths, settings.max_length)
    return np.where(lengths > settings.max_length, 0, lengths) if strategy == "drop" else lengths


def count_bands(store: TokenStore, copies: NDArray[np.int64], settings: RowSettings) -> list[int]:
    """Tokens of an epoch by the length of their documents: up to each of BANDS, and above."""
    tokens, bands = copies * _count_usable(store, settings), np.searchsorted(BANDS, store.lengths)
    return [int(tokens[bands == band].sum()) for band in range(len(BANDS) + 1)]


def _count_targets(store: TokenStore, document: int, piece: Piece, settings: RowSettings) -> int:
    if settings.attend_across_documents and store.flags is None:
        return piece.stop - piece.start
    if settings.attend_across_documents:
        _, flags = store.read(document, piece.start, piece.stop)
        return int(np.count_nonzero(flags & TARGET)) if flags is not None else 0
    return store.count_targets(document, piece.start, piece.stop)


def _pack(pieces: list[Piece], settings: RowSettings) -> RowPieces:
    if settings.packing == "documents":
        return pack_documents(pieces, settings.max_length, WORK)
    if settings.packing == "stream":
        return pack_stream(pieces, settings.max_length, settings.seed)
    return pack_alone(pieces, settings.max_length)


def _part_units(
    rows: RowPieces, stores: Sequence[UnitStore], bases: NDArray[Any], document_bases: NDArray[Any]
) -> RowPieces:
    """Each piece as the documents of its unit, of which others begin behind what they share with the first. `bases`:
    the number of each store's first unit, `document_bases`: of its first document."""
    parted = RowPieces(rows.capacity, array("q"), array("q"), array("q"), array("q", [0]))
    for row in range(len(rows)):
        for piece in rows.get_row(row):
            index = int(np.searchsorted(bases, piece.document, "right")) - 1
            store = stores[index]
            members = store.list_members(piece.document - int(bases[index]))
            for document in members:
                is_alone = len(members) == 1
                parted.documents.append(int(document_bases[index]) + document)
                parted.starts.append(piece.start if is_alone else int(store.shared[document]))
                parted.stops.append(piece.stop if is_alone else int(store.documents.lengths[document]))
        parted.offsets.append(len(parted.documents))
    return parted


def _count_row_targets(
    rows: RowPieces, stores: Sequence[TokenStore], bases: NDArray[Any], settings: RowSettings
) -> NDArray[np.int64]:
    """The number of positions with a label in each row."""
    documents = np.asarray(rows.documents, np.int64)
    starts, stops = np.asarray(rows.starts, np.int64), np.asarray(rows.stops, np.int64)
    offsets = np.asarray(rows.offsets, np.int64)
    sources = np.searchsorted(bases, documents, "right") - 1
    counts = np.maximum(stops - starts - 1, 0)
    is_follower = np.full(len(counts), settings.attend_across_documents)
    is_follower[offsets[:-1]] = False  # no token precedes a row's first token, so nothing predicts it
    counts += is_follower
    for index, store in enumerate(stores):
        if store.flags is None:
            continue
        for at in np.flatnonzero(sources == index).tolist():
            number, start, stop = int(documents[at] - bases[index]), int(starts[at]), int(stops[at])
            is_first_target = bool(store.flags[store.offsets[number] + start] & TARGET)
            counts[at] = store.count_targets(number, start, stop) + (is_first_target and bool(is_follower[at]))
    return np.add.reduceat(counts, offsets[:-1]) if len(counts) else np.empty(0, np.int64)


def _weigh_rows(
    rows: RowPieces, stores: Sequence[TokenStore], bases: NDArray[Any], settings: RowSettings
) -> list[float]:
    """The sum of the weights of each row's targets. What a piece begins with is predicted only where attention crosses
    documents and another piece precedes it."""
    sums = []
    for row in range(len(rows)):
        weight = 0.0
        for at, piece in enumerate(rows.get_row(row)):
            index = int(np.searchsorted(bases, piece.document, "right")) - 1
            first = piece.start + (0 if settings.attend_across_documents and at else 1)
            weight += stores[index].weigh_targets(piece.document - int(bases[index]), first, piece.stop)
        sums.append(weight)
    return sums


def _leave_out(
    rows: RowPieces, targets: NDArray[np.int64], settings: RowSettings, split: Split
) -> tuple[RowPieces, NDArray[np.int64], tuple[int, int]]:
    """Rows of a stream without a target raise, or with skip_untrainable are left out and counted. Returns the rows that
    stay, their targets, and (rows, tokens) left out."""
    empty = np.flatnonzero(targets == 0).tolist()
    if not empty:
        return rows, targets, (0, 0)
    if not settings.skip_untrainable:
        message = f"no supervised token in {len(empty):,} of {format_count(len(rows), f'{split} row')}"
        hint = "use a larger data.max_length, or data.skip_untrainable: true to leave them out and count them"
        raise DataError([Problem("data.packing", message, hint)])
    left_out = set(empty)
    kept = [index for index in range(len(rows)) if index not in left_out]
    tokens = sum(piece.stop - piece.start for index in empty for piece in rows.get_row(index))
    kept_rows = RowPieces(rows.capacity, array("q"), array("q"), array("q"), array("q", [0]))
    for index in kept:
        for piece in rows.get_row(index):
            kept_rows.documents.append(piece.document)
            kept_rows.starts.append(piece.start)
            kept_rows.stops.append(piece.stop)
        kept_rows.offsets.append(len(kept_rows.documents))
    return kept_rows, targets[kept], (len(empty), tokens)


def _refuse_long(store: TokenStore, members: NDArray[Any], settings: RowSettings) -> None:
    long = members[store.lengths[members] > settings.max_length]
    if not len(long):
        return
    kind = "chat" if store.manifest.get("has_turns") else "document"
    split = "split (between turns where that is possible)" if kind == "chat" else "split"
    longest = int(store.lengths[long].max())
    hint = f"set data.excess_length_strategy: {split}, truncate or drop; or data.max_length: {longest} for the longest"
    if isinstance(store, UnitStore) and store.is_paired:
        kind = f"pair of answers, {'with one copy of its' if store.shares_prompts else 'each with its'} prompt,"
        hint = f"set data.max_length to {longest:,} or more, or data.excess_length_strategy: drop"
    problems = [
        Problem(
            "",
            f"a {kind} of {int(store.lengths[at]):,} tokens is longer than data.max_length {settings.max_length:,}",
            hint if at == long[0] else "",
            store.locate(int(at)),
        )
        for at in long[:20].tolist()
    ]
    raise DataError(shorten(problems, len(long)))


def _describe_untrainable(store: TokenStore, document: int, piece: Piece) -> Problem:
    length = int(store.lengths[document])
    part = f"tokens {piece.start:,} to {piece.stop:,} of {length:,} hold" if piece.stop - piece.start < length else ""
    message = f"{part or f'{length:,} tokens, and they hold'} no supervised token"
    return Problem("", message, "", store.locate(document))


def _explain_untrainable(part: _SplitPieces) -> list[Problem]:
    hint = "fix the data or the loss mask, or set data.skip_untrainable: true to leave such rows out and count them"
    return shorten(part.untrainable, part.num_untrainable, hint)


def _explain_nothing(part: _SplitPieces, skipped: tuple[int, int]) -> Problem:
    """The problem when no row is left to train on, with the reasons counted."""
    names = {
        "documents": "document",
        "other_length_documents": "shorter or longer than min_tokens and max_tokens allow",
        "left_out_documents": "left out by weight or share",
        "dropped_documents": "dropped, longer than data.max_length",
        "truncated_documents": "truncated to data.max_length",
        "untrainable_pieces": "piece without a supervised token",
    }
    nouns = ("document", "piece without a supervised token", "row without a supervised token")
    counts = {name: sum(getattr(count, key) for count in part.counts) for key, name in names.items()}
    counts["row without a supervised token"] = skipped[0]
    reasons = ", ".join(
        format_count(count, name) if name in nouns else f"{count:,} {name}" for name, count in counts.items() if count
    )
    hint = "raise data.max_length, or change data.excess_length_strategy, the loss mask or the data"
    return Problem("data.datasets", f"no row is left to train on: {reasons or 'no document'}", hint)


def _count_leaked(stores: Sequence[TokenStore], num_train: int, copies: NDArray[np.int64]) -> int:
    """The number of documents of evaluation sources whose exact copy is trained on."""
    trained = np.concatenate([np.empty(0, np.uint64), *(store.hashes for store in stores[:num_train])])[copies > 0]
    return sum(int(np.isin(store.hashes, trained).sum()) for store in stores[num_train:])
