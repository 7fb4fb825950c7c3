"""Computes the numbers of a data report: document lengths, other row lengths, balance between groups, samples, notes.

Returns plain data; report/ formats it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ulysses_cli.data.packer import WORK
from ulysses_cli.data.store import SAID, TARGET, Ids, PackedRows, TokenStore
from ulysses_cli.plan.models.model_files import CLOCK, DATE
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.plan.recipe.sections import Dataset
from ulysses_cli.plan.resolved import make_layout
from ulysses_cli.plan.rows.packing import Piece, cut_documents, locate_row, pack_alone, pack_documents, share_rows
from ulysses_cli.plan.rules.files import CHAT_TYPES
from ulysses_cli.plan.secrets import collect_secrets, mask_document
from ulysses_cli.plan.units import format_count

Decode = Callable[[NDArray[Any]], str]
SAMPLED_DOCUMENTS = 20_000
SAMPLED_ROWS = 4096
SHOWN_TOKENS = 240  # of a sample without bounds; of one with bounds, shared by its runs
LEAST_TOKENS = 24  # shown at each end of a run of targets or of other tokens
MAX_RUNS = 80  # shown of a sample: the first half and the last
MARGIN_TOKENS = 200  # read around what is shown, for secrets that begin or end outside of it
UNREAD_FIELD = "unread field "  # in counts, before the name of a field of messages
MAX_FIELDS = 8  # named in a note
MAX_CANDIDATES = 1000  # pieces of a source among which samples are chosen


def compute_length_facts(
    stores: Sequence[TokenStore], num_train: int, max_length: int, *, packs: bool = True
) -> dict[str, Any]:
    """Document lengths by source, and the effect of other row lengths on the training sources."""
    trained = np.concatenate([np.asarray(store.lengths) for store in stores[:num_train]])
    return {
        "quantiles": {f"{q:g}": int(np.quantile(trained, q)) for q in (0, 0.1, 0.5, 0.9, 0.99, 1)},
        "histogram": [count_lengths(np.asarray(store.lengths)) for store in stores],
        "lengths": [compare_length(trained, length, packs=packs) for length in _choose_lengths(max_length)],
    }


def count_lengths(lengths: NDArray[np.int64]) -> list[dict[str, int]]:
    """A histogram of documents and tokens in bins of powers of two: from < length <= to."""
    powers = np.ceil(np.log2(np.maximum(lengths, 1))).astype(int)
    return [
        {
            "from": 0 if power == 0 else 2 ** (power - 1),
            "to": 2**power,
            "documents": int((powers == power).sum()),
            "tokens": int(lengths[powers == power].sum()),
        }
        for power in range(int(powers.min(initial=63)), int(powers.max(initial=0)) + 1)
    ]


def _choose_lengths(max_length: int) -> list[int]:
    return sorted({length for length in (max_length * n // 4 for n in (1, 2, 4, 8, 16)) if length >= 2})


def compare_length(lengths: NDArray[np.int64], max_length: int, *, packs: bool = True) -> dict[str, Any]:
    """The share of tokens that truncation would lose at this row length, and how full rows would be if documents were
    split instead."""
    stride = max(1, len(lengths) // SAMPLED_DOCUMENTS)
    sample = lengths[::stride].tolist()
    pieces = cut_documents(sample, max_length, "split").pieces
    rows = pack_documents(pieces, max_length, WORK) if packs else pack_alone(pieces, max_length)
    return {
        "max_length": max_length,
        "long_documents": int((lengths > max_length).sum()),
        "truncated_share": float(np.maximum(lengths - max_length, 0).sum() / max(1, lengths.sum())),
        "efficiency": rows.compute_efficiency(),
        "sampled_documents": len(sample),
    }


def compute_layout_facts(rows: PackedRows, recipe: Recipe, pad_to_multiple_of: int) -> dict[str, Any]:
    """The facts that depend on the mesh: padding, steps per epoch, balance of the predicted work between groups."""
    tokens = np.asarray([rows.count_tokens(row) for row in _sample(len(rows))])
    padded = -(-tokens // pad_to_multiple_of) * pad_to_multiple_of
    num_groups, micro_steps = make_layout(recipe).dp_size, recipe.train.rows_per_group
    return {
        "pad_to_multiple_of": pad_to_multiple_of,
        "padding_share": float(1 - tokens.sum() / padded.sum()),
        "num_groups": num_groups,
        "rows_per_step": num_groups * micro_steps,
        "steps_per_epoch": math.ceil(len(rows) / (num_groups * micro_steps)),
        **compute_balance(rows, num_groups, micro_steps, recipe.run.seed),
    }


def compute_balance(rows: PackedRows, num_groups: int, micro_steps: int, seed: int) -> dict[str, Any]:
    """How far the work of the busiest group is above the mean, and the share of time that groups wait within
    micro-steps. Both over the full steps at the start of the first epoch; None without a full step or a second
    group."""
    per_step = num_groups * micro_steps
    num_steps = min(len(rows), max(SAMPLED_ROWS, per_step)) // per_step
    if num_groups == 1 or not num_steps:
        return {"work_above_mean": None, "waiting_share": None, "sampled_steps": 0}
    totals, lost = [0.0] * num_groups, []
    for step in range(num_steps):
        places = [locate_row(at, len(rows), seed).row for at in range(step * per_step, (step + 1) * per_step)]
        works = [sum(map(WORK.of, rows.get_lengths(row), rows.get_shared(row))) for row in places]
        shares = share_rows(works, num_groups, step)
        for group, share in enumerate(shares):
            totals[group] += sum(works[row] for row in share)
        slowest = sum(max(works[share[micro]] for share in shares) for micro in range(micro_steps))
        lost.append(1 - sum(works) / num_groups / slowest)
    return {
        "work_above_mean": max(totals) / (sum(totals) / num_groups) - 1,
        "waiting_share": sum(lost) / len(lost),
        "sampled_steps": num_steps,
    }


def _sample(size: int) -> range:
    return range(0, size, max(1, size // SAMPLED_ROWS))


def find_samples(rows: PackedRows, decode: Decode, num_samples: int) -> list[dict[str, Any]]:
    """Parts of `num_samples` training documents of each source. Documents with a mixed loss mask come first."""
    samples = []
    for source in range(len(rows.stores)):
        pieces = rows.list_pieces(source, MAX_CANDIDATES)
        ordered = sorted(pieces, key=lambda piece: not _has_mixed_mask(rows, piece)) if num_samples else []
        samples += [_show_piece(rows, piece, decode) for piece in ordered[:num_samples]]
    return samples


def _has_mixed_mask(rows: PackedRows, piece: Piece) -> bool:
    """Whether some tokens are targets and others are not: such a sample shows what the loss mask does."""
    store, number = rows.find_document(piece.document)
    flags = None if store.flags is None else store.read(number, piece.start, piece.stop)[1]
    return flags is not None and 0 < int(np.count_nonzero(flags & TARGET)) < len(flags)


def show_row(store: TokenStore, row: int, decode: Decode) -> list[dict[str, Any]]:
    """All documents that were made of one row of a source, whole. `row`: the number of its line or row."""
    documents = np.flatnonzero(store.lines == row).tolist()
    return [_describe_piece(store, at, Piece(at, 0, int(store.lengths[at])), decode, is_whole=True) for at in documents]


def _show_piece(rows: PackedRows, piece: Piece, decode: Decode) -> dict[str, Any]:
    store, number = rows.find_document(piece.document)
    return _describe_piece(store, number, piece, decode)


def _describe_piece(
    store: TokenStore, number: int, piece: Piece, decode: Decode, *, is_whole: bool = False
) -> dict[str, Any]:
    """The piece in runs of targets, of what the assistant says besides, and of other tokens. Of a long run both ends
    are shown: every bound of the loss mask is visible. Of very many runs the middle ones are left out. `is_whole`:
    nothing is."""
    ids, flags = store.read(number, piece.start, piece.stop)
    targets = np.ones(len(ids), bool) if flags is None else (flags & TARGET) > 0
    answers = np.zeros(len(ids), bool) if flags is None else (flags & SAID) > 0
    kinds = np.where(targets, 2, answers.astype(int))
    changes = (np.flatnonzero(kinds[1:] != kinds[:-1]) + 1).tolist()
    runs = list(pairwise([0, *changes, len(ids)]))
    shown = runs if is_whole or len(runs) <= MAX_RUNS else [*runs[: MAX_RUNS // 2], *runs[-MAX_RUNS // 2 :]]
    size = len(ids) if is_whole else max(LEAST_TOKENS, SHOWN_TOKENS // len(shown) // 2)
    read = partial(_read_masked, ids, decode, collect_secrets({}, os.environ))
    described, is_masked = list[dict[str, Any]](), False
    for at, (start, stop) in enumerate(shown):
        is_cut = stop - start > 3 * size
        (text, has_secret), (end, has_late) = read(start, start + size if is_cut else stop), ("", False)
        if is_cut:
            end, has_late = read(stop - size, stop)
        is_masked = is_masked or has_secret or has_late
        skipped = shown[at + 1][0] - stop if at + 1 < len(shown) else 0
        described.append(
            {
                "is_target": bool(targets[start]),
                "is_answer": bool(answers[start]),
                "text": text,
                "num_left_out": stop - start - 2 * size if is_cut else 0,
                "end": end,
                "num_skipped": skipped,
            }
        )
    return {
        "where": str(store.locate(number)),
        "num_tokens": len(ids),
        "num_targets": int(targets.sum()),
        "from_token": piece.start,
        "runs": described,
        "is_masked": is_masked,
    }


def _read_masked(ids: Ids, decode: Decode, secrets: Collection[str], start: int, stop: int) -> tuple[str, bool]:
    """The text of some tokens without secrets, also those that begin or end outside of it, and whether it has one."""
    around = [max(0, start - MARGIN_TOKENS), start, stop, min(len(ids), stop + MARGIN_TOKENS)]
    texts = [decode(ids[first:last]) for first, last in pairwise(around)]
    masked, _ = mask_document(texts, secrets)
    return masked[1], masked[1] != texts[1]


def list_notes(report: Mapping[str, Any], recipe: Recipe) -> list[str]:
    """Notes on what is easily overlooked in a report: files left out, equal sources, cut chats, leaked documents."""
    notes: list[str] = []
    seen: dict[str, str] = {}
    for source, dataset in zip(report["sources"], recipe.data.datasets, strict=False):
        if dataset.share is not None and source["weight"] > 1:
            copies = f"{source['weight']:.3g} copies of its tokens"
            notes.append(f"{source['name']}: {copies} stand in an epoch, as its share of {dataset.share:g} needs")
    for source in report["sources"]:
        if source["num_whole"]:
            reason = "they have no place for an exact cut"
            if source["whole_because"]:
                reason = f"the tokenizer allows no exact cut: {source['whole_because']}"
            documents = format_count(source["num_whole"], "long document")
            notes.append(f"{source['name']}: {documents} tokenized whole, not in pieces: {reason}")
        for reason in ("text file beside files of rows, not read", "file named twice, read once"):
            if reason in source.get("left_out", {}):
                count, example = source["left_out"][reason].values()
                notes.append(f"{source['name']}: {format_count(count, reason)}, such as {example}")
        if source["fingerprint"] in seen and source["key"].startswith("data.datasets."):
            notes.append(f"{source['key']} is the same data as {seen[source['fingerprint']]}; both are trained on")
        seen.setdefault(source["fingerprint"], source["key"])
        if (number := source["turns"].get("unread text")) and _get_type(recipe, source["key"]) == "auto":
            rows = format_count(number, "row")
            key = f"{source['key']}.type: text"
            notes.append(f"{source['name']}: `text` of {rows} is not read, but the chat beside it; {key} reads it")
        if source["kind"] == "preference":
            pairs = format_count(source["num_documents"] // 2, "pair")
            share = source["turns"].get("shared tokens", 0) / max(1, source["num_tokens"])
            notes.append(
                f"{source['name']}: {pairs} of answers; the line of the source counts both as documents, the tables of "
                f"splits a pair as one; {share:.0%} of the tokens are prompts that the rejected answer repeats"
                f"{': rows hold them once' if report['shares_prompts'] else ''}"
            )
        if source["kind"] == "answers":
            answers = format_count(source["num_documents"], "answer")
            share = source["turns"].get("shared tokens", 0) / max(1, source["num_tokens"])
            once = ": rows hold them once" if report["shares_prompts"] else ""
            if _get_type(recipe, source["key"]) != "answers":
                once = f"; with {source['key']}.type: answers rows hold them once, where the model allows that"
            notes.append(
                f"{source['name']}: {answers}; {share:.0%} of the tokens are prompts that several answers repeat{once}"
            )
        if source["target_weight"] is not None:
            targets = format_count(source["num_targets"], "target")
            notes.append(
                f"{source['name']}: {targets} with a weight of {source['target_weight']:,.6g} together; the loss is "
                "the mean of all targets of a step by their weights"
            )
        if source["kind"] == "unpaired":
            answers = format_count(source["num_documents"] // 2, "answer")
            notes.append(
                f"{source['name']}: {answers} with labels, each followed by the same prompt with another row's answer, "
                "which kto needs; the line of the source counts both, the tables of splits both as one"
            )
        fields = {name.removeprefix(UNREAD_FIELD): n for name, n in source["turns"].items() if UNREAD_FIELD in name}
        if fields:
            shown = ", ".join(f"{name} of {format_count(fields[name], 'turn')}" for name in sorted(fields)[:MAX_FIELDS])
            notes.append(f"{source['name']}: fields of messages that the template never reads: {shown}")
        variables = {**recipe.data.chat_template_kwargs, **_get_source(recipe, source["key"]).chat_template_kwargs}
        if source["turns"].get("dated") and CLOCK not in variables:
            chats = format_count(source["turns"]["dated"], "chat")
            notes.append(
                f"{source['name']}: the chat template writes the date into {chats}: {DATE}, on every day; "
                f"data.chat_template_kwargs: {{{CLOCK}: YYYY-MM-DD}} names another"
            )
        if source["kind"] == "instruction":
            notes.append(f"{source['name']}: instructions become chats if the tokenizer has a chat template")
    if note := explain_targets(report, recipe):
        notes.append(note)
    train = report["splits"]["train"]
    torn = sum(counts["torn_turns"] for counts in train["sources"])
    if torn:
        cuts = format_count(torn, "cut")
        notes.append(f"{cuts} inside a turn of a chat: the turn is longer than a row")
    cut_off = sum(counts.get("cut_off_pieces", 0) for counts in train["sources"])
    if cut_off:
        notes.append(f"left out {format_count(cut_off, 'piece')} of cut documents, because they hold no target")
    if recipe.data.packing == "stream" and any(s["kind"] not in ("text", "tokens") for s in report["sources"]):
        notes.append("packing: stream cuts chats where a row ends, also inside a turn")
    if any(sample["is_masked"] for sample in report["samples"]):
        notes.append(
            "a sample holds what looks like a key or a password: it is masked here, and trained on unmasked; "
            "remove it from the data"
        )
    if report["leaked_documents"]:
        notes.append(
            f"{format_count(report['leaked_documents'], 'evaluation document')} also trained on, word for word"
        )
    layout = report["layout"]
    if train["num_rows"] < layout["rows_per_step"]:
        rows = format_count(train["num_rows"], "row")
        notes.append(f"{rows} in all, but an optimizer step takes {layout['rows_per_step']:,}: rows of padding fill it")
    return notes


def _get_type(recipe: Recipe, key: str) -> str:
    return str(_get_source(recipe, key).type)


def _get_source(recipe: Recipe, key: str) -> Dataset:
    _, section, index = key.split(".")
    found: Dataset = getattr(recipe.data, section)[int(index)]
    return found


def explain_targets(report: Mapping[str, Any], recipe: Recipe) -> str:
    """For chats where the recipe does not say which turns are learned: both choices. Otherwise ''."""
    chats = [
        source["name"]
        for source in report["sources"]
        if source["kind"] in CHAT_TYPES and source["key"].startswith("data.datasets.")
    ]
    if not chats or "assistant_only_loss" in recipe.data.model_fields_set:
        return ""
    return (
        f"{chats[0]}: every token of a chat is learned, the user's turns too; data.assistant_only_loss: true learns "
        "what the assistant says alone, false keeps it as it is and ends this note"
    )
