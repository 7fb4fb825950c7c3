"""Publishes a model folder on the Hugging Face hub, with retries. The access token is the hub's own (HF_TOKEN, or
`hf auth login`); it appears in no message."""

from __future__ import annotations

import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ulysses_cli.plan.files.regular_files import describe_special, read_regular
from ulysses_cli.plan.problem import Problem, RecipeError
from ulysses_cli.plan.rules.public_names import make_config_public
from ulysses_cli.plan.secrets import collect_secrets, mask_text

PAUSES = (2.0, 8.0, 30.0)  # seconds before each further attempt; each has retries of its own
TEMPORARY = (408, 409, 412, 425, 429, 500, 502, 503, 504)
TOKEN_HINT = "set HF_TOKEN to a token that may write, or run `hf auth login`"
CARD = "README.md"
MAX_CONFIG_BYTES = 1 << 20  # a longer one is a tokenizer
# Names that transformers, peft and this tool give to a model's files. Anything else may be private: keys, notes, .env.
OF_A_MODEL = re.compile(
    r"(?:model|adapter_model)(?:-\d{5}-of-\d{5})?\.safetensors|(?:model|adapter_model)\.safetensors\.index\.json"
    r"|(?:base_config/)?config\.json|(?:generation|adapter|tokenizer|preprocessor|processor|video_preprocessor)_config\.json"
    r"|tokenizer\.json|special_tokens_map\.json|added_tokens\.json|normalizer\.json|vocab(?:-src|-tgt)?\.json|vocab\.txt"
    r"|merges\.txt|bpe\.codes|dict\.txt|(?:source|target)\.spm|[\w-]+\.tiktoken"
    r"|(?:tokenizer|tiktoken|spiece|spm|spm_char|sentencepiece|sentencepiece\.bpe)\.model"
    r"|chat_template\.(?:jinja|json)|additional_chat_templates/[\w-]+\.jinja"
    r"|ulysses\.json|README\.md|(?:LICENSE|NOTICE)(?:\.txt|\.md)?",
    re.ASCII,
)
CODE = re.compile(r"[A-Za-z]\w*\.py", re.ASCII)
MAX_SHOWN = 10
MAX_CONFIG_BYTES = 64 << 20
_T = TypeVar("_T")


def list_files(folder: Path) -> list[Path]:
    """What is uploaded of a model folder besides its card. Raises RecipeError where the folder holds anything that is
    no part of a model, or a link: what it leads to is not meant to be published."""
    if folder.is_symlink():
        hint = "put the folder itself there"
        raise RecipeError([Problem("", f"{folder} is a link; nothing was uploaded", hint)])
    has_code = any(_names_code(folder / name) for name in ("config.json", "tokenizer_config.json"))
    files, others = list[Path](), list[str]()
    for file in sorted(_walk(folder)):
        name = file.relative_to(folder).as_posix()
        if not stat.S_ISREG(file.lstat().st_mode):
            kind = "a link" if file.is_symlink() else describe_special(file) or "no file"
            others.append(f"{name} ({kind})")
        elif OF_A_MODEL.fullmatch(name) or (has_code and CODE.fullmatch(name)):
            files.append(file)
        else:
            others.append(name)
    if others:
        shown = ", ".join(others[:MAX_SHOWN]) + (f" and {len(others) - MAX_SHOWN} more" if others[MAX_SHOWN:] else "")
        hint = "move them out of the folder; where they belong to the model, upload them yourself"
        raise RecipeError(
            [Problem("", f"{folder} holds what is no file of a model: {shown}; nothing was uploaded", hint)]
        )
    return [file for file in files if file.name != CARD]


def _walk(folder: Path) -> Iterator[Path]:
    """Everything below a folder that is no folder itself; links are not followed."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            yield from _walk(path)
        else:
            yield path


def _names_code(file: Path) -> bool:
    """Whether a config says that Python files come with the model."""
    try:
        content = json.loads(read_regular(file, MAX_CONFIG_BYTES)) if not file.is_symlink() else {}
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and "auto_map" in content


def measure_sent(file: Path) -> int:
    sent = read_public(file)
    return len(sent) if isinstance(sent, bytes) else file.stat().st_size


def read_public(file: Path) -> str | bytes:
    """What is sent of a file: its path, or its content where it would name folders of this machine."""
    if file.suffix != ".json" or file.stat().st_size > MAX_CONFIG_BYTES:
        return str(file)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        return str(file)
    public = make_config_public(content) if isinstance(content, dict) else content
    return str(file) if public == content else (json.dumps(public, indent=2, ensure_ascii=False) + "\n").encode()


class HubModels:
    """The models of one account on the hub. `pauses` are the seconds before each further attempt."""

    def __init__(self, report: Callable[[str], None], pauses: tuple[float, ...] = PAUSES) -> None:
        from huggingface_hub import HfApi, constants, get_token
        from huggingface_hub.utils.tqdm import disable_progress_bars

        if constants.HF_HUB_OFFLINE:
            raise RecipeError([Problem("HF_HUB_OFFLINE", "is set: the hub cannot be reached", "unset it to publish")])
        token = get_token()
        if not token:
            raise RecipeError([Problem("", "there is no access token of the hub", TOKEN_HINT)])
        disable_progress_bars()
        # The Xet client is a program of its own that speaks to further services: its retries, messages and use of the
        # token are not ours to test. The hub takes the same files over plain HTTP.
        constants.HF_HUB_DISABLE_XET = True
        self.report, self.pauses = report, pauses
        self.known = {*collect_secrets({}, os.environ), token}
        self.api = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None, token=token)

    def complete_name(self, name: str) -> str:
        """Returns owner/name; an account's own name is the owner where none is given. Asks the hub, which refuses a
        wrong token here, before anything else is done."""
        account: Mapping[str, Any] = self._try("the hub refuses the token", self.api.whoami)
        return name if "/" in name else f"{account['name']}/{name}"

    def find_licence(self, base: str) -> dict[str, str]:
        """Returns the licence of a model as a card has it: license, license_name, license_link. Empty where the hub
        knows none, or not the model."""
        from huggingface_hub.errors import HfHubHTTPError

        try:
            card = self.api.model_info(base).card_data
        except (HfHubHTTPError, OSError, ValueError):
            return {}
        facts: dict[str, Any] = card.to_dict() if card is not None else {}  # type: ignore[no-untyped-call]
        return {key: str(facts[key]) for key in ("license", "license_name", "license_link") if facts.get(key)}

    def publish(self, folder: Path, name: str, card: str, *, is_private: bool, message: str) -> str:
        """Uploads a folder's files, with `card` as its README.md, as one commit. Returns the model's address. A file
        that the hub has already is not sent again, so that a second call goes on where the first one failed."""
        from huggingface_hub import CommitOperationAdd

        def create() -> str:
            return str(self.api.create_repo(name, private=is_private, exist_ok=True))

        address: str = self._try(f"{name} cannot be made", create)
        if is_private and self._try(f"{name} cannot be read", lambda: self.api.model_info(name)).private is False:
            hint = "make it private in its settings on the hub, or name another repository"
            raise RecipeError([Problem("", f"{name} exists already and is public; nothing was uploaded", hint)])
        files = list_files(folder)

        def send() -> None:
            operations = [CommitOperationAdd(file.relative_to(folder).as_posix(), read_public(file)) for file in files]
            operations.append(CommitOperationAdd(CARD, card.encode()))
            self.api.create_commit(name, operations, commit_message=message)

        self._try(f"{name} cannot be written", send)
        return address

    def _try(self, what: str, call: Callable[[], _T]) -> _T:
        """Failures that may pass are tried again; others are told at once."""
        from huggingface_hub.errors import HfHubHTTPError

        for pause in (*self.pauses, None):
            try:
                return call()
            except (HfHubHTTPError, OSError, ValueError) as error:
                response = getattr(error, "response", None)
                status = response.status_code if response is not None else None
                reason = mask_text((str(error).strip().splitlines() or [type(error).__name__])[0][:300], self.known)
                if pause is None or (status is not None and status not in TEMPORARY) or isinstance(error, ValueError):
                    hint = TOKEN_HINT if status in (401, 403) else "try again: files that arrived are not sent again"
                    raise RecipeError([Problem("", f"{what}: {reason}", hint)]) from None
                self.report(f"{what} ({reason}); trying again in {pause:g} s")
                time.sleep(pause)
        raise AssertionError("the last attempt returns or raises")
