"""Compiles functions that several threads of a rank call, and keeps choices of kernels on disk, by GPU, versions,
need and this package's own code, so that only the first run on a machine tries them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from functools import cache, wraps
from pathlib import Path
from typing import Any

import torch

from ulysses_cli.plan.files import write_whole


def get_folder(environ: Mapping[str, str]) -> Path:
    base = environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "ulysses" / "kernels"


@cache
def digest_code(folder: Path) -> str:
    """Of a folder's modules. After a change of any of them, kernels are tried again: what an earlier version found to
    be exact and fast was found with other calls."""
    files = sorted(folder.glob("*.py"))
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:16]


class ChoiceCache:
    """`facts`: everything that the choice depends on besides this package's own code, of which a digest is added:
    `sources` is the folder of modules that say how kernels are called, and by which rule they are tried."""

    def __init__(self, folder: Path, sources: Path, facts: Mapping[str, Any]) -> None:
        self.facts = {"code": digest_code(sources), **facts}
        written = json.dumps(self.facts, sort_keys=True, default=str)
        self.file = folder / f"{hashlib.sha256(written.encode()).hexdigest()[:32]}.json"

    def read(self) -> tuple[str, str] | None:
        """Returns the kernel's name and the reason."""
        try:
            content = json.loads(self.file.read_text(encoding="utf-8"))
            return str(content["name"]), str(content["reason"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, name: str, reason: str) -> None:
        content = {"name": name, "reason": reason, "facts": self.facts}
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.file, json.dumps(content, indent=1, default=str))
        except OSError:
            pass


MOST_KINDS = 64  # of inputs of one compiled function


def compile_for_all_threads(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """torch.compile, for up to MOST_KINDS kinds of inputs. A GPU's backward runs in a thread of its own, with its
    recomputations, and torch 2.12 and later keep their settings for each thread: the limit is set where a call is."""
    compiled = torch.compile(function, **options)

    @wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        settings: Any = torch._dynamo.config
        if settings.recompile_limit < MOST_KINDS:
            settings.recompile_limit = MOST_KINDS
        return compiled(*args, **keywords)

    return call
