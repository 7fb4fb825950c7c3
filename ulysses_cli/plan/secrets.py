"""Hides what looks like a password or an access token before it is shown or written. Rather too much than too little.

A secret is known by its own look, by the name that it stands under, or, once collected, by its value anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

MASK = "***"
SECRET_KEY = re.compile(r"token|key|secret|passw|credential", re.I)
HARMLESS_KEY = re.compile(r"tokenizers?|added_tokens", re.I)  # a name or a version; words of a vocabulary
NUMERIC_SECRET_KEY = re.compile(
    r"(token|key|secret|passw\w*|credentials?)$", re.I
)  # num_tokens, pad_token_id are counts
SECRET_TEXT = re.compile(
    r"\b(?:hf_|sk-|ghp_|gho_|ghs_|glpat-|github_pat_|xox[abprs]-|AKIA|ASIA|AIza|eyJ)[\w.\-]{6,}"
    r"|(?<=://)[^/\s@]+(?=@)"  # user:password@host
    r"|(?<=Bearer )\S+"
)
SECRET_PARAMETER = re.compile(r"([?&][^=&\s]*(?:token|key|secret|passw|sig|credential)[^=&\s]*=)[^&\s]+", re.I)
MIN_SECRET_LETTERS = 6  # a shorter value under a secret name is a word such as `true`, and found in every text
# Names of the environment that hold secrets: HF_TOKEN, WANDB_API_KEY, AWS_SECRET_ACCESS_KEY
SECRET_VARIABLE = re.compile(r"(TOKEN|KEY|SECRET|PASSW(OR)?D|CREDENTIALS?)(_ID)?$", re.I)


def collect_secrets(recipe: Any, environ: Mapping[str, str]) -> frozenset[str]:
    """Values that a recipe or the environment names as secret: they may come up again in any message."""
    named = [value for name, value in environ.items() if SECRET_VARIABLE.search(name)]
    return frozenset(value for value in [*named, *_walk_secret(recipe, "", False)] if len(value) >= MIN_SECRET_LETTERS)


def _walk_secret(value: Any, key: str, is_secret: bool) -> Iterator[str]:
    is_secret = is_secret or _is_secret_key(key)
    if isinstance(value, Mapping):
        for name, one in value.items():
            yield from _walk_secret(one, str(name), is_secret)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _walk_secret(one, key, is_secret)
    elif isinstance(value, str) and is_secret and value != MASK:
        yield value


def _is_secret_key(key: str) -> bool:
    return bool(SECRET_KEY.search(HARMLESS_KEY.sub("", key)))


def mask_text(text: str, known: Collection[str] = ()) -> str:
    for secret in sorted(known, key=len, reverse=True):
        text = text.replace(secret, MASK)
    return SECRET_PARAMETER.sub(rf"\1{MASK}", SECRET_TEXT.sub(MASK, text))


def mask_secrets(value: Any, key: str = "", *, is_secret: bool = False, known: Collection[str] = ()) -> Any:
    """A copy of plain data without its secrets. What stands below a secret key is secret too."""
    bare = HARMLESS_KEY.sub("", key)
    is_secret = is_secret or _is_secret_key(key)
    if isinstance(value, dict):
        return {
            mask_text(str(name), known): mask_secrets(one, str(name), is_secret=is_secret, known=known)
            for name, one in value.items()
        }
    if isinstance(value, list | tuple):
        return [mask_secrets(one, key, is_secret=is_secret, known=known) for one in value]
    if isinstance(value, str):
        return MASK if is_secret and value else mask_text(value, known)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return MASK if NUMERIC_SECRET_KEY.search(bare) else value
    return value
