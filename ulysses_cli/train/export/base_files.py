"""Finds the weight files of a base model."""

from __future__ import annotations

import os
from pathlib import Path

from ulysses_cli.plan.files.weight_files import find_weight_problem, list_weight_files


def find_base_files(name: str, revision: str | None, *, is_here: bool = False) -> list[Path]:
    """The base model's weight files, in a folder or in the hub's cache; downloaded when they are in neither, unless
    `is_here` asks for those of this machine alone."""
    folder = Path(os.path.expanduser(name))
    if not folder.is_dir():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

        patterns = ["*.safetensors", "*.safetensors.index.json", "*.json"]
        try:
            folder = Path(snapshot_download(name, revision=revision, allow_patterns=patterns, local_files_only=is_here))
        except (HFValidationError, LocalEntryNotFoundError):
            if not is_here:
                raise
            raise ValueError(f"{name} is not on this machine") from None
    if problem := find_weight_problem(folder):
        raise ValueError(problem)
    files = list_weight_files(folder)
    if not files:
        raise ValueError(f"{folder} holds no safetensors files; only those can be read one tensor at a time")
    return files
