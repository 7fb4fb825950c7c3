"""What an export takes from the base model's files: names and parts of tensors, numbers that training does not change,
tensors that the trained model has no place for, and the multimodal model around a text model.  Files of one family
may hold experts stacked or one by one: an export writes what the base model's files do. All other tensors are
carried over as they are."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from ulysses_cli.plan.models.model_files import find_weight_problem, list_weight_files, list_weight_names, read_header
from ulysses_cli.run.checkpoints import CheckpointError
from ulysses_cli.train.model.loading import (
    BODIES,
    OWN_BODY,
    OWN_HEAD,
    RECOMPUTED,
    find_key_mapping,
    find_part,
    is_matched,
    is_text_name,
    map_names,
)


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
        except (HFValidationError, LocalEntryNotFoundError) as error:
            is_name = isinstance(error, LocalEntryNotFoundError)
            why = ", and the hub cannot be reached" if is_name else ", and is no name on the hub"
            raise ValueError(f"{name} is not on this machine{'' if is_here else why}") from None
    if problem := find_weight_problem(folder):
        raise ValueError(problem)
    files = list_weight_files(folder)
    if not files:
        raise ValueError(f"{folder} holds no safetensors files; only those can be read one tensor at a time")
    return files


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


def list_buffer_names(model: Any) -> set[str]:
    """Returns the names of those that belong to the model's files. `model`: as its class makes it, without adapters; it
    may be on the meta device."""
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    return frozen | ({name for name, _ in model.named_buffers()} & model.state_dict().keys())


def read_buffers(skeleton: Any, base: BaseModel | None) -> dict[str, Tensor]:
    """Returns the buffers as the base model's files hold them, by the model's own names. `skeleton`: the model on the
    meta device. `base`: None for a model from random weights, which has the buffers of its class."""
    from transformers import AutoModelForCausalLM

    names = list_buffer_names(skeleton)
    if not names:
        return {}
    if base is None:
        made = AutoModelForCausalLM.from_config(copy.deepcopy(skeleton.config))
        return {name: value for name, value in made.state_dict().items() if name in names}
    values = {}
    own_names = map_names(skeleton, base.folder, find_key_mapping(str(base.folder)))
    for file in list_weight_files(base.folder):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                if own_names.get(name) in names:
                    values[own_names[name]] = opened.get_tensor(name)
    if missing := sorted(names - values.keys()):
        raise CheckpointError(f"the base model's files lack {', '.join(missing[:3])}")
    return values


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


class FileLayout:
    """`skeleton`: the model, which may be on the meta device. `folder`: the base model's; None where transformers
    chooses the layout. Names in files are those of a text model, also where the base is a multimodal one.

    A tensor that the files hold as the model does has the name that it has there. All others are split by transformers'
    rules, of which those that the files do not need are left out."""

    def __init__(self, skeleton: Any, folder: Path | None) -> None:
        self.skeleton = skeleton
        self.whole: dict[str, str] = {}  # names in the files, by the model's own
        self.rules: list[Any] | None = None
        if folder is None:
            return
        own, self.rules = skeleton.state_dict(), _list_rules(skeleton)
        found = {name: _find_own(name, self.rules, skeleton, own) for name in _list_text_names(folder)}
        found = {name: (own_name, is_whole) for name, (own_name, is_whole) in found.items() if own_name in own}
        self.whole = {own_name: name for name, (own_name, is_whole) in found.items() if is_whole}
        rules = _list_rules(skeleton)  # other tensors of the files have used the first ones
        for name in found:
            _find_own(name, rules, skeleton, own)
        self.rules = [rule for rule in rules if rule.was_used()]

    def name_in_files(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Renames and splits tensors, which may be on the meta device, too. A tensor of the files may be made of
        several: these must be given together."""
        from transformers.core_model_loading import revert_weight_conversion

        whole = {self.whole[name]: tensor for name, tensor in tensors.items() if name in self.whole}
        others = {name: tensor for name, tensor in tensors.items() if name not in self.whole}
        self.skeleton._weight_conversions = self.rules  # where transformers keeps those that a model's files needed
        try:
            return whole | revert_weight_conversion(self.skeleton, others)
        finally:
            del self.skeleton._weight_conversions


def _list_rules(skeleton: Any) -> list[Any]:
    from transformers.conversion_mapping import get_model_conversion_mapping

    return list(get_model_conversion_mapping(skeleton, add_legacy=False))


def _list_text_names(folder: Path) -> list[str]:
    """Names of the text model's tensors in the files, without what a multimodal model puts before them."""
    names, mapping = list_weight_names(folder), find_key_mapping(str(folder))
    if mapping is None:
        return names
    names = [name for name in names if is_text_name(name)]
    for pattern, target in mapping.items():
        names = [re.sub(pattern, target, name) for name in names]
    return names


def _find_own(name: str, rules: Sequence[Any], skeleton: Any, own: dict[str, Tensor]) -> tuple[str, bool]:
    """Returns the model's name for a tensor of the files, and whether it is the same tensor."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    prefix = skeleton.base_model_prefix
    own_name, pattern = rename_source_key(name, renamings, converters, base_model_prefix=prefix, meta_state_dict=own)
    return own_name, pattern is None
