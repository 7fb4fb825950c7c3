"""Exports a text model that was part of a multimodal one in that model's own layout: the trained weights under the
names that they have there, all other tensors as they were, and its config with the values that training has changed.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig

from ulysses_cli.plan.files.weight_files import list_weight_names
from ulysses_cli.train.assembly.text_part import BODIES, OWN_BODY, OWN_HEAD, find_part
from ulysses_cli.train.export.base_files import find_base_files

COMPANIONS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
NOT_OF_THE_MODEL = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version"}


@dataclass(frozen=True)
class Wrapper:
    """A multimodal model on disk. `body` and `head`: what its files put before the names of the text model."""

    folder: Path
    content: dict[str, Any]  # of config.json
    body: str
    head: str

    def name_in_files(self, name: str) -> str:
        """Takes the text model's own name."""
        if name.startswith("lm_head."):
            return self.head + name.removeprefix("lm_head.")
        return self.body + name.removeprefix("model.")

    def write_config(self, trained: PretrainedConfig, dtype: torch.dtype, to: Path) -> None:
        """Writes config.json: the wrapper's own, with what differs between the text model before and after."""
        part, before = find_part(self.content), _list_values(AutoConfig.from_pretrained(self.folder))
        after = _list_values(trained)
        changed = {key: value for key, value in after.items() if before.get(key) != value} if before else after
        shared = {key: value for key, value in changed.items() if key in self.content}  # some stand at the top, too
        content = {key: value for key, value in self.content.items() if key != "torch_dtype"}
        content |= {**shared, "dtype": str(dtype).removeprefix("torch."), part: {**self.content[part], **changed}}
        (to / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def copy_companions(self, to: Path) -> None:
        """Copies the settings of the processors, with which the whole model is used."""
        for name in COMPANIONS:
            if (self.folder / name).is_file():
                shutil.copyfile(self.folder / name, to / name)


def _list_values(config: PretrainedConfig) -> dict[str, Any]:
    values = json.loads(config.get_text_config(decoder=True).to_json_string(use_diff=False))
    return {key: value for key, value in values.items() if key not in NOT_OF_THE_MODEL}


def read_wrapper(folder: Path) -> Wrapper | None:
    """Returns the multimodal model of a folder, or None where its files are those of a text model."""
    content, _ = PretrainedConfig.get_config_dict(folder)
    names = list_weight_names(folder) if find_part(content) else []
    body = next((body for body in BODIES if any(each.startswith(body) for each in names)), None)
    if body is None:
        return None
    has_own_head = body == OWN_BODY or any(each.startswith(OWN_HEAD) for each in names)
    return Wrapper(folder, content, body, OWN_HEAD if has_own_head else "lm_head.")


@dataclass(frozen=True)
class BaseModel:
    """What a run began from, by its name on the hub or its folder. Its files are looked for where they are needed."""

    name: str
    revision: str | None = None

    @cached_property
    def folder(self) -> Path:
        return find_base_files(self.name, self.revision)[0].parent

    def find_folder(self) -> Path:
        """Returns the folder. Only a multimodal model's files are downloaded: its export is not whole without them."""
        if self.wrapper is not None:
            return self.folder
        return find_base_files(self.name, self.revision, is_here=True)[0].parent

    @cached_property
    def wrapper(self) -> Wrapper | None:
        """The multimodal model that the trained one is part of. An export gets its layout and its other tensors."""
        content, _ = PretrainedConfig.get_config_dict(os.path.expanduser(self.name), revision=self.revision)
        return read_wrapper(self.folder) if find_part(content) else None
