"""Prepares a recipe's data on disk: tokenizes each source into a token store and packs the stores into rows.

A folder's name is the hash of everything that decides its content, so what exists already is not made again.
Reports progress as events; prints nothing.
"""

from __future__ import annotations

import difflib
import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from ulysses_cli.data import facts
from ulysses_cli.data.packer import Portion, RowSettings, make_rows
from ulysses_cli.data.sources import Source, open_source
from ulysses_cli.data.store import FORMAT, StoreWriter, TokenStore, open_rows
from ulysses_cli.data.tokenizing.encoder import Encoder, EncoderSettings
from ulysses_cli.data.tokenizing.lost_parts import LostCounts, compute_growth, explain_lost_parts
from ulysses_cli.data.tokenizing.tokenizer import KnownTokenizer, get_template, name_tokenizer
from ulysses_cli.data.tokenizing.workers import TokenizingTask, encode_blocks
from ulysses_cli.data.transaction import FileHashes, find_damage, hash_parts, make_folder, read_manifest
from ulysses_cli.plan.models.model_files import explain_no_template, list_variables
from ulysses_cli.plan.problem import Problem, RecipeError, Where
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.plan.resolved import wants_shared_prompts
from ulysses_cli.plan.rules.files import CHAT_TYPES
from ulysses_cli.readers.columns import Reading
from ulysses_cli.readers.pairs import explain_absent
from ulysses_cli.readers.problems import SOURCE, DataError, NoTemplate, explain_bad_rows

MAX_KEPT_BAD = 100
SMALL_BYTES = 8 << 20
Event = dict[str, Any]
Emit = Callable[[Event], None]


@dataclass(frozen=True)
class Prepared:
    """`path` is a folder for open_rows. Its name is the hash of everything that decides the rows."""

    path: Path
    report: dict[str, Any]


@dataclass
class _Context:
    recipe: Recipe
    tokenizer: KnownTokenizer
    hashes: FileHashes
    root: Path
    emit: Emit

    @cached_property
    def settings(self) -> EncoderSettings:
        return EncoderSettings(*(getattr(self.recipe.data, setting.name) for setting in fields(EncoderSettings)))

    def make_reading(self, source: Source) -> Reading:
        variables = {**self.recipe.data.chat_template_kwargs, **source.variables}
        return Reading(source.columns, source.train_field, variables)

    @cached_property
    def encoder(self) -> Encoder:
        return Encoder(self.tokenizer.loaded, self.settings, self.tokenizer.stops)


def prepare_data(
    recipe: Recipe,
    pad_to_multiple_of: int,
    emit: Emit,
    num_samples: int = 1,
    show: tuple[int, int] | None = None,
    *,
    can_share: bool = False,
) -> Prepared:
    """The report holds `num_samples` samples of each source, or all that was made of `show`: the number of a source,
    from 0, and of its row. `can_share`: documents of a row may read one copy of what they begin with. Raises
    RecipeError for a mistake in the recipe and DataError for one in the data."""
    emit({"event": "stage", "stage": "tokenizer"})
    data, shares_prompts = recipe.data, can_share and wants_shared_prompts(recipe)
    root = Path(os.path.expanduser(data.store_dir))
    output = Path(os.path.expanduser(recipe.run.output_dir))
    hashes = FileHashes(root / "files.json")
    tokenizer = KnownTokenizer(recipe.model, data, hashes, root / "tokenizers.json")
    context = _Context(recipe, tokenizer, hashes, root, emit)
    datasets = [(f"data.datasets.{index}", dataset) for index, dataset in enumerate(data.datasets)]
    datasets += [(f"data.eval_datasets.{index}", dataset) for index, dataset in enumerate(data.eval_datasets)]
    if recipe.preference is not None:  # no other type passes the rules
        kind = "unpaired" if recipe.preference.is_unpaired else "preference"
        datasets = [(key, dataset.model_copy(update={"type": kind})) for key, dataset in datasets]
    stores: list[TokenStore] = []
    described: list[Event] = []
    for key, dataset in datasets:
        emit({"event": "stage", "stage": "source", "source": key})
        source = open_source(dataset, key, recipe.run.seed, context.hashes, output_folders=(root, output))
        store = _make_store(source, context)
        _check_pairs(store, key, recipe)
        stores.append(store)
        described.append(_describe_source(source, store, dataset.weight))
        _check_bad_rows(store, source, data.on_bad_row)
    if data.on_rewritten_turns != "keep":
        shares = can_share and wants_shared_prompts(recipe, splits=True)
        _check_lost_parts(stores, described, tokenizer, data.on_rewritten_turns, shares_prompts=shares)
    _check_loss_mask(stores[: len(data.datasets)], recipe)
    context.hashes.save()
    path = _make_rows(stores, context, shares_prompts=shares_prompts)
    manifest = read_manifest(path)
    for each, weight in zip(described, manifest["weights"], strict=False):
        each["weight"] = weight  # those of shares follow from the tokens
    report = {
        "path": str(path),
        "sources": described,
        **{name: manifest[name] for name in ("max_length", "packing", "attend_across_documents", "splits", "facts")},
        "shares_prompts": shares_prompts,
        "leaked_documents": manifest["leaked_documents"],
        "layout": facts.compute_layout_facts(open_rows(path, "train"), recipe, pad_to_multiple_of),
        "samples": [] if show else facts.find_samples(open_rows(path, "train"), tokenizer.decode, num_samples),
    }
    if show is not None:
        report["samples"] = _show_row(stores, described, show, tokenizer)
    tokenizer.save()
    report["notes"] = facts.list_notes(report, recipe)
    return Prepared(path, report)


def _show_row(
    stores: list[TokenStore], described: list[Event], show: tuple[int, int], tokenizer: KnownTokenizer
) -> list[dict[str, Any]]:
    number, row = show
    if number >= len(stores):
        message = f"--show {number}:{row}: there is no source {number}"
        raise RecipeError([Problem("", message, f"the last one is {len(stores) - 1}")])
    shown = facts.show_row(stores[number], row, tokenizer.decode)
    if not shown:
        hint = "name a row between the first and the last that was not left out"
        raise RecipeError([Problem("", f"--show {number}:{row}: nothing was made of that row", hint)])
    return [{**sample, "source": described[number]["key"]} for sample in shown]


def _make_store(source: Source, context: _Context) -> TokenStore:
    kind = source.find_kind()
    deciding = _list_deciding(source, kind, context)
    _check_variables(source, context)
    name = hash_parts(FORMAT, source.fingerprint, kind, deciding, context.tokenizer.hash)[:32]
    folder = context.root / "tokens" / name
    try:
        make_folder(
            folder,
            lambda partial: _tokenize(partial, source, kind, context),
            lambda: context.emit({"event": "wait", "what": str(folder)}),
            is_whole=find_damage(folder) is None,
        )
    except NoTemplate:
        raise RecipeError([explain_no_template(name_tokenizer(context.recipe.model), source.key)]) from None
    return TokenStore(folder)


def _check_variables(source: Source, context: _Context) -> None:
    """A variable that the template never reads would change nothing."""
    variables = context.recipe.data.chat_template_kwargs, source.variables
    if not any(variables):
        return
    read = list_variables(get_template(context.tokenizer.loaded))
    keys = ("data.chat_template_kwargs", f"{source.key}.chat_template_kwargs")
    problems = [
        Problem(f"{key}.{name}", "the chat template never reads it", _suggest(key, name, value, read))
        for key, given in zip(keys, variables, strict=True)
        for name, value in given.items()
        if name not in read
    ]
    if problems:
        raise RecipeError(problems)


def _suggest(key: str, name: str, value: Any, read: Collection[str]) -> str:
    close = difflib.get_close_matches(name, sorted(read), n=1)
    return f"write {key}: {{{close[0]}: {json.dumps(value)}}}" if close else "leave it out, or use a template that does"


def _list_deciding(source: Source, kind: str, context: _Context) -> list[Any]:
    """The settings that decide the tokens and targets of rows of this kind."""
    settings = asdict(context.settings)
    settings["on_rewritten_turns"] = settings["on_rewritten_turns"].replace("keep", "raise")  # they make the same
    reading = context.make_reading(source)
    chats = ("train_on_turns", "thoughts", "on_rewritten_turns")
    names = {
        "chat": ("assistant_only_loss", *chats),
        "conversations": ("assistant_only_loss", *chats),
        "completion": ("completion_only_loss", "assistant_only_loss", *chats),
        "answers": ("completion_only_loss", "assistant_only_loss", *chats),
        "instruction": ("completion_only_loss",),
        "preference": ("completion_only_loss", *chats),
        "unpaired": ("completion_only_loss", *chats),
    }.get(kind, ())
    more = [reading.train_field, dict(reading.variables)] if len(names) > 1 else []
    return [*(settings[name] for name in names), *more, *([dict(source.columns)] if source.columns else [])]


def _tokenize(partial: Path, source: Source, kind: Any, context: _Context) -> Mapping[str, Any]:
    recipe, encoder, emit = context.recipe, context.encoder, context.emit
    workers = recipe.data.num_workers
    if workers == "auto":  # starting processes takes longer than tokenizing a small source
        is_small = source.num_bytes is not None and source.num_bytes < SMALL_BYTES
        workers = 1 if is_small else len(os.sched_getaffinity(0))
    writer = StoreWriter(partial, len(encoder.tokenizer))
    totals = dict.fromkeys(("num_bytes", "num_bad", "num_blank", "num_in_pieces", "num_whole"), 0)
    bad: list[tuple[str, int, str]] = []
    remedies: dict[str, None] = {}
    lost, counts = LostCounts(), Counter[str]()
    reading = context.make_reading(source)
    task = TokenizingTask(recipe.model, recipe.data, kind, encoder.settings, reading, encoder.stops)
    seen, columns = set[str](), ""
    progress = {"event": "progress", "source": source.key, "name": source.name, "total_bytes": source.num_bytes}
    for block in encode_blocks(iter(source.walk_blocks()), task, encoder.tokenizer, workers):
        writer.append(block.batch)
        seen, columns = seen | block.seen, columns or block.columns
        bad += block.bad[: MAX_KEPT_BAD - len(bad)]
        remedies |= dict.fromkeys(block.remedies)
        totals["num_bad"] += len(block.bad)
        lost.add(block.lost)
        counts.update(block.counts)
        for name in ("num_bytes", "num_blank", "num_in_pieces", "num_whole"):
            totals[name] += getattr(block, name)
        if block.bad and recipe.data.on_bad_row == "raise":
            is_all = not writer.num_tokens and source.facts.get("num_files") == 1
            raise DataError(_explain_bad(bad, totals["num_bad"], source, remedies, is_all=is_all))
        emit({**progress, "bytes": totals["num_bytes"], "tokens": writer.num_tokens})
    if absent := [name for name in source.columns if name not in seen]:
        raise RecipeError(explain_absent(source.columns, absent, columns, source.key))
    if reading.named_field not in ("", *seen):
        hint = f"name a field that messages have, or write {source.key}.train_field: auto for the usual ones"
        message = f"no message has a field {reading.named_field}"
        raise RecipeError([Problem(f"{source.key}.train_field", message, hint)])
    changed = context.hashes.find_changed()
    if changed is not None:
        raise DataError([Problem("", "changed while it was read", "run again", Where(changed))])
    written = writer.finish()
    if not written["num_documents"]:
        if bad:
            raise DataError(_explain_bad(bad, totals["num_bad"], source, remedies, is_all=True))
        hint = f"name a file with text in {source.key}.path"
        raise DataError([Problem("", "holds no document: all of its rows are empty", hint, Where(source.name))])
    emit({**progress, "bytes": source.num_bytes or totals["num_bytes"], "tokens": writer.num_tokens, "is_done": True})
    return {
        **written,
        **totals,
        "bad": bad,
        "remedies": list(remedies),
        "lost": asdict(lost),
        "turns": dict(counts),
        "kind": kind,
        "has_lines": source.has_lines,
        "has_turns": kind not in ("text", "tokens"),
        "is_joined": source.is_joined,
        "whole_because": encoder.rule.reason,
        "name": source.name,
        "versions": _list_versions(),
    }


def _explain_bad(
    bad: list[tuple[str, int, str]], total: int, source: Source, remedies: Iterable[str], *, is_all: bool
) -> list[Problem]:
    """`is_all`: no row of the source that was read can be used, so leaving out the bad ones leaves nothing."""
    otherwise = "set data.on_bad_row: skip to leave them out and count them"
    if is_all:
        otherwise = f"name another file in {source.key}.path, as no row of this one can be used"
    named = [remedy.replace(SOURCE, source.key) for remedy in remedies]
    return explain_bad_rows(bad, total, otherwise, named, has_lines=source.has_lines)


def _check_bad_rows(store: TokenStore, source: Source, on_bad_row: str) -> None:
    """Raises for the bad rows of a store that an earlier recipe made with on_bad_row: skip."""
    manifest = store.manifest
    if manifest["num_bad"] and on_bad_row == "raise":
        bad = [(str(file), int(line), str(message)) for file, line, message in manifest["bad"]]
        raise DataError(_explain_bad(bad, manifest["num_bad"], source, manifest["remedies"], is_all=False))


def _check_lost_parts(
    stores: list[TokenStore],
    described: list[Event],
    tokenizer: KnownTokenizer,
    on_rewritten: str,
    *,
    shares_prompts: bool,
) -> None:
    """Raises for chats of which the template does not show all that the assistant said, with counts of each source.
    `shares_prompts`: whether texts of a chat would, if it were split."""
    problems = []
    for store, source in zip(stores, described, strict=True):
        lost = LostCounts(**store.manifest["lost"])
        if lost.num_turns:
            template, has_lines = get_template(tokenizer.loaded), store.manifest["has_lines"]
            turns = source["turns"] if on_rewritten == "raise" else {}
            growth = compute_growth(turns, shares_prompts=shares_prompts)
            problems.append(explain_lost_parts(lost, template, source["name"], turns, growth, has_lines=has_lines))
    if problems:
        raise DataError(problems)


def _check_pairs(store: TokenStore, key: str, recipe: Recipe) -> None:
    if store.manifest["kind"] == "preference" and recipe.preference is None:
        what = "the rows are pairs of answers, which only a run with a section `preference` learns from"
        raise RecipeError([Problem(f"{key}.type", what, "write preference: {loss: sigmoid}, which is DPO")])


def _check_loss_mask(stores: list[TokenStore], recipe: Recipe) -> None:
    """plan/rules/files.py checks the types that the recipe names. Here the types detected from the rows are checked."""
    kinds = sorted({store.manifest["kind"] for store in stores})
    if recipe.data.assistant_only_loss and not set(kinds) & set(CHAT_TYPES):
        message = f"needs chat data, but the rows hold {', '.join(kinds)}"
        hint = "use chat data, or set data.assistant_only_loss: false"
        raise RecipeError([Problem("data.assistant_only_loss", message, hint)])


def _make_rows(stores: list[TokenStore], context: _Context, *, shares_prompts: bool) -> Path:
    recipe = context.recipe
    data = recipe.data
    settings = RowSettings(
        max_length=data.max_length,
        packing=data.packing,
        strategy=data.excess_length_strategy,
        attend_across_documents=data.attend_across_documents,
        eval_share=data.eval_split,
        seed=recipe.run.seed if _needs_seed(recipe) else 0,
        skip_untrainable=data.skip_untrainable,
        pad_id=context.tokenizer.pad_id,
        shares_prompts=shares_prompts,
    )
    portions = [Portion(each.weight, each.share, each.min_tokens, each.max_tokens) for each in data.datasets]
    weights: list[Any] = [portion.weight for portion in portions]
    if any(portion != Portion(portion.weight) for portion in portions):  # other rows keep their names
        weights = [weights, list(map(asdict, portions))]
    names = [store.folder.name for store in stores]
    deciding = {name: value for name, value in asdict(settings).items() if name != "shares_prompts" or value}
    folder = context.root / "rows" / hash_parts(FORMAT, names, weights, deciding)[:32]

    def build(partial: Path) -> Mapping[str, Any]:
        context.emit({"event": "stage", "stage": "rows"})
        return {
            **make_rows(partial, stores, portions, settings),
            **asdict(settings),
            "stores": names,
            "facts": facts.compute_length_facts(
                stores, len(portions), settings.max_length, packs=settings.packing != "off"
            ),
        }

    make_folder(
        folder,
        build,
        lambda: context.emit({"event": "wait", "what": str(folder)}),
        is_whole=find_damage(folder) is None,
    )
    return folder


def _needs_seed(recipe: Recipe) -> bool:
    data = recipe.data
    return bool(data.packing == "stream" or data.eval_split or any(d.weight % 1 or d.share for d in data.datasets))


def _describe_source(source: Source, store: TokenStore, weight: float) -> dict[str, Any]:
    manifest = store.manifest
    names = (
        "kind",
        "num_documents",
        "num_tokens",
        "num_targets",
        "max_id",
        "num_bytes",
        "num_bad",
        "bad",
        "num_blank",
        "lost",
        "turns",
    )
    more = ("has_lines", "num_in_pieces", "num_whole", "whole_because")
    return {
        "key": source.key,
        "name": source.name,
        "fingerprint": source.fingerprint,
        "weight": weight,
        **{name: manifest[name] for name in (*names, *more)},
        "target_weight": manifest.get("target_weight"),
        **source.facts,
    }


def _list_versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("transformers", "tokenizers", "datasets")}
