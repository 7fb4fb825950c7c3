"""Masks passwords and access tokens before text is shown or written. In doubt it masks too much.

A secret is recognized by its pattern, by the name of its key, or, once collected, by its value anywhere.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

MASK = "***"
LONE_NAMES = r"(?:^|_)(?:pat|pass|auth)"  # whole words only, because other names contain them: path, compass, author
SECRET_KEY = re.compile(
    rf"token|key|secret|passw|passphrase|credential|pwd|webhook|connection_?string|authorization|{LONE_NAMES}$", re.I
)
HARMLESS_KEY = re.compile(r"tokenizers?|added_tokens|token_loss", re.I)  # names, versions; words of a vocabulary
NUMERIC_SECRET_KEY = re.compile(  # num_tokens, pad_token_id are counts
    rf"(token|key|secret|passw\w*|passphrase|pwd|credentials?|{LONE_NAMES})$", re.I
)
# Environment variables that hold secrets: HF_TOKEN, HF_TOKEN_2, AWS_ACCESS_KEY_ID, GCP_CREDENTIALS_JSON, not OLDPWD
SECRET_VARIABLE = re.compile(
    rf"(TOKEN|KEY|SECRET|PASSW(OR)?D|PASSPHRASE|_PWD|CREDENTIALS?|CONNECTION_?STRING|WEBHOOK(_URL)?|{LONE_NAMES})"
    r"(_ID|_JSON|_\d+)*$",
    re.I,
)
UNRESERVED = string.ascii_letters + string.digits + "-._~"  # characters that addresses do not encode
VARIABLE = re.compile(r"\$(?P<name>[A-Za-z_][A-Za-z0-9_]*)")
MIN_SECRET_LETTERS = 6  # a shorter value under a secret name is a word such as `true`, which occurs in every text
# All bounded: the text may have been written to make the search slow.
WORD = r"[^\s\"'<>\\]"
IN_ADDRESS = re.compile(  # user:password@host
    rf"(?<=://)[^\s/@\"'<>:]{{0,99}}:{WORD}{{1,256}}(?=@)|(?<=://)[^\s/@]{{1,256}}(?=@)"
)
LOOKS = (
    re.compile(
        r"\b(?:hf_|sk-|gh[oprsu]_|glpat-|github_pat_|xox[abeoprs]-|AKIA|ASIA|AIza|eyJ|nvapi-|gsk_|r8_|xai-|dckr_pat_"
        r"|hvs\.|whsec_|[rs]k_(?:live|test)_)[\w.\-]{6,}"
        r"|\bnpm_[A-Za-z0-9]{10,}|\bpypi-[\w\-]{16,}"
        r"|-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----(?:(?!-----END)[^\"']){0,20000}(?:-----END [A-Z ]{0,30}-----)?"
    ),
    IN_ADDRESS,  # apart: the user's name may itself look like a key
    re.compile(rf"\b(?:Bearer\s{{1,9}}|bearer\s{{1,9}}(?={WORD}{{6}}))(?P<secret>{WORD}+)"),
    re.compile(
        rf"\bauthorization[\"']?\s{{0,9}}[:=]\s{{0,9}}[\"']?(?:[a-z]{{1,20}}\s{{1,9}})?(?P<secret>{WORD}+)", re.I
    ),
    re.compile(
        r"[?&][^=&?\s]{0,64}(?:token|key|secret|passw|pwd|sig|credential|auth)[^=&?\s]{0,64}="
        rf"(?P<secret>(?:(?!&){WORD})+)",
        re.I,
    ),
)
ASSIGNMENT = re.compile(  # for documents only, where masking one word too many does no harm
    r"(?:api_?key|secret|passw(?:or)?d|passphrase|(?:access|private|signing|account)_?key|(?:auth|access)_?token)"
    rf"\w{{0,20}}[\"']?\s{{0,3}}(?:=|:)\s{{0,3}}[\"']?(?P<secret>{WORD}{{6,}})",
    re.I,
)


def collect_secrets(recipe: Any, environ: Mapping[str, str]) -> frozenset[str]:
    """Values under secret names in a recipe or the environment. Any message may repeat them: whole, line by line, or
    encoded as in JSON and addresses."""
    named = [value for name, value in environ.items() if SECRET_VARIABLE.search(name)]
    values = [*named, *(inner for value in named for inner in _walk_json(value)), *_walk_secret(recipe, "", False)]
    spelled = (text.strip() for value in values for text in _spell(value))
    return frozenset(text for text in spelled if len(text) >= MIN_SECRET_LETTERS)


def find_named_secrets(recipe: Any) -> dict[str, str]:
    """A recipe's secrets by key: what stands under a secret name. $NAME is none."""
    return {
        key: value
        for key, value in _walk_texts(recipe, "", False)
        if len(value) >= MIN_SECRET_LETTERS and not VARIABLE.fullmatch(value)
    }


def find_variable(value: str) -> tuple[str, ...]:
    """The name of the environment variable that a value such as $NAME stands for; () for another value."""
    match = VARIABLE.fullmatch(value)
    return (match["name"],) if match else ()


def _walk_texts(value: Any, path: str, is_secret: bool) -> Iterator[tuple[str, str]]:
    is_secret = is_secret or _is_secret_key(path.rpartition(".")[2])
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _walk_texts(item, f"{path}.{name}" if path else str(name), is_secret)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _walk_texts(item, f"{path}.{index}", is_secret)
    elif isinstance(value, str) and is_secret:
        yield path, value


def _spell(value: str) -> Iterator[str]:
    yield value
    yield from value.splitlines()
    yield json.dumps(value)[1:-1]
    yield json.dumps(value, ensure_ascii=False)[1:-1]
    yield "".join(chr(byte) if chr(byte) in UNRESERVED else f"%{byte:02X}" for byte in value.encode("utf-8", "replace"))


def _walk_json(text: str) -> Iterator[str]:
    """Secrets of a value that is JSON itself, such as a service account's."""
    try:
        content = json.loads(text) if text.lstrip().startswith("{") else {}
    except (ValueError, RecursionError):
        return
    yield from _walk_secret(content, "", False)


def _walk_secret(value: Any, key: str, is_secret: bool) -> Iterator[str]:
    is_secret = is_secret or _is_secret_key(key)
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _walk_secret(item, str(name), is_secret)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _walk_secret(item, key, is_secret)
    elif isinstance(value, str) and is_secret and value != MASK:
        yield value


def _is_secret_key(key: str) -> bool:
    return bool(SECRET_KEY.search(HARMLESS_KEY.sub("", key)))


def mask_text(text: str, known: Collection[str] = ()) -> str:
    return _cut(text, _find_spans(text, known, LOOKS))


def mask_document(parts: Sequence[str], known: Collection[str] = ()) -> tuple[list[str], int]:
    """Takes a text in parts; returns the parts without secrets, also those that cross from one part into the next, and
    the number of secrets."""
    text = "".join(parts)
    spans = _find_spans(text, known, (*LOOKS, ASSIGNMENT))
    masked, at = [], 0
    for part in parts:
        inside = [(max(0, start - at), min(len(part), stop - at)) for start, stop in spans]
        masked.append(_cut(part, [(start, stop) for start, stop in inside if start < stop]))
        at += len(part)
    return masked, len(spans)


def _find_spans(text: str, known: Collection[str], looks: Sequence[re.Pattern[str]]) -> list[tuple[int, int]]:
    """Spans of the text that are secrets, in order and without overlap."""
    matches = [match.span() for secret in known if secret in text for match in re.finditer(re.escape(secret), text)]
    for look in looks:
        group: str | int = "secret" if "secret" in look.groupindex else 0
        matches += [match.span(group) for match in look.finditer(text)]
    spans: list[tuple[int, int]] = []
    for start, stop in sorted(matches):
        if spans and start < spans[-1][1]:
            spans[-1] = (spans[-1][0], max(stop, spans[-1][1]))
        else:
            spans.append((start, stop))
    return spans


def _cut(text: str, spans: Sequence[tuple[int, int]]) -> str:
    for start, stop in reversed(spans):
        text = f"{text[:start]}{MASK}{text[stop:]}"
    return text


def mask_secrets(value: Any, key: str = "", *, is_secret: bool = False, known: Collection[str] = ()) -> Any:
    """A copy of plain data without its secrets. Everything below a secret key is secret too."""
    bare = HARMLESS_KEY.sub("", key)
    is_secret = is_secret or _is_secret_key(key)
    if isinstance(value, dict):
        return {
            mask_text(str(name), known): mask_secrets(item, str(name), is_secret=is_secret, known=known)
            for name, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [mask_secrets(item, key, is_secret=is_secret, known=known) for item in value]
    if isinstance(value, str):
        return MASK if is_secret and value else mask_text(value, known)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return MASK if NUMERIC_SECRET_KEY.search(bare) else value
    return value
