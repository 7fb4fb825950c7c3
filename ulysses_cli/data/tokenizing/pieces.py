"""Finds places where a long text can be cut for the tokenizer, so that its pieces have the same tokens as the whole
text.

A cut is between a letter and white space. Cuts are allowed only if every stage of the tokenizer is known to separate
the two; otherwise the CutRule gives the reason, and texts stay whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from string import ascii_letters
from typing import Any

PIECE_CHARS = 1 << 18
NEIGHBOURHOOD = 256  # characters on each side of a cut; tokenized together and apart to check the cut
# Known alternatives of pre-tokenizer patterns. None of them matches a letter followed by white space, and each matches
# the same text up to a letter whether white space or nothing follows.
CONTRACTIONS = r"'s|'t|'re|'ve|'m|'ll|'d"
CASES = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
WORDS = {
    r" ?\p{L}+",
    r"[^\r\n\p{L}\p{N}]?\p{L}+",
    r"[^\r\n\p{L}\p{N}]?+\p{L}+",
    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
    rf"[^\r\n\p{{L}}\p{{N}}]?[{CASES[0]}]*[{CASES[1]}]+",
    rf"[^\r\n\p{{L}}\p{{N}}]?[{CASES[0]}]*[{CASES[1]}]+(?i:{CONTRACTIONS})?",
    rf"[^\r\n\p{{L}}\p{{N}}]?[{CASES[0]}]+[{CASES[1]}]*",
    rf"[^\r\n\p{{L}}\p{{N}}]?[{CASES[0]}]+[{CASES[1]}]*(?i:{CONTRACTIONS})?",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+",
}
SPACES = {r"\s+", r"\s"}
KNOWN = {
    *WORDS,
    *SPACES,
    *CONTRACTIONS.split("|"),
    f"(?i:{CONTRACTIONS})",
    r"'(?i:[sdmt]|ll|ve|re)",
    *(r"\p{N}", r"\p{N}+", r" ?\p{N}+", r"\p{N}{1,3}", r"\p{N}{1,3}+", r"\d", r"[0-9]", r"\d{1,3}"),
    r" ?[^\s\p{L}\p{N}]+",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r" ?[^\s\p{L}\p{N}]++[\r\n]*",
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n/]*",
    r" ?[\p{P}\p{S}]+[\r\n]*",
    *(r"\s*[\r\n]+", r"\s*[\r\n]", r"\s+(?!\S)", r"[一-龥぀-ゟ゠-ヿ]+"),
}
LOCAL_PRETOKENIZERS = {"Digits", "Punctuation", "UnicodeScripts"}  # look at single characters; join nothing over a cut
LOCAL_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "BertNormalizer", "Precompiled", "Nmt"}
CUT_BEFORE = {"any": " \n\t\r", "space": " "}


@dataclass(frozen=True)
class CutRule:
    """The characters before which a cut is allowed, or the reason why there is none. `continuation` is the tokenizer,
    as JSON, for all pieces but the first, if it differs. It would also leave out what belongs after an added token, so
    texts that hold one of `added` then stay whole. `barred` letters allow no cut after them."""

    before: str = ""
    reason: str = ""
    continuation: str = ""
    barred: frozenset[str] = frozenset()
    added: tuple[str, ...] = ()

    def find_cuts(self, text: str, target: int = PIECE_CHARS) -> list[int]:
        """Places about `target` characters apart."""
        places: list[int] = []
        if not self.before or len(text) <= 2 * target or any(token in text for token in self.added):
            return places
        pattern = re.compile(rf"(?<=[^\W\d_])(?=[{self.before}])")
        at = target
        while at < len(text) - target // 2:
            place = next((match.start() for match in pattern.finditer(text, at) if self._is_safe(text, match)), None)
            if place is None:
                break
            places.append(place)
            at = place + target
        return places

    def _is_safe(self, text: str, match: re.Match[str]) -> bool:
        letter = text[match.start() - 1]
        return letter not in self.barred and (letter < "\u0250" or "\u0370" <= letter < "\u0530" or _is_cjk(letter))


def _is_cjk(letter: str) -> bool:
    return "\u3041" <= letter <= "\u30fa" or "\u4e00" <= letter <= "\u9fff" or "\uac00" <= letter <= "\ud7a3"


class _NotProven(Exception):
    pass


def find_cut_rule(backend: str) -> CutRule:
    """Derives the rule from `backend`, the text of a tokenizer.json. With a stage that is unknown here, no cuts are
    allowed."""
    spec: dict[str, Any] = json.loads(backend)
    try:
        _check_added_tokens(spec.get("added_tokens") or [])
        parts = _walk(spec.get("normalizer"), "normalizers")
        spaces_are_bars = sum(_check_normalizer(part) for part in parts) > 0  # not any(): every part must be checked
        before, barred = _check_pretokenizer(spec.get("pre_tokenizer")), frozenset[str]()
        if before is None:
            before, barred = _check_vocabulary(spec["model"], spaces_are_bars)
        if spaces_are_bars:
            before = CUT_BEFORE["space"]
    except _NotProven as reason:
        return CutRule(reason=str(reason))
    continuation = _make_continuation(spec)
    if continuation is None:
        return CutRule(before, barred=barred)
    added = tuple(token["content"] for token in spec.get("added_tokens") or [])
    return CutRule(before, "", json.dumps(continuation), barred, added)


def list_parting_letters(tokenizer: Any) -> str:
    """The letters after which a space may begin a piece, whatever stands around them; '' where that is not proven, or
    where the first piece is read in another way. `tokenizer`: one of transformers'."""
    if not getattr(tokenizer, "is_fast", False):
        return ""
    rule = find_cut_rule(tokenizer.backend_tokenizer.to_str())
    return "" if rule.continuation or not rule.before else "".join(sorted(set(ascii_letters) - rule.barred))


def _walk(stage: Mapping[str, Any] | None, name: str) -> list[Mapping[str, Any]]:
    """The stage itself or, for a sequence, its parts in order."""
    if stage is None:
        return []
    if stage.get("type") != "Sequence":
        return [stage]
    return [part for inner in stage.get(name) or [] for part in _walk(inner, name)]


def _check_added_tokens(tokens: list[Mapping[str, Any]]) -> None:
    for token in tokens:
        content = token.get("content", "")
        if re.search(r"[^\W\d_]\s", content):
            raise _NotProven(f"the added token {content!r} holds a letter and white space")
        if token.get("rstrip") and content[-1:].isalpha():
            raise _NotProven(f"the added token {content!r} takes the white space after it")


def _check_normalizer(part: Mapping[str, Any]) -> bool:
    """Raises for a normalizer that is not known. Returns whether it replaces spaces by bars (▁)."""
    kind = part.get("type")
    if kind in LOCAL_NORMALIZERS or kind in ("Prepend", "Strip"):
        return False
    if kind == "Replace":
        pattern, content = part.get("pattern", {}), part.get("content", "")
        if pattern.get("String") == " " and content == "▁":
            return True
        if pattern.get("Regex") in (" {2,}", r"\s{2,}", " +") and content in (" ", "▁"):
            return content == "▁"
        if pattern.get("String") in ("``", "''", "\n", "\t"):
            return False
    raise _NotProven(f"its normalizer {kind} is not known to change each place by itself")


def _check_pretokenizer(stage: Mapping[str, Any] | None) -> str | None:
    """The white space before which it always splits after a letter; None if it does not always split."""
    before = None
    for part in _walk(stage, "pretokenizers"):
        kind = part.get("type")
        if kind == "ByteLevel":
            prefixed = CUT_BEFORE["space" if part.get("add_prefix_space", True) else "any"]
            cuts = prefixed if part.get("use_regex", True) else None
        elif kind in ("Whitespace", "WhitespaceSplit", "BertPreTokenizer"):
            cuts = CUT_BEFORE["any"]
        elif kind == "Metaspace":
            cuts = CUT_BEFORE["space"] if part.get("split", True) else None
        elif kind == "Split":
            cuts = _check_split(part)
        elif kind in LOCAL_PRETOKENIZERS:
            cuts = None
        else:
            raise _NotProven(f"its pre-tokenizer {kind} is not known to cut between a letter and white space")
        before = min(filter(None, (before, cuts)), key=len, default=None)
    return before


def _check_split(part: Mapping[str, Any]) -> str | None:
    pattern = part.get("pattern", {})
    if pattern.get("String") == " " and part.get("behavior") in ("MergedWithNext", "Isolated", "Removed"):
        return CUT_BEFORE["space"]
    if pattern.get("String") == " " and part.get("behavior") == "MergedWithPrevious":
        return None  # it splits after the space; if spaces are bars by now, it does not split at all
    alternatives = _split_alternatives(pattern.get("Regex", ""))
    form = (part.get("behavior"), part.get("invert", False))
    if form not in (("Isolated", False), ("Removed", True)) or not set(alternatives) <= KNOWN:
        unknown = next((pattern for pattern in alternatives if pattern not in KNOWN), part.get("behavior"))
        raise _NotProven(f"its pre-tokenizer splits by a pattern that is not known: {unknown}")
    cuts = WORDS & set(alternatives) and SPACES & set(alternatives)
    return CUT_BEFORE["any"] if cuts else None


def _split_alternatives(pattern: str) -> list[str]:
    """Splits a regular expression at the bars outside of brackets and groups."""
    alternatives = [""]
    depth = 0
    in_class = False
    at = 0
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            char = pattern[at : at + 2]
        elif in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
        elif char in "()":
            depth += 1 if char == "(" else -1
        at += len(char)
        if char == "|" and not depth and not in_class:
            alternatives.append("")
        else:
            alternatives[-1] += char
    return alternatives


def _check_vocabulary(model: Mapping[str, Any], spaces_are_bars: bool) -> tuple[str, frozenset[str]]:
    """The rule of a tokenizer without a splitting pre-tokenizer: if no token crosses a cut, no merge does. Letters that
    precede a space inside a token are barred."""
    if model.get("type") != "BPE" or model.get("dropout") or model.get("end_of_word_suffix"):
        raise _NotProven(f"its {model.get('type')} model reads the text as one word")
    if model.get("continuing_subword_prefix"):
        raise _NotProven("its model marks the pieces inside a word")
    space = "▁" if spaces_are_bars else " "
    vocabulary = model.get("vocab", {})
    if space not in vocabulary:
        raise _NotProven("its vocabulary has no space, and no pre-tokenizer cuts at one")
    barred = {letter for token in vocabulary for letter in re.findall(f"(.){space}", token)}
    return CUT_BEFORE["space"], frozenset(barred)


def _make_continuation(spec: dict[str, Any]) -> dict[str, Any] | None:
    """The same tokenizer without the stages that change the start of a text; None if there are none. (A Metaspace or
    ByteLevel adds a leading space only where there is none, and pieces begin with one.)"""
    parts = _walk(spec.get("normalizer"), "normalizers")
    kept = [part for part in parts if part["type"] != "Prepend"]
    kept = [{**part, "strip_left": False} if part["type"] == "Strip" else part for part in kept]
    if kept == parts:
        return None
    return {**spec, "normalizer": {"type": "Sequence", "normalizers": kept} if kept else None}
