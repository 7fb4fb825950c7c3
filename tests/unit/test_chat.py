"""Compares assistant_only_loss with a plain reader of the rendered text, character by character and token by token."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.refusals import explain
from support.templates import TEMPLATES
from support.tiers import count_examples, sample, sample_every
from support.tokenizers_trained import train, wrap
from syrupy.assertion import SnapshotAssertion

from ulysses_cli.data.store import TARGET, TURN
from ulysses_cli.data.tokenizing import chat
from ulysses_cli.data.tokenizing.chat import InexactTemplate, find_spans, make_render
from ulysses_cli.data.tokenizing.encoder import Encoder, EncoderSettings
from ulysses_cli.readers.columns import Chat, read_sample
from ulysses_cli.readers.problems import BadRow

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
WORDS = st.text("abc XY.,\n'é你 ", min_size=1, max_size=12).filter(str.strip)


def talk(texts: Sequence[str]) -> list[dict[str, str]]:
    """By the user and the assistant in turn."""
    return [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]


@cache
def make_tokenizer(name: str) -> Any:
    template = TEMPLATES[name]
    tokenizer = wrap(train("qwen"), chat_template=template.text)
    tokenizer.add_special_tokens({"additional_special_tokens": list(template.specials)})
    return tokenizer


@st.composite
def draw_chats(draw: st.DrawFn, name: str) -> dict[str, Any]:
    """Draws turns as a template may see them: a system prompt, rounds of tools, thoughts, the last turn by either
    side."""
    template = TEMPLATES[name]
    messages: list[dict[str, Any]] = []
    if "system" in template.roles and draw(st.booleans()):
        messages.append({"role": "system", "content": draw(WORDS)})
    for _ in range(draw(st.integers(1, 4))):
        messages.append({"role": "user", "content": draw(WORDS)})
        if template.has_tools and draw(st.booleans()):
            for _ in range(draw(st.integers(1, 2))):
                call = {"type": "function", "function": {"name": "add", "arguments": {"a": draw(st.integers(0, 9))}}}
                content = draw(WORDS | st.just("")) if "mistral" not in name else draw(WORDS)
                messages.append({"role": "assistant", "content": content, "tool_calls": [call]})
                messages.append({"role": "tool", "content": draw(WORDS)})
        thought = (
            f"<think>\n{draw(WORDS)}\n</think>\n\n" if name in ("qwen3", "thinking") and draw(st.booleans()) else ""
        )
        messages.append({"role": "assistant", "content": thought + draw(WORDS)})
    if draw(st.integers(0, 4)) == 0:
        messages.pop()
    return {"messages": messages, "tools": TOOLS if template.has_tools and draw(st.booleans()) else None}


def measure_tokens(tokenizer: Any, ids: list[int]) -> list[int]:
    """Returns the bytes of each token from its name: a special token's own, or one for each letter of a byte-level
    name."""
    names = tokenizer.convert_ids_to_tokens(ids)
    specials = set(tokenizer.all_special_tokens)
    return [len(name.encode()) if name in specials else len(name) for name in names]


@pytest.mark.parametrize("name", sample_every(5, TEMPLATES))
def test_targets_equal_those_of_the_plain_reader(name: str) -> None:
    tokenizer, template = make_tokenizer(name), TEMPLATES[name]
    encoder = Encoder(tokenizer, EncoderSettings(assistant_only_loss=True))

    @settings(max_examples=count_examples(60))
    @given(draw_chats(name))
    def check(row: dict[str, Any]) -> None:
        sample = read_sample("chat", row)
        text = make_render(tokenizer, sample.tools)(sample.messages)
        output = template.read(text)
        assert len(output) == sum(message["role"] == "assistant" for message in sample.messages)
        is_answer = sample.messages[-1]["role"] == "assistant"
        if is_answer and not text.rstrip().endswith(tuple(tokenizer.all_special_tokens)):
            text += tokenizer.eos_token  # a last turn without an end mark ends as texts do
            output[-1] = (output[-1][0], len(text))
        ids, flags = encoder.encode(sample)
        sizes = measure_tokens(tokenizer, ids.tolist())
        content = text.encode()
        assert sum(sizes) == len(content)
        is_said = np.zeros(len(content), bool)
        for start, stop in output:
            is_said[len(text[:start].encode()) : len(text[:stop].encode())] = True
        ends = np.cumsum(sizes)
        expected = [bool(is_said[end - size : end].any()) for end, size in zip(ends, sizes, strict=True)]
        assert ((flags & TARGET) > 0).tolist() == expected
        assert ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]

    check()


@pytest.mark.parametrize(
    "name", sample(TEMPLATES, quick=["llama3", "mistral-tools", "shipped qwen"], checked=[*TEMPLATES][::2])
)
def test_turns_rendered_together_give_the_spans_of_single_turns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make_tokenizer(name)

    def find(sample: Chat, text: str) -> Any:
        try:
            return find_spans(make_render(tokenizer, sample.tools), sample.messages, text, TEMPLATES[name].specials)
        except BadRow as error:
            return str(error)

    @settings(max_examples=count_examples(80))
    @given(
        draw_chats(name), st.lists(st.sampled_from(["", " a", "a ", "<", "<think>\n", "a\n\n", "User: "]), max_size=9)
    )
    def check(row: dict[str, Any], words: list[str]) -> None:
        sample = read_sample("chat", row)
        for message, word in zip(sample.messages, words, strict=False):
            message["content"] = word + message["content"]
        text = make_render(tokenizer, sample.tools)(sample.messages)
        together = find(sample, text)
        with monkeypatch.context() as patch:
            patch.setattr(chat.MarkedChat, "map_places", lambda *_: None)
            assert find(sample, text) == together

    check()


@pytest.mark.parametrize(
    "name", sample(["chatml", "llama3", "mistral", "gemma", "plain", "qwen3"], quick=["llama3", "qwen3"])
)
def test_a_long_chat_takes_few_renderings(name: str) -> None:
    turns = talk([f"turn {at}" for at in range(400)])
    whole = make_render(make_tokenizer(name), None)
    text, num_renderings = whole(turns), 0

    def render(messages: Any, *, prompt: bool = False, thinks: bool | None = None) -> str:
        nonlocal num_renderings
        num_renderings += 1
        return whole(messages, prompt=prompt, thinks=thinks)

    spans = find_spans(render, turns, text, TEMPLATES[name].specials)
    assert [text[start:stop] for start, stop in spans.answers] == [text[a:b] for a, b in TEMPLATES[name].read(text)]
    assert num_renderings <= 20


@pytest.mark.parametrize("name", ["chatml", "qwen3"])
def test_a_chat_may_be_cut_after_a_turn_of_the_assistant(name: str) -> None:
    tokenizer = make_tokenizer(name)
    encoder = Encoder(tokenizer, EncoderSettings(assistant_only_loss=True))
    ids, flags = encoder.encode(read_sample("chat", {"messages": talk("abcdef")}))
    cuts = np.flatnonzero(flags & TURN).tolist()
    assert len(cuts) == 2
    assert all(tokenizer.decode(ids[at:]).startswith("<|im_start|>user") for at in cuts)


COUNTING = "{% for m in messages %}{{ m.role }} {{ messages | length }}: {{ m.content }}\n{% endfor %}"
LATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ ' ' * (messages | length) }};{% endfor %}"
SILENT = "{% for m in messages if m.role == 'user' %}{{ m.content }}\n{% endfor %}"
TURNED = "{% for m in messages | reverse %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.mark.parametrize("template", [LATE, SILENT, TURNED])
def test_a_template_without_clear_spans_is_refused(template: str, snapshot: SnapshotAssertion) -> None:
    tokenizer = wrap(train("qwen"), chat_template=template)
    turns, render = talk("abcd"), make_render(tokenizer, None)
    with pytest.raises(InexactTemplate):
        find_spans(render, turns, render(turns), ())
    encoder = Encoder(tokenizer, EncoderSettings(assistant_only_loss=True))
    assert explain(encoder.encode, read_sample("chat", {"messages": turns}), error=BadRow) == snapshot(name="refusal")


def test_headings_without_a_generation_prompt_are_no_targets() -> None:
    """No prefix of this chat's text is the text of its first turns."""
    tokenizer = wrap(train("qwen"), chat_template=COUNTING)
    turns = talk("abcd")
    render = make_render(tokenizer, None)
    text = render(turns)
    assert [text[start:stop] for start, stop in find_spans(render, turns, text, ()).answers] == ["b\n", "d\n"]
