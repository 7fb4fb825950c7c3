"""Where a model's config.json comes from: a local folder, the Hugging Face cache, the shipped table, or the hub.

The only network in the light half, and only when asked. A config that cannot be had is a Problem, never a guess.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ulysses_cli.plan.files.regular_files import find_special, read_regular
from ulysses_cli.plan.models.shape import ModelShape, read_model_shape
from ulysses_cli.plan.models.vocabulary import (
    TokenizerFacts,
    describe_bytes,
    grow_config,
    predict_vocab_size,
    read_tokenizer,
)
from ulysses_cli.plan.problem import Problem, RecipeError
from ulysses_cli.plan.recipe.recipe import Recipe

KEY = "model.name_or_path"
SHIPPED_TABLE = Path(__file__).parent / "plan" / "models"
MAX_CONFIG_BYTES = 16 << 20
REACH_SECONDS = 10


@dataclass(frozen=True)
class ModelSource:
    """A model's shape and where its facts come from, in words."""

    shape: ModelShape
    source: str


def find_model_shape(recipe: Recipe, *, online: bool = False) -> ModelSource:
    """The shape of a recipe's model. Raises RecipeError with one problem that says what to do."""
    _refuse_special_files(recipe)
    config, source = find_model_config(recipe, online=online)
    if recipe.model.config is not None:
        return ModelSource(read_model_shape(config, "the model of model.config", "model.config"), source)
    return ModelSource(read_model_shape(config, str(recipe.model.name_or_path)), source)


def _refuse_special_files(recipe: Recipe) -> None:
    """A FIFO or a device in a model's folder, which the libraries that read it would wait for."""
    for key in ("name_or_path", "tokenizer"):
        folder = Path(os.path.expanduser(getattr(recipe.model, key) or ""))
        if getattr(recipe.model, key) and folder.is_dir() and (found := find_special(folder)):
            raise RecipeError([Problem(f"model.{key}", found, "take it out of the folder")])


def find_tokenizer(recipe: Recipe) -> TokenizerFacts | None:
    """What the tokenizer's files say; None where they are not on disk."""
    model = recipe.model
    name = model.tokenizer or model.name_or_path
    if name is None or name == "bytes":
        return describe_bytes() if name else None
    local = Path(os.path.expanduser(name))
    folder = local if local.is_dir() else _find_snapshot(name, None if model.tokenizer else model.revision)
    return read_tokenizer(folder, name) if folder else None


def find_model_config(recipe: Recipe, *, online: bool = False) -> tuple[Mapping[str, Any], str]:
    """The content of the model's config.json, with room for the recipe's added tokens, and where it comes from in
    words."""
    config, source = _find_own_config(recipe, online=online)
    added = recipe.data.added_tokens
    if added:
        size = read_model_shape(config, str(recipe.model.name_or_path)).vocab_size
        config = grow_config(config, predict_vocab_size(size, added, find_tokenizer(recipe)))
    return config, source


def _find_own_config(recipe: Recipe, *, online: bool) -> tuple[Mapping[str, Any], str]:
    model = recipe.model
    if model.config is not None:
        return model.config, "the recipe itself"
    name = model.name_or_path
    if name is None:
        raise RecipeError([])  # check_model_source says what is missing
    if os.path.isdir(os.path.expanduser(name)):
        file = Path(os.path.expanduser(name)) / "config.json"
        return _read_config(file), str(file)
    if "://" in name:
        hint = "write owner/name as the hub shows it, or a local folder"
        raise RecipeError([Problem(KEY, f"{name} is an address, not a name", hint)])
    if _looks_like_path(name):
        raise RecipeError([Problem(KEY, f"{name} is not a folder", "name a folder that holds config.json")])
    cached = _find_cached(name, model.revision)
    if cached is not None:
        return _read_config(cached), "the Hugging Face cache"
    entry = _find_in_table(name) if model.revision in (None, "main") else None
    if entry is not None:
        return entry["config"], "the table of well-known models"
    if online:
        return _fetch_config(name, model.revision), "the hub"
    raise RecipeError([_explain_missing(name, model.revision)])


def _find_in_table(name: str) -> Mapping[str, Any] | None:
    """By file name when that answers, so that the whole table is read only for a model's other names."""
    own = get_user_folder() / "models"
    file = SHIPPED_TABLE / f"{name.replace('/', '--')}.json"
    if not own.is_dir() and os.path.isfile(file):
        return _read_config(file)
    return load_table().get(name.lower())


def load_table() -> dict[str, Mapping[str, Any]]:
    """Well-known models by lower-case name. A file in the user's own folder wins over a shipped one."""
    table: dict[str, Mapping[str, Any]] = {}
    for folder in (SHIPPED_TABLE, get_user_folder() / "models"):
        for file in sorted(folder.glob("*.json")):
            entry = _read_config(file)
            if not isinstance(entry.get("repo"), str) or not isinstance(entry.get("config"), dict):
                raise RecipeError([Problem(KEY, f"{file} has no `repo` and `config`", "see the shipped models/*.json")])
            also = entry.get("also") or []
            if not isinstance(also, list):
                raise RecipeError(
                    [Problem(KEY, f"{file}: `also` is not a list of names", "see the shipped models/*.json")]
                )
            for name in (entry["repo"], *also):
                table[str(name).lower()] = entry
    return table


def get_user_folder() -> Path:
    """Where a user's own models and hardware live."""
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(base) / "ulysses"


def _looks_like_path(name: str) -> bool:
    return name.startswith(("/", "./", "../", "~")) or name.count("/") > 1


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(read_regular(file, MAX_CONFIG_BYTES))
    except FileNotFoundError:
        raise RecipeError([Problem(KEY, f"{file} does not exist", "a model folder holds config.json")]) from None
    except OSError as error:
        raise RecipeError([Problem(KEY, f"{file} cannot be read: {error.strerror}")]) from None
    except (ValueError, RecursionError) as error:
        raise RecipeError([Problem(KEY, f"{file} is not valid JSON: {error}", "download it again")]) from None
    if not isinstance(config, dict):
        raise RecipeError([Problem(KEY, f"{file} holds no mapping", "download it again")])
    return config


def _find_cached(name: str, revision: str | None) -> Path | None:
    """config.json of a model in the hub's cache."""
    folder = _find_snapshot(name, revision)
    return folder / "config.json" if folder and (folder / "config.json").is_file() else None


def _find_snapshot(name: str, revision: str | None) -> Path | None:
    """A model's folder in the hub's cache, by the cache's own layout: refs/<branch> names a snapshot."""
    general = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(general, "huggingface")
    cache = Path(os.path.expanduser(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")))
    repo = cache / f"models--{name.replace('/', '--')}"
    wanted = revision or "main"
    try:
        wanted = (repo / "refs" / wanted).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        pass  # not a branch or tag: perhaps a commit
    folder = repo / "snapshots" / wanted
    return folder if folder.is_dir() and ".." not in Path(wanted).parts else None


def _fetch_config(name: str, revision: str | None) -> dict[str, Any]:
    """Download config.json through huggingface_hub, which keeps it in the cache."""
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if constants.HF_HUB_OFFLINE:
        hint = "unset it, fetch the model where there is a network, or name a local folder"
        raise RecipeError([Problem(KEY, f"{name} is not on disk, and HF_HUB_OFFLINE forbids to ask the hub", hint)])
    try:
        _reach(constants.ENDPOINT)  # the library itself would try for half a minute
        return _read_config(Path(hf_hub_download(name, "config.json", revision=revision)))
    except GatedRepoError:
        hint = f"accept its licence at https://huggingface.co/{name}, then set HF_TOKEN or run `hf auth login`"
        raise RecipeError(
            [Problem(KEY, f"{name} is gated: the hub wants an account that accepted its licence", hint)]
        ) from None
    except RepositoryNotFoundError:
        hint = _suggest_names(name) or "check the name; a private model needs HF_TOKEN"
        raise RecipeError([Problem(KEY, f"the hub has no model {name}", hint)]) from None
    except RevisionNotFoundError:
        raise RecipeError(
            [Problem("model.revision", f"{name} has no revision {revision}", "leave it out for main")]
        ) from None
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, ConnectionError):
        hint = "check the connection and its proxy, or name a local folder"
        raise RecipeError([Problem(KEY, f"{name} is not on disk, and the hub cannot be reached", hint)]) from None
    except EntryNotFoundError:
        hint = "it is not a transformers model; look for a converted one"
        raise RecipeError([Problem(KEY, f"{name} has no config.json", hint)]) from None
    except HFValidationError:
        raise RecipeError([Problem(KEY, f"{name} is not a hub name", "write owner/name, or a local folder")]) from None
    except (HfHubHTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise RecipeError([Problem(KEY, f"the hub refused: {reason}", "try again, or name a local folder")]) from None


def _reach(endpoint: str) -> None:
    from urllib.error import HTTPError, URLError
    from urllib.request import Request, urlopen

    try:
        urlopen(Request(endpoint, method="HEAD"), timeout=REACH_SECONDS).close()
    except HTTPError:
        pass  # it answered
    except (URLError, OSError, ValueError) as error:
        raise ConnectionError(endpoint) from error


def _explain_missing(name: str, revision: str | None) -> Problem:
    at = f" at revision {revision}" if revision not in (None, "main") else ""
    ways = "add --online to ask the hub, or name a local folder"
    close = "" if revision not in (None, "main") else _find_close_name(name)
    message = f"the shape of {name}{at} is not known here: not a folder, not in the Hugging Face cache or the table"
    return Problem(KEY, message, f"{ways}; known here is {close}" if close else ways)


def _suggest_names(name: str) -> str:
    close = _find_close_name(name)
    return f"did you mean {close}?" if close else ""


def _find_close_name(name: str) -> str:
    known = load_table()
    close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.75)
    if not close:
        return ""
    entry = known[close[0]]
    return str(next(n for n in (entry["repo"], *(entry.get("also") or ())) if n.lower() == close[0]))
