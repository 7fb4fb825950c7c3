"""Tensors of the base model's files that the trained model has no place for: a vision tower, layers that predict
several tokens. transformers ignores them when it loads the text model. An export carries them over as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ulysses_cli.plan.files.weight_files import list_weight_files, read_header
from ulysses_cli.run_folder.archive import CheckpointError
from ulysses_cli.train.assembly.loading import RECOMPUTED, is_matched, map_names
from ulysses_cli.train.assembly.text_part import find_key_mapping, is_text_name
from ulysses_cli.train.export.wrapper import BaseModel


@dataclass(frozen=True)
class Carried:
    """Names of the tensors in the base's folder. `problem`: why the base's files cannot be looked at."""

    folder: Path | None = None
    names: frozenset[str] = frozenset()
    problem: str = ""

    def read(self) -> Iterator[tuple[str, Tensor]]:
        """Yields one tensor at a time."""
        for file in list_weight_files(self.folder) if self.folder is not None and self.names else ():
            with safe_open(file, "pt") as opened:
                for name in sorted(self.names & set(opened.keys())):
                    yield name, opened.get_tensor(name)

    def describe(self) -> str:
        """'' where there is nothing to say."""
        if self.problem:
            return (
                "tensors that the trained model ignores, such as layers that predict several tokens, are left out if "
                f"the base model has any: {self.problem}"
            )
        if not self.names:
            return ""
        parts = sorted({".".join(name.split(".")[: 3 if ".layers." in name else 2]) for name in self.names})
        shown = ", ".join(parts[:6]) + (f" and {len(parts) - 6} more" if len(parts) > 6 else "")
        return f"{len(self.names)} tensors beside the text model are those of the base: {shown}"

    def check(self, folder: Path) -> None:
        """Compares the tensors in an exported folder with the base model's."""
        written = {name: file for file in list_weight_files(folder) for name in read_header(file)}
        for name, tensor in self.read():
            if name not in written:
                raise CheckpointError(f"{folder} was not exported correctly: {name} is missing")
            with safe_open(written[name], "pt") as opened:
                if not torch.equal(opened.get_tensor(name), tensor):
                    problem = f"{name} differs from the base model's"
                    raise CheckpointError(f"{folder} was not exported correctly: {problem}")


NOTHING = Carried()


def find_carried(skeleton: Any, base: BaseModel | None) -> Carried:
    """`skeleton`: the trained model, which may be on the meta device. `base`: None for random weights. The base's files
    are downloaded only for a multimodal model, which is not whole without them."""
    if base is None:
        return NOTHING
    ignored = list(skeleton._keys_to_ignore_on_load_unexpected or ())
    if base.wrapper is None and not ignored:
        return NOTHING
    try:
        folder = base.find_folder()
    except (OSError, ValueError) as error:
        if base.wrapper is not None:
            raise
        return Carried(problem=str(error).strip().splitlines()[0])
    own = skeleton.state_dict().keys()
    names = set()
    for name, renamed in map_names(skeleton, folder, find_key_mapping(str(folder))).items():
        is_beside = base.wrapper is not None and not is_text_name(name)
        is_ignored = renamed not in own and is_matched(renamed, ignored)
        if is_beside or (is_ignored and not is_matched(renamed, RECOMPUTED)):
            names.add(name)
    return Carried(folder, frozenset(names))
