"""Asks models that think to answer at once: an answer has as many tokens as its task gives it, and a model that thinks
first would use them up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# What chat templates read to leave thinking out. A template that reads neither ignores both.
OFF = {"enable_thinking": False, "thinking": False}
MARKERS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))
# gpt-oss: a turn begins with the name of its channel, and answers stand in the last one.
TURN, ANSWER_CHANNEL = "<|start|>assistant", "<|channel|>final<|message|>"


def render_question(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> str:
    """The conversation in the tokenizer's chat template, up to where the answer begins."""
    text = _render(tokenizer, messages, **OFF)
    if text.endswith(TURN):
        return text + ANSWER_CHANNEL
    begun = text.rstrip()
    for opening, closing in MARKERS:
        if begun.endswith(opening):  # the template begins a thought whatever it is told
            return f"{begun}\n\n{closing}\n\n"
    return text


def can_think(tokenizer: Any) -> bool:
    """Whether the model would begin with a thought if it were not asked to answer at once."""
    question = [{"role": "user", "content": "?"}]
    return render_question(tokenizer, question) != _render(tokenizer, question)


def _render(tokenizer: Any, messages: Sequence[Mapping[str, str]], **settings: bool) -> str:
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **settings)
    return text
