"""Tests `columns` of a data set: the file's own names of columns, by the names that are expected; and how data
sets of agents write chats."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.tokenizers_trained import train, wrap
from test_prepare import prepare, read_documents, write_rows

from ulysses_cli.data.tokenizing.encoder import Encoder
from ulysses_cli.plan.problem import RecipeError
from ulysses_cli.readers.columns import Reading, detect_kind, read_sample
from ulysses_cli.readers.problems import BadRow, DataError

QA = [{"question": "2+2?", "answer": "four", "prompt": 7}, {"question": "3+3?", "answer": "six"}]
NAMED = "data.datasets.0.columns={prompt: question, completion: answer}"


def test_named_columns_are_read_as_if_the_file_had_these_names(tmp_path: Path) -> None:
    write_rows(tmp_path, *({"prompt": row["question"], "completion": row["answer"]} for row in QA))
    plain = prepare(tmp_path)
    write_rows(tmp_path, *QA)
    named = prepare(tmp_path, NAMED)
    assert read_documents(named) == read_documents(plain) == ["2+2?four<|end|>", "3+3?six<|end|>"]
    counts = [each.report["sources"][0] for each in (plain, named)]
    assert all(count["kind"] == "completion" for count in counts)
    assert counts[0]["num_targets"] == counts[1]["num_targets"] < counts[0]["num_tokens"]


def test_other_names_make_other_tokens(tmp_path: Path) -> None:
    write_rows(tmp_path, *({"title": "a", "body": f"b{n}"} for n in range(3)))
    first = prepare(tmp_path, "data.datasets.0.columns={text: title}")
    second = prepare(tmp_path, "data.datasets.0.columns={text: body}")
    assert first.path != second.path
    assert read_documents(first)[0] == "a<|end|>"
    assert read_documents(second)[0] == "b0<|end|>"
    assert prepare(tmp_path, "data.datasets.0.columns={text: title}") == first


def test_nulls_of_a_table_reach_no_template_under_another_name(tmp_path: Path) -> None:
    from pyarrow import Table, parquet

    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "extra": {"x": 1}}]
    parquet.write_table(Table.from_pylist([{"dialog": turns}]), tmp_path / "d.parquet")
    words = (f"data.datasets.0.path={tmp_path / 'd.parquet'}", "data.datasets.0.columns={messages: dialog}")
    assert prepare(tmp_path, *words).report["sources"][0]["kind"] == "chat"


@pytest.mark.parametrize(
    ("columns", "key", "message", "hint"),
    [
        ("{prompt: question, completion: answer, tools: x}", "tools", "no row has a column `x`", "question, answer"),
        ("{text: answer, system: question}", "system", "is not used: the columns show rows of type text", "type"),
    ],
)  # fmt: skip
def test_a_name_that_no_row_has_is_a_mistake_in_the_recipe(
    tmp_path: Path, columns: str, key: str, message: str, hint: str
) -> None:
    write_rows(tmp_path, *QA)
    with pytest.raises(RecipeError) as raised:
        prepare(tmp_path, f"data.datasets.0.columns={columns}")
    (problem,) = raised.value.problems
    assert problem.key == f"data.datasets.0.columns.{key}"
    assert message in problem.message
    assert hint in problem.hint


def test_a_row_without_a_named_column_is_said_by_the_name_in_the_file(tmp_path: Path) -> None:
    write_rows(tmp_path, *QA, {"question": "4+4?", "reply": "eight"})
    with pytest.raises(DataError) as raised:
        prepare(tmp_path, NAMED)
    assert "column `answer` is missing; there is question, reply" in str(raised.value)
    with pytest.raises(DataError, match=r"question \+ wrong"):
        prepare(tmp_path, "data.datasets.0.columns={prompt: question, completion: wrong}")


@pytest.mark.parametrize("row", [{"prompt": "a", "completion": "b"}, {"question": "a"}, {}])
def test_the_expected_names_of_a_file_do_not_stand_in_for_named_columns(row: dict[str, Any]) -> None:
    with pytest.raises(BadRow):
        detect_kind(row, {"prompt": "question", "completion": "answer"})
    with pytest.raises(BadRow, match="is missing"):
        read_sample("completion", row, reading=Reading({"prompt": "question", "completion": "answer"}))


CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": None}}}
ANSWER = {"role": "assistant", "content": "done"}
ASKED = {"role": "user", "content": "q"}
SCHEMA = {"type": "function", "function": {"name": "f", "parameters": {}}}


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        (  # OpenHands
            {"trajectory": [ASKED, {"role": "assistant", "content": None, "tool_calls": [CALL]}]},
            [ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}],
        ),
        (  # SWE-agent
            {"trajectory": [{"role": "system", "system_prompt": "s", "text": None}, {"role": "ai", "text": "done"}]},
            [{"role": "system", "content": "s"}, ANSWER],
        ),
        (  # xLAM
            {"query": "q", "tools": "[]", "answers": '[{"name": "f", "arguments": {"a": null}}]'},
            [ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}],
        ),
        (  # swift, two calls at once
            {
                "messages": [
                    ASKED,
                    ANSWER,
                    *[{"role": "tool_call", "content": '{"name": "f", "arguments": {"a": null}}'}] * 2,
                    {"role": "tool_response", "content": {"x": 1}},
                ]
            },
            [ASKED, {**ANSWER, "tool_calls": [CALL, CALL]}, {"role": "tool", "content": '{"x": 1}'}],
        ),
        (  # glaive and APIGen-MT
            {
                "conversations": [
                    {"from": "human", "value": "q"},
                    {"from": "function_call", "value": '{"name": "f", "arguments": "{\\"a\\": null}"}'},
                    {"from": "observation", "value": None},
                ]
            },
            [ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": ""}],
        ),
        (
            {
                "messages": [
                    ASKED,
                    {
                        "role": "assistant",
                        "content": [{"type": "thinking", "thinking": "t"}, {"type": "text", "text": "done"}],
                    },
                    {"role": "assistant", "content": None, "thinking": "t"},
                    {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": ""}},
                ]
            },
            [
                ASKED,
                {**ANSWER, "reasoning_content": "t"},
                {"role": "assistant", "content": "", "thinking": "t"},
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}],
                },
            ],
        ),
    ],
    ids=["OpenHands", "SWE-agent", "xLAM", "swift", "glaive", "thoughts"],
)
def test_chats_of_agents(row: dict[str, Any], messages: list[Any]) -> None:
    assert read_sample(detect_kind(row), row).messages == messages


SAID = {"type": "function", "function": {"name": "f", "arguments": {"a": "b"}}}
WRITTEN = {"function": {"name": "f", "arguments": '{"a": "b"}'}, "id": "c1", "type": "function"}
ACT = {"role": "assistant", "content": "", "tool_calls": [{**SAID, "id": "c1"}]}
RESULT = {"role": "tool", "content": "r"}
# Rows in the forms of published data sets: their columns, keys and nulls, with words of our own.
PUBLISHED: dict[str, tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]] = {
    "CoderForge": (  # messages and tools are texts of JSON, calls OpenAI's
        {
            "trajectory_id": "t", "license": "mit", "tools": json.dumps([SCHEMA]),
            "messages": json.dumps([ASKED, {"role": "assistant", "content": None, "tool_calls": [WRITTEN]},
                                    {**RESULT, "tool_call_id": "c1", "name": "f"}, ANSWER]),
        },
        [ASKED, ACT, {**RESULT, "tool_call_id": "c1", "name": "f"}, ANSWER],
        {},
    ),
    "SWE-smith": (  # parts of text, and keys of the agent that templates do not read
        {
            "instance_id": "i", "resolved": True, "traj_id": "t", "patch": "p",
            "messages": json.dumps([
                {"role": "user", "content": [{"type": "text", "text": "q"}], "agent": "main", "message_type": "o"},
                {"role": "assistant", "content": "", "thought": "", "action": "f", "tool_calls": [WRITTEN]},
                {"role": "tool", "content": [{"type": "text", "text": "r"}], "tool_call_ids": ["c1"]},
            ]),
        },
        [
            {**ASKED, "agent": "main", "message_type": "o"}, {**ACT, "thought": "", "action": "f"},
            {**RESULT, "tool_call_ids": ["c1"]},
        ],
        {},
    ),
    "nebius SWE-agent": (
        {
            "instance_id": "i", "model_name": "m", "target": False, "exit_status": "submitted",
            "trajectory": [
                {"cutoff_date": "01.01.2023", "mask": False, "role": "system", "system_prompt": "s", "text": None},
                {"cutoff_date": None, "mask": False, "role": "user", "system_prompt": None, "text": "q"},
                {"cutoff_date": None, "mask": False, "role": "ai", "system_prompt": None, "text": "done"},
            ],
        },
        [
            {"role": "system", "content": "s", "cutoff_date": "01.01.2023"}, ASKED, ANSWER,
        ],
        {},
    ),
    "hermes": (  # calls stand in the text
        {
            "id": "h", "category": "c", "tools": json.dumps([SCHEMA]),
            "conversations": [
                {"from": "system", "value": "s"}, {"from": "human", "value": "q"},
                {"from": "gpt", "value": '<tool_call>\n{"name": "f"}\n</tool_call>'}, {"from": "tool", "value": "r"},
                {"from": "gpt", "value": "done"},
            ],
        },
        [
            {"role": "system", "content": "s"}, ASKED,
            {"role": "assistant", "content": '<tool_call>\n{"name": "f"}\n</tool_call>'}, RESULT, ANSWER,
        ],
        {},
    ),
    "Nemotron-SFT-Agentic": (
        {
            "model": "m", "parallel_tool_calls": False, "temperature": 1.0, "filter_reason": None, "tools": [SCHEMA],
            "chat_template_kwargs": {"thinking": True}, "metadata": {"uuid": "u"},
            "messages": [ASKED, {"role": "assistant", "content": "", "reasoning_content": "t", "tool_calls": [WRITTEN]},
                         {**RESULT, "tool_call_id": "c1"}],
        },
        [ASKED, {**ACT, "reasoning_content": "t"}, {**RESULT, "tool_call_id": "c1"}],
        {"thinking": True},
    ),
    "APIGen-MT": (
        {
            "system": "s", "tools": json.dumps([SCHEMA["function"]]),
            "conversations": [
                {"from": "human", "value": "q"},
                {"from": "function_call", "value": '{"name": "f", "arguments": {"a": "b"}}'},
                {"from": "observation", "value": "r"}, {"from": "gpt", "value": "done"},
            ],
        },
        [
            {"role": "system", "content": "s"}, ASKED,
            {"role": "assistant", "content": "", "tool_calls": [SAID]}, RESULT, ANSWER,
        ],
        {},
    ),
    "xLAM": (
        {
            "id": 1, "query": "q", "tools": json.dumps([SCHEMA["function"]]),
            "answers": '[{"name": "f", "arguments": {"a": "b"}}, {"name": "f", "arguments": {"a": "b"}}]',
        },
        [ASKED, {"role": "assistant", "content": "", "tool_calls": [SAID, SAID]}],
        {},
    ),
}  # fmt: skip


THOUGHT, TEXT = {"type": "thinking", "thinking": "t", "signature": "s"}, {"type": "text", "text": "done"}
USE = {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": "b"}}
RETURN = {"type": "tool_result", "tool_use_id": "c1", "content": "r"}
RETURNED = {**RESULT, "tool_call_id": "c1"}
ITEM = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": '{"a": "b"}'}
REASONING = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]}


def say(*parts: Any, role: str = "assistant", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": list(parts), **more}


# Turns in parts, and the messages that they are.
PARTS: dict[str, tuple[list[Any], list[dict[str, Any]]]] = {
    "Anthropic": (
        [say({"type": "text", "text": "q"}, role="user"), say(THOUGHT, TEXT, USE), say(RETURN, role="user"), say(TEXT)],
        [ASKED, {**ANSWER, "reasoning_content": "t", "tool_calls": ACT["tool_calls"]}, RETURNED, ANSWER],
    ),
    "Anthropic, two calls": (
        [ASKED, say(USE, {**USE, "id": "c2", "input": {}}),
         say({**RETURN, "content": [{"type": "text", "text": "r"}], "is_error": False},
             {"type": "tool_result", "tool_use_id": "c2", "is_error": True}, {"type": "text", "text": "q"},
             role="user"),
         {"role": "assistant", "content": "done"}],
        [ASKED, {**ACT, "tool_calls": [
            *ACT["tool_calls"], {"type": "function", "id": "c2", "function": {"name": "f", "arguments": {}}}]},
         RETURNED, {"role": "tool", "content": "", "tool_call_id": "c2", "is_error": True}, ASKED, ANSWER],
    ),
    "Responses": (
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "q"}]}, REASONING, ITEM,
         {"type": "function_call_output", "call_id": "c1", "output": "r"}, REASONING,
         {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "done"}]}],
        [{**ASKED, "type": "message"}, {**ACT, "reasoning_content": "t"}, RETURNED,
         {**ANSWER, "type": "message", "reasoning_content": "t"}],
    ),
    "Responses, two calls": (
        [ASKED, ANSWER, ITEM, ITEM, {"type": "function_call_output", "call_id": "c1",
                                     "output": [{"type": "input_text", "text": "r"}]}],
        [ASKED, {**ANSWER, "tool_calls": ACT["tool_calls"] * 2}, RETURNED],
    ),
    "Mistral": ([ASKED, say({"type": "thinking", "thinking": [{"type": "text", "text": "t"}]}, TEXT)],
                [ASKED, {**ANSWER, "reasoning_content": "t"}]),
    "a refusal": ([ASKED, say({"type": "refusal", "refusal": "done"})], [ASKED, ANSWER]),
}  # fmt: skip


@pytest.mark.parametrize("name", PARTS)
def test_turns_in_parts(name: str) -> None:
    turns, messages = PARTS[name]
    for form in (turns, json.dumps(turns)):
        sample = read_sample("chat", {"messages": form})
        assert sample.messages == messages
        assert not sample.flags


def test_what_stands_beside_turns_in_parts() -> None:
    tool = SCHEMA["function"]
    flat = {**{name: value for name, value in tool.items() if name != "parameters"}, "input_schema": tool["parameters"]}
    row = {"messages": [ASKED, ANSWER], "system": [{"type": "text", "text": "s"}]}
    for given in (flat, {**flat, "type": "custom"}, {**tool, "type": "function"}):
        sample = read_sample("chat", {**row, "tools": [given]})
        assert sample.tools == [SCHEMA]
        assert sample.messages[0] == {"role": "system", "content": "s"}


@pytest.mark.parametrize(
    ("turns", "words"),
    [
        ([ASKED, say(USE, TEXT)], "turn 2: text stands after a call, where templates write it before; make two turns"),
        ([ASKED, say(TEXT, THOUGHT)], "turn 2: a thought stands after text, where templates write it before"),
        ([say(TEXT, RETURN, role="user")], "turn 1: the result of a call stands after text"),
        ([ASKED, say(RETURN)], "turn 2 holds a part that is not text: tool_result"),
        ([say(USE, role="user")], "turn 1 holds a part that is not text: tool_use"),
        ([say(THOUGHT, role="user")], "turn 1 holds a part that is not text: thinking"),
        ([ASKED, say({"type": "redacted_thinking", "data": "x"}, TEXT)], "not text: redacted_thinking"),
        ([say({**RETURN, "content": [{"type": "image", "source": {}}]}, role="user")], "not text: image"),
        ([say({**RETURN, "content": 5}, role="user")], "turn 1: the result of a call is int, not text or parts"),
        ([ASKED, say(USE, tool_calls=[WRITTEN])], "turn 2 holds calls in its content and beside it"),
        ([ASKED, say({**USE, "name": None})], "turn 2: a tool call has no name"),
        ([ASKED, {**REASONING, "content": None}], "turn 2 is a thought of which only a summary is there; leave it out"),
        ([REASONING, ASKED], "turn 2 follows a thought and is no answer without one"),
        ([ASKED, REASONING], "column `messages` ends with a thought that no answer follows"),
        ([say(RETURN, role="user", train=1)], r"turn 1 \(tool\) cannot be a target"),
    ],
)
def test_parts_whose_meaning_is_not_certain_are_refused(turns: list[Any], words: str) -> None:
    with pytest.raises(BadRow, match=words):
        read_sample("chat", {"messages": turns})


@pytest.mark.parametrize("name", PUBLISHED)
def test_rows_of_published_data_sets(name: str) -> None:
    row, messages, variables = PUBLISHED[name]
    sample = read_sample(detect_kind(row), row)
    assert sample.messages == messages
    assert sample.settings == variables
    assert sample.tools == ([SCHEMA] if "tools" in row else None)
    assert not sample.flags


@pytest.mark.parametrize(
    "tools", [[SCHEMA], [json.dumps(SCHEMA)], json.dumps([SCHEMA]), json.dumps([SCHEMA["function"]])]
)
def test_tools_in_all_their_forms(tools: Any) -> None:
    assert read_sample("chat", {"messages": [ASKED, ANSWER], "tools": tools}).tools == [SCHEMA]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"arguments": {}}, "a tool call has no name"),
        ({"name": "f", "arguments": "[1]"}, "the arguments of a tool call are a list, not a mapping"),
        ({"name": "f", "arguments": "{"}, "arguments of a tool call is not valid JSON"),
    ],
)
def test_calls_that_are_none(call: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRow, match=words):
        read_sample("chat", {"messages": [ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}]})


def test_a_thought_has_the_name_that_the_template_reads() -> None:
    template = "{%- for m in messages %}{{- m.role + ':' + (m.thinking or '') + m.content }}{%- endfor %}"
    template += "{%- if add_generation_prompt %}{{- 'assistant:' }}{%- endif %}"
    encoder = Encoder(wrap(train("qwen"), chat_template=template))
    for name in ("reasoning_content", "reasoning", "thinking"):
        ids, _ = encoder.encode(read_sample("chat", {"messages": [ASKED, {**ANSWER, name: "hm "}]}))
        assert encoder.tokenizer.decode(ids) == "user:qassistant:hm done</s>"
        assert not encoder.lost
