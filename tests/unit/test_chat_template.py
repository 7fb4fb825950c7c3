"""Tests the shipped chat templates, whose texts are in prepared.txt, and templates of the user."""

from functools import cache
from typing import Any

import pytest
from support.messages import PREPARED
from support.tokenizers_trained import train, wrap

from ulysses_cli.plan.models.model_files import FOLDER, SHIPPED, read_template

CHAT = [{"role": "user", "content": "Hi "}, {"role": "assistant", "content": "Hello."}]


@cache
def make_tokenizer(name: str) -> Any:
    tokenizer = wrap(train("qwen"), chat_template=read_template(name).text, bos_token="<s>")
    tokenizer.add_tokens(list(SHIPPED[name].markers), special_tokens=True)
    return tokenizer


def test_every_shipped_template_is_tested() -> None:
    """In prepared.txt, as a chat with its targets and as one with tools."""
    assert {file.stem for file in FOLDER.glob("*.jinja")} == SHIPPED.keys()
    asked = PREPARED.blocks["shipped chat templates"]
    assert all(asked.count(f" data.chat_template={name} ") >= 2 for name in SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_prompt_ends_where_the_answer_begins(name: str) -> None:
    asked = make_tokenizer(name).apply_chat_template(CHAT[:1], tokenize=False, add_generation_prompt=True)
    answered = make_tokenizer(name).apply_chat_template(CHAT, tokenize=False)
    answer = {"mistral": " Hello.</s>"}.get(name, f"Hello.{SHIPPED[name].end}")
    assert answered.removesuffix("\n") == asked + answer


def test_chatml_begins_with_the_tokenizers_bos() -> None:
    tokenizer = wrap(train("qwen"), chat_template=read_template("chatml").text)
    assert tokenizer.apply_chat_template(CHAT[:1], tokenize=False) == "<|im_start|>user\nHi <|im_end|>\n"


def test_features_of_transformers_templates_work() -> None:
    text = (
        "{% for m in messages %}{% if loop.index > 9 %}{% break %}{% endif %}{% generation %}{{ m | tojson }}"
        "{% endgeneration %}{% endfor %}{{ raise_exception('no') if false }}{{ strftime_now('%d') }}"
    )
    assert read_template(text).text == text
