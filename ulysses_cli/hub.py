"""Where a model's config.json comes from: a local folder, the Hugging Face cache, the shipped table, or the hub.
The only network access outside of training, and only if asked for. A config that cannot be read is a Problem, never
a guess. Whether the installed transformers knows a model type is read from the text of its table."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ulysses_cli.plan.files import find_address, find_special, read_regular
from ulysses_cli.plan.ledger.weights import find_num_parameters
from ulysses_cli.plan.models.families import FAMILIES, REFUSED_FAMILIES
from ulysses_cli.plan.models.model_files import (
    TokenizerFacts,
    describe_bytes,
    grow_config,
    predict_vocab_size,
    read_tokenizer,
)
from ulysses_cli.plan.models.shape import ModelShape, ModelSummary, read_model_shape, summarize
from ulysses_cli.plan.problem import Problem, RecipeError
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.plan.resolved import list_auto_rings

TABLES = "models/auto/*.py"


def is_known_type(model_type: str) -> bool:
    """True as well where transformers is not installed: then nobody knows."""
    spec = find_spec("transformers")
    if spec is None or spec.origin is None:
        return True
    tables = list(Path(spec.origin).parent.glob(TABLES))
    return not tables or any(f'"{model_type}"' in table.read_text(encoding="utf-8") for table in tables)


KEY = "model.name_or_path"
SHIPPED_TABLE = Path(__file__).parent / "plan" / "models"
MAX_CONFIG_BYTES = 16 << 20
SIZE = re.compile(r"(\d+(?:\.\d+)?)([bm])(?![a-z0-9])")  # 72b, 0.6b, 350m in a model's name
MOST_TIMES_LARGER = 1.5  # of two models whose memory and speed are alike
REACH_SECONDS = 10


@dataclass(frozen=True)
class ModelSource:
    """A model's shape, and in words where its config.json comes from."""

    shape: ModelShape
    source: str


def find_model_shape(recipe: Recipe, *, online: bool = False) -> ModelSource:
    """The shape of a recipe's model. Raises RecipeError with a problem that says what to do."""
    _refuse_special_files(recipe)
    config, source = find_model_config(recipe, online=online)
    if recipe.model.config is not None:
        return ModelSource(read_model_shape(config, "the model of model.config", "model.config"), source)
    return ModelSource(read_model_shape(config, str(recipe.model.name_or_path)), source)


def check_type(shape: ModelShape, recipe: Recipe) -> None:
    """Refuses a type that transformers does not know, if no code comes with the model. Raises RecipeError."""
    kind = shape.model_type
    if kind in FAMILIES or kind in REFUSED_FAMILIES or recipe.model.trust_remote_code or is_known_type(kind):
        return
    close = difflib.get_close_matches(kind, FAMILIES, n=1, cutoff=0.75)
    hint = "a newer transformers may know it; model.trust_remote_code: true takes code that comes with the model"
    hint = f"did you mean {close[0]}?" if close else hint
    key = KEY if recipe.model.config is None else "model.config"
    raise RecipeError([Problem(key, f"the installed transformers knows no model type {kind}", hint)])


def _refuse_special_files(recipe: Recipe) -> None:
    """Refuses a FIFO or a device in a model's folder, since the libraries that read the folder would hang on it."""
    for key in ("name_or_path", "tokenizer"):
        folder = Path(os.path.expanduser(getattr(recipe.model, key) or ""))
        if getattr(recipe.model, key) and folder.is_dir() and (problem := find_special(folder)):
            raise RecipeError([Problem(f"model.{key}", problem, "remove it from the folder")])


def find_tokenizer(recipe: Recipe) -> TokenizerFacts | None:
    """Facts from the tokenizer's files; None where they are not on this machine."""
    model = recipe.model
    name = model.tokenizer or model.name_or_path
    if name is None or name == "bytes":
        return describe_bytes() if name else None
    folder = find_folder(name, None if model.tokenizer else model.revision)
    return read_tokenizer(folder, name) if folder else None


def find_folder(name: str, revision: str | None = None) -> Path | None:
    """The files of a folder or a hub name that are on this machine."""
    local = Path(os.path.expanduser(name))
    return local if local.is_dir() else _find_snapshot(name, revision)


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
        raise RecipeError([])  # check_model_source reports what is missing
    if os.path.isdir(os.path.expanduser(name)):
        file = Path(os.path.expanduser(name)) / "config.json"
        return read_config(file), str(file)
    if os.path.isfile(os.path.expanduser(name)):
        raise RecipeError([Problem(KEY, f"{name} is a file, not a folder", "name the folder that holds config.json")])
    if address := find_address(name):
        problem = Problem(KEY, f"{address} is not on this machine yet", "ulysses prepare and train download it")
        raise RecipeError([problem])
    if "://" in name:
        hint = "write owner/name as the hub shows it, or a local folder"
        raise RecipeError([Problem(KEY, f"{name} is an address, not a name", hint)])
    if _looks_like_path(name):
        raise RecipeError([Problem(KEY, f"{name} is not a folder", "name a folder that holds config.json")])
    cached = _find_cached(name, model.revision)
    if cached is not None:
        return read_config(cached), "the Hugging Face cache"
    entry = _find_in_table(name) if model.revision in (None, "main") else None
    if entry is not None:
        return entry["config"], "the table of well-known models"
    if online:
        return _fetch_config(name, model.revision), "the hub"
    raise RecipeError([_explain_missing(name, model.revision)])


def check_model(name: str) -> None:
    """Raises RecipeError for a name that is no folder, and that neither the cache nor the hub has as a model."""
    if _looks_like_path(name):
        hint = "name a folder that holds config.json, or owner/name as the hub shows it"
        raise RecipeError([Problem(KEY, "this is a path, not a hub name", hint)])
    if _find_cached(name, None) is None:
        _fetch_config(name, None)


def check_weights_access(recipe: Recipe) -> None:
    """Raises RecipeError where ranks would download the model's weights and cannot."""
    name = recipe.model.name_or_path
    if recipe.model.config is not None or name is None or "://" in name or os.path.isdir(os.path.expanduser(name)):
        return
    snapshot = _find_snapshot(name, recipe.model.revision)
    if snapshot is None or not any((*snapshot.glob("*.safetensors"), *snapshot.glob("*.bin"))):
        _fetch_config(name, recipe.model.revision)


def _find_in_table(name: str) -> Mapping[str, Any] | None:
    """Looks for a file of this name first, so that the whole table is read only for a model's other names."""
    own = get_user_folder() / "models"
    file = SHIPPED_TABLE / f"{name.replace('/', '--')}.json"
    if not own.is_dir() and os.path.isfile(file):
        return read_config(file)
    return load_table().get(name.lower())


def load_table() -> dict[str, Mapping[str, Any]]:
    """Well-known models by lower-case name. A file in the user's folder overrides a shipped one."""
    table: dict[str, Mapping[str, Any]] = {}
    for folder in (SHIPPED_TABLE, get_user_folder() / "models"):
        for file in sorted(folder.glob("*.json")):
            entry = read_config(file)
            if not isinstance(entry.get("repo"), str) or not isinstance(entry.get("config"), dict):
                raise RecipeError([Problem(KEY, f"{file} has no `repo` and `config`", "see the shipped models/*.json")])
            other_names = entry.get("also") or []
            if not isinstance(other_names, list):
                raise RecipeError(
                    [Problem(KEY, f"{file}: `also` is not a list of names", "see the shipped models/*.json")]
                )
            for name in (entry["repo"], *other_names):
                table[str(name).lower()] = entry
    return table


def summarize_table() -> list[ModelSummary]:
    """Every well-known model once, by name."""
    entries = {str(entry["repo"]): entry for entry in load_table().values()}
    return [
        summarize(
            shape, entry.get("num_parameters") or find_num_parameters(shape), _read_gate(entry), list_auto_rings(shape)
        )
        for name, entry in sorted(entries.items(), key=lambda item: item[0].lower())
        for shape in (read_model_shape(entry["config"], name),)
    ]


def find_gate(name: str) -> bool | None:
    """Whether the hub asks to accept a licence first; None where the table does not know."""
    return _read_gate(load_table().get(name.lower()) or {})


def _read_gate(entry: Mapping[str, Any]) -> bool | None:
    gated = entry.get("gated")
    return gated if isinstance(gated, bool) else None


def get_user_folder() -> Path:
    """The folder of a user's own models and hardware table."""
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(base) / "ulysses"


def _looks_like_path(name: str) -> bool:
    return name.startswith(("/", "./", "../", "~")) or name.count("/") > 1


def read_config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(read_regular(file, MAX_CONFIG_BYTES), object_hook=_decode_number)
    except FileNotFoundError:
        raise RecipeError([Problem(KEY, f"{file} does not exist", "a model folder holds config.json")]) from None
    except OSError as error:
        raise RecipeError([Problem(KEY, f"{file} cannot be read: {error.strerror}")]) from None
    except (ValueError, RecursionError) as error:
        raise RecipeError([Problem(KEY, f"{file} is not valid JSON: {error}", "download it again")]) from None
    if not isinstance(config, dict):
        raise RecipeError([Problem(KEY, f"{file} holds no mapping", "download it again")])
    return config


def _decode_number(mapping: dict[str, Any]) -> Any:
    """transformers writes an infinite number as a mapping (configuration_utils.py: _encode_special_floats)."""
    number = mapping.get("__float__")
    return float(number) if isinstance(number, str) else mapping


def _find_cached(name: str, revision: str | None) -> Path | None:
    """config.json of a model in the hub's cache."""
    folder = _find_snapshot(name, revision)
    return folder / "config.json" if folder and (folder / "config.json").is_file() else None


def _find_snapshot(name: str, revision: str | None) -> Path | None:
    """A model's folder in the hub's cache. The layout is the cache's: refs/<branch> names a snapshot."""
    general = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(general, "huggingface")
    cache = Path(os.path.expanduser(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")))
    repo = cache / f"models--{name.replace('/', '--')}"
    snapshot = revision or "main"
    try:
        snapshot = (repo / "refs" / snapshot).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        pass  # not a branch or tag: perhaps a commit
    folder = repo / "snapshots" / snapshot
    return folder if folder.is_dir() and ".." not in Path(snapshot).parts else None


def _fetch_config(name: str, revision: str | None) -> dict[str, Any]:
    """Downloads config.json with huggingface_hub, which stores it in the cache."""
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

    way = f"to work offline, run `hf download {name} --local-dir DIR` elsewhere, and name a copy of DIR"
    if constants.HF_HUB_OFFLINE:
        hint = f"unset it; {way}"
        raise RecipeError([Problem(KEY, f"{name} is not on disk, and HF_HUB_OFFLINE forbids downloads", hint)])
    try:
        _reach(constants.ENDPOINT)  # the library alone would retry for half a minute
        return read_config(Path(hf_hub_download(name, "config.json", revision=revision)))
    except GatedRepoError:
        hint = f"accept its licence at https://huggingface.co/{name}, then set HF_TOKEN or run `hf auth login`"
        raise RecipeError(
            [Problem(KEY, f"{name} is gated: the hub requires an account that accepted its licence", hint)]
        ) from None
    except RepositoryNotFoundError:
        hint = _suggest_names(name) or "check the name; a private model needs HF_TOKEN"
        raise RecipeError([Problem(KEY, f"the hub has no model {name}", hint)]) from None
    except RevisionNotFoundError:
        raise RecipeError(
            [Problem("model.revision", f"{name} has no revision {revision}", "leave it out to use main")]
        ) from None
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, ConnectionError):
        hint = f"check the connection and its proxy; {way}"
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
        pass  # the hub can be reached
    except (URLError, OSError, ValueError) as error:
        raise ConnectionError(endpoint) from error


def _explain_missing(name: str, revision: str | None) -> Problem:
    at = f" at revision {revision}" if revision not in (None, "main") else ""
    ways = "add --online to download its config.json, or name a local folder"
    close = "" if revision not in (None, "main") else _find_close_name(name)
    message = f"config.json of {name}{at} is not on this machine: not in a folder, the Hugging Face cache or the table"
    return Problem(KEY, message, f"{ways}; a similar model that is known is {close}" if close else ways)


def _suggest_names(name: str) -> str:
    close = _find_close_name(name)
    return f"did you mean {close}?" if close else ""


def _find_close_name(name: str) -> str:
    """The known name that is spelled most like this one, of models of about its size; '' if there is none."""
    table = load_table()
    alike = difflib.get_close_matches(name.lower(), table, n=len(table), cutoff=0.75)
    close = next((each for each in alike if _is_alike_in_size(name, each)), None)
    if close is None:
        return ""
    entry = table[close]
    names = (entry["repo"], *(entry.get("also") or ()))
    return str(next(known_name for known_name in names if known_name.lower() == close))


def _is_alike_in_size(name: str, other: str) -> bool:
    """Where both names say how many weights the model has."""
    sizes = [float(number) * (1e9 if unit == "b" else 1e6) for number, unit in map(_read_size, (name, other)) if unit]
    return len(sizes) < 2 or max(sizes) <= MOST_TIMES_LARGER * min(sizes)


def _read_size(name: str) -> tuple[str, str]:
    """Number and unit of weights in a model's name, such as 72 and b."""
    found = SIZE.search(name.lower())
    return (found[1], found[2]) if found else ("", "")
