"""Models that think before they answer. By default they are asked to answer at once: an answer has as many tokens as
its task gives it, and a thought would use them up. With tokens of its own for the thought, only what follows it counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ulysses_cli.plan.models.chat_template import THINKING_SWITCHES, THOUGHT_MARKS

# gpt-oss: a turn begins with the name of its channel, and answers stand in the last one.
TURN, ANSWER_CHANNEL = "<|start|>assistant", "<|channel|>final<|message|>"
THOUGHTS = (*THOUGHT_MARKS, ("<|channel|>analysis", ANSWER_CHANNEL))
# Takes messages and settings of tokenizer.apply_chat_template, returns the text: data/tokenizing/renderer.py, within
# bounds. A template is a program that comes with the model.
RenderText = Callable[..., str]


def render_question(render: RenderText, messages: Sequence[Mapping[str, str]], *, thinks: bool = False) -> str:
    """The conversation in the model's chat template, up to where the answer begins, or the thought before it."""
    text = _render(render, messages, **dict.fromkeys(THINKING_SWITCHES, thinks))
    if thinks:
        return text
    if text.endswith(TURN):
        return text + ANSWER_CHANNEL
    begun = text.rstrip()
    for opening, closing in THOUGHT_MARKS:
        if begun.endswith(opening):  # the template begins a thought whatever it is told
            return f"{begun}\n\n{closing}\n\n"
    return text


QUESTION = ({"role": "user", "content": "?"},)


def thinks_by_itself(render: RenderText) -> bool:
    """Whether the model would begin with a thought if it were not asked to answer at once."""
    return render_question(render, QUESTION) != _render(render, QUESTION)


def can_think(render: RenderText) -> bool:
    """Whether the chat template knows of thoughts."""
    return render_question(render, QUESTION) != render_question(render, QUESTION, thinks=True)


def find_answer(prompt: str, text: str) -> str | None:
    """What follows the last thought in a model's text. None where a thought has begun and not ended. `prompt`: a
    template may begin the thought there."""
    ends = [closing for _, closing in THOUGHTS if closing in text]
    if ends:
        return text.rpartition(ends[0])[2]
    is_open = any(opening in text or prompt.rstrip().endswith(opening) for opening, _ in THOUGHTS)
    return None if is_open else text


def _render(render: RenderText, messages: Sequence[Mapping[str, str]], **settings: bool) -> str:
    return render(messages, add_generation_prompt=True, **settings)
