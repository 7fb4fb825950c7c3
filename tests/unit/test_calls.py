"""Calls of tools as models write them: read in each known form, compared as JSON, and asked for in held-out chats. The
forms are written by hand."""

import json
from typing import Any

import numpy as np
import pytest
from support.refusals import explain
from support.tokenizers_trained import train, wrap
from syrupy.assertion import SnapshotAssertion

from ulysses_cli.data.tokenizing.encoder import Encoder, EncoderSettings
from ulysses_cli.evaluate.prompts import Prompter
from ulysses_cli.evaluate.scoring import read_calls, score_calls, score_names, write_calls
from ulysses_cli.readers.columns import read_sample
from ulysses_cli.train.generation.questions import make_call_prompts

FIND = ("find", {"path": 'a "b"\nc', "n": 3, "deep": {"x": [1, True, None]}})
READ = ("read_it", {"flag": False})
OBJECT = r'{"path": "a \"b\"\nc", "n": 3, "deep": {"x": [1, true, null]}}'
FORMS = {
    "hermes": f'<tool_call>\n{{"name": "find", "arguments": {OBJECT}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "read_it", "arguments": {"flag": false}}\n</tool_call>',
    "a list": f'[TOOL_CALLS][{{"name": "find", "arguments": {OBJECT}}}, '
    '{"name": "read_it", "arguments": "{\\"flag\\": false}"}]</s>',
    "llama": f'{{"name": "find", "parameters": {OBJECT}}}; {{"name": "read_it", "parameters": {{"flag": false}}}}',
    "openai": f'[{{"type": "function", "function": {{"name": "find", "arguments": {OBJECT}}}}}, '
    '{"function": {"name": "read_it", "arguments": {"flag": false}}}]',
    "names before": f'[TOOL_CALLS]find[ARGS]{OBJECT}[TOOL_CALLS]read_it[CALL_ID]ab1[ARGS]{{"flag": false}}',
    "gpt-oss": f"<|channel|>commentary to=functions.find <|constrain|>json<|message|>{OBJECT}<|call|>"
    '<|start|>assistant<|channel|>commentary to=functions.read_it json<|message|>{"flag": false}<|call|>',
    "kimi": f"<|tool_call_begin|>functions.find:0<|tool_call_argument_begin|>{OBJECT}<|tool_call_end|>"
    '<|tool_call_begin|>functions.read_it:1<|tool_call_argument_begin|>{"flag": false}<|tool_call_end|>',
    "deepseek v3": f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n```json\n{OBJECT}\n```<｜tool▁call▁end｜>"
    '<｜tool▁call▁begin｜>function<｜tool▁sep｜>read_it\n```json\n{"flag": false}\n```<｜tool▁call▁end｜>',
    "deepseek v3.1": f"<｜tool▁call▁begin｜>find<｜tool▁sep｜>{OBJECT}<｜tool▁call▁end｜>"
    '<｜tool▁call▁begin｜>read_it<｜tool▁sep｜>{"flag": false}<｜tool▁call▁end｜>',
    "qwen3-coder": '<tool_call>\n<function=find>\n<parameter=path>\na "b"\nc\n</parameter>\n<parameter=n>\n3\n'
    '</parameter>\n<parameter=deep>\n{"x": [1, true, null]}\n</parameter>\n</function>\n</tool_call>\n'
    "<tool_call>\n<function=read_it>\n<parameter=flag>\nFalse\n</parameter>\n</function>\n</tool_call>",
    "minimax": '<minimax:tool_call>\n<invoke name="find">\n<parameter name="path">a "b"\nc</parameter>\n'
    '<parameter name="n">3</parameter><parameter name="deep">{"x": [1, true, null]}</parameter>\n</invoke>\n'
    '<invoke name="read_it"><parameter name="flag">false</parameter></invoke></minimax:tool_call>',
    "glm": '<tool_call>find\n<arg_key>path</arg_key>\n<arg_value>a "b"\nc</arg_value>\n<arg_key>n</arg_key>\n'
    '<arg_value>3</arg_value>\n<arg_key>deep</arg_key>\n<arg_value>{"x": [1, true, null]}</arg_value>\n</tool_call>\n'
    "<tool_call>read_it\n<arg_key>flag</arg_key>\n<arg_value>false</arg_value>\n</tool_call>",
    "gemma": '<|tool_call>call:find{deep:{x:[1,true,None]},n:3,path:<|"|>a "b"\nc<|"|>}<tool_call|>'
    "<|tool_call>call:read_it{flag:false}<tool_call|>",
    "python": '<|tool_call_start|>[find(path=\'a "b"\\nc\', n=3, deep={"x": [1, true, null]}), '
    "read_it(flag=False)]<|tool_call_end|>",
    "python with line ends": "[find(path='a \"b\"\nc', n=3, deep={'x': [1, True, None]}), read_it(flag=false)]",
}


@pytest.mark.parametrize("form", FORMS)
def test_calls_are_read_in_each_form(form: str) -> None:
    text = f"<think>\nShall I call find? {{}} [no(x=1)]\n</think>\n\nI look.\n{FORMS[form]}<|im_end|>"
    assert [(name, dict(arguments)) for name, arguments in read_calls(text)] == [FIND, READ]
    assert score_calls(text, [write_calls([READ, FIND])], {}) == 1, "calls beside each other have no order"
    assert score_calls(text, [write_calls([FIND])], {}) == 0
    assert score_names(text, write_calls([("read_it", {}), ("find", {})])) == 1


@pytest.mark.parametrize(
    "text",
    [
        "", "I found {it}, and [that]; see f(x).", '{"path": "a"}', "<think>\n" + FORMS["hermes"] + "\n</think>\n\nNo.",
        '{"name": "find"}', "[1, 2]", '<tool_call>{"name": "find", "arguments": {', "[find(path=a), 3]", "call:find{a",
        "<function=find><parameter=a>3</parameter>", "{" * 5000, "[" * 5000, "[a(" * 500,
    ],
)  # fmt: skip
def test_what_is_no_call_is_none(text: str) -> None:
    assert read_calls(text) == []


@pytest.mark.parametrize(
    ("arguments", "is_equal"),
    [
        ('{"n": 3.0, "a": "x"}', True), ('{"a": "x", "n": 3}', True), ('{"a": "x", "n": "3"}', False),
        ('{"a": "x", "n": true}', False), ('{"a": "x"}', False), ('{"a": "x", "n": 3, "b": null}', False),
        ('{"a": "X", "n": 3}', False),
    ],
)  # fmt: skip
def test_arguments_are_equal_as_json(arguments: str, is_equal: bool) -> None:
    text = f'<tool_call>{{"name": "find", "arguments": {arguments}}}</tool_call>'
    reference = write_calls([("find", {"a": "x", "n": 3})])
    assert score_calls(text, [reference], {}) == is_equal
    assert score_names(text, reference) == 1


TEMPLATE = """\
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content }}
{%- for call in m.tool_calls or [] %}{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}{%- endfor %}
{{- '<|im_end|>\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}


CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "Why?"}, call("find", path="a"), {"role": "tool", "content": "one"},
    {**call("read_it", n=3), "weight": 0}, {"role": "tool", "content": "two"}, call("find", path="b"),
    {"role": "tool", "content": "three"}, {"role": "assistant", "content": "So."},
]  # fmt: skip


def make_documents(template: str = TEMPLATE) -> tuple[Any, list[Any]]:
    tokenizer = wrap(train("qwen"), chat_template=template)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    encoder = Encoder(tokenizer, EncoderSettings(assistant_only_loss=True, on_rewritten_turns="keep"))
    sample = read_sample("chat", {"messages": [dict(message) for message in CHAT]})
    return tokenizer, encoder.encode_documents(sample)


def test_turns_with_calls_that_are_targets_are_asked_by_their_own_prompt(snapshot: SnapshotAssertion) -> None:
    tokenizer, documents = make_documents()
    prompts, notes = make_call_prompts(documents, tokenizer, 5, seed=0, limit=0)
    assert notes == snapshot
    for prompt, count, path in zip(prompts, (1, 5), ("a", "b"), strict=True):
        messages = [{key: value for key, value in message.items() if key != "weight"} for message in CHAT[:count]]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert list(prompt.tokens) == tokenizer(text, add_special_tokens=False)["input_ids"]
        assert json.loads(prompt.sample.references[0]) == [{"name": "find", "arguments": {"path": path}}]
        assert prompt.sample.max_new_tokens >= 2 * 20
    assert [prompt.name for prompt in prompts] == ["calls/0/0", "calls/0/1"]
    (drawn,), _ = make_call_prompts(documents, tokenizer, 1, seed=3, limit=0)
    assert drawn.tokens in [prompt.tokens for prompt in prompts]
    answer = tokenizer("<tool_call>", add_special_tokens=False)["input_ids"]
    prompter = Prompter(tokenizer, lambda messages, **_: f"{messages[0]['content']}", with_template=False)
    assert prompter.read_answer(drawn.sample, answer) == ("<tool_call>", True)


def test_chats_without_a_call_to_ask_for_are_refused(snapshot: SnapshotAssertion) -> None:
    tokenizer, documents = make_documents()
    _, unknown = make_documents(TEMPLATE.replace("(call.function | tojson)", "call.function.name + ' !'"))
    plain = [(np.zeros(4, np.uint16), None), (np.zeros(2, np.uint16), np.array([0, 5], np.uint8))]
    asked = ((documents, 20), (unknown, 0), (plain, 0))
    assert [explain(make_call_prompts, given, tokenizer, 5, seed=0, limit=limit) for given, limit in asked] == snapshot
