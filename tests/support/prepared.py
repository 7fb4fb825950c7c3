"""Makes prepared data from plain lists of tokens, for tests that need rows and no recipe."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ulysses_cli.data.packer import Portion, RowSettings, make_rows
from ulysses_cli.data.store import Batch, StoreWriter, TokenStore, hash_document
from ulysses_cli.data.transaction import make_folder

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
