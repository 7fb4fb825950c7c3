"""What a recipe says in public: names that the hub knows, and nothing of the machine, its folders and its services. A
published card and the files beside it get their names here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ulysses_cli.plan.files import find_address
from ulysses_cli.plan.models.model_files import SHIPPED
from ulysses_cli.plan.rules.files import HUB_NAME, is_local

LOCAL_FOLDER, LOCAL_FILE, LOCAL_FILES = "a local folder", "a local file", "local files"
# snapshots of the hub's cache: models--owner--name/snapshots/REVISION
CACHED = re.compile(r"(?:^|/)(?:models|datasets)--([^/]+(?:--[^/]+)*)/snapshots/[^/]+/?$")
HUB_ADDRESS = re.compile(r"hf://(?:datasets/)?([^/]+/[^/@]+)(?:@[^/]+)?/?$")
# keys of the machine and of services: the published recipe lacks them, and is valid without them
PRIVATE_KEYS = {
    "data": ("store_dir",),
    "memory": ("nvme_path",),
    "run": (
        *("output_dir", "checkpoint_uri", "resume_from_checkpoint", "start_from", "short_check"),
        *("notify_command", "notify_webhook"),
    ),
}
MARKUP = re.compile(r"\{[{%]")  # a template, not the name of its file
NAMES_OF_MODELS = (("model", "name_or_path"), ("model", "tokenizer"), ("lora", "adapter_name_or_path"))


def find_public_name(name: str | None) -> str | None:
    """The hub's name of a model or data set that a recipe names, by itself or by its folder in the hub's cache. None
    for what only this machine has. What was a folder need not exist any more."""
    found = CACHED.search(name or "") or HUB_ADDRESS.match(find_address(name) or name or "")
    if found:
        return found[1].replace("--", "/", 1)
    return name if name and HUB_NAME.fullmatch(name) and not is_local(name) else None


def list_public_datasets(datasets: Iterable[Mapping[str, Any]]) -> list[str]:
    """Their names on the hub; of others only that they are local."""
    return list(dict.fromkeys(map(_name_dataset, datasets)))


def _name_dataset(dataset: Mapping[str, Any]) -> str:
    path = dataset.get("path")
    if path is None:
        return LOCAL_FILES if dataset.get("data_files") else "generated texts"
    name = find_public_name(path) if dataset.get("type") != "folder" else None
    return name if name and "/" in name else LOCAL_FILES


def make_public(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a recipe's plain data for others to read. Doing it twice changes nothing."""
    public = {
        section: {key: value for key, value in content.items() if key not in PRIVATE_KEYS.get(section, ())}
        if isinstance(content, Mapping)
        else content
        for section, content in recipe.items()
    }
    for section, key in NAMES_OF_MODELS:
        if (content := public.get(section)) and content.get(key):
            content[key] = find_public_name(content[key]) or LOCAL_FOLDER
    if (model := public.get("model")) and model.get("config"):
        model["config"] = _leave_out_paths(model["config"])
    if data := public.get("data"):
        for section in ("datasets", "eval_datasets"):
            if section in data:
                data[section] = [_make_dataset_public(dataset) for dataset in data[section]]
        template = data.get("chat_template")
        if template and template not in SHIPPED and not MARKUP.search(template):
            data["chat_template"] = LOCAL_FILE
    if deepspeed := public.get("deepspeed"):
        public["deepspeed"] = _leave_out_paths(deepspeed)
    return public


def _make_dataset_public(dataset: Mapping[str, Any]) -> dict[str, Any]:
    name = _name_dataset(dataset)
    if name == LOCAL_FILES:
        return {**dataset, "path": name, "data_files": None}
    return {**dataset, "path": dataset.get("path") and name}


def _leave_out_paths(value: Any) -> Any:
    """Without the keys whose values are paths."""
    if isinstance(value, Mapping):
        return {key: _leave_out_paths(item) for key, item in value.items() if not _is_path(item)}
    if isinstance(value, list | tuple):
        return [_leave_out_paths(item) for item in value if not _is_path(item)]
    return value


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and value.startswith(("/", "~", "./", "../", "file:"))


def make_config_public(content: Mapping[str, Any]) -> dict[str, Any]:
    """A config file's content with names of the hub alone: null where only this machine has what is named."""
    return {
        key: find_public_name(value) if key.endswith("name_or_path") and isinstance(value, str) else value
        for key, value in content.items()
    }
