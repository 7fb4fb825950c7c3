"""Makes prepared data from plain lists of tokens, for tests that need rows and no recipe, and from rows by a small
recipe."""

import json
import shlex
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ulysses_cli.data.packer import Portion, RowSettings, make_rows
from ulysses_cli.data.prepare import Prepared, prepare_data
from ulysses_cli.data.store import TARGET, Batch, RowSlice, StoreWriter, TokenStore, hash_document, open_rows
from ulysses_cli.data.tokenizing.tokenizer import load_tokenizer
from ulysses_cli.data.transaction import make_folder
from ulysses_cli.plan.recipe.loader import parse_recipe
from ulysses_cli.plan.recipe.recipe import Recipe

Documents = Sequence[Sequence[int]]


def make_store(folder: Path, documents: Documents, flags: Documents | None = None, **facts: Any) -> TokenStore:
    """Makes a store. `flags` has per token 1 for a target and 2 for the beginning of a turn; without it all are
    targets."""

    def build(partial: Path) -> dict[str, Any]:
        writer = StoreWriter(partial, 1000)
        for number, document in enumerate(documents):
            ids = np.asarray(document, writer.dtype)
            marks = None if flags is None else np.asarray(flags[number], np.uint8)
            writer.append(Batch(ids, [len(ids)], [hash_document(ids)], ["d.jsonl"], [number + 1], marks))
        return {**writer.finish(), **facts}

    make_folder(folder, build, lambda: None)
    return TokenStore(folder)


def make_prepared(
    root: Path,
    train: Sequence[Documents],
    evaluation: Sequence[Documents] = (),
    flags: Sequence[Documents] | None = None,
    weights: Sequence[float] | None = None,
    portions: Sequence[Portion] | None = None,
    **settings: Any,
) -> Path:
    """Makes a folder for open_rows. `train` and `evaluation` are documents source by source; `settings` are those of
    RowSettings."""
    chosen = RowSettings(**settings)
    stores = [
        make_store(root / "tokens" / f"s{index}", documents, flags[index] if flags else None)
        for index, documents in enumerate([*train, *evaluation])
    ]

    def build(partial: Path) -> dict[str, Any]:
        facts = make_rows(partial, stores, portions or [Portion(w) for w in weights or [1.0] * len(train)], chosen)
        return {
            **facts,
            "max_length": chosen.max_length,
            "pad_id": chosen.pad_id,
            "attend_across_documents": chosen.attend_across_documents,
            "stores": [store.folder.name for store in stores],
        }

    make_folder(root / "rows" / "r", build, lambda: None)
    return root / "rows" / "r"


PREPARING = """\
model: {config: {model_type: llama}, tokenizer: bytes}
data: {datasets: [{path: FOLDER/d.jsonl}], max_length: 64, store_dir: FOLDER/store}
"""
MARKS = 'data.added_tokens=["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<|return|>"]'


def write_rows(file: Path, rows: Sequence[Any]) -> None:
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    file.write_text("".join(f"{line}\n" for line in lines))


def prepare_rows(folder: Path, rows: Sequence[Any], *settings: str, **options: Any) -> Prepared:
    """Prepares rows, where a text stands for a line of the file, with the tokenizer of bytes."""
    write_rows(folder / "d.jsonl", rows)
    recipe = parse_recipe(PREPARING.replace("FOLDER", str(folder)), "r.yaml", settings).recipe
    return prepare_data(recipe, 8, lambda _: None, **options)


def walk_alone(prepared: Prepared, split: Any = "train") -> Iterator[tuple[Any, RowSlice, int]]:
    """Each document of the rows as if it stood alone: its tokens with those that it shares with an earlier one, its own
    part of the row, and how many it shares."""
    rows = open_rows(prepared.path, split)
    for row in range(len(rows)):
        start, stem = 0, np.empty(0, np.int64)
        for length, shared in zip(rows.get_lengths(row), rows.get_shared(row), strict=True):
            part = rows.read(row, start, start + length)
            assert part.positions.tolist() == list(range(shared, shared + length))
            tokens = np.concatenate([stem[:shared], part.input_ids])
            yield tokens, part, shared
            start, stem = start + length, stem if shared else tokens


def prepare_words(text: str) -> tuple[Recipe, Prepared]:
    """Prepares `ROWS [SETTINGS]` in this folder: a list of rows as JSON, where a text stands for a line, or a file."""
    if text.startswith("["):
        rows, at = json.JSONDecoder().raw_decode(text)
        write_rows(Path("rows.jsonl"), rows)
        settings = ["data.datasets.0.path=rows.jsonl", *shlex.split(text[at:])]
    else:
        name, *settings = shlex.split(text)
        settings.insert(0, f"data.datasets.0.path={name}")
    recipe = parse_recipe(PREPARING.replace("FOLDER/", ""), "r.yaml", ["data.max_length=4096", MARKS, *settings]).recipe
    return recipe, prepare_data(recipe, 8, lambda _: None)


def show_documents(recipe: Recipe, prepared: Prepared) -> list[str]:
    """Returns each document as text, with targets in « »."""
    decode, shown = load_tokenizer(recipe.model, recipe.data).decode, []
    for store in open_rows(prepared.path, "train").stores:
        for number, length in enumerate(store.lengths):
            ids, flags = store.read(number, 0, length)
            is_target = np.ones(length, int) if flags is None else np.asarray(flags & TARGET > 0, int)
            edges = [0, *(np.flatnonzero(np.diff(is_target)) + 1), length]
            runs = [(decode(ids[first:last]), is_target[first]) for first, last in pairwise(edges)]
            shown.append("".join(f"«{run}»" if said else run for run, said in runs))
    return [json.dumps(text, ensure_ascii=False) for text in shown]
