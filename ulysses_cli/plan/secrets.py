"""Hides what looks like a password or an access token before it is shown. Rather too much than too little."""

from __future__ import annotations

import re
from typing import Any

MASK = "***"
SECRET_KEY = re.compile(r"token|key|secret|passw|credential", re.I)
HARMLESS_KEY = re.compile(r"tokenizers?", re.I)  # a name or a version
NUMERIC_SECRET_KEY = re.compile(
    r"(token|key|secret|passw\w*|credentials?)$", re.I
)  # num_tokens, pad_token_id are counts
SECRET_TEXT = re.compile(
    r"\b(?:hf_|sk-|ghp_|gho_|ghs_|glpat-|github_pat_|xox[abprs]-|AKIA|ASIA|AIza|eyJ)[\w.\-]{6,}"
    r"|(?<=://)[^/\s@]+(?=@)"  # user:password@host
    r"|(?<=Bearer )\S+"
)
SECRET_PARAMETER = re.compile(r"([?&][^=&\s]*(?:token|key|secret|passw|sig|credential)[^=&\s]*=)[^&\s]+", re.I)


def mask_text(text: str) -> str:
    return SECRET_PARAMETER.sub(rf"\1{MASK}", SECRET_TEXT.sub(MASK, text))


def mask_secrets(value: Any, key: str = "", *, is_secret: bool = False) -> Any:
    """A copy of plain data without its secrets. What stands below a secret key is secret too."""
    bare = HARMLESS_KEY.sub("", key)
    is_secret = is_secret or bool(SECRET_KEY.search(bare))
    if isinstance(value, dict):
        return {mask_text(str(name)): mask_secrets(one, str(name), is_secret=is_secret) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [mask_secrets(one, key, is_secret=is_secret) for one in value]
    if isinstance(value, str):
        return MASK if is_secret and value else mask_text(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return MASK if NUMERIC_SECRET_KEY.search(bare) else value
    return value
