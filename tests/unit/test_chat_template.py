"""Compares the shipped chat templates with texts written by hand, in which « and » enclose the assistant's part."""

from functools import cache
from typing import Any

import pytest
from support.tokenizers_trained import train, wrap

from ulysses_cli.data.store import TARGET
from ulysses_cli.data.tokenizing.encoder import Encoder, EncoderSettings
from ulysses_cli.plan.models.model_files import FOLDER, SHIPPED, read_template
from ulysses_cli.plan.problem import RecipeError
from ulysses_cli.readers.columns import read_sample
from ulysses_cli.readers.problems import BadRow

SYSTEM = {"role": "system", "content": "Be brief."}
CHAT = [
    {"role": "user", "content": "Hi "},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "2"},
]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
CALL = {"function": {"name": "add", "arguments": {"a": 1}}, "id": "c1"}
WORKING = [
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "2", "tool_call_id": "c1"},
    {"role": "assistant", "content": "It is 2."},
]
EXPECTED = {
    "chatml": (
        "<s><|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi <|im_end|>\n<|im_start|>assistant\n"
        "«Hello.<|im_end|>»\n<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n«2<|im_end|>»\n"
    ),
    "llama-3": (
        "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n«Hello.<|eot_id|>»"
        "<|start_header_id|>user<|end_header_id|>\n\n1 + 1?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n«2<|eot_id|>»"
    ),
    "mistral": "<s>[INST] Be brief.\n\nHi [/INST]« Hello.</s>»[INST] 1 + 1?[/INST]« 2</s>»",
    "gemma": (
        "<s><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\n«Hello.<end_of_turn>»\n"
        "<start_of_turn>user\n1 + 1?<end_of_turn>\n<start_of_turn>model\n«2<end_of_turn>»\n"
    ),
    "phi": (
        "<|system|>\nBe brief.<|end|>\n<|user|>\nHi <|end|>\n<|assistant|>\n«Hello.<|end|>»\n"
        "<|user|>\n1 + 1?<|end|>\n<|assistant|>\n«2<|end|>»\n"
    ),
    "qwen": (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi <|im_end|>\n<|im_start|>assistant\n"
        "«Hello.<|im_end|>»\n<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n«2<|im_end|>»\n"
    ),
}
WITH_TOOLS = {
    "mistral": (
        '<s>[AVAILABLE_TOOLS] [{"type": "function", "function": {"name": "add", "parameters": {}}}][/AVAILABLE_TOOLS]'
        '[INST] 1 + 1?[/INST]«[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "c1"}]</s>»'
        '[TOOL_RESULTS] {"content": "2", "call_id": "c1"}[/TOOL_RESULTS]« It is 2.</s>»'
    ),
    "qwen": (
        '<|im_start|>system\n# Tools\n\n<tools>\n{"type": "function", "function": {"name": "add", "parameters": {}}}\n'
        "</tools>\n\nA call is a JSON object with name and arguments between <tool_call> and </tool_call>.<|im_end|>\n"
        "<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n"
        '«<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>»\n'
        "<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n«It is 2.<|im_end|>»\n"
    ),
}


@cache
def make_tokenizer(name: str) -> Any:
    tokenizer = wrap(train("qwen"), chat_template=read_template(name).text, bos_token="<s>")
    tokenizer.add_tokens(list(SHIPPED[name].markers), special_tokens=True)
    return tokenizer


def show(name: str, messages: list[Any], tools: Any = None, *, only_said: bool = True) -> str:
    """Returns the text of the tokens, with runs of targets in « and »."""
    tokenizer = make_tokenizer(name)
    sample = read_sample("chat", {"messages": messages, "tools": tools})
    ids, flags = Encoder(tokenizer, EncoderSettings(assistant_only_loss=only_said)).encode(sample)
    is_target = [False, *((flags & TARGET) > 0).tolist(), False]
    parts = [
        ("«" if now and not before else "»" if before and not now else "") + tokenizer.decode([token])
        for before, now, token in zip(is_target, is_target[1:], ids.tolist(), strict=False)
    ]
    return "".join(parts) + "»" * is_target[-2]


def test_every_shipped_template_is_tested() -> None:
    assert {file.stem for file in FOLDER.glob("*.jinja")} == SHIPPED.keys() == EXPECTED.keys()


@pytest.mark.parametrize("name", SHIPPED)
def test_a_chat(name: str) -> None:
    assert show(name, [SYSTEM, *CHAT]) == EXPECTED[name]
    whole = EXPECTED[name].replace("»", "").replace("«", "")
    assert show(name, [SYSTEM, *CHAT], only_said=False) == f"«{whole}»"
    alone = show(name, CHAT)
    assert "Be brief." not in alone
    assert alone.count("«") == 2


@pytest.mark.parametrize("name", SHIPPED)
def test_a_prompt_ends_where_the_answer_begins(name: str) -> None:
    asked = make_tokenizer(name).apply_chat_template(CHAT[:1], tokenize=False, add_generation_prompt=True)
    answered = make_tokenizer(name).apply_chat_template(CHAT[:2], tokenize=False)
    answer = {"mistral": " Hello.</s>"}.get(name, f"Hello.{SHIPPED[name].end}")
    assert answered.removesuffix("\n") == asked + answer


@pytest.mark.parametrize("name", SHIPPED)
def test_tools_are_shown_or_refused(name: str) -> None:
    if name in WITH_TOOLS:
        assert show(name, WORKING, TOOLS) == WITH_TOOLS[name]
        lines = [{**turn, "content": "So."} if "tool_calls" in turn else turn for turn in WORKING]
        assert "So." in show(name, lines, TOOLS).partition("«")[2]
        return
    for messages, tools in ((CHAT, TOOLS), (WORKING, None)):
        with pytest.raises(BadRow, match=r"has no form for tools; data\.chat_template: qwen has one"):
            show(name, messages, tools)


@pytest.mark.parametrize("name", ["gemma", "mistral"])
def test_a_system_prompt_comes_first_or_is_merged(name: str) -> None:
    for messages in ([SYSTEM, CHAT[1]], [*CHAT, SYSTEM]):
        with pytest.raises(BadRow, match="in front of the first turn of the user, and no other"):
            show(name, messages)


def test_results_of_tools_share_a_turn() -> None:
    result = {"role": "tool", "content": "3"}
    shown = show("qwen", [WORKING[0], WORKING[1], WORKING[2], result, WORKING[3]], TOOLS)
    assert (
        "<|im_start|>user\n<tool_response>\n2\n</tool_response>\n<tool_response>\n3\n</tool_response><|im_end|>"
        in shown
    )


def test_chatml_begins_with_the_tokenizers_bos() -> None:
    tokenizer = wrap(train("qwen"), chat_template=read_template("chatml").text)
    assert tokenizer.apply_chat_template(CHAT[:1], tokenize=False) == "<|im_start|>user\nHi <|im_end|>\n"


def complain(value: str) -> str:
    with pytest.raises(RecipeError) as caught:
        read_template(value)
    (problem,) = caught.value.problems
    return str(problem).strip()


def test_text_that_is_no_template_is_refused(tmp_path: Any) -> None:
    file = tmp_path / "a.jinja"
    file.write_text("{% for m in messages %}\n{{ m.content }\n{% endfor %}\n")
    assert complain(str(file)) == (
        f"data.chat_template: {file}:2: unexpected '}}'\n\n"
        "hint: fix it: a chat template is Jinja, as transformers reads it"
    )
    file.write_text("model: {}\n")
    assert f"{file} never reads `messages`" in complain(str(file))
    file.write_bytes(b"{{ \xff }}")
    assert "is not UTF-8 text" in complain(str(file))


def test_features_of_transformers_templates_work() -> None:
    text = (
        "{% for m in messages %}{% if loop.index > 9 %}{% break %}{% endif %}{% generation %}{{ m | tojson }}"
        "{% endgeneration %}{% endfor %}{{ raise_exception('no') if false }}{{ strftime_now('%d') }}"
    )
    assert read_template(text).text == text
